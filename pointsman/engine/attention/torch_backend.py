"""Computes paged attention in plain PyTorch: the reference for other backends, and the fallback on any device.

A step mixes rows of very different shapes: decodes (one query, long or short context) and prompt chunks. Padding all
rows to the longest would multiply the work. One kernel call per row would make a small model wait for Python. So rows
of similar shape form a group, each group is padded to its largest row, and a new group starts

- when padding would cost more than starting another group (`GROUP_COST`), and
- when the gathered keys would leave the processor's caches (`GROUP_KV_ELEMENTS`).

A long chunk is first cut into pieces of queries, so that the scores of a piece are bounded (`PIECE_SCORES`) for any
context. With a sliding window only the blocks that the window can reach are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.engine.arrays import Int64Array
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.kv.layout import LayerShape

GROUP_COST = 1 << 17
"""Cost of starting a group, in multiply-adds: about 50 us of PyTorch calls on a CPU."""
GROUP_KV_ELEMENTS = 1 << 20
"""Maximum number of key elements that one group gathers: 4 MiB in float32."""
PIECE_SCORES = 1 << 22
"""Maximum number of scores (heads x queries x keys) of one piece: 16 MiB in float32."""


@dataclass(slots=True)
class Group:
    """Rows, or pieces of rows, of similar shape, padded to one shape: b rows, t queries each, `width` blocks each."""

    tokens: Tensor
    """[b * t] int64: flat index of each query's token; padding repeats the row's last query."""
    real: Tensor | None
    """[r] int64: indices, among the b * t queries, of those that are no padding; None: no query is padding."""
    real_tokens: Tensor
    """[r] int64: flat index of the token of each query in `real`."""
    blocks: Tensor
    """[b, width] int64: block ids; padding repeats the row's first block."""
    masked: Tensor
    """[b, 1, t, width * block_size] bool: True where a query must not attend to a key."""
    gathers: dict[int, Tensor] = field(default_factory=dict)
    """For each number of KV heads: row indices [b * heads * width] into the pool, viewed as [num_blocks * heads,
    ...]."""

    def gather_blocks(self, cache: Tensor) -> Tensor:
        """Copy the group's blocks from `cache` [num_blocks, heads, size, dim] to a tensor [b, heads, width * size,
        dim]."""
        _, heads, size, dim = cache.shape
        index = self.gathers.get(heads)
        if index is None:
            head = torch.arange(heads, device=cache.device)[None, :, None]
            index = self.gathers[heads] = (self.blocks[:, None, :] * heads + head).flatten()
        runs = cache.view(-1, size * dim).index_select(0, index)
        return runs.view(len(self.blocks), heads, -1, dim)


class TorchPlan:
    """The plan of one step: the slots of its tokens, and the groups of rows for each window, because layers with
    different windows gather different blocks."""

    def __init__(self, batch: PagedBatch, shape: LayerShape, device: torch.device | str) -> None:
        self.batch = batch
        self.shape = shape
        self.device = device
        self.slot_blocks = torch.from_numpy(batch.slot_blocks).to(device)
        self.slot_offsets = torch.from_numpy(batch.slot_offsets).to(device)
        ends = batch.tails.nonzero()[0]
        tails = batch.tails[ends]
        first = np.repeat(batch.slot_offsets[ends] + 1 - (np.cumsum(tails) - tails), tails)
        self.tail_blocks = torch.from_numpy(np.repeat(batch.slot_blocks[ends], tails)).to(device)
        self.tail_offsets = torch.from_numpy(first + np.arange(len(first))).to(device)
        self._groups: dict[int | None, list[Group]] = {}

    def groups(self, window: int | None) -> list[Group]:
        """The groups of rows for layers with this window; they are made when the first such layer runs."""
        if window not in self._groups:
            self._groups[window] = make_groups(self.batch, self.shape, window, self.device)
        return self._groups[window]


