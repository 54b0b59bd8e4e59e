"""Images and other encoder inputs inside vLLM: what is decided about them, and what real models make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_env import TORCHVISION

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm
from tests.soak import short_or_long

pytestmark = NEEDS_VLLM
NUM_WORKLOADS = short_or_long(20, 1000)
ENDS = ("kept others", "went further", "less behind a victim", "theirs lacks embeddings")
"""Why a comparison may end before its workload; docs/vllm.md has the reasons."""
MET_PER_100 = {"steps": 5_000, "preemptions": 100, "hits": 100, "chunks": 2_000, "inputs computed": 500, "freed": 200}
"""What so many workloads meet at least."""
SMALL_POOL = {"block_size": 32, "num_gpu_blocks_override": 18, "max_num_seqs": 6, "max_model_len": 448}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "llava, preempting": ("llava", {**SMALL_POOL, "scheduler_reserve_full_isl": False}),
    "llava, one image a step": ("llava", {"max_num_batched_tokens": 40}),
    "llava, images in one chunk": ("llava", {"max_num_batched_tokens": 40, "disable_chunked_mm_input": True}),
    "qwen2-vl, positions by grid": ("qwen2-vl", {}),
    "qwen2-vl, without prefix caching": ("qwen2-vl", {"enable_prefix_caching": False}),
    "gemma3, groups of KV and masks": ("gemma3", {}),
}


def test_decisions_are_those_of_vllms_own_scheduler() -> None:
    """On random workloads, step by step: which images are computed too; and no row reads embeddings that are gone."""
    found = run_in_vllm("vllm_decisions.py", 0, NUM_WORKLOADS, "images", timeout=1800)
    assert not found["differences"], json.dumps(found["differences"][0], indent=1)
    tally = found["tally"]
    for what, least in MET_PER_100.items():
        assert tally[what] >= least * NUM_WORKLOADS // 100, f"{what}: {tally[what]}"
    ended_early = [tally.get(why, 0) for why in ENDS]
    assert sum(ended_early) <= NUM_WORKLOADS // 4, tally


def test_images_in_one_situation_after_the_other() -> None:
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
    is_equal, keys = found["events"]
    assert is_equal and keys == [[["cat", 6], "salt"], [["cat", -2]], [["dog", 4]], [["dog", -4]], None]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "options"), [("qwen3", {}), ("qwen3", SMALL_POOL), ("gemma3", {}), ("qwen3", {"async_scheduling": True})]
)
def test_prompts_of_embeddings_get_the_tokens_that_vllms_own_scheduler_gives(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """And those of the same prompts as tokens, beside them; found again as often."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs, ours = (run_in_vllm("vllm_embeds.py", family, how, tmp_path, *given) for how in ("theirs", "ours"))
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5
    assert ours["tokens"] == theirs["tokens"]
    assert ours["tokens"][::2] == ours["tokens"][1::2]
    if options is not SMALL_POOL:
        assert ours["cached"] == theirs["cached"] and max(ours["cached"]) > 0
    else:
        assert ours["preemptions"] > 0


@pytest.mark.soak
@pytest.mark.skipif(not TORCHVISION.exists(), reason="no torchvision; benchmarks/vllm_env.py makes a folder with it")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_vllms_own_scheduler(tmp_path: Path, case: str) -> None:
    """In the same steps, with the same images computed in each; twice, so that caches are used."""
    family, options = CASES[case]
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs = run_in_vllm("vllm_images.py", family, "theirs", tmp_path, *given, sources=TORCHVISION)
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5, "the model does not tell its prompts apart"
    ours = run_in_vllm("vllm_images.py", family, "ours", tmp_path, *given, sources=TORCHVISION)
    for name in ("tokens", "cached", "steps", "encoder", "groups"):
        assert ours[name] == theirs[name], name
    assert ours["reused"] > 0
    assert "preempting" not in case or ours["preemptions"] > 0
