"""Does the short form leave out nothing for good? Consecutive commits take every part once."""

from __future__ import annotations

import pytest

from tests import soak
from tests.soak import TURNS, is_turn_of, part_of


@pytest.mark.parametrize(("num_cases", "num_parts"), [(104, 8), (71, 3), (2, 8), (0, 3)])
@pytest.mark.parametrize("first", [0, 1, 7, 2**160 - 1])
def test_consecutive_commits_take_every_case_once(num_cases: int, num_parts: int, first: int) -> None:
    cases = list(range(num_cases))
    taken = [case for number in range(first, first + num_parts) for case in part_of(cases, number, num_parts)]
    assert sorted(taken) == cases


@pytest.mark.parametrize("name", ["a", "tests/test_soak.py::b", "c[1-2]"])
def test_one_of_the_commits_in_a_row_has_a_test(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    turns = []
    for number in range(2 * TURNS):
        monkeypatch.setattr(soak, "_part_asked_for", lambda number=number: number)
        turns.append(is_turn_of(name))
    assert sum(turns[:TURNS]) == 1 and turns[TURNS:] == turns[:TURNS]
