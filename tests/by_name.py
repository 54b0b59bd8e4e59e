"""Finds and replaces definitions of the core by name, in any module, so that moving a module breaks no test."""

from __future__ import annotations

import pkgutil
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import pointsman.core

_UNSET = object()


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module of the core."""
    names = (info.name for info in pkgutil.walk_packages(pointsman.core.__path__, "pointsman.core."))
    return (pointsman.core, *map(import_module, names))


def find(name: str) -> Any:
    """The class, function or constant of this name; `Class.attribute` is an attribute of the class.

    Raises:
        LookupError: no module has a global of that name, or two modules define different objects under this name.
    """
    first, *rest = name.split(".")
    globals_of = {module.__name__: vars(module).get(first, _UNSET) for module in modules()}
    having = {
        name: value for name, value in globals_of.items() if value is not _UNSET and type(value) is not ModuleType
    }
    values = list(having.values())
    if not values:
        raise LookupError(f"no module of pointsman.core defines {first}")
    if any(value is not values[0] for value in values):
        raise LookupError(f"{first} means different things in {', '.join(having)}")
    found = values[0]
    for attribute in rest:
        found = getattr(found, attribute)
    return found


def replace(patch: pytest.MonkeyPatch, name: str, value: Any, *others: str) -> None:
    """Replace a global of the core in every module that has it, and in `others`; `Class.attribute`: in its class."""
    original = find(name)
    owner, _, attribute = name.rpartition(".")
    if owner:
        patch.setattr(find(owner), attribute, value)
        return
    for module in (*modules(), *(sys.modules[other] for other in others)):
        if vars(module).get(name, _UNSET) is original:
            patch.setattr(module, name, value)
