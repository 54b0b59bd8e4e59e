"""The Triton kernels, interpreted on the CPU, equal plain PyTorch over pools whose other slots are NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.engine.attention.fused import HeadNorms, Heads
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.attention.triton_backend import MAX_PARTS, TritonAttention, choose_num_parts
from pointsman.engine.kernels.triton_layers import TritonLayers
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool, blocks_for
from tests.triton_interpreter import quick_calls


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with quick_calls():
        yield


TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of an output that is a mean of normal numbers, computed in float32 and rounded to the type."""


@dataclass
class Step:
    """A step over a pool with shuffled blocks, in which slots that must not be read are NaN."""

    batch: PagedBatch
    pool: KVPool
    query: Tensor
    key: Tensor
    value: Tensor
    shape: LayerShape

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        computed: list[int],
        shape: LayerShape,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> Step:
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        counts, before = np.array(query_lens), np.array(computed)
        needs = [blocks_for(total, block_size) for total in (counts + before).tolist()]
        ids = rng.permutation(sum(needs) + 3)
        tables = np.full((len(needs), max(needs) + 1), 10**6)  # entries past a row's blocks must not be read
        for row, (end, need) in enumerate(zip(np.cumsum(needs), needs, strict=True)):
            tables[row, :need] = ids[end - need : end]
        pool = KVPool([shape], num_blocks=len(ids), block_size=block_size, dtype=kv_dtype or dtype)
        pool.keys[0].fill_(math.nan)
        pool.values[0].fill_(math.nan)

        def random(tokens: int, heads: int, dim: int) -> Tensor:
            return torch.randn(tokens, heads, dim, generator=generator).to(dtype)

        if before.any():
            rows = np.nonzero(before)[0]
            past = PagedBatch.build(before[rows], np.zeros_like(before[rows]), tables[rows], block_size)
            plain = TorchAttention([shape])
            keys = random(past.num_tokens, shape.num_kv_heads, shape.k_dim)
            values = random(past.num_tokens, shape.num_kv_heads, shape.v_dim)
            plain.write(plain.plan(past), keys, values, pool.keys[0], pool.values[0])
        total = sum(query_lens)
        return cls(
            PagedBatch.build(counts, before, tables, block_size),
            pool,
            random(total, shape.num_heads, shape.k_dim),
            random(total, shape.num_kv_heads, shape.k_dim),
            random(total, shape.num_kv_heads, shape.v_dim),
            shape,
        )

    def write(self, backend: TorchAttention | TritonAttention) -> None:
        backend.write(backend.plan(self.batch), self.key, self.value, self.pool.keys[0], self.pool.values[0])

    def attend(self, backend: TorchAttention | TritonAttention, **options: object) -> Tensor:
        query = self.query if isinstance(backend, TritonAttention) else self.query.float()
        given = {"scale": 0.3, "window": None, "softcap": None, "sinks": None, **options}
        return backend.attend(backend.plan(self.batch), query, self.pool.keys[0], self.pool.values[0], **given)

    def triton(self) -> TritonAttention:
        return TritonAttention([self.shape], "cpu", self.query.dtype)

    def torch(self) -> TorchAttention:
        return TorchAttention([self.shape])


MIXED = [1, 9, 1, 40, 1], [70, 0, 3, 37, 0]
DECODES = [1, 1, 1, 1], [0, 130, 15, 64]
OPTIONS = {
    "plain": {},
    "window": {"window": 24},
    "window of one": {"window": 1},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 24, "softcap": 2.0, "sinks": True},
}


def check(step: Step, dtype: torch.dtype, options: dict[str, object]) -> None:
    sinks = torch.linspace(-1, 2, step.shape.num_heads) if options.get("sinks") else None
    options = {**options, "sinks": sinks}
    step.write(step.triton())
    got, want = step.attend(step.triton(), **options), step.attend(step.torch(), **options)
    assert got.shape == want.shape and got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_triton_attention_equals_plain_pytorch(rows: tuple[list[int], list[int]], options: dict[str, object]) -> None:
    check(Step.make(*rows, LayerShape(2, 24, 16, 6)), torch.float32, options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("k_dim", "v_dim", "num_heads"), [(32, 32, 1), (80, 80, 4), (96, 64, 7), (256, 256, 2)])
def test_triton_attention_supports_any_head_size_and_type(
    dtype: torch.dtype, k_dim: int, v_dim: int, num_heads: int
) -> None:
    step = Step.make([1, 20, 1], [60, 4, 5], LayerShape(1, k_dim, v_dim, num_heads), dtype=dtype)
    check(step, dtype, {"scale": k_dim**-0.5})


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_attention_supports_a_pool_of_another_type(kv_dtype: torch.dtype) -> None:
    dtype = torch.bfloat16 if kv_dtype == torch.float32 else torch.float32
    step = Step.make([1, 6], [30, 0], LayerShape(2, 16, 16, 4), dtype=dtype, kv_dtype=kv_dtype)
    check(step, dtype, {})


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_triton_attention_supports_any_block_size(block_size: int) -> None:
    check(Step.make([1, 30, 1], [70, 3, 0], LayerShape(2, 16, 16, 4), block_size=block_size), torch.float32, {})


