"""A grammar process that hangs, ends or cannot be started is replaced, and grammars are not blamed."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pointsman.core import Request
from pointsman.engine import GrammarError, GrammarUnavailableError, SamplingParams, StructuredOutputsParams
from pointsman.engine.grammar import compiler as grammar_compiler
from pointsman.engine.grammar import process as grammar_process
from pointsman.engine.grammar import worker
from pointsman.engine.grammar.compiler import GrammarCompiler, Outcome
from pointsman.engine.grammar.process import CompiledGrammar, GrammarLimits, GrammarServer
from pointsman.engine.grammar.vocabulary import GrammarVocabulary
from tests.engine.hopeless_grammar import HOPELESS, PATIENCE, wait_until
from tests.engine.text_tokenizers import byte_tokenizer

pytestmark = pytest.mark.e2e

VOCAB_SIZE, EOS = 199, 2


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GrammarCompiler]]:
    """Compilers that notice a late process within two seconds."""
    monkeypatch.setattr(grammar_process, "ACCEPT_TIMEOUT", 2.0)
    monkeypatch.setattr(grammar_process, "GRACE", 0.5)
    made: list[GrammarCompiler] = []

    def one(**limits: Any) -> GrammarCompiler:
        compiler = GrammarCompiler(byte_tokenizer(VOCAB_SIZE), VOCAB_SIZE, (EOS,), limits=GrammarLimits(**limits))
        made.append(compiler)
        return compiler

    yield one
    for compiler in made:
        compiler.close()


def add(compiler: GrammarCompiler, **options: Any) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**options))
    request = Request(str(id(params)), [1], arrival_time=0.0, max_tokens=9, metadata=params)
    compiler.add(request)
    return request


def take(compiler: GrammarCompiler, count: int = 1) -> list[Outcome]:
    found: list[Outcome] = []
    deadline = time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < deadline:
        compiler.wait(1.0)
        found += [outcome for _, outcome in compiler.take_finished()]
    assert len(found) == count
    return found


def outcome(compiler: GrammarCompiler, **options: Any) -> Outcome:
    add(compiler, **options)
    (found,) = take(compiler)
    return found


def started(compiler: GrammarCompiler) -> int:
    """Start the process, without a child; return its id."""
    assert isinstance(outcome(compiler, regex="start"), CompiledGrammar)
    pid = compiler.pid
    assert pid is not None
    wait_until(lambda: not children_of(pid))
    return pid


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(one) for one in file.read().split()]


def child_of(pid: int) -> int:
    """Wait for the only child of a process."""
    wait_until(lambda: bool(children_of(pid)))
    (child,) = children_of(pid)
    return child


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or is left for its parent to read."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextmanager
def all_stopped(compiler: GrammarCompiler) -> Iterator[None]:
    """Within the block each process of a compiler is stopped as soon as it can compile."""
    prepare = GrammarServer.prepare

    def prepare_and_stop(server: GrammarServer, vocabulary: GrammarVocabulary) -> None:
        prepare(server, vocabulary)
        os.kill(server.pid, signal.SIGSTOP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarServer, "prepare", prepare_and_stop)
        if compiler.pid is not None:
            os.kill(compiler.pid, signal.SIGSTOP)
        yield


def test_a_stopped_grammar_process_is_replaced(
    make: Callable[..., GrammarCompiler], caplog: pytest.LogCaptureFixture
) -> None:
    compiler = make()
    before = started(compiler)
    os.kill(before, signal.SIGSTOP)
    for number in range(6):
        add(compiler, regex=f"next{number}")
    with caplog.at_level(logging.WARNING):
        assert all(isinstance(found, CompiledGrammar) for found in take(compiler, 6))
    assert compiler.pid not in (None, before) and is_gone(before)
    assert compiler.num_restarts == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        line == f"the process that compiles grammars ({before}) has not started a job within 2.0 s; "
        "a new process replaces it"
    )


def test_two_hanging_processes_are_not_a_grammar_error(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    started(compiler)
    with all_stopped(compiler):
        for number in range(20):
            add(compiler, regex=f"next{number}")
        began = time.monotonic()
        for found in take(compiler, 20):
            assert isinstance(found, GrammarUnavailableError)
            assert "the process that compiles them has not started a job" in str(found)
        assert time.monotonic() - began < 25.0  # two hangs and two starts, not two per job
    assert compiler.num_restarts <= 4


def test_process_failures_are_not_cached(make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "RETRY_AFTER", 0.5)
    compiler = make()
    started(compiler)
    with all_stopped(compiler):
        assert isinstance(outcome(compiler, regex="again"), GrammarUnavailableError)
        assert isinstance(outcome(compiler, regex="again"), GrammarUnavailableError)  # at once, from the last
    time.sleep(0.6)
    assert isinstance(outcome(compiler, regex="again"), CompiledGrammar)


def stopped_child(compiler: GrammarCompiler, process: int) -> int:
    """The id of a child that was stopped while it compiles a hopeless grammar."""
    add(compiler, grammar=HOPELESS)
    child = child_of(process)
    wait_until(lambda: processor_time(child) > 0.1)  # it has reported its start, so its process is not replaced
    os.kill(child, signal.SIGSTOP)
    return child


OUT_OF_TIME = "takes more than 2 s of processor time"


def test_a_stopped_child_is_killed_and_its_job_retried(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 60.0)
    compiler = make(timeout=2.0)
    before = started(compiler)
    child = stopped_child(compiler, before)
    (found,) = take(compiler)
    assert isinstance(found, GrammarError) and OUT_OF_TIME in str(found)  # of the second try
    assert is_gone(child) and is_gone(before)
    assert compiler.num_restarts == 1


def test_waiting_for_a_processor_does_not_count_as_processor_time(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 60.0)
    compiler = make(timeout=2.0)
    child = stopped_child(compiler, started(compiler))
    time.sleep(2.5)
    began = time.monotonic()
    os.kill(child, signal.SIGCONT)
    (found,) = take(compiler)
    assert isinstance(found, GrammarError) and OUT_OF_TIME in str(found)
    assert time.monotonic() - began > 1.0 and compiler.num_restarts == 0


def test_a_process_that_hangs_before_it_forks_is_replaced(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make()
    before = started(compiler)
    ours, theirs = socket.socketpair()
    with ours, theirs:  # a job that is never read: its socket is silent, like that of a hanging process
        send_socket = GrammarServer.send_socket

        def lose(self: GrammarServer, sock: socket.socket) -> None:
            send_socket(self, sock if self.pid != before else theirs)
            if self.pid == before:
                kept.append(os.dup(sock.fileno()))

        kept: list[int] = []
        monkeypatch.setattr(GrammarServer, "send_socket", lose)
        assert isinstance(outcome(compiler, regex="next"), CompiledGrammar)
    for descriptor in kept:
        os.close(descriptor)
    assert is_gone(before) and compiler.num_restarts == 1


@pytest.mark.parametrize("moment", ["idle", "with a job", "with a slow job"])
def test_no_request_loses_its_grammar_when_the_process_is_killed(
    make: Callable[..., GrammarCompiler], moment: str
) -> None:
    compiler = make(timeout=60.0)
    before = started(compiler)
    if moment != "idle":
        slow = add(compiler, grammar=HOPELESS)
        child_of(before)
        if moment == "with a slow job":
            wait_until(lambda: compiler._worker.slow._queue._num_out == 1)
    os.kill(before, signal.SIGKILL)
    assert isinstance(outcome(compiler, regex="next"), CompiledGrammar)
    assert compiler.pid not in (None, before) and compiler.num_restarts == 1
    if moment != "idle":
        assert compiler.num_waiting == 1
        compiler.forget(slow)


def test_early_cancellations_do_not_hide_a_hang(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    before = started(compiler)
    os.kill(before, signal.SIGSTOP)
    for number in range(8):
        request = add(compiler, regex=f"given up {number}")
        time.sleep(0.2)
        compiler.forget(request)
    assert isinstance(outcome(compiler, regex="next"), CompiledGrammar)
    assert compiler.num_restarts == 1


def test_closing_ends_a_process_that_does_not_start(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[GrammarServer] = []

    def stopped() -> GrammarServer:
        servers.append(GrammarServer())
        os.kill(servers[-1].pid, signal.SIGSTOP)
        return servers[-1]

    monkeypatch.setattr(grammar_process, "GrammarServer", stopped)
    compiler = make()
    grammar = compiler.warm_up()
    wait_until(lambda: bool(servers))
    compiler.close()
    assert grammar.result(PATIENCE) is None
    wait_until(lambda: is_gone(servers[0].pid))
    assert len(servers) == 1


def test_starting_the_grammar_process_is_tried_twice(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "START_TIMEOUT", 0.5)
    servers: list[GrammarServer] = []

    def stopped() -> GrammarServer:
        servers.append(GrammarServer())
        os.kill(servers[-1].pid, signal.SIGSTOP)
        return servers[-1]

    monkeypatch.setattr(grammar_process, "GrammarServer", stopped)
    compiler = make()
    for number in range(10):
        add(compiler, regex=f"next{number}")
    for found in take(compiler, 10):
        assert isinstance(found, GrammarUnavailableError) and "is not ready after 0.5 s" in str(found)
    assert len(servers) == 2 and all(is_gone(server.pid) for server in servers)


def test_failing_to_start_a_process_is_not_a_grammar_error(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "RETRY_AFTER", 0.2)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    compiler = make()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process.subprocess, "Popen", refuse)
        found = outcome(compiler, regex="next")
    assert isinstance(found, GrammarUnavailableError) and "Resource temporarily unavailable" in str(found)
    assert isinstance(outcome(compiler, regex="next"), CompiledGrammar)


def test_failing_to_start_a_child_is_not_a_grammar_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refuse)
    ours, theirs = socket.socketpair()
    server: Any = None
    with ours:
        worker._fork_child(server, theirs.detach(), server)
        with pytest.raises(GrammarUnavailableError, match="Resource temporarily unavailable; try again later"):
            grammar_process._wait_for_child(ours)


def test_a_stopped_child_ends_with_its_engine(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "FIRST_SLICE", 60.0)
    compiler = make()
    before = started(compiler)
    add(compiler, grammar=HOPELESS)
    child = child_of(before)
    os.kill(child, signal.SIGSTOP)
    server = compiler._worker.process._server
    assert server is not None
    server.sock.shutdown(socket.SHUT_RDWR)  # simulates the engine's end
    wait_until(lambda: is_gone(child))


def test_many_different_grammars_all_get_a_result(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 40)
    compiler = make()
    started(compiler)
    for number in range(60):
        add(compiler, regex=f"number {number}")
    found = take(compiler, 60)
    refused = [one for one in found if not isinstance(one, CompiledGrammar)]
    assert 15 <= len(refused) <= 20 and all(type(one).__name__ == "GrammarQueueFullError" for one in refused)
