"""Connectors: load KV from host memory, a shared store or another engine, and save KV there.

A connector has two sides. The scheduler calls the side defined in this module. The other side belongs to the host and
moves the bytes; each output lists the blocks to move. A host executes an output in this order:

    1. `output.saves`: copy these blocks out first, because this step may overwrite them
    2. `output.loads`: a synchronous load finishes before the step computes; an asynchronous load may begin once the
       steps before this one are over, and the host reports its end with `scheduler.transfer_done`
    3. the rows of the step: compute them

The host reports every asynchronous load of an output, and every send that a connector began, by `transfer_done` exactly
once, whatever happened to its request or the step. Until then the device may access the blocks of the transfer, so they
are not reallocated. A load that is impossible is reported with 0 tokens. If a synchronous load fails, the step fails:
the host calls `scheduler.fail`, and the connector must not offer the same tokens again.

The methods correspond to those of vLLM's `KVConnectorBase_V1` (`get_num_new_matched_tokens`, `request_finished`), so
that a vLLM connector can be adapted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from pointsman.core.state.request import Request

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class KVConnector(Protocol):
    """The connector methods that the scheduler calls. Their results are recorded, so a replay needs no connector."""

    saves_evicted: bool
    """Whether outputs report all cached blocks before they are overwritten (`SchedulerOutput.saves`). If False, outputs
    report only blocks that preempted requests will need, with `preemption_mode` "swap" or "cheaper"."""

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Number of consecutive tokens that the connector can load after the first `num_local_tokens` known tokens.

        `num_local_tokens` is the number of leading tokens, in whole blocks, that the pool has or this step saves: with
        a `preemption_mode` that swaps, a load may begin with blocks that the same output saves.
        `digests.block_keys(request, block_size)` returns the keys of all blocks. Called whenever the request could be
        admitted, possibly several times: the method must change nothing, and be quick.

        Returns:
            The number of tokens, and whether the load is asynchronous. With an asynchronous load the request waits
            outside the batch until `transfer_done`. None as the number: not known yet; the scheduler calls again in a
            later step, and may admit other requests meanwhile. The scheduler rounds down to whole blocks and leaves at
            least one token to compute.
        """

    def request_ended(self, request: Request, block_ids: Int64Array, num_tokens: int, transfer_id: int) -> bool:
        """A request that ran has finished, and its blocks are about to be freed.

        `block_ids` hold, in order, the KV of the request's first `num_tokens` tokens, which completed steps have
        computed. Steps in flight may still write KV of later tokens. With `kv_groups` the array is [groups, blocks], -1
        where a block was given back.

        Returns:
            Whether the blocks must be kept because they are still being sent. Then `transfer_done(transfer_id)` frees
            them. The method is not called for a request that failed, nor while transfers hold the maximum number of
            blocks.
        """

    def reset(self) -> None:
        """The prefix cache was reset: KV stored so far is invalid."""


class GroupConnector(KVConnector, Protocol):
    """A connector for `kv_groups`: the scheduler calls `num_tokens_in_groups` instead of `num_external_tokens`."""

    def num_tokens_in_groups(self, request: Request, num_local_tokens: int, has: BoolArray) -> tuple[int | None, bool]:
        """Number of consecutive tokens that the connector can load after the first `num_local_tokens` known tokens, and
        whether the load is asynchronous; both as `num_external_tokens` returns them.

        The load ends at a token for which each group has all blocks that the next token attends to, in the pool or in
        the connector (`state.layout.AttendedBlocks.num_reusable`). Only blocks that the pool lacks are loaded.

        Args:
            has: [groups, blocks] whether the pool has each block, or the output of this step saves it.
                `digests.block_name` returns the names of missing blocks.
        """


def has_groups(connector: KVConnector) -> TypeGuard[GroupConnector]:
    """Whether a connector supports `kv_groups`."""
    return hasattr(connector, "num_tokens_in_groups")


class AnswerLog:
    """Wraps a connector, and logs for a recording the values that the connector's methods returned."""

    def __init__(self, connector: KVConnector) -> None:
        self._connector = connector
        self._answers: list[object] = []
        self.saves_evicted = connector.saves_evicted
        if has_groups(connector):
            self.num_tokens_in_groups = partial(self._num_tokens_in_groups, connector)

    def take_answers(self) -> list[object]:
        """The values that the connector returned since the last call of `take_answers`, in the order of the calls."""
        answers, self._answers = self._answers, []
        return answers

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        count, is_async = self._connector.num_external_tokens(request, num_local_tokens)
        self._answers.append([count, is_async])
        return count, is_async

    def _num_tokens_in_groups(
        self, connector: GroupConnector, request: Request, num_local_tokens: int, has: BoolArray
    ) -> tuple[int | None, bool]:
        count, is_async = connector.num_tokens_in_groups(request, num_local_tokens, has)
        self._answers.append([count, is_async])
        return count, is_async

    def request_ended(self, request: Request, block_ids: Int64Array, num_tokens: int, transfer_id: int) -> bool:
        stays = self._connector.request_ended(request, block_ids, num_tokens, transfer_id)
        self._answers.append(stays)
        return stays

    def reset(self) -> None:
        self._connector.reset()


class RecordedConnector:
    """A connector that returns, in a replay, the values of a recording."""

    def __init__(self, saves_evicted: bool) -> None:
        self.saves_evicted = saves_evicted
        self._answers: list[object] = []

    def set_answers(self, answers: list[object]) -> None:
        """Set the recorded values to return during the scheduler's next call."""
        self._answers = answers[::-1]

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        count, is_async = self._pop_answer(list)
        return count, is_async

    def num_tokens_in_groups(self, request: Request, num_local_tokens: int, has: BoolArray) -> tuple[int | None, bool]:
        return self.num_external_tokens(request, num_local_tokens)

    def request_ended(self, request: Request, block_ids: Int64Array, num_tokens: int, transfer_id: int) -> bool:
        return bool(self._pop_answer(bool))

    def reset(self) -> None:
        pass

    def _pop_answer(self, answer_type: type) -> Any:
        if not self._answers or not isinstance(self._answers[-1], answer_type):
            raise ValueError(
                "the replay calls the connector differently from the recording; use the Pointsman version that recorded"
            )
        return self._answers.pop()
