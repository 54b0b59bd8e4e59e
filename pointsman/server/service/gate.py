"""Gate: refuses requests while the server shuts down or after the engine's death, and turns engine errors into
responses.

with gate.admit_request():          # 503 while the server shuts down, 500 after the engine's death
    ...                      # a shutdown waits until this block is left, up to a timeout
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pointsman.engine.errors import (
    GRAMMAR_TOO_SLOW,
    NO_COMPILER,
    NOTHING_LEFT,
    TOO_MANY_GRAMMARS,
    EngineDeadError,
    EngineStalledError,
    GrammarQueueFullError,
    GrammarUnavailableError,
    first_line,
)
from pointsman.engine.grammar.process import DEFAULT_TIMEOUT, RETRY_AFTER
from pointsman.server.service.fleet import NONE_LIVES, EngineFleet
from pointsman.server.wire.errors import ApiError, one_line

GRAMMAR_RETRY_AFTER = round(DEFAULT_TIMEOUT)
"""Seconds after which a client may try again if the queue of grammars was full: the maximum time for one grammar."""
COMPILER_RETRY_AFTER = round(RETRY_AFTER)
"""Seconds after which a client may try again if the grammar process does not respond: it is restarted after this
time."""


class Gate:
    """Counts clients' requests from the first check to the last byte of the response. One event loop owns it.

    Args:
        client: the engines; when all are dead and none will be restarted, requests are refused.
        drain_timeout: maximum seconds that a shutdown takes.
    """

    def __init__(self, client: EngineFleet, drain_timeout: float) -> None:
        self.is_leaving = False
        """Whether new requests should be sent to another server."""
        self.is_closed = False
        """Whether new requests are refused."""
        self.num_open = 0
        """Number of admitted requests whose response is not complete."""
        self._client = client
        self._retry_after = max(1, round(drain_timeout))
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def announce_shutdown(self) -> None:
        """Report "not ready" from now on, but still accept requests: the server will shut down."""
        self.is_leaving = True

    def close(self) -> None:
        """Refuse new requests from now on: the server shuts down."""
        self.is_leaving = self.is_closed = True

    async def wait_empty(self) -> None:
        """Return when no admitted request is open."""
        await self._is_empty.wait()

    def check_open(self) -> None:
        """Refuse requests that could not be completed.

        Raises:
            ApiError: 503 while the server shuts down; 500 when the engine is dead.
        """
        if self.is_closed and self._client.death is None:
            raise self.shutdown_error()
        if not self._client.is_alive:
            raise self._dead_engine_error(500)

    def check_ready(self) -> None:
        """Report whether new requests should be sent here.

        Raises:
            ApiError: 503: the server shuts down or soon will, or no engine lives.
        """
        if self.is_leaving and self._client.death is None:
            raise self.shutdown_error()
        if not self._client.is_alive:
            raise self._dead_engine_error(503)
        if not self._client.num_alive:
            raise ApiError(503, NONE_LIVES, headers={"retry-after": "5"}, reason="engine_dead")

    @contextmanager
    def admit_request(self) -> Iterator[None]:
        """Context of one admitted request, which counts as open until the context is left.

        Raises:
            ApiError: 503 while the server shuts down; 500 when the engine is dead.
        """
        self.check_open()
        self.num_open += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._is_empty.set()

    # ------------------------------------------------------------------ errors for clients

    def shutdown_error(self) -> ApiError:
        """The error 503 for a request that the server refuses because it shuts down."""
        return ApiError(
            503,
            "the server is shutting down; send new requests to another one, or try again later",
            headers={"retry-after": str(self._retry_after)},
        )

    def _dead_engine_error(self, status: int) -> ApiError:
        return ApiError(status, f"the engine has ended: {self._client.death or 'shut down'}", reason="engine_dead")

    def from_engine(self, error: Exception) -> ApiError:
        """The HTTP error that a client gets for an error of the engine: 503 if the engine ended because the server
        shuts down, else the result of the function `from_engine`.

        Raises:
            Exception: `error` itself, if it is a bug in the server.
        """
        if isinstance(error, EngineDeadError) and self.is_closed and self._client.death is None:
            return self.shutdown_error()
        return from_engine(error)


def from_engine(error: Exception) -> ApiError:
    """The HTTP error that a client gets for an error of the engine or of `EngineClient`: the engine is dead, stalled or
    overloaded, or it has refused the request.

    Raises:
        Exception: `error` itself, if it is none of these: a bug in the server, which the log must show.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(500, f"the engine has ended: {first_line(error)}", reason="engine_dead")
    if isinstance(error, EngineStalledError):
        return ApiError(503, first_line(error), headers={"retry-after": "1"}, reason="other")
    if isinstance(error, GrammarQueueFullError):
        return _try_again(str(error), GRAMMAR_RETRY_AFTER)
    if isinstance(error, GrammarUnavailableError):
        return _try_again(str(error), COMPILER_RETRY_AFTER)
    if isinstance(error, ValueError):
        return ApiError(400, one_line(str(error)))
    raise error


def _try_again(why: str, retry_after: int) -> ApiError:
    return ApiError(503, one_line(why), headers={"retry-after": str(retry_after)}, reason="other")


def too_late() -> ApiError:
    """The error 408: the deadline passed before the first token."""
    return ApiError(
        408,
        "the deadline passed before the first token; give it more time, or try when the server has less to do",
        param="deadline",
        headers={"x-should-retry": "false"},  # OpenAI's client would retry, and miss the deadline again
    )


def check_finish(finish_reason: str | None, detail: str) -> None:
    """Raise an error if the finish reason is "error"; accept all other finish reasons.

    Raises:
        ApiError: the request failed. 400 if its fields contradict each other or its grammar takes too long; 503 if its
            grammar could not be compiled for another reason; else 500.
    """
    if finish_reason == "error":
        if detail.startswith(TOO_MANY_GRAMMARS):
            raise _try_again(detail, GRAMMAR_RETRY_AFTER)
        if detail.startswith(NO_COMPILER):
            raise _try_again(detail, COMPILER_RETRY_AFTER)
        is_own_fault = detail == NOTHING_LEFT or detail.startswith(GRAMMAR_TOO_SLOW)
        status = 400 if is_own_fault else 500
        raise ApiError(status, f"the request failed: {detail or 'the engine does not say why'}")
