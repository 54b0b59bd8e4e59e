"""The compiled kernels equal PyTorch's own operations, and their arithmetic is compared with double precision."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import carray, njit
from numba.core import caching
from torch import Tensor

from pointsman.engine import machine
from pointsman.engine.kernels import layers, runtime
from pointsman.engine.kernels.runtime import Kernel, exponential, hyperbolic_tangent, nearest_bfloat16, next_item
from pointsman.engine.model.fused_layers import FusedNorm

DTYPES = [torch.float32, torch.bfloat16]


@njit
def each_exponential(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = exponential(values[i])


@njit
def each_tangent(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = hyperbolic_tangent(values[i])


@njit
def each_bfloat16(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = nearest_bfloat16(values[i])


def values_between(low: float, high: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate([rng.uniform(low, high, 20_000), rng.uniform(-1, 1, 20_000) * 1e-3]).astype(np.float32)


def test_exponential_kernel_differs_from_numpy_only_by_rounding() -> None:
    values = values_between(-87, 88)
    got = np.empty_like(values)
    each_exponential(values, got)
    np.testing.assert_allclose(got, np.exp(values.astype(np.float64)), rtol=2.5e-7)


def test_hyperbolic_tangent_kernel_differs_from_numpy_only_by_rounding() -> None:
    values = np.concatenate([values_between(-12, 12), values_between(-0.4, 0.4), np.float32([-1e30, 0, 1e30])])
    got = np.empty_like(values)
    each_tangent(values, got)
    np.testing.assert_allclose(got, np.tanh(values.astype(np.float64)), rtol=4e-7, atol=1e-37)


def test_exponential_and_tangent_of_nan_are_nan() -> None:
    values = np.full(40, np.nan, dtype=np.float32)
    got = np.zeros((3, 40), dtype=np.float32)
    each_exponential(values, got[0])
    each_tangent(values, got[1])
    assert np.isnan(got[:2]).all()


def test_rounding_to_bfloat16_equals_rounding_by_pytorch() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 50_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF])
    values = np.concatenate([bits, special.astype(np.uint32)]).view(np.float32)
    got = np.empty(len(values), dtype=np.uint16)
    each_bfloat16(values, got)
    ours, theirs = torch.from_numpy(got.view(np.int16)).view(torch.bfloat16), torch.from_numpy(values).bfloat16()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def counting() -> Kernel:
    def count_items(arguments: Any) -> None:
        a = carray(arguments, (1002,), np.int64)
        while True:
            item = next_item(arguments)
            if item >= 1000:
                break
            a[2 + item] += 1

    return Kernel(count_items)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_kernel_threads_compute_every_work_item_once(counting: Kernel, num_threads: int) -> None:
    arguments = np.zeros(1002, dtype=np.int64)
    counting(arguments, num_threads)
    assert (arguments[2:] == 1).all()


def wait_until_taken(arguments: np.ndarray) -> None:
    """Wait until other threads have taken every item."""
    deadline = time.monotonic() + 10
    while arguments[0] < 1000 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert arguments[0] >= 1000


needs_two_cores = pytest.mark.skipif(
    machine.num_cores() < 2 or runtime.openmp_begin_and_end() is None, reason="needs two cores and GNU's OpenMP"
)


@needs_two_cores
@pytest.mark.parametrize("num_threads", [1, 2])
def test_other_threads_run_the_kernel_during_the_call_of_meanwhile(counting: Kernel, num_threads: int) -> None:
    for _ in range(20):
        arguments = np.zeros(1002, dtype=np.int64)
        counting.run_beside(lambda: wait_until_taken(arguments), arguments, num_threads)  # noqa: B023
        assert (arguments[2:] == 1).all()


@needs_two_cores
def test_meanwhile_may_run_pytorch_and_kernels_and_may_raise(counting: Kernel) -> None:
    """It runs PyTorch's operators and kernels, on one thread. Its exception is raised after the kernel ends."""
    a = torch.randn(300, 300)

    def meanwhile() -> None:
        inner = np.zeros(1002, dtype=np.int64)
        counting(inner, 2)
        assert (inner[2:] == 1).all()
        torch.testing.assert_close((a @ a).sum(), (a.double() @ a.double()).sum().float(), rtol=1e-3, atol=1e-1)
        raise KeyboardInterrupt

    for _ in range(3):
        arguments = np.zeros(1002, dtype=np.int64)
        with pytest.raises(KeyboardInterrupt):
            counting.run_beside(meanwhile, arguments, 2)
        assert (arguments[2:] == 1).all()
    arguments = np.zeros(1002, dtype=np.int64)
    counting(arguments, 2)
    assert (arguments[2:] == 1).all(), "the threads work as before"


