"""Runs the race of `race.py` as Triton kernels, which choose one token a row on a GPU.

The kernels use weights instead of probabilities: weight = exp((logit - row's maximum) / temperature), so the first
token has weight 1 and nothing overflows. Four kernels run one after the other:

    kernel              grid        work
    _maxima             n, splits   each split's maximum logit, and its first token; NaN counts as infinity
    _race_or_count      n, splits   rows without top-k and top-p: the race within the split, min-p included
                                    rows with one of them: histogram of weights, and the sum that min-p keeps
    _list_candidates    n, splits   rows with top-k or top-p: ids of the tokens above a floor from the histogram
    _finish             n           greedy rows: the maximum; rows without top-k and top-p: the best of the splits;
                                    others: exact threshold and race among the candidates

- No sort is needed. Buckets of the histogram are half an octave of weight wide. The histogram gives a floor: neither
  top-k nor top-p keeps a token of lower weight. So `_finish` reads only some hundred candidates. It finds the exact
  threshold by bisection on the bits of float32, with eight thresholds a pass. If a row has more than `CAPACITY`
  candidates, as flat rows with top-p have, the whole row is searched, which is slower.
- Sums of weights for top-p are integers, in units of 2**-44. Sums of integers do not depend on their order, so a row's
  token depends neither on the other rows nor on the order of the programs.
- The race starts with the clock of the most likely token, which every cut keeps. -log(u) >= 1 - u, so a token whose
  weight / (1 - u) is below the best score so far has lost. No logarithms are computed for a block in which all tokens
  have lost. The test itself is in float32, rounded so that the winner always passes it.
- A weight below 2**-64 cannot win: every clock is at least 2**-53, and the first token's clock is at most 37.

The results are those of `race_kernels.py` up to rounding. Weights differ from the probabilities of `race_kernels.py` by
a relative 1e-6. The token of a row differs only if two scores, or a token and the limit of top-p or min-p, are that
close. As in `race_kernels.py`, top-k compares logits, and top-p compares weights, which tie more often.

Grid and workspaces depend only on the number of rows and the vocabulary, so `choose` can be recorded in a CUDA graph.
This module needs Triton and is imported only if Triton is installed. With TRITON_INTERPRET=1 the kernels run on a CPU,
for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.engine.arrays import BoolArray, Int64Array
from pointsman.engine.device import to_device
from pointsman.engine.sampling.batch import SamplingBatch
from pointsman.engine.sampling.race import MULTIPLIERS, SHIFTS, TOKEN_STEP

jit: Any = triton.jit
"""Triton's decorator of kernels, typed as Any, because Python does not call kernels. Triton evaluates the annotations
of their parameters, and refuses names such as Any."""

SPLIT = tl.constexpr(4096)
"""Number of tokens of one program. It does not depend on the number of rows, so a row's results do not depend on it."""
CHUNK = tl.constexpr(1024)
"""Number of tokens of a split that are raced or counted together."""
LIST_CHUNK = tl.constexpr(512)
"""Number of candidates that `_finish` reads together."""
CAPACITY = tl.constexpr(4096)
"""Maximum number of listed candidates of a row."""
NUM_BUCKETS = tl.constexpr(128)
BUCKET_SHIFT = tl.constexpr(22)  # leaves 8 bits of exponent and 1 of mantissa; 128 buckets end at 2**-64
ONE_BITS = tl.constexpr(0x3F800000)  # float32's 1.0
NUM_THRESHOLDS = tl.constexpr(8)
UNIT = tl.constexpr(2.0**44)  # 2**18 tokens of weight 1 stay far below 2**63
SLACK = tl.constexpr(1.0 - 2.0**-16)  # the exponential function is monotonic up to a few units in the last place
SUM_SLACK = tl.constexpr(0.999)  # for sums in float32
BOUND_SLACK = tl.constexpr((1.0 - 2.0**-20) * 2.0**-32)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)

_STEP = tl.constexpr(TOKEN_STEP)
_MULTIPLIER_1, _MULTIPLIER_2 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in SHIFTS)

