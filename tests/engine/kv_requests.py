"""Requests that share prefixes, repeat, and are too many for the pool; for tests of KV outside the pool."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pointsman.engine import Engine, EngineStepError, SamplingParams
from pointsman.engine.model.loaded import LoadedModel

TIGHT = {"num_blocks": 22, "full_sequence_must_fit": False}
"""Knobs of an engine with a KV pool so small that these requests preempt each other and cached prefixes are soon
evicted."""
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make(loaded: LoadedModel, **knobs: Any) -> Engine:
    defaults = {
        "num_blocks": 400,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    return Engine(loaded, **{**defaults, **knobs})


def prompt_of(number: int) -> list[int]:
    """A prompt of 12 to 34 tokens; in each group of four prompts the first 8 tokens are equal."""
    return [3 + number % 4] * 8 + [5 + (7 * number + 3 * place) % 150 for place in range(4 + 5 * number % 23)]


def add_round(engine: Engine, name: int, count: int = 10) -> None:
    for number in range(count):
        engine.add_request(f"{name}-{number}", prompt_of(number), PARAMS)


def drain(engine: Engine, failures: list[EngineStepError] | None = None) -> dict[str, list[int]]:
    """Step until all requests have finished, and check invariants after each step; return request id -> tokens. Steps
    may fail only if there is a list for their errors."""
    done: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        try:
            done.update((output.request_id, list(output.token_ids)) for output in engine.step() if output.finished)
        except EngineStepError as error:
            if failures is None:
                raise
            failures.append(error)
        check(engine)
    return done


def check(engine: Engine) -> None:
    engine.scheduler.check_invariants()
    if engine.kv_connector is not None and engine.kv_connector.tier is not None:
        engine.kv_connector.tier.check()


def break_passes(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    choose: random.Random,
    chance: float,
    parts: Sequence[str] = ("run",),
) -> None:
    """Let the methods `parts` of the engine's runner raise an error with probability `chance` before they begin, and
    with the same probability after they end."""
    for name in parts:
        original = getattr(engine.runner, name)

        def breaks(argument: Any, original: Callable[[Any], Any] = original) -> Any:
            if choose.random() < chance:
                raise RuntimeError("before")
            answer = original(argument)
            if choose.random() < chance:
                raise RuntimeError("after")
            return answer

        monkeypatch.setattr(engine.runner, name, breaks)


def run_rounds(engine: Engine, count: int = 3, failures: list[EngineStepError] | None = None) -> dict[str, list[int]]:
    """Run the same requests in several rounds, one after the other."""
    done: dict[str, list[int]] = {}
    for name in range(count):
        add_round(engine, name)
        done |= drain(engine, failures)
    return done


def settle(engine: Engine, seconds: float = 10.0) -> None:
    """Wait until no transfer is in progress and every block is free."""
    deadline = time.monotonic() + seconds
    while engine.scheduler.stats().num_transfers and time.monotonic() < deadline:
        time.sleep(0.01)
        engine.take_transfers()
    stats = engine.scheduler.stats()
    assert (stats.num_transfers, stats.num_free_blocks) == (0, stats.num_blocks)
    check(engine)
