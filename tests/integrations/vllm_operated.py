"""A real scheduler that a test steps and operators question: stands in for the adapter, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pointsman.core import Recorder, Request, Scheduler, SchedulerConfig, StepResult
from pointsman.integrations.vllm.control import ControlSocket
from pointsman.integrations.vllm.operation import Questions
from pointsman.integrations.vllm.recordings import RecordingFile, Recordings


class Operated:
    """Two sequence slots, and a socket."""

    def __init__(self, path: Path | None, *, record: RecordingFile | None = None, **overrides: Any) -> None:
        config = {"num_blocks": 40, "max_model_len": 64, "block_size": 4, "max_num_seqs": 2}
        recorder = None if record is None else Recorder(record)
        self.core = Scheduler(
            SchedulerConfig(**{**config, "max_num_batched_tokens": 32, **overrides}), recorder=recorder
        )
        self.lock = threading.Lock()
        self.of_id: dict[str, Request] = {}
        self.recordings = Recordings(self.core, lambda: None)
        if record is not None:
            self.recordings.set_current(record)
        facts = {"version": "0", "model": 'the "demo"', "engine": 0}
        self.questions = Questions(self.core, self.of_id, self.recordings, self.lock, facts, lambda: 1.5)
        self.control = ControlSocket(None if path is None else str(path), self.questions.answer)

    def add(self, name: str, length: int = 6, max_tokens: int = 8, **options: Any) -> None:
        options["metadata"] = SimpleNamespace(request_id=name)
        request = Request(name, range(1, length + 1), arrival_time=time.monotonic(), max_tokens=max_tokens, **options)
        with self.lock:
            if self.recordings.waiting is not None:
                self.recordings.try_to_begin()
            self.core.add(request, time.monotonic())
            self.of_id[name] = request

    def step(self) -> None:
        with self.lock:
            output = self.core.schedule(time.monotonic())
            result = StepResult([3] * int(output.samples.sum()))
            for request in self.core.update(output, result, time.monotonic()).finished:
                del self.of_id[request.request_id]

    def run_to_end(self) -> None:
        while not self.core.is_idle:
            self.step()

    def close(self) -> None:
        self.control.close()
        with self.lock:
            self.recordings.close()


@contextmanager
def operated(path: Path | None, **options: Any) -> Iterator[Operated]:
    host = Operated(path, **options)
    try:
        yield host
    finally:
        host.close()


@contextmanager
def stepping(host: Operated) -> Iterator[None]:
    """Step without a pause, in a separate thread, like vLLM."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            host.step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
