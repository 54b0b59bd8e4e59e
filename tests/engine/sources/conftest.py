"""A hub of this machine, a model in it, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.engine.text.tokenizer import DEMO_MODEL
from tests.engine.sources.model_hub import Hub, Repository, serving

NAME = "owner/tiny"


@pytest.fixture(scope="session")
def demo_files() -> dict[str, bytes]:
    """Files of the packaged model, as a repository has them, with some that no engine reads."""
    files = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir()}
    unread = ("pytorch_model.bin", "onnx/model.onnx", "original/tokenizer.model", "tiny-Q8_0.gguf", "picture.png")
    return files | dict.fromkeys(unread, b"not for this engine")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with the model `NAME`, which huggingface_hub asks in this process and in its children."""
    constants = pytest.importorskip("huggingface_hub").constants
    with serving() as hub:
        hub.repositories[NAME] = Repository(dict(demo_files))
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", template)):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub
