"""nano-vLLM and miniVLLM with the prefix caches of their own block managers, in place of the library's.

A free block is overwritten in the order of return, generated blocks can be found as soon as they are full, and of
duplicates only the one written last can be found. One token is always left to compute, as in nano-vLLM's main branch:
the others stop where a prompt is cached entirely.
"""

from __future__ import annotations

from collections import deque

from .sequences import Block, Cache, Sequence
from .two_phases import MiniVllm, NanoVllm, NanoVllmChunked


class NanoVllmCache(Cache):
    survives_free = True

    def __init__(self, num_blocks: int, size: int) -> None:
        super().__init__(num_blocks, size)
        self.unheld = deque(self.blank)
        self.last_written: dict[tuple[int, ...], Block] = {}

    @property
    def free(self) -> int:
        return len(self.unheld)

    def look_up(self, sequence: Sequence) -> list[Block]:
        found: list[Block] = []
        for end in range(self.size, len(sequence.tokens), self.size):
            key = tuple(sequence.tokens[:end])
            block = self.last_written.get(key)
            if block is None or block.key != key:
                break
            found.append(block)
        return found

    def start(self, sequence: Sequence, cached: list[Block], num_tokens: int) -> None:
        for block in cached:
            if block.references == 0:
                self.unheld.remove(block)
            block.references += 1
        sequence.table = list(cached)
        sequence.published = len(cached)
        sequence.computed = len(cached) * self.size
        self.grow(sequence, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(self.missing(sequence, num_tokens)):
            block = self.unheld.popleft()
            block.references, block.key = 1, None
            sequence.table.append(block)

    def publish_prompt(self, sequence: Sequence) -> None:
        """All that is computed, generated blocks included."""
        for index in range(sequence.published, sequence.computed // self.size):
            key = tuple(sequence.tokens[: (index + 1) * self.size])
            sequence.table[index].key = key
            self.last_written[key] = sequence.table[index]
            sequence.published = index + 1

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.table) if self.survives_free else sequence.table:
            block.references -= 1
            if block.references == 0:
                self.unheld.append(block)
                if not self.survives_free:
                    block.key = None
        sequence.table, sequence.computed, sequence.published, sequence.is_cut = [], 0, 0, False


class MiniVllmCache(NanoVllmCache):
    """As listed: a block loses its content when the last sequence that holds it returns it."""

    survives_free = False


class OriginalNanoVllm(NanoVllm):
    cache_type = NanoVllmCache


class OriginalNanoVllmChunked(NanoVllmChunked):
    cache_type = NanoVllmCache


class OriginalMiniVllm(MiniVllm):
    cache_type = MiniVllmCache
