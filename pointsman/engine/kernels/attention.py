"""Computes attention over the paged pool on a CPU, for decodes and prompt chunks.

The work is cut into tiles. A tile is some consecutive queries of one row, with the query heads that share one KV head.
A tile processes the row's blocks in chunks. For each query and head, the kernel keeps the running maximum of the
scores, the sum of their exponentials and the weighted sum of values, and rescales the sums when the maximum rises (the
online softmax of FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135). So the scratch memory is small for
any context.

    scores   S [queries, chunk]   few queries (a decode): dot products with the keys, in the pool's order
                                  many (a prompt): the block transposed once, then eight rank-one updates at a time
    values   A [queries, v_dim]   eight rank-one updates at a time

All these computations are plain loops. The innermost loop runs over neighbouring floats, so the compiler makes vector
instructions of the processor's full width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from pointsman.engine.kernels.runtime import (
    FAST,
    STORAGE,
    Kernel,
    exponential,
    hyperbolic_tangent,
    largest,
    load,
    next_item,
    pointer,
    prefetch,
    round_to,
    source_version,
)

CHUNK = 128
"""Number of keys of a chunk, unless a block is larger; then a chunk is one block."""
MAX_PAIR_ROWS = 2
"""Number of rows (queries times heads) up to which a tile is computed by functions for one pair of rows, as in a decode
where two heads share a KV head."""
SMALL_BATCH = 8
"""Maximum number of rows (queries times heads) of a tile whose keys are not transposed, because transposing would
not be faster."""
TILE_ROWS = 64
"""Maximum number of rows (queries times heads) of a tile, unless one query has more heads."""
MASKED_SCORE = -1.0e30
"""Score that replaces the scores of masked keys."""

# Indices of the kernel's arguments; index 0 is the counter.
(
    QUERY,
    KEYS,
    VALUES,
    OUTPUT,
    TABLES,
    TILES,
    SINKS,
    SCALARS,
    NUM_TOKENS,
    NUM_HEADS,
    NUM_KV_HEADS,
    K_DIM,
    V_DIM,
    NUM_BLOCKS,
    BLOCK_SIZE,
    NUM_ROWS,
    TABLE_WIDTH,
    NUM_TILES,
    WINDOW,
    MAX_ROWS,
) = range(1, 21)
NUM_ARGUMENTS = 21


@njit(fastmath=FAST)
def _score_few_queries(
    Q: Any, block: Any, S: Any, at: int, rows: int, size: int, k_dim: int, ahead: int, row_bytes: int
) -> None:
    """Write the dot products of each query with each key of a block to the columns of S from `at` on, four queries at a
    time.

    Tiles with few queries wait for memory. So for each key, the key with the same index in the next block, at the
    address `ahead`, is prefetched.
    """
    for t in range(size):
        key = block[t]
        for offset in range(0, row_bytes, 64):
            prefetch(ahead + t * row_bytes + offset)
        for r in range(0, rows, 4):
            a, b, c, e = Q[r], Q[r + 1], Q[r + 2], Q[r + 3]
            sa, sb, sc, se = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(k_dim):
                k = load(key[d])
                sa += a[d] * k
                sb += b[d] * k
                sc += c[d] * k
                se += e[d] * k
            S[r, at + t], S[r + 1, at + t], S[r + 2, at + t], S[r + 3, at + t] = sa, sb, sc, se


@njit(fastmath=FAST)
def _score_two_queries(Q: Any, block: Any, S: Any, at: int, size: int, k_dim: int, ahead: int, row_bytes: int) -> None:
    """Write the dot products of two queries with each key of a block to S; see `_score_few_queries`."""
    a, b = Q[0], Q[1]
    for t in range(size):
        key = block[t]
        for offset in range(0, row_bytes, 64):
            prefetch(ahead + t * row_bytes + offset)
        sa, sb = np.float32(0), np.float32(0)
        for d in range(k_dim):
            k = load(key[d])
            sa += a[d] * k
            sb += b[d] * k
        S[0, at + t], S[1, at + t] = sa, sb


@njit(fastmath=FAST)
def _transpose_keys(block: Any, T: Any, at: int, size: int, k_dim: int) -> None:
    """Copy a block's keys [size, k_dim] to the columns [at, at + size) of the transposed keys T."""
    for t in range(size):
        for d in range(k_dim):
            T[d, at + t] = load(block[t, d])


