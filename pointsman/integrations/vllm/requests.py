"""Converts vLLM's requests to the core's, and manages prompts that come in parts (vLLM's streaming input).

Each part of a session gets outputs like a request of its own. The next part continues after all computed tokens: all
except the token sampled last. Between two parts a session holds no blocks and no sequence slot; its next part finds the
session's tokens in the prefix cache. (vLLM's own scheduler keeps the blocks and the slot.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus, StreamingUpdate

from pointsman.core import EncoderInput, Request, RequestRefused
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.numbers import MAX_INT
from pointsman.integrations.vllm.encoder_inputs import shift_inputs
from pointsman.integrations.vllm.policy_fields import FOR_POLICIES
from pointsman.integrations.vllm.views import set_status

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request as VLLMRequest


def to_adapter(lora_request: LoRARequest) -> Adapter:
    """The core's adapter for an adapter of vLLM's. Another path under the same name and number (`load_inplace`) is
    another version."""
    return Adapter(lora_request.lora_name, f"{lora_request.lora_int_id}:{lora_request.lora_path}")


def lora_number(adapter: Adapter) -> int:
    """vLLM's number of an adapter."""
    return int(str(adapter.version).partition(":")[0])


def lora_path(adapter: Adapter) -> str:
    """The path that vLLM reads an adapter from."""
    return str(adapter.version).partition(":")[2]


def to_request(
    request: VLLMRequest,
    request_id: str,
    *,
    prompt_token_ids: Sequence[int],
    arrival_time: float,
    runs_ahead: bool,
    encoder_inputs: Sequence[EncoderInput] = (),
) -> Request:
    """The core's request for a request of vLLM's. vLLM's request becomes the `metadata` of the core's.

    Args:
        request: vLLM's request.
        request_id: the core's id.
        prompt_token_ids: tokens of the prompt, or all tokens of a session so far.
        arrival_time: arrival time, in seconds on the core's clock.
        runs_ahead: whether the request's next step may be scheduled while a sampled token of the request is in flight.
        encoder_inputs: images and other encoder inputs of the request.

    Raises:
        RequestRefused: the request could never run.
    """
    sampling, lora = request.sampling_params, request.lora_request
    max_tokens = min_tokens = 0  # a pooling model samples nothing
    eos_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    repetition = None
    if sampling is not None:
        max_tokens = min(request.max_tokens, MAX_INT)  # vLLM allows any number
        if sampling.min_tokens and not request.use_structured_output:
            # vLLM's sampler masks EOS and stop tokens before min_tokens, except where a grammar allows nothing else.
            min_tokens = min(sampling.min_tokens, max_tokens)
        if sampling.eos_token_id is not None:  # None if the client has set ignore_eos
            eos_token_ids = (sampling.eos_token_id,)
        stop_token_ids = sampling.stop_token_ids or ()
        repetition = sampling.repetition_detection
    return Request(
        request_id,
        prompt_token_ids,
        arrival_time=arrival_time,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        priority=request.priority,
        eos_token_ids=eos_token_ids,
        stop_token_ids=stop_token_ids,
        repetition_detection=None
        if repetition is None
        else {
            "max_pattern_size": repetition.max_pattern_size,
            "min_pattern_size": repetition.min_pattern_size,
            "min_count": repetition.min_count,
        },
        cache_salt=request.cache_salt,
        adapter=None if lora is None else to_adapter(lora),
        encoder_inputs=encoder_inputs,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        runs_ahead=runs_ahead,
        metadata=request,
        **_policy_fields(sampling),
    )


def _policy_fields(sampling: SamplingParams | None) -> dict[str, Any]:
    """The fields of a request that only policies read."""
    given = None if sampling is None else sampling.extra_args
    return {name: given[key] for key, name in FOR_POLICIES.items() if key in given} if given else {}


def check_retention(request: Request, longest: float) -> None:
    """Refuse a retention, in seconds, that is longer than the operator allows.

    Raises:
        RequestRefused: the retention is longer; the message has the value, the limit and the remedy.
    """
    if request.retention is not None and request.retention > longest:
        raise RequestRefused(
            f"request {request.request_id!r} refused: pointsman_retention is {request.retention:g} s, more than the "
            f"maximum of {longest:g} s; lower it, or raise max_retention in --additional-config"
        )


class Sessions:
    """The requests whose prompts come in parts, by id, with their waiting parts."""

    def __init__(self) -> None:
        self._parts: dict[str, deque[StreamingUpdate | None]] = {}
        self.num_idle = 0
        """Number of sessions that wait for their next part."""

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def begin(self, name: str) -> None:
        self._parts[name] = deque()

    def end(self, name: str) -> None:
        self._parts.pop(name, None)

    def add(self, name: str, part: VLLMRequest) -> None:
        """Queue a part after the previous one. A part that is not resumable ends the session."""
        self._parts[name].append(StreamingUpdate.from_request(part))

    def has_part(self, name: str) -> bool:
        return bool(self._parts[name])

    def is_over(self, name: str) -> bool:
        """Whether a session is over: no part follows the current part."""
        parts = self._parts[name]
        return bool(parts) and parts[0] is None

    def pop_part(self, name: str) -> StreamingUpdate | None:
        """Remove and return the next part of a session; None: the session is over."""
        return self._parts[name].popleft()


def close_turn(request: VLLMRequest, ours: Request) -> None:
    """Close the current part: from now on, all tokens of the session so far, except the token sampled last, are the
    session's prompt."""
    kept = ours.all_token_ids[: max(ours.num_tokens - 1, ours.num_prompt_tokens)].tolist()
    _set_prompt(request, kept)
    set_status(request, RequestStatus.WAITING_FOR_STREAMING_REQ)


def open_turn(request: VLLMRequest, part: StreamingUpdate) -> None:
    """Append the next part to a session's prompt, and use the part's sampling parameters from now on."""
    request.mm_features.extend(shift_inputs(part.mm_features or (), len(request.prompt_token_ids)))
    _set_prompt(request, request.prompt_token_ids + list(part.prompt_token_ids or ()))
    request.arrival_time = part.arrival_time
    request.sampling_params = part.sampling_params
    request.max_tokens = part.max_tokens
    set_status(request, RequestStatus.WAITING)


def _set_prompt(request: VLLMRequest, token_ids: list[int]) -> None:
    request.prompt_token_ids = token_ids
    request.num_prompt_tokens = len(token_ids)
    request._all_token_ids[:] = token_ids
    request._output_token_ids.clear()
    request.block_hashes.clear()
    request.update_block_hashes()
