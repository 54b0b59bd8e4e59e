"""Checks the drop-in's assumptions about vLLM against vLLM's sources, without importing vLLM.

found = examine()
found.broken

    sources.py    reads packages: modules, names, classes, signatures
    types.py      infers the types of expressions
    uses.py       lists the uses of vLLM in our code: reads, calls, constructions, overrides
    calls.py      lists vLLM's uses of a scheduler: reads and calls

The assumptions are collected from the drop-in's code each time, so a new line there needs no entry elsewhere.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pointsman.integrations.vllm.interface.calls import new_arguments, scheduler_assumptions
from pointsman.integrations.vllm.interface.sources import Class, Module, Sources
from pointsman.integrations.vllm.interface.uses import VLLM, Assumption, Reader

PACKAGE = "pointsman.integrations.vllm"
KINDS = {
    "name": "names imported",
    "attribute": "attributes",
    "call": "calls",
    "field": "fields given",
    "override": "members overridden",
    "scheduler": "uses of the scheduler by vLLM",
}
"""The kinds of assumptions, each with its description in a report."""


class NoVLLM(Exception):
    """No vLLM was found; the message has the places searched."""


@dataclass(frozen=True)
class Findings:
    """The assumptions about one version of vLLM."""

    version: str
    path: str
    """Folder of vLLM's package."""
    assumptions: Sequence[Assumption]
    new: Sequence[Assumption]
    """Features that vLLM has and our code does not use; our code works without them."""
    fallbacks: Sequence[Assumption]
    """Features that vLLM lacks, and for which our code has a fallback."""

    @property
    def broken(self) -> list[Assumption]:
        return [each for each in self.assumptions if each.holds is False]

    @property
    def unknown(self) -> list[Assumption]:
        return [each for each in self.assumptions if each.holds is None]

    def counts(self) -> dict[str, int]:
        """The number of assumptions of each kind."""
        counts = Counter(each.kind for each in self.assumptions)
        return {kind: counts[kind] for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        """The findings as data for JSON."""

        def listed(found: Sequence[Assumption]) -> list[dict[str, str]]:
            return [
                {"kind": each.kind, "place": each.place, "expected": each.expected, "found": each.found}
                for each in found
            ]

        return {
            "version": self.version,
            "path": self.path,
            "counts": self.counts(),
            "broken": listed(self.broken),
            "new": listed(self.new),
            "unknown": listed(self.unknown),
            "fallbacks": listed(self.fallbacks),
        }


def examine(folder: Path | None = None) -> Findings:
    """Compare the drop-in with vLLM.

    Args:
        folder: folder of vLLM's sources: the package, or its parent folder; None: the installed package.

    Raises:
        NoVLLM: there is no vLLM in the folder.
    """
    return _examine(_find_package(folder))


def _find_package(folder: Path | None) -> Path:
    if folder is None:
        spec = importlib.util.find_spec(VLLM)
        locations = [] if spec is None else list(spec.submodule_search_locations or ())
        candidates, where = [Path(each) for each in locations], "this Python environment"
    else:
        candidates, where = [folder / VLLM, folder], str(folder)
    for each in candidates:
        if (each / "v1").is_dir() and (each / "__init__.py").is_file():
            return each.resolve()
    raise NoVLLM(
        f"there is no vLLM in {where}; give --sources with a folder that contains the package vllm, such as an "
        "unpacked wheel"
    )


@cache
def _examine(package: Path) -> Findings:
    ours = Path(__file__).resolve().parents[3]
    sources = Sources({VLLM: package, "pointsman": ours})
    reader = Reader(sources)
    reader.read(_drop_in_modules(sources))
    scheduler = _class(sources, f"{PACKAGE}.scheduler", "Scheduler")
    assumptions = [*reader.assumptions.values(), *scheduler_assumptions(sources, scheduler)]
    new = [
        Assumption("field", reader.made_at[kind], f"{kind.name}.{name}", True, "stays at its default")
        for kind, known in reader.made.items()
        for name, parameter in kind.fields.items()
        if parameter.has_default and name not in known
    ]
    new += new_arguments(sources, scheduler)
    return Findings(
        _read_version(package),
        str(package),
        _add_defining_modules(sources, assumptions),
        new,
        _add_defining_modules(sources, reader.fallbacks),
    )


def _drop_in_modules(sources: Sources) -> list[Module]:
    """The modules of the drop-in, without the modules of this package."""
    found = sources.modules_under(PACKAGE)
    return [module for module in found if not module.name.startswith(__name__) and module.name != PACKAGE]


def _class(sources: Sources, module: str, name: str) -> Class:
    found = sources.module(module)
    kind = sources.find(found, name) if isinstance(found, Module) else None
    if not isinstance(kind, Class):
        raise TypeError(f"{module}.{name} is not a class")
    return kind


def _add_defining_modules(sources: Sources, assumptions: Sequence[Assumption]) -> list[Assumption]:
    """`assumptions`; where an imported name is missing, `found` also lists the modules of vLLM that now define the
    name."""
    found = []
    for each in assumptions:
        if each.kind == "name" and each.holds is False:
            modules = sources.modules_defining(VLLM, each.expected.rpartition(".")[2])
            if modules:
                each = replace(each, found=f"{each.found}; {', '.join(modules[:3])} has it")
        found.append(each)
    return found


def _read_version(package: Path) -> str:
    """The version of vLLM in its sources; "?": the sources have no version."""
    path = package / "_version.py"
    if path.is_file():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {each.id for each in node.targets if isinstance(each, ast.Name)}
                if "__version__" in names:
                    return str(node.value.value)
    return "?"
