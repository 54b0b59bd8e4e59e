"""Short and long forms of the tests.

`make test` runs the short form: a fixed choice of tests, with fixed seeds. `make test-all` (`pytest --long`) runs every
test in its long form. The long form also tries random seeds, which follow from the date or from `--explore`. Nothing
else decides which tests run.

A test module calls `short_or_long`, `seeds` and `short_of` when it is imported, after pytest has read its options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import pytest

SEEDS_PER_DATE = 100_000
"""Number of random seeds of each test per date; each date has different ones."""

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a pytest run, by its options."""

    is_long: bool
    explore: int
    """First random seed of the long form, divided by `SEEDS_PER_DATE`: a date such as 20261127."""


_form: Form | None = None
_report_progress: Callable[[str], None] | None = None


def choose(form: Form, report_progress: Callable[[str], None] | None = None) -> None:
    """Set the form of this run; `tests/conftest.py` calls this once, before any test module is imported.

    Args:
        form: of the run.
        report_progress: called with a text such as "seed 12 of 96" by tests that loop over seeds.
    """
    global _form, _report_progress
    _form, _report_progress = form, report_progress


def _chosen() -> Form:
    if _form is None:
        raise RuntimeError("the form of the tests is known only after pytest has read its options")
    return _form


def is_long() -> bool:
    """Whether this run has the long form of each test."""
    return _chosen().is_long


def short_or_long(short: int, long: int) -> int:
    """The number of cases in this run."""
    return long if is_long() else short


def short_of(cases: Collection[Any], short: Container[Any]) -> list[Any]:
    """Parameters of a test: all of `cases`; the short form runs those in `short`."""
    marked = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
    return [case if case in short else mark for case, mark in zip(cases, marked, strict=True)]


class Seeds(Sequence[int]):
    """Seeds of random workloads. A loop over them reports its progress."""

    def __init__(self, *runs: range) -> None:
        self._runs = [run for run in runs if run]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [seed for run in self._runs for seed in run][index]

    def __iter__(self) -> Iterator[int]:
        for run in self.runs(1):
            yield run.start

    def runs(self, size: int) -> Iterator[range]:
        """The seeds as ranges of at most `size` consecutive ones."""
        done = 0
        for run in self._runs:
            for start in range(0, len(run), size):
                if _report_progress is not None:
                    _report_progress(f"seed {done + 1} of {len(self)}")
                yield run[start : start + size]
                done += len(run[start : start + size])


def seeds(short: int, long: int, *, kept: Collection[int] = ()) -> Seeds:
    """The seeds of random workloads in this run.

    Args:
        short: the short form has the seeds 0 to `short` - 1.
        long: number of seeds of the long form: those of the short form, and random ones that follow from the date.
        kept: random seeds that once failed; both forms have them, in addition.
    """
    again = [range(seed, seed + 1) for seed in kept]
    if not is_long():
        return Seeds(range(short), *again)
    first = _chosen().explore * SEEDS_PER_DATE
    return Seeds(range(short), range(first, first + long - short), *again)


# ---------------------------------------------------------------------- shards


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of the tests, which several machines can share. Numbers start at 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "1/4".

        Raises:
            ValueError: the text is no shard.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"shard {text!r}: it must be K/N with 1 <= K <= N, such as 1/4")
        return cls(int(match[1]), int(match[2]))

    def of(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Every `count`th case, so that parameters of one test, which cost alike, spread over the shards."""
        return cases[self.number - 1 :: self.count]
