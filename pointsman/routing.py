"""Which of several engines gets a request? The one that computes least for it, within a bound on its load.

The server routes by this rule among its engines, and the simulator among its replicas (`prefix-affinity`).

An engine has cached the prompts that it was sent, as far as its pool holds them. So for each engine there is an index
of the blocks of tokens that it was sent, each in its place behind the blocks before it, under the request's salt. The
cost of a request on an engine is the prompt's tokens that are not found there, and `TOKENS_PER_REQUEST` for each
request that is open there; the least cost wins, of equal ones the index with fewer blocks, so that new prefixes spread.

The bound: of the engines that take requests, one with n open requests is chosen only if the least loaded has m and
n <= `MAX_LEAD` + m + m / 4. So no engine is preferred for what it has cached by more than that, whatever clients send.

What is compared are the tokens, not hashes of them. The index is a guess at what the engine holds: it evicts by itself.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

import numpy as np
import numpy.typing as npt

MAX_LEAD = 4
"""Requests by which an engine may be preferred, beside a quarter of the least load."""
TOKENS_PER_REQUEST = 32
"""Prompt tokens whose computation weighs as much as one request that is open."""


class Router:
    """Chooses engines.

    Args:
        num_engines: at least 1.
        block_size: tokens of a block, as the engines have it.
        num_blocks: blocks of tokens that each engine holds, and its index remembers.
    """

    def __init__(self, num_engines: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._sent = [SentBlocks(num_blocks) for _ in range(num_engines)]

    def choose(
        self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer], namespace: str, loads: Sequence[int | None]
    ) -> int:
        """The engine for a prompt, which is noted as sent there.

        Args:
            prompt_token_ids: at least one.
            namespace: only requests with an equal one share cached prefixes.
            loads: the number of open requests of each engine; None: it takes none.

        Raises:
            ValueError: no engine takes requests.
        """
        least = min((load for load in loads if load is not None), default=None)
        if least is None:
            raise ValueError("no engine takes requests; wait until one does")
        limit = most_open(least)
        blocks = full_blocks(prompt_token_ids, self._block_size)
        best: tuple[int, int, int] | None = None
        for index, load in enumerate(loads):
            if load is None or load > limit:
                continue
            sent = self._sent[index]
            cost = TOKENS_PER_REQUEST * load - self._block_size * sent.num_found(blocks, namespace)
            if best is None or (cost, len(sent)) < best[:2]:
                best = (cost, len(sent), index)
        assert best is not None  # the least loaded is within the limit
        self._sent[best[2]].note(blocks, namespace)
        return best[2]

    def forget(self, engine: int | None = None) -> None:
        """An engine's cache is empty: it was reset, or the engine is a new one. None: all are."""
        for index, sent in enumerate(self._sent):
            if engine is None or index == engine:
                sent.clear()


def most_open(least: int) -> int:
    """The number of open requests up to which an engine may be chosen, where the least loaded has `least`."""
    return MAX_LEAD + least + least // 4


def full_blocks(token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> list[bytes]:
    """The tokens of each full block, without that of the last token, which is computed in any case."""
    if isinstance(token_ids, np.ndarray):
        raw = token_ids.astype(np.int64).tobytes()
    else:
        raw = struct.pack(f"{len(token_ids)}q", *token_ids)
    size = 8 * block_size
    end = (len(token_ids) - 1) // block_size * size
    return [raw[start : start + size] for start in range(0, end, size)]


class SentBlocks:
    """The blocks that one engine was sent, each named by the block before it and its own tokens.

    Args:
        capacity: blocks that are remembered; beyond it the least recently sent are forgotten, the last of a prompt
            first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ids: OrderedDict[tuple[int | str, bytes], int] = OrderedDict()  # the least recently sent first
        self._next = count()

    def __len__(self) -> int:
        return len(self._ids)

    def num_found(self, blocks: Sequence[bytes], namespace: str) -> int:
        """The number of leading blocks that were sent before."""
        parent: int | str = namespace
        ids = self._ids
        for number, block in enumerate(blocks):
            found = ids.get((parent, block))
            if found is None:
                return number
            parent = found
        return len(blocks)

    def note(self, blocks: Sequence[bytes], namespace: str) -> None:
        """These blocks are sent now."""
        parent: int | str = namespace
        ids, keys = self._ids, []
        for block in blocks[: self._capacity]:
            key = (parent, block)
            if (found := ids.get(key)) is None:
                found = ids[key] = next(self._next)
            keys.append(key)
            parent = found
        for key in reversed(keys):  # a block is never forgotten before those behind it
            ids.move_to_end(key)
        while len(ids) > self._capacity:
            ids.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._ids.clear()
