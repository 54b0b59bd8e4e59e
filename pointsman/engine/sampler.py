"""The sampler: from logits to tokens, for all rows of a step at once.

Randomness is counter-based. The draw for token t at position p of a request with seed s is a pure function of
(s, p, t), so a seeded request gets the same tokens alone or in a batch, chunked or not, preempted or not, and no
generator has to be stored, restored or rewound.

    key      = mix(mix(s) + p * POSITION_STEP)                  one 64-bit number per row
    bits     = mix(key + (t + 1) * TOKEN_STEP)                  SplitMix64: a counter through a mixing function
    uniform  = (top 52 bits + 1/2) / 2**52                      strictly between 0 and 1, exact in float64
    clock    = -log(uniform)                                    exponentially distributed
    token    = argmax over t of probability[t] / clock          the clock that rings first

The race of exponential clocks draws t with exactly its probability (it is the Gumbel-max trick with one logarithm).
Compared with a walk through the cumulative distribution it needs a draw per token, but a rounding difference of 1e-7
in one logit then moves one boundary and not all of them, so tokens survive a change of batch composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.engine.sampling_params import SamplingParams

MASK_64 = (1 << 64) - 1
TOKEN_STEP = 0x9E3779B97F4A7C15
POSITION_STEP = 0xD1B54A32D192ED03
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64's
SHIFTS = (30, 27, 31)
RACE_ELEMENTS = 1 << 16
"""Clocks drawn at once, so that the passes over them stay in cache."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row needs: `position` is the place in the sequence of the token to be drawn."""

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()
    """Tokens that must not be drawn (EOS and stop tokens before `min_tokens`)."""


def derive_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that gave none: 64 bits from the engine's seed and the request's id."""
    digest = blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, vocab_size], any floating dtype.
        rows: n of them.

    Returns:
        tokens [n] int64, and ok [n] bool: False where the logits had no finite maximum, so the token means nothing.
    """
    logits = ban(logits.float(), rows)
    top, tokens = logits.max(dim=-1)
    random_rows = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if random_rows:
        some = len(random_rows) < len(rows)
        index = torch.tensor(random_rows, device=logits.device)
        chosen = [rows[i] for i in random_rows] if some else rows
        drawn = draw(probabilities(logits[index] if some else logits, chosen), row_keys(chosen))
        tokens = tokens.index_copy(0, index, drawn)
    return tokens, torch.isfinite(top)


def ban(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits with each row's banned tokens at minus infinity; the input itself if there are none."""
    pairs = [(i, token) for i, row in enumerate(rows) for token in row.banned if token < logits.shape[-1]]
    if not pairs:
        return logits
    index = torch.tensor(pairs, device=logits.device)
    banned = logits.clone()
    banned[index[:, 0], index[:, 1]] = float("-inf")
    return banned


def probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[n, vocab_size] float32 probabilities after temperature, then top-k, then top-p; 0 for what is cut.

    They need not sum to 1 after top-p: the race does not care. Tokens that tie with the last one kept are kept.
    """
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=logits.device)
    # The maximum is taken off first, so that a very small temperature cannot overflow.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None]
    scaled = cut_top_k(scaled, [row.params.top_k for row in rows])
    return cut_top_p(torch.softmax(scaled, dim=-1), [row.params.top_p for row in rows])


def cut_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """Minus infinity below each row's k-th largest logit; 0, -1 and the whole vocabulary turn it off."""
    vocab_size = logits.shape[-1]
    limits = [k if 0 < k < vocab_size else 0 for k in top_k]
    most = max(limits)
    if not most:
        return logits
    k = torch.tensor(limits, device=logits.device)
    largest = logits.topk(most, dim=-1).values
    threshold = largest.gather(1, (k - 1).clamp(min=0)[:, None])
    return logits.masked_fill((logits < threshold) & (k > 0)[:, None], float("-inf"))


def cut_top_p(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """0 outside each row's smallest set of most likely tokens that sums to its top_p (one token at least)."""
    cut = [i for i, p in enumerate(top_p) if p < 1.0]
    if not cut:
        return probs
    index = torch.tensor(cut, device=probs.device)
    limit = torch.tensor([top_p[i] for i in cut], dtype=torch.float64, device=probs.device)
    some = probs[index]
    ordered = some.sort(dim=-1, descending=True).values
    before = ordered.double().cumsum(dim=-1) - ordered  # probability of everything more likely
    num_kept = (before < limit[:, None]).sum(dim=-1).clamp(min=1)
    threshold = ordered.gather(1, (num_kept - 1)[:, None])
    return probs.index_copy(0, index, some.masked_fill(some < threshold, 0.0))


def draw(probs: Tensor, keys: Tensor) -> Tensor:
    """One token per row, drawn by its probability.

    Args:
        probs: [n, vocab_size], at least one positive per row.
        keys: [n] int64, see `row_keys`.

    Returns:
        [n] int64.
    """
    num_rows, vocab_size = probs.shape
    counters = torch.arange(1, vocab_size + 1, device=probs.device) * _signed(TOKEN_STEP)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    at_once = max(1, RACE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        bits = mix_tensor(keys[part, None] + counters)
        uniform = _shift(bits, 12).double().add_(0.5).mul_(2.0**-52)
        tokens[part] = (probs[part].double() / uniform.log_().neg_()).argmax(dim=-1)
    return tokens


def row_keys(rows: Sequence[SamplingRow]) -> Tensor:
    """[n] int64: the state from which each row's clocks are drawn."""
    seeds = np.array([row.seed & MASK_64 for row in rows], dtype=np.uint64)
    positions = np.array([row.position for row in rows], dtype=np.uint64)
    return torch.from_numpy(mix_array(mix_array(seeds) + positions * np.uint64(POSITION_STEP)).view(np.int64))


def mix_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's mixing function on uint64; arithmetic wraps."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(SHIFTS[2]))


def mix_tensor(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose products wrap alike; changes its argument."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x.bitwise_xor_(_shift(x, shift)).mul_(_signed(multiplier))
    return x.bitwise_xor_(_shift(x, SHIFTS[2]))


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's shift of signed integers copies the sign, so its bits are masked off."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
