"""The short and the long form, seeds, and shards of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forms
from tests.forms import SEEDS_PER_DATE, Form, Seeds, Shard, seeds, short_of, short_or_long

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG = Form(is_long=False, explore=20261127), Form(is_long=True, explore=20261127)


def collected(*options: str) -> list[str]:
    """The tests that pytest would run with these options."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "tests/core/state"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^tests/.*::.*$", done.stdout, re.MULTILINE)


def use(monkeypatch: pytest.MonkeyPatch, form: Form | None) -> list[str]:
    """Set the form; progress reports arrive in the list."""
    reports: list[str] = []
    monkeypatch.setattr(forms, "_form", form)
    monkeypatch.setattr(forms, "_report_progress", reports.append)
    return reports


# ---------------------------------------------------------------------- shards


@given(st.lists(st.integers()), st.integers(1, 9))
def test_shards_together_contain_every_case_once(cases: list[int], count: int) -> None:
    shards = [Shard(number, count).of(cases) for number in range(1, count + 1)]
    assert sorted(case for shard in shards for case in shard) == sorted(cases)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_shards_of_collected_tests_are_disjoint_and_complete() -> None:
    whole = collected("--long")
    shards = [collected("--long", "--shard", f"{number}/2") for number in (1, 2)]
    assert len(whole) > 50 and sorted(chain(*shards)) == sorted(whole)


@pytest.mark.parametrize("text", ["", "4", "0/4", "5/4", "1/0", "1/x"])
def test_invalid_shard_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="it must be K/N with 1 <= K <= N, such as 1/4"):
        Shard.parse(text)


def test_every_test_file_belongs_to_one_part_of_the_suite() -> None:
    """`PART=core make test-all` and the others together are `make test-all`."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    parts = [
        word for _, words in re.findall(r"^TESTS_(\w+) := (.*)$", makefile, re.MULTILINE) for word in words.split()
    ]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        assert sum(name == part or name.startswith(f"{part}/") for part in parts) == 1, name


# ---------------------------------------------------------------------- forms


def test_the_short_test_run_has_fixed_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SHORT)
    assert list(seeds(3, 10)) == [0, 1, 2]
    assert list(seeds(3, 10, kept=(17,))) == [0, 1, 2, 17]
    assert short_or_long(1, 2) == 1


def test_the_long_test_run_adds_random_seeds_from_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, LONG)
    first = 20261127 * SEEDS_PER_DATE
    assert list(seeds(2, 5, kept=(17,))) == [0, 1, first, first + 1, first + 2, 17]
    assert len(seeds(2, 5, kept=(17,))) == 6
    assert short_or_long(1, 2) == 2


def test_reading_the_test_form_before_the_options_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    with pytest.raises(RuntimeError, match="only after pytest has read its options"):
        seeds(1, 2)


def test_cases_outside_the_short_list_are_marked_long() -> None:
    marks = [getattr(case, "marks", ()) for case in short_of(["a", "b"], ["b"])]
    assert [[mark.name for mark in each] for each in marks] == [["long"], []]


def test_a_test_loop_over_seeds_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = use(monkeypatch, SHORT)
    assert list(Seeds(range(3)).runs(2)) == [range(0, 2), range(2, 3)]
    assert reports == ["seed 1 of 3", "seed 3 of 3"]


# ---------------------------------------------------------------------- what a run prints

FAILING = """
import time
from tests.forms import seeds

def test_it():
    for seed in seeds(1, 3):
        time.sleep(SECONDS)
        assert seed == 0
"""


def test_a_failing_test_prints_its_seed_and_the_command_to_repeat_it(tmp_path: Path) -> None:
    """A long test also prints its progress."""
    (tmp_path / "conftest.py").write_text("import tests.conftest as base\nbase.SECONDS_BETWEEN_SIGNS = 0.5\n")
    (tmp_path / "test_it.py").write_text(FAILING.replace("SECONDS", "1.5"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "-n", "1", "--long", "--explore", "7", str(tmp_path / "test_it.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"::test_it: running for \d+ s, seed 2 of 3\n", done.stdout)
    assert re.search(r"\npython -m pytest --long --explore 7 \S*test_it.py::test_it\n +its seed: 700000\n", done.stdout)
    assert "long form; random seeds of 7\n" in done.stdout
