"""GrammarProcess: starts the process that compiles grammars (`worker.py`), sends jobs to it and replaces it if it
hangs.

The process starts when it is first needed. Several threads may call `GrammarProcess.compile`, and each waits for its
own job. A job has a socket pair, whose other end goes to the process. `Job.cancel` closes the socket, which ends the
compilation immediately.

A process that hangs must be distinguished from a slow grammar. The process forks a child for each job. The child first
sends a message that it runs, and the kernel ends the child when the grammar's time is up. So the process hangs

    if no child has begun                      within ACCEPT_TIMEOUT
    if a child has neither answered nor ended  GRACE after the grammar's time was up, waiting included

Then the process is killed with all its children, another process is started, and the job is tried once more. If the
second try fails too, the error is a `GrammarUnavailableError`. After two consecutive processes that hang, all jobs get
this error without waiting, for `RETRY_AFTER` seconds, so that they do not wait for one hang after the other.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pointsman.engine.errors import NO_COMPILER, GrammarError, GrammarUnavailableError, first_line
from pointsman.engine.params.structured_outputs import MAX_WHITESPACE, GrammarSpec

if TYPE_CHECKING:
    import xgrammar

    from pointsman.engine.grammar.vocabulary import GrammarVocabulary

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

DEFAULT_TIMEOUT = 10.0
"""Default of the maximum seconds of processor time that a grammar may take to compile."""
SECONDS_PER_CPU_SECOND = 3
"""Maximum seconds that may pass per second of processor time: on a busy machine a child gets only a part of a
processor."""
START_TIMEOUT = 60.0
"""Maximum seconds until a new process has imported xgrammar and can compile; usually it takes a few seconds."""
ACCEPT_TIMEOUT = 3.0
"""Maximum seconds until a child of the process has begun with a job; usually it takes some milliseconds."""
GRACE = 3.0
"""Maximum seconds from the end of a grammar's time to the end of the child that compiles it."""
RETRY_AFTER = 5.0
"""Seconds for which no process is started after two consecutive processes did not answer or ended."""
NICENESS, SLOW_NICENESS = 5, 10
"""Niceness of a child that compiles a new grammar, and of a child that compiles a slow grammar. The model's threads
have priority."""
SECONDS_TO_END = 5.0
"""Maximum seconds until a killed process has ended; usually it takes some milliseconds."""
KILL_PATIENCE = 0.2
"""Maximum seconds from the end of a child to the end of its parent process, if both were killed."""
MAX_COMPILED_BYTES = 64 * 1024**2
"""Maximum length of a compiled grammar as JSON, in bytes. Reading the JSON takes about a second per 100 MB."""

_WORKER = Path(__file__).with_name("worker.py")
_HAS_ENDED = "has ended"
_READY, _ACCEPTED, _NO_CHILD = b"R", b"A", b"!"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of time and memory for compiling one grammar and checking texts against it."""

    timeout: float = DEFAULT_TIMEOUT
    """Maximum processor time to compile the grammar, in seconds."""
    memory: int = 2 * 1024**3
    """Maximum memory to compile the grammar, in bytes."""
    start_time: float = 0.25
    """Constant part of the maximum processor time, in seconds, for checking a text against the grammar; each token adds
    `token_time`."""
    token_time: float = 0.002
    """Part of the maximum processor time per token of a text, in seconds. A token usually takes some tens of
    microseconds. In a grammar that allows one text in many ways each token takes longer than the token before, and
    every request waits."""

    @property
    def longest(self) -> float:
        """Maximum seconds that may pass while the grammar is compiled."""
        return SECONDS_PER_CPU_SECOND * self.timeout


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar for one vocabulary. All requests with the same grammar share it."""

    compiled: xgrammar.CompiledGrammar
    vocabulary: GrammarVocabulary
    num_bytes: int
    limits: GrammarLimits


class Cancelled(Exception):
    """The job was cancelled, or the process was closed."""


class OutOfTime(GrammarError):
    """The grammar was not compiled within its time limit or its slice of processor time."""


class _Late(Exception):
    """The process that compiles, or one of its children, does not answer in time."""


class _Ended(Exception):
    """The process that compiles has ended, or cannot be started."""


