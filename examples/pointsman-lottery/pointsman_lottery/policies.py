"""A lottery among the waiting requests, and a victim that has generated least."""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

from pointsman import FirstComeFirstServed, Parameter, Policy, Request, RequestStatus, View


class Lottery(FirstComeFirstServed):
    """The waiting requests draw lots; a preempted request is next.

    The lot of a request is a function of its id and the seed, so the same calls give the same decisions.

    Bound: none. A request with a bad lot waits as long as others come: an example, not for use.
    """

    name = "lottery"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("seed", 0, 0, doc="of the lots"),)

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def key(self, request: Request) -> tuple[Any, ...]:
        """The request with the smallest key is admitted next."""
        lot = zlib.crc32(f"{self._seed} {request.request_id}".encode())
        return (request.status is not RequestStatus.PREEMPTED, lot, request.request_id)


class NewestPrompt(Policy):
    """The running request that has generated least; of several, the one admitted last.

    Bound: a request that has generated more than any other is not preempted, so one always continues.
    """

    kind = "victim"
    name = "newest-prompt"

    def choose(self, view: View, asking: int) -> int:
        """The index of the victim in the columns of the view."""
        generated = [request.num_output_tokens for request in view.requests]
        return max(range(len(generated)), key=lambda index: (-generated[index], index))
