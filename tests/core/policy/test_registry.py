"""Policies by name, with parameters, and from installed packages; errors for unknown names."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.policy import registry
from pointsman.core.policy.order import FirstComeFirstServed
from pointsman.core.policy.policy import Parameter, Policy, spec_of
from pointsman.core.policy.registry import KINDS, check_policies, known, make, parsed
from tests.core.helpers import Host, names, small_config


class LastComeFirstServed(FirstComeFirstServed):
    """By arrival, newest first; by a factor."""

    name = "lcfs"
    parameters = (Parameter("factor", 1.0, 0.5, 2.0), Parameter("times", 3, 1), Parameter("strict", False))

    def __init__(self, factor: float = 1.0, times: int = 3, strict: bool = False) -> None:
        super().__init__()
        self.given = (factor, times, strict)

    def key(self, request: Any) -> tuple[Any, ...]:
        return (-request.arrival_time * self.given[0], request.sequence_number)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs these objects as entry points of the group."""

    def install(**policies: Any) -> None:
        entries = []
        for name, policy in policies.items():
            entry = EntryPoint(name.replace("_", "-"), f"elsewhere:{name}", registry.GROUP)
            entries.append(entry)
            loaded[entry.value] = policy
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == registry.GROUP else [])
        registry._installed.cache_clear()

    loaded: dict[str, Any] = {}

    def load(entry: EntryPoint) -> Any:
        if isinstance(loaded[entry.value], Exception):
            raise loaded[entry.value]
        return loaded[entry.value]

    monkeypatch.setattr(EntryPoint, "load", load)
    yield install
    registry._installed.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_policy_can_be_made_by_name_and_has_a_docstring(kind: str) -> None:
    for name, policy in known(kind).items():
        assert (policy.kind, policy.name) == (kind, name)
        assert policy.__doc__ and policy.__doc__.strip().partition("\n")[0], name
        made = make(kind, name)
        assert spec_of(made) == name
        for each in policy.parameters:
            assert each.name.isidentifier()
            assert all(type(value) is type(each.default) for value in (*each.choices, *each.tried))
            if each.low is not None and each.high is not None:
                assert each.low <= each.default <= each.high  # type: ignore[operator]
            for value in each.tried:
                assert spec_of(make(kind, f"{name}:{each.name}={value}")).startswith(name)


def test_a_policy_of_an_installed_package_is_found_by_name(installed: Any) -> None:
    installed(lcfs=LastComeFirstServed)
    assert "lcfs" in known("order")
    assert "lcfs" not in known("victim")
    made = make("order", "lcfs:factor=1.5, strict=true")
    assert made.policy.given == (1.5, 3, True)
    assert made.spec == "lcfs:factor=1.5,strict=True"
    host = Host(order="lcfs:factor=2", max_num_seqs=1)
    for name in ("a", "b", "c"):
        host.add(name, 2, max_tokens=1)
    admitted = [name for output in host.run_to_end() for name in names(output.admitted)]
    assert admitted == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lcfs:factor=3", "factor of order 'lcfs' is '3'; it must be between 0.5 and 2"),
        ("lcfs:factor=x", "factor of order 'lcfs' is 'x'; give a number"),
        ("lcfs:times=1.5", "times of order 'lcfs' is '1.5'; give an integer"),
        ("lcfs:times=0", "times of order 'lcfs' is '0'; it must be at least 1"),
        ("lcfs:factor=nan", "factor of order 'lcfs' is 'nan'; it must be between 0.5 and 2"),
        ("lcfs:strict=2", "strict of order 'lcfs' is '2'; give true or false"),
        ("lcfs:speed=1", "order 'lcfs' has no parameter 'speed'; its parameters: factor, times, strict"),
        ("fcfs:speed=1", "order 'fcfs' has no parameter 'speed'; its parameters: none"),
        ("lcfs:factor", "has the parameter 'factor'; write name:key=value,key=value"),
        ("lcfs:", "policy 'lcfs:' is incomplete"),
        ("fcsf", r"no order policy is called 'fcsf'; did you mean fcfs\? choose one of fcfs, priority, .*lcfs"),
        ("latest", "no order policy is called 'latest'"),
        ("", "policy '' is incomplete"),
    ],
)
def test_the_error_of_an_unusable_policy_name_says_why(installed: Any, spec: str, message: str) -> None:
    installed(lcfs=LastComeFirstServed)
    with pytest.raises(ConfigError, match=message):
        make("order", spec)