class TorchAttention:
    """The attention backend in plain PyTorch.

    Args:
        layers: shapes of the model's layers; the largest layer determines how rows are grouped.
    """

    name = "torch"
    leaves_out_rows = False

    def __init__(self, layers: Sequence[LayerShape], device: torch.device | str = "cpu") -> None:
        self.shape = max(layers, key=lambda shape: shape.num_kv_heads * shape.k_dim)
        self.device = device

    def plan(self, batch: PagedBatch) -> TorchPlan:
        """Make the step's plan; see `AttentionBackend.plan`. Groups of rows are made later, once per window."""
        return TorchPlan(batch, self.shape, self.device)

    def write(self, plan: TorchPlan, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values to the slots of the batch; see `AttentionBackend.write`."""
        for new, cache in ((key, keys), (value, values)):
            cache[plan.slot_blocks, :, plan.slot_offsets] = new.to(cache.dtype)
            if len(plan.tail_blocks):
                cache[plan.tail_blocks, :, plan.tail_offsets] = 0

    def attend(
        self,
        plan: TorchPlan,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute the attention outputs of the batch; see `AttentionBackend.attend`."""
        output = query.new_empty(query.shape[0], query.shape[1], values.shape[-1])
        for group in plan.groups(window):
            rows, _, queries, _ = group.masked.shape
            q = query.index_select(0, group.tokens).view(rows, queries, *query.shape[1:]).transpose(1, 2)
            k, v = group.gather_blocks(keys).to(query.dtype), group.gather_blocks(values).to(query.dtype)
            if queries > 1 and softcap is None and sinks is None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=~group.masked, scale=scale, enable_gqa=True)
            else:
                out = attend_dense(q, k, v, group.masked, scale=scale, softcap=softcap, sinks=sinks)
            flat = out.transpose(1, 2).reshape(rows * queries, *output.shape[1:])
            if group.real is not None:
                flat = flat.index_select(0, group.real)
            output.index_copy_(0, group.real_tokens, flat)
        return output


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masked: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention in separate operations: scores, softcap, mask, sinks, softmax in float32, weighted sum.

    Args:
        query: queries [b, heads, t, k_dim]. key: keys [b, kv_heads, s, k_dim]. value: values [b, kv_heads, s, v_dim].
        masked: [b, 1, t, s] bool: True where a query must not attend to a key.

    Returns:
        [b, heads, t, v_dim].
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    # Query heads that share a KV head become rows of one matrix product, so keys and values are not copied.
    scores = torch.matmul(query.reshape(batch, kv_heads, -1, dim), key.transpose(-1, -2)).mul_(scale)
    scores = scores.view(batch, heads, queries, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(masked, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    mixed = torch.matmul(weights.reshape(batch, kv_heads, -1, weights.shape[-1]), value)
    return mixed.view(batch, heads, queries, -1)


# --------------------------------------------------------------------------------------------- how rows are grouped


@dataclass(slots=True)
class Pieces:
    """m spans; each has consecutive queries of one row, and the spans of a row are in order."""

    rows: Int64Array
    """[m] row of each span."""
    first: Int64Array
    """[m] position of each span's first query in its sequence."""
    counts: Int64Array
    """[m] number of queries of each span."""
    tokens: Int64Array
    """[m] flat index of each span's first query."""
    first_block: Int64Array
    """[m] index, in the row's block table, of the first block that a query of the span attends to."""
    num_blocks: Int64Array
    """[m] number of blocks from `first_block` to the block of the span's last query."""


def cut_pieces(batch: PagedBatch, shape: LayerShape, window: int | None) -> Pieces:
    """Cut the rows of a batch into pieces of at most PIECE_SCORES scores, and of at least one query."""
    reach = batch.kv_lens if window is None else np.minimum(batch.kv_lens, batch.query_lens + window)
    limit = np.maximum(1, PIECE_SCORES // (shape.num_heads * np.maximum(reach, 1)))
    per_row = -(-batch.query_lens // limit)
    rows = np.repeat(np.arange(len(per_row)), per_row)
    ordinal = np.arange(len(rows)) - (np.cumsum(per_row) - per_row)[rows]
    offset = ordinal * limit[rows]
    counts = np.minimum(limit[rows], batch.query_lens[rows] - offset)
    first = batch.kv_lens[rows] - batch.query_lens[rows] + offset
    first_block = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0) // batch.block_size
    num_blocks = -(-(first + counts) // batch.block_size) - first_block
    return Pieces(rows, first, counts, batch.query_starts[rows] + offset, first_block, num_blocks)


def make_groups(batch: PagedBatch, shape: LayerShape, window: int | None, device: torch.device | str) -> list[Group]:
    """Cut the rows of a batch into pieces, and put pieces of similar shape into groups."""
    pieces = cut_pieces(batch, shape, window)
    order = np.lexsort((pieces.num_blocks, pieces.counts))[::-1]  # most queries first, then longest
    block_kv = batch.block_size * shape.num_kv_heads * shape.k_dim
    block_work = batch.block_size * shape.num_heads * shape.k_dim
    groups: list[Group] = []
    start = 0
    queries = width = waste = 0
    for end, (count, blocks) in enumerate(
        zip(pieces.counts[order].tolist(), pieces.num_blocks[order].tolist(), strict=True)
    ):
        work = blocks * (block_kv + count * block_work)
        widest = max(width, blocks)
        waste += widest * (block_kv + queries * block_work) - work if end > start else 0
        waste += (widest - width) * (end - start) * (block_kv + queries * block_work)
        too_big = (end - start + 1) * widest * block_kv > GROUP_KV_ELEMENTS
        if end > start and (too_big or waste > GROUP_COST):
            groups.append(_make_group(batch, pieces, order[start:end], window, device))
            start, waste, widest = end, 0, blocks
        if end == start:
            queries = count  # the group's maximum, because pieces are sorted by decreasing count
        width = widest
    if len(order):
        groups.append(_make_group(batch, pieces, order[start:], window, device))
    return groups


def _make_group(
    batch: PagedBatch, pieces: Pieces, members: Int64Array, window: int | None, device: torch.device | str
) -> Group:
    """Make a group from the pieces with the indices `members`, padded to the shape of the largest piece."""
    counts = pieces.counts[members][:, None]
    step = np.arange(counts.max())[None, :]
    within = np.minimum(step, counts - 1)  # padding repeats the row's last query
    tokens = (pieces.tokens[members][:, None] + within).ravel()
    positions = pieces.first[members][:, None] + within

    num_blocks = pieces.num_blocks[members][:, None]
    slot = np.arange(num_blocks.max())[None, :]
    column = pieces.first_block[members][:, None] + np.where(slot < num_blocks, slot, 0)
    blocks = batch.block_tables[pieces.rows[members][:, None], column]

    key_positions = (pieces.first_block[members][:, None] * batch.block_size) + np.arange(slot.size * batch.block_size)
    masked = key_positions[:, None, :] > positions[:, :, None]
    if window is not None:
        masked |= key_positions[:, None, :] <= positions[:, :, None] - window

    is_real = (step < counts).ravel()
    padded = not is_real.all()
    return Group(
        tokens=torch.from_numpy(tokens).to(device),
        real=torch.from_numpy(np.nonzero(is_real)[0]).to(device) if padded else None,
        real_tokens=torch.from_numpy(tokens[is_real]).to(device),
        blocks=torch.from_numpy(blocks).to(device),
        masked=torch.from_numpy(masked[:, None]).to(device),
    )
