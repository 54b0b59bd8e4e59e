"""Arrivals: requests begin a few at a time, tenants in turn; health checks begin immediately."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from pointsman.server.api.arrivals import NUM_PER_TURN, ArrivalMiddleware
from pointsman.server.wire.errors import ApiError

MANY = 20 * NUM_PER_TURN


def scope_of(tenant: str, path: str = "/v1/completions") -> Scope:
    return {"type": "http", "path": path, "tenant": tenant}


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def to_nobody(_: Message) -> None:
    return None


class Door:
    """The middleware, and the order in which requests began."""

    def __init__(self, tenant_of: Callable[[Scope], str] = lambda scope: str(scope["tenant"])) -> None:
        self.begun: list[str] = []
        self._middleware = ArrivalMiddleware(self._app, tenant_of)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["tenant"])

    def send(self, tenant: str, path: str = "/v1/completions") -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(
            self._middleware(scope_of(tenant, path), nothing, to_nobody)  # type: ignore[arg-type]  # a coroutine
        )


def test_requests_per_loop_iteration_are_limited() -> None:
    async def run() -> None:
        door, before = Door(), 0
        tasks = [door.send("a") for _ in range(MANY)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            assert len(door.begun) - before <= 2 * NUM_PER_TURN  # of this iteration, and those admitted by the last
            before = len(door.begun)
        assert len(door.begun) == MANY

    asyncio.run(run())


def test_arriving_requests_are_started_in_turn_by_tenant() -> None:
    async def run() -> None:
        door = Door()
        tasks = [door.send("a") for _ in range(MANY)]
        await asyncio.sleep(0)
        await door.send("b")
        assert len(door.begun) < 5 * NUM_PER_TURN
        await asyncio.gather(*tasks)
        assert door.begun.count("a") == MANY

    asyncio.run(run())


def test_health_checks_and_operators_do_not_wait() -> None:
    async def run() -> None:
        door = Door()
        tasks = [door.send("a") for _ in range(MANY)]
        tasks += [door.send("c", path) for path in ("/health", "/pause", "/v1/requests/some")]
        await asyncio.sleep(0)
        assert door.begun.count("c") == 3 and door.begun.count("a") == NUM_PER_TURN
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_cancelled_arrival_does_not_block_others() -> None:
    async def run() -> None:
        door = Door()
        tasks = [door.send("a") for _ in range(MANY)]
        await asyncio.sleep(0)
        left = tasks[NUM_PER_TURN::2]
        for task in left:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in left)
        assert len(door.begun) == MANY - len(left)
        await door.send("b")
        assert door.begun[-1] == "b"

    asyncio.run(run())


def test_request_with_invalid_tenant_header_reaches_the_app() -> None:
    def broken(_: Scope) -> str:
        raise ApiError(400, "the header X-Tenant occurs 2 times; send it once")

    async def run() -> None:
        door = Door(broken)
        await asyncio.gather(*(door.send("a") for _ in range(MANY)))
        assert len(door.begun) == MANY

    asyncio.run(run())
