"""Greedy tokens of published models equal transformers', in eight languages and code, under all scheduling features.

Each token must be the most likely one in transformers after the prompt and the tokens before it. If its two most likely
tokens are nearly equal, rounding decides, and a warning shows both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from pointsman.engine import Engine, RequestOutput, SamplingParams
from tests.engine.engine_loop import Seen, run
from tests.engine.real.prompts import PROMPTS, SOME_PROMPTS
from tests.engine.real.reference import loaded, reference, token_ids_of
from tests.engine.real.weights import NAMES
from tests.forms import is_long, short_of, short_or_long

pytestmark = pytest.mark.e2e

TEXTS = PROMPTS if is_long() else SOME_PROMPTS
GREEDY = SamplingParams(temperature=0.0, max_tokens=short_or_long(8, 24))
MAX_TIES = 2
"""Maximum number of near ties in all outputs of a run."""


@dataclass
class Run:
    """The results of one engine for all prompts."""

    engine: Engine
    outputs: list[RequestOutput]
    seen: Seen

    @property
    def num_preempted(self) -> int:
        return sum(output.metrics.num_preemptions > 0 for output in self.outputs)


@dataclass(frozen=True)
class Setting:
    """The configuration of an engine that tests a feature, and a function that counts uses of the feature."""

    knobs: dict[str, Any]
    count: Callable[[Run], int]
    rounds: int = 1
    num_spare_blocks: int | None = None
    """Number of blocks in the pool in addition to those of the longest request; None: enough blocks for all
    requests."""


SETTINGS = {
    "alone": Setting({"max_num_seqs": 1}, lambda run: run.seen.max_rows == 1),
    "batch of 16": Setting({"max_num_seqs": 16}, lambda run: run.seen.max_rows == min(16, len(TEXTS))),
    "chunks": Setting({"max_num_batched_tokens": 64}, lambda run: run.seen.chunks),
    "preemption": Setting({"full_sequence_must_fit": False}, lambda run: run.num_preempted, num_spare_blocks=1),
    "swap": Setting(
        {"full_sequence_must_fit": False, "preemption_mode": "swap", "kv_offload_bytes": 1 << 28},
        lambda run: min(run.num_preempted, run.engine.counters.num_restored_blocks),
        num_spare_blocks=1,
    ),
    "prefix hits": Setting({}, lambda run: sum(output.num_cached_tokens for output in run.outputs), rounds=2),
    "drafts": Setting(
        {"num_draft_tokens": 4, "prompt_lookup_min": 1}, lambda run: run.engine.scheduler.stats().num_accepted_tokens
    ),
    "steps in flight": Setting({"max_steps_in_flight": 2}, lambda run: run.seen.max_in_flight),
}
BLOCK_SIZE = 8


@pytest.mark.parametrize(("name", "setting"), short_of([*product(NAMES, SETTINGS)], [*product(["smollm2"], SETTINGS)]))
def test_greedy_tokens_equal_transformers(
    name: str, setting: str, record_property: Callable[[str, object], None]
) -> None:
    how = SETTINGS[setting]
    prompts = [token_ids_of(name, text) for text in TEXTS]
    longest = max(map(len, prompts)) + GREEDY.max_tokens
    num_blocks = 2000 if how.num_spare_blocks is None else -(-longest // BLOCK_SIZE) + how.num_spare_blocks
    engine = Engine(
        loaded(name),
        **{"max_model_len": 512, "num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": 16, **how.knobs},
    )
    for _ in range(how.rounds):
        seen = Seen()
        outputs = run(engine, prompts, GREEDY, seen)
        engine.step()  # reports finished requests, whose ids are then free
    count = how.count(Run(engine, outputs, seen))
    assert count, f"{setting} did not happen"
    ties = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ties += reference(name).check_greedy(prompt, output.token_ids)
        has_ended = output.token_ids[-1] in engine.eos_token_ids
        assert output.finish_reason == ("stop" if has_ended else "length")
        assert has_ended or len(output.token_ids) == GREEDY.max_tokens
    for what, value in (("outputs", len(outputs)), ("count", count), ("ties", ties)):
        record_property(what, value)
    assert len(ties) <= MAX_TIES


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers_generate(name: str) -> None:
    """The reference tokens are from transformers' own `generate`, with its own KV cache."""
    prompts = [token_ids_of(name, text) for text in PROMPTS]
    outputs = run(Engine(loaded(name), max_model_len=512, num_blocks=1000, block_size=16), prompts, GREEDY)
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.token_ids != (theirs := reference(name).generate(prompt, GREEDY.max_tokens)):
            ties += len(reference(name).check_greedy(prompt, output.token_ids))
            ties += len(reference(name).check_greedy(prompt, theirs))
    assert ties <= MAX_TIES
