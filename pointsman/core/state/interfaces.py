"""Which methods must a custom order or victim policy have? The protocols that the configuration accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pointsman.core.state.batch import Batch
from pointsman.core.state.request import Request


class Order(Protocol):
    """A queue of waiting requests. An object serves one scheduler."""

    name: str
    displaces: bool
    """Whether running requests may be preempted for a waiting one of strictly smaller `priority`."""

    def push(self, request: Request) -> None:
        """Insert a request; one that ran before goes to the front of its class."""

    def pop(self) -> Request:
        """Remove and return the head."""

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests that were popped in this order, each to its place. Nothing was pushed since."""

    def peek(self) -> Request:
        """The head. The queue is not empty."""

    def remove(self, request: Request) -> None:
        """Remove a queued request from any place."""

    def position(self, request: Request) -> int:
        """The number of requests before it. For explanations: may cost O(n)."""

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...

    def __iter__(self) -> Iterator[Request]: ...


class Victim(Protocol):
    """Chooses the running request that is preempted when blocks run out."""

    name: str

    def choose(self, batch: Batch, asking_row: int) -> int:
        """The row to preempt for `asking_row`: a running row, maybe that one itself, and none senior to it."""
