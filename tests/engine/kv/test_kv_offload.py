"""KV offload to host memory: its directory compared with a dictionary, and equal outputs with and without it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from pointsman.core import ConfigError
from pointsman.engine import AsyncEngine, Engine, EngineStepError, SamplingParams
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.offload import HostCopies, HostTier, SlotLoad
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.kv_requests import PARAMS, TIGHT, add_round, break_passes, drain, make, prompt_of, run_rounds, settle
from tests.engine.tiny_models import FAMILIES, build
from tests.forms import short_of

AMPLE, SCARCE = 1 << 20, 1 << 16
"""Bytes of host memory for all blocks that the tests give up, and for some of them."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, list[int]]:
    return run_rounds(make(loaded))


# ------------------------------------------------------------------------------------------------------ the tier


def make_tier(num_slots: int, num_blocks: int = 12) -> tuple[KVPool, HostTier]:
    layers = [LayerShape(num_kv_heads=1, k_dim=2, v_dim=3, num_heads=1), LayerShape(1, 1, 1, 1)]
    pool = KVPool(layers, num_blocks=num_blocks, block_size=2, dtype=torch.float32)
    return pool, HostTier(pool, num_slots * pool.num_bytes // num_blocks)


def put(pool: KVPool, block: int, value: int) -> None:
    for index, part in enumerate(pool.block(block).values()):
        part.fill_(value + index / 8)


def value_of(pool: KVPool, block: int) -> float:
    """The value with which a block was filled; all of its elements must agree."""
    parts = list(pool.block(block).values())
    value = float(parts[0].flatten()[0])
    assert all(bool((part == value + index / 8).all()) for index, part in enumerate(parts)), "a block is mixed up"
    return value


def key_of(value: int) -> bytes:
    return value.to_bytes(4, "big")


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool, tier = make_tier(3)
    for value in range(3):
        put(pool, value, value)
        tier.plan([(value, key_of(value))], []).run()
    tier.plan([], [SlotLoad([key_of(0)], [9])]).run()
    assert value_of(pool, 9) == 0
    put(pool, 3, 3)
    tier.plan([(3, key_of(3))], []).run()
    assert [tier.num_found([key_of(value)]) for value in range(4)] == [1, 0, 1, 1]
    assert tier.num_found([key_of(0), key_of(1), key_of(2)]) == 1, "only leading consecutive blocks count"


def test_a_prefix_is_evicted_after_its_continuations() -> None:
    _, tier = make_tier(3)
    chain = [key_of(value) for value in range(3)]
    tier.plan([(2, chain[2]), (1, chain[1]), (0, chain[0])], []).run()  # in the order of the pool's evictions
    tier.plan([], [SlotLoad(chain, [5, 6, 7])]).run()
    tier.plan([(9, key_of(9))], []).run()
    assert tier.num_found(chain) == 2


def test_a_step_does_not_overwrite_blocks_that_it_loads() -> None:
    pool, tier = make_tier(2)
    for value in range(2):
        put(pool, value, value)
        tier.plan([(value, key_of(value))], []).run()
    put(pool, 4, 4)
    tier.plan([(4, key_of(4))], [SlotLoad([key_of(0), key_of(1)], [7, 8])]).run()
    assert (value_of(pool, 7), value_of(pool, 8)) == (0, 1)
    assert tier.num_found([key_of(4)]) == 0, "there was no slot for it"


def test_a_step_may_load_blocks_that_it_saves() -> None:
    """Blocks 2 and 3 are swapped, and block 4 is filled from a saved slot."""
    pool, tier = make_tier(1)
    put(pool, 9, 9)
    tier.plan([(9, key_of(9))], []).run()
    for value in (2, 3):
        put(pool, value, value)
    load = SlotLoad([key_of(3), key_of(2), key_of(9)], [2, 3, 4])
    copies = tier.plan([(2, key_of(2)), (3, key_of(3))], [load])
    copies.run()
    assert [value_of(pool, block) for block in (2, 3, 4)] == [3, 2, 9]
    report = copies.report()
    assert report is not None and report.num_blocks == 1 and report.seconds > 0


def test_if_saves_exceed_slots_the_last_saves_are_kept() -> None:
    pool, tier = make_tier(2)
    for value in range(5):
        put(pool, value, value)
    tier.plan([(value, key_of(value)) for value in range(5)], []).run()
    tier.plan([], [SlotLoad([key_of(3), key_of(4)], [7, 8])]).run()
    assert (len(tier), value_of(pool, 7), value_of(pool, 8)) == (2, 3, 4)


@pytest.mark.parametrize("seed", range(30))
def test_random_copy_plans_restore_the_same_kv_as_a_dictionary(seed: int) -> None:
    """Several steps are planned before they run, some are voided, and the tier is cleared now and then."""
    choose = random.Random(seed)
    pool, tier = make_tier(choose.randint(1, 6))
    flying: list[tuple[HostCopies, list[tuple[int, int]]]] = []  # plans, with (block, value) of their loads
    num_loaded = 0
    for _ in range(300):
        action = choose.random()
        if action < 0.45 and len(flying) < 3:
            found = [value for value in range(15) if tier.num_found([key_of(value)])]
            wanted = choose.sample(found, min(len(found), choose.randint(0, 2)))
            targets = choose.sample(range(6, 12), len(wanted))
            waiting = {one.block_id for copies, _ in flying for one in copies.plan.saves}
            given_up = set(choose.sample(range(6), choose.randint(0, 3))) - waiting
            saves = [(block, choose.randrange(15)) for block in given_up]
            for block, value in saves:
                put(pool, block, value)
            plan = tier.plan(
                [(block, key_of(value)) for block, value in saves],
                [SlotLoad([key_of(value)], [block]) for value, block in zip(wanted, targets, strict=True)],
            )
            flying.append((plan, list(zip(targets, wanted, strict=True))))
        elif action < 0.85 and flying:
            plan, loads = flying.pop(0)
            plan.run()
            assert [value_of(pool, block) for block, _ in loads] == [value for _, value in loads]
            num_loaded += len(loads)
        elif action < 0.95:
            tier.drop_plans()
            flying.clear()
        else:
            tier.clear()
        tier.check()
    assert num_loaded > 5


def test_too_little_memory_for_a_block_is_refused() -> None:
    pool, _ = make_tier(1)
    with pytest.raises(ConfigError, match="kv_offload_bytes is 10, less than one block of 56 bytes"):
        HostTier(pool, 10)


# ---------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("steps", short_of([1, 2, 3], [2]))
@pytest.mark.parametrize("num_bytes", [AMPLE, SCARCE])
def test_offloading_keeps_outputs_and_saves_computation(
    loaded: LoadedModel, expected: dict[str, list[int]], steps: int, num_bytes: int
) -> None:
    without = make(loaded, max_steps_in_flight=steps, **TIGHT)
    assert run_rounds(without) == expected
    engine = make(loaded, max_steps_in_flight=steps, kv_offload_bytes=num_bytes, **TIGHT)
    assert run_rounds(engine) == expected
    assert engine.scheduler.stats().num_preemptions > 3
    assert engine.counters.num_offloaded_blocks > 20 < engine.counters.num_restored_blocks
    computed, before = (
        one.counters.num_prompt_tokens - one.counters.num_cached_tokens + one.scheduler.stats().num_recomputed_tokens
        for one in (engine, without)
    )
    assert computed < 0.75 * before
    assert 0 < engine.counters.num_external_tokens <= engine.counters.num_cached_tokens
    settle(engine)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "cheaper"])
