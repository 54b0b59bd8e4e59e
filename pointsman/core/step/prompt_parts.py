"""Prompts that arrive in parts: a request may be extended until it finishes (vLLM's streaming input).

A part has tokens, and the maximum number of tokens to generate before the next part; 0: the part is only computed. A
part is complete when its tokens are computed, and a stop token, `max_tokens` or a repetition has ended its output. Then
the next part is appended to the request's prompt if the part has arrived. Otherwise the request waits for the part: it
is parked, without blocks and without a row, so that other requests can run. The request's KV stays in the prefix cache
for the next part, unless the KV is evicted.

The longer prompt has: the prompt so far; the output so far without the last token, which was sampled and never computed
(as in vLLM); and the tokens of the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import InvalidTransition, RequestRefused
from pointsman.core.kv.cache import KVCache
from pointsman.core.state.inputs import EncoderInput, Part, read_encoder_inputs
from pointsman.core.state.numbers import checked_integer
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason, RequestStatus
from pointsman.core.state.tokens import IntArray, token_array
from pointsman.core.step.request_table import End, RequestTable
from pointsman.core.step.validation import encoder_inputs_fit, settle_limits, too_long


class PromptParts:
    """Appends later prompt parts to the requests of one scheduler."""

    def __init__(self, config: SchedulerConfig, kv: KVCache, table: RequestTable) -> None:
        self._config = config
        self._kv = kv
        self._table = table

    def extend(
        self,
        request: Request,
        token_ids: IntArray | Sequence[int],
        encoder_inputs: Sequence[EncoderInput | Sequence[Any]],
        now: float,
        *,
        more: bool,
        max_tokens: int,
    ) -> Part:
        """Add the next part of a request's prompt.

        Raises:
            InvalidTransition: the request's prompt is complete.
            RequestRefused: the part is invalid, or the prompt would be too long, or an encoder input too large; the
                request is unchanged.
        """
        name = request.request_id
        if not request.more_input:
            raise InvalidTransition(
                f"request {name!r} expects no more input: it was added without more_input=True, or has its last part; "
                "add a new request with more_input=True"
            )
        part = _read_part(name, token_ids, max_tokens, encoder_inputs)
        if more and not len(part.token_ids):
            raise RequestRefused(
                f"request {name!r} not extended: the part has no tokens; give tokens, or pass more=False to end the "
                "input"
            )
        length = request.num_prompt_tokens + sum(len(one.token_ids) for one in [*request._state.parts, part])
        why = too_long(self._config, self._kv, request, length, part.max_tokens)
        why = why or encoder_inputs_fit(self._config, part.encoder_inputs, whole=False)
        if why is not None:
            raise RequestRefused(f"request {name!r} not extended: {why}")
        request._state.add_part(part, more_input=more)
        if request.awaits_input:
            self._append_next_parts(request, now)
        return part

    def ends_only_part(self, end: End) -> bool:
        """Whether `end` ends only a prompt part, so that the request continues with the next part."""
        request = end.request
        if not request.more_input and not request._state.parts:
            return False
        if end.reason is FinishReason.LENGTH:
            return end.detail == "max_tokens"
        return end.reason in (FinishReason.STOP, FinishReason.REPETITION)

    def complete_part(self, request: Request, now: float) -> None:
        """Complete a part: append the next part to the prompt, or let the request wait for it. Samples in flight are
        dropped."""
        if not request.status.is_parked:
            self._table.park(request, ParkReason.STREAMING_REQ, now, is_done=True)
        self._table.disown_steps_in_flight(request)
        request._state.await_input()
        if request._state.parts:
            self._append_next_parts(request, now)

    def ready(self, request: Request, now: float) -> bool:
        """Whether a parked request may be queued, now that its reason to wait no longer applies. False: the request
        also waits for a prompt part, and stays parked for this reason.

        Raises:
            InvalidTransition: the request waits only for a prompt part.
        """
        if not request.awaits_input:
            return True
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            raise InvalidTransition(
                f"request {request.request_id!r} waits for the next part of its prompt; call extend(), not ready()"
            )
        self._table.park(request, ParkReason.STREAMING_REQ, now)
        return False

    def _append_next_parts(self, request: Request, now: float) -> None:
        """Extend the prompt by the next part, and by further arrived parts up to the first part that generates output.
        The request then continues, unless its length limit is reached.
        """
        tokens = [request.prompt_token_ids, request.output_token_ids[:-1]]
        inputs = list(request.encoder_inputs)
        length = sum(len(some) for some in tokens)
        max_tokens = 0
        while max_tokens == 0 and request._state.parts:
            part = request._state.parts.pop(0)
            inputs += [item._replace(start=length + item.start) for item in part.encoder_inputs]
            tokens.append(part.token_ids)
            length += len(part.token_ids)
            max_tokens = part.max_tokens
        request._state.replace_prompt(np.concatenate(tokens), max_tokens, tuple(inputs))
        why = settle_limits(self._config, self._kv, request)
        if why is not None:
            self._table.finish([End(request, FinishReason.LENGTH, why)], now)
        elif request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._table.ready(request, now)


def _read_part(
    name: str,
    token_ids: IntArray | Sequence[int],
    max_tokens: int,
    encoder_inputs: Sequence[EncoderInput | Sequence[Any]],
) -> Part:
    tokens = token_array(name, token_ids)
    tokens.setflags(write=False)
    try:
        most = checked_integer("max_tokens", max_tokens, 0)
        return Part(tokens, most, read_encoder_inputs(encoder_inputs, len(tokens), "part"))
    except ValueError as error:
        raise RequestRefused(f"request {name!r} not extended: {error}") from None
