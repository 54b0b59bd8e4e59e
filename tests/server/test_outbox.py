"""The engine's side of the socket: nothing is lost or out of order, and a slow reader delays no step."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from pointsman.core import Request
from pointsman.engine import SamplingParams
from pointsman.engine.outputs.request_output import RequestOutput, Transcript
from pointsman.server.outbox import Outbox, RemoteMailbox, RemotePort
from pointsman.server.wire.messages import Delta, EngineOutputs, EngineRequest, StepNote, Unpacker


def read_until(sock: socket.socket, unpacker: Unpacker, done: Any) -> list[Any]:
    found: list[Any] = []
    sock.settimeout(20)
    while not done(found):
        found += unpacker.feed(sock.recv(1 << 16))
    return found


def test_frames_arrive_in_order_from_several_threads_through_a_full_socket() -> None:
    ours, theirs = socket.socketpair()
    cleared = threading.Event()
    outbox = Outbox(ours, cleared.set)
    num_each, size = 300, 5000

    def write(name: int) -> None:
        for number in range(num_each):
            outbox.put((name, number, b"x" * size))

    writers = [threading.Thread(target=write, args=(name,)) for name in range(3)]
    started = time.monotonic()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert time.monotonic() - started < 10 and not outbox.is_clear  # nothing was read yet, and no call waited
    found = read_until(theirs, Unpacker(), lambda found: len(found) == 3 * num_each)
    for name in range(3):
        assert [number for one, number, _ in found if one == name] == list(range(num_each))
    assert cleared.wait(10) and outbox.is_clear


def test_outbox_drops_messages_after_the_reader_closes() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours, lambda: None)
    for _ in range(100):
        outbox.put(b"x" * 10_000)
    theirs.close()
    outbox.wait_until_clear(10)
    outbox.put("later")
    assert outbox.is_clear


class Generation:
    """A request whose tokens a test generates."""

    def __init__(self, port: RemotePort, key: int, *, stream: bool = True) -> None:
        request = Request(str(key), [1], arrival_time=0.0, max_tokens=10**6)
        self.transcript = Transcript(request)
        wanted = EngineRequest(str(key), [1], SamplingParams(detokenize=False), stream=stream)
        self.mailbox = port.mailboxes[key] = RemoteMailbox(port, key, wanted)

    def grow(self, *, finished: bool = False) -> None:
        tokens = self.transcript.token_ids
        tokens.append(len(tokens))
        if finished:
            self.transcript.finish("length", "max_tokens", None)
        self.mailbox.put(RequestOutput(self.transcript, 0, len(tokens), finished))


def deltas_of(news: EngineOutputs, key: int) -> list[Delta]:
    """The deltas of a request, plain tokens first."""
    plain = [Delta(text, ids, num_cached_tokens=cached) for name, text, ids, cached in news.tokens if name == key]
    return plain + [delta for name, delta in news.deltas if name == key]


def test_merged_deltas_have_all_tokens_and_use_little_memory() -> None:
    ours, theirs = socket.socketpair()
    port = RemotePort(ours)
    one, whole = Generation(port, 1), Generation(port, 2, stream=False)
    one.mailbox.accept()
    num_steps = 20_000
    for step in range(num_steps):
        for generation in (one, whole):
            generation.grow(finished=step == num_steps - 1)
        port.note_step(StepNote(2, 2, 0.0))
        port.ring()
    assert len(port.outbox._unsent) < 1 << 16  # at most one frame is kept beyond what the socket took
    found: list[EngineOutputs] = read_until(
        theirs,
        Unpacker(),
        lambda found: sum(delta.finish_reason is not None for n in found for _, delta in n.deltas) == 2,
    )
    assert found[0].accepted == [1] and not any(news.accepted for news in found[1:])
    assert sum(len(news.steps) for news in found) == num_steps
    for key, most in ((1, num_steps), (2, 2)):
        deltas = [delta for news in found for delta in deltas_of(news, key)]
        assert [token for delta in deltas for token in delta.token_ids] == list(range(num_steps))
        assert len(deltas) <= most and [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert port.mailboxes == {}


def test_outputs_of_abandoned_requests_are_not_reported() -> None:
    ours, theirs = socket.socketpair()
    port = RemotePort(ours)
    gone, failed = Generation(port, 1), Generation(port, 2)
    gone.grow()
    gone.mailbox.is_abandoned = True
    failed.mailbox.fail(ValueError("too long"))
    port.ring()
    (news,) = read_until(theirs, Unpacker(), bool)
    assert news.tokens == news.deltas == [] and [(key, str(error)) for key, error in news.errors] == [(2, "too long")]
    assert port.mailboxes == {}
