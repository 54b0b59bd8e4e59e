"""Outbox: writes to the API process. A step never waits for the API process, even if it does not read.

As long as the socket takes whole frames, the thread that makes a frame sends it immediately. Otherwise the writer's
thread sends the remaining bytes, and no further frame is made until then: new tokens are merged in the mailboxes of
their requests. So the waiting data is bounded by the tokens that the requests may generate, however slow the reader.

    engine's thread   mailbox.put -> port.mark ...  port.ring -> one frame of outputs    one per step
    writer's thread   only while the socket is full
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from pointsman.engine.aio.mailbox import Mailbox, Port
from pointsman.server.wire.logprobs import Logprobs
from pointsman.server.wire.messages import Delta, EngineOutputs, EngineRequest, StepNote, pack, portable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pointsman.engine.outputs.request_output import RequestOutput


PART_BYTES = 4 * 1024 * 1024
"""Bytes that the writer's thread sends in one call. After each call it waits for the GIL, which the engine's thread
holds."""


class Outbox:
    """The frames to be written to a socket.

    Args:
        sock: a blocking socket; only the outbox writes to it.
        on_clear: called in the writer's thread when all bytes have been sent.
    """

    def __init__(self, sock: socket.socket, on_clear: Callable[[], None]) -> None:
        self._sock = sock
        self._on_clear = on_clear
        self._lock = threading.Lock()
        self._unsent_changed = threading.Condition(self._lock)
        self._unsent = bytearray()
        self._is_broken = False
        threading.Thread(target=self._write_unsent, name="pointsman-writer", daemon=True).start()

    @property
    def is_clear(self) -> bool:
        """Whether no bytes wait, so that the next frame is sent immediately."""
        return not self._unsent

    def put(self, message: object) -> None:
        """Send a message after all earlier ones, without blocking. The message is lost if the other end is closed."""
        frame = pack(message)
        with self._lock:
            if self._is_broken:
                return
            sent = 0
            if not self._unsent:
                try:
                    sent = self._sock.send(frame, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:
                    self._is_broken = True
                    return
            if sent < len(frame):
                self._unsent += memoryview(frame)[sent:]
                self._unsent_changed.notify_all()

    def wait_until_clear(self, timeout: float) -> None:
        """Wait until all bytes have been sent, at most `timeout` seconds."""
        with self._lock:
            self._unsent_changed.wait_for(lambda: not self._unsent or self._is_broken, timeout)

    def _write_unsent(self) -> None:
        while True:
            with self._lock:
                self._unsent_changed.wait_for(lambda: bool(self._unsent))
                part = bytes(memoryview(self._unsent)[:PART_BYTES])
            try:
                sent = self._sock.send(part)  # the only call that blocks
            except OSError:
                sent = -1
            with self._lock:
                if sent < 0:
                    self._is_broken = True
                    self._unsent.clear()
                else:
                    del self._unsent[:sent]
                is_clear = not self._unsent
                self._unsent_changed.notify_all()
            if is_clear:
                self._on_clear()
            if sent < 0:
                return


class RemotePort(Port["RemoteMailbox"]):
    """The mailboxes of all requests of the API process, and the outbox that sends their new outputs.

    Args:
        sock: socket to the API process.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.outbox = Outbox(sock, on_clear=self._send_outputs)
        self.mailboxes: dict[int, RemoteMailbox] = {}
        """The mailboxes of unfinished requests, by their keys."""
        self._steps: deque[StepNote] = deque()
        self._reporting = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Always False: the engine process exits when the API process does."""
        return False

    def note_step(self, note: StepNote) -> None:
        """Engine's thread: add a step's numbers of tokens and scheduler time to the next frame."""
        self._steps.append(note)

    def ring(self) -> bool:
        """Engine's thread: send new outputs to the API process; if the socket is full, the writer's thread sends them.
        Returns True, as the port is not closed."""
        self._send_outputs()
        return True

    def _send_outputs(self) -> None:
        # A thread that does not get the lock leaves its outputs to the lock's holder, which checks again after release.
        while (self._marked or self._steps) and self.outbox.is_clear and self._reporting.acquire(blocking=False):
            try:
                self.outbox.put(self._take_outputs())
            finally:
                self._reporting.release()

    def _take_outputs(self) -> EngineOutputs:
        new = EngineOutputs()
        while self._steps:
            new.steps.append(self._steps.popleft())
        for mailbox in self._pop_marked_mailboxes():
            if mailbox.take_outputs(new):
                self.mailboxes.pop(mailbox.key, None)
        return new


class RemoteMailbox(Mailbox):
    """The newest output of one request of the API process, and the output that was reported last.

    Args:
        port: the port to the API process.
        key: the API process's key for the request.
        request: the API process's request.
    """

    __slots__ = ("_has_reported_acceptance", "_reported", "key", "request")

    def __init__(self, port: RemotePort, key: int, request: EngineRequest) -> None:
        super().__init__(port)
        self.key = key
        self.request = request
        self._has_reported_acceptance = False
        self._reported: RequestOutput | None = None

    def note_reported(self, output: RequestOutput) -> None:
        """Set the request's output that the API process has already received from another engine; it is not reported
        again."""
        self._reported = output

    def take_outputs(self, new: EngineOutputs) -> bool:
        """Add the acceptance, tokens and error that are not reported yet to the message `new`. Returns whether the
        request has ended. Only the thread that makes the frame calls this."""
        if self.is_abandoned:
            return True
        error, latest, reported = self._error, self._latest, self._reported
        if self._accepted and not self._has_reported_acceptance:
            self._has_reported_acceptance = True
            new.accepted.append(self.key)
        if (
            latest is not None
            and latest is not reported
            and (latest.finished or reported is None or self.request.stream)
        ):
            self._reported = latest
            _add_output(new, self.key, latest, reported)
            if latest.finished:
                return True
        if error is not None:
            new.errors.append((self.key, portable(error)))
        return error is not None


def _add_output(outputs: EngineOutputs, key: int, latest: RequestOutput, reported: RequestOutput | None) -> None:
    """Add to the message `outputs` the tokens of the request's output `latest` that are not in `reported`, the output
    that was reported last; None: no output was reported."""
    new = latest.since(reported)
    sample = new.outputs[0]
    entries = sample.token_logprobs
    of_prompt = new.prompt_token_logprobs if reported is None else None
    if not latest.finished and entries is None and of_prompt is None:
        outputs.tokens.append((key, sample.text, sample.token_ids, latest.num_cached_tokens))
        return
    delta = Delta(sample.text, sample.token_ids, num_cached_tokens=latest.num_cached_tokens)
    if entries is not None:
        delta.logprobs = Logprobs.from_entries(entries, new.token_piece, sample.token_pieces)
    if of_prompt is not None:
        delta.prompt_logprobs = Logprobs.from_entries(of_prompt, new.token_piece)
    if latest.finished:
        delta.finish_reason, delta.stop_reason = sample.finish_reason, sample.stop_reason
        delta.finish_detail, delta.metrics = sample.finish_detail, latest.metrics
        delta.embedding = latest.embedding
    outputs.deltas.append((key, delta))
