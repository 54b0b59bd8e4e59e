"""Counts of drafts are the same whenever they are read."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.core.state.acceptance import Acceptance

MAX_DRAFTS = 3


@pytest.mark.parametrize("num_rows", [1, 7, 3_000, 40_000])
def test_draft_counts_are_added_up_exactly_once(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    rows = rng.permutation(2 * num_rows)[:num_rows]
    acceptance = Acceptance([0] * (1 + MAX_DRAFTS))
    verified, accepted = np.zeros(2 * num_rows, dtype=np.int64), np.zeros(2 * num_rows, dtype=np.int64)
    times = np.zeros(1 + MAX_DRAFTS, dtype=np.int64)
    for step in range(500 if num_rows < 1_000 else 30):
        if step % 220 == 20:
            rows = rows[::-1].copy()
        if (
            step % 90 < 45 or step % 7 == 0
        ):  # otherwise the array of the step before, as proposals of equal counts have it
            drafts = rng.integers(0, 1 + MAX_DRAFTS, size=num_rows)
        taken = rng.integers(0, 1 + drafts)
        acceptance.add_step(rows, drafts, 1 + taken)
        verified[rows] += drafts
        accepted[rows] += taken
        times += np.bincount(taken[drafts > 0], minlength=1 + MAX_DRAFTS)
        if step % 150 == 0:
            row = int(rows[step % num_rows])
            assert acceptance.counts_of(row) == (verified[row], accepted[row])
    assert acceptance.accepted_drafts == times.tolist()
    assert all(acceptance.release_row(row) == (verified[row], accepted[row]) for row in rows[:50].tolist())
    assert all(acceptance.counts_of(row) == (0, 0) for row in rows[:50].tolist())


def test_draft_counts_of_many_steps_are_complete_at_the_first_read() -> None:
    acceptance = Acceptance([0, 0])
    rows = np.array([4, 2])
    for _ in range(1_000):
        acceptance.add_step(rows, np.array([1, 0]), np.array([2, 1]))
    assert acceptance.counts_of(4) == (1_000, 1_000)
    assert acceptance.counts_of(2) == (0, 0)
    assert acceptance.counts_of(99) == (0, 0)
    acceptance.add_accepted(0)
    assert acceptance.accepted_drafts == [1, 1_000]
