"""Every reader of files refuses broken copies with a one-line error that names the file, in little time and memory.

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
from tests.forms import is_long, short_or_long
from tests.mutations import OF_STRUCTURE, mutated

ROOT = Path(__file__).parents[1]
NUM_MUTATIONS = short_or_long(60, 2000)
SLOW = ("model", "command")
"""Prefixes of the names of slow readers; the short form has a tenth of their mutations."""


def groups() -> list[list[str]]:
    """The readers by process: one each in the long form; few processes in the short form, as imports take most of the
    time."""
    if is_long():
        return [[name] for name in READERS]
    slow = [[name for name in READERS if name.startswith(kind)] for kind in SLOW]
    return [*slow, [name for name in READERS if not name.startswith(SLOW)]]


pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured as Linux shows it")


@pytest.mark.e2e
@pytest.mark.parametrize("names", groups(), ids=lambda names: names[0])
def test_broken_input_files_are_refused(names: list[str]) -> None:
    count = NUM_MUTATIONS // short_or_long(10, 1) if names[0].startswith(SLOW) else NUM_MUTATIONS
    finished = subprocess.run(
        [sys.executable, "-m", "tests.broken_files", ",".join(names), "0", str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + 3 * count * len(names),
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"name"')]
    assert [found["name"] for found in results] == names
    for found in results:
        assert not found["failures"], "\n".join(found["failures"])
        assert found["accepted"] + found["refused"] == count
        assert found["refused"] >= count // 20, f"these mutations of {found['name']} break nothing"
        assert found["longest_seconds"] < MAX_SECONDS and found["peak_megabytes"] < MAX_BYTES // 10**6, found["name"]


def test_mutations_of_files_are_reproducible() -> None:
    data = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    for structure in (*OF_STRUCTURE, "lines", "binary"):
        broken = [mutated(data, structure, index) for index in range(200)]  # type: ignore[arg-type]
        assert broken == [mutated(data, structure, index) for index in range(200)]  # type: ignore[arg-type]
        assert sum(each != data for each in broken) > 150
