"""The sampler against a slow, obvious reference, against the distributions it claims, and against its own batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pointsman.engine.sampler import SamplingRow, cut_top_k, cut_top_p, derive_seed, probabilities, sample
from pointsman.engine.sampling_params import SamplingParams

BITS = (1 << 64) - 1


def row(seed: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, position, banned)


def tokens_of(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    tokens, ok = sample(logits, rows)
    assert ok.all()
    return tokens.tolist()


# -------------------------------------------------------------------------------------------- the slow reference


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def slow_sample(logits: list[float], row: SamplingRow) -> int:
    """One token at a time, with Python's integers and floats."""
    params = row.params
    alive = [t for t in range(len(logits)) if t not in row.banned]
    if params.is_greedy:
        return max(alive, key=lambda t: (logits[t], -t))
    if 0 < params.top_k < len(logits):
        least = sorted((logits[t] if t in alive else -math.inf for t in range(len(logits))), reverse=True)
        alive = [t for t in alive if logits[t] >= least[params.top_k - 1]]
    top = max(logits[t] for t in alive)
    weight = {t: math.exp((logits[t] - top) / params.temperature) for t in alive}
    total = sum(weight.values())
    if params.top_p < 1:
        kept, reached = [], 0.0
        for t in sorted(alive, key=lambda t: -weight[t]):
            if reached >= params.top_p:
                break
            kept.append(t)
            reached += weight[t] / total
        alive = kept
    key = mix((mix(row.seed & BITS) + row.position * 0xD1B54A32D192ED03) & BITS)
    clocks = {}
    for t in alive:
        bits = mix((key + (t + 1) * 0x9E3779B97F4A7C15) & BITS)
        clocks[t] = -math.log(((bits >> 12) + 0.5) / 2**52) / weight[t]
    return min(clocks, key=clocks.__getitem__)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 11, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 1},
    ],
)
def test_equals_the_slow_reference(params: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(60, 53, generator=generator) * 2
    seeds = [0, 1, -5, 2**63, 2**64 + 3, 12345]
    rows = [row(seeds[i % 6], i * 31, (3, i % 53) if i % 4 == 0 else (), **params) for i in range(60)]
    expected = [slow_sample(one.tolist(), r) for one, r in zip(logits, rows, strict=True)]
    assert tokens_of(logits, rows) == expected
    assert len(set(expected)) > 20


def test_rows_of_all_kinds_share_a_batch_without_touching_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 301, generator=generator) * 3
    kinds = [{"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.6}, {"temperature": 0.5, "top_k": 20, "top_p": 0.9}, {}]
    rows = [row(i, 5 * i, (1, 2), **kinds[i % 5]) for i in range(40)]
    together = tokens_of(logits, rows)
    alone = [tokens_of(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    backwards = tokens_of(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


# ------------------------------------------------------------------------------------------------- distributions


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("by", ["position", "seed"])
def test_tokens_come_with_their_probabilities(by: str) -> None:
    """Over positions of one seed as over seeds at one position; 11 degrees of freedom, 0.1 % point 31.3."""
    draws = 30_000
    logits = torch.linspace(-2, 1.5, 12).expand(draws, -1)
    params = SamplingParams(temperature=0.9)
    rows = [SamplingRow(params, 99 if by == "position" else i, i if by == "position" else 17) for i in range(draws)]
    counts = np.bincount(tokens_of(logits, rows), minlength=12)
    expected = torch.softmax(logits[0].double() / 0.9, dim=-1).numpy() * draws
    assert chi_square(counts, expected) < 31.3


def test_consecutive_positions_are_independent() -> None:
    """Pairs of tokens at neighbouring positions; 15 degrees of freedom, 0.1 % point 37.7."""
    draws = 20_000
    logits = torch.zeros(draws, 4)
    params = SamplingParams()
    drawn = np.array(tokens_of(logits, [SamplingRow(params, 4, p) for p in range(draws)]))
    pairs = np.bincount(drawn[:-1:2] * 4 + drawn[1::2], minlength=16)
    assert chi_square(pairs, np.full(16, pairs.sum() / 16)) < 37.7


def test_cuts_keep_what_they_say() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    kept = cut_top_k(logits, [2, 0, 5, 1]).isfinite().sum(dim=-1).tolist()
    assert kept == [2, 5, 5, 1]
    probs = torch.tensor([[0.1, 0.5, 0.1, 0.3]]).repeat(5, 1)
    cut = cut_top_p(probs, [0.5, 0.51, 0.79, 1.0, 1e-9])
    assert (cut > 0).tolist() == [
        [False, True, False, False],
        [False, True, False, True],
        [False, True, False, True],
        [True, True, True, True],
        [False, True, False, False],
    ]


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[-5e3, 4e4, 4e4 - 1.0]])
    probs = probabilities(logits, [row(temperature=2e-5)])
    assert torch.isfinite(probs).all() and probs.argmax() == 1
    assert tokens_of(logits, [row(temperature=2e-5)]) == [1]


# ------------------------------------------------------------------------------------------------- special cases


def test_banned_tokens_never_come_and_ids_beyond_the_vocabulary_do_no_harm() -> None:
    logits = torch.zeros(500, 6)
    logits[:, 2] = 9.0
    rows = [row(1, p, (2, 4, 50_000), temperature=1.0 if p % 2 else 0.0) for p in range(500)]
    assert set(tokens_of(logits, rows)) <= {0, 1, 3, 5}
    assert logits[0, 2] == 9.0, "the caller's logits were changed"


def test_a_row_without_a_finite_maximum_is_reported_and_the_others_are_drawn() -> None:
    logits = torch.zeros(5, 8)
    logits[:, 6] = 5.0
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    rows = [row(p, temperature=0.0 if p % 2 else 0.7, top_k=1) for p in range(5)]
    tokens, ok = sample(logits, rows)
    assert ok.tolist() == [True, False, False, False, True]
    assert tokens[[0, 4]].tolist() == [6, 6]


def test_half_precision_logits_are_drawn_in_full() -> None:
    logits = torch.randn(8, 64).bfloat16()
    rows = [row(p, p) for p in range(8)]
    assert tokens_of(logits, rows) == tokens_of(logits.float(), rows)


def test_derived_seeds_differ_by_request_and_by_engine() -> None:
    seeds = {derive_seed(seed, name) for seed in (0, 1) for name in ("a", "b", "1:a")}
    assert len(seeds) == 6 and all(0 <= seed <= BITS for seed in seeds)
    assert derive_seed(3, "x") == derive_seed(3, "x")
