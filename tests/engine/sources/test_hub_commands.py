"""`pointsman generate` and `pointsman serve`, in their own processes, with a model on a hub."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
from _server_process import ServerFailed, start_server

from tests.engine.sources.conftest import NAME
from tests.engine.sources.model_hub import Hub, Repository
from tests.forms import short_of

pytestmark = pytest.mark.e2e


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pointsman", "generate", "--num-blocks", "64", "--max-model-len", "64")
    prompt = ("--prompt", "The import", "--max-tokens", "4", "--temperature", "0", "--json")
    return subprocess.run((*command, *prompt, *arguments), capture_output=True, text=True, timeout=120)


def test_generate_downloads_a_model_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    first = generate("--model", NAME)
    assert first.returncode == 0, first.stderr
    assert f"downloading the weights of {NAME}, 5.7 MB, to " in first.stderr
    assert "%|" not in first.stderr  # no progress bar without a terminal
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    second = generate("--model", NAME)
    assert second.returncode == 0 and hub.requests == []
    text = [json.loads(run.stdout.splitlines()[0])["text"] for run in (first, second)]
    assert text[0] == text[1]


def test_serve_finds_the_model_before_engines_start(hub: Hub) -> None:
    pytest.importorskip("fastapi")
    small = ("--num-blocks", "64", "--max-model-len", "512", "--no-warm-up", "--threads", "1")
    config = b'{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}'
    hub.repositories["owner/other"] = Repository({**hub.repositories[NAME].files, "config.json": config})
    with pytest.raises(ServerFailed) as caught:
        start_server("--model", "owner/other", *small)
    assert "mamba has layers of type linear_attention" in str(caught.value)
    assert "Traceback" not in str(caught.value) and "model.safetensors" not in hub.downloads()
    with start_server("--model", NAME, *small) as server:
        with urlopen(f"{server.url}/v1/models", timeout=10) as answer:
            (card,) = json.load(answer)["data"]
        assert card["id"] == NAME and hub.repositories[NAME].commit in card["root"]
    assert hub.downloads().count("model.safetensors") == 1


FIND = f"from pointsman.engine.sources.find import find_model; find_model({NAME!r})"


ENDED = {
    "python-sigint": (("-c", FIND), signal.SIGINT, -signal.SIGINT),
    "serve-sigterm": (("-m", "pointsman", "serve", "--port", "0", "--model", NAME), signal.SIGTERM, 0),
    "generate-sigint": (("-m", "pointsman", "generate", "--model", NAME), signal.SIGINT, 130),
    "generate-sigterm": (("-m", "pointsman", "generate", "--model", NAME), signal.SIGTERM, 143),
}


@pytest.mark.parametrize("ended", short_of([*ENDED], ["python-sigint", "generate-sigterm"]))
def test_a_signal_ends_a_download_without_partial_files(hub: Hub, tmp_path: Path, ended: str) -> None:
    pytest.importorskip("fastapi")
    program, number, code = ENDED[ended]
    hub.repositories[NAME].stalled = "model.safetensors"
    process = subprocess.Popen((sys.executable, *program), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("*.incomplete")) or "model.safetensors" not in hub.downloads():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.rglob("config.json")) and not list(tmp_path.rglob("*.incomplete"))
