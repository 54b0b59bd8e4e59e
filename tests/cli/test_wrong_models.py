"""Wrong values of `--model` that users type: one line that names the value and the remedy, and exit code 2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pointsman.engine.text.tokenizer import DEMO_MODEL
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.engine.sources.model_hub import Hub, Repository, only_hub

Run = Callable[..., Finished]

FORMS = "give a directory with config.json and *.safetensors, a .gguf file, or a hub name OWNER/NAME"
TYPED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("serve --model ./modles/qwen3", ("no model directory at ./modles/qwen3", FORMS)),
    ("serve --model '~/models/qwen3'", ("no model directory at ~/models/qwen3", FORMS)),
    (
        "serve --model models/qwen3",
        ("no repository models/qwen3", "no directory of that name here", "correct the name"),
    ),
    ("serve --model empty", ("empty has no config.json", "a directory in the Hugging Face format, or a .gguf file")),
    (
        "serve --model weights",
        ("weights has no config.json", "a directory in the Hugging Face format, or a .gguf file"),
    ),
    ("serve --model weights/model.safetensors", ("model.safetensors is no GGUF file", "give a .gguf file, or")),
    ("serve --model several", ("several holds 2 GGUF models (large.gguf, small.gguf)", "give one of these files")),
    (
        "serve --model b-00002-of-00003.gguf",
        ("is part 2 of a model", "b-00001-of-00003.gguf is missing; download it"),
    ),
    ("serve --model page.gguf", ("page.gguf is no GGUF file: it begins with b'<!do'", "download it again")),
    ("serve --model cut.gguf", ("cut.gguf: tokenizer.ggml.tokens needs 94 bytes", "copy it again")),
    ("serve --model https://huggingface.co/owner/tiny", ("huggingface.co/owner/tiny is a URL", "give a hub name as")),
    ("serve --model llama", ("no model is called llama", "demo, smollm2, gemma3-270m", "a hub name is OWNER/NAME")),
    ("serve --model smollm2", ("smollm2 is not installed", "run: pointsman models get smollm2")),
    ("serve --model SmolLM2", ("no model is called SmolLM2", "give smollm2, in small letters")),
    ("serve --model ''", ("the model's name is empty", "give demo, a directory")),
    ("serve --model owner/other", ("no repository owner/other", "correct the name")),
    (
        "serve --model owner/tiny:Q4_K_M",
        ("'owner/tiny:Q4_K_M' has a tag", "give owner/tiny, or download the GGUF file"),
    ),
    ("serve --model owner/gated", ("owner/gated is gated", "accept its licence at", "set HF_TOKEN")),
    ("serve --model owner/pickles", ("as pickles only (pytorch_model.bin)", "choose a repository or a revision with")),
    ("serve --model owner/gguf", ("has GGUF files and no safetensors", "hf download owner/gguf tiny-Q4_K_M.gguf")),
    ("serve --model owner/tiny --revision v9", ("owner/tiny has no revision 'v9'", "owner/tiny/commits")),
    ("serve --model empty --revision v1", ("revision is 'v1', and empty is no hub name", "leave revision out")),
    ("generate --model mamba.gguf", ("general.architecture is 'mamba'", "llama, qwen2, qwen3, phi3, gemma")),
    ("generate --model mamba", ("mamba has layers of type", "only full and sliding-window attention can run here")),
    ("generate --model whisper", ("whisper is an encoder-decoder model", "only decoder-only models can run here")),
)
"""Commands as typed, and words of the error."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and with repositories without a model."""
    config = {"config.json": (DEMO_MODEL / "config.json").read_bytes()}
    complete = {**config, "model.safetensors": b""}
    with only_hub(monkeypatch, tmp_path / "home") as hub:
        hub.repositories["owner/tiny"] = Repository(complete)
        hub.repositories["owner/gated"] = Repository(complete, gated=True, token="its own")
        hub.repositories["owner/pickles"] = Repository({**config, "pytorch_model.bin": b""})
        hub.repositories["owner/gguf"] = Repository({"tiny-Q4_K_M.gguf": b""})
        yield hub


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with files that are nearly models."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("empty", "weights", "several", "mamba", "whisper"):
        Path(folder).mkdir()
    for file in ("several/large.gguf", "several/small.gguf", "b-00002-of-00003.gguf"):
        Path(file).touch()
    for folder in ("weights", "mamba", "whisper"):
        Path(folder, "model.safetensors").touch()
    for model_type in ("mamba", "whisper"):
        Path(model_type, "config.json").write_text(json.dumps({"model_type": model_type}))
    Path("page.gguf").write_text("<!doctype html><title>Sign in</title>")
    for architecture in ("mamba", "llama"):
        writer = gguf.GGUFWriter(f"{architecture}.gguf", architecture)
        writer.add_token_list(["a"] * 100)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    Path("cut.gguf").write_bytes(Path("llama.gguf").read_bytes()[:200])


@pytest.mark.parametrize(("typed", "words"), TYPED, ids=[typed for typed, _ in TYPED])
def test_wrong_models_are_refused(pointsman: Run, hub: Hub, files: None, typed: str, words: tuple[str, ...]) -> None:
    if typed.startswith("serve"):
        pytest.importorskip("fastapi")
        typed += " --port 0"
    check_refused(pointsman(*shlex.split(typed)), *words)


def test_a_model_that_is_not_cached_is_refused_offline(
    pointsman: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused = pointsman("serve", "--port", 0, "--model", "owner/tiny")
    check_refused(
        refused, "owner/tiny is not complete in ", "HF_HUB_OFFLINE is set; unset it", "--download-dir or HF_HOME"
    )
    assert hub.requests == []
