"""HostTier: keeps evicted KV blocks in host memory, and copies them back so that they need not be recomputed.

When the pool needs a block, it evicts the least recently used content: a cached prefix, or the KV of a preempted
request. The scheduler lists such blocks in `SchedulerOutput.saves`. When a request waits for admission, the scheduler
looks up how many of the request's blocks are in host memory.

Host memory consists of slots of the size of a block. The thread that owns the scheduler keeps a directory of the slots'
content (`core/kv/slots.py`). The thread that executes the steps moves the bytes, in the order of the steps. So one
step's copies are planned while another step executes:

    copies = tier.plan(saves, loads)     owner: assigns slots, the least recently used first
    copies.run()                         with the step, before it computes: blocks -> slots, blocks -> blocks that the
                                         step both saves and loads, then slots -> blocks
    copies.report()                      after the step has computed: number of copied blocks, and the time

On a GPU the slots are pinned memory, and the copies are queued on the stream of the model's kernels, which keeps the
order but does not overlap copies with computation. (This path follows the documentation and has not run on a GPU so
far.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pointsman.core import ConfigError
from pointsman.core.kv.slots import SlotDirectory, SlotLoad, SlotPlan
from pointsman.core.state.output import Copies
from pointsman.engine.kv.pool import KVPool, bytes_per_block


class HostCopies:
    """The copies of one step between the pool and host memory."""

    def __init__(self, pool: KVPool, host: KVPool, plan: SlotPlan) -> None:
        self.plan = plan
        self.is_done = False
        """Whether the copies have run, so that the slots have the planned content."""
        self._pool, self._host = pool, host
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def run(self) -> None:
        """Copy the planned blocks. Steps call this in order, before they compute."""
        if self._pool.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            self._copy()
            ended.record()
            self._events = began, ended
        else:
            start = time.perf_counter()
            self._copy()
            self._seconds = time.perf_counter() - start
        self.is_done = True

    def report(self) -> Copies | None:
        """Return the number of copied blocks and the seconds that copying took; None: nothing was copied. Call this
        after the step has computed."""
        if not self.plan.num_blocks:
            return None
        if self._events is not None:
            began, ended = self._events
            ended.synchronize()
            self._seconds = began.elapsed_time(ended) / 1e3
        return Copies(self.plan.num_blocks, self._seconds)

    def _copy(self) -> None:
        saves, slots, blocks, moves = self.plan
        _copy_blocks(self._pool, [one.block_id for one in saves], self._host, [one.slot for one in saves])
        _copy_blocks(self._pool, [source for source, _ in moves], self._pool, [target for _, target in moves])
        _copy_blocks(self._host, slots, self._pool, blocks)


class HostTier(SlotDirectory):
    """KV blocks in host memory, found by their content keys (`pointsman/core/kv/digests.py`).

    Args:
        pool: the KV pool on the device, from which blocks are saved.
        num_bytes: maximum memory for all slots, in bytes. A slot is as large as a block.

    Raises:
        ConfigError: less than one block fits.
        ValueError: there is not enough memory.
    """

    def __init__(self, pool: KVPool, num_bytes: int) -> None:
        block_bytes = bytes_per_block(pool.layout.slots, pool.block_size, pool.dtype)
        if num_bytes < block_bytes:
            raise ConfigError(
                f"kv_offload_bytes is {num_bytes}, less than one block of {block_bytes} bytes; raise it, or set None "
                "to turn offloading off"
            )
        super().__init__(num_bytes // block_bytes)
        self._pool = pool
        self._host = KVPool(
            pool.layers,
            num_blocks=self.num_slots,
            block_size=pool.block_size,
            dtype=pool.dtype,
            device="cpu",
            layout=pool.layout,
        )
        if pool.device.type == "cuda":
            self._host.pin_memory()
        self._plans: list[HostCopies] = []  # plans that have not run

    def plan(self, saves: Sequence[tuple[int, bytes]], loads: Sequence[SlotLoad]) -> HostCopies:
        """Plan the copies of a step. `saves`: id and content key of each block to save; `loads`: blocks to load."""
        copies = HostCopies(self._pool, self._host, self.assign_slots(saves, loads))
        self._plans = [*(one for one in self._plans if not one.is_done), copies]
        return copies

    def drop_plans(self) -> None:
        """Forget the planned saves of voided steps, whose copies will not run."""
        self.withdraw_saves(save for copies in self._plans if not copies.is_done for save in copies.plan.saves)
        self._plans = []


def _copy_blocks(source: KVPool, from_blocks: list[int], target: KVPool, to_blocks: list[int]) -> None:
    if not from_blocks:
        return
    for of_source, of_target in zip(source.slots(), target.slots(), strict=True):
        for a, b in zip(of_source, of_target, strict=True):
            _copy_rows(a, from_blocks, b, to_blocks)


def _copy_rows(source: Tensor, from_rows: list[int], target: Tensor, to_rows: list[int]) -> None:
    if source.device == target.device:
        from_index, to_index = (torch.tensor(rows, device=source.device) for rows in (from_rows, to_rows))
        target.index_copy_(0, to_index, source.index_select(0, from_index))
        return
    for here, there in zip(from_rows, to_rows, strict=True):
        target[there].copy_(source[here], non_blocking=True)
