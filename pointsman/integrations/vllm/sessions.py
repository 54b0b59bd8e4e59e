"""Prompts that come in parts: vLLM's streaming input.

Each part is answered like a request of its own, and the next one continues behind it: behind what was computed, which
is all but the token that was sampled last. Between two parts a session holds nothing; what it has come to is found in
the prefix cache by its next part. (vLLM's own scheduler lets it keep its blocks and its seat.)
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.v1.request import RequestStatus, StreamingUpdate

from pointsman.core import Request


class Sessions:
    """The requests whose prompts come in parts, by name, each with the parts that wait."""

    def __init__(self) -> None:
        self._parts: dict[str, deque[Any]] = {}
        self.num_idle = 0
        """Sessions between two parts."""

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def begin(self, name: str) -> None:
        self._parts[name] = deque()

    def end(self, name: str) -> None:
        self._parts.pop(name, None)

    def add(self, name: str, part: Any) -> None:
        """A part that waits for the one before it. One that is not resumable is the end of the session."""
        self._parts[name].append(StreamingUpdate.from_request(part))

    def has_part(self, name: str) -> bool:
        return bool(self._parts[name])

    def take(self, name: str) -> Any | None:
        """The next part; None: the session is over."""
        return self._parts[name].popleft()


def close_turn(request: Any, ours: Request) -> None:
    """What a session has come to becomes its prompt."""
    kept = ours.all_token_ids[: max(ours.num_tokens - 1, ours.num_prompt_tokens)].tolist()
    _set_prompt(request, kept)
    request.status = RequestStatus.WAITING_FOR_STREAMING_REQ


def open_turn(request: Any, part: Any) -> None:
    """The next part of a session's prompt, with parameters of its own."""
    _set_prompt(request, request.prompt_token_ids + list(part.prompt_token_ids or ()))
    request.arrival_time = part.arrival_time
    request.sampling_params = part.sampling_params
    request.max_tokens = part.max_tokens
    request.status = RequestStatus.WAITING


def _set_prompt(request: Any, token_ids: list[int]) -> None:
    request.prompt_token_ids = token_ids
    request.num_prompt_tokens = len(token_ids)
    request._all_token_ids[:] = token_ids
    request._output_token_ids.clear()
