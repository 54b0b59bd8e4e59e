"""The protocols of policies: the state that a policy may read, and the methods of custom orders, evictions and
victims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class View(Protocol):
    """The state that a policy may read: the step so far, running and waiting requests, and free blocks. It never
    reveals the length of a future output.

    A column has an element for each running request, in admission order. Each read makes a copy: a policy that reads a
    column twice in a decision should keep it.
    """

    @property
    def now(self) -> float:
        """Time of the newest call, in seconds on the caller's clock."""

    @property
    def budget(self) -> int:
        """Remaining token budget of the step."""

    @property
    def num_running(self) -> int:
        """Requests that hold a row, those admitted in this step included."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""

    @property
    def num_prefilling(self) -> int:
        """Running requests whose known tokens are not all computed: partial prefills."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Token slots of blocks that requests of `num_tokens` tokens hold over all groups of KV. With one group this is
        `num_tokens`; with several, the sum over them, where a window or a chunk holds at most its size."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Maximum number of further blocks that a running request needs to generate `num_tokens` tokens."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""

    @property
    def num_owed_blocks(self) -> int:
        """Blocks that running requests still need for their known tokens (partial prefills)."""

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that running rows need in this step beyond the free ones; for a victim."""

    @property
    def num_shared_blocks(self) -> int:
        """Blocks of the checked request's cached prefix that other requests hold; they cost nothing."""

    @property
    def has_prefix_cache(self) -> bool:
        """Whether blocks stay cached after use."""

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the prefix cache has now, so that it need not compute them. Costs a lookup;
        0 for a request with encoder inputs."""

    # The running requests, in columns.

    @property
    def requests(self) -> tuple[Request, ...]:
        """The running requests, in admission order. Requests admitted in this step appear in the next one."""

    @property
    def rows(self) -> Int64Array:
        """[running] int64, read-only: their rows."""

    @property
    def num_tokens(self) -> Int64Array:
        """[running] int64: known tokens of each: its prompt and its output so far."""

    @property
    def num_computed_tokens(self) -> Int64Array:
        """[running] int64: computed tokens of each: the maximum that a preemption would cost."""

    @property
    def num_blocks(self) -> Int64Array:
        """[running] int64: blocks in the table of each, shared ones included."""

    @property
    def num_own_blocks(self) -> Int64Array:
        """[running] int64: of these, blocks that no other request holds, which a preemption frees."""

    def own_blocks(self, index: int) -> int:
        """The element of `num_own_blocks` of one running request, in O(its blocks)."""

    @property
    def num_kept_tokens(self) -> Int64Array:
        """[running] int64: leading computed tokens of each that stay cached without it, because other running requests
        hold their blocks, too."""

    @property
    def num_left_tokens(self) -> Int64Array:
        """[running] int64: remaining tokens until the limits of each (`max_tokens`, the model's length)."""

    @property
    def num_preemptions(self) -> Int64Array:
        """[running] int64: how often each was preempted, for whatever cause."""

    @property
    def priority(self) -> Int64Array:
        """[running] int64: smaller is more urgent."""


class Order(Protocol):
    """A queue of waiting requests. An object serves one scheduler. `FirstComeFirstServed` is one to start from.

    Optional methods, as in `core/policy/policy.py`: `attach` (to keep the view), `guaranteed_steps` (without it, steps
    are decided one by one while requests wait), `reason` and the events of a listener.
    """

    name: str
    is_preemptive: bool
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


class Eviction(Protocol):
    """Chooses the cached blocks that are retained: evicted only if no other block is free (`kv/retained.py`).

    Optional methods, as in `core/policy/policy.py`: `attach` and the events of a listener.
    """

    name: str
    share: float
    """Maximum share of the usable blocks that is retained, 0 to 1; 0: none is, and the policy is not called."""
    per_tenant: bool
    """Whether this share is divided evenly among the tenants."""

    def started(self, request: Request, labels: Int64Array) -> None:
        """A request was admitted with cached blocks: the label of each ([blocks] int64), 0 for one that has none."""

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        """A request has finished with `num_blocks` cached blocks. Returns how many of the first ones are retained,
        until when (seconds of `now`; inf: as long as the bounds allow), and the label of all, 0 to 2**31 - 1."""


class Victim(Protocol):
    """Chooses the running request that is preempted when blocks run out."""

    name: str

    def choose(self, view: View, asking: int) -> int:
        """Choose the request to preempt for the one at index `asking`. Returns an index into the columns of the view,
        maybe `asking` itself."""
