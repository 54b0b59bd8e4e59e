"""Which versions of vLLM the adapter is made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
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


def maker(kind: type, *names: str) -> Callable[..., Any]:
    """What makes objects of one of vLLM's dataclasses of values with these names, given as keywords: `kind` itself, or,
    if the installed version has no field for some of them, a function that leaves these out."""
    missing = set(names) - {field.name for field in fields(kind)}
    if not missing:
        return kind

    def make(**values: Any) -> Any:
        return kind(**{name: value for name, value in values.items() if name not in missing})

    return make
