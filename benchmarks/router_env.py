"""Make the environment in which vLLM's router runs: `.venv-router` beside the project.

The router is a program of its own. Tests put it in front of servers to check what it forwards, and where. The
environment also has the program that checks a fleet's Kubernetes manifest against the schemas of Kubernetes.

    python benchmarks/router_env.py [options for pip, such as --index-url]

Takes a minute, and 240 MB of disk. Does nothing if the environment is there and complete. The router is optional: its
tests make the environment, and are skipped where that fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _environment import Pip, make_environment, python_in

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-router"
ROUTER_VERSION = "0.1.17"
VALIDATOR_VERSION = "1.37.0"
"""The newest version of Kubernetes that kubernetes-validate knows."""

PROBE = """
import sys
from importlib.metadata import version
import kubernetes_validate, vllm_router
sys.exit([version("vllm-router"), version("kubernetes-validate")] != sys.argv[1:])
"""


def router_of(environment: Path = ENVIRONMENT) -> Path:
    """The router's command, whether or not it exists."""
    return python_in(environment).with_name("vllm-router")


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether both can be imported there, in the versions above."""
    if not router_of(environment).exists():
        return False
    command = [str(python_in(environment)), "-c", PROBE, ROUTER_VERSION, VALIDATOR_VERSION]
    return subprocess.run(command, capture_output=True).returncode == 0


def fill(pip_install: Pip) -> None:
    """Install both."""
    pip_install(f"vllm-router=={ROUTER_VERSION}", f"kubernetes-validate=={VALIDATOR_VERSION}")


def make(pip_options: list[str], environment: Path = ENVIRONMENT) -> int:
    """Create the environment unless it is complete; the exit code."""
    what = f"vLLM's router {ROUTER_VERSION}"
    return make_environment(environment, what, lambda: is_complete(environment), fill, pip_options)


if __name__ == "__main__":
    sys.exit(make(sys.argv[1:]))
