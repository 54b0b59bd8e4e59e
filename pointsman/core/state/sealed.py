"""Makes objects that leave the core read-only, at the cost of a plain object.

A frozen dataclass assigns each field through `object.__setattr__`, which for an output of 25 fields takes a third of a
step. Here an object is built as an instance of a plain class with slots. When it is complete, its class is changed to
the sealed subclass, which only refuses assignments. Reading a field remains a plain read of a slot. `core/scheduler.py`
describes what a host may write.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeVar

new_tuple = tuple.__new__
"""`new_tuple(Kind, (value, ...))` makes a named tuple of the class `Kind` from all field values in order, in less than
half the time of `Kind(...)`: for tuples that a step makes several times."""


_Kind = TypeVar("_Kind")


def sealed_as(kind: type[_Kind], complete: Any) -> _Kind:
    """Change the class of an object, whose fields are complete, to its sealed subclass `kind`, and return the
    object."""
    complete.__class__ = kind
    sealed: _Kind = complete
    return sealed


class Sealed:
    """Base class that refuses to assign and to delete attributes. It must be the first base of a class."""

    __slots__ = ()
    _remedy: ClassVar[str] = "make a new object instead"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only; {self._remedy}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} is read-only; {self._remedy}")
