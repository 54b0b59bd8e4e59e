"""Routing: sends a request to the engine that computes the fewest tokens for it, within a bound on the engine's load.

The server uses this rule to choose among its engines, and the simulator to choose among its replicas
(`prefix-affinity`).

An engine caches the prompts that were sent to it, as far as its pool holds them. So the router keeps, for each engine,
an index of the token blocks that were sent to it. A block is identified by its tokens, all blocks before it and the
request's salt. The index is a tree; consecutive blocks between which no prompt branches are one run, compared in one
operation. The cost of a request on an engine is the number of the request's prompt tokens that the engine's index
lacks, plus `TOKENS_PER_REQUEST` for each open request of the engine. The engine with the lowest cost is chosen; among
engines with equal cost, the one whose index has the fewest blocks, so that new prefixes spread.

The bound: if the least loaded engine that takes requests has m open requests, an engine with n open requests is chosen
only if n <= `MAX_LEAD` + m + m / 4. So cached prefixes cannot overload an engine, for any client behaviour.

The index compares tokens, not hashes. It only estimates the engine's cache, which evicts on its own.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_LEAD = 4
"""Maximum number by which the open requests of a chosen engine may exceed 5/4 of those of the least loaded engine."""
TOKENS_PER_REQUEST = 32
"""Cost of one open request of an engine, in prompt tokens to compute."""


class Router:
    """Chooses an engine for each request.

    Args:
        num_engines: number of engines, at least 1.
        block_size: tokens of a KV block, as in the engines.
        num_blocks: number of blocks in each engine's pool; also the capacity of each engine's index.
    """

    def __init__(self, num_engines: int, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._sent = [SentBlocks(num_blocks, block_size) for _ in range(num_engines)]

    def choose(
        self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer], namespace: str, loads: Sequence[int | None]
    ) -> int:
        """Choose the engine for a prompt, and add the prompt to the engine's index.

        Args:
            prompt_token_ids: token ids of the prompt, at least one.
            namespace: salt of the request; only requests with equal namespaces share cached prefixes.
            loads: the number of open requests of each engine; None: the engine takes no requests.

        Raises:
            ValueError: no engine takes requests.
        """
        least = min((load for load in loads if load is not None), default=None)
        if least is None:
            raise ValueError("no engine accepts requests; try again later")
        limit = max_open_requests(least)
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
        self._sent[best[2]].add(blocks, namespace)
        return best[2]

    def clear_index(self, engine: int | None = None) -> None:
        """Clear the index of an engine whose cache is empty because the cache was reset or the engine is new. `engine`
        None: clear the indexes of all engines."""
        for index, sent in enumerate(self._sent):
            if engine is None or index == engine:
                sent.clear()


def max_open_requests(min_open: int) -> int:
    """Maximum number of open requests of an engine that may be chosen, if the least loaded engine has `min_open` open
    requests."""
    return MAX_LEAD + min_open + min_open // 4


def full_blocks(token_ids: Sequence[int] | npt.NDArray[np.integer], block_size: int) -> bytes:
    """The tokens of all full blocks, 8 bytes for each token. The last token belongs to no full block, as it is always
    computed."""
    count = (len(token_ids) - 1) // block_size * block_size
    if isinstance(token_ids, np.ndarray):
        return token_ids[:count].astype(np.int64).tobytes()
    return struct.pack(f"{count}q", *token_ids[:count])


class _Run:
    """A node of the index: one or more consecutive blocks of tokens that were sent to the engine.

    Args:
        parent: the run before this run; None: this run is at the start of prompts.
        key: namespace and first block of the run, which identify it among the runs behind `parent`.
        tokens: the tokens of all blocks of the run.
    """

    __slots__ = ("behind", "key", "parent", "tokens")

    def __init__(self, parent: _Run | None, key: tuple[str, bytes], tokens: bytes) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.behind: dict[tuple[str, bytes], _Run] = {}


class SentBlocks:
    """The index of the blocks that were sent to one engine.

    Args:
        capacity: maximum number of blocks; beyond it the least recently sent blocks are removed, the last blocks of a
            prompt first.
        block_size: tokens of a block.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._num_bytes = 8 * block_size
        self._capacity = capacity * self._num_bytes
        self._first: dict[tuple[str, bytes], _Run] = {}
        self._recent: OrderedDict[_Run, None] = (
            OrderedDict()
        )  # least recently sent first; each run is after the runs behind it
        self._size = 0

    def __len__(self) -> int:
        return self._size // self._num_bytes

    def num_found(self, blocks: bytes, namespace: str) -> int:
        """The number of leading blocks of a prompt that are in the index.

        Args:
            blocks: full blocks of the prompt, as `full_blocks` returns them.
            namespace: salt of the request.
        """
        start, runs = 0, self._first
        while (run := runs.get((namespace, blocks[start : start + self._num_bytes]))) is not None:
            if not blocks.startswith(run.tokens, start):
                start += self._num_equal(run.tokens, blocks, start)
                break
            start += len(run.tokens)
            runs = run.behind
        return start // self._num_bytes

    def add(self, blocks: bytes, namespace: str) -> None:
        """Add the blocks of a prompt to the index, and make them the most recently sent blocks."""
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
        for run in reversed(path):  # so that a run is removed only after the runs behind it
            self._recent.move_to_end(run)
        while self._size > self._capacity:
            self._remove_oldest(self._size - self._capacity)

    def _num_equal(self, tokens: bytes, blocks: bytes, start: int) -> int:
        """Number of leading bytes of a run's `tokens` that equal `blocks` from `start` on, in whole blocks; at least
        one block is equal."""
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
        """Split a run of `runs` in two; returns the first part, which has `num_bytes` bytes."""
        first = runs[run.key] = _Run(run.parent, run.key, run.tokens[:num_bytes])
        self._recent[first] = None
        run.parent, run.tokens = first, run.tokens[num_bytes:]
        run.key = (run.key[0], run.tokens[: self._num_bytes])
        first.behind[run.key] = run
        return first

    def _remove_oldest(self, num_bytes: int) -> None:
        """Remove the last blocks of the least recently sent run, at most `num_bytes` bytes."""
        run = next(iter(self._recent))  # no run is behind this one: such a run would be removed first
        if len(run.tokens) > num_bytes:
            run.tokens = run.tokens[:-num_bytes]
            self._size -= num_bytes
            return
        del self._recent[run]
        del (self._first if run.parent is None else run.parent.behind)[run.key]
        self._size -= len(run.tokens)

    def clear(self) -> None:
        """Remove all blocks from the index."""
        self._first.clear()
        self._recent.clear()
        self._size = 0
