"""The short form of a test, which every run has, and the long one, which `make soak` has: POINTSMAN_SOAK=1.

A test that exists in the long form alone is marked `soak`, and so is a parameter that only the long form has. Where
cases are many and each finds something of its own, the short form takes a part of them, the next part with the next
commit. A test that takes seconds, of what few changes touch or of many cases alike, is marked `in_turn`: where all
tests are run, every fifth commit has it. The long form, too, has a third of what takes minutes: of the seeds of random
workloads (`seeds`), and of the tests that are marked `soak_in_turn`, if it runs a folder. POINTSMAN_PART=all has all,
in either form.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Collection, Container, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

SOAK = os.environ.get("POINTSMAN_SOAK") == "1"

TURNS = 3 if SOAK else 5
"""So many commits in a row have each test once that takes turns. If its parameters take turns themselves, the number of
their parts must have no divisor in common with this one, or some would never be run."""


def short_or_long(short: int, long: int) -> int:
    """The number of cases that belongs to this run."""
    return long if SOAK else short


def seeds(short: int, long: int) -> range:
    """The seeds of random workloads: the first `short` of them; in the long form a third of `long`, the next third with
    the next commit."""
    if not SOAK:
        return range(short)
    number = _part_asked_for()
    if number is None:
        return range(long)
    first, last = (long * (number % TURNS + more) // TURNS for more in (0, 1))
    return range(first, last)


def share_of_commit(cases: Sequence[Case]) -> Sequence[Case]:
    """The cases that have their turn, in the long form, too: others with the next commit."""
    number = _part_asked_for()
    return cases if number is None else part_of(cases, number, TURNS)


def is_turn_of(name: str) -> bool:
    """Whether the test (or the command) of this name has its turn, whatever others there are."""
    number = _part_asked_for()
    return number is None or (zlib.crc32(name.encode()) - number) % TURNS == 0


def short_of(cases: Collection[Any], short: Container[Any]) -> list[Any]:
    """Parameters of a test: all of `cases`, of which the short form runs those in `short`."""
    marked = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
    return [case if case in short else mark for case, mark in zip(cases, marked, strict=True)]


def part_of_commit(cases: Sequence[Case], num_parts: int) -> Sequence[Case]:
    """The cases of this run: all in the long form, otherwise one of `num_parts` parts of them (`part_number`)."""
    number = part_number()
    return cases if number is None else part_of(cases, number, num_parts)


def part_of(cases: Sequence[Case], number: int, num_parts: int) -> Sequence[Case]:
    """Every `num_parts`th case; consecutive numbers give every case once."""
    return cases[number % num_parts :: num_parts]


def part_number() -> int | None:
    """Which part this run takes (`_part_asked_for`); None: all of them, as in the long form if none is asked for."""
    return None if SOAK and not os.environ.get("POINTSMAN_PART") else _part_asked_for()


@cache
def _part_asked_for() -> int | None:
    """`POINTSMAN_PART`, a number, or None for "all"; without it the part that follows the one of the commit before.

    Where the history is not known, the commit's hash chooses.

    Raises:
        ValueError: `POINTSMAN_PART` is neither.
    """
    asked = os.environ.get("POINTSMAN_PART")
    if asked == "all":
        return None
    if asked:
        if not asked.isdecimal():
            raise ValueError(f"POINTSMAN_PART={asked}: it must be all, or a number")
        return int(asked)
    if _git("rev-parse", "--is-shallow-repository") == "false":
        return int(_git("rev-list", "--count", "HEAD"))
    return int(_git("rev-parse", "HEAD") or "0", 16)


def _git(*arguments: str) -> str:
    """What git says about this checkout; nothing where it is none, or where there is no git."""
    try:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
