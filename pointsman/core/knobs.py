"""Knobs: a field of `SchedulerConfig` declares its range, its option, and the values that a search of settings tries.

    max_num_seqs: Annotated[
        int,
        AtLeast(1),
        Option("Steps", "Maximum number of requests that run at once"),
        Tried((8, 16, 32, 64), rank=2),
    ] = 256

`scheduler_knobs` in `core/config.py` returns the declarations. The following are generated from the declarations, so
that a new field needs no code there:

| generated | where |
| --- | --- |
| checks of the ranges; `bool` and `Literal` are ranges themselves | `SchedulerConfig` |
| options of the command line, keys of its configuration file, arguments on Ray | `cli/scheduler_options.py` |
| settings that `pointsman tune` searches | `sim/tunables.py` |
| knobs that the drop-in for vLLM takes | `integrations/vllm/settings.py` |
| the table in docs/reference/configuration.md | `scripts/write_knobs.py` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pointsman.core.errors import ConfigError
from pointsman.core.state.numbers import MAX_INT

# ---------------------------------------------------------------------- ranges


@dataclass(frozen=True, slots=True)
class AtLeast:
    """An integer from `least` to `MAX_INT`."""

    least: int
    of: str = ""
    """Unit that the integer counts, such as "tokens", for the error message; needed if the knob may also be a word."""

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {self.least}")
        if not self.least <= value <= MAX_INT:
            raise ConfigError(f"{name} is {value}; it must be between {self.least} and {MAX_INT}")


@dataclass(frozen=True, slots=True)
class ShareOf:
    """A number from 0 to less than 1, as a share of `whole`."""

    whole: str

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, (int, float)):
            raise ConfigError(
                f"{name} is {value!r}; it must be a number from 0 to less than 1, as a share of {self.whole}"
            )
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name} is {value}; it must be from 0 to less than 1, as a share of {self.whole}")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A finite number of seconds above 0."""

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value!r}; give a number of seconds above 0, or None for no limit")


Range: TypeAlias = AtLeast | ShareOf | Seconds
"""Range of a knob; its `check` raises `ConfigError` for a value out of range."""


@dataclass(frozen=True, slots=True)
class PolicyOf:
    """The range of a knob that is a policy, or a list of policies, of one kind."""

    kind: str
    """Kind of the policy: a key of `KINDS` in `core/policy/registry.py`."""

    def check(self, given: object) -> None:
        """Raise a ConfigError if the registry has no such policy."""
        for check in policy_checks:
            check(self.kind, given)


policy_checks: list[Callable[[str, Any], None]] = []
"""Functions that check (kind, policy). The registry of policies, which imports this module, adds its check when it is
imported."""


# ---------------------------------------------------------------------- options, and values of a search


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option that sets a knob."""

    panel: str
    """Title of the option's section on the help page."""
    help: str
    """Effect of the option, in one sentence without a full stop. The help page adds the default."""
    default: str | None = None
    """Default in words; None: the default value of the field, if it is readable."""
    flag: str | None = None
    """Name of the option, such as "--reserve"; None: derived from the field's name."""
    metavar: str | None = None
    """Placeholder for the value on the help page; None: derived from the field's type."""
    is_simulated: bool = True
    """Whether the simulator has the option too; False: the knob has no effect without a real model."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The values that a search of settings (`pointsman tune`) tries."""

    values: tuple[Any, ...] = ()
    """Values to try, in order; (): all registered policies, for a knob that is a policy."""
    is_ordered: bool = True
    """Whether neighbouring values have similar effects."""
    is_for_short_pool: bool = False
    """Whether the knob matters only if KV blocks run out."""
    rank: float = math.inf
    """Position of the knob in the order in which a search tries settings; the settings with the largest effect are
    tried first."""
    first: tuple[Any, ...] = ()
    """Values that a search tries first, in all combinations with the `first` values of other settings; (): only the
    default."""


# ---------------------------------------------------------------------- knobs


@dataclass(frozen=True, slots=True)
class Knob:
    """A declared field of `SchedulerConfig`."""

    name: str
    default: Any
    """Default value; `dataclasses.MISSING`: the field is required."""
    kinds: tuple[Any, ...]
    """Types of the knob's values, except None and words; for example `(int,)`."""
    words: tuple[str, ...]
    """Allowed words: the choices of the field's `Literal`."""
    is_optional: bool
    """Whether the value may be None."""
    range: Range | None
    policy: PolicyOf | None
    option: Option | None
    tried: Tried | None

    @property
    def is_list_of_policies(self) -> bool:
        """Whether the value is a list of policies."""
        return self.policy is not None and tuple in self.kinds

    def check(self, value: object) -> None:
        """Check that the value is in range.

        Raises:
            ConfigError: the value is out of range.
        """
        if value is None and self.is_optional:
            return
        if bool in self.kinds:
            if not isinstance(value, bool) and value not in self.words:
                raise ConfigError(f"{self.name} is {value!r}; it must be {_in_words('True', 'False', *self._quoted)}")
        elif value in self.words:
            return
        elif self.words and not self.kinds:
            raise ConfigError(f"{self.name} is {value!r}; choose {_in_words(*self._quoted)}")
        elif self.words and isinstance(value, str):
            counted = self.range.of if isinstance(self.range, AtLeast) else ""
            number = f"a number of {counted}" if counted else "a number"
            raise ConfigError(f"{self.name} is {value!r}; give {number}, or {_in_words(*self._quoted)}")
        elif self.range is not None:
            self.range.check(self.name, value)

    @property
    def _quoted(self) -> list[str]:
        return [f'"{word}"' for word in self.words]


def declared_in(config: type[Any]) -> Mapping[str, Knob]:
    """The knobs that the fields of a dataclass declare, keyed by field name, in the order of the fields."""
    hints = get_type_hints(config, include_extras=True)
    return MappingProxyType({field.name: _knob(field, hints[field.name]) for field in fields(config)})


def _knob(field: Field[Any], hint: Any) -> Knob:
    declared: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        declared = tuple(rest)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return Knob(
        name=field.name,
        default=field.default,
        kinds=tuple(
            get_origin(each) or each for each in members if get_origin(each) is not Literal and each != NoneType
        ),
        words=tuple(word for each in members if get_origin(each) is Literal for word in get_args(each)),
        is_optional=NoneType in members,
        range=_first_of_type(Range, declared),
        policy=_first_of_type(PolicyOf, declared),
        option=_first_of_type(Option, declared),
        tried=_first_of_type(Tried, declared),
    )


def _first_of_type(kind: Any, declared: tuple[Any, ...]) -> Any:
    return next((each for each in declared if isinstance(each, kind)), None)


def _in_words(*choices: str) -> str:
    """The choices as a list in words: "a, b or c"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
