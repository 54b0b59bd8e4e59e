"""The benchmarks' HTTP client reads whole answers, notices broken ones, and hangs up when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks._server_client import (
    Address,
    BrokenAnswer,
    get,
    parse_answer,
    parse_stream,
    percentile,
    post,
    send,
    start,
)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(text: str = "", *, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish} | fields
    return {"id": "cmpl-1", "choices": [choice]}


def events(*contents: dict[str, Any] | str) -> bytes:
    texts = (content if isinstance(content, str) else json.dumps(content) for content in contents)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def chunked(*parts: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


async def against(handler: Handler, client: Callable[[Address], Awaitable[Any]]) -> Any:
    """What the client returns, with `handler` at the other end."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        return await client(server.sockets[0].getsockname()[:2])


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")]
    return head, await reader.readexactly(lengths[0]) if lengths else b""


def test_a_stream_in_pieces_of_any_size_is_put_together() -> None:
    usage = {"id": "cmpl-1", "choices": [], "usage": {"n": 2}}
    body = events(chunk("a"), chunk("bc", finish="length"), usage, "[DONE]")
    raw = chunked(body[:7], body[7:50], body[50:])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for start_of in range(0, len(raw), 9):
            writer.write(raw[start_of : start_of + 9])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def ask(address: Address) -> Any:
        return await send(address, get("/"))

    exchange = asyncio.run(against(answer, ask))
    stream = exchange.answer().stream()
    assert (stream.text, stream.finish_reason, stream.usage) == ("abc", "length", {"n": 2})
    assert stream.is_done and stream.num_late == 0 and stream.ids == {"cmpl-1"}
    assert exchange.sent_at <= exchange.first_event_at <= exchange.ended_at
    assert not exchange.hung_up


def test_a_post_carries_its_body_and_asks_for_the_end() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert "Connection: close" in head and "X-Test: 1" in head
        writer.close()

    async def ask(address: Address) -> Any:
        return (await send(address, post("/", {"a": [1, 2]}, {"X-Test": "1"}))).answer().json()

    assert asyncio.run(against(echo, ask)) == {"a": [1, 2]}


def test_hanging_up_reaches_the_other_side() -> None:
    async def main() -> bool:
        gone = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(b"data: {}\n\n")
                    await writer.drain()
                    await asyncio.sleep(0.001)
            except ConnectionError:
                gone.set()

        async def ask(address: Address) -> bool:
            exchange = await start(address, get("/"), hang_up_after=3)
            assert await exchange.end(5)
            assert exchange.hung_up and len(exchange.pieces) == 3
            await asyncio.wait_for(gone.wait(), 5)
            return True

        return bool(await against(talk, ask))

    assert asyncio.run(main())


def test_nothing_is_read_from_one_who_stopped_reading() -> None:
    sent = 0

    async def main() -> tuple[int, int]:
        async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.transport.set_write_buffer_limits(0)
            for _ in range(1000):
                writer.write(b"x" * 10_000)
                await writer.drain()
                sent += 10_000
            writer.close()

        async def ask(address: Address) -> tuple[int, int]:
            exchange = await start(address, get("/"), receive_buffer=65536)
            exchange.stop_reading()
            await asyncio.sleep(0.2)
            before = sent
            exchange.read_on()
            assert await exchange.end(10)
            return before, sum(len(piece) for piece in exchange.pieces)

        result: tuple[int, int] = await against(flood, ask)
        return result

    held, total = asyncio.run(main())
    assert held < 9_000_000  # what the kernel took; the rest waited for the reader
    assert total == 10_000_000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        chunked(b"abcdef")[:-5],
        chunked(b"abcdef")[:-9],
    ],
)
def test_an_answer_that_is_cut_short_is_no_answer(raw: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        parse_answer(raw)


@pytest.mark.parametrize(
    "body",
    [
        events(chunk("a"))[:-1],
        b"event\n\n",
        events("{"),
        events('{"id": "1", "choices": [{"index": 0, "text": "", "logprobs": NaN}]}'),
        events({"choices": []}),
    ],
)
def test_a_stream_that_is_none_is_told(body: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        parse_stream(body)


def test_faults_of_a_stream_show() -> None:
    twice = parse_stream(events(chunk("a", finish="length"), chunk("b", finish="stop"), "[DONE]", chunk("c")))
    assert twice.finish_reason is None and twice.finish_reasons == {0: ["length", "stop"]}
    assert twice.num_late == 1
    failed = parse_stream(events(chunk("a"), {"error": {"message": "dead"}}))
    assert failed.error == {"message": "dead"} and not failed.is_done
    told = parse_stream(events(chunk("a", logprobs={"tokens": ["a", "b"]}), chunk("c", logprobs={"tokens": ["c"]})))
    assert told.num_logprobs == 3


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([1.0, 2.0], 1.0) == 2.0
    assert percentile([], 0.5) != percentile([], 0.5)
