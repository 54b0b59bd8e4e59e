"""Which of several engines gets a request? The one that computes least for it, within a bound on its load.

The server routes by this rule among its engines, and the simulator among its replicas (`prefix-affinity`).

An engine has cached the prompts that it was sent, as far as its pool holds them. So for each engine there is an index
of the blocks of tokens that it was sent, each in its place behind the blocks before it, under the request's salt:
a tree in which blocks that no prompt has left between are one run, compared at once. The
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
        self._sent = [SentBlocks(num_blocks, block_size) for _ in range(num_engines)]

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


def full_blocks(token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> bytes:
    """The tokens of all full blocks, 8 bytes each, without that of the last token, which is computed in any case."""
    count = (len(token_ids) - 1) // block_size * block_size
    if isinstance(token_ids, np.ndarray):
        return token_ids[:count].astype(np.int64).tobytes()
    return struct.pack(f"{count}q", *token_ids[:count])


class _Run:
    """Blocks that were sent one behind the other, at least one.

    Args:
        parent: the run before it; None: it is the first of prompts.
        key: its namespace and its first block: its name among those behind `parent`.
        tokens: of all its blocks.
    """

    __slots__ = ("behind", "key", "parent", "tokens")

    def __init__(self, parent: _Run | None, key: tuple[str, bytes], tokens: bytes) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.behind: dict[tuple[str, bytes], _Run] = {}


class SentBlocks:
    """The blocks that one engine was sent, each in its place behind the blocks before it.

    Args:
        capacity: blocks that are remembered; beyond it the least recently sent are forgotten, the last of a prompt
            first.
        block_size: tokens of a block.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._num_bytes = 8 * block_size
        self._capacity = capacity * self._num_bytes
        self._first: dict[tuple[str, bytes], _Run] = {}
        self._recent: OrderedDict[_Run, None] = (
            OrderedDict()
        )  # the least recently sent first, each behind those behind it
        self._size = 0

    def __len__(self) -> int:
        return self._size // self._num_bytes

    def num_found(self, blocks: bytes, namespace: str) -> int:
        """The number of leading blocks that were sent before.

        Args:
            blocks: as `full_blocks` gives them.
            namespace: under which they were sent.
        """
        start, runs = 0, self._first
        while (run := runs.get((namespace, blocks[start : start + self._num_bytes]))) is not None:
            if not blocks.startswith(run.tokens, start):
                start += self._num_equal(run.tokens, blocks, start)
                break
            start += len(run.tokens)
            runs = run.behind
        return start // self._num_bytes

    def note(self, blocks: bytes, namespace: str) -> None:
        """These blocks are sent now."""
        blocks = blocks[: self._capacity]
        start, runs = 0, self._first
        parent: _Run | None = None
        path = []
        while start < len(blocks):
            key = (namespace, blocks[start : start + self._num_bytes])
            run = runs.get(key)
            if run is None:
                run = runs[key] = _Run(parent, key, blocks[start:])
                self._recent[run] = None
                self._size += len(run.tokens)
            elif not blocks.startswith(run.tokens, start):
                run = self._split(run, runs, self._num_equal(run.tokens, blocks, start))
            path.append(run)
            start += len(run.tokens)
            parent, runs = run, run.behind
        for run in reversed(path):  # none is forgotten before those behind it
            self._recent.move_to_end(run)
        while self._size > self._capacity:
            self._forget_oldest(self._size - self._capacity)

    def _num_equal(self, tokens: bytes, blocks: bytes, start: int) -> int:
        """The number of bytes of leading blocks of a run that are those of `blocks` from `start` on, of which there is
        one at least.
        """
        size = self._num_bytes
        low, high = 1, min(len(tokens), len(blocks) - start) // size
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[low * size : middle * size] == blocks[start + low * size : start + middle * size]:
                low = middle
            else:
                high = middle - 1
        return low * size

    def _split(self, run: _Run, runs: dict[tuple[str, bytes], _Run], num_bytes: int) -> _Run:
        """Make two of a run, which is one of `runs`; returns the first, of `num_bytes`."""
        first = runs[run.key] = _Run(run.parent, run.key, run.tokens[:num_bytes])
        self._recent[first] = None
        run.parent, run.tokens = first, run.tokens[num_bytes:]
        run.key = (run.key[0], run.tokens[: self._num_bytes])
        first.behind[run.key] = run
        return first

    def _forget_oldest(self, num_bytes: int) -> None:
        """Forget the last blocks of the run that was sent longest ago, `num_bytes` at most."""
        run = next(iter(self._recent))  # there is none behind it: those would be older
        if len(run.tokens) > num_bytes:
            run.tokens = run.tokens[:-num_bytes]
            self._size -= num_bytes
            return
        del self._recent[run]
        del (self._first if run.parent is None else run.parent.behind)[run.key]
        self._size -= len(run.tokens)

    def clear(self) -> None:
        """Forget all."""
        self._first.clear()
        self._recent.clear()
        self._size = 0
