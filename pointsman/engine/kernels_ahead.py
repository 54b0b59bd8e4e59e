"""Compiles the CPU kernels in a process of its own, while the engine imports its libraries and loads its model.

    with kernels_compiled_ahead(arguments):       # the keyword arguments of `Engine`
        engine = Engine(**arguments)

Kernels are compiled once for a machine and kept on disk, which takes about ten seconds of one core. The engine needs
its first kernel some seconds after its start, and then compiles one kernel after the other. The process compiles them
in another order, so the two share the work (`kernels/disk_cache.py`). A marker in the user's cache folder tells later
starts that all kernels are on disk. Without the process, or if it fails, the engine compiles all kernels itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from pointsman.engine.machine import has_gpu_driver, num_cores
from pointsman.files import cache_home

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16")
"""Types of activations and of the KV cache for which there are kernels; "auto" is float32 on a CPU."""


@contextmanager
def kernels_compiled_ahead(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Compile the kernels of an engine on the CPU in a process, which ends with the `with` block at the latest. Does
    nothing if the kernels are on disk, or the engine cannot use them.

    Args:
        arguments: keyword arguments of `Engine`.
    """
    types = _types(arguments)
    marker = None if types is None else _marker(types)
    if types is None or marker is None or marker.exists():
        yield
        return
    logger.info("compiling kernels for this processor (once, about ten seconds)")
    command = [sys.executable, "-m", __name__, *types, str(marker)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        logger.debug("kernels are compiled when they are needed: %s", error)
        yield
        return
    Thread(target=process.wait, daemon=True).start()  # an ended process is reaped while the server runs
    try:
        yield
    finally:
        process.terminate()


def _types(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Types of activations and KV cache of the kernels that an engine with these arguments needs; None: it needs no
    kernels for a CPU, or there is no second core to compile them."""
    device = str(arguments.get("device") or "auto")
    on_cpu = device == "cpu" or (device == "auto" and not has_gpu_driver())
    compiled = arguments.get("attention", "auto") in ("auto", "numba") and find_spec("numba") is not None
    if not (on_cpu and compiled and num_cores() > 1):
        return None
    model, cache = (str(arguments.get(name) or "auto") for name in ("dtype", "kv_cache_dtype"))
    model = DTYPES[0] if model == "auto" else model
    cache = model if cache == "auto" else cache
    return (model, cache) if model in DTYPES and cache in DTYPES else None


def _marker(types: tuple[str, str]) -> Path | None:
    """The file that exists if the kernels for these types are on disk; None: the user has no home folder."""
    from importlib.metadata import version

    here = Path(__file__).parent
    digest = blake2b(digest_size=8)
    for path in sorted([*here.glob("kernels/*.py"), *here.glob("sampling/race*.py")]):
        stamp = path.stat()  # as numba, which compiles again when a file is installed again
        digest.update(f"{path.name} {stamp.st_mtime_ns} {stamp.st_size}\n".encode())
    libraries = [version("numba"), version("numpy"), sys.version, os.environ.get("NUMBA_CACHE_DIR", str(here))]
    digest.update("\n".join([*libraries, *types]).encode())
    try:
        return cache_home() / "pointsman" / "kernels" / digest.hexdigest()
    except RuntimeError:
        return None


def compile_all(model: str, cache: str) -> None:
    """Compile all kernels for a type of activations and a type of the KV cache, the slow ones first."""
    import torch

    from pointsman.engine.kernels import layers
    from pointsman.engine.kernels.attention import attention_kernel
    from pointsman.engine.sampling.race_kernels import compile_race

    activations, stored = getattr(torch, model), getattr(torch, cache)
    attention_kernel(activations, stored)
    compile_race()
    layers.heads_kernel(activations, stored)
    layers.gate_kernel(activations)
    layers.norm_kernel(activations)


def main(model: str, cache: str, marker: str) -> None:
    """Compile all kernels, and leave the file `marker`."""
    compile_all(model, cache)
    with suppress(OSError):  # the next start compiles ahead again, which only loads the kernels
        Path(marker).parent.mkdir(parents=True, exist_ok=True)
        Path(marker).touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