@njit(fastmath=FAST)
def _score_many_queries(Q: Any, T: Any, S: Any, rows: int, width: int, k_dim: int) -> None:
    """Write the scores of each query with a chunk's keys to S, by rank-one updates from the transposed keys T [k_dim,
    width]."""
    whole = k_dim // 4 * 4
    for r in range(0, rows, 4):  # four queries at a time, so each loaded key is used four times
        a, b, c, e = Q[r], Q[r + 1], Q[r + 2], Q[r + 3]
        sa, sb, sc, se = S[r], S[r + 1], S[r + 2], S[r + 3]
        for t in range(width):
            sa[t] = np.float32(0)
            sb[t] = np.float32(0)
            sc[t] = np.float32(0)
            se[t] = np.float32(0)
        for d in range(0, whole, 4):
            a0, a1, a2, a3 = a[d], a[d + 1], a[d + 2], a[d + 3]
            b0, b1, b2, b3 = b[d], b[d + 1], b[d + 2], b[d + 3]
            c0, c1, c2, c3 = c[d], c[d + 1], c[d + 2], c[d + 3]
            e0, e1, e2, e3 = e[d], e[d + 1], e[d + 2], e[d + 3]
            for t in range(width):
                k0, k1, k2, k3 = T[d, t], T[d + 1, t], T[d + 2, t], T[d + 3, t]
                sa[t] += (a0 * k0 + a1 * k1) + (a2 * k2 + a3 * k3)
                sb[t] += (b0 * k0 + b1 * k1) + (b2 * k2 + b3 * k3)
                sc[t] += (c0 * k0 + c1 * k1) + (c2 * k2 + c3 * k3)
                se[t] += (e0 * k0 + e1 * k1) + (e2 * k2 + e3 * k3)
        for d in range(whole, k_dim):
            for t in range(width):
                sa[t] += a[d] * T[d, t]
                sb[t] += b[d] * T[d, t]
                sc[t] += c[d] * T[d, t]
                se[t] += e[d] * T[d, t]


@njit(fastmath=FAST)
def _softmax_step(
    scores: Any, width: int, low: int, high: int, softcap: Any, highest: Any
) -> tuple[Any, Any]:  # (the new maximum, the sum of this chunk's exponentials)
    """Turn a chunk's scores [width] into weights in place, with keys outside [low, high) masked; returns the row's new
    maximum and the sum of the chunk's exponentials."""
    if softcap > np.float32(0):
        for t in range(width):
            scores[t] = softcap * hyperbolic_tangent(scores[t] / softcap)
    # Overwrite scores, do not add: a slot past the row's end may contain NaN.
    for t in range(low):
        scores[t] = np.float32(MASKED_SCORE)
    for t in range(high, width):
        scores[t] = np.float32(MASKED_SCORE)
    highest = largest(scores, width, highest)
    total = np.float32(0)
    for t in range(width):
        weight = exponential(scores[t] - highest)
        scores[t] = weight
        total += weight
    return highest, total


