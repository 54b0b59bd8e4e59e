"""Every attention backend, over a shuffled pool, equals attention that is computed row by row."""

from __future__ import annotations

import math
import resource

import numpy as np
import pytest
import torch

from pointsman.core import SchedulerConfig
from pointsman.engine.attention import torch_backend as torch_attention
from pointsman.engine.attention.numba_backend import NumbaAttention
from pointsman.engine.attention.paged import AttentionBackend, PagedBatch
from pointsman.engine.attention.torch_backend import TorchAttention, cut_pieces
from pointsman.engine.kv.layout import KVLayout, LayerShape
from pointsman.engine.kv.pool import KVPool, blocks_for, bytes_per_block, choose_num_blocks

BACKENDS = {"torch": TorchAttention, "numba": NumbaAttention}

MIXED = ([1, 1, 17, 1, 5, 1, 40, 3], [31, 0, 0, 200, 11, 64, 90, 15])  # tokens of this step, tokens before it
DECODES = ([1] * 24, [3, 500, 60, 61, 62, 63, 64, 65, 7, 120, 121, 5, 9, 33, 2, 1, 0, 250, 16, 15, 17, 31, 32, 48])


class Setting:
    """A pool whose free slots hold NaN, rows with known keys and values, and their queries."""

    def __init__(
        self,
        query_lens: list[int],
        computed: list[int],
        shape: LayerShape,
        block_size: int,
        backend: str = "torch",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backend: AttentionBackend = BACKENDS[backend]([shape])
        self.query_lens, self.computed = np.array(query_lens), np.array(computed)
        self.shape = shape
        rng = np.random.default_rng(5)
        self.block_size = block_size
        needs = self.ends()
        ids = rng.permutation(sum(needs) + 3)
        tables = np.full((len(needs), max(needs) + 2), 10**6)  # entries past a row's blocks must not be read
        for row, (end, need) in enumerate(zip(np.cumsum(needs), needs, strict=True)):
            tables[row, :need] = ids[end - need : end]
        self.pool = KVPool([shape], num_blocks=len(ids), block_size=block_size, dtype=dtype)
        self.pool.keys[0].fill_(math.nan)
        self.pool.values[0].fill_(math.nan)
        generator = torch.Generator().manual_seed(1)
        totals = (self.query_lens + self.computed).tolist()
        self.keys = [torch.randn(t, shape.num_kv_heads, shape.k_dim, generator=generator) for t in totals]
        self.values = [torch.randn(t, shape.num_kv_heads, shape.v_dim, generator=generator) for t in totals]
        self.query = torch.randn(sum(query_lens), shape.num_heads, shape.k_dim, generator=generator)
        self.tables = tables

    def write(self, first: np.ndarray, counts: np.ndarray) -> PagedBatch:
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], first[rows], self.tables[rows], self.block_size)
        self.write_batch(batch, first, counts)
        return batch

    def write_batch(self, batch: PagedBatch, first: np.ndarray, counts: np.ndarray) -> None:
        rows = np.nonzero(counts)[0]
        key = torch.cat([self.keys[r][first[r] : first[r] + counts[r]] for r in rows])
        value = torch.cat([self.values[r][first[r] : first[r] + counts[r]] for r in rows])
        self.backend.write(self.backend.plan(batch), key, value, self.pool.keys[0], self.pool.values[0])

    def ends(self) -> list[int]:
        """The number of blocks of each row."""
        return [blocks_for(total, self.block_size) for total in (self.query_lens + self.computed).tolist()]

    def run(self, **options: object) -> torch.Tensor:
        """Write the KV of earlier steps, then run this step."""
        self.write(np.zeros_like(self.computed), self.computed)
        batch = self.write(self.computed, self.query_lens)
        plan = self.backend.plan(batch)
        return self.backend.attend(plan, self.query, self.pool.keys[0], self.pool.values[0], **options)

    def expected(
        self, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """The outputs, computed position by position and head by head."""
        out = []
        group = self.shape.num_heads // self.shape.num_kv_heads
        for row, (count, before) in enumerate(zip(self.query_lens.tolist(), self.computed.tolist(), strict=True)):
            for position in range(before, before + count):
                first = 0 if window is None else max(0, position - window + 1)
                query = self.query[len(out)]
                heads = []
                for head in range(self.shape.num_heads):
                    scores = self.keys[row][first : position + 1, head // group] @ query[head] * scale
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = scores.exp()
                    total = weights.sum() + (sinks[head].exp() if sinks is not None else 0.0)
                    heads.append((weights / total) @ self.values[row][first : position + 1, head // group])
                out.append(torch.stack(heads))
        return torch.stack(out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (24, None, False), (1, None, False), (None, 2.0, False), (None, None, True), (24, 2.0, True)],
)
@pytest.mark.parametrize(
    "shape",
    [LayerShape(2, 8, 8, 6), LayerShape(3, 12, 7, 3), LayerShape(2, 12, 9, 4)],
    ids=["grouped", "unequal-dims", "pairs"],
)
def test_attention_backends_equal_a_computation_row_by_row(
    rows: tuple[list[int], list[int]],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    shape: LayerShape,
    backend: str,
) -> None:
    setting = Setting(*rows, shape, block_size=8, backend=backend)
    sinks = torch.linspace(-1, 2, shape.num_heads) if with_sinks else None
    got = setting.run(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    want = setting.expected(0.3, window, softcap, sinks)
    assert got.shape == (sum(rows[0]), shape.num_heads, shape.v_dim)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("window", [1, 8, 24, 37])
def test_kv_before_a_window_is_never_read(backend: str, rows: tuple[list[int], list[int]], window: int) -> None:
    """Table entries before a window may name blocks of other requests and layers: here a block of NaN."""
    setting = Setting(*rows, LayerShape(2, 8, 8, 6), block_size=8, backend=backend)
    setting.write(np.zeros_like(setting.computed), setting.computed)
    used = {block for row, end in enumerate(setting.ends()) for block in setting.tables[row, :end].tolist()}
    foreign = next(block for block in range(setting.pool.num_blocks) if block not in used)
    for row, computed in enumerate(setting.computed.tolist()):
        setting.tables[row, : max(0, computed - window + 1) // 8] = foreign
    batch = PagedBatch.build(setting.query_lens, setting.computed, setting.tables, 8)
    groups = batch.batches_of_groups(np.stack([np.full_like(setting.tables, foreign), setting.tables], axis=1))
    setting.write_batch(groups[1], setting.computed, setting.query_lens)
    plan = setting.backend.plan(groups[1])
    pool = setting.pool.keys[0], setting.pool.values[0]
    got = setting.backend.attend(plan, setting.query, *pool, scale=0.3, window=window, softcap=None, sinks=None)
    torch.testing.assert_close(got, setting.expected(0.3, window, None, None), rtol=1e-5, atol=2e-6)
    assert pool[0][foreign].isnan().all() and len(groups) == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4, 12, 32, 256])
@pytest.mark.parametrize("num_heads", [2, 5])
def test_outputs_do_not_depend_on_the_block_size(backend: str, block_size: int, num_heads: int) -> None:
    setting = Setting(*MIXED, LayerShape(1, 20, 20, num_heads), block_size=block_size, backend=backend)
    got = setting.run(scale=0.3, window=40, softcap=None, sinks=None)
    torch.testing.assert_close(got, setting.expected(0.3, 40, None, None), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_over_a_bfloat16_pool_has_only_rounding_errors(backend: str, dtype: torch.dtype) -> None:
    """With queries in either type, the error is at most that of rounding keys, values and outputs."""
    setting = Setting(*MIXED, LayerShape(2, 16, 16, 4), block_size=8, backend=backend, dtype=torch.bfloat16)
    setting.query = setting.query.to(dtype).float()
    for rows in (setting.keys, setting.values):
        rows[:] = [one.bfloat16().float() for one in rows]
    want = setting.expected(0.3, None, None, None)
    setting.query = setting.query.to(dtype)
    got = setting.run(scale=0.3, window=None, softcap=None, sinks=None)
    assert got.dtype == dtype
    exact = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.float(), want, **exact)


def test_outputs_do_not_depend_on_the_number_of_threads() -> None:
    """Outputs are equal to the bit on one thread and on several: one thread computes a tile, in a fixed order."""
    before = torch.get_num_threads()
    outputs = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            setting = Setting(*MIXED, LayerShape(2, 8, 8, 6), block_size=8, backend="numba")
            outputs.append(setting.run(scale=0.3, window=None, softcap=None, sinks=None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_nan_affects_no_other_row(backend: str) -> None:
    setting = Setting([1, 3, 1], [20, 0, 40], LayerShape(1, 8, 8, 2), block_size=8, backend=backend)
    setting.query[1] = math.nan
    got = setting.run(scale=0.3, window=None, softcap=None, sinks=None)
    assert got[1].isnan().all() and got[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_of_a_step_may_be_contiguous_by_head(backend: str) -> None:
    """In transformers' layout, in which the tokens of one head are contiguous."""
    setting = Setting(*MIXED, LayerShape(3, 8, 6, 6), block_size=8, backend=backend)
    want = setting.expected(0.3, None, None, None)
    for rows in (setting.keys, setting.values):
        rows[:] = [one.transpose(0, 1) for one in rows]
    pool = setting.pool.keys[0], setting.pool.values[0]

    def cut(parts: list[torch.Tensor], first: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        return torch.cat([parts[r][:, first[r] : first[r] + counts[r]] for r in np.nonzero(counts)[0]], dim=1)

    for first, counts in ((np.zeros_like(setting.computed), setting.computed), (setting.computed, setting.query_lens)):
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], first[rows], setting.tables[rows], setting.block_size)
        plan = setting.backend.plan(batch)
        key, value = (cut(parts, first, counts) for parts in (setting.keys, setting.values))
        setting.backend.write(plan, key.transpose(0, 1), value.transpose(0, 1), *pool)
    got = setting.backend.attend(plan, setting.query, *pool, scale=0.3, window=None, softcap=None, sinks=None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_numba_attention_skips_padding_rows_after_the_batch(rows: tuple[list[int], list[int]]) -> None:
    """Steps are padded to a round number of rows. The padding must not reach the pool."""
    setting = Setting(*rows, LayerShape(2, 8, 8, 6), block_size=8, backend="numba")
    want = setting.run(scale=0.3, window=None, softcap=None, sinks=None)
    pool = [tensor.clone() for tensor in (setting.pool.keys[0], setting.pool.values[0])]
    setting.query = torch.cat([setting.query, torch.full((5, *setting.query.shape[1:]), math.nan)])
    for one in (setting.keys, setting.values):
        one[-1] = torch.cat([one[-1], torch.full((5, *one[-1].shape[1:]), 7.0)])
    batch = PagedBatch.build(setting.query_lens, setting.computed, setting.tables, setting.block_size)
    key, value = (
        torch.cat(
            [part[c : c + n] for part, c, n in zip(parts, setting.computed, setting.query_lens, strict=True)]
            + [parts[-1][-5:]]
        )
        for parts in (setting.keys, setting.values)
    )
    plan = setting.backend.plan(batch)
    keys, values = setting.pool.keys[0], setting.pool.values[0]
    setting.backend.write(plan, key, value, keys, values)
    got = setting.backend.attend(plan, setting.query, keys, values, scale=0.3, window=None, softcap=None, sinks=None)
    assert torch.equal(got[:-5], want) and not got[-5:].any()
    assert all(
        torch.equal(was.nan_to_num(9.0), now.nan_to_num(9.0)) for was, now in zip(pool, (keys, values), strict=True)
    )


def test_numba_attention_refuses_a_gpu() -> None:
    with pytest.raises(ValueError, match="runs on a CPU, not on cuda"):
        NumbaAttention([LayerShape(1, 8, 8, 2)], "cuda")


@pytest.mark.parametrize("limits", [(0, 1, 1), (1 << 40, 1 << 40, 1 << 40), (3000, 4000, 300)])
@pytest.mark.parametrize("window", [None, 24])
def test_outputs_do_not_depend_on_how_rows_are_grouped(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], window: int | None
) -> None:
    """Every piece in its own group, all in one padded group, and groups of medium size."""
    for name, value in zip(("GROUP_COST", "GROUP_KV_ELEMENTS", "PIECE_SCORES"), limits, strict=True):
        monkeypatch.setattr(torch_attention, name, value)
    setting = Setting(*MIXED, LayerShape(2, 8, 8, 4), block_size=4)
    got = setting.run(scale=0.3, window=window, softcap=None, sinks=None)
    torch.testing.assert_close(got, setting.expected(0.3, window, None, None), rtol=1e-5, atol=2e-6)


def test_pieces_of_rows_contain_every_query_once() -> None:
    query_lens, computed = np.array([1, 1000, 7]), np.array([5, 3000, 0])
    tables = np.arange(3 * 600).reshape(3, 600)
    batch = PagedBatch.build(query_lens, computed, tables, 8)
    pieces = cut_pieces(batch, LayerShape(4, 64, 64, 32), None)
    assert len(pieces.rows) > 20
    covered = np.concatenate([np.arange(t, t + c) for t, c in zip(pieces.tokens, pieces.counts, strict=True)])
    assert covered.tolist() == list(range(1008))
    assert (pieces.counts * 4000 * 32 <= torch_attention.PIECE_SCORES)[pieces.rows == 1].all()


def test_slots_of_a_batch_are_computed_from_the_block_tables() -> None:
    batch = PagedBatch.build(np.array([3, 1]), np.array([6, 4]), np.array([[7, 5, 9], [2, 8, 0]]), 4)
    assert batch.positions.tolist() == [6, 7, 8, 4]
    assert batch.slot_blocks.tolist() == [5, 5, 9, 8]
    assert batch.slot_offsets.tolist() == [2, 3, 0, 0]
    assert batch.tails.tolist() == [0, 0, 3, 3]
    assert batch.kv_lens.tolist() == [9, 5]


# --------------------------------------------------------------------------------------------------- pool sizing

LAYERS = [LayerShape(2, 16, 8, 4)] * 3  # 3 * 2 * 24 elements a token


def choose(num_blocks: int | None = None, kv_cache_bytes: int | None = None) -> int:
    config = SchedulerConfig(num_blocks=1, max_model_len=100, max_num_seqs=4, block_size=16)
    return choose_num_blocks(
        KVLayout.without_groups(LAYERS),
        config,
        num_blocks=num_blocks,
        kv_cache_bytes=kv_cache_bytes,
        dtype=torch.float32,
    )


def test_kv_pool_size_is_set_in_bytes_or_blocks() -> None:
    block_bytes = 3 * 2 * 24 * 4 * 16
    assert bytes_per_block(LAYERS, 16, torch.float32) == block_bytes
    assert bytes_per_block(LAYERS, 16, torch.bfloat16) == block_bytes // 2
    assert choose(num_blocks=5) == 5
    assert choose(kv_cache_bytes=block_bytes * 7 + 1) == 7
    assert choose() == 4 * 7, "by default at most as many blocks as the sequences could use"
    pool = KVPool(LAYERS, num_blocks=7, block_size=16, dtype=torch.float32)
    assert pool.num_bytes == 7 * block_bytes == sum(t.numel() * 4 for t in pool.keys + pool.values)


def test_writes_after_map_memory_cause_no_page_faults() -> None:
    pool = KVPool(LAYERS, num_blocks=4000, block_size=16, dtype=torch.float32)
    page = resource.getpagesize()
    pool.map_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for tensor in pool.keys + pool.values:
        tensor.fill_(1.0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < pool.num_bytes // page // 20


def test_kv_pools_of_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="both given"):
        choose(num_blocks=5, kv_cache_bytes=10**9)
    with pytest.raises(ValueError, match=r"kv_cache_bytes is 100, less than one block of 9216 bytes"):
        choose(kv_cache_bytes=100)


def test_capacity_of_the_pool_is_logged_in_tokens_and_requests(caplog: pytest.LogCaptureFixture) -> None:
    pool = KVPool(LAYERS, num_blocks=7, block_size=16, dtype=torch.float32)
    config = SchedulerConfig(num_blocks=7, max_model_len=56, block_size=16)
    with caplog.at_level("INFO"):
        pool.log_capacity(config)
    assert "enough for 112 tokens, or 1.8 requests of the full length 56" in caplog.text
    pool.log_capacity(config.replace(max_model_len=113))
    assert "less than one request of the full length 113" in caplog.text
