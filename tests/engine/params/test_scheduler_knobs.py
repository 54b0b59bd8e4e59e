"""The scheduler's knobs as arguments of the engine."""

from __future__ import annotations

import pytest

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.presets import SYSTEMS
from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.params.engine_args import (
    GPU_DEFAULTS,
    SCHEDULER_DEFAULTS,
    SCHEDULER_NAMES,
    check_utilization,
    with_defaults,
)
from tests.engine.tiny_models import FAMILIES, build


def test_given_knobs_replace_the_defaults() -> None:
    assert with_defaults({}) == SCHEDULER_DEFAULTS
    assert with_defaults({"block_size": 8, "order": "priority"}) == {
        **SCHEDULER_DEFAULTS,
        "block_size": 8,
        "order": "priority",
    }
    assert set(SCHEDULER_DEFAULTS) <= SCHEDULER_NAMES


def test_gpu_defaults_are_larger_steps_and_two_steps_in_flight() -> None:
    defaults = with_defaults({}, "cuda")
    assert defaults == GPU_DEFAULTS
    sizes = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight")
    assert [defaults[name] for name in sizes] == [32, 256, 8192, 2]
    assert "max_steps_in_flight" not in with_defaults({}, "cpu")
    assert set(GPU_DEFAULTS) <= SCHEDULER_NAMES


def test_gpu_defaults_fit_the_given_knobs() -> None:
    assert with_defaults({"num_draft_tokens": 4}, "cuda")["max_steps_in_flight"] == 1, "drafts need one step in flight"
    assert with_defaults({"num_draft_tokens": 0}, "cuda")["max_steps_in_flight"] == 2
    assert with_defaults({"max_num_batched_tokens": 128}, "cuda")["max_num_seqs"] == 128
    given = {"max_num_batched_tokens": 128, "max_num_seqs": 300, "max_steps_in_flight": 1}
    assert with_defaults(given, "cuda") == {**GPU_DEFAULTS, **given}, "given knobs are never changed"
    for knobs in ({}, {"num_draft_tokens": 4}, {"max_num_batched_tokens": 100}):
        SchedulerConfig(num_blocks=9, max_model_len=64, **with_defaults(knobs, "cuda"))


@pytest.mark.parametrize("value", [0, -0.5, 1.01, float("nan"), True, "0.9"])
def test_gpu_memory_utilization_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization is .*; give a share .* above 0 and at most 1"):
        check_utilization(value, "cuda")


def test_gpu_memory_utilization_is_refused_on_a_cpu() -> None:
    for value in (None, 0.9, 1):
        check_utilization(value, "cuda")
    check_utilization(None, "cpu")
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization is 0\.5 and device is cpu.*; give kv_cache_bytes or"
    ):
        Engine("demo", device="cpu", gpu_memory_utilization=0.5)


@pytest.mark.parametrize("name", ["num_reserved_blocks", "enable_kv_cache_events", "max_loras", "encoder_budget"])
def test_a_knob_that_an_engine_cannot_use_is_refused(name: str) -> None:
    assert name in SchedulerConfig.__dataclass_fields__
    with pytest.raises(ConfigError, match=rf"^{name} is 1, but .*; leave it out$"):
        Engine("demo", **{name: 1})


def test_an_unknown_knob_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Engine has no argument 'max_seqs', and SchedulerConfig has no such field$"):
        Engine("demo", max_seqs=3)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


def answers(loaded: LoadedModel, **knobs: object) -> tuple[dict[str, list[int]], int]:
    """The tokens of 12 requests with shared prefixes, in a pool that is too small for all of them, and the number of
    preemptions."""
    engine = Engine(loaded, num_blocks=24, block_size=4, max_model_len=64, **knobs)
    for number in range(12):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6] + [10 + number % 5] * (1 + 3 * (number % 4))
        engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    engine.scheduler.check_invariants()
    assert engine.scheduler.stats().num_free_blocks == 24
    return tokens, engine.scheduler.stats().num_preemptions


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_preset_gives_the_same_outputs(loaded: LoadedModel, system: str) -> None:
    tokens, num_preemptions = answers(loaded, **SYSTEMS[system])
    assert len(tokens) == 12 and num_preemptions > 0
    assert tokens == answers(loaded)[0]