def test_the_error_of_a_broken_entry_point_names_the_policy(installed: Any) -> None:
    installed(broken=ImportError("no module named nothing"), wrong=object, fcfs=LastComeFirstServed)
    with pytest.raises(ConfigError, match="'broken' cannot be loaded from elsewhere:broken: no module named nothing"):
        make("order", "broken")
    with pytest.raises(ConfigError, match="must be a subclass of Policy whose kind is one of order, victim"):
        make("order", "wrong")
    assert type(make("order", "fcfs")) is FirstComeFirstServed, "a built-in name cannot be taken"
    installed(fcfs=LastComeFirstServed)
    with pytest.raises(ConfigError, match="has the name of a built-in order policy; rename it"):
        known("order")


def test_policy_names_and_parameters_are_parsed() -> None:
    assert parsed("fair") == ("fair", {})
    assert parsed("fair:input=1,output=2.5") == ("fair", {"input": "1", "output": "2.5"})
    assert parsed("fair:weights=gold/4+free/1") == ("fair", {"weights": "gold/4+free/1"})


def test_a_configuration_as_a_dict_has_names_of_policies() -> None:
    config = small_config(order=LastComeFirstServed(), reserves=["watermark:share=0.1"])
    values = config.to_dict()
    assert (values["order"], values["reserves"], values["token_limits"]) == (
        "lcfs (object)",
        ["watermark:share=0.1"],
        [],
    ), "its parameters are unknown, so a replay cannot construct it"
    assert SchedulerConfig(**{**values, "order": "fcfs"}).reserves == ("watermark:share=0.1",)


def test_one_policy_name_is_accepted_as_a_list() -> None:
    config = small_config(reserves="growth", token_limits="target-itl:seconds=0.05")
    assert (config.reserves, config.token_limits) == (("growth",), ("target-itl:seconds=0.05",))
    with pytest.raises(ConfigError, match="no reserve policy is called 'grwth'; did you mean growth"):
        check_policies(small_config(reserves="grwth"))
    with pytest.raises(
        ConfigError, match=r'reserves is 3; give a list of policy .*, such as \["watermark:share=0.02"\]'
    ):
        small_config(reserves=3)


def test_a_reserve_given_by_name_equals_the_knob() -> None:
    outputs = []
    for knobs in ({"watermark": 0.25}, {"reserves": ["watermark:share=0.25"]}):
        host = Host(**knobs, num_blocks=8)
        for index in range(5):
            host.add(f"r{index}", 6, max_tokens=6)
        outputs.append([(names(each.requests), each.num_scheduled_tokens.tolist()) for each in host.run_to_end()])
    assert outputs[0] == outputs[1]


def test_a_named_full_sequence_reserve_replaces_the_knob() -> None:
    """With both, a prompt of more than half of the pool would wait for ever."""
    host = Host(reserves=["full-sequence"], num_blocks=8)
    request = host.add("long", 28, max_tokens=2)
    host.run_to_end(20)
    assert request.is_finished
    assert host.scheduler.policies == {"fcfs": 1, "latest": 1, "lru": 1, "full-sequence": 1}


def test_a_limit_that_cuts_prompts_needs_chunked_prefill() -> None:
    knobs = {"token_limits": ("prefill-threshold:tokens=4",), "enable_chunked_prefill": False}
    with pytest.raises(ConfigError, match="'prefill-threshold', which cuts prompts, but enable_chunked_prefill is off"):
        Host(**knobs, max_num_batched_tokens=64)


def test_versions_of_policies_are_reported() -> None:
    host = Host(watermark=0.1)
    assert host.scheduler.policies == {"fcfs": 1, "latest": 1, "watermark": 1, "full-sequence": 1, "lru": 1}


def test_an_object_without_the_whole_protocol_is_refused() -> None:
    class Nameless(Policy):
        def choose(self, view: Any, asking: int) -> int:
            return 0

    assert make("victim", Nameless()) is not None
    with pytest.raises(ConfigError, match="nor an object with the Victim protocol: the object has no choose"):
        make("victim", LastComeFirstServed())


def test_an_object_with_the_name_of_a_built_in_policy_is_refused() -> None:
    class Newest(FirstComeFirstServed):
        def key(self, request: Any) -> tuple[Any, ...]:
            return (-request.arrival_time,)

    with pytest.raises(ConfigError, match=r"order is .*Newest.*, with the name 'fcfs' of a built-in order; give its"):
        small_config(order=Newest())
    assert small_config(order=FirstComeFirstServed()).order.name == "fcfs"
