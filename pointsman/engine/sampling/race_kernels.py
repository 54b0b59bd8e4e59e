"""Runs the race of `race.py`, compiled for the CPU: a few passes per row for cuts and race, without temporary arrays.

The compiled race is fast for these reasons:
- top-k keeps a heap of the k largest logits so far; nearly every token needs only one comparison.
- top-p needs no sort. Probabilities are summed in buckets by their leading bits (the bits of positive floats have the
  same order as the numbers). The sums of the buckets are added from the top, and only the bucket in which the total
  reaches the limit is sorted.
- -log(u) >= 1 - u, so a token whose probability / (1 - u) is below the best score so far has lost. Its logarithm is not
  computed: only a few dozen of 32,000 logarithms are.

Rows are computed one by one, so a row's token does not depend on other rows. This module needs Numba and is imported
only if Numba is installed; otherwise the sampler uses `race.py`, with the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from pointsman.engine.arrays import Float32Array, Float64Array, Int64Array, UInt64Array
from pointsman.engine.kernels.disk_cache import keep_on_disk, one_process
from pointsman.engine.sampling.race import MULTIPLIERS, SHIFTS, TOKEN_STEP

_STEP = np.uint64(TOKEN_STEP)
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(shift) for shift in SHIFTS)
_TOP_52 = np.uint64(12)
_ONE = np.uint64(1)
_BUCKET_SHIFT = np.uint32(20)  # leaves 8 bits of exponent and 3 of mantissa: buckets an eighth of an octave wide
_ALMOST = 0.99  # allows for rounding in the sum of the probabilities
_NUM_BUCKETS = 1024  # probabilities are at most 1.0, which is in one of the last buckets


def _compiled(body: Any) -> Any:
    function = njit(nogil=True)(body)
    keep_on_disk(function, body)
    return function


@_compiled
def draw_rows(
    logits: Float32Array,
    probs: Float32Array,
    top_k: Int64Array,
    top_p: Float64Array,
    min_p: Float64Array,
    keys: UInt64Array,
    tokens: Int64Array,
) -> None:
    """Draw one token for each row, and write the drawn tokens to `tokens`.

    Args:
        logits: [n, vocab_size] logits after penalties and masks, before temperature.
        probs: [n, vocab_size] softmax of the logits divided by the temperature.
        top_k, top_p, min_p: [n] sampling parameters of the rows.
        keys: [n] keys of the rows' clocks, from `race.row_keys`.
        tokens: [n] output: the drawn token of each row.
    """
    num_rows, vocab_size = logits.shape
    candidates = np.empty(vocab_size, dtype=np.int64)
    for i in range(num_rows):
        has_top_k = 0 < top_k[i] < vocab_size
        if not has_top_k and top_p[i] >= 1.0 and min_p[i] <= 0.0:
            tokens[i] = _race_all_tokens(probs[i], keys[i])
            continue
        min_logit = _kth_largest(logits[i], top_k[i]) if has_top_k else np.float32(-np.inf)
        is_whole = not has_top_k and min_p[i] <= 0.0
        if is_whole:  # tokens below `min_prob` sum to less than 1 - top_p, so none is in the nucleus
            min_prob = _ALMOST * (1.0 - top_p[i]) / vocab_size
        else:
            min_prob = min_p[i] * probs[i].max() if min_p[i] > 0.0 else 0.0
        count = 0
        for t in range(vocab_size):
            if logits[i, t] >= min_logit and probs[i, t] >= min_prob:
                candidates[count] = t
                count += 1
        if top_p[i] < 1.0:
            total = 1.0
            if not is_whole:
                total = 0.0
                for t in candidates[:count]:
                    total += probs[i, t]
            min_prob = max(min_prob, _min_in_nucleus(probs[i], candidates[:count], top_p[i] * total))
        tokens[i] = _race_candidates(probs[i], candidates[:count], min_prob, keys[i])


@njit(nogil=True, inline="always")
def _uniform(key: np.uint64, t: int) -> float:
    x = key + (np.uint64(t) + _ONE) * _STEP
    x = (x ^ (x >> _SHIFT_1)) * _MULTIPLIER_1
    x = (x ^ (x >> _SHIFT_2)) * _MULTIPLIER_2
    x = x ^ (x >> _SHIFT_3)
    return (np.float64(np.int64(x >> _TOP_52)) + 0.5) * 2.0**-52


@_compiled
def _race_all_tokens(probs: Float32Array, key: np.uint64) -> int:
    best, winner = 0.0, 0
    for t in range(len(probs)):
        uniform = _uniform(key, t)
        if probs[t] > best * (1.0 - uniform):
            score = probs[t] / -np.log(uniform)
            if score > best:
                best, winner = score, t
    return winner


@_compiled
def _race_candidates(probs: Float32Array, candidates: Int64Array, min_prob: float, key: np.uint64) -> int:
    best, winner = 0.0, candidates[0] if len(candidates) else 0
    for t in candidates:
        if probs[t] < min_prob:
            continue
        uniform = _uniform(key, t)
        if probs[t] > best * (1.0 - uniform):
            score = probs[t] / -np.log(uniform)
            if score > best:
                best, winner = score, t
    return winner


@_compiled
def _kth_largest(values: Float32Array, k: int) -> np.float32:
    """The k-th largest of more than k values, found with a heap whose root is the smallest of the k largest values so
    far."""
    heap = values[:k].copy()
    for at in range(k // 2 - 1, -1, -1):
        _sift_down(heap, at)
    for at in range(k, len(values)):
        if values[at] > heap[0]:
            heap[0] = values[at]
            _sift_down(heap, 0)
    root: np.float32 = heap[0]
    return root


@_compiled
def _sift_down(heap: Float32Array, at: int) -> None:
    size, value = len(heap), heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@_compiled
def _min_in_nucleus(probs: Float32Array, candidates: Int64Array, limit: float) -> float:
    """The lowest probability in the smallest set of most likely candidates whose probabilities sum to at least
    `limit`."""
    bits = probs.view(np.uint32)
    masses = np.zeros(_NUM_BUCKETS, dtype=np.float64)
    for t in candidates:
        masses[_bucket(bits[t])] += probs[t]
    bucket, before = _NUM_BUCKETS - 1, 0.0
    while bucket > 0 and before + masses[bucket] < limit:
        before += masses[bucket]
        bucket -= 1
    inside = np.empty(len(candidates), dtype=np.float32)
    count = 0
    for t in candidates:
        if _bucket(bits[t]) == bucket:
            inside[count] = probs[t]
            count += 1
    ordered = np.sort(inside[:count])
    min_prob = 0.0
    for at in range(count - 1, -1, -1):
        if before >= limit:
            break
        min_prob = ordered[at]
        before += min_prob
    return min_prob


@njit(nogil=True, inline="always")
def _bucket(bits: np.uint32) -> np.int64:
    return np.int64(bits >> _BUCKET_SHIFT) & (_NUM_BUCKETS - 1)  # the mask is for NaNs, which have further bits


def compile_race() -> None:
    """Compile `draw_rows`, or load its compiled code from disk; otherwise its first call does."""
    logits = np.zeros((1, 2), dtype=np.float32)
    number, share = np.zeros(1, dtype=np.int64), np.ones(1)
    with one_process(draw_rows):
        draw_rows(logits, logits + 1, number, share, share, np.zeros(1, dtype=np.uint64), number.copy())
