"""In which layout does a model keep its KV? Groups of layers, each with a block table of its own.

The layers of a group attend to the same positions before a token: to all of them, to a window, or to a chunk.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal["full", "window", "chunk"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])


class KVGroup(NamedTuple):
    """Layers whose KV is in the same blocks."""

    kind: Kind = "full"
    """"full": a token attends to all tokens before it. "window": to the newest `size`, its own included. "chunk": to
    those since the last multiple of `size`."""
    size: int = 0
    """In tokens; 0 for "full"."""

    @property
    def is_full(self) -> bool:
        return self.kind == "full"

    @property
    def reach(self) -> int:
        """The most tokens before one that it attends to; 0 for "full", where there is no limit."""
        return self.size - 1 if self.kind != "full" else 0

    def num_skipped(self, num_tokens: Tokens) -> Tokens:
        """Of the first `num_tokens`, those to which no token after them attends. Never less for more tokens."""
        if self.kind == "window":
            return (
                np.maximum(num_tokens - self.reach, 0)
                if isinstance(num_tokens, np.ndarray)
                else max(num_tokens - self.reach, 0)
            )
        if self.kind == "chunk":
            return num_tokens // self.size * self.size
        return num_tokens * 0

    def least_with(self, num_skipped: Tokens) -> Tokens:
        """The least number of tokens of which so many are skipped, at least 1 of them; not for "full"."""
        if self.kind == "window":
            return num_skipped + self.reach
        return -(-num_skipped // self.size) * self.size

    def most_blocks(self, num_tokens: int, num_in_flight: int, block_size: int) -> int:
        """The most blocks that a request holds at a time while it computes its first `num_tokens`, of which steps in
        flight compute at most so many. What no later token attends to is given back whenever it gets a block."""
        whole = -(-num_tokens // block_size)
        if self.kind == "full":
            return whole
        return min(whole, -(-self.reach // block_size) + -(-(num_in_flight + block_size - 1) // block_size))


FULL = KVGroup()