def test_preempted_requests_swap_with_equal_outputs(
    loaded: LoadedModel, expected: dict[str, list[int]], steps: int, mode: str
) -> None:
    offloading = make(loaded, max_steps_in_flight=steps, kv_offload_bytes=AMPLE, **TIGHT)
    engine = make(loaded, max_steps_in_flight=steps, kv_offload_bytes=AMPLE, preemption_mode=mode, **TIGHT)
    for each in (offloading, engine):
        assert run_rounds(each) == expected
    stats = engine.scheduler.stats()
    assert sum(stats.preemption_decisions.values()) == stats.num_preemptions > 3
    assert 0 < engine.counters.num_offloaded_blocks < offloading.counters.num_offloaded_blocks
    if mode == "swap":  # the cheaper choice depends on the machine
        assert stats.preemption_decisions["swap"] > 3
        assert engine.counters.num_restored_blocks > 0
    settle(engine)
    tier = engine.kv_connector.tier if engine.kv_connector is not None else None
    assert tier is not None and len(tier) < 20, "blocks that no request needs are dropped"


def test_long_outputs_that_swap_recompute_little(loaded: LoadedModel) -> None:
    """Outputs outgrow the pool: nearly all KV that would be recomputed is copied back from host memory."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def run(**knobs: Any) -> tuple[dict[str, list[int]], Engine]:
        engine = make(loaded, num_blocks=24, full_sequence_must_fit=False, **knobs)
        for number in range(8):
            engine.add_request(str(number), prompt_of(number)[:16], params)
        return drain(engine), engine

    expected, plain = run()
    answers, engine = run(kv_offload_bytes=AMPLE, preemption_mode="swap")
    assert answers == expected
    stats = engine.scheduler.stats()
    assert plain.scheduler.stats().num_recomputed_tokens > 100
    assert stats.num_recomputed_tokens < 0.25 * plain.scheduler.stats().num_recomputed_tokens
    assert stats.num_recomputed_tokens <= 0.05 * stats.num_scheduled_tokens + 4 * stats.num_preemptions


@pytest.mark.parametrize(("family", "num_groups"), [("gemma2", 2), ("deepseek-v3", 1)])
def test_kv_of_layers_of_every_shape_is_restored_unchanged(family: str, num_groups: int) -> None:
    """A sliding window, and keys and values of different widths, in bfloat16. A block is for one group of layers."""
    loaded = wrap_model(build(FAMILIES[family](), seed=1))
    expected = run_rounds(make(loaded, kv_cache_dtype="bfloat16"), 2)
    tight = {**TIGHT, "num_blocks": TIGHT["num_blocks"] * num_groups}
    engine = make(loaded, kv_cache_dtype="bfloat16", kv_offload_bytes=AMPLE, **tight)
    assert max(1, len(engine.scheduler.config.kv_groups)) == num_groups
    assert run_rounds(engine, 2) == expected
    assert engine.counters.num_restored_blocks > 20


@pytest.mark.parametrize("steps", [1, 3])
def test_failed_steps_leave_no_wrong_blocks_in_host_memory(
    loaded: LoadedModel, expected: dict[str, list[int]], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps fail before and after their copies, and with planned copies: saves that were not made are not found."""
    engine = make(loaded, max_steps_in_flight=steps, kv_offload_bytes=AMPLE, **TIGHT)
    assert engine.kv_connector is not None and engine.kv_connector.tier is not None
    choose, plan = random.Random(5), engine.kv_connector.tier.plan

    def breaks_late(*arguments: Any) -> HostCopies:
        copies = plan(*arguments)
        if choose.random() < 0.2:
            raise RuntimeError("planned")
        return copies

    monkeypatch.setattr(engine.kv_connector.tier, "plan", breaks_late)

    break_passes(engine, monkeypatch, choose, 0.1)
    failures: list[EngineStepError] = []
    assert run_rounds(engine, failures=failures) == expected
    assert len(failures) > 10 and engine.counters.num_restored_blocks > 20


