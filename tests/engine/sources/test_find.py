"""A user's name of a model is resolved to a path; errors are one line with the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.sources import find
from pointsman.engine.sources.find import find_model
from pointsman.engine.text.tokenizer import DEMO_MODEL

Installed = Callable[[str], Path | None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, which is also the home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Installed], None]:
    """Defines two named models, with a function that says where they are installed."""

    def name(installed: Installed) -> None:
        monkeypatch.setattr(find, "NAMED", {"small": None, "large": None})
        monkeypatch.setattr(find, "installed_file", installed)

    return name


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.mark.parametrize("model", [None, "demo", DEMO_MODEL, str(DEMO_MODEL)])
def test_find_model_returns_the_packaged_model_for_demo_and_none(model: str | Path | None) -> None:
    assert find_model(model) == DEMO_MODEL


def test_a_directory_is_returned_unchanged(here: Path) -> None:
    touch(here / "a" / "config.json", here / "a" / "a.gguf")
    (here / "empty").mkdir()
    assert find_model("a") == Path("a") and find_model(here / "a") == here / "a"
    assert find_model("~/a") == here / "a"
    assert find_model("empty") == Path("empty")  # `check_model_directory` reports missing files


def test_a_directory_with_one_gguf_file_is_that_file(here: Path) -> None:
    touch(here / "one" / "a.gguf", here / "one" / "README.md")
    assert find_model("one") == find_model("one/a.gguf") == Path("one/a.gguf")


def test_any_part_of_a_gguf_model_resolves_to_its_first_part(here: Path) -> None:
    parts = [here / "parts" / f"a-0000{number}-of-00002.gguf" for number in (1, 2)]
    touch(*parts)
    assert find_model(here / "parts") == find_model(parts[0]) == find_model(parts[1]) == parts[0]


def test_a_named_model_is_found_where_it_is_installed(here: Path, named: Callable[[Installed], None]) -> None:
    named(lambda name: here / f"{name}.gguf")
    touch(here / "small.gguf")
    assert find_model("small") == here / "small.gguf"
    touch(here / "small" / "config.json")
    assert find_model("small") == Path("small")


WRONG: list[tuple[str, Any, dict[str, str], tuple[str, ...]]] = [
    ("empty", " ", {}, ("name is empty", "give demo")),
    ("absolute path", "/nowhere/model", {}, ("no model directory at /nowhere/model", "OWNER/NAME")),
    ("relative path", "./model", {}, ("no model directory at ./model",)),
    ("path object", Path("owner/model"), {}, ("no model directory at owner/model",)),
    ("home", "~/model", {}, ("no model directory at ~/model",)),
    ("three levels", "models/owner/name", {}, ("no model directory at models/owner/name",)),
    ("absent GGUF file", "model.gguf", {}, ("no GGUF file at model.gguf", "download the file")),
    ("URL", "https://huggingface.co/owner/name", {}, ("is a URL", "OWNER/NAME")),
    ("unknown name", "gpt2", {}, ("no model is called gpt2", "demo, small, large", "OWNER/NAME")),
    ("not installed", "small", {}, ("small is not installed", "pointsman models get small")),
    ("other file", "file.bin", {}, ("file.bin is no GGUF file", "give a .gguf file")),
    ("later part alone", "a-00002-of-00003.gguf", {}, ("is part 2 of a model", "a-00001-of-00003.gguf is missing")),
    ("several GGUF models", "several", {}, ("holds 2 GGUF models (a.gguf, b-00001-of-00002.gguf)", "one of these")),
    ("too long", "x" * 5000, {}, ("cannot be looked up: File name too long",)),
    ("null byte", "a\0b", {}, ("cannot be looked up", "null")),
    ("revision of a directory", "demo", {"revision": "v1"}, ("revision is 'v1'", "leave revision out")),
    ("cache of a directory", "several/a.gguf", {"download_dir": "/x"}, ("download_dir is '/x'", "leave download_dir")),
]
"""Cases of invalid names: test id, name of the model, options, and words of the error."""


@pytest.mark.parametrize(("model", "options", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_invalid_names_give_one_line_with_the_remedy(
    here: Path,
    named: Callable[[Installed], None],
    model: str | Path,
    options: dict[str, str],
    words: tuple[str, ...],
) -> None:
    named(lambda name: None)
    touch(here / "file.bin", here / "a-00002-of-00003.gguf")
    touch(*(here / "several" / name for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")))
    with pytest.raises(ModelLoadError) as caught:
        find_model(model, **options)
    error = str(caught.value)
    assert "\n" not in error and len(error) < 400
    for word in words:
        assert word in error


def test_a_revision_for_a_loaded_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from pointsman.engine import LLM
    from pointsman.engine.model.loader import load_model

    with pytest.raises(ValueError, match="give revision and download_dir to load_model"):
        LLM(load_model("demo"), revision="v1")
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    with pytest.raises(ModelLoadError, match="revision is 'v1'"):
        LLM(tmp_path / "model", revision="v1")
