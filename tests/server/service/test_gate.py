"""The gate of a server that shuts down, and clients' errors for errors of the engine."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pointsman.core.errors import RequestRefused
from pointsman.engine.errors import (
    NO_COMPILER,
    NOTHING_LEFT,
    TOO_MANY_GRAMMARS,
    EngineDeadError,
    GrammarError,
    GrammarQueueFullError,
    GrammarUnavailableError,
)
from pointsman.server.service.gate import Gate, check_finish, from_engine
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.messages import portable

ALIVE = cast(Any, SimpleNamespace(is_alive=True, death=None))


def test_wait_empty_returns_after_the_last_request() -> None:
    async def run() -> None:
        gate = Gate(ALIVE, drain_timeout=30)
        await gate.wait_empty()
        with ExitStack() as one, ExitStack() as other:
            one.enter_context(gate.admit_request())
            other.enter_context(gate.admit_request())
            assert gate.num_open == 2
            gate.close()
            with pytest.raises(ApiError, match="shutting down") as caught, gate.admit_request():
                pass
            assert caught.value.status_code == 503 and caught.value.headers == {"retry-after": "30"}
            assert gate.num_open == 2
            waiting = asyncio.ensure_future(gate.wait_empty())
            one.close()
            await asyncio.sleep(0)
            assert not waiting.done()
            other.close()
            await asyncio.wait_for(waiting, 1)
            assert gate.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize("death", ["killed by signal 9", None])
def test_requests_get_500_after_engine_death_even_if_the_gate_is_closed(death: str | None) -> None:
    gate = Gate(cast(Any, SimpleNamespace(is_alive=False, death=death)), drain_timeout=30)
    with pytest.raises(ApiError, match=f"the engine has ended: {death or 'shut down'}") as caught:
        gate.check_open()
    assert caught.value.status_code == 500
    with pytest.raises(ApiError, match="the engine has ended") as caught:
        gate.check_ready()
    assert caught.value.status_code == 503
    gate.close()
    with pytest.raises(ApiError) as caught:
        gate.check_open()
    assert caught.value.status_code == (503 if death is None else 500)


def test_server_before_shutdown_is_not_ready_but_accepts_requests() -> None:
    gate = Gate(cast(Any, SimpleNamespace(is_alive=True, num_alive=1, death=None)), drain_timeout=30)
    gate.check_ready()
    gate.announce_shutdown()
    with gate.admit_request(), pytest.raises(ApiError, match="shutting down") as caught:
        gate.check_ready()
    assert caught.value.status_code == 503 and (caught.value.headers or {})["retry-after"] == "30"
    gate.close()
    for check in (gate.check_ready, gate.check_open):
        with pytest.raises(ApiError, match="shutting down") as caught:
            check()
        assert caught.value.status_code == 503


def test_a_server_without_an_engine_at_the_moment_is_not_ready() -> None:
    gate = Gate(cast(Any, SimpleNamespace(is_alive=True, num_alive=0, death=None)), drain_timeout=30)
    gate.check_open()
    with pytest.raises(ApiError, match="one is being started") as caught:
        gate.check_ready()
    assert caught.value.status_code == 503


def test_engine_errors_become_responses_with_an_http_status() -> None:
    refused = from_engine(RequestRefused("the prompt has\n9 tokens"))
    assert refused.status_code == 400 and refused.detail == "the prompt has 9 tokens"
    dead = from_engine(EngineDeadError("killed"))
    assert dead.status_code == 500 and dead.reason == "engine_dead" and "killed" in dead.detail
    bad_grammar = from_engine(GrammarError("too many grammars in the schema"))
    assert bad_grammar.status_code == 400
    overload = from_engine(portable(GrammarQueueFullError("too many grammars wait")))
    assert overload.status_code == 503 and int((overload.headers or {})["retry-after"]) >= 1
    hung = from_engine(portable(GrammarUnavailableError("grammars cannot be compiled now")))
    assert hung.status_code == 503 and int((hung.headers or {})["retry-after"]) >= 1
    assert from_engine(refused) is refused
    with pytest.raises(KeyError):  # a bug in the server stays an exception
        from_engine(KeyError("x"))


@pytest.mark.parametrize(
    ("detail", "status"),
    [
        (NOTHING_LEFT, 400),
        ("the grammar took 0.31 s of processor time for 9 tokens; simplify it", 400),
        (f"{TOO_MANY_GRAMMARS} wait to be compiled", 503),
        (f"{NO_COMPILER}the process that compiles them has ended", 503),
        ("", 500),
    ],
)
def test_finish_reason_error_becomes_a_response_with_an_http_status(detail: str, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        check_finish("error", detail)
    assert caught.value.status_code == status
    assert ("retry-after" in (caught.value.headers or {})) == (status == 503)
