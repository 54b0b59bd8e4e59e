"""Images, audio and other encoder inputs inside vLLM: decisions, and the tokens of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_env import TORCHVISION, VLLM_VERSION

from tests.forms import seeds, short_of
from tests.integrations.vllm_process import NEEDS_VLLM, SHORT_MODELS, decided_alike, run_in_vllm

pytestmark = NEEDS_VLLM
WORKLOADS = seeds(12, 330, kept=(2026112700033, 2026112700109))
ENDS = (
    "kept others",
    "went further",
    "lacked blocks to go further",
    "less behind a victim",
    "theirs lacks embeddings",
)
"""Reasons why a comparison may end before its workload; vllm_decisions.py explains them."""
MET_PER_100 = {"steps": 5_000, "preemptions": 100, "hits": 100, "chunks": 2_000, "inputs computed": 500, "freed": 200}
"""Minimum number of each event in these workloads."""
WITH_ENCODERS = seeds(12, 330, kept=(2026112700064,))
MET_WITH_ENCODERS_PER_100 = {"steps": 5_000, "preemptions": 20, "inputs computed": 1_000, "freed": 1_000, "drafts": 500}
SMALL_POOL = {"block_size": 32, "num_gpu_blocks_override": 18, "max_num_seqs": 6, "max_model_len": 448}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "llava, preempting": ("llava", {**SMALL_POOL, "scheduler_reserve_full_isl": False}),
    "llava, one image a step": ("llava", {"max_num_batched_tokens": 40}),
    "llava, images in one chunk": ("llava", {"max_num_batched_tokens": 40, "disable_chunked_mm_input": True}),
    "qwen2-vl, positions by grid": ("qwen2-vl", {}),
    "qwen2-vl, without prefix caching": ("qwen2-vl", {"enable_prefix_caching": False}),
    "gemma3, groups of KV and masks": ("gemma3", {}),
    "qwen2-audio": ("qwen2-audio", {}),
    "qwen2-audio, preempting": (
        "qwen2-audio",
        {**SMALL_POOL, "max_model_len": 1024, "num_gpu_blocks_override": 34, "scheduler_reserve_full_isl": False},
    ),
    "qwen2-vl, video": ("qwen2-vl-video", {}),
}
SHORT_OF_KV = {
    "block_size": 32,
    "num_gpu_blocks_override": 12,
    "max_num_seqs": 6,
    "scheduler_reserve_full_isl": False,
    "max_tokens": 40,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "whisper": {},
    "whisper, preempting": SHORT_OF_KV,
    "whisper, asynchronous": {"async_scheduling": True},
    "whisper, n-gram drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
}


@pytest.mark.next_vllm
def test_scheduling_with_images_equals_that_of_vllm() -> None:
    """On random workloads, step by step, including the computed images; and no row reads dropped embeddings."""
    tally = decided_alike(WORKLOADS, "images", met_per_100=MET_PER_100)
    ended_early = [tally.get(why, 0) for why in ENDS]
    assert sum(ended_early) <= len(WORKLOADS) // 4, tally


@pytest.mark.parametrize(
    ("seed", "why"),
    [(613, "lacked blocks to go further"), (850, "less behind a victim"), (913, "lacked blocks to go further")],
)
def test_differences_from_vllm_with_images_have_documented_reasons(seed: int, why: str, vllm_version: str) -> None:
    """Few workloads meet these differences, depending on the version."""
    if vllm_version != VLLM_VERSION:
        pytest.skip(f"these workloads meet them with vLLM {VLLM_VERSION}")
    found = run_in_vllm("vllm_decisions.py", seed, 1, "images")
    assert not found["differences"] and found["tally"][why] == 1, found


def test_scheduling_of_encoder_decoder_models_equals_vllms() -> None:
    """On random workloads, step by step, with the same embeddings computed and dropped; each row reads its own KV."""
    tally = decided_alike(WITH_ENCODERS, "encoder", met_per_100=MET_WITH_ENCODERS_PER_100)
    ended_early = [tally.get(why, 0) for why in ("resumed in chunks", "gave up drafts")]
    assert sum(ended_early) <= len(WITH_ENCODERS) // 5, tally


def test_unusual_image_requests_end_as_documented() -> None:
    found = run_in_vllm("vllm_image_cases.py")
    assert found["too large"] == [{"small": "length", "large": "error"}, True]
    ended, later, num_computed = found["another number"]
    assert ended == {"one": "length", "two": "error", "both": "error", "same": "length"}
    assert (later, num_computed) == ("length", 2), "with the first number once, and once with the other"
    assert found["held while waiting"] == [["a"], ["length"] * 3]
    assert found["payload"] == [True, True], "a preempted request may have to compute its images again"
    assert found["payload, second runner"] == [False, True], "which gets a resumed request anew"
    assert found["reset"] == [["cat"], ["cat"]], "once, and once more behind the reset"
    assert found["session"] == [[["cat"], ["dog"]], 23], "the second image, behind 20 tokens"
    hits, are_equal, ended = found["embeddings"]
    assert hits == [0, 8, 0, 16, 0, 16, 0] and are_equal, "by the same bytes, with the same tokens among them"
    assert ended == "error", "a prompt of embeddings does not come in parts"
    ended, computed, freed = found["encoder-decoder"]
    assert {name for name, reason in ended.items() if reason == "error"} == {"large", "in parts", "too long beside it"}
    assert len(ended) == 6 and computed == freed == [["cat", "cat"]], "for each of them, and dropped behind their step"
    is_equal, keys = found["events"]
    assert is_equal and keys == [[["cat", 6], "salt"], [["cat", -2]], [["dog", 4]], [["dog", -4]], None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {}), ("qwen3", SMALL_POOL), ("gemma3", {}), ("qwen3", {"async_scheduling": True})]
)
def test_prompts_given_as_embeddings_get_the_same_tokens_as_in_vllm(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """The prompts given as token ids get equal tokens and equally many cache hits, too."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs, ours = (run_in_vllm("vllm_embeds.py", family, how, tmp_path, *given) for how in ("theirs", "ours"))
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5
    assert ours["tokens"] == theirs["tokens"]
    assert ours["tokens"][::2] == ours["tokens"][1::2]
    if options is not SMALL_POOL:
        assert ours["cached"] == theirs["cached"] and max(ours["cached"]) > 0
    else:
        assert ours["preemptions"] > 0


