"""A client with little overhead: while a request runs, it only records the received bytes, and when they came.

Client and server share a machine here, so the client's processor time is taken from the server. Each request has its
own connection and asks for it to be closed after the response. Status, headers, chunks, events and JSON are parsed
after the run.

    exchange = await send(address, post("/v1/completions", {...}))
    answer = exchange.answer()                  # status, headers, body
    stream = answer.stream()                    # text, tokens, finish reason
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

Address = tuple[str, int]
HOST = "127.0.0.1"
SECONDS_TO_ANSWER = 120.0
_DATA = b"data:"


class BrokenAnswer(ValueError):
    """The received bytes are not a complete HTTP response, or not a stream of events."""


# ----------------------------------------------------------------------------------------------------- on the wire


def get(path: str) -> bytes:
    """A GET request's bytes."""
    return _request("GET", path, b"", {"User-Agent": "pointsman-benchmarks"})  # lists of requests require one


def post(path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request's bytes; a mapping is sent as JSON, bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return _request("POST", path, content, {"Content-Type": "application/json", **(headers or {})})


def _request(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Exchange(asyncio.Protocol):
    """One request and all received bytes. Times are `time.monotonic()`.

    Args:
        request: the bytes to send.
        hang_up_after: close the connection after this number of pieces; None: read to the end.
    """

    def __init__(self, request: bytes, hang_up_after: int | None = None) -> None:
        self._request = request
        self._hang_up_after = hang_up_after
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        """When each piece arrived."""
        self.first_event_at: float | None = None
        self._tail = b""
        self.sent_at = monotonic()
        """When the caller began to connect."""
        self.ended_at: float | None = None
        self.hung_up = False
        """Whether this side ended the connection."""
        self.error: Exception | None = None

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        if self.first_event_at is None:
            self._tail += data  # the mark may be cut between pieces; a response in one piece may have megabytes
            if _DATA in self._tail:
                self.first_event_at = now
            self._tail = self._tail[1 - len(_DATA) :]
        self.pieces.append(data)
        self.times.append(now)
        if self._hang_up_after is not None and len(self.pieces) >= self._hang_up_after:
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.ended_at = monotonic()
        if not self._ended.done():
            self._ended.set_result(None)

    # Called by the sender.

    def hang_up(self) -> None:
        """End the connection at once, whatever has not arrived."""
        if self._transport is not None and self.ended_at is None:
            self.hung_up = True
            self._transport.abort()

    def stop_reading(self) -> None:
        """Leave arriving bytes in the kernel's buffers from now on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Undo `stop_reading`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    async def end(self, timeout: float | None = SECONDS_TO_ANSWER) -> bool:
        """Wait for the end of the connection, from either side; False if it did not come in time."""
        done, _ = await asyncio.wait([self._ended], timeout=timeout)
        return bool(done)

    async def begin(self, timeout: float = SECONDS_TO_ANSWER) -> bool:
        """Wait for the first event (or the connection's end); False if neither came in time."""
        limit = monotonic() + timeout
        while self.first_event_at is None and self.ended_at is None and monotonic() < limit:
            await asyncio.sleep(0.005)
        return self.first_event_at is not None or self.ended_at is not None

    @property
    def seconds(self) -> float:
        """Seconds from sending to the end; only after the end."""
        assert self.ended_at is not None
        return self.ended_at - self.sent_at

    @property
    def seconds_to_first_event(self) -> float | None:
        return None if self.first_event_at is None else self.first_event_at - self.sent_at

    def answer(self) -> Answer:
        """The parsed response.

        Raises:
            BrokenAnswer: there is none, or it ends too early.
        """
        return parse_answer(b"".join(self.pieces))


async def start(
    address: Address, request: bytes, *, hang_up_after: int | None = None, receive_buffer: int | None = None
) -> Exchange:
    """Connect and send; the response is received in the background.

    Args:
        address: where the server listens.
        request: bytes, from `get` or `post`.
        hang_up_after: see `Exchange`.
        receive_buffer: bytes that the kernel may hold for this connection; None: the kernel's default.

    Raises:
        OSError: no process listens.
    """
    loop = asyncio.get_running_loop()
    exchange = Exchange(request, hang_up_after)
    if receive_buffer is None:
        await loop.create_connection(lambda: exchange, *address)
        return exchange
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # before connecting, or it has no effect
    sock.setblocking(False)
    await loop.sock_connect(sock, address)
    await loop.create_connection(lambda: exchange, sock=sock)
    return exchange


async def send(address: Address, request: bytes, timeout: float = SECONDS_TO_ANSWER) -> Exchange:
    """Send a request and read its response to the end.

    Raises:
        OSError: no process listens.
        TimeoutError: the response did not end in time; the connection is closed.
    """
    exchange = await start(address, request)
    if not await exchange.end(timeout):
        exchange.hang_up()
        raise TimeoutError(f"no whole answer within {timeout:.0f} s to {request[:60]!r}")
    return exchange


# ------------------------------------------------------------------------------------------------- taken apart later


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed HTTP response."""

    status: int
    headers: dict[str, str]
    """Headers, with names in lower case."""
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            BrokenAnswer: it is not JSON.
        """
        try:
            return json.loads(self.body, parse_constant=_refuse_constant)
        except ValueError as error:
            raise BrokenAnswer(f"no JSON ({error}): {self.body[:200]!r}") from None

    def stream(self) -> Stream:
        """The body as a stream of completion chunks.

        Raises:
            BrokenAnswer: it is not such a stream.
        """
        return parse_stream(self.body)


@dataclass(slots=True)
class Stream:
    """A streamed completion, reassembled."""

    num_chunks: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    """Text of each choice."""
    finish_reasons: dict[int, list[str]] = field(default_factory=dict)
    """All finish reasons of each choice; a valid stream has one each."""
    num_logprobs: int = 0
    """Number of tokens with log probabilities."""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    """The error that ended it."""
    is_done: bool = False
    """Whether [DONE] was received."""
    num_late: int = 0
    """Number of events after [DONE]; a valid stream has none."""
    ids: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the first choice, if it has exactly one."""
        reasons = self.finish_reasons.get(0, [])
        return reasons[0] if len(reasons) == 1 else None

    def add(self, event: dict[str, Any]) -> None:
        """Add the JSON of a chunk."""
        if "error" in event:
            self.error = event["error"]
            return
        self.num_chunks += 1
        self.ids.add(event["id"])
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.texts[index] = self.texts.get(index, "") + (text or "")
            if choice.get("finish_reason") is not None:
                self.finish_reasons.setdefault(index, []).append(choice["finish_reason"])
            logprobs = choice.get("logprobs") or {}
            self.num_logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())


def parse_answer(raw: bytes) -> Answer:
    """Parse the bytes of a response.

    Raises:
        BrokenAnswer: they are not a complete response.
    """
    head, separator, rest = raw.partition(b"\r\n\r\n")
    if not separator:
        raise BrokenAnswer(f"the connection ended before the headers did: {raw[:200]!r}")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    try:
        status = int(first.split(" ", 2)[1])
    except (IndexError, ValueError):
        raise BrokenAnswer(f"no status line: {first!r}") from None
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Answer(status, headers, _join_chunks(rest))
    if "content-length" in headers and len(rest) != int(headers["content-length"]):
        raise BrokenAnswer(f"the body has {len(rest)} bytes of {headers['content-length']}")
    return Answer(status, headers, rest)


def parse_stream(body: bytes) -> Stream:
    """Reassemble the chunks of a streamed completion.

    Raises:
        BrokenAnswer: the body is not a stream of JSON events.
    """
    stream = Stream()
    *events, rest = body.split(b"\n\n")
    if rest.strip():
        raise BrokenAnswer(f"the stream ends within an event: {rest[:200]!r}")
    for event in events:
        if event.startswith(b":"):  # a comment
            continue
        if not event.startswith(_DATA):
            raise BrokenAnswer(f"no event: {event[:200]!r}")
        data = event[len(_DATA) :].strip()
        if stream.is_done:
            stream.num_late += 1
        elif data == b"[DONE]":
            stream.is_done = True
        else:
            try:
                stream.add(json.loads(data, parse_constant=_refuse_constant))
            except (ValueError, KeyError, TypeError) as error:
                raise BrokenAnswer(f"no completion chunk ({error!r}): {data[:200]!r}") from None
    return stream


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; nan without values."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _join_chunks(rest: bytes) -> bytes:
    """The body in chunked transfer coding."""
    parts, position = [], 0
    while True:
        end = rest.find(b"\r\n", position)
        if end < 0:
            raise BrokenAnswer("the connection ended before the last chunk")
        size = int(rest[position:end].split(b";")[0], 16)
        position = end + 2
        if size == 0:
            return b"".join(parts)
        if len(rest) < position + size + 2:
            raise BrokenAnswer("the connection ended within a chunk")
        parts.append(rest[position : position + size])
        position += size + 2


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
