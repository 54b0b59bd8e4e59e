"""vLLM's requests as ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pointsman.core import Request
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.numbers import MAX_INT


def to_adapter(lora_request: Any) -> Adapter:
    """Our adapter for one of vLLM's: another path under the same name and number (`load_inplace`) is another one."""
    return Adapter(lora_request.lora_name, f"{lora_request.lora_int_id}:{lora_request.lora_path}")


def lora_number(adapter: Adapter) -> int:
    """vLLM's number for it."""
    return int(str(adapter.version).partition(":")[0])


def lora_path(adapter: Adapter) -> str:
    """Where vLLM reads it from."""
    return str(adapter.version).partition(":")[2]


def to_request(
    request: Any,
    request_id: str,
    *,
    prompt_token_ids: Sequence[int],
    arrival_time: float,
    runs_ahead: bool,
) -> Request:
    """Our request for one of vLLM's, which becomes its metadata.

    Args:
        request: a `vllm.v1.request.Request`.
        request_id: what ours is called.
        prompt_token_ids: its prompt, or what a session has come to.
        arrival_time: on the clock that our scheduler is told.
        runs_ahead: whether a step of it may be scheduled while a sample of it is in flight.

    Raises:
        RequestRefused: it could never run.
    """
    sampling = request.sampling_params
    lora = request.lora_request
    common: dict[str, Any] = {
        "arrival_time": arrival_time,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "adapter": None if lora is None else to_adapter(lora),
        "use_prefix_cache": not request.skip_reading_prefix_cache,
        "runs_ahead": runs_ahead,
        "metadata": request,
    }
    if sampling is None:  # a pooling model: nothing is sampled
        return Request(request_id, prompt_token_ids, max_tokens=0, **common)
    eos_token_id = sampling.eos_token_id  # None with ignore_eos
    max_tokens = min(request.max_tokens, MAX_INT)  # vLLM takes any number
    repetition = sampling.repetition_detection
    return Request(
        request_id,
        prompt_token_ids,
        max_tokens=max_tokens,
        # vLLM's sampler masks EOS and stop tokens before min_tokens, but where a grammar leaves nothing else.
        min_tokens=0 if request.use_structured_output else min(sampling.min_tokens, max_tokens),
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        stop_token_ids=tuple(sampling.stop_token_ids or ()),
        repetition_detection=None
        if repetition is None
        else {
            "max_pattern_size": repetition.max_pattern_size,
            "min_pattern_size": repetition.min_pattern_size,
            "min_count": repetition.min_count,
        },
        **common,
    )
