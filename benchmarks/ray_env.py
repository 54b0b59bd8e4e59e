"""Make the environment in which a Ray cluster runs: `.venv-ray` beside the project.

It has what `pointsman[ray]` needs, and reads the project's own files. Ray is optional: its tests make the environment,
and are skipped where that fails.

    python benchmarks/ray_env.py [options for pip]

Takes half a minute, and 450 MB of disk. Does nothing if the environment is there and complete.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from _environment import Pip, make_environment, python_in

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-ray"
EXTRAS = ("ray", "sim", "cli")
PROBE = "import numpy, optuna, ray, rich, scipy, typer"


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists; `ray` is beside it."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether all that the extra needs can be imported there."""
    python = python_of(environment)
    return python.exists() and subprocess.run([python, "-c", PROBE], capture_output=True).returncode == 0


def requirements() -> list[str]:
    """Of the project and these extras, as `pyproject.toml` has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in EXTRAS for each in project["optional-dependencies"][name]]
    return [each for each in [*project["dependencies"], *extras] if not each.startswith("pointsman")]


def fill(pip_install: Pip) -> None:
    """Install everything but the project itself."""
    pip_install("--constraint", str(ROOT / "constraints.txt"), *requirements())


def make(pip_options: list[str], environment: Path = ENVIRONMENT) -> int:
    """Create the environment unless it is complete; the exit code."""
    return make_environment(environment, "Ray", lambda: is_complete(environment), fill, pip_options)


if __name__ == "__main__":
    sys.exit(make(sys.argv[1:]))
