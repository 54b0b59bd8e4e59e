"""Models whose KV is in several groups: windows, chunks and states, in real vLLM and beside vLLM's own scheduler."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import replay
from tests.forms import seeds, short_of
from tests.integrations.vllm_process import (
    NEEDS_VLLM,
    RUN,
    SHORT_MODELS,
    compared,
    decided_alike,
    run_in_vllm,
    vllm_parent,
)

pytestmark = NEEDS_VLLM
FLAG = "--disable-hybrid-kv-cache-manager"
SMALL_POOL = {"block_size": 32, "max_num_seqs": 6, "scheduler_reserve_full_isl": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NO_CACHE = {"enable_prefix_caching": False}
CACHE = {"enable_prefix_caching": True}
PARTS = {**CACHE, "prefix_match_unit": 32}  # a prefix ends inside a block of 128
SHORT_OF_STATES = {
    "max_num_seqs": 6,
    "scheduler_reserve_full_isl": False,
    "num_gpu_blocks_override": 13,
    "max_tokens": 60,
}
STATES = {"MambaSpec", "FullAttentionSpec"}
LONG = {"dtype": "bfloat16", "shared": 700, "max_model_len": 1024, "max_num_batched_tokens": 640}  # blocks of 640
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # A family, options, and its groups.
    "gemma3": ("gemma3", {}, {"SlidingWindowSpec", "FullAttentionSpec"}),
    "gemma3, preempting": ("gemma3", {**SMALL_POOL, "num_gpu_blocks_override": 66}, {"SlidingWindowSpec"}),
    "gpt-oss, preempting": ("gpt-oss", {**SMALL_POOL, "num_gpu_blocks_override": 36}, {"SlidingWindowSpec"}),
    "gpt-oss, asynchronous": ("gpt-oss", {"async_scheduling": True}, {"SlidingWindowSpec"}),
    "olmo3": ("olmo3", {}, {"SlidingWindowSpec", "FullAttentionSpec"}),
    "cohere2": ("cohere2", {}, {"SlidingWindowSpec", "FullAttentionSpec"}),
    "mistral, windows alone": ("mistral", {**SMALL_POOL, "num_gpu_blocks_override": 24}, {"SlidingWindowSpec"}),
    "llama4": ("llama4", {}, {"ChunkedLocalAttentionSpec", "FullAttentionSpec"}),
    "gemma3, n-gram drafts": ("gemma3", {"speculative_config": NGRAM}, {"SlidingWindowSpec", "FullAttentionSpec"}),
    "gemma4, two block sizes": ("gemma4", {}, {"SlidingWindowSpec", "FullAttentionSpec"}),
    "granite4": ("granite4", NO_CACHE, {"MambaSpec", "FullAttentionSpec"}),
    "nemotron-h": ("nemotron-h", NO_CACHE, {"MambaSpec", "FullAttentionSpec"}),
    "qwen3-next": ("qwen3-next", {**NO_CACHE, "dtype": "bfloat16"}, {"MambaSpec", "FullAttentionSpec"}),
    "lfm2": ("lfm2", NO_CACHE, {"MambaSpec", "FullAttentionSpec"}),
    "lfm2, cached": ("lfm2", CACHE, STATES),
    "lfm2, cached, asynchronous": ("lfm2", {**CACHE, "async_scheduling": True}, STATES),
    "lfm2, cached, preempting": ("lfm2", {**CACHE, **SHORT_OF_STATES}, STATES),
    "lfm2, n-gram drafts": ("lfm2", {**NO_CACHE, "speculative_config": NGRAM}, STATES),
    "lfm2, cached in parts": ("lfm2", PARTS, STATES),
    "lfm2, cached in parts, preempting": ("lfm2", {**PARTS, **SHORT_OF_STATES}, STATES),
    "lfm2, cached in parts, asynchronous": ("lfm2", {**PARTS, "async_scheduling": True}, STATES),
    "qwen3-next, cached": ("qwen3-next", {**CACHE, **LONG}, STATES),
    "qwen3-next, cached, asynchronous": ("qwen3-next", {**CACHE, **LONG, "async_scheduling": True}, STATES),
    "bert, which keeps no KV": ("bert", {}, set()),
    "mamba2, states alone": ("mamba2", NO_CACHE, {"MambaSpec"}),
    "falcon-h1, short pool": ("falcon-h1", {**NO_CACHE, "num_gpu_blocks_override": 12}, {"MambaSpec"}),
}
WORKLOADS = seeds(12, 330)
MET_PER_100 = {"steps": 5_000, "preemptions": 50, "hits": 50, "chunks": 2_000, "stopped": 300, "asynchronous": 20}
"""Minimum number of each event in these workloads."""


@pytest.mark.parametrize("case", short_of(list(CASES), SHORT_MODELS))
def test_tokens_with_kv_groups_equal_those_of_vllms_scheduler(tmp_path: Path, case: str) -> None:
    """The numbers of steps and of cached tokens are equal, too. Prompts run twice; the second run finds them cached."""
    family, options, groups = CASES[case]
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    theirs = run_in_vllm("vllm_groups.py", family, "theirs", tmp_path, *given)
    assert len({tuple(tokens) for tokens in theirs["tokens"]}) >= 5, "the model does not tell its prompts apart"
    ours = run_in_vllm("vllm_groups.py", family, "ours", tmp_path, *given)
    assert groups <= set(ours["groups"])
    if case == "lfm2, n-gram drafts":  # vLLM's own varies from run to run on a CPU: see vllm_decisions.py
        assert ours["usage"] == 0 and list(map(len, ours["tokens"])) == list(map(len, theirs["tokens"]))
        return
    for name in ("tokens", "cached"):
        assert ours[name] == theirs[name], name
    if case == "lfm2, cached in parts, preempting":  # ours releases unneeded blocks before it preempts
        assert ours["steps"] <= theirs["steps"]
    else:
        assert ours["steps"] == theirs["steps"]
    assert ours["usage"] == 0
    if case == "gemma4, two block sizes":
        assert len(set(ours["block_sizes"])) == 2
    assert not case.endswith("preempting") or ours["preemptions"] > 0
    if "cached" in case:
        assert sum(count > 0 for count in ours["cached"]) >= 4
    if "in parts" in case and "preempting" not in case:
        assert any(count % 128 for count in ours["cached"]), "no prefix ends inside a block"


@pytest.mark.long
def test_one_kv_group_gives_the_same_tokens_as_several_kv_groups(tmp_path: Path) -> None:
    """Compares vLLM with and without the flag that keeps all KV in one group, which the core owns."""
    several = run_in_vllm("vllm_groups.py", "gemma3", "ours", tmp_path)
    one = run_in_vllm("vllm_groups.py", "gemma3", "one", tmp_path)
    assert one["tokens"] == several["tokens"] and one["groups"] == ["FullAttentionSpec"]
    check = ["-m", "pointsman", "vllm", "check", tmp_path, "--skip-tokenizer-init"]
    for flags, says in (
        ([], "4 groups, kept by Pointsman"),
        ([FLAG], "1 group: 4 layers of FullAttentionSpec"),
    ):
        checked = vllm_parent().run(*check, *flags, timeout=300)
        assert checked.returncode == 0 and says in checked.stdout, checked.stdout + checked.stderr
    record = ["--additional-config", '{"pointsman": {"record": "run.jsonl"}}']
    checked = vllm_parent().run(*check, *record, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.long
def test_a_recording_with_sliding_windows_is_replayed(tmp_path: Path) -> None:
    """A recording of layouts that the core manages itself is replayed."""
    file = tmp_path / "run.jsonl"
    settings = json.dumps({"pointsman": {"socket": "", "record": str(file)}})
    options = [f"{key}={json.dumps(value)}" for key, value in {**SMALL_POOL, "num_gpu_blocks_override": 66}.items()]
    run = run_in_vllm("vllm_groups.py", "gemma3", "ours", tmp_path, *options, f"additional_config={settings}")
    with file.open() as lines:
        assert replay(lines).num_steps >= run["steps"] > 0
    assert '"block_places"' in file.read_text()


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4", "falcon-h1", "llama4"])
def test_check_reports_vllms_groups(tmp_path: Path, family: str) -> None:
    """It also reports how many requests fit, from blocks or from a log, without weights."""
    options = NO_CACHE if family == "falcon-h1" else {}
    given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    real = run_in_vllm("vllm_groups.py", family, "ours", tmp_path, *given)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    check = ["-m", "pointsman", "vllm", "check", tmp_path, "--skip-tokenizer-init", "--max-model-len", 512]
    check += ["--max-num-batched-tokens", 128, "--max-num-seqs", 4, "--dtype", "float32"]
    check += ["--no-enable-prefix-caching"] if options else []
    checked = vllm_parent().run(*check, "--num-gpu-blocks-override", 40, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    told: Counter[tuple[str, int, int]] = Counter()
    pattern = r"^  (\d+) groups?: (?:each )?(\d+) layers? of (\w+).*, blocks of (\d+) tokens$"
    for count, layers, kind, size in re.findall(pattern, checked.stdout, re.MULTILINE):
        told[kind, int(layers), int(size)] += int(count)
    assert told == Counter(zip(real["groups"], real["layers"], real["block_sizes"], strict=True))
    blocks = int(re.findall(r"takes at most (\d+) block", checked.stdout)[0])
    assert blocks == round(40 / real["concurrency"])
    assert f"{39 / blocks:.3g} such requests fit 40 blocks" in checked.stdout

    checked = vllm_parent().run(*check, "--kv-cache-memory-bytes", 2**24, timeout=300)
    assert re.search(r"such requests fit [\d,]+ blocks", checked.stdout)
    checked = vllm_parent().run(*check, timeout=300, VLLM_CPU_KVCACHE_SPACE="0")
    assert "how many requests fit is known from --kv-cache-memory-bytes" in checked.stdout
    log = tmp_path / "log"
    log.write_text("INFO GPU KV cache size: 1,644 tokens, Maximum concurrency for 512 tokens per request: 3.21x\n")
    checked = vllm_parent().run(*check, "--log", log, timeout=300)
    assert "3.21 requests of 512 tokens fit, by the log" in checked.stdout
    log.write_text("INFO it has not started\n")
    checked = vllm_parent().run(*check, "--log", log, timeout=300)
    assert checked.returncode == 2 and 'no line with "Maximum concurrency"' in checked.stderr


@pytest.mark.long
def test_prompts_too_short_for_the_prefix_cache_are_reported(tmp_path: Path) -> None:
    """`check` and the start of vLLM report them for a model that caches states."""
    check = ["-m", "pointsman", "vllm", "check", tmp_path, "--skip-tokenizer-init"]
    for options, flags, says, least in (
        (CACHE, ["--enable-prefix-caching"], "shorter prompts find nothing", 129),
        (PARTS, ["--enable-prefix-caching", "--prefix-match-unit", "32"], "every 32 tokens where a prompt ends", 33),
        (NO_CACHE, ["--no-enable-prefix-caching"], "4 groups, kept by", 0),
    ):
        given = [f"{key}={json.dumps(value)}" for key, value in options.items()]
        not_found = run_in_vllm("vllm_groups.py", "lfm2", "ours", tmp_path, *given)["not found"]
        assert not_found.startswith(f"prompts of fewer than {least} tokens") if least else not not_found
        checked = vllm_parent().run(*check, *flags, timeout=300)
        assert checked.returncode == 0 and says in checked.stdout, checked.stdout + checked.stderr


@pytest.mark.next_vllm
def test_scheduling_with_kv_groups_equals_that_of_vllm() -> None:
    """On random workloads and layouts, step by step; and every row reads its own KV, in every group."""
    tally = decided_alike(WORKLOADS, "groups", met_per_100=MET_PER_100)
    ended_early = tally.get("found otherwise", 0) + tally.get("did more", 0)
    assert ended_early <= len(WORKLOADS) // 5, tally  # 51 of 334 in one part


def test_scheduling_of_drafts_with_mamba_states_equals_vllms() -> None:
    """Each draft of a row has a Mamba state of its own."""
    workloads = seeds(6, 170)
    tally, count = decided_alike(workloads, "states"), len(workloads)
    # A budget or a threshold of one token has no tokens for a draft.
    assert tally["with drafts"] >= count - count // 20 and tally["drafts"] >= 20 * count, tally
    assert tally.get("gave up drafts", 0) <= count // 4 + 1, tally


def test_failed_steps_with_kv_groups_lose_no_request_and_no_block() -> None:
    """A policy raises in the middle of steps, and the prefix cache is reset while requests run."""
    tally: Counter[str] = Counter()
    for run in seeds(8, 170).runs(RUN):
        tally.update(run_in_vllm("vllm_group_faults.py", run.start, len(run), timeout=600))
    assert min(tally[what] for what in ("raised", "resets", "preemptions", "hits")) > 0, tally


def test_the_simulator_groups_layers_as_vllm_does() -> None:
    """The number of layers in a block, and so the number of blocks that it estimates for a device."""
    tally = compared("vllm_layer_groups.py", seeds(50, 1000))
    assert min(tally["several groups of a kind"], tally["a short group"]) > tally["models"] / 4