class Job:
    """The compilation of one grammar, which another thread may cancel."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def cancel(self) -> None:
        """Cancel the job, whether it is running or queued."""
        with self._lock:
            self.is_cancelled = True
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)

    def begin(self, sock: socket.socket) -> None:
        """Record the socket of the running job, which `cancel` shuts down.

        Raises:
            Cancelled: the job was cancelled.
        """
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._sock = sock

    def end(self) -> None:
        """Forget the job's socket, which is about to be closed."""
        with self._lock:
            self._sock = None


class GrammarProcess:
    """Compiles grammars for one vocabulary, in a separate process.

    Args:
        read_vocabulary: function that returns the vocabulary; called once, in the thread that first compiles a grammar;
            may raise GrammarError.
        limits: limits for each grammar.
    """

    def __init__(self, read_vocabulary: Callable[[], GrammarVocabulary], limits: GrammarLimits) -> None:
        self.num_restarts = 0
        """Number of times that a process was replaced by a new process, because it had ended or did not answer."""
        self._read_vocabulary = read_vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer_info: xgrammar.TokenizerInfo | None = None
        self._server: GrammarServer | None = None
        self._is_ready = False  # whether `_server` has the vocabulary
        self._spare: GrammarServer | None = None
        self._num_failures = 0  # consecutive processes that did not answer or ended
        self._trouble: tuple[float, str] = (0.0, "")  # time of the next start, and the error until then
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The id of the process that compiles; None while no process can compile."""
        server = self._server
        return server.pid if server is not None and self._is_ready else None

    def start(self, server: GrammarServer | None = None) -> None:
        """Start the process if it does not run, and wait until it can compile.

        Args:
            server: a process that was started earlier, for this object alone; None: a new process is started.

        Raises:
            GrammarUnavailableError: the process cannot be started.
            GrammarError: the model's tokenizer cannot be read, or there is no xgrammar.
            Cancelled: `close` was called.
        """
        self._spare = server
        try:
            self._use_server(lambda _: None)
        finally:
            self._spare = None
            if server is not None and server is not self._server:
                server.close()

    def compile(self, job: Job, cpu_slice: float = 0.0, niceness: int = NICENESS) -> CompiledGrammar:
        """Compile a grammar, and wait until it is compiled.

        Args:
            job: the job with the grammar to compile.
            cpu_slice: maximum seconds of processor time for this compilation; 0: `GrammarLimits.timeout`.
            niceness: niceness of the child that compiles the grammar.

        Raises:
            OutOfTime: the compilation takes longer.
            GrammarUnavailableError: the process does not answer, or cannot be started.
            GrammarError: the grammar cannot be compiled, or exceeds another limit.
            Cancelled: the job was cancelled, or `close` was called.
        """
        limits = self._limits
        content = {
            **job.spec._asdict(),
            "max_whitespace": MAX_WHITESPACE,
            "seconds": limits.longest,
            "cpu_seconds": cpu_slice or limits.timeout,
            "niceness": niceness,
            "memory_limit": limits.memory,
            "start_time": limits.start_time,
            "token_time": limits.token_time,
            "out_of_memory": f"it needs more than {limits.memory / 1024**3:g} GiB of memory to compile; simplify it",
        }
        encoded = json.dumps(content).encode()
        started = 0.0

        def ask(server: GrammarServer) -> bytes:
            nonlocal started
            started = time.monotonic()
            return self._run_job(server, job, encoded)

        answer = self._use_server(ask)
        if not answer.endswith(b"\0"):  # the kernel ended the child alone: the process is alive
            seconds = time.monotonic() - started
            if cpu_slice or seconds >= limits.timeout:
                why = f"it takes more than {limits.timeout:g} s of processor time to compile; simplify it"
                raise OutOfTime(_describe_error(job.spec, why))
            why = f"the compiler ended without an answer after {seconds:.1f} s; simplify it"
            raise GrammarError(_describe_error(job.spec, why))
        if answer[:1] != b"+":
            raise GrammarError(_describe_error(job.spec, answer[1:-1].decode("utf-8", "replace")))
        import xgrammar

        assert self._tokenizer_info is not None and self._vocabulary is not None  # a job ran, so it has started
        compiled = xgrammar.CompiledGrammar.deserialize_json(answer[1:-1].decode(), self._tokenizer_info)
        return CompiledGrammar(compiled, self._vocabulary, compiled.memory_size_bytes, limits)

    def close(self) -> None:
        """End the process and every compilation."""
        self._is_closed = True
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # ------------------------------------------------------------------ one job

    def _run_job(self, server: GrammarServer, job: Job, content: bytes) -> bytes:
        """Run a job in a child of the process; return the child's answer, which is incomplete if the kernel ended the
        child.

        Raises:
            _Late, _Ended: the process does not answer or has ended.
            GrammarUnavailableError: the system cannot start a child.
            Cancelled: the job was cancelled, or `close` was called.
        """
        if job.is_cancelled:
            raise Cancelled
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise GrammarUnavailableError(f"{NO_COMPILER}{first_line(error)}; try again later") from error
        with ours:
            with theirs, self._lock:  # keeps the process's socket open meanwhile
                server.send_socket(theirs)
            _wait_for_child(ours)  # even if cancelled, or clients that cancel early would hide a process that hangs
            job.begin(ours)
            try:
                answer = self._exchange_job(ours, content)
            finally:
                job.end()
        if job.is_cancelled or self._is_closed:
            raise Cancelled
        if not answer.endswith(b"\0") and server.wait_for_end(KILL_PATIENCE):
            raise _Ended(_HAS_ENDED)
        return answer

    def _exchange_job(self, sock: socket.socket, content: bytes) -> bytes:
        """Send a job to its child; return the child's answer, which is incomplete if the kernel ended the child.

        Raises:
            _Late: the child has not ended within `GRACE` seconds after its time was up.
        """
        pieces, size = [], 0
        patience = self._limits.longest + GRACE
        deadline = time.monotonic() + patience
        try:
            sock.settimeout(patience)
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 20):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_COMPILED_BYTES:
                    return b"-it is too large once compiled; simplify it\0"
                sock.settimeout(max(0.001, deadline - time.monotonic()))
        except TimeoutError as error:
            raise _Late(f"has not finished a job within {patience:.1f} s") from error
        except OSError:  # the child was ended
            return b""
        return b"".join(pieces)

    # ------------------------------------------------------------------ the process

    def _use_server(self, function: Callable[[GrammarServer], AnswerT]) -> AnswerT:
        """Call `function` with the process, and return its result. If the process does not answer or has ended,
        call `function` once more, with a new process.

        Raises:
            GrammarUnavailableError: the second process fails too, or no process is started for `RETRY_AFTER` seconds
                after earlier failures.
            GrammarError: the system cannot run such a process, or the model's vocabulary cannot be read.
            Cancelled: `close` was called.
        """
        for is_last in (False, True):
            server = None
            try:
                server = self._running_server()
                answer = function(server)
                self._num_failures = 0
                return answer
            except (_Late, _Ended) as error:
                self._check_open()
                with self._lock:
                    self._discard_server(server, error)
                if is_last:
                    raise GrammarUnavailableError(_unavailable_message(error)) from error
        raise AssertionError  # unreachable: the second attempt returned or raised

    def _running_server(self) -> GrammarServer:
        with self._lock:
            self._check_open()
            until, why = self._trouble
            if time.monotonic() < until:
                raise GrammarUnavailableError(why)
            if self._server is not None and not self._server.is_running:
                self._discard_server(self._server, _Ended(_HAS_ENDED))
            if self._server is None:
                self._start()
            assert self._server is not None
            return self._server

    def _start(self) -> None:
        started = time.monotonic()
        server, self._spare = self._spare or GrammarServer(), None  # a new one imports while the vocabulary is read
        self._server = server
        try:
            self._check_open()  # `close` may not have seen the new process
            if self._vocabulary is None:
                vocabulary = self._read_vocabulary()
                self._tokenizer_info = vocabulary.tokenizer_info()
                self._vocabulary = vocabulary
            server.prepare(self._vocabulary)
            self._is_ready = True
        except (_Late, _Ended) as error:
            self._discard_server(server, error)
            raise
        except BaseException as error:
            server.close()
            self._server = None
            if isinstance(error, ImportError):
                raise GrammarError(f"structured output needs the package xgrammar: {first_line(error)}") from error
            raise
        logger.debug("process %d was started to compile grammars (%.1f s)", server.pid, time.monotonic() - started)

    def _discard_server(self, server: GrammarServer | None, why: Exception) -> None:
        """End a process that failed, unless another job has replaced it already; the next job starts a new process."""
        if server is None or server is not self._server:
            return
        self._server, self._is_ready = None, False
        self.num_restarts += 1
        self._num_failures += 1
        if self._num_failures > 1:
            self._trouble = (time.monotonic() + RETRY_AFTER, _unavailable_message(why))
        logger.warning("the process that compiles grammars (%d) %s; a new process replaces it", server.pid, why)
        server.close()

    def _check_open(self) -> None:
        if self._is_closed:
            server, self._server = self._server, None
            if server is not None:
                server.close()
            raise Cancelled


class GrammarServer:
    """A process that compiles grammars, and the socket from which it reads jobs. It ends when the socket is closed or
    the engine's process ends.

    The process starts with this object and imports xgrammar; it can compile after `prepare`.

    Raises:
        GrammarUnavailableError: the system cannot start a process.
        GrammarError: this system cannot limit such a process.
    """

    def __init__(self) -> None:
        if not (hasattr(socket, "AF_UNIX") and hasattr(os, "memfd_create")):
            raise GrammarError(
                "structured output needs Linux, because only its kernel can limit the process that compiles grammars"
            )
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self.sock, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=env,
                )
        except OSError as error:
            raise GrammarUnavailableError(f"{NO_COMPILER}{first_line(error)}; try again later") from error
        self.pid = self._process.pid
        self._end_process = weakref.finalize(self, _end_process, self._process, self.sock)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for_end(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the process; return whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def prepare(self, vocabulary: GrammarVocabulary) -> None:
        """Send the vocabulary to the process, and wait until the process can compile.

        Raises:
            _Late, _Ended: the process is not ready in time, or has ended.
        """
        content = pickle.dumps((vocabulary.tokens, vocabulary.stop_token_ids))
        self.sock.settimeout(START_TIMEOUT)
        try:
            self.sock.sendall(len(content).to_bytes(8, "big") + content)
            ready = self.sock.recv(1)
        except TimeoutError as error:
            raise _Late(f"is not ready after {START_TIMEOUT:g} s") from error
        except OSError as error:
            raise _Ended(f"ended at its start: {first_line(error)}") from error
        if ready != _READY:
            raise _Ended("ended at its start; the log says why")
        self.sock.settimeout(ACCEPT_TIMEOUT)

    def send_socket(self, child_socket: socket.socket) -> None:
        """Pass the child's end of a job's socket pair to the process.

        Raises:
            _Late, _Ended: the process does not take the socket.
        """
        try:
            socket.send_fds(self.sock, [b"j"], [child_socket.fileno()])
        except TimeoutError as error:
            raise _Late(f"has accepted no job for {ACCEPT_TIMEOUT:g} s") from error
        except OSError as error:
            raise _Ended(_HAS_ENDED) from error

    def close(self) -> None:
        """End the process."""
        self._end_process()


def _unavailable_message(why: Exception) -> str:
    return f"{NO_COMPILER}the process that compiles them {why}, also after a restart; try again later"


def _wait_for_child(sock: socket.socket) -> None:
    """Wait until a child has begun with the job of this socket.

    Raises:
        _Late, _Ended: no child has begun in time, or the process has ended.
        GrammarUnavailableError: the system cannot start a child.
    """
    sock.settimeout(ACCEPT_TIMEOUT)
    try:
        first = sock.recv(1)
        if first == _ACCEPTED:
            return
        why = sock.recv(200).decode("utf-8", "replace") if first == _NO_CHILD else ""
    except TimeoutError as error:
        raise _Late(f"has not started a job within {ACCEPT_TIMEOUT:.1f} s") from error
    except OSError as error:
        raise _Ended(_HAS_ENDED) from error
    if first == _NO_CHILD:
        raise GrammarUnavailableError(f"{NO_COMPILER}{why}; try again later")
    raise _Ended(_HAS_ENDED)


def _end_process(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    if process.poll() is None:  # the id of an ended process may belong to another one
        with suppress(ProcessLookupError):  # the process does not lead a group yet
            os.killpg(process.pid, signal.SIGKILL)  # also children that are stopped
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)


_NAMES = {"json": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}


def _describe_error(spec: GrammarSpec, why: str) -> str:
    """The message of an error about a grammar, in one line."""
    shown = spec.text if len(spec.text) <= 60 else spec.text[:57] + "..."
    return " ".join(f"the {_NAMES[spec.kind]} {shown!r} cannot be used: {why}".split())
