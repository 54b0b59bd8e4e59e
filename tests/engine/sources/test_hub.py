"""Downloads with the real client, from a hub on this machine."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.sources.find import find_model
from pointsman.engine.text.tokenizer import DEMO_MODEL
from tests.engine.sources.conftest import NAME
from tests.engine.sources.model_hub import Hub, Repository

READ = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""Files of the packaged model that the engine reads."""


def error_of(name: str = NAME, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_model(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_only_needed_files_are_downloaded(hub: Hub) -> None:
    path = find_model(NAME)
    assert {file.name for file in path.iterdir()} == READ
    assert set(hub.downloads()) == READ
    for name in READ:
        assert (path / name).read_bytes() == (DEMO_MODEL / name).read_bytes()


def test_a_downloaded_model_computes_like_a_local_one(hub: Hub) -> None:
    pytest.importorskip("torch")
    from pointsman.engine import LLM, SamplingParams

    def text(model: str) -> str:
        llm = LLM(model, num_blocks=16, max_model_len=64, num_threads=1)
        return llm.generate("The import", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].text

    assert text(NAME) == text("demo")


def test_nothing_is_downloaded_twice(hub: Hub) -> None:
    path = find_model(NAME)
    hub.requests.clear()
    assert find_model(NAME) == path
    assert hub.downloads() == []


def test_files_are_cached_in_the_download_directory(hub: Hub, tmp_path: Path) -> None:
    path = find_model(NAME, download_dir=tmp_path / "elsewhere")
    assert path.is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "home" / "hub").exists()


def test_a_revision_may_be_a_branch_or_a_commit(hub: Hub) -> None:
    old = Repository({**hub.repositories[NAME].files, "README.md": b"old"}, revisions=("v1",))
    new = hub.repositories[NAME]
    assert find_model(NAME).name == new.commit
    hub.repositories[NAME] = old
    assert find_model(NAME, revision="v1").name == find_model(NAME, revision=old.commit).name == old.commit


def test_the_index_lists_the_weight_files(hub: Hub, demo_files: dict[str, bytes]) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = json.dumps({"weight_map": dict(zip("ab", names, strict=True))}).encode()
    files = {name: content for name, content in demo_files.items() if name != "model.safetensors"}
    weights = {**dict.fromkeys(names, b"x"), "consolidated.safetensors": b"the same once more"}
    hub.repositories[NAME] = Repository({**files, **weights, "model.safetensors.index.json": index})
    path = find_model(NAME)
    assert sorted(file.name for file in path.glob("*.safetensors")) == sorted(names)
    lacking = {name: content for name, content in hub.repositories[NAME].files.items() if name != names[1]}
    hub.repositories[NAME] = Repository(lacking)
    assert f"names {names[1]}, which the repository lacks" in error_of()


# ------------------------------------------------------------------------------------------- before the weights


def test_a_model_that_cannot_run_is_refused_before_its_download(hub: Hub) -> None:
    pytest.importorskip("torch")
    from pointsman.engine.model.loader import load_model

    config = json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}).encode()
    hub.repositories[NAME] = Repository({**hub.repositories[NAME].files, "config.json": config})
    with pytest.raises(UnsupportedModel, match="mamba has layers"):
        load_model(NAME)
    assert "config.json" in hub.downloads() and "model.safetensors" not in hub.downloads()


def test_the_model_check_runs_once_before_weights_are_downloaded(hub: Hub) -> None:
    seen: list[set[str]] = []
    for _ in range(2):
        find_model(NAME, check=lambda path: seen.append({file.name for file in path.iterdir()}))
    assert seen == [READ - {"model.safetensors"}]


def test_weights_larger_than_the_disk_are_not_downloaded(hub: Hub) -> None:
    hub.repositories[NAME].claimed_sizes = {"model.safetensors": 10**18}
    error = error_of()
    assert "takes 1,000,000.0 TB" in error and "free; free disk space" in error and "--download-dir" in error
    assert "model.safetensors" not in hub.downloads()


# ----------------------------------------------------------------------------------------------- broken downloads


def test_a_broken_download_continues_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 200_000)  # size of kept pieces, not 10 MiB
    hub.repositories[NAME].cuts["model.safetensors"] = [1_000_000, 500_000]
    path = find_model(NAME)
    assert (path / "model.safetensors").read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()
    assert hub.ranges() == ["bytes=1000000-", "bytes=1400000-"]


