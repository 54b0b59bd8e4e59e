"""The number of drafts: odds from observed tokens, costs from timed steps, and the choice."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.engine.drafts.draft_counts import LONGEST, MAX_NOTED, PRIOR, Odds, StepCost, choose_draft_counts


def line(base: float, slope: float, sizes: tuple[int, ...] = (1, 4, 9)) -> StepCost:
    cost = StepCost(lambda size: size)
    for turn in range(60):
        size = sizes[turn % len(sizes)]
        cost.observe(size, base + slope * size)
    return cost


def test_acceptance_odds_approach_the_observed_frequencies() -> None:
    odds = Odds()
    before = odds.probabilities([1, 2, 5], 3)
    assert before.shape == (3, 3)
    assert (np.diff(before, axis=1) < 0).all(), "later tokens are less likely"
    assert (np.diff(before[:, 0]) > 0).all(), "longer matches are more likely to continue"
    odds.observe_matches([2, -2] * 50 + [3] * 100)
    probabilities = odds.probabilities([2, 3], 2)
    assert probabilities[0, 0] == pytest.approx(0.5, abs=0.02)
    assert probabilities[1, 0] > 0.97
    assert probabilities[0, 1] == pytest.approx(probabilities[0, 0] * probabilities[1, 0]), (
        "the second token follows a longer match"
    )


def test_prior_odds_of_long_matches_depend_on_odds_of_short_matches() -> None:
    odds = Odds()
    before = odds.probability_by_length()
    assert before[1:] == pytest.approx([length / (length + 2) for length in range(1, LONGEST + 1)])
    odds.observe_matches([-2, -3] * 100)
    after = odds.probability_by_length()
    assert after[2] < 0.05
    assert after[4] < 0.25 < before[4] / 2, "no match of 4 tokens was seen"
    assert (np.diff(after[3:]) > 0).all()
    odds.observe_matches([4] * 100)
    assert odds.probability_by_length()[4] > 0.9, "observations outweigh the prior"


def test_max_gain_is_an_upper_bound_of_the_gain() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        odds = Odds()
        odds.observe_matches(rng.integers(-LONGEST - 3, LONGEST + 4, size=int(rng.integers(0, 400))).tolist())
        lengths = rng.integers(1, 2 * LONGEST, size=4).tolist()
        brings = [odds.probabilities(lengths, most).sum() for most in (1, 8, 200)]
        assert brings[0] <= brings[1] <= brings[2] <= odds.max_gain(lengths) * (1 + 1e-9)
        assert brings[2] == pytest.approx(odds.max_gain(lengths), rel=0.02)


def test_acceptance_odds_forget_old_observations() -> None:
    odds = Odds()
    odds.observe_matches([LONGEST] * 1000)
    odds.observe_matches([-LONGEST - 5] * int(MAX_NOTED))
    assert odds.probabilities([LONGEST + 50], 1)[0, 0] < 0.5
    assert PRIOR < MAX_NOTED


def test_step_cost_is_a_linear_fit_of_the_observed_steps() -> None:
    cost = line(2.0, 0.1)
    assert cost.seconds_between(1, 12) == pytest.approx(2.0 + 0.1 * np.arange(1, 13), rel=0.02)


def test_step_cost_depends_on_the_computed_rows() -> None:
    cost = StepCost(lambda size: -(-size // 8) * 8)
    for turn in range(60):
        cost.observe(3 + 10 * (turn % 2), 1.0 + 0.5 * (turn % 2))
    found = cost.seconds_between(1, 16)
    assert np.ptp(found[:8]) == np.ptp(found[8:]) == 0
    assert found[8] / found[7] == pytest.approx(1.5, rel=0.05)


def test_unobserved_steps_of_twice_the_tokens_cost_an_eighth_more() -> None:
    found = StepCost(lambda size: size).seconds_between(4, 8)
    assert found[-1] / found[0] == pytest.approx(1.125)


def test_step_cost_never_falls_with_tokens_and_is_not_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        cost = StepCost(lambda size: size)
        for _ in range(20):
            cost.observe(int(rng.integers(1, 70)), float(rng.exponential()) + 1e-6)
            found = cost.seconds_between(1, 80)
            assert (found > 0).all()
            assert (np.diff(found) >= 0).all()


def test_a_single_slow_step_hardly_changes_the_step_cost() -> None:
    cost = line(2.0, 0.1)
    cost.observe(9, 200.0)
    assert cost.seconds_between(9, 9)[0] < 1.2 * 2.9
    for _ in range(200):
        cost.observe(1, 5.0)
    assert cost.seconds_between(1, 1)[0] == pytest.approx(5.0, rel=0.05), "but a lasting change is"


def test_likely_drafts_are_chosen_where_tokens_cost_little() -> None:
    probabilities = np.array([[0.9, 0.8, 0.7], [0.1, 0.05, 0.01]])
    assert choose_draft_counts(probabilities, 2, line(2.0, 0.005)).tolist() == [3, 2], "drafts cost next to nothing"
    assert choose_draft_counts(probabilities, 2, line(1.0, 0.2)).tolist() == [3, 0]
    assert choose_draft_counts(probabilities, 2, line(0.0, 1.0)).tolist() == [0, 0], "a draft costs a whole step"


def test_chosen_draft_counts_give_the_most_tokens_per_second() -> None:
    """Compare with every number of drafts, in the order of their probabilities."""
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(200):
        count, most = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        probabilities = rng.random((count, most)).cumprod(axis=1)
        num_rows = count + int(rng.integers(0, 4))
        cost = line(1.0, float(rng.random()) * 0.3, (num_rows, num_rows + 4))
        counts = choose_draft_counts(probabilities, num_rows, cost)
        gained = sum(float(row[:n].sum()) for row, n in zip(probabilities, counts, strict=True))
        seconds = cost.seconds_between(num_rows, num_rows + count * most)
        speed = (num_rows + gained) / seconds[counts.sum()]
        speeds = (num_rows + np.concatenate([[0.0], np.sort(probabilities.ravel())[::-1].cumsum()])) / seconds
        if counts.sum():
            assert speed == pytest.approx(speeds.max())
            assert speed >= 1.05 * speeds[0]
        else:
            assert speeds.max() < 1.05 * speeds[0]
        seen.add(bool(counts.sum()))
    assert seen == {True, False}
