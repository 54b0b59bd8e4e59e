"""Broken copies of every file that is read: an error of one line that names the file, in little time and memory.

`tests/mutations.py` breaks the files, `tests/broken_files.py` reads them in a process of its own. A failure names the
reader and the number of the mutation; `python -m tests.broken_files READER NUMBER NUMBER+1` repeats it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broken_files import MAX_BYTES, MAX_SECONDS, READERS
from tests.forms import short_or_long
from tests.mutations import OF_STRUCTURE, mutated

ROOT = Path(__file__).parents[1]
NUM_MUTATIONS = short_or_long(60, 2000)
SLOW = 10
"""Readers of models and commands take so many times as long, so that the short form has fewer of their mutations."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured as Linux shows it")


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_broken_files_are_refused(name: str) -> None:
    is_slow = name.startswith(("model", "command"))
    count = NUM_MUTATIONS // short_or_long(SLOW, 1) if is_slow else NUM_MUTATIONS
    finished = subprocess.run(
        [sys.executable, "-m", "tests.broken_files", name, "0", str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + 2 * count,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    assert not found["failures"], "\n".join(found["failures"])
    assert found["accepted"] + found["refused"] == count
    assert found["refused"] > count // 20, "these mutations break nothing"
    assert found["longest_seconds"] < MAX_SECONDS and found["peak_megabytes"] < MAX_BYTES // 10**6


def test_a_mutation_is_the_same_each_time() -> None:
    data = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    for structure in (*OF_STRUCTURE, "lines", "binary"):
        broken = [mutated(data, structure, index) for index in range(200)]  # type: ignore[arg-type]
        assert broken == [mutated(data, structure, index) for index in range(200)]  # type: ignore[arg-type]
        assert sum(each != data for each in broken) > 150
