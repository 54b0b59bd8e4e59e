"""Draws tokens by a race of exponential clocks; all randomness is a pure function of (seed, position, token).

No random generator must be stored, restored or rewound. So a seeded request gets the same tokens alone or in a batch,
chunked or not, preempted or not.

    key      = mix(mix(s) + p * POSITION_STEP)                  one 64-bit number per row
    bits     = mix(key + (t + 1) * TOKEN_STEP)                  SplitMix64: a counter through a mixing function
    uniform  = (top 52 bits + 1/2) / 2**52                      strictly between 0 and 1, exact in float64
    clock    = -log(uniform)                                    exponentially distributed
    token    = argmax over t of probability[t] / clock          the clock that rings first

The race of exponential clocks draws t with exactly its probability (it is the Gumbel-max trick with one logarithm).
Inverting the cumulative distribution would need only one random number per row. But then a rounding difference of 1e-7
in one logit would move all boundaries. In the race, such a difference moves one score. So the other rows of a batch
rarely change a row's token by rounding. And because every token has its own clock, tokens that are cut can be omitted
from the race.

This module has the implementation in PyTorch, for any device. `race_kernels.py` has the implementation compiled for the
CPU, and `race_triton.py` that for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.engine.arrays import Int64Array, UInt64Array

MASK_64 = (1 << 64) - 1
TOKEN_STEP = 0x9E3779B97F4A7C15
POSITION_STEP = 0xD1B54A32D192ED03
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of SplitMix64
SHIFTS = (30, 27, 31)
RACE_ELEMENTS = 1 << 16
"""Number of clocks that are drawn in one operation, so that they stay in the processor's cache."""


# ------------------------------------------------------------------------------------------------------------- keys


def derive_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request whose parameters have no seed: 64 bits from the engine's seed and the request's id."""
    digest = blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix_seed(seed: int) -> np.uint64:
    """The part of a row's key that is the same at all positions."""
    mixed: np.uint64 = mix_array(np.array([seed & MASK_64], dtype=np.uint64))[0]
    return mixed


def row_keys(mixed_seeds: UInt64Array, positions: npt.NDArray[np.integer]) -> UInt64Array:
    """[n] uint64: the keys from which the rows' clocks are drawn, computed from each row's `mix_seed` and token
    position."""
    return mix_array(mixed_seeds + positions.astype(np.uint64) * np.uint64(POSITION_STEP))


def mix_array(x: UInt64Array) -> UInt64Array:
    """SplitMix64's mixing function on uint64; arithmetic wraps."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(SHIFTS[2]))


# -------------------------------------------------------------------------------------------------- any device: cuts


def probabilities(
    logits: Tensor,
    temperature: npt.NDArray[np.floating],
    top_k: Int64Array,
    top_p: npt.NDArray[np.floating],
    min_p: npt.NDArray[np.floating],
) -> Tensor:
    """[n, vocab_size] float32 probabilities after temperature, then min-p, top-k and top-p; 0 for tokens that are cut.

    After top-p the probabilities of a row may sum to less than 1, because the race does not need normalized
    probabilities. Tokens that tie with the last kept token are kept.

    Args:
        logits: [n, vocab_size] float32.
        temperature, top_k, top_p, min_p: [n] parameters of the rows, as in `SamplingParams`; every temperature is above
            0.
    """
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    # The maximum is subtracted first, so that a very small temperature cannot overflow.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / divisor[:, None]
    scaled = cut_min_p(scaled, min_p)
    scaled = cut_top_k(scaled, top_k)
    return cut_top_p(torch.softmax(scaled, dim=-1), top_p)


def cut_min_p(scaled: Tensor, min_p: Sequence[float] | npt.NDArray[np.floating]) -> Tensor:
    """Set logits of tokens that are less than min_p times as likely as the most likely token to minus infinity. The
    maximum of each row of `scaled` is 0."""
    if not any(p > 0 for p in min_p):
        return scaled
    least = torch.as_tensor(np.asarray(min_p), dtype=torch.float32, device=scaled.device).log()
    return scaled.masked_fill(scaled < least[:, None], float("-inf"))


def cut_top_k(logits: Tensor, top_k: Sequence[int] | Int64Array) -> Tensor:
    """Set logits below each row's k-th largest logit to minus infinity. A k of 0, -1 or the vocabulary's size turns
    this off."""
    vocab_size = logits.shape[-1]
    limits = [int(k) if 0 < k < vocab_size else 0 for k in top_k]
    most = max(limits)
    if not most:
        return logits
    k = torch.tensor(limits, device=logits.device)
    largest = logits.topk(most, dim=-1).values
    threshold = largest.gather(1, (k - 1).clamp(min=0)[:, None])
    return logits.masked_fill((logits < threshold) & (k > 0)[:, None], float("-inf"))


def cut_top_p(probs: Tensor, top_p: Sequence[float] | npt.NDArray[np.floating]) -> Tensor:
    """Set probabilities to 0 outside each row's nucleus: the smallest set of most likely tokens, at least one, whose
    probabilities sum to the row's top_p."""
    cut = [i for i, p in enumerate(top_p) if p < 1.0]
    if not cut:
        return probs
    index = torch.tensor(cut, device=probs.device)
    limit = torch.tensor([float(top_p[i]) for i in cut], dtype=torch.float64, device=probs.device)
    some = probs[index]
    ordered = some.sort(dim=-1, descending=True).values
    before = ordered.double().cumsum(dim=-1) - ordered  # probability of all more likely tokens
    num_kept = (before < limit[:, None]).sum(dim=-1).clamp(min=1)
    threshold = ordered.gather(1, (num_kept - 1)[:, None])
    return probs.index_copy(0, index, some.masked_fill(some < threshold, 0.0))


# -------------------------------------------------------------------------------------------------- any device: race


def draw(probs: Tensor, keys: UInt64Array) -> Tensor:
    """Draw one token per row; the chance of a token is proportional to its probability.

    Args:
        probs: [n, vocab_size] probabilities, at least one of them positive in each row.
        keys: [n] uint64 keys of the rows, from `row_keys`.

    Returns:
        [n] int64 tokens.
    """
    num_rows, vocab_size = probs.shape
    states = torch.from_numpy(keys.view(np.int64)).to(probs.device)
    counters = torch.arange(1, vocab_size + 1, device=probs.device) * _signed(TOKEN_STEP)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    at_once = max(1, RACE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        bits = mix_tensor(states[part, None] + counters)
        uniform = _shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
        tokens[part] = (probs[part].double() / uniform.log_().neg_()).argmax(dim=-1)
    return tokens


def mix_tensor(x: Tensor) -> Tensor:
    """`mix_array` for int64 tensors, whose products wrap in the same way. The argument is changed in place."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x.bitwise_xor_(_shift(x, shift)).mul_(_signed(multiplier))
    return x.bitwise_xor_(_shift(x, SHIFTS[2]))


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's shift of signed integers copies the sign bit, so the copies are masked off."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
