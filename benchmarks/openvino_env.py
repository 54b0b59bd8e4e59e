"""Make the environment in which OpenVINO GenAI is measured: `.venv-openvino` beside the project.

OpenVINO runs models in a format of its own. Optimum converts them, and asks for an older transformers than the
project has, so both get an environment of their own, and the benchmarks talk to it through a pipe.

    python benchmarks/openvino_env.py [options for pip, such as --index-url]

Takes about a minute, and 1.6 GB of disk with the smallest build of torch. Does nothing if the environment is there
and complete. OpenVINO is optional: `engine_throughput.py` leaves it out where there is no such environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from _environment import Pip, make_environment, python_in

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-openvino"
OPENVINO_VERSION = "2026.4.1"
VERSIONS = {
    "torch": "2.13.0",
    "transformers": "5.5.4",  # the last that optimum-intel 2.2 takes
    "optimum": "2.3.0",
    "nncf": "3.4.0",
    "openvino": OPENVINO_VERSION,
    "openvino-tokenizers": f"{OPENVINO_VERSION}.0",
    "openvino-genai": f"{OPENVINO_VERSION}.0",
}
# Installed without what it asks for, which is all above and below but torchvision: a language model needs none, and
# one that does not fit the build of torch keeps transformers from being imported.
CONVERTER = {"optimum-intel": "2.2.0"}
ALSO_FOR_THE_CONVERTER = ["requests>=2.33,<3", "setuptools"]

NO_TELEMETRY = {"CI": "true"}
"""Variables for every process there: OpenVINO and NNCF report their use to their makers, but not from CI machines."""

PROBE = """
import json, sys
from importlib.metadata import version
wrong = {name: wanted for name, wanted in json.loads(sys.argv[1]).items() if version(name).split("+")[0] != wanted}
import openvino_genai
sys.exit(bool(wrong))
"""


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether OpenVINO GenAI can be imported there, and all versions are those above."""
    if not python_of(environment).exists():
        return False
    command = [str(python_of(environment)), "-c", PROBE, json.dumps(VERSIONS | CONVERTER)]
    return subprocess.run(command, capture_output=True, env=os.environ | NO_TELEMETRY).returncode == 0


def fill(pip_install: Pip) -> None:
    """Install everything."""
    pip_install(*_pinned(VERSIONS), *ALSO_FOR_THE_CONVERTER)
    pip_install(*_pinned(CONVERTER), "--no-deps")


def main() -> int:
    return make_environment(ENVIRONMENT, f"OpenVINO GenAI {OPENVINO_VERSION}", is_complete, fill, sys.argv[1:])


def _pinned(versions: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


if __name__ == "__main__":
    sys.exit(main())