MAX_VOCAB_SIZE = (1 << 19) - 1
"""Maximum number of tokens of a vocabulary: the sum of their weights, in units of 2**-44, is below 2**63."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "min_p": torch.float32,
    "keys": torch.int64,
}


# ---------------------------------------------------------------------------------------------------------- parameters


@dataclass(slots=True)
class DeviceParameters:
    """Sampling parameters of n rows, on the logits' device. A CUDA graph reads the memory of these tensors, so they
    must be changed in place."""

    temperature: Tensor
    """[n] float32: temperature of each row. 0: the row is greedy, and its other parameters are not read."""
    top_k: Tensor
    """[n] int32: maximum number of candidates of each row. Below 1, or vocab_size and above: no limit."""
    top_p: Tensor
    """[n] float64: limit of top-p of each row. 1: no limit. In float32, 0.8 would be above 0.8, which matters if
    probabilities sum to 0.8."""
    min_p: Tensor
    """[n] float32: limit of min-p of each row. 0: no limit."""
    keys: Tensor
    """[n] int64: key of each row, with the bits of `race.row_keys`."""

    @staticmethod
    def columns(batch: SamplingBatch, n: int) -> dict[str, npt.NDArray[Any]]:
        """Arrays with values for n rows on the host, by field; rows beyond the rows of the batch are greedy.

        Raises:
            ValueError: the batch has more than n rows.
        """
        if batch.num_rows > n:
            raise ValueError(
                f"the batch has {batch.num_rows} rows, and the columns have only {n}; make columns for more rows"
            )
        random = batch.random
        temperature = np.zeros(n, dtype=np.float32)
        temperature[random] = batch.temperature
        top_k = np.zeros(n, dtype=np.int32)
        top_k[random] = np.clip(batch.top_k, 0, np.iinfo(np.int32).max)
        top_p = np.ones(n, dtype=np.float64)
        top_p[random] = batch.top_p
        min_p = np.zeros(n, dtype=np.float32)
        min_p[random] = batch.min_p
        keys = np.zeros(n, dtype=np.int64)
        keys[random] = batch.keys.view(np.int64)
        return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "keys": keys}


# ---------------------------------------------------------------------------------------------------------------- race


class DeviceRace:
    """Chooses tokens on one device. Each call writes to the object's workspaces, so two calls must not run at the same
    time.

    Args:
        max_rows: maximum number of rows of a call.
        vocab_size: number of logits of a row.
        device: device of the logits.

    Raises:
        ValueError: a size is below 1, or the vocabulary has more than `MAX_VOCAB_SIZE` tokens.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; it must be 1 or more")
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size is {vocab_size}; it must be 1 to {MAX_VOCAB_SIZE}; run a larger model on a CPU"
            )
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self._num_splits = num_splits = triton.cdiv(vocab_size, SPLIT.value)
        self._padded_splits = triton.next_power_of_2(num_splits)
        self._maxima = torch.empty((max_rows, num_splits), dtype=torch.float32, device=device)
        self._argmaxima = torch.empty((max_rows, num_splits), dtype=torch.int32, device=device)
        self._bests = torch.empty((max_rows, num_splits), dtype=torch.float64, device=device)
        self._winners = torch.empty((max_rows, num_splits), dtype=torch.int32, device=device)
        self._masses = torch.empty((max_rows, num_splits), dtype=torch.int64, device=device)
        self._counts = torch.empty((max_rows, NUM_BUCKETS.value), dtype=torch.int32, device=device)
        self._num_listed = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._listed = torch.empty((max_rows, CAPACITY.value), dtype=torch.int32, device=device)

    def choose(self, logits: Tensor, parameters: DeviceParameters, tokens: Tensor, ok: Tensor) -> None:
        """Choose one token a row. Launches kernels on the current stream without waiting for them.

        Args:
            logits: [n, vocab_size] float32, bfloat16 or float16, after penalties and masks, before temperature; not
                changed. A token whose logit is minus infinity is never chosen.
            parameters: sampling parameters of n rows or more.
            tokens: [n] int64 output: the token of each row. If `ok` is 0, the token is a token id without meaning.
            ok: [n] uint8 output: 1: the row has a finite maximum and no NaN.

        Raises:
            ValueError: a shape, dtype or stride of an argument is not as described.
        """
        num_rows = self._check_arguments(logits, parameters, tokens, ok)
        if not num_rows:
            return
        own = (logits, logits.stride(0), self.vocab_size)
        asked = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
        maxima = (self._maxima, self._argmaxima)
        splits, padded = (num_rows, self._num_splits), self._padded_splits
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _maxima[splits](*own, *maxima, self._counts, self._num_listed, num_warps=8)
            _race_or_count[splits](
                *own, *asked, parameters.keys, *maxima, self._bests, self._winners, self._counts, self._masses,
                PADDED_SPLITS=padded, num_warps=8,
            )  # fmt: skip
            _list_candidates[splits](
                *own, *asked, *maxima, self._counts, self._masses, self._num_listed, self._listed,
                PADDED_SPLITS=padded, num_warps=8,
            )  # fmt: skip
            _finish[(num_rows,)](
                *own, *asked, parameters.keys, *maxima, self._bests, self._winners, self._counts, self._masses,
                self._num_listed, self._listed, tokens, ok, self._num_splits, PADDED_SPLITS=padded, num_warps=4,
            )  # fmt: skip

    def draw(self, logits: Tensor, batch: SamplingBatch) -> tuple[Int64Array, BoolArray]:
        """Tokens [n] and whether each row has a finite maximum [n], for the n rows of a batch. The host waits for the
        device.

        Args:
            logits: [n, vocab_size] logits, see `choose`.
            batch: sampling parameters of the n rows.

        Raises:
            ValueError: see `choose`.
        """
        num_rows = len(logits)
        columns = DeviceParameters.columns(batch, num_rows)
        parameters = DeviceParameters(**to_device(columns, logits.device))
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        ok = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
        self.choose(logits, parameters, tokens, ok)
        return tokens.cpu().numpy(), ok.cpu().numpy().astype(np.bool_)

    def _check_arguments(self, logits: Tensor, parameters: DeviceParameters, tokens: Tensor, ok: Tensor) -> int:
        """Check the arguments of `choose`; returns the number of rows of the logits."""
        if logits.dim() != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(f"logits are {list(logits.shape)}; they must be [n, {self.vocab_size}]")
        num_rows = len(logits)
        if num_rows > self.max_rows:
            raise ValueError(
                f"logits have {num_rows} rows, but max_rows is {self.max_rows}; make a DeviceRace "
                "with a larger max_rows"
            )
        if logits.dtype not in _DTYPES or logits.stride(1) != 1:
            raise ValueError(
                f"logits are {logits.dtype} with strides {logits.stride()}; they must be float32, bfloat16 or float16 "
                "with contiguous rows: convert them"
            )
        for name, dtype in _COLUMNS.items():
            _check_column(f"parameters.{name}", getattr(parameters, name), dtype, num_rows, is_exact=False)
        _check_column("tokens", tokens, torch.int64, num_rows, is_exact=True)
        _check_column("ok", ok, torch.uint8, num_rows, is_exact=True)
        return num_rows


