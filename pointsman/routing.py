"""Routing: sends a request to the engine that computes the fewest tokens for it, within a bound on the engine's load.

The server routes by this rule among its engines, and the simulator among its replicas (`prefix-affinity`).

An engine caches the prompts that it was sent, as far as its pool holds them. So the router keeps an index of the token
blocks that each engine was sent, by their predecessors and the request's salt. The index is a tree; blocks between
which no prompt branches are one run, compared at once. The cost of a request on an engine is the number of its prompt
tokens that are not found there, plus `TOKENS_PER_REQUEST` for each open request there. The lowest cost wins; among
equals, the index with the fewest blocks, so that new prefixes spread.

The bound: if the least loaded engine that takes requests has m open requests, an engine with n is chosen only if n <=
`MAX_LEAD` + m + m / 4. So cached prefixes cannot overload an engine, for any client behaviour.

The index compares tokens, not hashes. It only estimates the engine's cache, which evicts on its own.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_LEAD = 4
"""Maximum lead in open requests, beside a quarter of the least load, of an engine that is preferred for its cache."""
TOKENS_PER_REQUEST = 32
"""Number of prompt tokens whose computation costs the same as one open request."""


class Router:
    """Chooses engines.

    Args:
        num_engines: at least 1.
        block_size: tokens of a block, as in the engines.
        num_blocks: blocks of tokens that each engine's pool holds; also the capacity of its index.
    """

    def __init__(self, num_engines: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._sent = [SentBlocks(num_blocks, block_size) for _ in range(num_engines)]

    def choose(
        self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer], namespace: str, loads: Sequence[int | None]
    ) -> int:
        """Choose the engine for a prompt, and note the prompt as sent there.

        Args:
            prompt_token_ids: at least one.
            namespace: only requests with equal namespaces share cached prefixes.
            loads: the number of open requests of each engine; None: it takes no requests.

        Raises:
            ValueError: no engine takes requests.
        """
        least = min((load for load in loads if load is not None), default=None)
        if least is None:
            raise ValueError("no engine takes requests; wait until one does")
        limit = max_open(least)
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
        """Clear the index of an engine whose cache is empty, as it was reset or the engine is new. None: of all
        engines."""
        for index, sent in enumerate(self._sent):
            if engine is None or index == engine:
                sent.clear()


def max_open(least: int) -> int:
    """Maximum number of open requests of an engine that may be chosen, if the least loaded one has `least`."""
    return MAX_LEAD + least + least // 4


def full_blocks(token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> bytes:
    """The tokens of all full blocks, 8 bytes each; the last token never counts, as it is always computed."""
    count = (len(token_ids) - 1) // block_size * block_size
    if isinstance(token_ids, np.ndarray):
        return token_ids[:count].astype(np.int64).tobytes()
    return struct.pack(f"{count}q", *token_ids[:count])


class _Run:
    """Consecutive blocks that were sent, at least one.

    Args:
        parent: the run before it; None: it begins prompts.
        key: its namespace and its first block, which identify it among the runs behind `parent`.
        tokens: the tokens of all its blocks.
    """

    __slots__ = ("behind", "key", "parent", "tokens")

    def __init__(self, parent: _Run | None, key: tuple[str, bytes], tokens: bytes) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.behind: dict[tuple[str, bytes], _Run] = {}


class SentBlocks:
    """The index of the blocks that one engine was sent, by their predecessors.

    Args:
        capacity: maximum number of blocks; beyond it the least recently sent are forgotten, the last blocks of a prompt
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
            blocks: as `full_blocks` returns them.
            namespace: the namespace under which they were sent.
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
        """Note that these blocks are sent now."""
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
        for run in reversed(path):  # a run is forgotten only after the runs behind it
            self._recent.move_to_end(run)
        while self._size > self._capacity:
            self._forget_oldest(self._size - self._capacity)

    def _num_equal(self, tokens: bytes, blocks: bytes, start: int) -> int:
        """Number of bytes of a run's leading blocks that equal `blocks` from `start` on; at least one block does."""
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
        """Split a run of `runs` in two; returns the first, of `num_bytes`."""
        first = runs[run.key] = _Run(run.parent, run.key, run.tokens[:num_bytes])
        self._recent[first] = None
        run.parent, run.tokens = first, run.tokens[num_bytes:]
        run.key = (run.key[0], run.tokens[: self._num_bytes])
        first.behind[run.key] = run
        return first

    def _forget_oldest(self, num_bytes: int) -> None:
        """Forget the last blocks of the least recently sent run, at most `num_bytes`."""
        run = next(iter(self._recent))  # no run is behind it: such a run would be older
        if len(run.tokens) > num_bytes:
            run.tokens = run.tokens[:-num_bytes]
            self._size -= num_bytes
            return
        del self._recent[run]
        del (self._first if run.parent is None else run.parent.behind)[run.key]
        self._size -= len(run.tokens)

    def clear(self) -> None:
        """Forget all blocks."""
        self._first.clear()
        self._recent.clear()
        self._size = 0
