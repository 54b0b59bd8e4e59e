"""NgramLookup: earlier occurrences of a request's tokens, and the expected continuation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.engine.drafts import ngram_lookup
from pointsman.engine.drafts.ngram_lookup import NgramLookup, look_up


def lookup_of(tokens: list[int], min_ngram: int = 1, max_ngram: int = 3) -> NgramLookup:
    return NgramLookup(np.array(tokens, dtype=np.int32), min_ngram, max_ngram)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),
        ([7, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),
        ([1, 2, 8, 5, 2, 9, 1, 2], [8, 5, 2]),  # the longer suffix is used
        ([5, 2, 6, 2, 7, 2], [7, 2, 7]),  # the last of several places; behind the end it repeats
        ([1, 1, 1, 1], [1, 1, 1]),
        ([4, 5, 4, 5, 4], [5, 4, 5]),
    ],
)
def test_the_continuation_of_the_longest_suffix_is_expected(tokens: list[int], drafts: list[int]) -> None:
    found = lookup_of(tokens)
    assert found.length > 0
    assert list(found.expected_tokens(3)) == drafts


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1], [0, 0, 0][:1], []])
def test_no_token_is_expected_after_a_new_ngram(tokens: list[int]) -> None:
    assert lookup_of(tokens).length == 0


def test_suffixes_shorter_than_min_ngram_are_not_looked_up() -> None:
    tokens = [5, 2, 6, 1, 2]
    assert lookup_of(tokens, 2, 3).length == 0
    assert look_up(np.array(tokens, dtype=np.int32), 1, 3) == (2, 1)
    assert look_up(np.array([9, 1, 2, 7, 9, 1, 2], dtype=np.int32), 2, 2) == (3, 2), "longer suffixes are not looked up"


def test_the_match_grows_while_expected_tokens_follow() -> None:
    one = lookup_of([1, 2, 3, 4, 5, 6, 9, 1, 2], 2, 3)
    assert one.length == 2
    assert one.append([3, 4]) == [2, 3]
    assert (one.length, list(one.expected_tokens(3))) == (4, [5, 6, 9])
    assert one.append([5, 8]) == [4, -5]
    assert one.length == 0
    assert one.append([7]) == []
    assert one.append([3]) == []
    assert one.append([4]) == [], "the pair was there before, and is found again"
    assert list(one.expected_tokens(2)) == [5, 8]


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 4), (2, 5), (3, 3), (4, 6)])
def test_tokens_may_be_appended_one_by_one_or_together(min_ngram: int, max_ngram: int) -> None:
    """The filter has no false negatives and its false positives change no result, also after it is rebuilt."""
    rng = np.random.default_rng(min_ngram * 10 + max_ngram)
    tokens = rng.integers(0, 5, size=40).tolist()
    one = lookup_of(tokens, min_ngram, max_ngram)
    found = 0
    while len(tokens) < 1600:
        expected = one.expected_tokens(1)[0] if one.length else None
        newest = rng.integers(0, 40, size=rng.integers(1, 4)).tolist()
        if rng.random() < 0.2:
            start = int(rng.integers(0, len(tokens) - 12))
            newest = tokens[start : start + 7]
        if expected is not None and rng.random() < 0.3:
            newest[0] = expected
        judged = one.append(newest)
        assert (expected is not None) == bool(judged)
        assert expected is None or (judged[0] > 0) == (newest[0] == expected)
        tokens += newest
        assert len(one) == len(tokens)
        place, length = look_up(np.array(tokens, dtype=np.int32), min_ngram, max_ngram)
        assert bool(one.length) == bool(length)
        if length and not (judged and judged[-1] > 0):
            assert (one.length, one.expected_tokens(1)[0]) == (length, tokens[place])
            found += 1
    assert one.tolist() == tokens
    assert found > 10


def test_new_ngrams_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter with eight bytes per token stops most new n-grams."""
    calls = 0

    def counted(*arguments: Any) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return look_up(*arguments)

    monkeypatch.setattr(ngram_lookup, "look_up", counted)
    one = lookup_of(list(range(100, 200)), 2, 5)
    for token in range(1000, 3000):
        one.append([token])
    assert one.length == 0
    assert calls < 400
