"""Make the environment in which AISimulate is measured: `.venv-aisimulate` beside the project.

AISimulate is NVIDIA's simulator of inference engines (https://github.com/ai-dynamo/aisimulate), with an engine in Rust.
`simulator.py` replays a trace in it. AISimulate is optional: the benchmark names the comparison as not measured where
there is no such environment.

    python benchmarks/aisimulate_env.py [options for pip, such as --index-url]

Takes a minute, and 2 GB of disk. Does nothing if the environment is there and complete.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _environment import Pip, make_environment, python_in

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-aisimulate"
AISIMULATE_VERSION = "0.13.0.dev202610270000000085"

PROBE = """
import sys
from importlib.metadata import version
import aisimulate._runtime
sys.exit(version("aisimulate") != sys.argv[1])
"""


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether AISimulate can be imported there, in the version above."""
    if not python_of(environment).exists():
        return False
    command = [str(python_of(environment)), "-c", PROBE, AISIMULATE_VERSION]
    return subprocess.run(command, capture_output=True).returncode == 0


def fill(pip_install: Pip) -> None:
    """Install wheels alone: its sources need a Rust compiler."""
    pip_install("--only-binary", ":all:", f"aisimulate=={AISIMULATE_VERSION}")


def main() -> int:
    return make_environment(ENVIRONMENT, f"AISimulate {AISIMULATE_VERSION}", is_complete, fill, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
