"""Which versions of vLLM the adapter is made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

TESTED_BY_RUNNING = "0.32"
TESTED = {TESTED_BY_RUNNING: "run", "0.33": "its dataclasses were checked, it was not run"}
"""Minor versions, and how far each was tested."""


class UnsupportedVLLM(RuntimeError):
    """This vLLM, or what it is configured to do, is not supported. The message says what to do instead."""


def minor_version(version: str) -> str:
    """Of "0.32.0+cpu": "0.32"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_version(version: str) -> None:
    """Nothing, for a version that is supported.

    Raises:
        UnsupportedVLLM: it is not.
    """
    if minor_version(version) not in TESTED:
        raise UnsupportedVLLM(
            f"vLLM {version} is installed, and pointsman.integrations.vllm supports {' and '.join(TESTED)}, as vLLM's "
            f'scheduler interface changes between versions: pip install "vllm=={max(TESTED)}.*", or leave '
            "--scheduler-cls out to run vLLM's own scheduler"
        )


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def make(kind: type, values: Mapping[str, Any]) -> Any:
    """An object of one of vLLM's dataclasses, of those values for which the installed version has a field."""
    names = _field_names(kind)
    if not values.keys() <= names:
        values = {name: value for name, value in values.items() if name in names}
    return kind(**values)
