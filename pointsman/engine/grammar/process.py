"""The engine's side of the process that compiles grammars (`worker.py`): started when it is first needed.

`GrammarProcess.compile` may be called from several threads, each of which waits for its own job: a socket pair whose
other end goes to the process. Closing it, `Job.cancel`, ends the compilation at once.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pointsman.engine.errors import GrammarError, first_line
from pointsman.engine.params.structured_outputs import MAX_WHITESPACE, GrammarSpec

if TYPE_CHECKING:
    import xgrammar

    from pointsman.engine.grammar.vocabulary import GrammarVocabulary

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 10.0
"""Seconds that a grammar may take to compile, by default."""
START_TIMEOUT = 120.0
"""Seconds in which the process must have imported xgrammar; some seconds, as a rule."""
GRACE = 5.0
"""Seconds beyond the time limit after which a child that does not answer is given up."""
KILL_PATIENCE = 0.2
"""Seconds from the end of a child to that of its parent, if both were killed."""
MAX_COMPILED_BYTES = 64 * 1024**2
"""The maximum length of a compiled grammar, as JSON. Reading one takes about a second per 100 MB."""

_WORKER = Path(__file__).with_name("worker.py")
_READY = b"R"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling and using one grammar may cost."""

    timeout: float = DEFAULT_TIMEOUT
    """Seconds to compile it."""
    memory: int = 2 * 1024**3
    """Bytes to compile it."""
    start_time: float = 0.25
    """Seconds of processor time that a text may spend in it at any moment, and ..."""
    token_time: float = 0.002
    """... for each token so far besides, to say which may come next. Some tens of microseconds are usual, but in a
    grammar that allows one text in many ways each token takes longer than the one before, and every request waits."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar for one vocabulary. Requests share it."""

    compiled: xgrammar.CompiledGrammar
    vocabulary: GrammarVocabulary
    num_bytes: int
    limits: GrammarLimits


class Cancelled(Exception):
    """No request waits for the grammar any more."""


class OutOfTime(GrammarError):
    """The grammar was not compiled within its time limit."""


