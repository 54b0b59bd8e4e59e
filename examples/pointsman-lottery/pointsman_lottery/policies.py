"""A lottery among the waiting requests, and a victim that has generated least."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from pointsman.core import Request
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.interfaces import View


class Lottery(Policy):
    """The waiting requests draw lots; a preempted request is next.

    The lot of a request is a function of its id and the seed, so the same calls give the same decisions.

    Bound: none. A request with a bad lot waits as long as others come: an example, not for use.
    """

    kind = "order"
    name = "lottery"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("seed", 0, 0, doc="of the lots"),)
    is_preemptive = False

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._queue: dict[Request, tuple[int, int]] = {}

    def push(self, request: Request) -> None:
        lot = zlib.crc32(f"{self._seed} {request.request_id}".encode())
        self._queue[request] = (0 if request.num_preemptions else 1, lot)

    def peek(self) -> Request:
        return min(self._queue, key=self._queue.__getitem__)

    def pop(self) -> Request:
        head = self.peek()
        del self._queue[head]
        return head

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.push(request)

    def remove(self, request: Request) -> None:
        del self._queue[request]

    def position(self, request: Request) -> int:
        return sum(key < self._queue[request] for key in self._queue.values())

    def guaranteed_steps(self, num_steps: int) -> int:
        """Lots do not change while a request waits."""
        return num_steps

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class NewestPrompt(Policy):
    """The running request that has generated least; of several, the one admitted last.

    Bound: a request that has generated more than any other is not preempted, so one always goes on.
    """

    kind = "victim"
    name = "newest-prompt"

    def choose(self, view: View, asking: int) -> int:
        generated = [request.num_output_tokens for request in view.requests]
        return max(range(len(generated)), key=lambda index: (-generated[index], index))
