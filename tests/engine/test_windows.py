"""Real models with sliding windows and layers in groups: the blocks that a request holds, reads and reuses.

`test_equality.py` compares the tokens of every such family with those of transformers.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core.kv.events import BlockStored
from pointsman.core.recording import Recorder
from pointsman.core.replay import replay
from pointsman.engine import Engine, EngineStepError, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.warming import warm_up
from tests.engine.tiny_models import FAMILIES, HEAD16, VOCAB_SIZE, build
from tests.forms import is_long

pytestmark = pytest.mark.e2e

WINDOW, SIZE = 20, 4
"""The window is a multiple of the block size."""
KNOBS: dict[str, Any] = {"block_size": SIZE, "max_num_seqs": 6, "max_num_batched_tokens": 14, "num_blocks": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TIGHT = 56


@cache
def gemma(num_windows: int = 2, window: int = WINDOW, max_model_len: int = 256, attention: str = "auto") -> LoadedModel:
    """Gemma 3 with `num_windows` layers with a window for each layer of full attention; its KV has `num_windows` + 1
    groups of one layer."""
    layers = {
        "num_hidden_layers": num_windows + 1,
        "layer_types": ["sliding_attention"] * num_windows + ["full_attention"],
        "sliding_window": window,
        "max_position_embeddings": max_model_len,
    }
    config = FAMILIES["gemma3"]()
    return wrap_model(build(type(config)(**{**config.to_dict(), **HEAD16, **layers}), seed=3), attention=attention)


def prompts() -> list[list[int]]:
    """Prompts of many lengths. The last prompts continue earlier prompts, whose beginnings are outside the window."""
    draw = np.random.default_rng(2)
    some = [draw.integers(3, VOCAB_SIZE, count).tolist() for count in (70, 5, 33, 21, 48)]
    return [*some, some[0] + some[1], some[0][:41] + some[2], [*some[4][:30], 7]]


def tokens_of(engine: Engine, after: Callable[[], object] = lambda: None) -> list[list[int]]:
    """Run the prompts, the last three after the others; return the tokens of each. `after` is called after each
    step."""
    found: dict[str, list[int]] = {}
    for first, last in ((0, 5), (5, 8)):
        for index in range(first, last):
            engine.add_request(str(index), prompts()[index], GREEDY)
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except EngineStepError:
                outputs = []
            engine.scheduler.check_invariants()
            after()
            found.update((output.request_id, output.token_ids) for output in outputs if output.finished)
    return [found[str(index)] for index in range(8)]


@cache
def expected() -> list[list[int]]:
    """The tokens of Gemma 3 for the prompts, in an engine without KV groups."""
    engine = Engine(gemma(), disable_hybrid_kv_cache_manager=True, **KNOBS)
    assert not engine.scheduler.config.kv_groups
    return tokens_of(engine)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"num_blocks": TIGHT},
        {"max_steps_in_flight": 2},
        {"num_draft_tokens": 3, "prompt_lookup_min": 1},
        {"max_num_batched_tokens": 256, "disable_hybrid_kv_cache_manager": False},
        {"attention": "torch", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_are_equal_with_and_without_kv_groups(knobs: dict[str, Any]) -> None:
    engine = Engine(gemma(attention=knobs.get("attention", "auto")), **{**KNOBS, **knobs})
    assert [group.kind for group in engine.scheduler.config.kv_groups] == ["window", "window", "full"]
    assert tokens_of(engine) == expected()
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == (knobs.get("num_blocks") == TIGHT)
    if not stats.num_preemptions:
        assert (stats.prefix_hits > 0) == engine.scheduler.config.enable_prefix_caching


# ------------------------------------------------------------------------------------------------- reads


class Checked:
    """A backend that checks, before each layer attends, that all keys that the layer reads are those of the right
    tokens. The expected keys are recorded when they are first written, by layer and by the tokens of the sequence up to
    the key's token. Blocks that no request holds and no cache lookup can find are filled with NaN."""

    def __init__(self, loaded: LoadedModel, engine_of: Callable[[], Engine], further: int = 0) -> None:
        self.backend, self.engine_of = loaded.attention, engine_of
        self.further = further  # number of tokens outside the window to compare too
        self.windows, self.layer = loaded.windows, 0
        self.known: dict[tuple[int, bytes], torch.Tensor] = {}
        self.num_read = self.num_reused = self.num_failures = 0
        self.fails = lambda: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(self, plan: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
        layer, self.layer = self.layer, (self.layer + 1) % len(self.windows)
        batch, output = plan.batch, self.engine_of().last_output
        assert output is not None and options["window"] == self.windows[layer]
        for row, (request, end, count) in enumerate(
            zip(output.requests, batch.kv_lens.tolist(), batch.query_lens.tolist(), strict=True)
        ):
            tokens = np.concatenate([request.prompt_token_ids, request._state.output_token_ids])[:end]
            start = 0 if self.windows[layer] is None else max(0, end - count - self.windows[layer] + 1 - self.further)
            at = np.arange(start, end)
            found = keys[batch.block_tables[row, at // SIZE], :, at % SIZE]
            self.num_read += len(at)
            for position, key in zip(at.tolist(), found, strict=True):
                name = layer, tokens[: position + 1].tobytes()
                if position >= end - count:
                    self.known.setdefault(name, key.clone())
                assert torch.allclose(self.known[name], key, atol=1e-4), f"layer {layer}, {request}, {position}"
        if self.fails():
            self.num_failures += 1
            self.layer = 0
            raise RuntimeError("planted")
        return self.backend.attend(plan, query, keys, values, **options)

    def spoil(self) -> None:
        """Write NaN to all blocks that may no longer be read."""
        engine = self.engine_of()
        pool = engine.scheduler._kv.pool
        free = ((pool.num_references == 0) & ~pool.is_cached).nonzero()[0]
        for tensor in (*engine.kv_pool.keys, *engine.kv_pool.values):
            tensor[free] = torch.nan


@pytest.mark.parametrize("num_blocks", [200, TIGHT])
def test_a_layer_reads_the_keys_written_for_the_same_tokens(num_blocks: int) -> None:
    """The keys are right even if steps fail during a forward pass and are computed again."""
    engines: list[Engine] = []
    checked = Checked(gemma(), lambda: engines[0])
    draw = np.random.default_rng(num_blocks)
    checked.fails = lambda: bool(draw.random() < 0.02)
    engines.append(Engine(gemma(), attention=checked, **{**KNOBS, "num_blocks": num_blocks}))
    assert tokens_of(engines[0], checked.spoil) == expected()
    assert checked.num_failures > 2 and checked.num_read > 5000
    assert (engines[0].scheduler.stats().num_preemptions > 0) == (num_blocks < 100)


def test_the_check_of_keys_detects_a_read_of_another_block() -> None:
    """The check of the previous test finds an error if a layer reads another block."""
    engines: list[Engine] = []
    checked = Checked(gemma(), lambda: engines[0], further=SIZE)
    engines.append(Engine(gemma(), attention=checked, **{**KNOBS, "enable_prefix_caching": False}))
    with pytest.raises(EngineStepError, match="AssertionError: layer"):
        engines[0].add_request("0", prompts()[0], GREEDY)
        while engines[0].has_unfinished_requests():
            engines[0].step()
            checked.spoil()


# ------------------------------------------------------------------------------------------------- held blocks


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_blocks_outside_a_window_are_freed_within_a_step(steps_in_flight: int) -> None:
    engine = Engine(gemma(), enable_prefix_caching=False, max_steps_in_flight=steps_in_flight, **KNOBS)
    groups = engine.scheduler.config.kv_groups
    before: list[dict[str, int]] = [{}] * steps_in_flight
    largest = 0

    def check() -> None:
        nonlocal largest
        output = engine.last_output
        assert output is not None
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        now = dict(zip((each.request_id for each in output.requests), output.num_computed_tokens.tolist(), strict=True))
        running = {each.request_id for each in output.requests if not each.is_finished}
        held = sum(
            -(-end // SIZE) - group.num_skipped(before[0].get(each.request_id, 0)) // SIZE
            for each, end in zip(output.requests, ends.tolist(), strict=True)
            if each.request_id in running
            for group in groups
        )
        stats = engine.scheduler.stats()
        in_use = stats.num_blocks - stats.num_free_blocks
        if stats.num_running == len(running):
            assert in_use <= held
            largest = max(largest, in_use)
        before.pop(0)
        before.append(now)

    assert tokens_of(engine, check) == expected()
    assert largest > 50


def test_kv_groups_let_more_requests_run() -> None:
    """Each layer of full attention has five layers with windows. The pool has the memory that 8 requests of full length
    need without groups."""
    window, length, size = (512, 4096, 32) if is_long() else (32, 256, 4)
    running: dict[bool, int] = {}
    for disable in (True, False):
        engine = Engine(
            gemma(5, window, length),
            disable_hybrid_kv_cache_manager=disable,
            num_blocks=8 * length // size * (1 if disable else 6),
            block_size=size,
            max_num_seqs=64,
            max_num_batched_tokens=length,
        )
        assert engine.kv_pool.num_bytes == 8 * length * 6 * 2 * 2 * 16 * 4
        params = SamplingParams(temperature=0, max_tokens=length // 8, ignore_eos=True)
        draw = np.random.default_rng(1)
        for index in range(48):
            prompt = draw.integers(3, VOCAB_SIZE, length - length // 8).tolist()
            engine.add_request(str(index), prompt, params)
        running[disable] = 0
        while engine.scheduler.stats().num_preemptions == 0 and engine.has_unfinished_requests():
            engine.step()
            running[disable] = max(running[disable], engine.scheduler.stats().num_running)
        assert running[disable] >= int(engine.scheduler.config.num_full_length)
    assert running[True] <= 9 and running[False] >= 2.5 * running[True]


# ------------------------------------------------------------------------------------------------- around it


def test_warm_up_and_replay_work_with_kv_groups() -> None:
    file = io.StringIO()
    engine = Engine(gemma(), recorder=Recorder(file), **{**KNOBS, "num_blocks": TIGHT})
    warm_up(engine)
    assert tokens_of(engine) == expected()
    report = replay(file.getvalue().splitlines())
    assert report.num_preemptions == engine.scheduler.stats().num_preemptions > 0


# ------------------------------------------------------------------------------------------------- outside the pool


@cache
def gpt_oss() -> LoadedModel:
    """Layers with a window and full attention alternate."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = FAMILIES["gpt-oss"]()
    lengths = {"sliding_window": WINDOW, "max_position_embeddings": 256}
    return wrap_model(build(type(config)(**{**config.to_dict(), **layers, **lengths}), seed=3))


@cache
def windows_alone() -> LoadedModel:
    """Every layer has a window, so there is one group."""
    config = FAMILIES["gemma3"]()
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
    return wrap_model(build(type(config)(**{**config.to_dict(), **HEAD16, **layers}), seed=3))


@cache
def expected_of(make: Callable[[], LoadedModel]) -> list[list[int]]:
    """The tokens of the model that `make` returns for the prompts, in an engine without KV groups."""
    return tokens_of(Engine(make(), disable_hybrid_kv_cache_manager=True, **KNOBS))


MODELS = pytest.mark.parametrize("make", [gemma, gpt_oss], ids=["gemma3", "gpt-oss"])
OFFLOAD = {"num_blocks": TIGHT, "kv_offload_bytes": 1 << 22}


@pytest.mark.parametrize("steps", [1, 2])
def test_evicted_blocks_of_windows_alone_come_back_from_host_memory(steps: int) -> None:
    """A load fills only the blocks of the window, which do not begin where the cached prefix ends."""
    engine = Engine(windows_alone(), max_steps_in_flight=steps, **{**KNOBS, **OFFLOAD, "num_blocks": 18})
    assert [group.kind for group in engine.scheduler.config.kv_groups] == ["window"]
    assert tokens_of(engine) == expected_of(windows_alone)
    assert engine.counters.num_restored_blocks > 5


def test_the_kv_store_keeps_the_blocks_of_windows_alone(tmp_path: Path) -> None:
    first = Engine(windows_alone(), kv_store=str(tmp_path), **KNOBS)
    assert tokens_of(first) == expected_of(windows_alone)
    first.close()
    conversation = [*prompts()[0], *expected_of(windows_alone)[0], 9, 8, 7]
    found = []
    for store in (None, str(tmp_path)):
        engine = Engine(windows_alone(), kv_store=store, **KNOBS)
        engine.add_request("0", conversation, GREEDY)
        while engine.has_unfinished_requests():
            found += [output.token_ids for output in engine.step() if output.finished]
    assert found[0] == found[1]
    assert engine.counters.num_loaded_blocks > 0


@MODELS
@pytest.mark.parametrize("steps", [1, 2])
def test_evicted_blocks_of_every_group_come_back_from_host_memory(make: Callable[[], LoadedModel], steps: int) -> None:
    engine = Engine(make(), max_steps_in_flight=steps, **{**KNOBS, **OFFLOAD})
    assert len(engine.scheduler.config.kv_groups) > 1
    assert tokens_of(engine) == expected_of(make)
    counters, stats = engine.counters, engine.scheduler.stats()
    assert counters.num_offloaded_blocks > 10 and counters.num_restored_blocks > 5
    assert stats.num_free_blocks == stats.num_blocks


@MODELS
def test_preempted_requests_swap_the_blocks_of_every_group(make: Callable[[], LoadedModel]) -> None:
    """After preemptions, most KV is copied back from host memory instead of being recomputed."""

    def run(**knobs: Any) -> tuple[dict[str, list[int]], Engine]:
        engine, draw = Engine(make(), **{**KNOBS, "num_blocks": 64, **knobs}), np.random.default_rng(5)
        for number in range(6):
            params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
            engine.add_request(str(number), draw.integers(3, VOCAB_SIZE, 12 + number).tolist(), params)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            found.update((output.request_id, output.token_ids) for output in engine.step() if output.finished)
            engine.scheduler.check_invariants()
        return found, engine

    wanted, _ = run(disable_hybrid_kv_cache_manager=True, num_blocks=200)
    found, plain = run()
    assert found == wanted and plain.scheduler.stats().num_preemptions > 5
    for steps in (1, 2):
        for mode in ("swap", "cheaper"):
            found, engine = run(preemption_mode=mode, kv_offload_bytes=1 << 22, max_steps_in_flight=steps)
            stats = engine.scheduler.stats()
            assert found == wanted and len(engine.scheduler.config.kv_groups) > 1
            if mode == "swap":  # the cheaper choice depends on the machine
                assert engine.counters.num_restored_blocks > 20
                assert stats.num_recomputed_tokens < 0.5 * plain.scheduler.stats().num_recomputed_tokens


@MODELS
def test_the_kv_store_keeps_the_blocks_of_every_group(make: Callable[[], LoadedModel], tmp_path: Path) -> None:
    """An engine reads the KV that another engine has stored: exactly the blocks to which the next token attends."""
    first = Engine(make(), kv_store=str(tmp_path), **KNOBS)
    assert len(first.scheduler.config.kv_groups) > 1
    assert tokens_of(first) == expected_of(make)
    first.close()
    assert first.counters.num_stored_blocks > 50
    second = Engine(make(), kv_store=str(tmp_path), **KNOBS)
    request = prompts()[0]
    conversation = [*request, *expected_of(make)[0], 9, 8, 7]
    tokens: dict[str, list[int]] = {}
    for engine, name in ((Engine(make(), disable_hybrid_kv_cache_manager=True, **KNOBS), "plain"), (second, "stored")):
        engine.add_request(name, conversation, GREEDY)
        while engine.has_unfinished_requests():
            tokens.update((output.request_id, output.token_ids) for output in engine.step() if output.finished)
            engine.scheduler.check_invariants()
    assert tokens["stored"] == tokens["plain"]
    stats = second.scheduler.stats()
    # Of 94 tokens the last one was sampled, not computed: 23 blocks of full attention, and of windows those of the end.
    assert stats.num_loaded_tokens == 92
    per_window = -(-(WINDOW - 1) // SIZE)
    num_full = sum(group.is_full for group in second.scheduler.config.kv_groups)
    num_windows = len(second.scheduler.config.kv_groups) - num_full
    assert second.counters.num_loaded_blocks == 23 * num_full + per_window * num_windows
    second.close()


@MODELS
def test_lost_files_of_the_store_are_recomputed(make: Callable[[], LoadedModel], tmp_path: Path) -> None:
    first = Engine(make(), kv_store=str(tmp_path), **KNOBS)
    tokens_of(first)
    first.close()
    draw = np.random.default_rng(1)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for path in files:
        if draw.random() < 0.2:
            path.unlink()
        elif draw.random() < 0.2:
            path.write_bytes(path.read_bytes()[:-7])
    second = Engine(make(), kv_store=str(tmp_path), **KNOBS)
    assert tokens_of(second) == expected_of(make)
    second.close()


@MODELS
@pytest.mark.parametrize("eviction", ["retention:share=0.6,default=5", "reuse"])
def test_retention_with_kv_groups_changes_no_tokens(make: Callable[[], LoadedModel], eviction: str) -> None:
    engine = Engine(make(), eviction=eviction, count_common_prefix=True, **{**KNOBS, "num_blocks": TIGHT})
    assert len(engine.scheduler.config.kv_groups) > 1
    assert tokens_of(engine) == expected_of(make)


def test_events_report_the_blocks_of_every_group() -> None:
    """In each group, the blocks that events report as stored and not as removed are the cached blocks."""
    engine = Engine(gemma(), kv_events_config={"endpoint": "inproc://windows"}, **{**KNOBS, "num_blocks": TIGHT})
    stored: set[tuple[int, bytes]] = set()
    kept: list[Any] = []
    assert engine.kv_events is not None
    publish = engine.kv_events.publish
    engine.kv_events.publish = lambda events: (kept.extend(events), publish(events))[1]  # type: ignore[method-assign]
    assert tokens_of(engine) == expected()
    for event in kept:
        names = {(event.group, name) for name in event.block_hashes}
        if isinstance(event, BlockStored):
            assert stored.isdisjoint(names)
            stored |= names
        else:
            assert stored >= names
            stored -= names
    prefix = engine.scheduler._kv.prefix
    assert prefix is not None
    cached = prefix.blocks()
    assert len(stored) == len({(prefix.group_of(block), prefix.content_of(block)) for block in cached}) > 10
    assert {group for group, _ in stored} == {0, 1, 2}
    engine.close()
