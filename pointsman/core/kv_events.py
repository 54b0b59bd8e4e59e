"""What enters and leaves the prefix cache, for whoever keeps a picture of it: routers, caches of other machines.

Other processes need a name for a block that says all that is before it, so here, and only where events are asked for,
blocks have chained hashes:

    hash of a block = SHA-256(hash of the block before it, or of the root, then its tokens as little-endian int32)
    hash of a root  = SHA-256 of the canonical JSON of [cache salt, adapter name, adapter version]

An event tells of content, not of blocks: it is stored with the first block that holds it and removed with the last, so
that what was stored and not removed is, at any moment, just what a look-up could find. A prompt is told of when it is
scheduled, and taken back if its step fails. A removed block comes after everything behind it.
"""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple, TypeAlias

import numpy as np

from pointsman.core.prefix_cache import Root, Run


class BlockStored(NamedTuple):
    """Consecutive full blocks can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first; None: it is the first of its sequence."""
    token_ids: list[int]
    """Of all these blocks."""
    root: Root
    """What else must be equal: cache salt and adapter."""


class BlockRemoved(NamedTuple):
    """Blocks cannot be found any longer; the last of a sequence comes first."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """No block can be found any longer."""


KVEvent: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


def root_hash(root: Root) -> bytes:
    """What the hash of a sequence's first block begins with."""
    name, version = root.adapter if root.adapter is not None else (None, None)
    return hashlib.sha256(json.dumps([root.cache_salt, name, version], separators=(",", ":")).encode()).digest()


def block_hash(before: bytes, token_bytes: bytes) -> bytes:
    """The hash of a block: `before` is that of the block before it, or of the root."""
    return hashlib.sha256(before + token_bytes).digest()


class KVEvents:
    """Listens to a prefix cache and keeps what happened until somebody takes it."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hashes: dict[int, tuple[Root, list[bytes]]] = {}  # by the id of the run: its root, its blocks' hashes
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def added(self, run: Run) -> None:
        """A run of blocks entered the tree."""
        if isinstance(run.parent, Root):
            root, parent = run.parent, None
        else:
            root, before = self._hashes[run.parent.run.run_id]
            parent = before[run.parent.at]
        size, last = self._block_bytes, parent if parent is not None else root_hash(root)
        hashes: list[bytes] = []
        for start in range(0, len(run.token_bytes), size):
            last = block_hash(last, run.token_bytes[start : start + size])
            hashes.append(last)
        self._hashes[run.run_id] = (root, hashes)
        token_ids = np.frombuffer(run.token_bytes, dtype=np.int32).tolist()
        self._events.append(BlockStored(list(hashes), parent, token_ids, root))

    def shrunk(self, run: Run, length: int) -> None:
        """Only the first `length` blocks of a run are left in the tree."""
        _, hashes = self._hashes[run.run_id]
        if length < len(hashes):
            self._events.append(BlockRemoved(hashes[length:][::-1]))
            del hashes[length:]
        if length == 0:
            del self._hashes[run.run_id]

    def cleared(self) -> None:
        """The tree is empty."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())
