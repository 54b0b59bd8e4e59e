"""Watched responses, for clients that disconnect, stop reading or read slowly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from pointsman.server.service.service import unless_disconnected
from pointsman.server.wire.answers import error_event, event, quote, with_json
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.sse import EventStream, send_json


class Client:
    """The client's end of a connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.has_left = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def with_client(test: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(Client()), 10)

    asyncio.run(run())


def test_work_completes_while_the_client_is_connected() -> None:
    async def test(client: Client) -> None:
        done: list[int] = []

        async def work() -> None:
            await asyncio.sleep(0)
            done.append(1)

        await unless_disconnected(client.receive, work())
        assert done == [1]
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= 2  # no watcher is left (wait_for is one)

    with_client(test)


def test_disconnect_cancels_work_after_its_cleanup() -> None:
    async def test(client: Client) -> None:
        events: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                events.append("closed")

        asyncio.get_running_loop().call_later(0.01, client.has_left.set)
        await unless_disconnected(client.receive, work())
        assert events == ["closed"]

    with_client(test)


def test_exceptions_of_the_work_are_raised() -> None:
    async def test(client: Client) -> None:
        async def work() -> None:
            raise ApiError(400, "no")

        with pytest.raises(ApiError):
            await unless_disconnected(client.receive, work())

    with_client(test)


def test_cancelling_the_response_cancels_the_work() -> None:
    async def test(client: Client) -> None:
        was_cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled.set()
                raise

        response = asyncio.ensure_future(unless_disconnected(client.receive, work()))
        await asyncio.sleep(0.01)
        response.cancel()
        with pytest.raises(asyncio.CancelledError):
            await response
        assert was_cancelled.is_set()

    with_client(test)


def test_disconnect_when_the_work_ends_cancels_no_later_work() -> None:
    """Disconnect and end may come in either order within an iteration of the event loop."""

    async def test(client: Client) -> None:
        for order in range(2):
            client.has_left = asyncio.Event()
            done = asyncio.Event()

            async def respond(client: Client = client, done: asyncio.Event = done) -> str:
                await unless_disconnected(client.receive, work(done))
                for _ in range(5):
                    await asyncio.sleep(0)
                task = asyncio.current_task()
                return f"{task.cancelling()} cancellations" if task else ""

            async def work(done: asyncio.Event) -> None:
                await done.wait()

            response = asyncio.ensure_future(respond())
            await asyncio.sleep(0.01)
            for event_ in (done, client.has_left)[:: 1 - 2 * order]:
                event_.set()
            assert await response == "0 cancellations"

    with_client(test)


def test_work_failing_at_disconnect_raises_and_leaves_no_cancellation() -> None:
    async def test(client: Client) -> None:
        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                raise ApiError(400, "no")

        client.has_left.set()
        with pytest.raises(ApiError):
            await unless_disconnected(client.receive, work())
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    with_client(test)


def test_event_stream_has_headers_events_and_an_end() -> None:
    async def test(client: Client) -> None:
        events = EventStream(client.send, {"x-request-id": "a"})
        await events.open()
        await events.write(event({"text": "é\u2028"}))
        await events.close(error_event(ApiError(500, "no")))
        headers = dict(client.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"x-request-id"] == b"a"
        first, second, last = client.body.decode("ascii").strip().split("\n\n")
        assert json.loads(first.removeprefix("data: ")) == {"text": "é\u2028"}
        assert json.loads(second.removeprefix("data: "))["error"]["code"] == 500
        assert last == "data: [DONE]"
        assert [message.get("more_body") for message in client.sent[1:]] == [True, False]

    with_client(test)


def test_slow_reader_blocks_the_writer() -> None:
    async def test(client: Client) -> None:
        events = EventStream(client.send, {})
        await events.open()
        client.may_read.clear()
        writing = asyncio.ensure_future(events.write(b"data: 1\n\n"))
        await asyncio.sleep(0.01)
        assert not writing.done()
        client.may_read.set()
        await writing
        assert client.body == b"data: 1\n\n"

    with_client(test)


def test_json_response_has_its_content_length() -> None:
    async def test(client: Client) -> None:
        await send_json(client.send, ['{"text":"é"}'.encode()], {"x-request-id": "a"})
        headers = dict(client.sent[0]["headers"])
        assert json.loads(client.body) == {"text": "é"}
        assert int(headers[b"content-length"]) == len(client.body)

    with_client(test)


def test_with_json_combines_values_and_prewritten_json() -> None:
    assert json.loads(with_json({"a": "é"}, {"b": "[1,2]", "c": "null"})) == {"a": "é", "b": [1, 2], "c": None}
    assert with_json({"a": "é"}, {"b": "1"}, is_ascii=False) == '{"a":"é","b":1}'
    with pytest.raises(ValueError, match="JSON"):
        with_json({"bad": float("nan")}, {"b": "1"})


def test_quote_escapes_text_like_the_json_module() -> None:
    for text in ("", 'a"b\\c', "\n\t\x00\x1f\x7f", "é 日 \U0001f40d", "\u2028\u0085"):
        assert json.loads(quote(text)) == text
        assert quote(text).isascii() and quote(text).isprintable()
