"""Defines the content of a trace: requests with arrival times, measured times, and counts of left-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pointsman.core.errors import PointsmanError

MOONCAKE_BLOCK_SIZE = 512
QWEN_BLOCK_SIZE = 16
"""Number of tokens that a hash id covers in the traces of Qwen-Bailian."""
MAX_TOKENS = 2**31 - 1
MAX_HASH_ID = 2**62

T = TypeVar("T")


class TraceError(PointsmanError, ValueError):
    """A trace that cannot be read. The message names the file, the line and the fault."""


class LeftOut(StrEnum):
    """Reasons for which a row of a trace file is left out. The values are the words that messages and reports print."""

    NO_PROMPT = "without prompt tokens"
    NO_OUTPUT = "without output tokens"
    NOT_SENT = "never sent"
    UNFINISHED = "unfinished"
    NO_TIMES = "without times"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_time: float
    """Arrival time, in seconds since the first arrival of the trace."""
    num_prompt_tokens: int
    """Number of prompt tokens, at least 1."""
    num_output_tokens: int
    """Number of tokens that the traced service generated; 0 for a request that failed in the traced service."""
    block_hash_ids: tuple[int, ...] = ()
    """Hash ids of the prompt, one id for each `hash_block_size` tokens. Blocks with equal ids have equal content from
    the start of their prompts. Prompt tokens beyond the last id are not shared."""
    hash_block_size: int = MOONCAKE_BLOCK_SIZE
    """Number of tokens that one hash id covers."""
    max_tokens: int | None = None
    """Maximum number of output tokens that the client asked for; None: unknown, or no limit."""
    priority: int = 0
    """Priority of the request, smaller is more urgent; only recordings have priorities."""
    retention: float | None = None
    """Number of seconds after the request's end for which the client wanted its prefix kept cached; None: not given, or
    unknown."""
    adapter: int | None = None
    """Number of the adapter (LoRA) that the request ran with, from 0 in the order of first use; None: none, or unknown.
    Only recordings have adapters."""


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request of a trace, with the times at which a server queued the request and generated its tokens.

    The times are seconds on one clock, whose zero is the time at which the first request of the file was queued.
    """

    request: TraceRequest
    """Request as it arrived: its `arrival_time` is `queued`, and it has at least one output token."""
    request_id: str
    queued: float
    """Time at which the server received the request; in results of a load generator, the time at which the client sent
    it."""
    first_token: float
    last_token: float

    @property
    def ttft(self) -> float:
        """Seconds from `queued` to the first token."""
        return self.first_token - self.queued

    @property
    def e2e(self) -> float:
        """Seconds from `queued` to the last token."""
        return self.last_token - self.queued

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first token; None: the request has only one output token."""
        gaps = self.request.num_output_tokens - 1
        return (self.last_token - self.first_token) / gaps if gaps else None


class Trace(list[T]):
    """The requests of a file, by arrival, and the number of rows that were left out."""

    def __init__(self, requests: Iterable[T], left_out: Mapping[LeftOut, int]) -> None:
        super().__init__(requests)
        self.left_out = {reason: left_out[reason] for reason in LeftOut if left_out.get(reason)}
        """Number of rows that were left out, for each reason."""
        self.num_rows = len(self) + sum(self.left_out.values())
        """Number of rows that were read, left-out rows included; blank lines do not count."""


def about_left_out(num_rows: int, left_out: Mapping[LeftOut, int]) -> str:
    """One sentence that states how many of the `num_rows` rows were left out, and why; empty if no row was left out."""
    if not left_out:
        return ""
    reasons, total = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items()), sum(left_out.values())
    return f"Of {num_rows:,} rows read, {total:,} {'is' if total == 1 else 'are'} left out: {reasons}."


def served(trace: Trace[TraceRequest], source: str) -> Trace[TraceRequest]:
    """The requests of a trace that have output tokens. Requests without output failed in the traced service.

    Args:
        trace: a trace that `read_trace` returned.
        source: name of the trace, for the error message.

    Raises:
        TraceError: no request has output.
    """
    requests = [request for request in trace if request.num_output_tokens]
    left_out = {**trace.left_out, LeftOut.NO_OUTPUT: len(trace) - len(requests)}
    found = Trace(requests, left_out)
    if not found:
        raise TraceError(f"{source}: no request has output tokens. {about_left_out(found.num_rows, found.left_out)}")
    return found