def _check_column(name: str, column: Tensor, dtype: torch.dtype, num_rows: int, is_exact: bool) -> None:
    enough = column.shape == (num_rows,) if is_exact else column.dim() == 1 and len(column) >= num_rows
    if not enough or column.dtype != dtype or not column.is_contiguous():
        kind = "" if column.is_contiguous() else ", not contiguous"
        size = num_rows if is_exact else f"{num_rows} or more"
        raise ValueError(
            f"{name} is {list(column.shape)} {column.dtype}{kind}; it must be contiguous, [{size}] {dtype}"
        )


# ------------------------------------------------------------------------------------------------------------- kernels


@jit
def _maxima(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    maxima: tl.tensor,
    argmaxima: tl.tensor,
    counts: tl.tensor,
    num_listed: tl.tensor,
) -> None:
    row, split = tl.program_id(0), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    inside = ids < vocab_size
    x = _load_logits(logits, row, row_stride, ids, inside)
    x = tl.where(x != x, float("inf"), x)  # NaN is treated as infinity: there is no finite maximum
    top = tl.max(x, 0)
    place = row * tl.num_programs(1) + split
    tl.store(maxima + place, top)
    tl.store(argmaxima + place, tl.min(tl.where(inside & (x == top), ids, NO_TOKEN), 0))
    if split == 0:  # reset the counters of the following kernels
        tl.store(counts + row * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS), tl.zeros([NUM_BUCKETS], dtype=tl.int32))
        tl.store(num_listed + row, 0)


