"""Descriptions of engines, for tests that need no engine."""

from __future__ import annotations

from typing import Any

from pointsman.core import SchedulerConfig
from pointsman.server.wire.messages import EngineInfo

SCHEDULER = SchedulerConfig(num_blocks=100, max_model_len=1000, block_size=32, max_num_seqs=7, watermark=0.25)


def engine_info(**changes: Any) -> EngineInfo:
    """The description of an engine with a small model and the scheduler of `SCHEDULER`, except for the given fields."""
    fields: dict[str, Any] = {
        "pid": 1,
        "model": "/models/a",
        "max_model_len": SCHEDULER.max_model_len,
        "vocab_size": 2048,
        "num_parameters": 2_829_120,
        "dtype": "float32",
        "kv_cache_dtype": "bfloat16",
        "device": "cpu",
        "attention": "numba",
        "num_blocks": SCHEDULER.num_blocks,
        "block_size": SCHEDULER.block_size,
        "kv_cache_bytes": 3 * 2**20,
        "kv_cache_tokens": SCHEDULER.num_full_length_tokens,
        "full_length_requests": SCHEDULER.num_full_length,
        "scheduler": SCHEDULER.to_dict(),
        "generation_defaults": {},
    }
    return EngineInfo(**{**fields, **changes})
