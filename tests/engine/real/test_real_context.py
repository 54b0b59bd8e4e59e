"""Gemma 3 with 2,000 tokens of context, four of its windows: greedy tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pointsman.engine import Engine, SamplingParams
from tests.engine.engine_loop import Seen, run
from tests.engine.real.reference import loaded, reference, token_ids_of
from tests.engine.test_equality import Without

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NAME = "gemma3-270m"
LENGTH = 2000
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
DOCUMENTS = Path(__file__).parents[3] / "docs"


def prompt_of(document: str) -> list[int]:
    token_ids = token_ids_of(NAME, (DOCUMENTS / document).read_text(encoding="utf-8"))
    assert len(token_ids) > LENGTH > 3 * loaded(NAME).config.sliding_window
    return token_ids[:LENGTH]


def test_greedy_tokens_after_long_contexts_equal_transformers() -> None:
    """Prompts are computed in chunks, two requests at a time; in the second run with cache hits."""
    prompts = [prompt_of("reference/models.md"), prompt_of("how_it_works/engine.md")]
    engine = Engine(loaded(NAME), max_model_len=LENGTH + 48, num_blocks=1000, max_num_batched_tokens=300)
    assert len(engine.scheduler.config.kv_groups) > 1, "layers with a window keep only the KV of the window"
    seen = Seen()
    first, again = run(engine, prompts, GREEDY, seen), None
    engine.step()  # reports finished requests, whose ids are then free
    again = run(engine, prompts, GREEDY)
    assert seen.chunks >= 2 * LENGTH // 300
    assert all(output.num_cached_tokens > LENGTH / 2 for output in again)
    ties = []
    for prompt, *outputs in zip(prompts, first, again, strict=True):
        for output in outputs:
            assert len(output.token_ids) == GREEDY.max_tokens
            ties += reference(NAME).check_greedy(prompt, output.token_ids)
    assert len(ties) <= 1


def test_ignoring_the_sliding_window_changes_the_tokens() -> None:
    """The tokens differ if the window is ignored, so the previous test does test windows."""
    prompt = prompt_of("how_it_works/engine.md")
    options: dict[str, Any] = {
        "max_model_len": LENGTH + 48,
        "num_blocks": 1000,
        "disable_hybrid_kv_cache_manager": True,
    }
    faulty = Without(loaded(NAME).attention, "window")
    output = run(Engine(loaded(NAME), attention=faulty, **options), [prompt], GREEDY)[0]
    with pytest.raises(AssertionError, match=r"Tie\(place=\d+"):
        reference(NAME).check_greedy(prompt, output.token_ids)
