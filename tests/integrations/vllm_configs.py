"""The parts of vLLM's configuration that our code reads, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def vllm_config(**changes: Any) -> Any:
    """The parts of a `VllmConfig` that our code reads; changes are written like model_config__is_diffusion=True."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=256,
            served_model_name="demo",
            is_encoder_decoder=False,
            supports_multimodal_inputs=False,
            is_diffusion=False,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=8,
            max_num_active_seqs=None,
            max_num_batched_tokens=64,
            max_num_scheduled_tokens=None,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            scheduler_reserve_full_isl=True,
            watermark=0.0,
            policy="fcfs",
            async_scheduling=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        additional_config={},
        device_config=SimpleNamespace(device_type="cpu"),
        observability_config=SimpleNamespace(
            kv_cache_metrics=False, enable_mfu_metrics=False, per_request_spec_decode_metrics="none"
        ),
        use_v2_model_runner=False,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        aux_output_config=SimpleNamespace(enabled=False),
        speculative_config=None,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        max_concurrent_batches=1,
    )
    for name, value in changes.items():
        *parts, last = name.split("__")
        at = config
        for part in parts:
            at = getattr(at, part)
        setattr(at, last, value)
    return config
