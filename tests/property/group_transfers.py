"""The connector and its device for KV in groups: each group has contents of its own in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pointsman.core import Load, Request
from pointsman.core.kv.digests import block_keys, block_name

from .group_shadow import GroupShadowHost, reads_from
from .shadow import GARBAGE, require
from .transfers import Contents, Device, Transfer

Spot = tuple[int, int]  # a group, and a place in its table


@dataclass(slots=True, eq=False)
class GroupTransfer(Transfer):
    """A load or a send, with where its blocks are."""

    spots: list[Spot] = field(default_factory=list)  # of `blocks`
    num_places: int = 0  # of each table, up to the last token of a load
    first_place: int = 0  # of those that a load adds
    local: dict[Spot, int] = field(default_factory=dict)  # blocks of a load that the pool had


class GroupDevice(Device):
    """As `Device`, for groups of layers."""

    _host: GroupShadowHost

    # -------------------------------------------------------------- names and places

    def name(self, request: Request, spot: Spot) -> bytes:
        group, place = spot
        keys = block_keys(request, self._host.config.block_size)
        return block_name(keys[place], group, len(self._host.config.kv_groups))

    def needed(self, num_places: int) -> list[Spot]:
        """(group, place) of the blocks to which the token after this number of blocks attends."""
        size, groups = self._host.config.block_size, self._host.config.kv_groups
        firsts = [reads_from(group, num_places * size) // size for group in groups]
        return [(group, place) for place in range(num_places) for group, first in enumerate(firsts) if place >= first]

    def num_usable(self, found: Iterable[Spot], most: int) -> int:
        """Maximum number of blocks, up to `most`, after which a request can continue with the blocks that were
        found."""
        there = set(found)
        return next(count for count in range(most, -1, -1) if there.issuperset(self.needed(count)))

    # -------------------------------------------------------------- what the scheduler asks

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        raise AssertionError("asked as if there were one group")

    def num_tokens_in_groups(
        self, request: Request, num_local_tokens: int, has: npt.NDArray[np.bool_]
    ) -> tuple[int | None, bool]:
        size, most = self._host.config.block_size, (request.num_tokens - 1) // self._host.config.block_size
        require(request.reads_prefix_cache, f"{request.request_id} reads no prefix cache, but may be loaded")
        require(num_local_tokens % size == 0, f"{request.request_id}: {num_local_tokens} local tokens, no whole blocks")
        require(has.shape == (len(self._host.config.kv_groups), most), f"{request.request_id}: {has.shape} of {most}")
        local = num_local_tokens // size
        found = {(group, place) for group, place in zip(*(where.tolist() for where in has.nonzero()), strict=True)}
        require(found.issuperset(self.needed(local)), f"{request.request_id} continues after {local} without {found}")
        spots = [(group, place) for group in range(len(has)) for place in range(most)]
        usable = self.num_usable([*found, *(spot for spot in spots if self.name(request, spot) in self.store)], most)
        if not self.is_calm and self._random.random() < 0.15:
            self.undecided.add(request)
            return None, False
        count = max(0, usable - local)
        is_async = count > 0 and not self.is_host_memory and self._random.random() < 0.7
        if is_async:
            self.offered[request] = len(self.needed(local + count))
        return count * size, is_async

    def request_ended(self, request: Request, block_ids: object, num_tokens: int, transfer_id: int) -> bool:
        size, table = self._host.config.block_size, np.asarray(block_ids)
        sequence, told = self._host.sequences[request], set(self._host.placed(request))
        places, groups = (table >= 0).T.nonzero()
        spots = list(zip(groups.tolist(), places.tolist(), strict=True))
        blocks = [int(table[spot]) for spot in spots]
        require(table.shape[1] == -(-num_tokens // size), f"{request.request_id} ends with {table} of {num_tokens}")
        placed = {(group, place, block) for (group, place), block in zip(spots, blocks, strict=True)}
        require(sequence.is_stale or told.issuperset(placed), f"{request.request_id} ends with {placed}, it has {told}")
        contents = [self._sound(request, place, num_tokens) for _, place in spots]
        held = [tuple(self._host.contents_of([block])[: len(of)]) for block, of in zip(blocks, contents, strict=True)]
        require(held == contents, f"{request.request_id} is to send {contents}, and its blocks hold {held}")
        if self.is_calm or self._random.random() < 0.6:
            return False
        self.transfers[transfer_id] = GroupTransfer(transfer_id, blocks, contents, is_send=True, spots=spots)
        return True

    def _sound(self, request: Request, place: int, num_tokens: int) -> Contents:
        size = self._host.config.block_size
        return tuple(self._host.sequences[request].contents[place * size : min((place + 1) * size, num_tokens)])

    # -------------------------------------------------------------- what an output tells

    def _is_wanted(self, key: bytes) -> bool:
        lost = (request for request in self._host.sequences if request.num_preemptions and not request.is_finished)
        return any(key[:-2] in block_keys(request, self._host.config.block_size) for request in lost)

    def _contents_of(self, load: Load) -> list[Contents]:
        size = self._host.config.block_size
        end = (load.first_token + load.num_tokens) // size
        spots = self._spots(load)
        require(len(spots) == len(load.block_ids) == len(set(spots)), f"{load} names {spots}")
        needed = self.needed(end)
        require(set(spots) <= set(needed), f"{load} loads {spots}, the next token attends to {needed}")
        held = len(load.local_blocks) + len(spots)
        require(held == len(needed), f"{load} holds {held} blocks, the next token attends to {needed}")
        names = [self.name(load.request, spot) for spot in spots]
        require(all(name in self.store for name in names), f"{load} asks for more than was offered")
        return [self.store[name] for name in names]

    @staticmethod
    def _spots(load: Load) -> list[Spot]:
        return list(zip(load.block_groups.tolist(), load.block_places.tolist(), strict=True))

    def _start(self, load: Load, contents: list[Contents]) -> None:
        super()._start(load, contents)
        size, spots = self._host.config.block_size, self._spots(load)
        end = (load.first_token + load.num_tokens) // size
        rest = [spot for spot in self.needed(end) if spot not in set(spots)]
        self.transfers[load.transfer_id] = GroupTransfer(
            load.transfer_id,
            load.block_ids.tolist(),
            contents,
            load.request,
            spots=spots,
            num_places=end,
            first_place=load.first_token // size,
            local=dict(zip(rest, load.local_blocks.tolist(), strict=True)),
        )

    # -------------------------------------------------------------- what happens meanwhile

    def end_in_groups(self, transfer: GroupTransfer, lost: set[int]) -> int:
        """End a transfer; the blocks `lost` of a load are missing. Returns the number of blocks of each table after
        which its request can continue."""
        del self.transfers[transfer.transfer_id]
        size = self._host.config.block_size
        if transfer.is_send:
            kept = [tuple(self._host.contents_of([block])) for block in transfer.blocks]
            kept = [whole[: len(sent)] for whole, sent in zip(kept, transfer.contents, strict=True)]
            require(kept == transfer.contents, f"transfer {transfer.transfer_id} sent other contents than are there")
            return 0
        self._host.write(sorted(lost), [(GARBAGE,) * size] * len(lost))
        table = {**transfer.local, **dict(zip(transfer.spots, transfer.blocks, strict=True))}
        usable = self.num_usable([spot for spot, block in table.items() if block not in lost], transfer.num_places)
        request = transfer.request
        if request is not None:
            held = self.holders[request] = [block for (_, place), block in table.items() if place < usable]
            self.num_loaded_later += len(held)
            if not held:
                del self.holders[request]
        return usable

    def preload(self, request: Request) -> None:
        size, num_groups = self._host.config.block_size, len(self._host.config.kv_groups)
        contents = self._host.contents_for(request, request.prompt_token_ids.tolist())
        for place in range(len(contents) // size):
            for group in range(num_groups):
                self.store[self.name(request, (group, place))] = tuple(contents[place * size : (place + 1) * size])
