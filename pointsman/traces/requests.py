"""What is in a trace? A request as it arrived, and what a server measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman.core.errors import PointsmanError

MOONCAKE_BLOCK_SIZE = 512
MAX_TOKENS = 2**31 - 1
MAX_HASH_ID = 2**62


class TraceError(PointsmanError, ValueError):
    """A trace that cannot be read. The message names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_time: float
    """Seconds since the first arrival of the trace."""
    num_prompt_tokens: int
    """At least 1."""
    num_output_tokens: int
    """What the traced service generated; 0 for a request that failed there."""
    block_hash_ids: tuple[int, ...] = ()
    """One id per `hash_block_size` prompt tokens: equal ids, equal content from the start of the prompt. Prompt
    tokens beyond the last id are not shared."""
    hash_block_size: int = MOONCAKE_BLOCK_SIZE
    """Tokens that one hash id covers."""
    max_tokens: int | None = None
    """The output tokens that the client asked for at most; None: unknown, or no limit."""
    priority: int = 0
    """Smaller is more urgent; only recordings have it."""
    retention: float | None = None
    """Seconds after its end for which the client wanted its prefix kept cached; None: it did not say, or is unknown."""


@dataclass(frozen=True, slots=True)
class MeasuredRequest:
    """One request of a trace, and when a server queued it and produced its tokens.

    The times are seconds on one clock, whose zero is the time at which the first request of the file was queued.
    """

    request: TraceRequest
    """Its `arrival_time` is `queued`, and it has at least one output token."""
    request_id: str
    queued: float
    """When the server received it; in results of a load generator, when the client sent it."""
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
        """Mean seconds per output token after the first; None where there is only one."""
        gaps = self.request.num_output_tokens - 1
        return (self.last_token - self.first_token) / gaps if gaps else None
