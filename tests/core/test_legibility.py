"""What the core promises its readers: short functions and short files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pointsman.core

LONGEST_FUNCTION, LONGEST_FILE = 60, 500
FILES = sorted(Path(pointsman.core.__file__).parent.glob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= LONGEST_FILE, "two ideas may live in it: split it"
    lengths = {one.name: (one.end_lineno or one.lineno) - one.lineno + 1 for one in functions(ast.parse(source))}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}
