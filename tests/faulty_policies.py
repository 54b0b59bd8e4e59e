"""Policies of another package that fail, one of each kind. Each works until its method `at` was called `after` times,
and always fails then.

`install` makes a package of them, which hosts find by its entry points.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pointsman.core.policy import registry
from pointsman.core.policy.eviction import LRU
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.limits import Limit
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.policy.reserve import Reserve
from pointsman.core.policy.victim import Latest

WORDS = "nothing can be divided by it"
CONSTRUCTOR = "constructor"
EVENTS = ("on_added", "on_queued", "on_admitted", "on_preempted", "on_finished", "on_step", "on_update", "on_advanced")


class Sound:
    """Base of all kinds."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("at", "nothing", doc="the method that fails"),
        Parameter("after", 0, 0, doc="calls of it that are sound"),
    )
    methods: ClassVar[tuple[str, ...]] = ()

    def __init__(self, at: str = "nothing", after: int = 0) -> None:
        super().__init__()
        if at == CONSTRUCTOR:
            raise ZeroDivisionError(WORDS)
        self._at, self._num_left = at, after

    def _note(self, method: str) -> None:
        if method == getattr(self, "_at", ""):  # the constructor of its base may call it
            self._num_left -= 1
            if self._num_left < 0:
                raise ZeroDivisionError(WORDS)


def _failing(base: type[Policy], methods: tuple[str, ...]) -> type[Policy]:
    """A subclass of `base` in which any of the methods may fail."""

    def method_called(method: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            self._note(method)
            sound = getattr(super(made, self), method, None)
            return None if sound is None else sound(*arguments)  # `attach` is optional

        return call

    methods = (*methods, "attach", *EVENTS)
    own: dict[str, Any] = {method: method_called(method) for method in methods}
    made: type[Policy] = type(base.__name__, (Sound, base), {**own, "name": f"faulty-{base.kind}", "methods": methods})
    return made


class _NoBlocks(Reserve):
    def blocks(self, request: Any, demand: Any, view: Any) -> int:
        return 0


class _Retaining(LRU):
    share = 0.5


Order = _failing(
    FirstComeFirstServed,
    (
        "push",
        "key",
        "pop",
        "put_back",
        "peek",
        "remove",
        "position",
        "reason",
        "__len__",
        "__contains__",
        "guaranteed_steps",
    ),
)
Victim = _failing(Latest, ("choose",))
KeepsFree = _failing(_NoBlocks, ("blocks",))
Bound = _failing(
    Limit, ("open_step", "open_queue", "check", "clip", "commit", "release", "lacks_step_time", "guaranteed_steps")
)
Evicts = _failing(_Retaining, ("started", "retained"))

POLICIES = (Order, Victim, KeepsFree, Bound, Evicts)
OPTIONS = {"order": "order", "victim": "victim", "reserve": "reserves", "limit": "token_limits", "eviction": "eviction"}
"""By kind, the field of the scheduler's configuration."""
WHERE = [(policy.kind, at) for policy in POLICIES for at in (CONSTRUCTOR, *policy.methods)]  # type: ignore[attr-defined]
"""Each place where a policy may fail."""
CASES = [
    ("victim", "choose", 0),
    ("victim", "choose", 3),
    ("order", "key", 0),
    ("order", "key", 14),
    ("limit", "open_step", 100),
    ("eviction", "on_step", 100),
    *((policy.kind, CONSTRUCTOR, 0) for policy in POLICIES),
]
"""(kind, method, sound calls before): failures that replace the policy in every host."""


def knob(kind: str, at: str, after: int = 0) -> dict[str, Any]:
    """The configuration fields for this policy."""
    spec = f"faulty-{kind}:at={at}" + (f",after={after}" if after else "")
    field = OPTIONS[kind]
    return {field: [spec] if field in ("reserves", "token_limits") else spec}


def install(folder: Path) -> Path:
    """Make a folder for `sys.path` with the package of these policies; `sys.path` also needs the repository root."""
    information = folder / "faulty_policies-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-policies\nVersion: 1.0\n")
    lines = [f"{policy.name} = {__name__}:{_names()[policy]}" for policy in POLICIES]
    (information / "entry_points.txt").write_text("\n".join(["[pointsman.policies]", *lines, ""]))
    return folder


def _names() -> dict[Any, str]:
    return {value: name for name, value in globals().items() if isinstance(value, type)}


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Install them for this process."""
    sys.path.insert(0, str(install(folder)))
    registry._installed.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        registry._installed.cache_clear()


def formatted(records: Iterable[logging.LogRecord]) -> list[str]:
    """These records as in a log, each with its traceback."""
    return [logging.Formatter().format(record) for record in records]


def check_log(log: list[str], kind: str, *, at_start: bool) -> None:
    """Check that the log has one traceback, of the policy's own error, and then the replacement."""
    about = [line for line in log if f"{kind} 'faulty-{kind}:at=" in line]
    assert "".join(log).count("Traceback") == 1 and Path(__file__).name in about[0]
    assert ["decides in its place from now on" in line for line in about] == [False] * (len(about) - 1) + [True]
    assert len(about) == (1 if at_start else 3)
