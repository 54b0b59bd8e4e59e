"""Validation: checks each request when it is added, and refuses a request that could never run. The error message has
the numbers and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import InvalidTransition, RequestRefused
from pointsman.core.kv.cache import KVCache
from pointsman.core.state.inputs import EncoderInput
from pointsman.core.state.repetition import RepetitionWatch
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason

_num_embeddings = attrgetter("num_embeddings")
_NO_ROOM = ", which leaves no room for a generated token"


def too_long(config: SchedulerConfig, kv: KVCache, request: Request, length: int, max_tokens: int) -> str | None:
    """Reason why a prompt of `length` tokens would never fit into the model's length, the pool of KV blocks or the
    request's `max_total_tokens`; None: it fits. One generated token must fit too, unless `max_tokens` is 0."""
    num_generated = 1 if max_tokens else 0
    if length + num_generated > config.max_model_len:
        return longer_than_model(config, length, num_generated)
    if length > (usable := kv.num_usable_tokens_of(request)):
        if not kv.has_tables:
            return (
                f"the prompt has {length} tokens, and the pool of {kv.pool.num_usable} KV blocks holds "
                f"{usable} of them; shorten the prompt or give the pool more blocks"
            )
        needed = -(-length // config.block_size)
        return (
            f"the prompt has {length} tokens and needs {needed} KV blocks of {config.block_size}, and the pool has "
            f"{config.num_usable_blocks}; shorten the prompt or give the pool at least "
            f"{needed + config.num_reserved_blocks} blocks"
        )
    if request.max_total_tokens is not None and length + num_generated > request.max_total_tokens:
        return (
            f"the prompt has {length} tokens and max_total_tokens is {request.max_total_tokens}"
            f"{_NO_ROOM if num_generated else ''}; raise max_total_tokens"
        )
    return None


def longer_than_model(config: SchedulerConfig, length: int, num_generated: int) -> str:
    """The reason why a prompt of `length` tokens and `num_generated` generated tokens do not fit into
    `max_model_len`."""
    return (
        f"the prompt has {length} tokens and max_model_len is {config.max_model_len}"
        f"{_NO_ROOM if num_generated else ''}; shorten the prompt to {config.max_model_len - num_generated} tokens"
    )


def settle_limits(config: SchedulerConfig, kv: KVCache, request: Request) -> str | None:
    """Set the token limit of a request, and the `RepetitionWatch` that ends its output at a repetition. Returns the
    reason why the request can never run; None: it can run."""
    state = request._state
    prompt, max_tokens = state.num_prompt_tokens, state.max_tokens
    why = too_long(config, kv, request, prompt, max_tokens)
    if why is not None:
        return why
    known = state.num_own_output_tokens  # tokens generated before the request was added
    is_new = state.serial == 0 and not known  # a request that ran before may be computed in chunks
    if is_new and not config.enable_chunked_prefill and prompt > config.max_num_batched_tokens:
        return (
            f"the prompt has {prompt} tokens, more than max_num_batched_tokens {config.max_num_batched_tokens}, and "
            "enable_chunked_prefill is off; raise max_num_batched_tokens, shorten the prompt or turn "
            "enable_chunked_prefill on"
        )
    if request.adapter is not None and config.max_loras == 0:
        return (
            f"it has the adapter {request.adapter.name!r} and max_loras is 0, so no adapter is accepted; raise "
            "max_loras"
        )
    whole = is_new and not config.enable_chunked_prefill
    if state.encoder_inputs:
        why = encoder_inputs_fit(config, state.encoder_inputs, whole=whole)
        if why is not None:
            return why
    if max_tokens == 0:
        # The computed prompt counts as the request's one sample: with it in flight, the request needs no more tokens.
        state.set_limit(prompt + 1, "max_tokens")
        return None
    limit, detail = prompt + max_tokens, "max_tokens"
    if config.max_model_len < limit:
        limit, detail = config.max_model_len, "max_model_len"
    if request.max_total_tokens is not None and request.max_total_tokens < limit:
        limit, detail = request.max_total_tokens, "max_total_tokens"
    # The last token is sampled but never computed, so it needs no KV slot.
    num_usable_tokens = kv.num_usable_tokens_of(request)
    if num_usable_tokens + 1 < limit:
        limit, detail = num_usable_tokens + 1, "kv_capacity"
    state.set_limit(limit, detail)
    if prompt + known >= limit:
        return (
            f"it has {prompt} prompt tokens and {known} output tokens generated before, and {detail} ends it at "
            f"{limit} tokens, so no further token can be generated; raise this limit"
        )
    if request.repetition_detection is not None:
        watch = RepetitionWatch(request.repetition_detection, request.token_limit - prompt)
        for token_id in request.output_token_ids.tolist():
            watch.observe(token_id)
        state.set_watch(watch)
    return None


def encoder_inputs_fit(config: SchedulerConfig, inputs: Sequence[EncoderInput], *, whole: bool) -> str | None:
    """The reason why a request's encoder inputs can never be computed, or None. `whole`: whether one step must compute
    all of the inputs."""
    least = min(config.encoder_budget, config.encoder_cache_size)
    if sum([item.num_embeddings or 0 for item in inputs]) <= least:  # even with repeats counted twice
        return None
    inputs = [item for item in inputs if item.num_embeddings != 0]
    if not config.encoder_budget:
        return (
            f"it has {len(inputs)} encoder input(s) and encoder_budget is 0, so no encoder input is accepted; set "
            "encoder_budget and encoder_cache_size"
        )
    entries = {item.entry for item in inputs}
    largest = max(entries, key=_num_embeddings)
    total = sum(map(_num_embeddings, entries))
    if total <= least:
        return None
    for knob in ("encoder_budget", "encoder_cache_size"):
        bound = getattr(config, knob)
        if largest.num_embeddings > bound:
            return (
                f"its encoder input {largest.key!r} has {largest.num_embeddings} embeddings, more than {knob} {bound}; "
                f"raise {knob} or send a smaller input"
            )
        if total > bound and whole:
            return (
                f"its encoder inputs have {total} embeddings, more than {knob} {bound}, and chunked prefill is off; "
                f"raise {knob} or turn chunked prefill on"
            )
    return None


def refused(request: Request, why: str) -> RequestRefused:
    """Finish a request that can never run; returns the error to raise. `why`: the reason."""
    request._state.record_finished(FinishReason.REFUSED, why, None)
    return RequestRefused(f"request {request.request_id!r} refused: {why}")


def checked_end(request_id: str, reason: FinishReason, keep_tokens: int | None) -> FinishReason:
    """The reason for which a host finishes a request, after a check of the host's arguments.

    Raises:
        InvalidTransition: the reason is REFUSED, and an accepted request cannot be refused.
        ValueError: `reason` is not a `FinishReason`, or `keep_tokens` is negative.
    """
    reason = FinishReason(reason)
    if reason is FinishReason.REFUSED:
        raise InvalidTransition(
            f"request {request_id!r} was accepted, so its finish reason cannot be REFUSED; give another reason"
        )
    if keep_tokens is not None and keep_tokens < 0:
        raise ValueError(f"keep_tokens is {keep_tokens}; give 0 or more")
    return reason
