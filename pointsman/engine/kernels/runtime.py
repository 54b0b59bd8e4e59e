"""Compiles kernels and calls them on PyTorch's own threads, with raw pointers as arguments.

A kernel is a C function `void kernel(int64_t *arguments)`. The arguments are sizes and addresses in one NumPy array. So
a call takes two microseconds, and the same function can be the body of an OpenMP parallel region:

    GOMP_parallel(kernel, arguments, num_threads)

`#pragma omp parallel` compiles to this call. In the OpenMP library that PyTorch has loaded, the call runs a kernel on
PyTorch's threads. A thread pool of numba would compete with PyTorch's threads: they spin for a while after each
operation, which doubles all times on a machine with two cores.

The threads share the work by an atomic counter, `arguments[0]`: each thread takes the next item until all items are
taken. This balances rows of very different length with any number of threads.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, sigutils
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, overload

from pointsman.engine.arrays import Int64Array
from pointsman.engine.kernels.disk_cache import keep_on_disk, one_process
from pointsman.engine.machine import num_cores
from pointsman.engine.pulse import SECONDS_TO_COMPILE, beat
from pointsman.engine.threads import openmp_library

logger = logging.getLogger(__name__)


SIGNATURE = types.void(types.CPointer(types.int64))
FAST: set[str] = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags of the kernels. "nnan" is not among the flags, because a broken model produces NaNs."""
STORAGE = {torch.float32: np.float32, torch.bfloat16: np.uint16}
"""PyTorch's type of a tensor -> NumPy's type of its elements in a kernel; a bfloat16 is passed as its 16 bits."""