@pytest.mark.parametrize("missing", ["core", "library"])
def test_meanwhile_is_not_called_without_another_thread(
    counting: Kernel, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "core":
        monkeypatch.setattr(runtime, "num_cores", lambda: 1)
    else:
        monkeypatch.setattr(runtime, "openmp_begin_and_end", lambda: None)
    arguments = np.zeros(1002, dtype=np.int64)
    counting.run_beside(lambda: pytest.fail("called"), arguments, 1)
    assert (arguments[2:] == 1).all()


def test_kernels_run_on_the_threads_of_pytorch() -> None:
    """If PyTorch computes with GNU's OpenMP, the kernels use the same loaded library."""
    memory = Path("/proc/self/maps")
    if not memory.exists() or "libgomp" not in memory.read_text():
        pytest.skip("PyTorch computes with another OpenMP library here")
    assert runtime.openmp_parallel() is not None
    libraries = {line.split()[-1] for line in memory.read_text().splitlines() if "libgomp" in line}
    assert len(libraries) == 1, f"a second OpenMP library was loaded: {sorted(libraries)}"


def test_without_openmp_one_thread_computes_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "openmp_parallel", lambda: None)
    norm = FusedNorm(torch.ones(16), 1e-6, 0.0, layers.CompiledLayers())
    x = torch.randn(100, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), torch.ones(16), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 33, 64), (1, 5, 3, 24)])