class Job:
    """One compilation, which another thread may cancel."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def cancel(self) -> None:
        """Cancel it, running or queued."""
        with self._lock:
            self.is_cancelled = True
            if self._sock is not None:
                self._sock.shutdown(socket.SHUT_RDWR)

    def begin(self, sock: socket.socket) -> None:
        """From now on `cancel` closes this socket.

        Raises:
            Cancelled: it has been.
        """
        with self._lock:
            if self.is_cancelled:
                raise Cancelled
            self._sock = sock

    def end(self) -> None:
        """The socket is about to be closed."""
        with self._lock:
            self._sock = None


class GrammarProcess:
    """Compiles grammars for one vocabulary.

    Args:
        read_vocabulary: called once, in the thread that first compiles something; may raise GrammarError.
        limits: for each grammar.
    """

    def __init__(self, read_vocabulary: Callable[[], GrammarVocabulary], limits: GrammarLimits) -> None:
        self._read_vocabulary = read_vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer_info: xgrammar.TokenizerInfo | None = None
        self._server: GrammarServer | None = None
        self._spare: GrammarServer | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        server = self._server
        return None if server is None else server.pid

    def start(self, server: GrammarServer | None = None) -> None:
        """Start the process if it does not run, and wait until it can compile.

        Args:
            server: one that was started before the vocabulary was known, to be used by no other; None: a new one.

        Raises:
            GrammarError: it cannot be started, or the model's tokenizer cannot be read.
            Cancelled: `close` was called.
        """
        with self._lock:
            self._spare = server
            try:
                self._start()
            finally:
                self._spare = None
                if server is not None and server is not self._server:
                    server.close()

    def compile(self, job: Job, timeout: float) -> CompiledGrammar:
        """Compile a grammar, and wait for it, `timeout` seconds at most.

        Raises:
            OutOfTime: it takes longer.
            GrammarError: it cannot be compiled, or exceeds another limit.
            Cancelled: the job was, or `close` was called.
        """
        answer = self._ask(job, timeout)
        if answer[:1] != b"+":
            raise GrammarError(_described(job.spec, answer[1:-1].decode("utf-8", "replace")))
        import xgrammar

        assert self._tokenizer_info is not None and self._vocabulary is not None  # a job ran, so it has started
        compiled = xgrammar.CompiledGrammar.deserialize_json(answer[1:-1].decode(), self._tokenizer_info)
        return CompiledGrammar(compiled, self._vocabulary, compiled.memory_size_bytes, self._limits)

    def close(self) -> None:
        """End the process, and with it every compilation."""
        self._is_closed = True
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # ------------------------------------------------------------------ one job

    def _ask(self, job: Job, timeout: float) -> bytes:
        """The child's answer, whole; a second time, if the process was killed meanwhile."""
        limits = self._limits
        content = {
            **job.spec._asdict(),
            "max_whitespace": MAX_WHITESPACE,
            "timeout": timeout,
            "memory_limit": limits.memory,
            "start_time": limits.start_time,
            "token_time": limits.token_time,
            "out_of_memory": f"it needs more than {limits.memory / 1024**3:g} GiB of memory to compile; simplify it",
        }
        for _ in range(2):
            if job.is_cancelled:
                raise Cancelled
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    server = self._hand_over(theirs)
                started = time.monotonic()
                job.begin(ours)
                try:
                    answer = self._exchange(ours, json.dumps(content).encode(), timeout + GRACE)
                finally:
                    job.end()
            if job.is_cancelled or self._is_closed:
                raise Cancelled
            if answer.endswith(b"\0"):
                return answer
            seconds = time.monotonic() - started
            if seconds >= timeout:
                raise OutOfTime(_described(job.spec, f"it takes longer than {timeout:g} s to compile; simplify it"))
            if not server.ends_within(KILL_PATIENCE):
                break
        raise GrammarError(
            _described(job.spec, f"the compiler ended without an answer after {seconds:.1f} s; simplify it")
        )

    def _exchange(self, sock: socket.socket, content: bytes, patience: float) -> bytes:
        """What the child answers; cut short if it was ended, or is silent for `patience` seconds."""
        sock.settimeout(patience)
        pieces, size = [], 0
        try:
            sock.sendall(content)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 20):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_COMPILED_BYTES:
                    return b"-it is too large once compiled; simplify it\0"
        except OSError:  # it was ended, or does not answer
            return b""
        return b"".join(pieces)

    def _hand_over(self, theirs: socket.socket) -> GrammarServer:
        """Give a job's socket to the process; to a new one, if it has ended since."""
        with self._lock:
            for attempt in range(2):
                server = self._start()
                try:
                    socket.send_fds(server.sock, [b"j"], [theirs.fileno()])
                    return server
                except OSError as error:
                    logger.warning("the process that compiles grammars has ended; starting another")
                    server.close()
                    self._server = None
                    if attempt:
                        raise GrammarError(f"grammars cannot be compiled: {first_line(error)}") from error
        raise AssertionError  # unreachable: the second attempt returned or raised

    # ------------------------------------------------------------------ the process

    def _start(self) -> GrammarServer:
        self._check_open()
        if self._server is None or not self._server.is_running:
            started = time.monotonic()
            server = self._spare or GrammarServer()  # which imports while the vocabulary is read here
            try:
                if self._vocabulary is None:
                    vocabulary = self._read_vocabulary()
                    self._tokenizer_info = vocabulary.tokenizer_info()
                    self._vocabulary = vocabulary
                server.prepare(self._vocabulary)
            except ImportError as error:
                server.close()
                raise GrammarError(f"structured output needs the package xgrammar: {first_line(error)}") from error
            except BaseException:
                server.close()
                raise
            self._server = server
            logger.info("grammars are compiled by process %d (%.1f s)", server.pid, time.monotonic() - started)
            self._check_open()  # it may have been closed meanwhile
        return self._server

    def _check_open(self) -> None:
        if self._is_closed:
            if self._server is not None:
                self._server.close()
            raise Cancelled


class GrammarServer:
    """The process, and the socket that it reads jobs from. Closing the socket, or the engine's end, ends it.

    It begins to import at once, and can compile once it was given a vocabulary.

    Raises:
        GrammarError: this system cannot limit such a process.
    """

    def __init__(self) -> None:
        if not (hasattr(socket, "AF_UNIX") and hasattr(os, "memfd_create")):
            raise GrammarError("structured output needs Linux, whose kernel limits the process that compiles grammars")
        self.sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self.sock)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so within that time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def prepare(self, vocabulary: GrammarVocabulary) -> None:
        """Send the vocabulary, and wait until the process is ready.

        Raises:
            GrammarError: it ended instead, or takes too long.
        """
        content = pickle.dumps((vocabulary.tokens, vocabulary.stop_token_ids))
        self.sock.settimeout(START_TIMEOUT)
        try:
            self.sock.sendall(len(content).to_bytes(8, "big") + content)
            ready = self.sock.recv(1)
        except OSError as error:
            raise GrammarError(f"the process that compiles grammars does not start: {first_line(error)}") from error
        if ready != _READY:
            raise GrammarError("the process that compiles grammars ended at its start; the log says why")
        self.sock.settimeout(GRACE)

    def close(self) -> None:
        """End the process."""
        self._end()


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    process.kill()  # it keeps nothing; its children end with their own sockets
    process.wait()


_NAMES = {"json": "JSON schema", "regex": "regular expression", "ebnf": "grammar"}


def _described(spec: GrammarSpec, why: str) -> str:
    """An error about a grammar, in one line."""
    shown = spec.text if len(spec.text) <= 60 else spec.text[:57] + "..."
    return " ".join(f"the {_NAMES[spec.kind]} {shown!r} cannot be used: {why}".split())
