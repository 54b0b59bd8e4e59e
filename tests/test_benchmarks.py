"""Every benchmark imports what is there, and runs in its quick form."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = [path.name for path in sorted(BENCHMARKS.glob("[!_]*.py")) if not path.stem.endswith("_env")]


def imported_from_the_package(script: Path) -> list[tuple[str, str]]:
    """Modules and names that a script imports from Pointsman, inside of functions as well."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, name.name) for n in nodes if (n.module or "").startswith("pointsman") for name in n.names]


@pytest.mark.parametrize("script", [path.name for path in sorted(BENCHMARKS.glob("*.py"))])
def test_imported_names_exist(script: str) -> None:
    """Benchmarks run in the long form alone; the short form finds a name that has moved."""
    for module, name in imported_from_the_package(BENCHMARKS / script):
        if module.startswith("pointsman.integrations"):  # needs vLLM
            assert importlib.util.find_spec(module), module
        elif not hasattr(importlib.import_module(module), name):
            assert importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("script", SCRIPTS)
def test_quick_form(script: str) -> None:
    """It ends with one JSON line. Its targets are not checked: other tests run on the same cores."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == Path(script).stem
