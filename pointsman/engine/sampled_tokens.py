"""The tokens that the newest steps sampled, on the side that executes steps.

With several steps in flight a step is prepared before the one ahead of it has sampled its input. It names the place
where the token will be; steps execute in order, so that it is there when it is read.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]


class SampledTokens:
    """The last `num_steps` sampled tokens of each row of the scheduler.

    A row's place for a token depends on the token's position in its sequence. A row is reused only when every step that
    names it is over, and what a repeated step samples goes where it went before, so nothing here is ever stale: whoever
    reads a place has a step before its own that wrote it.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._tokens: Int64Array = np.zeros(0, dtype=np.int64)

    def places(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Where the tokens at these positions of the rows' sequences are kept; may be called at any time."""
        return rows * self._num_steps + positions % self._num_steps

    def put(self, places: Int64Array, token_ids: Int64Array) -> None:
        """What a step sampled."""
        most = int(places.max(initial=-1))
        if most >= len(self._tokens):
            grown = np.zeros(max(most + 1, 2 * len(self._tokens)), dtype=np.int64)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        self._tokens[places] = token_ids

    def get(self, places: Int64Array) -> Int64Array:
        """What steps before have put there."""
        return self._tokens[places]
