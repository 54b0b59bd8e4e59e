"""The engine's thread, between its steps."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.aio import engine_thread
from pointsman.engine.aio.engine_thread import Call, EngineThread, Stop


def test_the_thread_computes_on_the_gpu_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread begins with the first GPU as its current device."""
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(
        engine_thread, "use_device", lambda device: used.append((str(device), threading.current_thread().name))
    )
    thread = EngineThread(Engine("demo", num_blocks=16, max_model_len=64), max_step_retries=0, log_stats_interval=None)
    thread.start()
    thread.send(Stop(drain=False))
    thread.join(10)
    assert used == [("cpu", "pointsman-engine")]


def test_freed_memory_is_returned_although_calls_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server asks its engines for a sign of life every second; they are idle nevertheless."""
    given_back: list[float] = []
    monkeypatch.setattr(engine_thread, "return_freed_pages", lambda: given_back.append(time.monotonic()))
    monkeypatch.setattr(engine_thread, "SECONDS_TO_IDLE", 0.4)
    engine = Engine("demo", num_blocks=16, max_model_len=64, num_threads=1)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4))
    thread = EngineThread(engine, max_step_retries=0, log_stats_interval=None)
    thread.start()
    try:
        for _ in range(30):
            answer: Future[Any] = Future()
            thread.send(Call(lambda engine: engine.has_unfinished_requests(), answer))
            answer.result(10)
            time.sleep(0.05)
        assert len(given_back) == 1, "once for each time in which it computed"
        reading = thread.pulse.take_reading()
        assert reading.mean_step and reading.longest > 0
    finally:
        thread.send(Stop(drain=False))
        thread.join(10)
