"""The sampler equals a slow, obvious reference, draws the right distributions, and does not depend on the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core.state.output import OutputFields, SchedulerOutput
from pointsman.core.state.request import Request
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling.race import cut_min_p, cut_top_k, cut_top_p, derive_seed, probabilities
from pointsman.engine.sampling.sampler import Sampled, Sampler, choose_with_pytorch

BITS = (1 << 64) - 1


@dataclass
class SamplingRow:
    """One row of a step; the tokens `banned` become stop tokens that `min_tokens` excludes."""

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()


def row(seed: int = 0, position: int = 0, banned: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(seed=seed, **params), seed, position, banned)


def step_of(rows: list[SamplingRow]) -> tuple[SchedulerOutput, np.ndarray, np.ndarray]:
    """The arguments of `Sampler.sample` except the logits, for a step that admits a request for every row."""
    requests = []
    for index, one in enumerate(rows):
        least = one.position + 1 if one.banned else 0
        params = one.params
        if (params.seed, params.min_tokens) != (one.seed, least):
            params = replace(params, seed=one.seed, min_tokens=least, max_tokens=None)
        requests.append(
            Request(
                str(index),
                [3],
                arrival_time=0.0,
                max_tokens=one.position + 2,
                min_tokens=least,
                stop_token_ids=one.banned,
                metadata=params,
            )
        )
    n = len(rows)
    ones, none = np.ones(n, dtype=np.int64), np.zeros(0, dtype=np.int64)
    output: Any = OutputFields(
        step_id=0,
        total_num_scheduled_tokens=n,
        num_continued=0,
        resync=False,
        requests=tuple(requests),
        rows=np.arange(n),
        serials=np.arange(n) + 1,
        num_computed_tokens=ones - 1,
        num_scheduled_tokens=ones,
        samples=ones.astype(np.bool_),
        num_draft_tokens=ones - 1,
        draft_token_ids=none,
        completes=none,
        num_cached_tokens=ones - 1,
        num_external_tokens=ones - 1,
        is_resumed=np.zeros(n, dtype=np.bool_),
        block_ids=none,
        block_rows=none,
        encoder_inputs=(),
        freed_encoder_entries=(),
        preempted=[],
        finished=[],
    )
    return output, np.arange(n), np.array([one.position for one in rows], dtype=np.int64)


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> Sampled:
    """Sample tokens, and check that the races in PyTorch and in compiled code draw the same tokens."""
    sampler = Sampler(logits.shape[-1])
    batch = sampler.prepare(*step_of(rows))
    sampled = sampler.run(logits, batch)
    edited = logits.float() if batch.edits is None else batch.edits.apply(logits)
    tokens, ok = choose_with_pytorch(edited, batch)
    assert ok.tolist() == sampled.ok.tolist() and tokens[ok].tolist() == sampled.token_ids[ok].tolist()
    return sampled


def tokens_of(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    sampled = sample(logits, rows)
    assert sampled.ok.all()
    return sampled.token_ids.tolist()


# -------------------------------------------------------------------------------------------- the slow reference


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def slow_sample(logits: list[float], row: SamplingRow) -> int:
    """Draw the token of one row with Python's integers and floats, token by token."""
    params = row.params
    alive = [t for t in range(len(logits)) if t not in row.banned]
    if params.is_greedy:
        return max(alive, key=lambda t: (logits[t], -t))
    if 0 < params.top_k < len(logits):
        least = sorted((logits[t] if t in alive else -math.inf for t in range(len(logits))), reverse=True)
        alive = [t for t in alive if logits[t] >= least[params.top_k - 1]]
    top = max(logits[t] for t in alive)
    if params.min_p:
        alive = [t for t in alive if math.exp((logits[t] - top) / params.temperature) >= params.min_p]
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
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.2, "min_p": 0.1, "top_k": 9, "top_p": 0.9},
    ],
)
def test_sampled_tokens_equal_the_slow_reference(params: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(60, 53, generator=generator) * 2
    seeds = [0, 1, -5, 2**63, 2**64 + 3, 12345]
    rows = [row(seeds[i % 6], i * 31, (3, i % 53) if i % 4 == 0 else (), **params) for i in range(60)]
    expected = [slow_sample(one.tolist(), r) for one, r in zip(logits, rows, strict=True)]
    assert tokens_of(logits, rows) == expected
    assert len(set(expected)) > 20


def test_a_rows_token_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 301, generator=generator) * 3
    kinds = [{"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.6}, {"temperature": 0.5, "top_k": 20, "top_p": 0.9}, {}]
    rows = [row(i, 5 * i, (1, 2), **kinds[i % 5]) for i in range(40)]
    together = tokens_of(logits, rows)
    alone = [tokens_of(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    backwards = tokens_of(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_pytorch_and_compiled_code_draw_the_same_tokens(spread: float) -> None:
    """`sample` compares the two implementations. Logits are flat, usual or sharp, with many masked tokens in some
    rows."""
    random = np.random.default_rng(int(spread))
    logits = torch.randn(150, 900, generator=torch.Generator().manual_seed(5)) * spread
    logits[::5, random.permutation(900)[:880].copy()] = -math.inf
    rows = [
        row(
            i,
            i,
            temperature=float(random.choice([0.01, 0.6, 1.0, 5.0])),
            top_k=int(random.choice([0, 1, 2, 17, 400, 899, 900])),
            top_p=float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])),
            min_p=float(random.choice([0.0, 0.0, 0.001, 0.3, 1.0])),
        )
        for i in range(150)
    ]
    assert len(set(tokens_of(logits, rows))) > 50


# ------------------------------------------------------------------------------------------------- distributions


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("by", ["position", "seed"])
def test_tokens_are_drawn_with_their_probabilities(by: str) -> None:
    """Tokens are drawn at many positions with one seed, and with many seeds at one position. The limit 31.3 of the
    chi-squared statistic is that of 11 degrees of freedom at 0.1 %."""
    draws = 20_000
    logits = torch.linspace(-2, 1.5, 12).expand(draws, -1)
    params = [SamplingParams(temperature=0.9, seed=99)] * draws
    if by == "seed":
        params = [SamplingParams(temperature=0.9, seed=i) for i in range(draws)]
    rows = [SamplingRow(params[i], params[i].seed, i if by == "position" else 17) for i in range(draws)]
    counts = np.bincount(tokens_of(logits, rows), minlength=12)
    expected = torch.softmax(logits[0].double() / 0.9, dim=-1).numpy() * draws
    assert chi_square(counts, expected) < 31.3


def test_tokens_at_consecutive_positions_are_independent() -> None:
    """Pairs of tokens at neighbouring positions are counted. The limit 37.7 of the chi-squared statistic is that of 15
    degrees of freedom at 0.1 %."""
    draws = 20_000
    logits = torch.zeros(draws, 4)
    params = SamplingParams(seed=4)
    drawn = np.array(tokens_of(logits, [SamplingRow(params, 4, p) for p in range(draws)]))
    pairs = np.bincount(drawn[:-1:2] * 4 + drawn[1::2], minlength=16)
    assert chi_square(pairs, np.full(16, pairs.sum() / 16)) < 37.7


def test_top_k_top_p_and_min_p_keep_the_right_tokens() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    kept = cut_top_k(logits, [2, 0, 5, 1]).isfinite().sum(dim=-1).tolist()
    assert kept == [2, 5, 5, 1]
    kept = cut_min_p(logits - 4.0, [0.0, 0.1, 0.4, 1.0]).isfinite().sum(dim=-1).tolist()
    assert kept == [5, 3, 1, 1]
    probs = torch.tensor([[0.1, 0.5, 0.1, 0.3]]).repeat(5, 1)
    cut = cut_top_p(probs, [0.5, 0.51, 0.79, 1.0, 1e-9])
    assert (cut > 0).tolist() == [
        [False, True, False, False],
        [False, True, False, True],
        [False, True, False, True],
        [True, True, True, True],
        [False, True, False, False],
    ]


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    logits = torch.tensor([[-5e3, 4e4, 4e4 - 1.0]])
    probs = probabilities(logits, np.array([2e-5]), np.array([0]), np.array([1.0]), np.array([0.0]))
    assert torch.isfinite(probs).all() and probs.argmax() == 1
    assert tokens_of(logits, [row(temperature=2e-5)]) == [1]


def test_the_highest_temperature_draws_all_allowed_tokens() -> None:
    rows = [row(1, p, (2, 5), temperature=1e300) for p in range(300)]
    assert set(tokens_of(torch.linspace(-50, 50, 8).expand(300, -1), rows)) == {0, 1, 3, 4, 6, 7}


# ------------------------------------------------------------------------------------------------- special cases


def test_banned_tokens_are_never_sampled() -> None:
    logits = torch.zeros(500, 6)
    logits[:, 2] = 9.0
    rows = [row(1, p, (2, 4, 50_000), temperature=1.0 if p % 2 else 0.0) for p in range(500)]
    assert set(tokens_of(logits, rows)) <= {0, 1, 3, 5}
    assert logits[0, 2] == 9.0, "the caller's logits were changed"


def test_a_row_without_a_finite_maximum_fails_alone() -> None:
    logits = torch.zeros(5, 8)
    logits[:, 6] = 5.0
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    rows = [row(p, temperature=0.0 if p % 2 else 0.7, top_k=1) for p in range(5)]
    sampled = sample(logits, rows)
    assert sampled.ok.tolist() == [True, False, False, False, True]
    assert sampled.token_ids[[0, 4]].tolist() == [6, 6]


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(8, 64).bfloat16()
    rows = [row(p, p) for p in range(8)]
    assert tokens_of(logits, rows) == tokens_of(logits.float(), rows)


def test_derived_seeds_differ_by_request_and_by_engine() -> None:
    seeds = {derive_seed(seed, name) for seed in (0, 1) for name in ("a", "b", "1:a")}
    assert len(seeds) == 6 and all(0 <= seed <= BITS for seed in seeds)
    assert derive_seed(3, "x") == derive_seed(3, "x")
