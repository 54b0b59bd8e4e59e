"""What is a policy? A decision that can be exchanged: its name, its parameters, what it reads and what it is told.

    kind      what it decides                                    its interface               the built-in ones
    order     which waiting request is next                      `state/interfaces.py`       `order.py`
    victim    which running request is preempted for memory      `state/interfaces.py`       `victim.py`
    reserve   how many blocks an admission leaves free           `reserve.py`                `reserve.py`
    limit     how many tokens a request, or a step, advances     `gate.py`                   `limits.py`
    eviction  which cached blocks are evicted last               `state/interfaces.py`       `eviction.py`

A policy is given by name, with parameters (`shortest-prefill:ageing=200`), or as an object; `registry.py` finds it. It
reads a `View` and never moves a request. It is deterministic: it reads no clock, sorts stably, and iterates over no
set. A policy of another package is guarded (`guard.py`): if it raises, or breaks its contract, the step fails with the
policy's name, and no request is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.state.events import Listener
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request

Value: TypeAlias = bool | int | float | str


class Parameter(NamedTuple):
    """One parameter of a policy. Its type is that of the default."""

    name: str
    default: Value
    low: float | None = None
    """Least value; None: no bound, or no number."""
    high: float | None = None
    choices: tuple[Value, ...] = ()
    """All values that there are; empty: any within the bounds."""
    tried: tuple[Value, ...] = ()
    """Values that a search tries (`pointsman tune`), in order."""
    doc: str = ""


class Policy(Listener):
    """Base of the policies. It is a listener too: it may override any event of `state/events.py`.

    A subclass has a `name` and a `kind`; the first line of its docstring is shown in lists. Its constructor takes the
    parameters as keywords.
    """

    kind: ClassVar[str] = ""
    name: str = ""
    version: ClassVar[int] = 1
    """Raised when the same calls lead to other decisions than before; a recording replays with the same version."""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    reads: ClassVar[frozenset[str]] = frozenset()
    """What it reads that requests may say of themselves: "priority", "tenant", "ttft_target",
    "retention"."""

    def attach(self, view: View) -> None:
        """The policy serves one scheduler from now on, and may keep its view. Called again when a recording begins: it
        then forgets what it has learned, as a replay begins without."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps, in which every running request decodes one token and nothing
        else happens, it decides as now. 0: every step is decided on its own."""
        return 0

    def on_advanced(
        self, requests: tuple[Request, ...], rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> None:
        """These requests, in these rows, advance by so many tokens ([n] int64), in one step or in several at once."""

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        """A step took so long: from when it began, or the step before it ended, to when its result was there."""


class StepLoad(NamedTuple):
    """What a step computed."""

    num_tokens: int
    num_requests: int
    num_context_tokens: int
    """Computed tokens of its requests, its own included: the KV that is read."""
    num_prefill_tokens: int
    """Of its tokens, those beyond one of each request."""
    num_attended_tokens: int
    """Over its tokens: positions that each attends to, its own included. Equal to the context where each request
    computes one token."""


def spec_of(policy: object) -> str:
    """How a policy is written: its name, and its parameters that are not the default."""
    return written(policy.name, getattr(policy, "_given_parameters", {}))  # type: ignore[attr-defined]


def written(name: str, given: Mapping[str, Value]) -> str:
    """How a policy with these parameters is written."""
    return name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")
