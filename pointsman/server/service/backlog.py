"""Backlog: the limits on open requests and waiting prompt tokens. Beyond them a client gets 429, at no cost.

    with backlog.enter(num_requests=1) as ticket:       # 429 if too many requests are open
        ticket.add_prompt(0, num_tokens=512)            # 429 if too many prompt tokens wait
        ...
        ticket.first_token(0)                           # the prompt waits no longer

Requests are counted from arrival to finish, prompt tokens until the first token: a prompt waits while it is queued and
while it is computed. Without such a bound, an overloaded server answers every request too late.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from pointsman.server.wire.errors import ApiError

WINDOW = 30.0
"""Seconds over which the rate of first tokens is estimated."""
MAX_SAMPLES = 1024
MIN_WAIT, MAX_WAIT = 1, 60
"""Limits of Retry-After, in seconds."""


class Backlog:
    """The requests that are open now.

    Args:
        max_requests: maximum number of open requests of the engine.
        max_prompt_tokens: maximum number of waiting prompt tokens; None: no limit.
        clock: seconds.
    """

    def __init__(
        self, max_requests: int, max_prompt_tokens: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = max_requests
        self.max_prompt_tokens = max_prompt_tokens
        self.num_requests = 0
        """Requests that are open."""
        self.num_waiting = 0
        """Prompts among them without a first token."""
        self.num_prompt_tokens = 0
        """Of these prompts."""
        self._clock = clock
        self._first_tokens: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._waiting_since = 0.0

    def enter(self, num_requests: int) -> Ticket:
        """Take a client's request, which is `num_requests` of the engine.

        Raises:
            ApiError: 429, too many requests are open; 400, it is more than fit at all.
        """
        if num_requests > self.max_requests:
            raise ApiError(
                400,
                f"the request asks for {num_requests} completions (prompts times n), and this server has room for "
                f"{self.max_requests} at once; send fewer in one request",
            )
        if self.num_requests + num_requests > self.max_requests:
            raise self._overloaded(
                f"{self.num_requests} requests are open, this would be {num_requests} more, and at most "
                f"{self.max_requests} may be",
                "queue_requests",
            )
        return Ticket(self, num_requests)

    def retry_after(self) -> int:
        """Estimated seconds until all prompts that wait now have their first token."""
        now = self._clock()
        while self._first_tokens and self._first_tokens[0] < now - WINDOW:
            self._first_tokens.popleft()
        if self._first_tokens:
            rate = len(self._first_tokens) / max(now - self._first_tokens[0], 1e-3)
            estimate = self.num_waiting / rate
        else:  # no rate is known yet, only the time waited so far
            estimate = now - self._waiting_since if self.num_waiting else 0.0
        return min(max(math.ceil(estimate), MIN_WAIT), MAX_WAIT)

    def _overloaded(self, what: str, reason: str) -> ApiError:
        seconds = self.retry_after()
        return ApiError(
            429,
            f"the server is overloaded: {what}; try again in {seconds} s",
            headers={"retry-after": str(seconds)},
            reason=reason,
        )

    # ------------------------------------------------------------------ for tickets

    def _add(self, num_tokens: int, own_tokens: int) -> None:
        others = self.num_prompt_tokens - own_tokens
        limit = self.max_prompt_tokens
        if limit is not None and others and self.num_prompt_tokens + num_tokens > limit:
            raise self._overloaded(
                f"{others} prompt tokens wait, and with the {own_tokens + num_tokens} of this request they would be "
                f"more than {limit}",
                "queue_tokens",
            )
        if not self.num_waiting:
            self._waiting_since = self._clock()
        self.num_waiting += 1
        self.num_prompt_tokens += num_tokens

    def _remove(self, num_tokens: int) -> None:
        self.num_waiting -= 1
        self.num_prompt_tokens -= num_tokens

    def _note_first_token(self) -> None:
        self._first_tokens.append(self._clock())


class Ticket:
    """One client's request in the backlog. A context: leaving it removes the request."""

    __slots__ = ("_backlog", "_num_requests", "_waiting")

    def __init__(self, backlog: Backlog, num_requests: int) -> None:
        self._backlog = backlog
        self._num_requests = num_requests
        self._waiting: dict[int, int] = {}  # prompt -> its tokens

    def __enter__(self) -> Ticket:
        self._backlog.num_requests += self._num_requests
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._backlog.num_requests -= self._num_requests
        for num_tokens in self._waiting.values():
            self._backlog._remove(num_tokens)
        self._waiting.clear()

    def add_prompt(self, prompt: int, num_tokens: int) -> None:
        """Count one of the request's prompts as waiting; once, however many samples there are of it.

        Raises:
            ApiError: 429, too many prompt tokens of other requests wait.
        """
        self._backlog._add(num_tokens, sum(self._waiting.values()))
        self._waiting[prompt] = num_tokens

    def first_token(self, prompt: int) -> None:
        """A sample of the prompt has its first token: the prompt waits no longer. Later calls change nothing."""
        num_tokens = self._waiting.pop(prompt, None)
        if num_tokens is not None:
            self._backlog._remove(num_tokens)
            self._backlog._note_first_token()
