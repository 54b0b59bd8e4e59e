"""The registry: looks up policies by kind and name, both built-in policies and those of installed packages.

    make("order", "fcfs")                           a new policy by name
    make("order", "shortest-prefill:ageing=200")    with parameters
    make("order", MyOrder())                        the object itself
    known("order")                                  {name: class}

A package adds policies as entry points of the group `pointsman.policies`. An entry point loads a subclass of `Policy`
with the `kind` of the policy, the `name` of the entry point, and the attributes that `KINDS` names. The name must
differ from those of built-in policies. `examples/pointsman-lottery` is such a package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from warnings import warn

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError, did_you_mean
from pointsman.core.knobs import policy_checks
from pointsman.core.policy.bypass import Bypass
from pointsman.core.policy.eviction import EVICTIONS
from pointsman.core.policy.guard import Replaced, error_in_words, guarded, in_place_of, is_own
from pointsman.core.policy.limits import LIMITS, LongPrefillThreshold
from pointsman.core.policy.order import ORDERS
from pointsman.core.policy.policy import Parameter, Policy, Value, spec_of, written
from pointsman.core.policy.reserve import RESERVES
from pointsman.core.policy.victim import VICTIMS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "pointsman.policies"
KINDS: dict[str, tuple[str, ...]] = {
    "order": ("is_preemptive", "push", "pop", "put_back", "peek", "remove", "position", "__len__", "__contains__"),
    "victim": ("choose",),
    "reserve": ("blocks",),
    "limit": ("check",),
    "eviction": ("share", "per_tenant", "started", "retained"),
}
"""Required attributes of a policy besides its name, for each kind of policy."""
RENAMED = {"displaces": "is_preemptive", "horizon": "guaranteed_steps"}
"""Old names of policy attributes, mapped to the new names. The old names stay valid for one release."""
_URGENCY = frozenset({"priority", "ttft_target"})
_FIELDS = {"order": _URGENCY, "victim": _URGENCY, "eviction": frozenset({"retention"})}
"""Fields of requests that policies of a kind may read, and that have no effect unless a policy reads them."""
_SYNONYMS = {"fifo": "fcfs", "sjf": "shortest-prefill"}
"""Common names of policies that have another name here."""
_BUILT_IN: dict[str, dict[str, type[Policy]]] = {
    "order": dict(ORDERS),
    "victim": dict(VICTIMS),
    "reserve": {**RESERVES, Bypass.name: Bypass},
    "limit": dict(LIMITS),
    "eviction": dict(EVICTIONS),
}


def known(kind: str) -> dict[str, type[Policy]]:
    """Every policy class of a kind by name, built-in policies first.

    Raises:
        ConfigError: an installed package's policy cannot be loaded.
    """
    found = dict(_BUILT_IN[kind])
    for entry in _installed():
        policy = _load(entry)
        if policy.kind == kind:
            found[entry.name] = policy
    return found


def built_in(kind: str, name: str) -> type[Policy] | None:
    """The built-in policy with this kind and name, or None."""
    return _BUILT_IN[kind].get(name)


def readers_of(field: str) -> list[str]:
    """The built-in policies that read an optional field of requests, each with its kind, like "order earliest-ttft"."""
    return [
        f"{kind} {name}"
        for kind, policies in _BUILT_IN.items()
        for name, policy in policies.items()
        if field in policy.reads
    ]


def fields_read(policies: Mapping[str, Any]) -> frozenset[str]:
    """The fields among `priority`, `ttft_target` and `retention` of requests that policies read. A policy that is not
    built in, such as one of an installed package, counts as reading all fields that policies of its kind may read.

    Args:
        policies: the policies by kind, as in `SchedulerConfig.to_dict()`; other keys are ignored.
    """
    read: frozenset[str] = frozenset()
    for kind, fields in _FIELDS.items():
        spec = policies.get(kind)
        if spec is not None:
            policy = built_in(kind, str(spec).partition(":")[0])  # without parameters
            read |= fields if policy is None else policy.reads & fields
    return read


def make(kind: str, given: Any, replaced: Sequence[Replaced] = ()) -> Any:
    """Make a policy from a text `name:key=value`, or check a policy object. A policy that is not built in gets a guard.
    If its constructor raises anything but a ConfigError, the default policy of its kind replaces it.

    Args:
        kind: the kind of policy, a key of `KINDS`.
        given: the name with parameters, or the policy object.
        replaced: policies that are replaced by their default from the start, and not constructed.

    Raises:
        ConfigError: no policy has this name, a parameter is unknown or out of range, or the object lacks an attribute.
    """
    if not isinstance(given, str):
        _check_object(kind, given)
        return _build_guarded(kind, given, spec_of(given), lambda: given, replaced)
    name, policy, values = _parse_spec(kind, given)
    changed = {each.name: values[each.name] for each in policy.parameters if values[each.name] != each.default}

    def construct() -> Policy:
        made = policy(**values)
        _adopt_old_names(made)
        made._given_parameters = changed  # type: ignore[attr-defined]
        return made

    return construct() if is_own(policy) else _build_guarded(kind, policy, written(name, changed), construct, replaced)


def check(kind: str, given: Any) -> None:
    """Check that a policy exists and its parameters are valid, without constructing it.

    Raises:
        ConfigError: as for `make`.
    """
    if isinstance(given, str):
        _parse_spec(kind, given)
    else:
        _check_object(kind, given)


policy_checks.append(check)


def _parse_spec(kind: str, spec: str) -> tuple[str, type[Policy], dict[str, Value]]:
    """The name, the class and the parameter values of the policy that the text `name:key=value` selects."""
    name, parameters = parsed(spec)
    policy = built_in(kind, name) or _installed_policy(kind, name)
    if policy is None:
        raise ConfigError(f"no {kind} policy is called {name!r}; {_nearest(kind, name)}")
    return name, policy, checked(kind, name, policy.parameters, parameters)


def _nearest(kind: str, name: str) -> str:
    """The policies to choose from, beginning with a question if one of them has a name like `name`."""
    names = list(known(kind))
    synonym = _SYNONYMS.get(name)
    return f"{did_you_mean(synonym if synonym in names else name, names)}choose one of {', '.join(names)}"


def _check_object(kind: str, policy: Any) -> None:
    if isinstance(policy, type):
        raise ConfigError(f"{kind} is the class {policy.__name__}; pass an object, {policy.__name__}(...)")
    _adopt_old_names(policy)
    missing = [name for name in ("name", *KINDS[kind]) if not hasattr(policy, name)]
    if missing:
        raise ConfigError(
            f"{kind} is {policy!r}, neither a policy name nor an object with the {kind.capitalize()} protocol: the "
            f"object has no {', '.join(missing)}"
        )
    own = built_in(kind, str(policy.name))
    if own is not None and type(policy) is not own:
        raise ConfigError(
            f"{kind} is {policy!r}, with the name {policy.name!r} of a built-in {kind}; give its class a name of its "
            "own, or recordings of it replay with the built-in one"
        )


def _build_guarded(
    kind: str, policy: Any, spec: str, construct: Callable[[], Any], replaced: Sequence[Replaced]
) -> Any:
    """Construct the policy, and return it within its guard. If the constructor fails, or `replaced` has the policy, the
    guard has the default policy instead."""
    for known in replaced:
        if (known.kind, known.policy) == (kind, spec):
            return in_place_of(kind, policy, spec, known.error)
    try:
        return guarded(kind, construct())
    except ConfigError:
        raise
    except Exception as error:
        return in_place_of(kind, policy, spec, error_in_words("its constructor", error), error)


def _adopt_old_names(policy: Any) -> None:
    """Add attributes under their new names (`RENAMED`) to a policy of another package that has the old names."""
    for old, new in RENAMED.items():
        if hasattr(policy, old):
            warn(f"`{type(policy).__name__}.{old}` is now called `{new}`", DeprecationWarning, stacklevel=4)
            setattr(policy, new, getattr(policy, old))


def check_policies(config: SchedulerConfig) -> None:
    """Check that the policies of a configuration can be made and combined.

    Raises:
        ConfigError: as for `make`, or as for `check_cuts`.
    """
    make("order", config.order)
    if config.victim is not None:
        make("victim", config.victim)
    for policy in config.reserves:
        make("reserve", policy)
    check_cuts(config, [make("limit", policy) for policy in config.token_limits])
    make("eviction", config.eviction)


def check_cuts(config: SchedulerConfig, limits: Sequence[Any]) -> None:
    """Check that prompts may be cut, if a limit cuts prompts, or sets the step budget to which prompts are cut.

    Raises:
        ConfigError: prompts may not be cut.
    """
    if not config.enable_chunked_prefill and any(limit.name == LongPrefillThreshold.name for limit in limits):
        raise ConfigError(
            f"token_limits has {LongPrefillThreshold.name!r}, which cuts prompts, but enable_chunked_prefill is off; "
            "turn enable_chunked_prefill on, or remove the limit"
        )
    setting = [limit for limit in limits if hasattr(limit, "step_budget")]
    if setting and (config.first_chunk_only or not config.enable_chunked_prefill):
        raise ConfigError(
            f"token_limits has {setting[0].name!r}, which cuts prompts to the token budget that it sets in each step; "
            "turn enable_chunked_prefill on and first_chunk_only off, or remove the limit"
        )


def parsed(spec: str) -> tuple[str, dict[str, str]]:
    """Split `name` or `name:key=value,key=value` into name and parameters.

    Raises:
        ConfigError: the syntax is wrong.
    """
    name, _, rest = spec.partition(":")
    parameters: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(f"policy {spec!r} has the parameter {part!r}; write name:key=value,key=value")
        parameters[key.strip()] = value.strip()
    if not name.strip() or spec.endswith(":"):
        raise ConfigError(f"policy {spec!r} is incomplete; write name, or name:key=value,key=value")
    return name.strip(), parameters


def checked(kind: str, name: str, known: tuple[Parameter, ...], given: dict[str, str]) -> dict[str, Value]:
    """The values of all parameters of a policy: converted from the `given` texts, or the defaults.

    Raises:
        ConfigError: a parameter is unknown, of the wrong type, or out of range.
    """
    unknown = [key for key in given if key not in {each.name for each in known}]
    if unknown:
        has = ", ".join(each.name for each in known) or "none"
        raise ConfigError(f"{kind} {name!r} has no parameter {unknown[0]!r}; its parameters: {has}")
    return {
        each.name: _parse_value(kind, name, each, given[each.name]) if each.name in given else each.default
        for each in known
    }


def _parse_value(kind: str, name: str, parameter: Parameter, text: str) -> Value:
    what = f"{parameter.name} of {kind} {name!r} is {text!r}"
    value: Value
    if isinstance(parameter.default, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{what}; give true or false")
        value = text.lower() == "true"
    elif isinstance(parameter.default, str):
        value = text
    else:
        try:
            value = type(parameter.default)(text)
        except ValueError:
            kind_of_number = "an integer" if isinstance(parameter.default, int) else "a number"
            raise ConfigError(f"{what}; give {kind_of_number}") from None
        low, high = parameter.low, parameter.high
        if not (low is None or value >= low) or not (high is None or value <= high):
            bounds = f"at least {low:g}" if high is None else f"between {low or 0:g} and {high:g}"
            raise ConfigError(f"{what}; it must be {bounds}")
    if parameter.choices and value not in parameter.choices:
        raise ConfigError(f"{what}; choose one of {', '.join(map(str, parameter.choices))}")
    return value


@lru_cache(maxsize=1)
def _installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages, sorted by name; of several entry points with the same name, only the
    first."""
    from importlib.metadata import entry_points  # imported here: it takes a fifth of the import time

    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    return tuple({entry.name: entry for entry in reversed(found)}.values())


def _installed_policy(kind: str, name: str) -> type[Policy] | None:
    for entry in _installed():
        if entry.name == name:
            policy = _load(entry)
            return policy if policy.kind == kind else None
    return None


def _load(entry: EntryPoint) -> type[Policy]:
    taken = next((kind for kind, policies in _BUILT_IN.items() if entry.name in policies), None)
    if taken is not None:
        raise ConfigError(
            f"policy {entry.name!r} of {entry.value} has the name of a built-in {taken} policy; rename it"
        )
    try:
        policy = entry.load()
    except Exception as error:
        raise ConfigError(f"policy {entry.name!r} cannot be loaded from {entry.value}: {error}") from error
    if not isinstance(policy, type) or not issubclass(policy, Policy) or policy.kind not in KINDS:
        raise ConfigError(
            f"policy {entry.name!r} of {entry.value} is {policy!r}; it must be a subclass of Policy whose kind is one "
            f"of {', '.join(KINDS)}"
        )
    if policy.name != entry.name:
        raise ConfigError(
            f"policy {entry.name!r} of {entry.value} has `name` {policy.name!r}; set `name` to {entry.name!r}, the "
            "name of its entry point, since a replay finds the policy by it"
        )
    return policy
