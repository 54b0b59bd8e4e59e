"""Compiles Triton kernels for absent GPUs, and reads the resources of one program.

Runs in a process of its own, without TRITON_INTERPRET: the decorator reads that when a kernel is defined.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 600.0
"""Time limit for all kernels of one call, in seconds."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile.

    Args:
        module: where the kernel is defined, such as "pointsman.engine.sampling.race_triton".
        name: name of the kernel in that module.
        signature: the types of its parameters as Triton writes them, such as "*fp32", "i32" or "constexpr", in order.
        constexprs: values of the compile-time parameters, by name.
        options: of the launch, such as num_warps.
        divisible: parameters that are multiples of 16, as Triton finds most addresses and sizes to be.
    """

    module: str
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    divisible: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one program of a compiled kernel, by `ptxas -v`."""

    registers: int
    """Number of registers per thread."""
    stack_bytes: int
    """Bytes of stack per thread, in local memory."""
    spill_stores: int
    """Bytes per thread that are stored because registers run out."""
    spill_loads: int
    shared_bytes: int
    """Bytes of shared memory per program."""


def kernel_of(function: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **more: Any) -> Kernel:
    """A `Kernel` from the decorated function, compiled or interpreted."""
    return Kernel(function.fn.__module__, function.fn.__name__, dict(signature), dict(constexprs), **more)


def compile_ahead(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], arch: int, **more: Any
) -> Resources:
    """Compile one kernel; see `compile_all` for several, which start one process.

    Args:
        kernel: the function under `triton.jit`.
        arch: compute capability, such as 90 for sm_90.
        more: `options` and `divisible` of `Kernel`.
    """
    return compile_all([kernel_of(kernel, signature, constexprs, **more)], arch)[0]


def compile_all(kernels: Sequence[Kernel], arch: int) -> list[Resources]:
    """The resources of each kernel on an architecture.

    Raises:
        RuntimeError: a kernel does not compile; with the compiler's output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="pointsman-triton-") as cache:  # ignore earlier compilations
        environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.triton_ahead"],
            input=json.dumps({"arch": arch, "kernels": [asdict(kernel) for kernel in kernels]}),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=ROOT,
            env=environment,
        )
    if done.returncode:
        raise RuntimeError(f"a kernel does not compile for sm_{arch}:\n{done.stderr[-4000:]}")
    return [Resources(**one) for one in json.loads(done.stdout.splitlines()[-1])]


# ---------------------------------------------------------------------------------------------- in the other process


def _compile(kernel: Kernel, arch: int) -> Resources:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(kernel.module), kernel.name)
    places = {name: place for place, name in enumerate(function.arg_names)}
    source = ASTSource(
        function,
        dict(kernel.signature),
        {(places[name],): value for name, value in kernel.constexprs.items()},
        {(places[name],): [["tt.divisibility", 16]] for name in kernel.divisible},
    )
    with _stdout_as_stderr():
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(kernel.options))
    return _resources(compiled.asm["ptx"], arch, int(compiled.metadata.shared))


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """The last line of stdout is the result; the compilers' output goes to stderr."""
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def _resources(ptx: str, arch: int, shared_bytes: int) -> Resources:
    from triton.backends.nvidia.compiler import get_ptxas  # the assembler that Triton uses, of several

    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    if done.returncode or registers is None or spills is None:
        raise RuntimeError(f"ptxas -v (exit code {done.returncode}) reports no resources: {done.stderr}")
    return Resources(int(registers[1]), int(spills[1]), int(spills[2]), int(spills[3]), shared_bytes)


def main() -> None:
    """Compile the kernels given on stdin as JSON, and print their resources as JSON."""
    asked = json.load(sys.stdin)
    found = [asdict(_compile(Kernel(**kernel), asked["arch"])) for kernel in asked["kernels"]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
