"""Every command and every example in the documentation is executed here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(language: str) -> list[tuple[str, str]]:
    """(where it stands, text) of every fenced block of a language."""
    found = []
    for path in DOCUMENTS:
        for index, text in enumerate(re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)):
            found.append((f"{path.name}:{index}", text))
    return found


PYTHON = fenced("python")
COMMANDS = [
    (where, line)
    for where, text in fenced("sh")
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("pointsman ")
]


def test_the_documents_have_examples_and_commands() -> None:
    assert len(PYTHON) >= 3
    assert len(COMMANDS) >= 4


@pytest.mark.e2e
@pytest.mark.parametrize(("where", "text"), PYTHON, ids=[where for where, _ in PYTHON])
def test_python_example_runs(where: str, text: str, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.e2e
def test_commands_run_in_the_order_of_the_documents(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The import statement\nA list is\n")
    for where, line in COMMANDS:
        words = shlex.split(line, comments=True)
        run = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{where}: {line}\n{run.stderr}"
