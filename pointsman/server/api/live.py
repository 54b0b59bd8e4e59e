"""The live page: shows the scheduler's current decisions.

    GET /live         the page; it contains no data, and asks for the operator's key
    GET /live/film?engine=1    the film of engine 1 while it is watched: a stream of records (`web/live.py`), for
                               operators; its header X-Engines has the number of engines

Ten times a second the server asks the engine for new records of the film, by a question (`wire/questions.py`). While a
watcher does not read, the server does not ask, and the engine process drops the records that the watcher misses.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import HTMLResponse, Response

from pointsman.engine.errors import EngineDeadError, EngineStalledError
from pointsman.server.api.access import OperatorRules
from pointsman.server.service.service import Service, WatchedResponse
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.questions import Film, LeaveFilm
from pointsman.web.live import SECONDS_BETWEEN_PARTS, TooManyWatchers
from pointsman.web.page import PAGE_HEADERS, assemble

if TYPE_CHECKING:
    from starlette.types import Scope, Send

SECONDS_TO_READ = 60.0
"""Maximum seconds for a watcher to read a part of the film. A slower watcher is removed; when it reads again, it gets a
new film."""


@cache
def live_page() -> str:
    """The HTML of the live page."""
    return assemble("live", "Live", connects=True)


def live_router(service: Service, operators: OperatorRules) -> APIRouter:
    """A router with /live, the page, and /live/film, the film that the page shows."""
    router = APIRouter()
    client, watchers = service.client, count()

    # The API's description leaves both routes out: they are not for programs.
    @router.head("/live", include_in_schema=False)
    @router.get("/live", include_in_schema=False)
    async def live() -> Response:
        """A page that shows the scheduler's current decisions."""
        return HTMLResponse(live_page(), headers=PAGE_HEADERS)

    @router.get("/live/film", include_in_schema=False, dependencies=[Depends(operators.require)])
    async def film(engine: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The decisions of an engine's scheduler, until the watcher leaves or the engine ends."""
        if engine >= len(client.engines):
            raise ApiError(
                400,
                f"engine is {engine}; this server has {len(client.engines)} engines, numbered from 0",
                param="engine",
            )
        return WatchedResponse(partial(send_film, engine))

    async def send_film(engine: int, _: Scope, send: Send) -> None:
        watcher = next(watchers)
        try:
            try:
                records = await service.ask(Film(watcher), engine=engine)
            except TooManyWatchers as error:
                raise ApiError(503, str(error), headers={"retry-after": "60"}, reason="other") from error
            headers = {
                "content-type": "application/octet-stream",
                "x-engines": str(len(client.engines)),
                **PAGE_HEADERS,
            }
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            with suppress(EngineDeadError, EngineStalledError):
                while True:
                    if records:
                        await send_part(watcher, engine, records, send)
                    await asyncio.sleep(SECONDS_BETWEEN_PARTS)
                    records = await client.ask(Film(watcher), engine)
            await send({"type": "http.response.body", "body": b""})
        finally:
            client.tell(LeaveFilm(watcher), engine)

    async def send_part(watcher: int, engine: int, records: bytes, send: Send) -> None:
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": records, "more_body": True}))
        try:
            done, _ = await asyncio.wait((sending,), timeout=SECONDS_TO_READ)
            if not done:
                client.tell(LeaveFilm(watcher), engine)
            await sending
        finally:
            sending.cancel()

    return router
