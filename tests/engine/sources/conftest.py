"""Fixtures: a hub on this machine, a model in it, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.engine.text.tokenizer import DEMO_MODEL
from tests.engine.sources.model_hub import Hub, Repository, only_hub

NAME = "owner/tiny"


@pytest.fixture(scope="session")
def demo_files() -> dict[str, bytes]:
    """Files of the packaged model as in a repository, with some files that no engine reads."""
    files = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir()}
    unread = ("pytorch_model.bin", "onnx/model.onnx", "original/tokenizer.model", "tiny-Q8_0.gguf", "picture.png")
    return files | dict.fromkeys(unread, b"not for this engine")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with the model `NAME`, which huggingface_hub uses in this process and in its children."""
    with only_hub(monkeypatch, tmp_path / "home") as hub:
        hub.repositories[NAME] = Repository(dict(demo_files))
        yield hub
