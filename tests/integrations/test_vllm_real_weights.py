"""Published weights in real vLLM, from an exported directory: transformers' tokens, with its scheduler and ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.real.prompts import BY_LANGUAGE
from tests.engine.real.reference import exported, loaded, reference, token_ids_of
from tests.engine.real.weights import NAMES
from tests.integrations.test_vllm_tokens import run_vllm
from tests.integrations.vllm_process import NEEDS_VLLM
from tests.integrations.vllm_requests import Way

pytestmark = [*NEEDS_VLLM, pytest.mark.long]

TEXTS = [text for prompts in BY_LANGUAGE.values() for text in (prompts[0], prompts[-1])]
"""A short and a long prompt in each language, and of code."""
MAX_TOKENS = 24
MAX_TIES = 2
NUM_BLOCKS = {"smollm2": 14, "gemma3-270m": 76}
"""Of 32 tokens; the longest request takes 8, for each of the six groups that vLLM makes of Gemma's layers. Requests
preempt each other."""
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 256}


def check_tokens(name: str, answers: dict[str, Any], prompts: list[list[int]]) -> int:
    """The number of near ties."""
    ties = 0
    for number, prompt in enumerate(prompts):
        answer = answers[str(number)]
        ties += len(reference(name).check_greedy(prompt, answer["tokens"]))
        has_ended = answer["tokens"][-1] in loaded(name).eos_token_ids
        assert answer["reason"] == ("stop" if has_ended else "length")
        assert has_ended or len(answer["tokens"]) == MAX_TOKENS
    return ties


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_published_models_equal_those_of_transformers(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    prompts = [token_ids_of(name, text) for text in TEXTS]
    params = {"max_tokens": MAX_TOKENS}
    requests = [
        {"id": str(number), "prompt": prompt, "params": params, "step": number // 3}
        for number, prompt in enumerate(prompts)
    ]
    way = Way({**CHUNKED, "num_gpu_blocks_override": NUM_BLOCKS[name]})
    for ours in (False, True):
        found = run_vllm(tmp_path, way, ours=ours, requests=requests, aborts={}, model=exported(name))
        assert found["scheduler"].startswith("pointsman." if ours else "vllm.")
        preemptions = found["metrics"]["vllm:num_preemptions"]
        ties = check_tokens(name, found["answers"], prompts)
        record_property("ours" if ours else "vLLM's", json.dumps({"preemptions": preemptions, "ties": ties}))
        assert ties <= MAX_TIES and preemptions > 0