def test_norm_kernel_equals_pytorch(dtype: torch.dtype, offset: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    got = FusedNorm(weight, 1e-5, offset, layers.CompiledLayers())(x)
    want = F.rms_norm(x.double(), shape[-1:], weight.double() + offset, 1e-5).to(dtype)
    assert_rounded(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_gate_kernel_equals_pytorch(dtype: torch.dtype, activation: str, num_rows: int) -> None:
    x = (torch.randn(num_rows, 2 * 50, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    out = torch.empty(num_rows, 50, dtype=dtype)
    arguments = np.array([0, x.data_ptr(), out.data_ptr(), num_rows, 50, layers.ACTIVATIONS.index(activation)])
    layers.gate_kernel(dtype)(arguments, 2)
    gate, up = x.double().chunk(2, dim=-1)
    opened = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_rounded(out, (opened * up).to(dtype))


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """Check that they are equal up to a rounding to the type."""
    assert got.dtype == want.dtype
    tolerance = {"rtol": 2e-6, "atol": 8e-6} if got.dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}
    torch.testing.assert_close(got, want, **tolerance)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, dim] with the first cos.shape[-1] elements of each head rotated, as transformers defines it."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    return torch.cat([turned, rest], dim=-1)


@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_heads_are_normed_rotated_and_written_to_the_pool(
    rotary_dim: int, with_norms: bool, cache_dtype: torch.dtype
) -> None:
    num_tokens, heads, kv_heads, k_dim, v_dim, size, num_blocks = 11, 6, 2, 16, 12, 4, 9
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = heads * k_dim + kv_heads * (k_dim + v_dim)
    projected = random(num_tokens, width)
    query, key, value = projected.split([heads * k_dim, kv_heads * k_dim, kv_heads * v_dim], dim=-1)
    cos, sin = random(num_tokens, rotary_dim), random(num_tokens, rotary_dim)
    norms = [random(k_dim), random(k_dim)]
    keys = torch.full((num_blocks, kv_heads, size, k_dim), torch.nan, dtype=cache_dtype)
    values = torch.full((num_blocks, kv_heads, size, v_dim), torch.nan, dtype=cache_dtype)
    query_out = torch.empty(num_tokens, heads, k_dim)
    slots = np.random.default_rng(0).permutation((num_blocks - 1) * size)[:num_tokens]
    slots[-1] = (num_blocks - 1) * size + 1  # a block of its own, with a tail to zero
    blocks, offsets = slots // size, slots % size
    tails = np.zeros(num_tokens, dtype=np.int64)
    tails[-1] = size - 1 - offsets[-1]
    scalars = np.array([1e-6, 1.0], dtype=np.float32)

    arguments = np.zeros(layers.HEADS_ARGUMENTS, dtype=np.int64)
    for place, tensor in (
        (layers.QUERY, query), (layers.KEY, key), (layers.VALUE, value), (layers.QUERY_OUT, query_out),
        (layers.KEYS, keys), (layers.VALUES, values), (layers.COS, cos), (layers.SIN, sin),
    ):  # fmt: skip
        arguments[place] = tensor.data_ptr()
    if with_norms:
        arguments[layers.QUERY_NORM], arguments[layers.KEY_NORM] = (one.data_ptr() for one in norms)
    for place, array in (
        (layers.SCALARS, scalars), (layers.SLOT_BLOCKS, blocks), (layers.SLOT_OFFSETS, offsets), (layers.TAILS, tails),
    ):  # fmt: skip
        arguments[place] = array.ctypes.data
    for place, number in (
        (layers.NUM_TOKENS, num_tokens), (layers.NUM_HEADS, heads), (layers.NUM_KV_HEADS, kv_heads),
        (layers.K_DIM, k_dim), (layers.V_DIM, v_dim), (layers.NUM_BLOCKS, num_blocks), (layers.BLOCK_SIZE, size),
        (layers.ROTARY_DIM, rotary_dim), (layers.QUERY_STRIDE, width), (layers.KEY_STRIDE, width),
        (layers.VALUE_STRIDE, width), (layers.QUERY_HEAD_STRIDE, k_dim), (layers.KEY_HEAD_STRIDE, k_dim),
        (layers.VALUE_HEAD_STRIDE, v_dim),
    ):  # fmt: skip
        arguments[place] = number
    layers.heads_kernel(torch.float32, cache_dtype)(arguments, 2)

    query, key = query.view(num_tokens, heads, k_dim), key.view(num_tokens, kv_heads, k_dim)
    if with_norms:
        query, key = (F.rms_norm(x, (k_dim,), w + 1, 1e-6) for x, w in zip((query, key), norms, strict=True))
    torch.testing.assert_close(query_out, rotated(query, cos, sin), rtol=1e-5, atol=1e-5)
    rounding = 1e-5 if cache_dtype == torch.float32 else 1e-2
    index = torch.from_numpy(blocks), slice(None), torch.from_numpy(offsets)
    torch.testing.assert_close(keys[index].float(), rotated(key, cos, sin), rtol=rounding, atol=rounding)
    torch.testing.assert_close(
        values[index].float(), value.reshape(num_tokens, kv_heads, v_dim), rtol=rounding, atol=1e-6
    )
    assert (keys[blocks[-1], :, offsets[-1] + 1 :] == 0).all() and (values[blocks[-1], :, offsets[-1] + 1 :] == 0).all()
    untouched = num_blocks * size - num_tokens - tails[-1]
    assert keys[:, 0, :, 0].isnan().sum() == untouched, "no other slot was written"


def test_kernels_are_plain_c_functions() -> None:
    """A kernel is an address that any language can call."""
    kernel = layers.norm_kernel(torch.float32)
    x, weight, out = torch.randn(2, 8), torch.randn(8), torch.empty(2, 8)
    scalars = np.array([1e-6, 0.0], dtype=np.float32)
    arguments = np.array([0, x.data_ptr(), weight.data_ptr(), out.data_ptr(), scalars.ctypes.data, 2, 8, 0, 0])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)(arguments.ctypes.data)
    torch.testing.assert_close(out, F.rms_norm(x, (8,), weight, 1e-6))


def test_kernels_are_compiled_without_a_cache_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (caching.CacheImpl, caching.CompileResultCacheImpl):
        monkeypatch.setattr(kind, "_locator_classes", [])
    called = np.zeros(1, dtype=np.int64)

    def nothing(arguments: Any) -> None:
        arguments[0] = 5

    Kernel(nothing)(called)
    assert called[0] == 5 and "NUMBA_CACHE_DIR" in caplog.text


SILU_OF_ONE = """
import numpy as np, torch
from pointsman.engine.kernels import layers
x, out = torch.ones(1, 2), torch.empty(1, 1)
layers.gate_kernel(torch.float32)(np.array([0, x.data_ptr(), out.data_ptr(), 1, 1, 0]))
print(round(out.item(), 4))
"""


@pytest.mark.long
@pytest.mark.e2e
def test_a_changed_kernel_is_compiled_again(tmp_path: Path) -> None:
    """Also if only a function in another file changed that kernels call."""
    package = Path(runtime.__file__).parents[2]
    shutil.copytree(package, tmp_path / "pointsman", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    changed = tmp_path / "pointsman" / "engine" / "kernels" / "runtime.py"

    def silu_of_one() -> float:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", SILU_OF_ONE]
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return float(run.stdout)

    assert silu_of_one() == silu_of_one() == 0.7311
    source = changed.read_text()
    changed.write_text(source.replace("return (p * r * r + r + np.float32(1.0)) * power", "return np.float32(3.0)"))
    assert changed.read_text() != source and silu_of_one() == 0.25