@njit(fastmath=FAST)
def _add_values(
    S: Any, block: Any, A: Any, at: int, rows: int, size: int, v_dim: int, ahead: int, block_bytes: int
) -> None:
    """Add to A the values of one block's slots times the slots' weights in S. Four queries are computed together, so
    each loaded value is used four times.

    The next block, `block_bytes` bytes at the address `ahead`, is prefetched.
    """
    whole = size // 4 * 4
    step = max(1, whole // 4)
    for r in range(0, rows, 4):
        a, b, c, e = S[r], S[r + 1], S[r + 2], S[r + 3]
        oa, ob, oc, oe = A[r], A[r + 1], A[r + 2], A[r + 3]
        for t in range(at, at + whole, 4):
            if r == 0:
                part = (t - at) // 4
                for offset in range(block_bytes * part // step // 64 * 64, block_bytes * (part + 1) // step, 64):
                    prefetch(ahead + offset)
            a0, a1, a2, a3 = a[t], a[t + 1], a[t + 2], a[t + 3]
            b0, b1, b2, b3 = b[t], b[t + 1], b[t + 2], b[t + 3]
            c0, c1, c2, c3 = c[t], c[t + 1], c[t + 2], c[t + 3]
            e0, e1, e2, e3 = e[t], e[t + 1], e[t + 2], e[t + 3]
            for d in range(v_dim):
                v0, v1 = load(block[t - at, d]), load(block[t - at + 1, d])
                v2, v3 = load(block[t - at + 2, d]), load(block[t - at + 3, d])
                oa[d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                ob[d] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
                oc[d] += (c0 * v0 + c1 * v1) + (c2 * v2 + c3 * v3)
                oe[d] += (e0 * v0 + e1 * v1) + (e2 * v2 + e3 * v3)
        for t in range(at + whole, at + size):
            for d in range(v_dim):
                value = load(block[t - at, d])
                oa[d] += a[t] * value
                ob[d] += b[t] * value
                oc[d] += c[t] * value
                oe[d] += e[t] * value


@njit(fastmath=FAST)
def _add_values_pair(S: Any, block: Any, A: Any, at: int, size: int, v_dim: int, ahead: int, block_bytes: int) -> None:
    """`_add_values` for two queries, eight slots at a time, which is faster with only two queries."""
    whole = size // 8 * 8
    step = max(1, whole // 8)
    a, b, oa, ob = S[0], S[1], A[0], A[1]
    for t in range(at, at + whole, 8):
        part = (t - at) // 8
        for offset in range(block_bytes * part // step // 64 * 64, block_bytes * (part + 1) // step, 64):
            prefetch(ahead + offset)
        a0, a1, a2, a3, a4, a5, a6, a7 = a[t], a[t + 1], a[t + 2], a[t + 3], a[t + 4], a[t + 5], a[t + 6], a[t + 7]
        b0, b1, b2, b3, b4, b5, b6, b7 = b[t], b[t + 1], b[t + 2], b[t + 3], b[t + 4], b[t + 5], b[t + 6], b[t + 7]
        s = t - at
        for d in range(v_dim):
            v0, v1, v2, v3 = load(block[s, d]), load(block[s + 1, d]), load(block[s + 2, d]), load(block[s + 3, d])
            v4, v5, v6, v7 = load(block[s + 4, d]), load(block[s + 5, d]), load(block[s + 6, d]), load(block[s + 7, d])
            oa[d] += ((a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)) + ((a4 * v4 + a5 * v5) + (a6 * v6 + a7 * v7))
            ob[d] += ((b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)) + ((b4 * v4 + b5 * v5) + (b6 * v6 + b7 * v7))
    for t in range(at + whole, at + size):
        for d in range(v_dim):
            value = load(block[t - at, d])
            oa[d] += a[t] * value
            ob[d] += b[t] * value


@njit(fastmath=FAST)
def _begin_rows(
    Q: Any, A: Any, highest: Any, total: Any, query: Any, sinks: Any, with_sinks: bool,
    first_token: int, first_head: int, group: int, rows: int, scale: Any,
) -> None:  # fmt: skip
    """Load and scale a tile's queries, and initialise the maxima and sums of their softmax."""
    for r in range(rows):
        one = query[first_token + r // group, first_head + r % group]
        for d in range(Q.shape[1]):
            Q[r, d] = load(one[d]) * scale
        for d in range(A.shape[1]):
            A[r, d] = np.float32(0)
        if with_sinks:  # a sink is a score without a value
            highest[r], total[r] = sinks[first_head + r % group], np.float32(1)
        else:
            highest[r], total[r] = np.float32(MASKED_SCORE), np.float32(0)


@njit(fastmath=FAST)
def _weigh_rows(
    S: Any, A: Any, highest: Any, total: Any,
    rows: int, group: int, position: int, chunk: int, width: int, window: int, softcap: Any,
) -> None:  # fmt: skip
    """Turn the scores of the chunk that begins at position `chunk` into weights, row by row, and rescale the sums of
    earlier chunks."""
    for r in range(rows):
        at = position + r // group
        high = max(0, min(width, at + 1 - chunk))
        low = 0
        if window > 0:
            low = min(width, max(0, at - window + 1 - chunk))
        before = highest[r]
        if high <= low:  # this query attends to no key of this chunk
            for t in range(width):
                S[r, t] = np.float32(0)
            continue
        now, added = _softmax_step(S[r], width, low, high, softcap, before)
        # Exactly 0; exponential(MASKED_SCORE - now) is slightly larger.
        for t in range(low):
            S[r, t] = np.float32(0)
        for t in range(high, width):
            S[r, t] = np.float32(0)
        shrink = exponential(before - now)
        highest[r] = now
        total[r] = total[r] * shrink + added
        for d in range(A.shape[1]):
            A[r, d] *= shrink


@cache
def attention_kernel(activations: torch.dtype, cache_dtype: torch.dtype) -> Kernel:
    """Make the attention kernel for queries and outputs of type `activations`, and a pool of type `cache_dtype`."""
    activation_type, cache_type = STORAGE[activations], STORAGE[cache_dtype]
    element_bytes = cache_dtype.itemsize

    version = source_version()

    def paged_attention(arguments: Any) -> None:
        a = carray(arguments, (NUM_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_heads, num_kv_heads, k_dim, v_dim = a[NUM_HEADS], a[NUM_KV_HEADS], a[K_DIM], a[V_DIM]
        size, num_tiles, window, max_rows = a[BLOCK_SIZE], a[NUM_TILES], a[WINDOW], a[MAX_ROWS]
        query = carray(pointer(a[QUERY]), (a[NUM_TOKENS], num_heads, k_dim), activation_type)
        keys = carray(pointer(a[KEYS]), (a[NUM_BLOCKS], num_kv_heads, size, k_dim), cache_type)
        values = carray(pointer(a[VALUES]), (a[NUM_BLOCKS], num_kv_heads, size, v_dim), cache_type)
        output = carray(pointer(a[OUTPUT]), (a[NUM_TOKENS], num_heads, v_dim), activation_type)
        tables = carray(pointer(a[TABLES]), (a[NUM_ROWS], a[TABLE_WIDTH]), np.int64)
        tiles = carray(pointer(a[TILES]), (num_tiles, 4), np.int64)
        sinks = carray(pointer(a[SINKS]), (num_heads,), np.float32)  # read only if the layer has sinks
        scalars = carray(pointer(a[SCALARS]), (2,), np.float32)
        scale, softcap = scalars[0], scalars[1]
        group = num_heads // num_kv_heads
        blocks_per_chunk = max(1, CHUNK // size)
        key_bytes, value_bytes = size * k_dim * element_bytes, size * v_dim * element_bytes

        Q = np.zeros((max_rows + 3, k_dim), np.float32)  # three more rows, because rows are processed in fours
        S = np.empty((max_rows + 3, blocks_per_chunk * size), np.float32)
        A = np.empty((max_rows + 3, v_dim), np.float32)
        highest = np.empty(max_rows, np.float32)
        total = np.empty(max_rows, np.float32)
        T = np.empty((k_dim, blocks_per_chunk * size), np.float32)

        while True:
            item = next_item(arguments)
            if item >= num_tiles * num_kv_heads:
                break
            tile, head = item // num_kv_heads, item % num_kv_heads
            row, first_token, num_queries, position = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
            table, first_head = tables[row], head * group
            rows = num_queries * group
            few = rows <= SMALL_BATCH
            _begin_rows(Q, A, highest, total, query, sinks, a[SINKS] != 0, first_token, first_head, group, rows, scale)
            end = position + num_queries
            start = 0
            if window > 0:
                start = max(0, position - window + 1) // size * size
            for chunk in range(start, end, blocks_per_chunk * size):
                first_block = chunk // size
                num_blocks = min(blocks_per_chunk, (end - chunk + size - 1) // size)
                for b in range(num_blocks):
                    block = table[first_block + b]
                    if few:
                        last = b + 1 == num_blocks
                        base, one, then = (a[VALUES], value_bytes, 0) if last else (a[KEYS], key_bytes, b + 1)
                        ahead = base + (table[first_block + then] * num_kv_heads + head) * one
                        if rows <= MAX_PAIR_ROWS:
                            _score_two_queries(Q, keys[block, head], S, b * size, size, k_dim, ahead, key_bytes // size)
                        else:
                            _score_few_queries(
                                Q, keys[block, head], S, b * size, rows, size, k_dim, ahead, key_bytes // size
                            )
                    else:
                        _transpose_keys(keys[block, head], T, b * size, size, k_dim)
                width = num_blocks * size
                if not few:
                    _score_many_queries(Q, T, S, rows, width, k_dim)
                _weigh_rows(S, A, highest, total, rows, group, position, chunk, width, window, softcap)
                for b in range(num_blocks):
                    block = table[first_block + b]
                    base, one, then = a[VALUES], value_bytes, b + 1
                    if then == num_blocks and chunk + width < end:
                        base, one = a[KEYS], key_bytes
                    ahead, num_bytes = 0, 0
                    if few and (then < num_blocks or chunk + width < end):
                        ahead = base + (table[first_block + then] * num_kv_heads + head) * one
                        num_bytes = one
                    if rows <= MAX_PAIR_ROWS:
                        _add_values_pair(S, values[block, head], A, b * size, size, v_dim, ahead, num_bytes)
                    else:
                        _add_values(S, values[block, head], A, b * size, rows, size, v_dim, ahead, num_bytes)

            for r in range(rows):
                inverse = np.float32(1) / total[r]
                out = output[first_token + r // group, first_head + r % group]
                for d in range(v_dim):
                    out[d] = round_to(output, A[r, d] * inverse)

    return Kernel(paged_attention)
