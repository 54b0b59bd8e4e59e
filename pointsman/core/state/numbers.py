"""NumPy constants and helpers that save time in every step, and checks of the integers that callers pass.

A step consists of NumPy calls whose time is mostly overhead. With these constants and helpers a call takes at most half
the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

MAX_INT = 2**31 - 1
"""Maximum of token ids and of numbers of blocks, which are passed as int32."""

INT32, INT64, BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
UINT32, UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)
ONE: Int64Array = np.array(1)
"""The number 1 as an array without dimensions, like the next constants: NumPy converts a Python number at every use."""
TWO: Int64Array = np.array(2)
ZERO: Int64Array = np.array(0)
TRUE: npt.NDArray[np.bool_] = np.array(True)
FALSE: npt.NDArray[np.bool_] = np.array(False)
for _constant in (ONE, TWO, ZERO, TRUE, FALSE):
    _constant.flags.writeable = False

set_writeable: Callable[[npt.NDArray[Any], bool], None] = cast(Any, np.ndarray.setflags)
"""`set_writeable(array, False)` makes an array read-only: with the flag as a positional argument, in less than half the
time of the keyword."""


def largest_unsigned(values: Int64Array) -> int:
    """The largest of one or more values, or a number above every int64 if a value is negative. So one comparison finds
    any value that is out of range.

    `argmax` takes a quarter of the time of a reduction.
    """
    unsigned = values.view(UINT64)
    return unsigned.item(unsigned.argmax())


def checked_integer(name: str, value: object, minimum: int, maximum: int = MAX_INT) -> int:
    """The value as a Python int, if it is an integer in range.

    Raises:
        ValueError: the value is no integer, or not between `minimum` and `maximum`.
    """
    if type(value) is int and minimum <= value <= maximum:  # the usual case
        return value
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value}; it must be between {minimum} and {maximum}")
    return int(value)


def checked_priority(value: object) -> int:
    """The value as a Python int, if it is an integer of 64 bits, positive or negative: a priority may be a time in
    nanoseconds, or a remaining time.

    Raises:
        ValueError: the value is no integer of 64 bits.
    """
    return checked_integer("priority", value, -(2**63), 2**63 - 1)


def flat_integers(
    name: str, values: npt.NDArray[np.integer] | Sequence[int], error: type[Exception]
) -> npt.NDArray[np.int64]:
    """The values as an array of int64, without a copy if they are int64 already.

    Raises:
        error: the values are no flat sequence of integers.
    """
    try:
        array = np.asarray(values)
    except ValueError as reason:
        raise error(f"{name} must be a flat sequence of integers, but NumPy reports: {reason}") from None
    if array.dtype is INT64 or array.dtype == INT64:
        return array
    if array.dtype.kind not in "iu" and array.size:
        raise error(f"{name} must be a flat sequence of integers, but its elements are of type {array.dtype}")
    return array.astype(INT64)


def flat_tokens(
    values: npt.NDArray[np.integer] | Sequence[int], count: int, count_reason: str, origin: str, error: type[Exception]
) -> npt.NDArray[np.int32]:
    """`count` token ids as a new int32 array; error messages contain the reason for the count (`count_reason`) and the
    `origin` of the tokens.

    Raises:
        error: the values are no flat sequence of `count` integers from 0 to MAX_INT.
    """
    if (
        isinstance(values, np.ndarray)
        and values.dtype is INT32
        and values.shape == (count,)
        and (not count or values.item(values.argmin()) >= 0)
    ):  # the usual case
        return values.copy()  # type: ignore[return-value]
    # int32 or uint32. `in` and `is` compare identities first: that takes a fifth of the time of comparing types.
    if isinstance(values, np.ndarray) and (kind := values.dtype) in (INT32, UINT32):
        given: npt.NDArray[np.integer] = values if kind is INT32 else values.view(INT32)
        fits = not given.size or given.item(given.argmin()) >= 0  # ids too large for int32 are negative in `given`
    else:
        wide = flat_integers("token_ids", values, error)
        given, fits = wide, not wide.size or largest_unsigned(wide) <= MAX_INT
    if given.shape != (count,):
        raise error(f"token_ids has shape {given.shape} and {count_reason.format(count)}")
    if not fits:
        named = np.asarray(values)
        bad = named[(named < 0) | (named > MAX_INT)][0]
        raise error(f"token id {bad} {origin}; ids must be between 0 and {MAX_INT}")
    return given.astype(INT32)
