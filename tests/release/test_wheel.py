"""What is released, as its users get it: built from a copy of the sources, installed from the wheel, run elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WHERE = "\nimport pointsman; print('imported from', pointsman.__file__)\n"
WITHOUT_THE_ENGINE = """
import importlib.util
import pointsman
assert importlib.util.find_spec("torch") is None
print(pointsman.SamplingParams(max_tokens=3).max_tokens)
try:
    pointsman.LLM
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.e2e
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """One test, because building is the larger part of it: NumPy alone is enough for the library, and what is
    installed for these tests is enough for the command line and the engine."""
    sdist, wheel = build(tmp_path, "--no-isolation")
    check_content(sdist, wheel)
    check_metadata(metadata(wheel))

    # pip would fail here, having no index, if the wheel required anything beyond NumPy.
    environment = Environment(tmp_path / "environment", numpy_alone(tmp_path / "numpy_alone"))
    environment.install("--no-index", wheel)
    lines = environment.python(library_loop() + WHERE).splitlines()
    assert re.fullmatch(r"request-0 \w+ 20", lines[0])
    assert lines[-2].endswith("preemptions")
    assert lines[-1].startswith(f"imported from {environment.path.resolve()}")
    tokens, error = environment.python(WITHOUT_THE_ENGINE).splitlines()
    assert tokens == "3"
    assert error.startswith("pointsman.engine.LLM needs ")
    assert error.endswith("pip install 'pointsman[engine]'")
    check_types(environment)
    failed = environment.command("--help")
    assert failed.returncode == 2
    assert failed.stderr.endswith("pip install 'pointsman[cli]', or in a checkout: pip install '.[cli]'\n")

    environment.borrow(SITE_PACKAGES)
    assert environment.python(WHERE).startswith(f"imported from {environment.path.resolve()}")
    assert "generate" in ran(environment.command("--help")).stdout
    # Without kernels, which every new installation compiles.
    generated = ran(
        environment.command(
            "generate", "--prompt", "The parser", "--max-tokens", 4, "--temperature", 0, "--json",
            "--num-blocks", 8, "--max-model-len", 64, "--attention", "torch", "--no-fuse",
            "--record", tmp_path / "run.jsonl",
        )
    )  # fmt: skip
    request, _ = map(json.loads, generated.stdout.splitlines())
    assert request["num_output_tokens"] == 4
    check_pages(environment, tmp_path)


@pytest.mark.e2e
@pytest.mark.long
def test_the_wheel_and_its_requirements_install_from_an_index(tmp_path: Path) -> None:
    _, wheel = build(tmp_path)
    environment = Environment(tmp_path / "environment", with_pip=True)
    environment.install("-c", ROOT / "constraints.txt", f"{wheel}[server,kv-events]")
    assert environment.python(library_loop() + WHERE).splitlines()[-1].startswith("imported from")
    assert "generate" in ran(environment.command("--help")).stdout
    record = "--record", tmp_path / "run.jsonl"
    generated = ran(environment.command("generate", "--prompt", "The parser", "--max-tokens", 4, "--json", *record))
    request, _ = map(json.loads, generated.stdout.splitlines())
    assert request["num_output_tokens"] == 4
    check_pages(environment, tmp_path)


def check_pages(environment: Environment, folder: Path) -> None:
    """The course with its films, and the page of the run that `folder` has a recording of."""
    for command, name, size in (
        (("learn", "--out", folder / "course.html"), "course.html", 100_000),
        (("play", folder / "run.jsonl"), "run.html", 30_000),
    ):
        page = folder / name
        assert ran(environment.command(*command)).stdout == f"{page}\n"
        assert "class View" in page.read_text() and page.stat().st_size > size


# ------------------------------------------------------------------ what is built


def build(folder: Path, *options: str) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    sources, built = folder / "sources", folder / "dist"
    # A copy: building leaves files beside the sources, and takes up those that an earlier one has left.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")
    shutil.copytree(ROOT, sources, ignore=left_out)
    ran(run([sys.executable, "-m", "build", *options, "--outdir", built, sources], folder))
    (sdist,) = built.glob("*.tar.gz")
    (wheel,) = built.glob("*.whl")
    return sdist, wheel