def test_after_a_failed_download_complete_files_are_kept(hub: Hub) -> None:
    size = len(hub.repositories[NAME].files["model.safetensors"])
    hub.repositories[NAME].claimed_sizes = {"model.safetensors": size + 1}
    error = error_of()
    assert NAME in error and "run the command again" in error
    hub.repositories[NAME].claimed_sizes = {}
    hub.requests.clear()
    assert {file.name for file in find_model(NAME).iterdir()} == READ
    assert hub.downloads() == ["model.safetensors"]


# ------------------------------------------------------------------------------------------------ without a hub


def test_the_cache_is_used_offline_without_a_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_model(NAME)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_model(NAME) == path
    assert hub.requests == []


def test_an_incomplete_model_is_an_error_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_model(NAME)
    go_offline(monkeypatch)
    for name in ("owner/other", NAME):
        error = error_of(name)
        assert name in error and "HF_HUB_OFFLINE is set; unset it" in error
        if name != NAME:
            (path / "model.safetensors").unlink()
    assert hub.downloads().count("model.safetensors") == 1


@pytest.mark.parametrize("failure", ["down", "status"])
def test_the_cache_is_used_with_a_warning_if_the_hub_fails(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    path = find_model(NAME)
    if failure == "status":
        hub.failure = 503
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="pointsman"):
        assert find_model(NAME) == path
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert f"using the cached files of {NAME}: " in warning
    assert ("answered 503" if failure == "status" else "cannot be reached") in warning


def test_a_failing_hub_without_a_cache_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.failure = 503
    assert "answered 503" in error_of() and "try again later" in error_of()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "the hub at http://127.0.0.1:9 cannot be reached" in error_of() and "HTTPS_PROXY" in error_of()


# ------------------------------------------------------------------------------------------------------- refusals


def test_the_error_of_a_gated_repository_names_its_licence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].gated = True
    hub.repositories[NAME].token = "hf_right"
    for token in (None, "hf_wrong"):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        error = error_of()
        assert f"gated: accept its licence at {hub.url}/{NAME}" in error and "HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert find_model(NAME).is_dir()


def test_a_private_repository_is_read_with_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].token = "hf_right"
    assert f"there is no repository {NAME}" in error_of() and "set HF_TOKEN" in error_of()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert find_model(NAME).is_dir()


def test_missing_repositories_and_revisions_are_errors(hub: Hub) -> None:
    error = error_of("owner/nothing")
    assert f"there is no repository owner/nothing at {hub.url}, and no directory of that name" in error
    error = error_of(revision="v9")
    assert f"{NAME} has no revision 'v9'" in error and f"{hub.url}/{NAME}/commits" in error


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json", "pytorch_model.bin"}, "pickles only (pytorch_model.bin), which can run code"),
        ({"a-Q4.gguf", "b-Q8.gguf"}, f"hf download {NAME} a-Q4.gguf) and give its path"),
        ({"adapter_config.json", "adapter_model.safetensors"}, "an adapter"),
        ({"README.md"}, "has no config.json"),
        ({"config.json"}, "no model.safetensors and no model.safetensors.index.json"),
    ],
)
def test_repositories_in_another_format_are_refused(hub: Hub, files: set[str], words: str) -> None:
    hub.repositories[NAME] = Repository(dict.fromkeys(sorted(files), b"{}"))
    assert words in error_of()
    assert hub.downloads() == []


def test_an_unwritable_download_directory_is_an_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = error_of(download_dir=tmp_path / "file" / "cache")
    assert f"cannot be written to {tmp_path / 'file' / 'cache'}" in error and "--download-dir" in error
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "Permission denied" in error_of(download_dir=tmp_path / "closed")


@pytest.mark.parametrize("name", ["owner/na me", "owner/", "owner/name@x", "owner/--x", "owner/" + "x" * 100])
def test_invalid_hub_names_are_refused(hub: Hub, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no hub name" in error_of(name)
    go_offline(monkeypatch)
    assert "is no hub name" in error_of(name)
    assert hub.requests == []


def test_a_directory_has_priority_over_a_hub_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "owner" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert find_model(NAME) == Path(NAME)
    assert hub.requests == []


def test_each_node_of_a_cluster_downloads_the_model(hub: Hub) -> None:
    pytest.importorskip("fastapi")
    from pointsman.integrations.ray.arguments import read_arguments
    from pointsman.integrations.ray.deployments import EngineHost

    settings = read_arguments({"model": NAME, "revision": "main"}, {})
    assert settings.serve.server.served_model_name == (NAME,)
    EngineHost(settings)
    assert hub.downloads().count("model.safetensors") == 1
    hub.repositories.clear()
    hub.requests.clear()
    with pytest.raises(ValueError, match=r"no repository owner/other .*; or keep replicas off this node"):
        EngineHost(read_arguments({"model": "owner/other"}, {}))
