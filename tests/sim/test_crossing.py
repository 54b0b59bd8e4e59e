"""Crossings: the load at which misses reach what is allowed, its interval, and figures as text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pointsman.sim.crossing import Interval, Misses, crossing, digits_text, mix, share_of_odds


def test_the_estimate_is_where_the_share_of_misses_crosses_what_is_allowed() -> None:
    rng, total = np.random.default_rng(1), np.full(10, 1000.0)
    loads = np.geomspace(1, 4, 12)
    odds = -6 + 5 * np.log(loads)
    shares = 1 / (1 + np.exp(-odds))
    misses = [
        Misses(load, rng.binomial(1000, share, 10).astype(float), total)
        for load, share in zip(loads, shares, strict=True)
    ]
    truth = math.exp((6 + math.log(0.05 / 0.95)) / 5)
    found = crossing(misses, 0.05, 0.9)
    assert found.low <= truth <= found.high and found.excess < 0.1
    wider = crossing(misses, 0.05, 0.99)
    assert wider.low < found.low and wider.high > found.high
    assert crossing(misses[:2], 0.5, 0.9).value == math.inf
    assert crossing(misses[-2:], 1e-4, 0.9).value == 0


def test_few_requests_without_a_miss_are_within_the_targets() -> None:
    """Ten requests cannot show that one in a hundred misses: the estimate says yes, the interval begins at 0."""
    total = np.full(2, 5.0)
    misses = [Misses(1.0, np.zeros(2), total), Misses(2.0, np.array([2.0, 1.0]), total)]
    found = crossing(misses, 0.01, 0.9)
    assert 1 <= found.value < 1.1 and found.low == 0


def test_equally_plausible_models_have_an_interval_over_all_of_them() -> None:
    one = Interval(10, 9, 11)
    assert mix(one, [], 8, 0.9) == one
    assert mix(one, [0.0, 0.0], 8, 0.9).low == pytest.approx(9, rel=0.01)
    both = mix(one, [math.log(1.5), math.log(0.5)], 8, 0.9)
    assert 4.5 < both.low < 5.5 and 14 < both.high < 17
    assert mix(one, [-math.inf], 8, 0.9).low == 0


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((1.3512, 1.21, 1.62), ("1.4", "1.2", "1.6")),
        ((14.6, 12.9, 16.6), ("15", "13", "17")),
        ((1234, 1100, 1400), ("1,200", "1,100", "1,400")),
        ((0.0034, 0.0031, 0.0036), ("0.0034", "0.0031", "0.0036")),
        ((10, 3, 28), ("10", "3", "28")),
        ((5, 2, math.inf), ("5", "2", "no limit")),
        ((math.inf, 3.5, math.inf), ("no limit", "4", "no limit")),
        ((math.inf, 0, math.inf), ("no limit", "0", "no limit")),
        ((0, 0, 0), ("0", "0", "0")),
    ],
)
def test_a_figure_has_as_many_digits_as_its_interval_supports(
    figures: tuple[float, float, float], text: tuple[str, str, str]
) -> None:
    assert digits_text(*figures) == text


def test_intervals_hold_the_load_in_about_nine_of_ten_trials() -> None:
    """Groups differ in their level, as samples of a queue do: some have most of the misses."""
    rng, loads, total = np.random.default_rng(4), np.geomspace(1, 3, 9), np.full(8, 400.0)
    middle, sigma = -5.0, 0.6
    nodes = rng.normal(0, sigma, 20_000)
    truth = loads[-1]
    for load in np.geomspace(1, 3, 400):  # the mean share of all groups, by integration over their levels
        if np.mean(1 / (1 + np.exp(-(middle + 4 * math.log(load) + nodes)))) >= 0.05:
            truth = load
            break
    num_held = 0
    for _ in range(200):
        levels = rng.normal(0, sigma, 8)
        misses = []
        for load in loads:
            shares = 1 / (1 + np.exp(-(middle + 4 * math.log(load) + levels)))
            misses.append(Misses(float(load), rng.binomial(400, shares).astype(float), total))
        found = crossing(misses, 0.05, 0.9)
        num_held += found.low <= truth <= found.high
    assert 165 <= num_held <= 200


def test_one_group_gives_no_interval_but_an_estimate() -> None:
    misses = [Misses(load, np.array([late]), np.array([100.0])) for load, late in ((1.0, 1.0), (2.0, 20.0))]
    found = crossing(misses, 0.05, 0.9)
    assert 1 < found.value < 2
    assert (found.low, found.high) == (0, math.inf)
    assert found.excess == math.inf


@pytest.mark.parametrize(("odds", "share"), [(0.0, 0.5), (-1000.0, 0.0), (math.log(3), 0.75)])
def test_odds_become_shares(odds: float, share: float) -> None:
    assert share_of_odds(odds) == pytest.approx(share)
