"""Make the environment in which a Ray cluster runs: `.venv-ray` beside the project.

It has the dependencies of `pointsman[server,ray]`, and reads the project's own files. Packages in the environment of
this interpreter, such as PyTorch, are read from there (a `.pth` file), which saves 2 GB. Ray is optional: its tests
make
the environment, and are skipped if that fails.

    python benchmarks/ray_env.py [options for pip]

Takes half a minute, and 320 MB of disk. Does nothing if the environment is there and complete.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from importlib.util import find_spec
from pathlib import Path

from _environment import Pip, make_environment, python_in

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-ray"
EXTRAS = ("ray", "sim", "cli", "server", "engine")
PROBE = "import fastapi, numpy, optuna, ray.serve, rich, scipy, torch, transformers, typer"
SHARED = "shared.pth"
"""The file by which it reads another environment."""


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists; `ray` is beside it."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether all that the extra needs can be imported there."""
    python = python_of(environment)
    return python.exists() and subprocess.run([python, "-c", PROBE], capture_output=True).returncode == 0


def requirements() -> list[str]:
    """The requirements of the project and these extras, from `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in EXTRAS for each in project["optional-dependencies"][name]]
    return [each for each in [*project["dependencies"], *extras] if not each.startswith("pointsman")]


def share(environment: Path = ENVIRONMENT) -> None:
    """Let the environment read this interpreter's packages, if PyTorch is there; otherwise PyTorch is installed
    twice."""
    if find_spec("torch") is None or sys.prefix == sys.base_prefix:
        return
    folder = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(folder, SHARED).write_text(f"{sysconfig.get_path('purelib')}\n")


def fill(pip_install: Pip) -> None:
    """Install everything except the project itself."""
    share()
    pip_install("--constraint", str(ROOT / "constraints.txt"), *requirements())


def make(pip_options: list[str], environment: Path = ENVIRONMENT) -> int:
    """Create the environment unless it is complete; the exit code."""
    return make_environment(environment, "Ray", lambda: is_complete(environment), fill, pip_options)


if __name__ == "__main__":
    sys.exit(make(sys.argv[1:]))
