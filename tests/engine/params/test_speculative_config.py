"""vLLM's `speculative_config`: the knobs that it sets, and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pointsman.core import ConfigError
from pointsman.engine import LLM, AsyncEngine, Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.params.engine_args import speculation_knobs
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build

OWNED = {LLM: "engine", AsyncEngine: "_engine"}
CONFIG = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


@pytest.mark.parametrize(
    ("more", "lookup"),
    [
        ({}, {}),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None, "model": None}, {}),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({"prompt_lookup_max": 4}, {"prompt_lookup_min": 4, "prompt_lookup_max": 4}),
        ({"prompt_lookup_min": 3}, {"prompt_lookup_min": 3, "prompt_lookup_max": 3}),
    ],
)
def test_speculative_config_sets_knobs(more: dict[str, Any], lookup: dict[str, int]) -> None:
    assert speculation_knobs({**CONFIG, **more}, {"max_num_seqs": 4}) == {"num_draft_tokens": 3, **lookup}


@pytest.mark.parametrize(
    ("config", "others", "message"),
    [
        ("ngram", {}, "speculative_config is 'ngram'; give a mapping"),
        ({}, {}, r'method is None; the only supported method is "ngram" \(prompt lookup\)'),
        ({**CONFIG, "method": "eagle3"}, {}, "method is 'eagle3'"),
        ({**CONFIG, "model": "small"}, {}, "model is not supported; drafts come from the request's own tokens"),
        ({**CONFIG, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, {}, "use the knob draft_table"),
        ({**CONFIG, "num_tokens": 3}, {}, "num_tokens is not supported; supported are method, num_speculative_tokens"),
        ({"method": "ngram"}, {}, "num_speculative_tokens is None; it must be an integer of at least 1"),
        ({**CONFIG, "num_speculative_tokens": 0}, {}, "num_speculative_tokens is 0"),
        ({**CONFIG, "num_speculative_tokens": True}, {}, "num_speculative_tokens is True"),
        (CONFIG, {"num_draft_tokens": 2}, "speculative_config and num_draft_tokens 2 both set speculation"),
        (CONFIG, {"prompt_lookup_max": 2}, "speculative_config and prompt_lookup_max 2 both set speculation"),
    ],
)
def test_invalid_speculative_config_is_refused(config: Any, others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculation_knobs(config, others)


@pytest.mark.parametrize("kind", [LLM, AsyncEngine, Engine])
def test_engines_accept_speculative_config(loaded: LoadedModel, kind: Any) -> None:
    made = kind(loaded, num_blocks=80, speculative_config={**CONFIG, "prompt_lookup_max": 1})
    engine = getattr(made, OWNED[kind]) if kind in OWNED else made
    assert engine.scheduler.config.num_draft_tokens == 3
    if kind is AsyncEngine:
        asyncio.run(made.shutdown())
        return
    if kind is LLM:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        (output,) = made.generate([{"prompt_token_ids": [40, 41, 42] * 6}], params, use_tqdm=False)
        assert len(output.token_ids) == 40
        assert engine.scheduler.stats().num_draft_tokens > 0
    with pytest.raises(ConfigError, match="prompt_lookup_min is 4, more than prompt_lookup_max, 3"):
        kind(loaded, num_blocks=80, speculative_config={**CONFIG, "prompt_lookup_min": 4, "prompt_lookup_max": 3})
    with pytest.raises(ConfigError, match="both set speculation"):
        kind(loaded, num_blocks=80, speculative_config=CONFIG, prompt_lookup_min=2)