# ------------------------------------------------------------------------------------------- parts for kernels


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a pointer for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def next_item(typing_context: Any, counter: Any) -> Any:
    """Take the next work item of a kernel: return the counter's value, and increment the counter, in one atomic
    operation."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address into the second-level cache."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        place = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        read, locality, data = (ir.Constant(word, value) for value in (0, 2, 1))
        builder.call(function, [place, read, locality, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def bits_as_float(typing_context: Any, bits: Any) -> Any:
    """The float32 that has the 32 bits of an int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def float_as_bits(typing_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


def load(element: Any) -> Any:
    """Load an element of a tensor as float32, in a kernel; bfloat16 is converted."""
    raise NotImplementedError("for kernels only")


@overload(load, inline="always")
def _load(element):  # type: ignore[no-untyped-def]  # numba compares this signature with the lambdas'
    if element == types.uint16:
        return lambda element: bits_as_float(np.int32(element) << np.int32(16))
    return lambda element: element


def round_to(array: Any, value: Any) -> Any:
    """Convert a float32 to an element of `array`, in a kernel: the float32 itself, or the nearest bfloat16, ties to
    even."""
    raise NotImplementedError("for kernels only")


@overload(round_to, inline="always")
def _round_to(array, value):  # type: ignore[no-untyped-def]  # as for `_load`
    if array.dtype == types.uint16:
        return lambda array, value: nearest_bfloat16(value)
    return lambda array, value: value


@njit
def nearest_bfloat16(value: Any) -> Any:
    """The bits of the bfloat16 nearest to a float32."""
    bits = float_as_bits(value)
    rounded = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    return np.uint16(rounded if value == value else np.int32(0x7FC0))  # adding to a NaN's bits could make it a number


@njit(fastmath=FAST)
def exponential(x: Any) -> Any:
    """e**x for float32, within 2 units in the last place for x in [-87, 88]; x is clamped to that range.

    x = n ln 2 + r with |r| <= ln(2) / 2. The result is a polynomial in r (the coefficients of Cephes' expf) times 2**n,
    which sets the float's exponent bits. Unlike a C library call, this can be computed for sixteen numbers in one
    instruction.
    """
    clamped = min(max(x, np.float32(-87.0)), np.float32(88.0))
    clamped = clamped if x == x else x
    n = np.floor(clamped * np.float32(1.4426950408889634) + np.float32(0.5))
    r = (clamped - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = bits_as_float((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + np.float32(1.0)) * power


@njit(fastmath=FAST)
def hyperbolic_tangent(x: Any) -> Any:
    """tanh for float32: (e**2x - 1) / (e**2x + 1), or, near 0, where the subtraction loses precision, a power
    series."""
    square = x * x
    series = np.float32(21844.0 / 6081075.0) * square + np.float32(-1382.0 / 155925.0)
    series = series * square + np.float32(62.0 / 2835.0)
    series = series * square + np.float32(-17.0 / 315.0)
    series = series * square + np.float32(2.0 / 15.0)
    series = series * square + np.float32(-1.0 / 3.0)
    series = x + x * square * series
    bounded = min(max(x, np.float32(-15.0)), np.float32(15.0))
    bounded = bounded if x == x else x
    closed = np.float32(1.0) - np.float32(2.0) / (exponential(bounded + bounded) + np.float32(1.0))
    return series if square < np.float32(0.2) else closed


@njit(fastmath=True)
def largest(values: Any, count: int, start: Any) -> Any:
    """The largest of `start` and the first `count` values, compared sixteen at a time. NaNs may be ignored."""
    for i in range(count):
        start = max(start, values[i])
    return start


# --------------------------------------------------------------------------------------------------- calling them


def address_of(arguments: Int64Array) -> int:
    """The memory address of an array of arguments, in a third of the time of `arguments.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(arguments.data))


class Kernel:
    """A compiled kernel.

    Args:
        body: Python function of the kernel; its argument is a pointer to int64.
    """

    __slots__ = ("_call", "_compiled", "address", "name")

    def __init__(self, body: Callable[[Any], None]) -> None:
        beat(SECONDS_TO_COMPILE)
        self._compiled = _compile(body)
        beat()
        self.name = body.__name__
        self.address: int = self._compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, arguments: Int64Array, num_threads: int = 1) -> None:
        """Run the kernel on `num_threads` threads, this thread included. The interpreter's lock is released during the
        call."""
        arguments[0] = 0
        parallel = openmp_parallel()
        if num_threads > 1 and parallel is not None:
            parallel(self.address, address_of(arguments), num_threads, 0)
        else:
            self._call(address_of(arguments))

    def run_beside(self, meanwhile: Callable[[], None], arguments: Int64Array, num_threads: int) -> None:
        """Run the kernel on other threads while this thread calls `meanwhile` and then computes some of the remaining
        work items.

        The kernel runs on `num_threads` threads, this thread included, or on two if there is a second core. Without
        other threads, or a way to start them, `meanwhile` is not called. Exceptions of `meanwhile` are raised after the
        kernel has ended.
        """
        team, address = max(2, num_threads), address_of(arguments)
        begin_and_end = openmp_begin_and_end() if num_threads > 1 or num_cores() > 1 else None
        if begin_and_end is None:
            self(arguments, num_threads)
            return
        begin, end = begin_and_end
        kernel, call = self.address, self._call
        arguments[0] = 0
        # A begun region must end, also if a signal handler raises an exception between any two lines.
        try:
            begin(kernel, address, team)
            meanwhile()
        finally:
            try:
                call(address)
            finally:
                end()


def _compile(body: Callable[[Any], None]) -> Any:
    """Compile a kernel, or load its compiled code from disk."""
    function = CFunc(body, sigutils.normalize_signature(SIGNATURE), {}, {"error_model": "numpy", "fastmath": FAST})
    keep_on_disk(function, body)
    with one_process(function):
        function.compile()
    return function


@cache
def source_version() -> int:
    """A number that changes with the source of any kernel.

    Numba finds a compiled kernel on disk by the file of the kernel's body and the values in its closure. Kernels call
    functions of other files, so each kernel has this number in its closure.
    """
    digest = blake2b(digest_size=7)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little")


@cache
def openmp_begin_and_end() -> tuple[Callable[[int, int, int], None], Callable[[], None]] | None:
    """The two halves of `GOMP_parallel`: the first function starts the other threads, the second waits for them. This
    thread runs its part of the kernel between the two calls. None: PyTorch's OpenMP library lacks these functions."""
    library = openmp_library()
    begin, end = getattr(library, "GOMP_parallel_start", None), getattr(library, "GOMP_parallel_end", None)
    if begin is None or end is None:
        return None
    begin.argtypes, end.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint], []
    begin.restype = end.restype = None
    return begin, end


@cache
def openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library with which PyTorch computes; None: PyTorch uses no such library."""
    library = openmp_library()
    if library is None:
        logger.info("PyTorch's OpenMP library was not found; compiled kernels use one thread")
        return None
    function = library.GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