@pytest.mark.parametrize("case", short_of(list(ENCODER_DECODERS), SHORT_MODELS))
def test_tokens_of_encoder_decoders_equal_vllms(tmp_path: Path, case: str) -> None:
    """Whisper: the steps, and the inputs that each step computes, are equal, too."""
    options = ENCODER_DECODERS[case]
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs, ours = (run_in_vllm("vllm_media.py", "whisper", how, tmp_path, *given) for how in ("theirs", "ours"))
    assert ours["asynchronous"] == theirs["asynchronous"] == ("async_scheduling" in options)
    for name in ("groups", "encoder", "cached"):
        assert ours[name] == theirs[name], name
    if "async_scheduling" in options:  # here embeddings are released a step earlier
        assert len(ours["steps"]) <= len(theirs["steps"])
    elif "speculative_config" in options:  # ours makes no drafts beyond max_tokens
        assert len(ours["steps"]) == len(theirs["steps"])
    else:
        assert ours["steps"] == theirs["steps"]
    if case == "whisper, preempting":  # vLLM's own then gives rows wrong embeddings: see vllm_decisions.py
        assert ours["preemptions"] > 0
        theirs = run_in_vllm("vllm_media.py", "whisper", "theirs", tmp_path, f"max_tokens={options['max_tokens']}")
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5, "the model does not tell its prompts apart"
    assert ours["tokens"] == theirs["tokens"]
    assert "CrossAttentionSpec" in ours["groups"] and ours["reused"] == 0


@pytest.mark.long
@pytest.mark.skipif(not TORCHVISION.exists(), reason="no torchvision; benchmarks/vllm_env.py makes a folder with it")
@pytest.mark.parametrize("case", CASES)
def test_tokens_with_images_equal_those_of_vllms_scheduler(tmp_path: Path, case: str) -> None:
    """The steps and the images that each step computes are equal, too. All prompts run twice, to use caches."""
    family, options = CASES[case]
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs = run_in_vllm("vllm_media.py", family, "theirs", tmp_path, *given, packages=TORCHVISION)
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5, "the model does not tell its prompts apart"
    ours = run_in_vllm("vllm_media.py", family, "ours", tmp_path, *given, packages=TORCHVISION)
    exact = ["tokens", "cached", "steps", "encoder", "groups"]
    if case == "gemma3, groups of KV and masks":  # ours keeps blocks behind a window longer: see vllm_decisions.py
        assert all(our >= their for our, their in zip(ours["cached"], theirs["cached"], strict=True))
        assert sum(ours["cached"]) <= sum(theirs["cached"]) + 128, "one prefix more"
        exact = ["tokens", "encoder", "groups"]
    for name in exact:
        assert ours[name] == theirs[name], name
    assert ours["reused"] > 0
    assert "preempting" not in case or ours["preemptions"] > 0
