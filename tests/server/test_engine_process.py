"""The start of the engine process as the API process sees it, with failing warm-ups."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman.core import replay
from pointsman.engine.grammar.process import GrammarServer
from pointsman.engine.params.engine_args import PREFILL_GAP
from pointsman.server import engine_process
from pointsman.server.config import ServerConfig
from pointsman.server.startup import startup_lines
from pointsman.server.wire.messages import EngineInfo, Failed, Start, Unpacker, pack

OPTIONS = {"model": "demo", "num_blocks": 16, "max_model_len": 64, "num_threads": 1}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the engine process within this process, without changing signals, memory or log."""
    monkeypatch.setattr(engine_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_process, "keep_freed_pages", lambda **_: None)
    monkeypatch.setattr(engine_process.logging, "basicConfig", lambda **_: None)


def start(
    *, warm_up: bool, record: str | None = None, engine: dict[str, Any] | None = None, **options: Any
) -> tuple[int, Any]:
    """The exit code, and the first message, of an engine process that ends once it has started."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(pack(Start({**OPTIONS, **(engine or {})}, record, None, 0, warm_up, **options)))
        ours.shutdown(socket.SHUT_WR)
        code = engine_process.main(theirs.detach())
        (message, *_) = Unpacker().feed(ours.recv(1 << 18))
    return code, message


def test_prefill_gap_limit_is_on_by_default_and_can_be_switched_off() -> None:
    _, info = start(warm_up=False)
    assert info.scheduler["token_limits"] == [PREFILL_GAP]
    assert "token_limits prefill-gap" in startup_lines([info], ServerConfig(), "http://127.0.0.1:8000")[2]
    _, info = start(warm_up=False, engine={"token_limits": []})
    assert info.scheduler["token_limits"] == []


def test_restarted_engine_serves_if_its_recording_cannot_be_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk may have no room for another file."""
    path = str(tmp_path / "absent" / "run.jsonl.restart-1")
    code, message = start(warm_up=False, record=path)
    assert code == 2 and isinstance(message, Failed) and "No such file" in message.message
    code, message = start(warm_up=False, record=path, must_record=False)
    assert code == 0 and isinstance(message, EngineInfo)
    assert f"{path} is written no further: No such file or directory" in caplog.text


def test_a_recording_is_written_when_the_process_ends(tmp_path: Path) -> None:
    code, message = start(warm_up=False, record=str(tmp_path / "run.jsonl"), record_when_full="wait")
    assert code == 0 and isinstance(message, EngineInfo)
    assert replay((tmp_path / "run.jsonl").read_text().splitlines()).num_requests == 0


@pytest.mark.parametrize("warm_up", [True, False])
def test_model_failure_in_the_warm_up_is_reported(warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []

    def begin() -> GrammarServer:
        servers.append(GrammarServer())
        return servers[-1]

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(engine_process, "GrammarServer", begin)
    monkeypatch.setattr("pointsman.engine.model.forward.run_model", fail)
    code, message = start(warm_up=warm_up)
    if warm_up:
        assert code == 1 and isinstance(message, Failed) and not message.is_usage_error
        assert "EngineStepError" in message.message and "no such operation" in message.message
    else:  # it is the requests that meet it
        assert code == 0 and isinstance(message, EngineInfo)
    assert len(servers) == warm_up
    assert not any(server.is_running for server in servers), "no process outlives its engine"


def test_gpu_out_of_memory_in_the_warm_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("pointsman.engine.model.forward.run_model", fail)
    code, message = start(warm_up=True)
    assert code == 2 and isinstance(message, Failed) and message.is_usage_error
    assert "the warm-up needs more memory than the device has free" in message.message
    assert "Tried to allocate 2.00 GiB" in message.message and "lower gpu_memory_utilization" in message.message


def test_warm_up_failure_of_some_requests_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such operation")

    monkeypatch.setattr("pointsman.engine.sampling.sampler.token_logprobs", fail)
    code, message = start(warm_up=True)
    assert code == 0 and isinstance(message, EngineInfo)