@pytest.mark.parametrize("seed", range(6))
def test_triton_attention_of_random_steps_equals_plain_pytorch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 6))
    query_lens = np.where(rng.random(num_rows) < 0.5, 1, rng.integers(1, 50, num_rows)).tolist()
    computed = np.where(rng.random(num_rows) < 0.3, 0, rng.integers(0, 150, num_rows)).tolist()
    num_kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 9))
    shape = LayerShape(num_kv_heads, int(rng.integers(4, 65)), int(rng.integers(4, 65)), num_kv_heads * group)
    step = Step.make(query_lens, computed, shape, block_size=int(rng.integers(1, 40)), seed=seed)
    options: dict[str, object] = {"sinks": bool(rng.integers(2))}
    if rng.random() < 0.5:
        options["window"] = int(rng.integers(1, 80))
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    check(step, torch.float32, options)


def test_kv_before_a_window_is_never_read() -> None:
    """Table entries before a window may name blocks of other requests and layers: here a block of NaN."""
    step = Step.make([1, 20], [90, 70], LayerShape(1, 16, 16, 2))
    step.write(step.triton())
    want = step.attend(step.torch(), window=20)
    tables = step.batch.block_tables
    foreign = next(block for block in range(step.pool.num_blocks) if block not in tables)
    for row, before in enumerate([90, 70]):
        tables[row, : (before - 20 + 1) // 16] = foreign
    assert step.pool.keys[0][foreign].isnan().all()
    torch.testing.assert_close(step.attend(step.triton(), window=20), want, rtol=3e-6, atol=3e-6)


def test_writing_kv_zeroes_only_the_rest_of_a_begun_block() -> None:
    ours, theirs = (Step.make([1, 20, 1, 1], [16, 5, 3, 15], LayerShape(2, 8, 12, 2)) for _ in range(2))
    ours.write(ours.triton())
    theirs.write(theirs.torch())
    for got, want in ((ours.pool.keys[0], theirs.pool.keys[0]), (ours.pool.values[0], theirs.pool.values[0])):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 12])
def test_heads_are_normed_rotated_and_written(dtype: torch.dtype, with_norms: bool, rotary_dim: int) -> None:
    shape = LayerShape(2, 12, 8, 6)
    step = Step.make([1, 5], [3, 0], shape, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(6, 6 * 12 + 2 * 12 + 2 * 8, generator=generator).to(dtype)
    weights = [torch.rand(12, generator=generator).to(dtype) for _ in range(2)]
    norms = HeadNorms(*weights, 1e-5, 1.0) if with_norms else None
    angles = torch.rand(6, rotary_dim // 2, generator=generator).repeat(1, 2) * 3
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary_dim else None

    backend = step.triton()
    keys, values = step.pool.keys[0], step.pool.values[0]
    got = backend.write_heads(backend.plan(step.batch), Heads(shape, norms, 72, 96), qkv, rotary, keys, values)

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        x = x.double()
        if with_norms:
            x = F.rms_norm(x, (12,), weight.double() + 1.0, 1e-5)
        if rotary is not None:
            cos, sin = (one.double()[:, None] for one in rotary)
            low, high = x[..., :rotary_dim].chunk(2, dim=-1)
            turned = x[..., :rotary_dim] * cos + torch.cat([-high, low], dim=-1) * sin
            x = torch.cat([turned, x[..., rotary_dim:]], dim=-1)
        return x.to(dtype)

    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got, expected(qkv[:, :72].view(6, 6, 12), weights[0]), **close)
    blocks, places = torch.from_numpy(step.batch.slot_blocks), torch.from_numpy(step.batch.slot_offsets)
    torch.testing.assert_close(keys[blocks, :, places], expected(qkv[:, 72:96].view(6, 2, 12), weights[1]), **close)
    torch.testing.assert_close(values[blocks, :, places], qkv[:, 96:].view(6, 2, 8), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm_and_gate_kernels_equal_pytorch(dtype: torch.dtype) -> None:
    kernels, generator = TritonLayers(), torch.Generator().manual_seed(3)
    x, addend = (torch.randn(5, 50, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(50, generator=generator).to(dtype)
    out, total = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    kernels.norm(1e-5, 1.0)(x, weight, out, None, None)
    torch.testing.assert_close(out, F.rms_norm(x.double(), (50,), weight.double() + 1, 1e-5).to(dtype), **close)
    kernels.norm(1e-5, 0.0)(x, weight, out, addend, total)
    torch.testing.assert_close(total, (x.double() + addend.double()).to(dtype), **close)
    torch.testing.assert_close(out, F.rms_norm(total.double(), (50,), weight.double(), 1e-5).to(dtype), **close)
    both = torch.randn(3, 2 * 1100, generator=generator).to(dtype)
    for activation, bend in (("silu", F.silu), ("gelu_tanh", lambda one: F.gelu(one, approximate="tanh"))):
        gated = torch.full((3, 1100), math.nan, dtype=dtype)
        kernels.gate(1100, activation)(both, gated)
        gate, up = both.double().chunk(2, dim=-1)
        torch.testing.assert_close(gated, (bend(gate) * up).to(dtype), **close)


def test_the_kv_of_more_rows_is_cut_into_fewer_parts() -> None:
    parts = [choose_num_parts(rows * 8, 132) for rows in (1, 8, 32, 64, 128, 512)]
    assert parts == sorted(parts, reverse=True) and parts[0] == MAX_PARTS and parts[-1] == 1


def test_triton_attention_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a head has 320 elements; Triton attention supports at most 256; use torch"):
        TritonAttention([LayerShape(1, 320, 32, 1)], "cpu")
    monkeypatch.setattr("pointsman.engine.attention.triton_backend.is_interpreted", lambda: False)
    with pytest.raises(ValueError, match="runs on a GPU, not on cpu; use numba or torch"):
        TritonAttention([LayerShape(1, 32, 32, 1)], "cpu")
