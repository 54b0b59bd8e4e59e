"""What NumPy calculates in half the time or less if it is asked in another way; a step is made of such calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
UINT32, UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)
ONE: Int64Array = np.array(1)
"""An array without dimensions, as the next ones: a number of Python's is converted anew each time."""
ZERO: Int64Array = np.array(0)
TRUE: npt.NDArray[np.bool_] = np.array(True)
FALSE: npt.NDArray[np.bool_] = np.array(False)
for _constant in (ONE, ZERO, TRUE, FALSE):
    _constant.flags.writeable = False


def largest(values: Int64Array) -> int:
    """The largest of some values, at least one; if one of them is negative, more than any int64: one comparison finds
    all that are out of range.

    Where it stands takes a quarter of the time of a reduction.
    """
    unsigned = values.view(UINT64)
    return unsigned.item(unsigned.argmax())
