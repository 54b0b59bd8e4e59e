"""Documented: `help` on a class of fields lists the fields with their docstrings, which Python itself drops."""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import pairwise
from textwrap import indent


class Documented(type):
    """Metaclass of a dataclass. The docstring of the class ends with those of its fields, inherited ones first."""

    @property
    def __doc__(cls) -> str:  # type: ignore[override]
        own = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
        if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
            return own  # `dataclass` asks while it makes the class: parsing the module then would slow down its import
        kinds = [kind for kind in reversed(cls.__mro__) if isinstance(kind, Documented)]
        try:
            texts = {name: text for kind in kinds for name, text in field_docstrings(kind).items()}
        except OSError:  # installed without sources
            return own
        fields = "\n\n".join(f"{name}\n{indent(text, '    ')}" for name, text in texts.items())
        return f"{own}\n\nFields:\n\n{fields}"


def field_docstrings(kind: type) -> dict[str, str]:
    """The docstring of each field that a class defines, read from its source."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = inspect.cleandoc(text.value.value)
    return found