@jit
def _race_or_count(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    keys: tl.tensor,
    maxima: tl.tensor,
    argmaxima: tl.tensor,
    bests: tl.tensor,
    winners: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    PADDED_SPLITS: tl.constexpr,
) -> None:
    row, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    top, first = _row_maximum(maxima, argmaxima, row, num_splits, PADDED_SPLITS)
    if (temperature > 0.0) & _is_finite(top):
        place = row * num_splits + split
        start, end = split * SPLIT, tl.minimum((split + 1) * SPLIT, vocab_size)
        if _needs_threshold(tl.load(top_ks + row), tl.load(top_ps + row), vocab_size):
            histogram = tl.zeros([NUM_BUCKETS], dtype=tl.int32)
            units = tl.zeros([CHUNK], dtype=tl.int64)
            min_p = tl.load(min_ps + row)
            while start < end:
                ids = start + tl.arange(0, CHUNK)
                weights = _weights(_load_logits(logits, row, row_stride, ids, ids < end), top, temperature)
                below = tl.full([], ONE_BITS, tl.int32) - weights.to(tl.int32, bitcast=True)
                buckets = tl.maximum(below, 0) >> BUCKET_SHIFT
                histogram += tl.histogram(buckets, NUM_BUCKETS, mask=buckets < NUM_BUCKETS)
                units += tl.where(weights >= min_p, (weights * UNIT).to(tl.int64), 0)
                start += CHUNK
            places = counts + row * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS)
            tl.atomic_add(places, histogram, mask=histogram > 0, sem="relaxed")
            tl.store(masses + place, tl.sum(units, 0))
        else:
            min_p = tl.load(min_ps + row)
            key = tl.load(keys + row).to(tl.uint64, bitcast=True)
            best, winner = 1.0 / _exponential_times(_random_bits(key, first)), first
            while start < end:
                ids = start + tl.arange(0, CHUNK)
                weights = _weights(_load_logits(logits, row, row_stride, ids, ids < end), top, temperature)
                best, winner = _race_tokens(ids, tl.where(weights >= min_p, weights, 0.0), key, best, winner)
                start += CHUNK
            tl.store(bests + place, best)
            tl.store(winners + place, winner)


@jit
def _list_candidates(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    maxima: tl.tensor,
    argmaxima: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    num_listed: tl.tensor,
    listed: tl.tensor,
    PADDED_SPLITS: tl.constexpr,
) -> None:
    row, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if (temperature > 0.0) & _needs_threshold(top_k, top_p, vocab_size):
        top, _ = _row_maximum(maxima, argmaxima, row, num_splits, PADDED_SPLITS)
        if _is_finite(top):
            total = _row_mass(masses, row, num_splits, PADDED_SPLITS)
            floor = _floor(counts, row, total, top_k, top_p, tl.load(min_ps + row), vocab_size)
            ids = split * SPLIT + tl.arange(0, SPLIT)
            weights = _weights(_load_logits(logits, row, row_stride, ids, ids < vocab_size), top, temperature)
            is_listed = weights >= floor
            num = tl.sum(is_listed.to(tl.int32), 0)
            if num > 0:  # splits are listed in any order; the search of `_finish` does not depend on it
                start = tl.atomic_add(num_listed + row, num, sem="relaxed")
                places = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                tl.store(listed + row * CAPACITY + places, ids, mask=is_listed & (places < CAPACITY))


