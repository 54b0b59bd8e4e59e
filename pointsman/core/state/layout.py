"""The layout of a model's KV: groups of layers, each with a block table of its own.

The layers of a group attend to the same positions before a token: to all of them, to a window, or to a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal["full", "window", "chunk"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


class KVGroup(NamedTuple):
    """Layers whose KV is in the same blocks."""

    kind: Kind = "full"
    """Tokens that a token attends to. "full": all tokens up to its own. "window": the newest `size` tokens, its own
    included. "chunk": all tokens since the last multiple of `size`."""
    size: int = 0
    """Size of the window or chunk, in tokens; 0 for "full"."""

    @property
    def is_full(self) -> bool:
        return self.kind == "full"

    @property
    def reach(self) -> int:
        """Maximum number of earlier tokens that a token attends to; 0 for "full", which has no limit."""
        return self.size - 1 if self.kind != "full" else 0

    def num_skipped(self, num_tokens: Tokens) -> Tokens:
        """Number of the first `num_tokens` tokens to which no later token attends. It never decreases with
        `num_tokens`."""
        if self.kind == "window":
            return (
                np.maximum(num_tokens - self.reach, 0)
                if isinstance(num_tokens, np.ndarray)
                else max(num_tokens - self.reach, 0)
            )
        if self.kind == "chunk":
            return num_tokens // self.size * self.size
        return num_tokens * 0

    def min_tokens_with(self, num_skipped: Tokens) -> Tokens:
        """The smallest number of tokens after which at least `num_skipped` leading tokens (1 or more) are attended to
        by no later token. Not for "full" groups."""
        if self.kind == "window":
            return num_skipped + self.reach
        return -(-num_skipped // self.size) * self.size

    def max_blocks(self, num_tokens: int, num_in_flight: int, block_size: int) -> int:
        """Maximum number of blocks that a request holds at a time while it computes its first `num_tokens` tokens, if
        it gives back blocks that no later token attends to. Steps in flight compute at most `num_in_flight` of its
        tokens."""
        whole = -(-num_tokens // block_size)
        if self.kind == "full":
            return whole
        if self.kind == "chunk":
            return min(whole, -(-(self.size + num_in_flight) // block_size) + (self.size % block_size > 0))
        return min(whole, -(-(self.reach + num_in_flight) // block_size) + 1)


FULL = KVGroup()


class AttendedBlocks:
    """For each group, the blocks of a sequence that the sequence's next token attends to.

    Args:
        block_size: number of tokens per block.
        max_blocks: number of blocks of the longest sequence.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int, max_blocks: int) -> None:
        num_tokens = np.arange(max_blocks + 2) * block_size
        self._first = np.stack([group.num_skipped(num_tokens) // block_size for group in groups])

    def first_blocks(self, num_blocks: int) -> npt.NDArray[np.int64]:
        """int64 [groups]: the first block that the token after `num_blocks` blocks attends to."""
        return self._first[:, num_blocks]

    def num_reusable(self, has_block: npt.NDArray[np.bool_], start: int = 0) -> int:
        """Maximum number of blocks from `start` on that a new request can reuse: after them, every group must have all
        blocks that the next token attends to.

        Args:
            has_block: [groups, blocks] whether each group has the block, from block `start` on. Of the blocks before
                `start`, the groups must have all that the token after them attends to.
        """
        count: int = has_block.shape[1]
        if np.count_nonzero(has_block) == has_block.size:
            return count
        newest_gap = np.maximum.accumulate(np.where(has_block, -1, np.arange(start, start + count)), axis=1)
        fits = np.flatnonzero((newest_gap < self._first[:, start + 1 : start + count + 1]).all(axis=0))
        return fits.item(-1) + 1 if len(fits) else 0


def describe_groups(groups: tuple[KVGroup, ...]) -> str:
    """The groups in words: "2 groups of full attention, 5 of a window of 1024"."""
    words = [f"{count} of {_describe_group(group)}" for group, count in Counter(groups or (FULL,)).items()]
    first, *others = words
    number, _, rest = first.partition(" ")
    return ", ".join([f"{number} group{'s' * (number != '1')} {rest}", *others])


def _describe_group(group: KVGroup) -> str:
    return "full attention" if group.is_full else f"a {group.kind} of {group.size}"


def layers_per_group(kinds: Sequence[tuple[int, int]], max_groups: int) -> int:
    """The number of layers per group that minimizes the KV of a request.

    The blocks of all groups are from one pool and have memory for the same number of layers. If the last group of a
    kind has fewer layers, the rest of its blocks is wasted. Large groups waste more memory. With small groups there are
    many of them, and each takes time in every step.

    Args:
        kinds: for each kind of layers that attend alike: (number of blocks that a request needs in one group of this
            kind, number of layers of this kind).
        max_groups: maximum number of groups; with more kinds than that, one group for each kind.
    """
    best, min_cost = 0, 0
    for size in range(max(layers for _, layers in kinds), 0, -1):  # of equal costs, the largest size
        counts = [-(-layers // size) for _, layers in kinds]
        cost = size * sum(count * blocks for count, (blocks, _) in zip(counts, kinds, strict=True))
        if sum(counts) <= max(max_groups, len(kinds)) and (not best or cost < min_cost):
            best, min_cost = size, cost
    return best
