"""Presets: named settings to start from, and settings that reproduce the decisions of other schedulers.

`PRESETS` are starting points for serving. `SYSTEMS` are other schedulers of the field: under such a preset, Pointsman
admits the same requests, schedules the same chunks and preempts the same victims on the same input, except where
docs/reference/presets.md says otherwise. That page names the version and date of each original, and lists the cases in
which the original crashes, hangs or loses a request. Every setting used here can also be set on its own.
"""

from __future__ import annotations

from typing import Any

NO_LIMIT = 2**31 - 1

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # Static batches, which no request joins while they run; for comparison.
    "static": {"batching": "static"},
    # Short steps: few requests share a step, and a prompt's chunk delays other requests' next tokens only a little.
    "low-latency": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_chunked_prefill": True},
    # Full steps: weights are read once for many tokens, and each request waits longer for its next token.
    "high-throughput": {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 16384,
        "enable_chunked_prefill": True,
        "token_limits": (),
    },
    # Few sequence slots, so that long sequences fit the pool together; large chunks, so that prompts take few steps.
    "long-context": {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "enable_chunked_prefill": True},
    # Many small requests: each prompt is computed in one step or waits, so that there are no partial prefills.
    "short-requests": {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "enable_chunked_prefill": False},
    # Short waits, for the first token and in the mean to the end, at any load: chosen by `benchmarks/auto.py`.
    "auto": {
        "order": "shortest-prefill",
        "reserves": ("growth",),
        "token_limits": ("decode-share:share=0.05",),
    },
}
"""Named settings to start from; settings that are not listed keep their defaults."""

_PREFILL_FIRST: dict[str, Any] = {
    "batching": "prefill-first",
    "max_num_active_seqs": NO_LIMIT,  # there, max_num_seqs limits a step; only the pool limits the running requests
    "first_chunk_only": True,
    "order": "fcfs-front",
    "shortage": "in-order",
}
_NANO_VLLM: dict[str, Any] = {**_PREFILL_FIRST, "max_num_seqs": 512, "max_num_batched_tokens": 16384}

_VLLM: dict[str, Any] = {
    "order": "fcfs-front",
    "displace": False,
    "count_owed_blocks": False,
    "shortage": "in-order",
}

SYSTEMS: dict[str, dict[str, Any]] = {
    # nano-vLLM of 2026-04-13 (commit 9e8507e), before chunked prefill: a prompt must fit the step and the free blocks
    # without counting cached tokens.
    "nano-vllm": {**_NANO_VLLM, "enable_chunked_prefill": False, "admission_charge": "whole-fits"},
    # nano-vLLM's main branch since late April 2026 (pull request 218): cached tokens are not charged, the first prompt
    # of a step may be chunked, and a block enters the prefix cache after the step that computes it.
    "nano-vllm-chunked": {**_NANO_VLLM, "enable_chunked_prefill": True, "share_within_step": False},
    # miniVLLM as its documentation lists it, with `can_append` repaired and its engine's limits: the whole prompt is
    # charged, and the first row that the step's limits exclude asks for its block too.
    "minivllm": {
        **_PREFILL_FIRST,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enable_chunked_prefill": False,
        "admission_charge": "whole",
        "shortage": "look-ahead",
    },
    # Five actions a step, limited only by the pool. 128 tokens is this preset's guess at "the expected decode length".
    "textbook": {
        "max_num_seqs": NO_LIMIT,
        "max_num_batched_tokens": NO_LIMIT,
        "enable_chunked_prefill": False,
        "decode_reserve": 128,
        "admit_after_preemption": True,
        "order": "fcfs-front",
    },
    # vLLM 0.33 with its policy "fcfs"; for its policy "priority", set order="priority-by-arrival".
    "vllm": {**_VLLM, "own_preemption_ends_step": False},
    # vLLM 0.31 and 0.32.
    "vllm-0.32": {**_VLLM, "encoder_blocks_queue": True},
}
"""Settings that reproduce other schedulers of the field, keyed by their names."""
