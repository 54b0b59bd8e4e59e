"""Backlog: limits open requests and waiting prompt tokens. Beyond the limits a client gets 429, which costs little.

    with backlog.enter("alice", num_requests=1) as ticket:      # 429 if too many requests are open
        ticket.add_prompts([512])                               # 429 if too many prompt tokens wait
        ...
        ticket.note_first_token(0)                              # the prompt no longer waits

Requests are counted from arrival to finish. Prompt tokens are counted until the first token: a prompt waits while it is
queued and during prefill. Without these limits, an overloaded server completes every request too late. Tenants share
both limits (`stages.py`), so that the backlog of one tenant does not block the others.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from pointsman.server.stages import retry_seconds
from pointsman.server.wire.errors import ApiError

if TYPE_CHECKING:
    from pointsman.server.stages import StageLimit

WINDOW = 30.0
"""Seconds over which the rate of first tokens is estimated."""
MAX_SAMPLES = 1024


class Backlog:
    """Counts and limits the open requests and the waiting prompt tokens.

    Args:
        requests: the limit on open requests of the engine.
        prompt_tokens: the limit on waiting prompt tokens.
        clock: returns the time in seconds.
    """

    def __init__(
        self, requests: StageLimit, prompt_tokens: StageLimit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = requests
        self.prompt_tokens = prompt_tokens
        self.num_waiting = 0
        """Number of prompts without a first token."""
        self._waiting_of = Counter[str]()  # the number of prompts without a first token, by tenant
        self._clock = clock
        self._first_tokens: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._waiting_since = 0.0

    def enter(self, tenant: str, num_requests: int) -> Ticket:
        """Accept a client's request, which becomes `num_requests` requests of the engine. Returns the ticket of the
        client's request.

        Raises:
            ApiError: 429, too many requests are open; 400, the request alone exceeds the limit.
        """
        size = self.requests.size
        if size is not None and num_requests > size:
            raise ApiError(
                400,
                f"the request asks for {num_requests} completions (prompts times n), and this server accepts {size} "
                "at a time; send fewer in one request",
            )
        self.requests.take(tenant, num_requests, retry_after=lambda: self.retry_after(tenant))
        return Ticket(self, tenant, num_requests)

    def retry_after(self, tenant: str) -> int:
        """Estimated seconds until all waiting prompts of the tenant have their first token.

        The estimate assumes the worst order: all waiting prompts of other tenants precede. But each other tenant counts
        with at most as many prompts as this tenant has, as tenants get equal shares.
        """
        now = self._clock()
        while self._first_tokens and self._first_tokens[0] < now - WINDOW:
            self._first_tokens.popleft()
        if self._first_tokens:
            rate = len(self._first_tokens) / max(now - self._first_tokens[0], 1e-3)
            estimate = min(self.num_waiting, self._waiting_of[tenant] * len(self._waiting_of)) / rate
        else:  # no rate is known yet; the estimate is the waiting time so far
            estimate = now - self._waiting_since if self.num_waiting else 0.0
        return retry_seconds(estimate)

    # ------------------------------------------------------------------ for tickets

    def _add(self, tenant: str, num_prompts: int) -> None:
        if not self.num_waiting:
            self._waiting_since = self._clock()
        self.num_waiting += num_prompts
        self._waiting_of[tenant] += num_prompts

    def _remove(self, tenant: str, num_prompts: int) -> None:
        self.num_waiting -= num_prompts
        self._waiting_of[tenant] -= num_prompts
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant]

    def _note_first_token(self) -> None:
        self._first_tokens.append(self._clock())


class Ticket:
    """A client's request in the backlog. A context manager: its exit frees the request's part of the backlog."""

    __slots__ = ("_backlog", "_num_requests", "_num_tokens", "_tenant", "_waiting")

    def __init__(self, backlog: Backlog, tenant: str, num_requests: int) -> None:
        self._backlog = backlog
        self._tenant = tenant
        self._num_requests = num_requests
        self._waiting: dict[int, int] = {}  # index of a waiting prompt -> its number of tokens
        self._num_tokens = 0  # the counted tokens of all waiting prompts, at most the limit

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        backlog, tenant = self._backlog, self._tenant
        backlog.requests.give_back(tenant, self._num_requests)
        if self._waiting:
            backlog._remove(tenant, len(self._waiting))
            backlog.prompt_tokens.give_back(tenant, self._num_tokens)
            self._waiting.clear()

    def add_prompts(self, num_tokens: Sequence[int]) -> None:
        """Count the request's prompts as waiting: each prompt once, for any number of samples. To be called once.

        If no other prompt waits, prompts of any length are accepted.

        Raises:
            ApiError: 429, too many prompt tokens of other requests wait.
        """
        backlog, tenant, total = self._backlog, self._tenant, sum(num_tokens)
        limit = backlog.prompt_tokens
        if limit.size is not None and not limit.total:
            total = min(total, limit.size)
        limit.take(tenant, total, retry_after=lambda: backlog.retry_after(tenant))
        self._num_tokens = total
        self._waiting = dict(enumerate(num_tokens))
        backlog._add(tenant, len(num_tokens))

    def note_first_token(self, prompt_index: int) -> None:
        """Count a prompt of the request as no longer waiting, because the first token of one of its samples has
        arrived. Later calls for this prompt have no effect."""
        if self._waiting.pop(prompt_index, None) is None:
            return
        backlog, left = self._backlog, min(self._num_tokens, sum(self._waiting.values()))
        backlog.prompt_tokens.give_back(self._tenant, self._num_tokens - left)
        self._num_tokens = left
        backlog._remove(self._tenant, 1)
        backlog._note_first_token()
