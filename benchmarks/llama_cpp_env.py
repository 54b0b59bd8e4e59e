"""Make the environment in which llama.cpp is measured: `.venv-llama-cpp` beside the project.

The package is llama-cpp-python, which has llama.cpp and bindings to its C interface. It is compiled here, from the
sources on PyPI, with llama.cpp's own defaults: for this machine's processor (`-march=native`), with OpenMP, with its
blocked matrix products (llamafile) and with the repacking of weights. Only the image reader is left out.

    python benchmarks/llama_cpp_env.py [options for pip, such as --index-url]

Needs a compiler for C++; takes minutes on many cores, and twenty on two, and 200 MB of disk. Does nothing if the
environment is there and complete. llama.cpp is optional: `engine_throughput.py` leaves it out where there is no such
environment.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _environment import Pip, make_environment, python_in

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-llama-cpp"
BINDINGS_VERSION = "0.3.36"
LLAMA_CPP_COMMIT = "0c1e57098"
"""The llama.cpp commit in these bindings; their change log names it."""

PROBE = """
import sys
import llama_cpp
sys.exit(llama_cpp.__version__ != sys.argv[1])
"""


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether llama.cpp can be loaded there, in the version above."""
    if not python_of(environment).exists():
        return False
    command = [str(python_of(environment)), "-c", PROBE, BINDINGS_VERSION]
    return subprocess.run(command, capture_output=True).returncode == 0


def fill(pip_install: Pip) -> None:
    """Compile and install."""
    requirement = f"llama-cpp-python=={BINDINGS_VERSION}"
    pip_install("--no-binary", "llama-cpp-python", "--config-settings", "cmake.define.LLAVA_BUILD=OFF", requirement)


def main() -> int:
    return make_environment(ENVIRONMENT, f"llama.cpp {LLAMA_CPP_COMMIT}", is_complete, fill, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
