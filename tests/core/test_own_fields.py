"""Parts of the core write only their own fields: the number of stores into other objects' attributes must not rise."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pointsman.core

CORE = Path(pointsman.core.__file__).parent
MAX = 66
"""Number of stores in the whole core. Lower it when there are fewer; put a new store into a method of the object."""


def targets(node: ast.expr) -> Iterator[ast.expr]:
    """The single targets of an assignment."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for element in node.elts:
            yield from targets(element)
    elif isinstance(node, ast.Starred):
        yield from targets(node.value)
    else:
        yield node


def stores(source: str) -> list[str]:
    """The attributes of other objects than `self` to which a module assigns."""
    assigned: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            assigned += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            assigned.append(node.target)
        elif isinstance(node, ast.With):
            assigned += [item.optional_vars for item in node.items if item.optional_vars is not None]
    single = [target for node in assigned for target in targets(node)]
    return [
        ast.unparse(target)
        for target in single
        if isinstance(target, ast.Attribute) and not (isinstance(target.value, ast.Name) and target.value.id == "self")
    ]


def test_assignments_to_attributes_of_other_objects_do_not_increase() -> None:
    counts = Counter({str(path.relative_to(CORE)): len(stores(path.read_text())) for path in CORE.rglob("*.py")})
    assert counts.total() <= MAX, f"{counts.total()} stores into other objects: {counts.most_common(12)}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("self.a = 1", []),
        ("b.a = self.c = 1", ["b.a"]),
        ("self.b.a += 1", ["self.b.a"]),
        ("self.a, (b.c, *d.e) = 1, (2, 3)", ["b.c", "d.e"]),
        ("for b.a in c: pass", ["b.a"]),
        ("with f() as b.a: pass", ["b.a"]),
        ("b[0] = c = 1", []),
    ],
)
def test_every_kind_of_attribute_assignment_is_counted(source: str, found: list[str]) -> None:
    assert stores(source) == found
