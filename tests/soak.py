"""The short form of a test, which every run has, and the long one, which `make soak` has: POINTSMAN_SOAK=1.

A test that exists in the long form alone is marked `soak`, and so is a parameter that only the long form has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container
from typing import Any

import pytest

SOAK = os.environ.get("POINTSMAN_SOAK") == "1"


def short_or_long(short: int, long: int) -> int:
    """The number of cases that belongs to this run."""
    return long if SOAK else short


def short_of(cases: Collection[Any], short: Container[Any]) -> list[Any]:
    """Parameters of a test: all of `cases`, of which the short form runs those in `short`."""
    marked = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
    return [case if case in short else mark for case, mark in zip(cases, marked, strict=True)]