@jit
def _finish(
    logits: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    keys: tl.tensor,
    maxima: tl.tensor,
    argmaxima: tl.tensor,
    bests: tl.tensor,
    winners: tl.tensor,
    counts: tl.tensor,
    masses: tl.tensor,
    num_listed: tl.tensor,
    listed: tl.tensor,
    tokens: tl.tensor,
    ok: tl.tensor,
    num_splits: tl.tensor,
    PADDED_SPLITS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    top, first = _row_maximum(maxima, argmaxima, row, num_splits, PADDED_SPLITS)
    is_finite = _is_finite(top)
    token = first
    if (temperature > 0.0) & is_finite:
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        if _needs_threshold(top_k, top_p, vocab_size):
            total = _row_mass(masses, row, num_splits, PADDED_SPLITS)
            min_p = tl.load(min_ps + row)
            floor = _floor(counts, row, total, top_k, top_p, min_p, vocab_size)
            num = tl.load(num_listed + row)
            size, listed_size = num, num
            if num > CAPACITY:
                size, listed_size = vocab_size, 0
            source = (logits, row, row_stride, listed + row * CAPACITY, listed_size, size, top, temperature)
            lowest = tl.full([], -0x80000000, tl.int32)
            has_top_k = (top_k > 0) & (top_k < vocab_size)
            if has_top_k:
                low = _min_order(source, floor)
                high = _ordered_int(top).to(tl.int64) + 1
                lowest = _find_threshold(source, floor, lowest, low, high, top_k.to(tl.int64), False)
            if top_p < 1.0:
                if has_top_k:  # top-p applies to the tokens that the other cuts keep
                    none = tl.zeros([NUM_THRESHOLDS], dtype=tl.int32)
                    total = tl.max(_amounts(source, floor, lowest, none, True), 0)
                # At least one unit, so that the first token is kept.
                limit = tl.maximum((top_p * total.to(tl.float64)).to(tl.int64), 1)
                low = floor.to(tl.int32, bitcast=True).to(tl.int64)
                high = tl.full([], ONE_BITS + 1, tl.int64)
                floor = _find_threshold(source, floor, lowest, low, high, limit, True).to(tl.float32, bitcast=True)
            key = tl.load(keys + row).to(tl.uint64, bitcast=True)
            best, token = 1.0 / _exponential_times(_random_bits(key, first)), first
            start = 0
            while start < size:
                ids, x, weights = _candidates(source, start)
                kept = (weights >= floor) & (_ordered_int(x) >= lowest)
                best, token = _race_tokens(ids, tl.where(kept, weights, 0.0), key, best, token)
                start += LIST_CHUNK
        else:
            splits = tl.arange(0, PADDED_SPLITS)
            inside = splits < num_splits
            scores = tl.load(bests + row * num_splits + splits, mask=inside, other=0.0)
            ids = tl.load(winners + row * num_splits + splits, mask=inside, other=NO_TOKEN)
            token = tl.min(tl.where(scores == tl.max(scores, 0), ids, NO_TOKEN), 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(ok + row, is_finite.to(tl.uint8))


# ------------------------------------------------------------------------------------------------- parts of the kernels


@jit
def _load_logits(logits: tl.tensor, row: tl.tensor, row_stride: tl.tensor, ids: tl.tensor, inside: tl.tensor) -> Any:
    """Logits of the tokens `ids` as float32; minus infinity, as for masked tokens, where `inside` is false."""
    return tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)


@jit
def _row_maximum(
    maxima: tl.tensor, argmaxima: tl.tensor, row: tl.tensor, num_splits: tl.tensor, PADDED_SPLITS: tl.constexpr
) -> Any:
    """The row's maximum, infinite if the row has a NaN, and the first token with this logit."""
    splits = tl.arange(0, PADDED_SPLITS)
    inside = splits < num_splits
    tops = tl.load(maxima + row * num_splits + splits, mask=inside, other=float("-inf"))
    firsts = tl.load(argmaxima + row * num_splits + splits, mask=inside, other=NO_TOKEN)
    top = tl.max(tops, 0)
    return top, tl.min(tl.where(tops == top, firsts, NO_TOKEN), 0)


@jit
def _is_finite(top: tl.tensor) -> Any:
    return (top > float("-inf")) & (top < float("inf"))


@jit
def _needs_threshold(top_k: tl.tensor, top_p: tl.tensor, vocab_size: tl.tensor) -> Any:
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)


