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
    """The state that a policy may read: the step so far, running and waiting requests, and free blocks. The view never
    reveals the length of a future output.

    A column is an attribute that is an array with one element for each running request, in admission order. Each read
    makes a copy: a policy that reads a column twice in a decision should keep the copy.
    """

    @property
    def now(self) -> float:
        """Time of the newest call, in seconds on the caller's clock."""

    @property
    def budget(self) -> int:
        """Remaining token budget of the step."""

    @property
    def num_running(self) -> int:
        """Number of requests that hold a row, requests admitted in this step included."""

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue, and of requests that the step has skipped."""

    @property
    def num_prefilling(self) -> int:
        """Number of running requests whose known tokens are not all computed: partial prefills."""

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that requests can hold."""

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Number of token slots that requests of `num_tokens` tokens hold over all groups of KV. With one group this is
        `num_tokens`; with several, the sum over the groups, where a window or a chunk holds at most its size."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Maximum number of further blocks that a running request needs to generate `num_tokens` tokens."""

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, cached blocks included."""

    @property
    def num_owed_blocks(self) -> int:
        """Number of blocks that running requests still need for their known tokens (partial prefills)."""

    @property
    def num_missing_blocks(self) -> int:
        """Number of blocks that running rows need in this step beyond the free blocks; for victim policies."""

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks of the checked request's cached prefix that other requests hold. The request needs no free
        blocks for them."""

    @property
    def has_prefix_cache(self) -> bool:
        """Whether blocks stay cached after use."""

    def num_cached_tokens(self, request: Request) -> int:
        """Number of tokens of a waiting request that the prefix cache has now, so that the request need not compute
        them. Costs a lookup; 0 for a request with encoder inputs."""

    # The running requests, in columns.

    @property
    def requests(self) -> tuple[Request, ...]:
        """The running requests, in admission order. Requests admitted in this step appear from the next step on."""

    @property
    def rows(self) -> Int64Array:
        """[running] int64, read-only: the row of each running request."""

    @property
    def num_tokens(self) -> Int64Array:
        """[running] int64: number of known tokens of each request: its prompt and its output so far."""

    @property
    def num_computed_tokens(self) -> Int64Array:
        """[running] int64: number of computed tokens of each request: the maximum that its preemption would cost."""

    @property
    def num_blocks(self) -> Int64Array:
        """[running] int64: number of blocks in the block table of each request, shared blocks included."""

    @property
    def num_own_blocks(self) -> Int64Array:
        """[running] int64: number of blocks of each request that no other request holds; its preemption frees them."""

    def own_blocks(self, index: int) -> int:
        """Number of blocks of the request at `index` that no other request holds, in O(blocks of this request)."""

    @property
    def num_kept_tokens(self) -> Int64Array:
        """[running] int64: number of leading computed tokens of each request that stay cached if it is preempted,
        because other running requests hold the same blocks."""

    @property
    def num_left_tokens(self) -> Int64Array:
        """[running] int64: number of tokens until each request reaches its limit (`max_tokens`, the model's length)."""

    @property
    def num_preemptions(self) -> Int64Array:
        """[running] int64: number of preemptions of each request, for any cause."""

    @property
    def priority(self) -> Int64Array:
        """[running] int64: priority of each request; smaller is more urgent."""


class Order(Protocol):
    """A queue of waiting requests. An object of this protocol serves one scheduler. Start from `FirstComeFirstServed`.

    Optional methods, as in `core/policy/policy.py`: `attach` (to keep the view), `guaranteed_steps` (without it, steps
    are decided one by one while requests wait), `reason` and the events of a listener.
    """

    name: str
    is_preemptive: bool
    """Whether running requests may be preempted for a waiting request of strictly smaller `priority`."""

    def push(self, request: Request) -> None:
        """Insert a request. A request that ran before is inserted before all requests that the order ranks equal to
        it."""

    def pop(self) -> Request:
        """Remove and return the head."""

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return requests, in the order in which they were popped, each to its place in the queue. No request was
        pushed since they were popped."""

    def peek(self) -> Request:
        """The head, without removing it. Called only if the queue is not empty."""

    def remove(self, request: Request) -> None:
        """Remove a queued request from any place."""

    def position(self, request: Request) -> int:
        """The number of requests before a queued request. For explanations: may cost O(n)."""

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...

    def __iter__(self) -> Iterator[Request]: ...


class Eviction(Protocol):
    """Chooses the cached blocks that are retained, which are evicted only if no other block is free (`kv/retained.py`).

    Optional methods, as in `core/policy/policy.py`: `attach` and the events of a listener.
    """

    name: str
    share: float
    """Maximum share of the usable blocks that is retained, 0 to 1; 0: no block is, and the policy is not called."""
    per_tenant: bool
    """Whether `share` is divided evenly among the tenants."""

    def started(self, request: Request, labels: Int64Array) -> None:
        """A request was admitted with cached blocks. `labels`: [blocks] int64, the label of each cached block, 0 for a
        block without label."""

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        """A request has finished with `num_blocks` cached blocks. Returns the number of leading blocks to retain, the
        time until which they are retained (on the clock of `now`; inf: as long as the bounds allow), and their label, 0
        to 2**31 - 1."""


class Victim(Protocol):
    """Chooses the running request that is preempted when blocks run out."""

    name: str

    def choose(self, view: View, asking: int) -> int:
        """Choose the request to preempt for the request at index `asking`. Returns an index into the columns of the
        view, possibly `asking` itself."""
