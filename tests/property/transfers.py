"""A connector and its device, for the shadow host: KV outside the pool, loads and sends that end at random moments.

The store keeps, under the scheduler's keys, the contents of blocks at the time when they were copied out. A load writes
them back, now or block by block later, even if the request has finished: a request that got such a block meanwhile
reads wrong content.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.core import Copies, Load, Request, SchedulerOutput
from pointsman.core.kv.digests import block_keys

from .shadow import GARBAGE, require

if TYPE_CHECKING:
    from .shadow import ShadowHost

Contents = tuple[int, ...]  # of one block, a content id per slot


@dataclass(slots=True, eq=False)
class Transfer:
    """An asynchronous load or send whose end has not been reported to the scheduler."""

    transfer_id: int
    blocks: list[int]
    contents: list[Contents]  # a load: the content that each block gets; a send: the content that each must keep
    request: Request | None = None  # the request that waits for the load
    is_send: bool = False
    num_written: int = 0


class Device:
    """Both sides of a connector."""

    def __init__(self, host: ShadowHost, seed: int, *, max_held_blocks: int) -> None:
        self._host = host
        self._random = random.Random(seed)
        self.saves_evicted = host.config.preemption_mode == "recompute" or self._random.random() < 0.3
        self.max_held_blocks = max_held_blocks
        self.store: dict[bytes, Contents] = {}
        self.transfers: dict[int, Transfer] = {}
        self.holders: dict[Request, list[int]] = {}  # blocks of requests that have no row
        self.undecided: set[Request] = set()  # requests without an answer in this step
        self.offered: dict[Request, int] = {}  # blocks of an asynchronous load, with those before it, in this step
        self.resumed: set[Request] = set()  # requests admitted with loaded blocks in this step
        swaps = host.config.preemption_mode != "recompute"
        self.is_host_memory = swaps and self._random.random() < 0.5  # loads before the step, always
        self.is_calm = self.is_host_memory  # decides at once, and sends nothing
        self.num_loads = self.num_loaded_later = 0

    # -------------------------------------------------------------- what the scheduler asks

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        size = self._host.config.block_size
        require(request.reads_prefix_cache, f"{request.request_id} reads no prefix cache, but may be loaded")
        require(num_local_tokens % size == 0, f"{request.request_id}: {num_local_tokens} local tokens, no whole blocks")
        keys = block_keys(request, size)[num_local_tokens // size :]
        found = next((index for index, key in enumerate(keys) if key not in self.store), len(keys))
        if not self.is_calm and self._random.random() < 0.15:
            self.undecided.add(request)
            return None, False
        spare = self._random.randrange(size) if found < len(keys) else 0  # a part of a block is of no use
        is_async = found > 0 and not self.is_host_memory and self._random.random() < 0.7
        if is_async:
            self.offered[request] = min(num_local_tokens // size + found, (request.num_tokens - 1) // size)
        return found * size + spare, is_async

    def request_ended(self, request: Request, block_ids: Sequence[int], num_tokens: int, transfer_id: int) -> bool:
        blocks = [int(block) for block in block_ids]
        size = self._host.config.block_size
        sequence = self._host.sequences[request]
        table = self._host.table(request)
        require(
            sequence.is_stale or blocks == table[: -(-num_tokens // size)],
            f"{request.request_id} ends with {blocks}, it has {table}",
        )
        sound = sequence.contents[:num_tokens]
        held = self._host.contents_of(blocks)[:num_tokens]
        require(held == sound, f"{request.request_id} is to send {num_tokens} tokens, and its blocks hold {held}")
        if self.is_calm or self._random.random() < 0.6:
            return False
        contents = [tuple(held[start : start + size]) for start in range(0, num_tokens, size)]
        self.transfers[transfer_id] = Transfer(transfer_id, blocks, contents, is_send=True)
        return True

    def reset(self) -> None:
        self.store.clear()

    # -------------------------------------------------------------- what an output tells

    def begin(self, output: SchedulerOutput) -> dict[Request, list[int]]:
        """Copy out released blocks, then load. Returns the slots that are written before the step computes."""
        size = self._host.config.block_size
        for save in output.saves:
            wanted = self.saves_evicted or self._is_wanted(save.key)
            require(wanted, f"block {save.block_id} is saved, and no request will resume with it")
            contents = tuple(self._host.contents_of([save.block_id]))
            require(GARBAGE not in contents, f"block {save.block_id} is saved, and holds garbage")
            old = self.store.setdefault(save.key, contents)
            require(old == contents, f"block {save.block_id} is saved as what {old} is, and holds {contents}")
        written: dict[Request, list[int]] = {}
        for load in output.loads:
            contents_of_blocks = self._contents_of(load)
            self._check_targets(load)
            if load.is_async:
                self._start(load, contents_of_blocks)
                continue
            slots = [block * size + offset for block in load.block_ids.tolist() for offset in range(size)]
            self._host.write(load.block_ids.tolist(), contents_of_blocks)
            written[load.request] = slots
        return written

    def _is_wanted(self, key: bytes) -> bool:
        """Whether an unfinished preempted request has the block with this key."""
        lost = (request for request in self._host.sequences if request.num_preemptions and not request.is_finished)
        return any(key in block_keys(request, self._host.config.block_size) for request in lost)

    def copies(self, output: SchedulerOutput) -> Copies | None:
        """The copies of a step, with a time that differs from step to step."""
        loaded = sum(len(load.block_ids) for load in output.loads if not load.is_async)
        count = len(output.saves) + loaded
        return Copies(count, 0.03 * (1 + output.step_id % 5)) if count else None

    def _contents_of(self, load: Load) -> list[Contents]:
        size = self._host.config.block_size
        first, count = load.first_token // size, load.num_tokens // size
        require(count == len(load.block_ids) > 0, f"{load} has {count} blocks of tokens")
        require(first == len(load.local_blocks), f"{load} starts behind {len(load.local_blocks)} blocks")
        keys = block_keys(load.request, size)[first : first + count]
        require(all(key in self.store for key in keys), f"{load} asks for more than was offered")
        return [self.store[key] for key in keys]

    def _check_targets(self, load: Load) -> None:
        targets = load.block_ids.tolist()
        taken = (self._host.blocks_in_use() or set()).intersection(targets)
        require(not taken, f"transfer {load.transfer_id} loads into {sorted(taken)}, which are held")
        self.check_free(targets, load.request_id)

    def _start(self, load: Load, contents: list[Contents]) -> None:
        self.num_loads += 1
        held = [*load.local_blocks.tolist(), *load.block_ids.tolist()]
        require(load.request not in self.holders, f"{load.request_id} holds blocks already")
        self.holders[load.request] = held
        self.transfers[load.transfer_id] = Transfer(load.transfer_id, load.block_ids.tolist(), contents, load.request)

    @property
    def num_held(self) -> int:
        """Number of blocks held outside the batch; a shared block counts for each holder."""
        waiting = sum(map(len, self.holders.values()))
        return waiting + sum(len(t.blocks) for t in self.transfers.values() if t.request is None)

    def open_step(self) -> None:
        """Begin a step: the scheduler asks again."""
        self.undecided.clear()
        self.offered.clear()
        self.resumed.clear()

    # -------------------------------------------------------------- what happens meanwhile

    def check_free(self, blocks: Sequence[int], name: str) -> None:
        """No request gets a block that a transfer may still write, or gets a block that is being sent, to write to
        it."""
        for transfer in self.transfers.values():
            taken = set(transfer.blocks).intersection(blocks) if not transfer.is_send else set()
            require(not taken, f"{name} is handed {sorted(taken)}, which transfer {transfer.transfer_id} may yet write")

    def write(self, transfer: Transfer, count: int) -> None:
        """The device writes up to `count` further blocks of a load."""
        start, end = transfer.num_written, min(transfer.num_written + count, len(transfer.blocks))
        if not transfer.is_send:
            self._host.write(transfer.blocks[start:end], transfer.contents[start:end])
            transfer.num_written = end

    def end(self, transfer: Transfer, num_loaded_blocks: int) -> list[int] | None:
        """End a transfer; returns the blocks that its request then holds, or None if no request waits for it."""
        del self.transfers[transfer.transfer_id]
        size = self._host.config.block_size
        if transfer.is_send:
            kept = self._host.contents_of(transfer.blocks)
            sent = [content for contents in transfer.contents for content in contents]
            name = f"transfer {transfer.transfer_id}"
            require(kept[: len(sent)] == sent, f"{name} sent {sent}, and {transfer.blocks} hold {kept} now")
            return None
        lost = transfer.blocks[num_loaded_blocks:]
        self._host.write(lost, [(GARBAGE,) * size] * len(lost))
        request = transfer.request
        if request is None:
            return None
        held = self.holders[request]
        del held[len(held) - len(lost) :]
        self.num_loaded_later += num_loaded_blocks
        if not held:
            del self.holders[request]
        return held

    def let_go(self, request: Request) -> None:
        """Release the blocks that the request holds without a row, as it no longer waits for a load, or runs."""
        self.holders.pop(request, None)
        for transfer in self.transfers.values():
            if transfer.request is request:
                transfer.request = None

    def transfer_of(self, request: Request) -> Transfer | None:
        """The load that a request waits for."""
        return next((transfer for transfer in self.transfers.values() if transfer.request is request), None)

    def blocks(self) -> set[int]:
        """Blocks held without a row."""
        held = {block for blocks in self.holders.values() for block in blocks}
        return held.union(*(transfer.blocks for transfer in self.transfers.values()))

    def preload(self, request: Request) -> None:
        """Store the KV of a request's prompt, as if another engine had computed it."""
        size = self._host.config.block_size
        contents = self._host.contents_for(request, request.prompt_token_ids.tolist())
        for index, key in enumerate(block_keys(request, size)):
            self.store[key] = tuple(contents[index * size : (index + 1) * size])