@jit
def _weights(x: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> Any:
    # The same instructions in all kernels, so that a token is on the same side of a threshold in all of them.
    return tl.exp(tl.div_rn(x - top, temperature))


@jit
def _row_mass(masses: tl.tensor, row: tl.tensor, num_splits: tl.tensor, PADDED_SPLITS: tl.constexpr) -> Any:
    """Sum of the weights of the row's tokens that min-p keeps, in units of 1 / UNIT."""
    splits = tl.arange(0, PADDED_SPLITS)
    return tl.sum(tl.load(masses + row * num_splits + splits, mask=splits < num_splits, other=0), 0)


@jit
def _floor(
    counts: tl.tensor,
    row: tl.tensor,
    total: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    vocab_size: tl.tensor,
) -> Any:
    """A lower bound of the weights of the tokens that all cuts keep.

    top-k keeps no token below the bucket in which the count from the top reaches k. Without top-k, top-p keeps no token
    below the bucket after which the sum of the lower weights is at most (1 - top_p) of the total. With top-k there is
    no bound from top-p, because the total weight of the tokens that top-k keeps is not known here.
    """
    buckets = tl.arange(0, NUM_BUCKETS)
    num = tl.load(counts + row * NUM_BUCKETS + buckets)
    last = tl.full([], NUM_BUCKETS - 1, tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        last = tl.minimum(last, tl.sum((tl.cumsum(num, 0) < top_k).to(tl.int32), 0))
    else:
        most = num.to(tl.float32) * _upper_edge(buckets)
        behind = tl.cumsum(most, 0, reverse=True) - most
        spare = ((1.0 - top_p) * (total.to(tl.float64) / UNIT)).to(tl.float32) * SUM_SLACK
        last = tl.minimum(last, tl.sum((behind > spare).to(tl.int32), 0))
    return tl.maximum(_upper_edge(last + 1) * SLACK, min_p)


@jit
def _upper_edge(buckets: tl.tensor) -> Any:
    """The largest weight of each bucket of the histogram."""
    return (tl.full([], ONE_BITS, tl.int32) - (buckets << BUCKET_SHIFT)).to(tl.float32, bitcast=True)


@jit
def _ordered_int(x: tl.tensor) -> Any:
    """Map float32 numbers to int32 numbers that have the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _candidates(source: tl.tuple, start: tl.tensor) -> Any:
    """Ids, logits and weights of the LIST_CHUNK candidates that begin at index `start`; weights are 0 after the last
    candidate.

    Args:
        source: description of the candidates: the listed tokens, or, without a list, the whole row.
    """
    logits, row, row_stride, row_listed, listed_size, size, top, temperature = source
    places = start + tl.arange(0, LIST_CHUNK)
    is_listed = places < listed_size
    ids = tl.where(is_listed, tl.load(row_listed + places, mask=is_listed, other=0), places)
    x = _load_logits(logits, row, row_stride, ids, places < size)
    return ids, x, _weights(x, top, temperature)


@jit
def _min_order(source: tl.tuple, min_weight: tl.tensor) -> Any:
    """The smallest `_ordered_int` of the logits of candidates whose weight is at least `min_weight`, as int64."""
    least = tl.full([LIST_CHUNK], 0x7FFFFFFF, tl.int32)
    start = 0
    while start < source[5]:
        _, x, weights = _candidates(source, start)
        least = tl.where(weights >= min_weight, tl.minimum(least, _ordered_int(x)), least)
        start += LIST_CHUNK
    return tl.min(least, 0).to(tl.int64)


@jit
def _amounts(
    source: tl.tuple, min_weight: tl.tensor, min_order: tl.tensor, thresholds: tl.tensor, BY_WEIGHT: tl.constexpr
) -> Any:
    """[NUM_THRESHOLDS] int64: for each threshold, the amount of the candidates at or above it that `min_weight` and
    `min_order` keep.

    BY_WEIGHT: the amount is the sum of the candidates' weights in units of 1 / UNIT, and thresholds apply to the
    weight's bits. Otherwise the amount is the number of candidates, and thresholds apply to the logit's `_ordered_int`.
    """
    amounts = tl.zeros([NUM_THRESHOLDS, LIST_CHUNK], dtype=tl.int64)
    start = 0
    while start < source[5]:  # Triton's interpreter has no `range` to a number from memory with NumPy 2.4
        _, x, weights = _candidates(source, start)
        orders = _ordered_int(x)
        kept = (weights >= min_weight) & (orders >= min_order)
        if BY_WEIGHT:
            orders = weights.to(tl.int32, bitcast=True)
            own = tl.where(kept, (weights * UNIT).to(tl.int64), 0)
        else:
            own = kept.to(tl.int64)
        amounts += tl.where(orders[None, :] >= thresholds[:, None], own[None, :], 0)
        start += LIST_CHUNK
    return tl.sum(amounts, 1)


@jit
def _find_threshold(
    source: tl.tuple,
    min_weight: tl.tensor,
    min_order: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    min_amount: tl.tensor,
    BY_WEIGHT: tl.constexpr,
) -> Any:
    """The highest threshold from `low` on at which `_amounts` reaches `min_amount`, or a threshold that keeps the same
    tokens.

    The result is below `high`, where the amount is too small. If no threshold reaches `min_amount`, the result is
    `low`.
    """
    steps = tl.arange(0, NUM_THRESHOLDS)
    while high - low > 1:
        step = (high - low + NUM_THRESHOLDS - 1) // NUM_THRESHOLDS
        thresholds = tl.minimum(low + (steps + 1) * step, high).to(tl.int32)
        amounts = _amounts(source, min_weight, min_order, thresholds, BY_WEIGHT)
        num_reached = tl.sum((amounts >= min_amount).to(tl.int32), 0)
        # If one threshold has exactly the amount, no token is between this threshold and the highest such threshold.
        is_exact = tl.max((amounts == min_amount).to(tl.int32), 0) > 0
        high = tl.minimum(low + (num_reached + 1) * step, high)
        low += num_reached * step
        high = tl.where(is_exact, low + 1, high)
    return low.to(tl.int32)


@jit
def _random_bits(key: tl.tensor, ids: tl.tensor) -> Any:
    """The random bits from which the clocks of the tokens `ids` are computed, by SplitMix64, see `race.py`."""
    x = key + (ids + 1).to(tl.uint64) * _STEP
    x = (x ^ (x >> _SHIFT_1)) * _MULTIPLIER_1
    x = (x ^ (x >> _SHIFT_2)) * _MULTIPLIER_2
    return x ^ (x >> _SHIFT_3)


@jit
def _exponential_times(bits: tl.tensor) -> Any:
    return -tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52)


@jit
def _race_tokens(ids: tl.tensor, weights: tl.tensor, key: tl.tensor, best: tl.tensor, winner: tl.tensor) -> Any:
    """The best score and its token among the tokens `ids` and the winner so far. Tokens of weight 0 are not in the
    race.

    Args:
        ids: [m] int32 tokens.
        weights: [m] float32 weights of the tokens.
        best: float64 score of `winner`: its weight divided by its clock.
    """
    bits = _random_bits(key, ids)
    rest = (0xFFFFFFFF - (bits >> 32).to(tl.uint32)).to(tl.float32)  # 1 - u >= rest * 2**-32
    contends = (weights > 0.0) & (weights >= best.to(tl.float32) * (rest * BOUND_SLACK))
    if tl.max(contends.to(tl.int32), 0) > 0:
        scores = tl.where(contends, weights.to(tl.float64) / _exponential_times(bits), 0.0)
        top = tl.max(scores, 0)
        first = tl.min(tl.where(scores == top, ids, NO_TOKEN), 0)
        is_better = (top > best) | ((top == best) & (first < winner))
        best = tl.where(is_better, top, best)
        winner = tl.where(is_better, first, winner)
    return best, winner