def check_content(sdist: Path, wheel: Path) -> None:
    package = ROOT / "pointsman"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    ours = {path.relative_to(ROOT).as_posix() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        released = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert released == ours  # every package, and no tests
    assert {"pointsman/py.typed", "pointsman/engine/demo/model.safetensors"} <= released

    modules = {path for path in files if path.suffix == ".py" and "demo" not in path.parts}
    bare = {path.parent for path in modules if not (path.parent / "__init__.py").exists()}
    assert bare == set(), "folders with modules and without __init__.py"

    with tarfile.open(sdist) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt"}
    wanted |= {path.name for path in ROOT.glob("*.md")}
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".md", ".toml", ".yaml")]
    wanted |= {path.relative_to(ROOT).as_posix() for path in examples}
    assert names >= ours | wanted | {"tests/release/test_wheel.py", "docs/guides/build_an_engine.md"}
    assert not [name for name in names if name.startswith("examples/") and ".egg-info" in name]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


def check_metadata(headers: Message) -> None:
    requirements = [Requirement(text) for text in headers.get_all("Requires-Dist", [])]
    assert [str(one) for one in requirements if "extra" not in str(one.marker or "")] == ["numpy<3,>=2.0"]
    assert set(headers.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    (uvloop,) = (one for one in requirements if one.name == "uvloop")
    assert uvloop.marker is not None
    assert not uvloop.marker.evaluate({"extra": "server", "sys_platform": "win32"})
    assert uvloop.marker.evaluate({"extra": "server", "sys_platform": "darwin"})
    assert headers["License-Expression"] == "Apache-2.0"
    assert headers["Author"] == "The Pointsman authors"
    assert headers["Requires-Python"] == ">=3.11"
    assert len(headers.get_all("License-File", [])) == 2


# ------------------------------------------------------------------ where it runs


def check_types(environment: Environment) -> None:
    """A policy in a package of its own passes `mypy --strict` with the types of the wheel (`py.typed`)."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment.path / "bin" / "python"]
    ran(run([*mypy, "--cache-dir", os.devnull, "-p", "pointsman_lottery"], ROOT / "examples" / "pointsman-lottery"))


class Environment:
    """A new virtual environment, with nothing but what it borrows from a folder of installed packages."""

    def __init__(self, path: Path, borrowed: Path | None = None, *, with_pip: bool = False) -> None:
        self.path = path
        ran(run([sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), path], path.parent))
        if borrowed is not None:
            self.borrow(borrowed)

    def borrow(self, folder: Path) -> None:
        """Find packages there too, after its own; what an editable installation has put there has no effect."""
        (own,) = self.path.glob("lib/python*/site-packages")
        (own / "borrowed.pth").write_text(f"{folder}\n")

    def install(self, *what: object) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.path / "bin" / "python", "install", "-q", "--no-compile"]
        ran(run([*pip, *what], self.path))

    def python(self, program: str) -> str:
        """What the program prints."""
        return ran(run([self.path / "bin" / "python", "-c", program], self.path)).stdout

    def command(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return run([self.path / "bin" / "pointsman", *arguments], self.path)


def run(command: Iterable[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """In that folder, and without the checkout on the path of modules."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def ran(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def numpy_alone(folder: Path) -> Path:
    """A folder of installed packages in which there is no other."""
    folder.mkdir()
    installed = Path(np.__file__).parents[1]
    for pattern in ("numpy", "numpy.libs", "numpy-*.dist-info"):
        for path in installed.glob(pattern):
            (folder / path.name).symlink_to(path)
    return folder


def library_loop() -> str:
    """The first program of docs/guides/build_an_engine.md."""
    page = ROOT / "docs" / "guides" / "build_an_engine.md"
    program = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert program is not None
    return program[1]
