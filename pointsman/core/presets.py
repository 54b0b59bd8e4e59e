"""Named configurations: settings to start from, and the systems whose decisions this scheduler can make.

`PRESETS` are starting points for serving. `SYSTEMS` are schedulers of the field: a configuration that is called after
one of them takes the same requests, cuts the same chunks and preempts the same victims on the same input, except where
that system crashes, hangs or loses a request (docs/presets.md lists where). They are made of the same knobs as
everything else, so each knob can be tried on its own.
"""

from __future__ import annotations

from typing import Any

NO_LIMIT = 2**31 - 1

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # For comparison.
    "static": {"batching": "static"},
    # Short steps: few requests share one, and a prompt's chunk delays the others' next token little.
    "low-latency": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_chunked_prefill": True},
    # Full steps: weights are read once for many tokens, and each request waits longer for its next one.
    "high-throughput": {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "enable_chunked_prefill": True},
    # Few enough seats that long sequences fit the pool together, and chunks large enough to get through a prompt.
    "long-context": {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "enable_chunked_prefill": True},
    # Many small requests: each prompt is computed at once or waits, so that none is left half done.
    "short-requests": {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "enable_chunked_prefill": False},
}
"""Named settings to start from; what is not named keeps its default."""

_PREFILL_FIRST: dict[str, Any] = {
    "batching": "prefill-first",
    "max_num_seqs": 512,
    "max_num_batched_tokens": 16384,
    "max_num_active_seqs": NO_LIMIT,  # their max_num_seqs bounds a step, and the running set only by the pool
    "first_chunk_only": True,
    "order": "fcfs-front",
    "shortage": "in-order",
}

SYSTEMS: dict[str, dict[str, Any]] = {
    # As documented: a prompt must fit the step and the free blocks as if nothing of it were cached.
    "nano-vllm": {**_PREFILL_FIRST, "enable_chunked_prefill": False, "admission_charge": "whole-fits"},
    # Its later code: what is cached is not charged, and the first prompt of a step may be cut.
    "nano-vllm-chunked": {**_PREFILL_FIRST, "enable_chunked_prefill": True},
    # The whole prompt is charged, and the row behind the step's last one asks for its block too.
    "minivllm": {
        **_PREFILL_FIRST,
        "enable_chunked_prefill": False,
        "admission_charge": "whole",
        "shortage": "look-ahead",
    },
    # Five actions a step, and no limit but the pool. 128 tokens is our guess at "the expected decode length".
    "textbook": {
        "max_num_seqs": NO_LIMIT,
        "max_num_batched_tokens": NO_LIMIT,
        "enable_chunked_prefill": False,
        "decode_reserve": 128,
        "admit_after_preemption": True,
        "order": "fcfs-front",
    },
    # vLLM 0.32. With its order "priority", say order="priority-by-arrival".
    "vllm": {"order": "fcfs-front", "displace": False, "count_owed_blocks": False, "shortage": "in-order"},
}
"""Schedulers of the field, as configurations."""