def change_weights(loaded: LoadedModel, factor: float) -> None:
    loaded.model.model.layers[0].self_attn.k_proj.weight.data.mul_(factor)
    loaded.model.model.layers[0].self_attn.v_proj.weight.data.mul_(factor)


@pytest.mark.parametrize("steps", [1, 2])
def test_no_old_kv_is_found_after_a_reset(steps: int) -> None:
    """The weights change; running requests keep their KV, and no later request gets any of it."""
    loaded = wrap_model(build(FAMILIES["qwen3"](), seed=1), fuse=False)
    change_weights(loaded, 1.5)
    new = run_rounds(make(loaded), 1)
    change_weights(loaded, 1 / 1.5)
    engine = make(loaded, max_steps_in_flight=steps, kv_offload_bytes=AMPLE, **TIGHT)
    assert run_rounds(engine, 2)["0-3"] != new["0-3"], "the change can be seen"
    add_round(engine, 7)
    for _ in range(5):
        engine.step()
    engine.finish_steps()
    change_weights(loaded, 1.5)
    engine.scheduler.reset_prefix_cache(engine.clock())
    drain(engine)
    assert run_rounds(engine, 1) == new
    assert engine.counters.num_restored_blocks > 20


def test_async_engine_offloads_kv_with_equal_outputs(loaded: LoadedModel, expected: dict[str, list[int]]) -> None:
    async def work() -> list[list[int]]:
        engine = AsyncEngine(
            loaded, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, kv_offload_bytes=AMPLE,
            log_stats_interval=None, **TIGHT,
        )  # fmt: skip

        async def one(number: int) -> list[int]:
            last = [output async for output in engine.generate(prompt_of(number), PARAMS)][-1]
            return list(last.token_ids)

        answers = []
        for _ in range(2):
            answers += await asyncio.gather(*(one(number) for number in range(10)))
        assert await engine.call(lambda one: one.counters.num_restored_blocks) > 10
        await engine.shutdown()
        return answers

    assert asyncio.run(work()) == [expected[f"0-{number}"] for number in range(10)] * 2


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kv_offload_bytes": 0}, "kv_offload_bytes is 0; give a number of bytes of at least 1"),
        ({"kv_offload_bytes": 5}, "less than one block"),
        ({"kv_offload_bytes": True}, "kv_offload_bytes is True"),
        ({"kv_offload_bytes": AMPLE, "enable_prefix_caching": False}, "enable_prefix_caching is off; switch it on"),
        ({"kv_offload_bytes": AMPLE, "kv_load_timeout": 3.0}, "no request waits for KV"),
        ({"kv_load_failure_policy": "fail"}, "no request waits for KV"),
        ({"preemption_mode": "swap"}, "there is no host memory to swap to; give kv_offload_bytes"),
        (
            {"preemption_mode": "cheaper", "kv_offload_bytes": AMPLE, "enable_prefix_caching": False},
            "prefix_caching on",
        ),
        ({"kv_store_role": "producer"}, "there is no kv_store"),
        ({"kv_store_bytes": 1 << 20}, "there is no kv_store"),
    ],
)
def test_invalid_offload_knobs_are_refused(loaded: LoadedModel, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(loaded, **knobs)
