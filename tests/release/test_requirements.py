"""pyproject.toml requires what the package imports, and nothing else."""

from __future__ import annotations

import ast
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

COME_ALONG = {
    "click": "uvicorn",
    "llvmlite": "numba",
    "pydantic": "fastapi",
    "pydantic-core": "pydantic",
    "starlette": "fastapi",
    "tqdm": "transformers",
}
"""Imported, and required by something that is: their versions are its business."""
NEVER_REQUIRED = {"vllm"}
"""A host, which has Pointsman installed beside it."""
ON_REQUEST = {"matplotlib"}
"""Imported for an option that says what to install."""
LOADED_BY_NAME = {"httptools", "tokenizers", "uvloop"}
"""Required, and imported by a library on our behalf, or by its name in a string."""


def imported_modules(folder: Path) -> set[str]:
    """Top-level modules that are imported anywhere in the sources, other than the standard library's and our own."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"pointsman"}


@cache
def installed() -> dict[str, list[str]]:
    return dict(packages_distributions())


def distributions(modules: set[str]) -> set[str]:
    return {canonicalize_name(installed().get(module, [module])[0]) for module in modules}


def required(*extras: str) -> set[str]:
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in lines} - {"pointsman"}


def test_every_imported_distribution_is_a_declared_requirement() -> None:
    imported = distributions(imported_modules(ROOT / "pointsman")) - NEVER_REQUIRED - ON_REQUEST
    assert imported - COME_ALONG.keys() <= required("cli", "engine", "server", "sim", "ray", "kv-events")


def test_every_declared_requirement_is_imported() -> None:
    imported = distributions(imported_modules(ROOT / "pointsman"))
    unused = required("cli", "engine", "server", "sim", "ray", "kv-events") - imported
    assert unused <= LOADED_BY_NAME


def test_imported_dependencies_of_dependencies_are_required_by_them() -> None:
    for name, bringer in COME_ALONG.items():
        brought = {canonicalize_name(Requirement(line).name) for line in requires(bringer) or []}
        assert name in brought, f"{bringer} requires no {name}"


def test_the_core_imports_only_numpy_and_the_standard_library() -> None:
    assert imported_modules(ROOT / "pointsman" / "core") == {"numpy"}
