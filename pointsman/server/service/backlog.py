"""Backlog: the limits on open requests and waiting prompt tokens. Beyond them a client gets 429, at no cost.

    with backlog.enter("alice", num_requests=1) as ticket:      # 429 if too many requests are open
        ticket.add_prompts([512])                               # 429 if too many prompt tokens wait
        ...
        ticket.first_token(0)                                   # the prompt waits no longer

Requests are counted from arrival to finish, prompt tokens until the first token: a prompt waits while it is queued and
while it is computed. Without such a bound, an overloaded server answers every request too late. Tenants share both
(`stages.py`), so that the backlog of one does not keep the others out.
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
    from pointsman.server.stages import StageRoom

WINDOW = 30.0
"""Seconds over which the rate of first tokens is estimated."""
MAX_SAMPLES = 1024


class Backlog:
    """The requests that are open now.

    Args:
        requests: room for open requests of the engine.
        prompt_tokens: room for waiting prompt tokens.
        clock: seconds.
    """

    def __init__(
        self, requests: StageRoom, prompt_tokens: StageRoom, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = requests
        self.prompt_tokens = prompt_tokens
        self.num_waiting = 0
        """Prompts without a first token."""
        self._waiting_of = Counter[str]()  # the same by tenant
        self._clock = clock
        self._first_tokens: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._waiting_since = 0.0

    def enter(self, tenant: str, num_requests: int) -> Ticket:
        """Take a client's request, which is `num_requests` of the engine.

        Raises:
            ApiError: 429, too many requests are open; 400, it is more than fit at all.
        """
        size = self.requests.size
        if size is not None and num_requests > size:
            raise ApiError(
                400,
                f"the request asks for {num_requests} completions (prompts times n), and this server has room for "
                f"{size} at once; send fewer in one request",
            )
        self.requests.take(tenant, num_requests, retry_after=lambda: self.retry_after(tenant))
        return Ticket(self, tenant, num_requests)

    def retry_after(self, tenant: str) -> int:
        """Estimated seconds until all prompts of the tenant that wait now have their first token.

        Before the last of them come at most all prompts that wait; where tenants have equal shares, at most as many
        prompts of each other tenant as of this one.
        """
        now = self._clock()
        while self._first_tokens and self._first_tokens[0] < now - WINDOW:
            self._first_tokens.popleft()
        if self._first_tokens:
            rate = len(self._first_tokens) / max(now - self._first_tokens[0], 1e-3)
            estimate = min(self.num_waiting, self._waiting_of[tenant] * len(self._waiting_of)) / rate
        else:  # no rate is known yet, only the time waited so far
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
    """One client's request in the backlog. A context: it holds the request's part of the backlog until it is left."""

    __slots__ = ("_backlog", "_num_requests", "_num_tokens", "_tenant", "_waiting")

    def __init__(self, backlog: Backlog, tenant: str, num_requests: int) -> None:
        self._backlog = backlog
        self._tenant = tenant
        self._num_requests = num_requests
        self._waiting: dict[int, int] = {}  # prompt -> its tokens
        self._num_tokens = 0  # of these, as far as they have room

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
        """Count the request's prompts as waiting; each once, however many samples there are of it. To be called once.

        A request that waits alone is always taken, however long it is.

        Raises:
            ApiError: 429, too many prompt tokens of other requests wait.
        """
        backlog, tenant, total = self._backlog, self._tenant, sum(num_tokens)
        room = backlog.prompt_tokens
        if room.size is not None and not room.total:
            total = min(total, room.size)
        room.take(tenant, total, retry_after=lambda: backlog.retry_after(tenant))
        self._num_tokens = total
        self._waiting = dict(enumerate(num_tokens))
        backlog._add(tenant, len(num_tokens))

    def first_token(self, prompt: int) -> None:
        """A sample of the prompt has its first token: the prompt waits no longer. Later calls change nothing."""
        if self._waiting.pop(prompt, None) is None:
            return
        backlog, left = self._backlog, min(self._num_tokens, sum(self._waiting.values()))
        backlog.prompt_tokens.give_back(self._tenant, self._num_tokens - left)
        self._num_tokens = left
        backlog._remove(self._tenant, 1)
        backlog._note_first_token()
