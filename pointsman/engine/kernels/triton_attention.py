"""Paged attention for GPUs, in Triton: a kernel for decodes, over split KV, and a kernel for prompt chunks, in tiles.

Both kernels read the pool, [num_blocks, kv_heads, block_size, dim], through block tables. Query heads that share a KV
head are rows of one matrix product, so keys and values are read once for all of them.

Decodes: a row's KV is cut into parts. The parts are computed in parallel, and a second kernel merges them (flash
decoding, Dao et al. 2023). The number of parts depends only on the number of rows, so the launches of a step can be
recorded in a CUDA graph for any lengths. A part that begins after a row's end computes nothing.

Prefill: tiles of queries with an online softmax over the keys before them (FlashAttention 2, Dao 2023).

Slots past a row's end, or before its window, are never read. A row of length 0, the padding of a graph, gets zeros.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit
"""Triton's decorator of kernels, typed as Any, because Python does not call kernels. The parameters of kernels have no
annotations: Triton evaluates annotations, and refuses names such as Any."""

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton interprets the kernels. Its interpreter multiplies the bits of bfloat16 as integers, so operands are
then converted to float32."""


@jit
def _dot(a, b, total):
    """The matrix product total + a @ b, in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@jit
def _attend_tile(
    q,
    keys,
    values,
    table,
    places,
    is_read,
    is_seen,
    head,
    top,
    total,
    mixed,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    num_kv_heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_k: tl.constexpr,
    padded_v: tl.constexpr,
):
    """Add one tile of keys to an online softmax to the base 2; returns the softmax's new maximum, sum and output.

    Args:
        q: [M, padded_k] queries.
        table: address of the row's block table; head: index of the KV head.
        places: [N] positions of the tile's keys in the row; is_read: [N] whether each key exists; is_seen: [M, N]
            whether a query attends to a key.
        top, total: [M] maximum and sum of the softmax so far; mixed: [M, padded_v] its output so far, not divided by
            the sum.
    """
    d, e = tl.arange(0, padded_k), tl.arange(0, padded_v)
    blocks = tl.load(table + places // block_size, mask=is_read, other=0).to(tl.int64)
    slots = (blocks * num_kv_heads + head) * block_size + places % block_size
    k = tl.load(keys + slots[None, :] * k_dim + d[:, None], mask=is_read[None, :] & (d < k_dim)[:, None], other=0.0)
    scores = _dot(q, k.to(q.dtype), tl.zeros([q.shape[0], places.shape[0]], tl.float32))
    if softcap > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is correct at both infinities
        scores = scores * (2.0 * scale / softcap)
        scores = (1.0 - 2.0 / (tl.exp(scores) + 1.0)) * (softcap * LOG2_E)
    else:
        scores = scores * (scale * LOG2_E)
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # The window of a query may begin after this tile. Its maximum is then -inf, and -inf - (-inf) is NaN.
    base = tl.where(new_top > float("-inf"), new_top, 0.0)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = tl.load(values + slots[:, None] * v_dim + e[None, :], mask=is_read[:, None] & (e < v_dim)[None, :], other=0.0)
    mixed = _dot(weights.to(q.dtype), v.to(q.dtype), mixed * shrink[:, None])
    return new_top, total * shrink + tl.sum(weights, 1), mixed


@jit
def _divide_by_sum(top, total, mixed, sinks, heads, is_row, has_sinks: tl.constexpr):
    """Final outputs [M, padded_v] of an online softmax: `mixed` divided by the sum of the softmax and of the heads'
    sinks [M]; zeros for a row that attends to no token."""
    if has_sinks:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        mixed = mixed * shrink[:, None]
    return mixed / tl.where(total > 0, total, 1.0)[:, None]


@jit
def decode_kernel(
    query,
    keys,
    values,
    output,
    part_sums,
    part_outputs,
    tables,
    table_width,
    kv_lens,
    rows,
    tokens,
    sinks,
    query_stride,
    first_table,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    window: tl.constexpr,
    has_sinks: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_size: tl.constexpr,
    num_parts: tl.constexpr,
    padded_group: tl.constexpr,
    padded_k: tl.constexpr,
    padded_v: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute one part of the KV of one row, for the query heads of one KV head.

    Args:
        query: [T, heads, k_dim] queries; a token's heads are contiguous, and tokens are `query_stride` elements apart.
        keys, values: KV pool of the layer.
        output: [T, heads, v_dim] output, written only if there is one part.
        part_sums: [n, heads, num_parts, 2] float32: maximum and sum of each part's softmax to the base 2; part_outputs:
            [n, heads, num_parts, v_dim] float32, not divided by the sum. Both are read by `merge_kernel`.
        tables: [.., width] block tables; the tables of the layer's group begin at index `first_table`.
        table_width: [1] width of the block tables.
        kv_lens, rows, tokens: [n] length of each row, index of its block table, and index of its query in the batch.
    """
    at, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + at)
    row = tl.load(rows + at)
    token = tl.load(tokens + at).to(tl.int64)
    table = tables + (first_table + row).to(tl.int64) * tl.load(table_width)
    begin = 0
    if window > 0:
        begin = tl.maximum(length - window, 0)
    size = tl.cdiv(tl.cdiv(length - begin, num_parts), tile) * tile
    first = begin + part * size
    last = tl.minimum(first + size, length)

    m = tl.arange(0, padded_group)
    heads = head * group + m
    d, e = tl.arange(0, padded_k), tl.arange(0, padded_v)
    is_head = m < group
    q = tl.load(
        query + token * query_stride + heads[:, None] * k_dim + d[None, :],
        mask=is_head[:, None] & (d < k_dim)[None, :],
        other=0.0,
    )
    top = tl.full([padded_group], float("-inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    mixed = tl.zeros([padded_group, padded_v], tl.float32)
    n = tl.arange(0, tile)
    for start in range(first, last, tile):
        places = start + n
        is_read = places < last
        top, total, mixed = _attend_tile(
            q, keys, values, table, places, is_read, is_read[None, :], head, top, total, mixed,
            scale, softcap, num_kv_heads, k_dim, v_dim, block_size, padded_k, padded_v,
        )  # fmt: skip
    is_out = is_head[:, None] & (e < v_dim)[None, :]
    if num_parts == 1:
        mixed = _divide_by_sum(top, total, mixed, sinks, heads, is_head, has_sinks)
        out = output + (token * (num_kv_heads * group) + heads[:, None]) * v_dim + e[None, :]
        tl.store(out, mixed.to(output.dtype.element_ty), mask=is_out)
    else:
        place = ((at.to(tl.int64) * num_kv_heads * group) + heads) * num_parts + part
        tl.store(part_sums + place * 2, top, mask=is_head)
        tl.store(part_sums + place * 2 + 1, total, mask=is_head)
        if first < last:
            tl.store(part_outputs + place[:, None] * v_dim + e[None, :], mixed, mask=is_out)


@jit
def merge_kernel(
    part_sums,
    part_outputs,
    output,
    tokens,
    sinks,
    has_sinks: tl.constexpr,
    num_heads: tl.constexpr,
    v_dim: tl.constexpr,
    num_parts: tl.constexpr,
    padded_parts: tl.constexpr,
    padded_v: tl.constexpr,
):
    """Merge the results that `decode_kernel` wrote for the parts of one row's KV, for one head, into `output` [T,
    heads, v_dim]."""
    at, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + at).to(tl.int64)
    p, e = tl.arange(0, padded_parts), tl.arange(0, padded_v)
    place = (at.to(tl.int64) * num_heads + head) * num_parts + p
    tops = tl.load(part_sums + place * 2, mask=p < num_parts, other=float("-inf"))
    totals = tl.load(part_sums + place * 2 + 1, mask=p < num_parts, other=0.0)
    top = tl.max(tops, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    has_kv = tops > float("-inf")
    base = tl.where(top > float("-inf"), top, 0.0)  # padding has no KV
    factors = tl.exp2(tops - base)
    total = tl.sum(factors * totals, 0)
    if has_sinks:
        total += tl.exp2(sink - base)
    parts = tl.load(
        part_outputs + place[:, None] * v_dim + e[None, :], mask=has_kv[:, None] & (e < v_dim)[None, :], other=0.0
    )
    mixed = tl.sum(parts * factors[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + (token * num_heads + head) * v_dim + e, mixed.to(output.dtype.element_ty), mask=e < v_dim)


@jit
def prefill_kernel(
    query,
    keys,
    values,
    output,
    tables,
    table_width,
    tiles,
    sinks,
    query_stride,
    first_table,
    scale: tl.constexpr,
    softcap: tl.constexpr,
    window: tl.constexpr,
    has_sinks: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    padded_k: tl.constexpr,
    padded_v: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute one tile of queries of one row, for the query heads of one KV head; other arguments: see `decode_kernel`.

    Args:
        tiles: [m, 4] int32 for each tile: index of the row's block table, index of the first token, number of queries,
            position of the first query. The number of queries, times `group`, is at most `tile_rows`.
    """
    at, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + at * 4)
    token = tl.load(tiles + at * 4 + 1).to(tl.int64)
    count = tl.load(tiles + at * 4 + 2)
    position = tl.load(tiles + at * 4 + 3)
    table = tables + (first_table + row).to(tl.int64) * tl.load(table_width)

    m = tl.arange(0, tile_rows)
    behind, heads = m // group, head * group + m % group
    is_row = behind < count
    d, e = tl.arange(0, padded_k), tl.arange(0, padded_v)
    q = tl.load(
        query + (token + behind[:, None]) * query_stride + heads[:, None] * k_dim + d[None, :],
        mask=is_row[:, None] & (d < k_dim)[None, :],
        other=0.0,
    )
    top = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    mixed = tl.zeros([tile_rows, padded_v], tl.float32)
    n = tl.arange(0, tile)
    begin = 0
    if window > 0:
        begin = tl.maximum(position - window + 1, 0)
    length = position + count
    for start in range(begin, length, tile):
        places = start + n
        is_seen = places[None, :] <= (position + behind)[:, None]
        if window > 0:
            is_seen = is_seen & (places[None, :] > (position + behind - window)[:, None])
        top, total, mixed = _attend_tile(
            q, keys, values, table, places, places < length, is_seen, head, top, total, mixed,
            scale, softcap, num_kv_heads, k_dim, v_dim, block_size, padded_k, padded_v,
        )  # fmt: skip
    mixed = _divide_by_sum(top, total, mixed, sinks, heads, is_row, has_sinks)
    out = output + ((token + behind[:, None]) * (num_kv_heads * group) + heads[:, None]) * v_dim + e[None, :]
    tl.store(out, mixed.to(output.dtype.element_ty), mask=is_row[:, None] & (e < v_dim)[None, :])
