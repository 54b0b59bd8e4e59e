"""How the engine process writes: a step never waits for the API process, however long that does not read.

As long as the socket takes all that is written, a frame goes out at once, from the thread that makes it. Otherwise the
rest is kept, a thread writes it when there is room, and until then no further outputs are made: requests that get more
tokens meanwhile have them in their mailboxes, where they come together in one. So what waits is bounded by what the
requests may generate, however slow the reader.

    engine's thread   mailbox.put -> port.mark ...  port.ring -> one frame of news    one per step
    writer's thread   only while the socket is full
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from pointsman.engine.aio.mailbox import Mailbox, Port
from pointsman.server.wire import Delta, EngineRequest, News, StepNote, pack, portable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pointsman.engine.outputs.request_output import RequestOutput


class Outbox:
    """Frames on their way out of a socket.

    Args:
        sock: blocking; nobody else writes to it.
        on_clear: called in the writer's thread when all that was kept back has gone.
    """

    def __init__(self, sock: socket.socket, on_clear: Callable[[], None]) -> None:
        self._sock = sock
        self._on_clear = on_clear
        self._lock = threading.Lock()
        self._has_rest = threading.Condition(self._lock)
        self._rest = bytearray()
        self._is_broken = False
        threading.Thread(target=self._write_rest, name="pointsman-writer", daemon=True).start()

    @property
    def is_clear(self) -> bool:
        """Whether a frame would go out at once."""
        return not self._rest

    def put(self, message: object) -> None:
        """Send a message behind all others; returns at once. Lost if the other end is gone."""
        frame = pack(message)
        with self._lock:
            if self._is_broken:
                return
            sent = 0
            if not self._rest:
                try:
                    sent = self._sock.send(frame, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:
                    self._is_broken = True
                    return
            if sent < len(frame):
                self._rest += memoryview(frame)[sent:]
                self._has_rest.notify_all()

    def wait_until_clear(self, timeout: float) -> None:
        """Wait, at most so many seconds, until everything has gone out."""
        with self._lock:
            self._has_rest.wait_for(lambda: not self._rest or self._is_broken, timeout)

    def _write_rest(self) -> None:
        while True:
            with self._lock:
                self._has_rest.wait_for(lambda: bool(self._rest))
                part = bytes(memoryview(self._rest)[: 1 << 16])
            try:
                sent = self._sock.send(part)  # the only place that waits
            except OSError:
                sent = -1
            with self._lock:
                if sent < 0:
                    self._is_broken = True
                    self._rest.clear()
                else:
                    del self._rest[:sent]
                is_clear = not self._rest
                self._has_rest.notify_all()
            if is_clear:
                self._on_clear()
            if sent < 0:
                return


class RemotePort(Port["RemoteMailbox"]):
    """All requests of the API process.

    Args:
        sock: to the API process.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.outbox = Outbox(sock, on_clear=self._tell)
        self.mailboxes: dict[int, RemoteMailbox] = {}
        """Of requests that have not ended, by their keys."""
        self._steps: deque[StepNote] = deque()
        self._telling = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Never: when the API process goes, the engine process does."""
        return False

    def note_step(self, note: StepNote) -> None:
        """Engine's thread: what a step did, to be told with the next `ring`."""
        self._steps.append(note)

    def ring(self) -> bool:
        """Engine's thread: tell the API process all the news, or leave it to the writer's thread."""
        self._tell()
        return True

    def _tell(self) -> None:
        # Who does not get the lock leaves his news to who has it, who looks again after giving it back.
        while (self._marked or self._steps) and self.outbox.is_clear and self._telling.acquire(blocking=False):
            try:
                self.outbox.put(self._take_news())
            finally:
                self._telling.release()

    def _take_news(self) -> News:
        news = News()
        while self._steps:
            news.steps.append(self._steps.popleft())
        for mailbox in self._take_marked():
            if mailbox.take_news(news):
                self.mailboxes.pop(mailbox.key, None)
        return news


class RemoteMailbox(Mailbox):
    """The newest output of one request of the API process, and what of it has been told.

    Args:
        port: of the API process.
        key: its name for the request.
        request: what it asked for.
    """

    __slots__ = ("_has_told_acceptance", "_told", "key", "request")

    def __init__(self, port: RemotePort, key: int, request: EngineRequest) -> None:
        super().__init__(port)
        self.key = key
        self.request = request
        self._has_told_acceptance = False
        self._told: RequestOutput | None = None

    def take_news(self, news: News) -> bool:
        """Put what is new into `news`; whether it is the last there will be. For whoever tells."""
        if self.is_abandoned:
            return True
        error, latest, told = self._error, self._latest, self._told
        if self._accepted and not self._has_told_acceptance:
            self._has_told_acceptance = True
            news.accepted.append(self.key)
        if latest is not None and latest is not told and (latest.finished or told is None or self.request.stream):
            self._told = latest
            news.deltas.append((self.key, _delta(latest, told)))
            if latest.finished:
                return True
        if error is not None:
            news.errors.append((self.key, portable(error)))
        return error is not None


def _delta(latest: RequestOutput, told: RequestOutput | None) -> Delta:
    new = latest.since(told)
    sample = new.outputs[0]
    delta = Delta(sample.text, sample.token_ids, sample.logprobs, num_cached_tokens=latest.num_cached_tokens)
    if told is None:
        delta.prompt_logprobs = new.prompt_logprobs
    if latest.finished:
        delta.finish_reason, delta.stop_reason = sample.finish_reason, sample.stop_reason
        delta.finish_detail, delta.metrics = sample.finish_detail, latest.metrics
        delta.embedding = latest.embedding
    return delta
