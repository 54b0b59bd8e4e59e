"""The scheduler's knobs as arguments of the engine."""

from __future__ import annotations

import pytest

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.presets import SYSTEMS
from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.params.engine_args import SCHEDULER_DEFAULTS, SCHEDULER_NAMES, with_defaults
from tests.engine.tiny_models import FAMILIES, build


def test_what_is_given_wins_over_the_defaults() -> None:
    assert with_defaults({}) == SCHEDULER_DEFAULTS
    assert with_defaults({"block_size": 8, "order": "priority"}) == {
        **SCHEDULER_DEFAULTS,
        "block_size": 8,
        "order": "priority",
    }
    assert set(SCHEDULER_DEFAULTS) <= SCHEDULER_NAMES


@pytest.mark.parametrize("name", ["num_reserved_blocks", "enable_kv_cache_events", "max_loras", "encoder_budget"])
def test_a_knob_that_an_engine_cannot_use_is_refused(name: str) -> None:
    assert name in SchedulerConfig.__dataclass_fields__
    with pytest.raises(ConfigError, match=rf"^{name} is 1, but .*; leave it out$"):
        Engine("demo", **{name: 1})


def test_a_knob_that_nobody_has_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^Engine has no argument 'max_seqs', and SchedulerConfig has no such field$"):
        Engine("demo", max_seqs=3)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


def answers(loaded: LoadedModel, **knobs: object) -> tuple[dict[str, list[int]], int]:
    """The tokens of 12 requests with shared prefixes in a pool that is too small for them, and the preemptions."""
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
def test_every_system_of_the_field_gives_the_same_answers(loaded: LoadedModel, system: str) -> None:
    tokens, num_preemptions = answers(loaded, **SYSTEMS[system])
    assert len(tokens) == 12 and num_preemptions > 0
    assert tokens == answers(loaded)[0]
