"""Questions to an engine: each has an answer; a new question needs only its class and its answer."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from pointsman.engine import SamplingParams
from pointsman.server.answering import _FUNCTIONS
from pointsman.server.api.app import create_app
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.wire import questions
from pointsman.server.wire.messages import EngineRequest
from pointsman.server.wire.questions import OneEngineQuestion, Pause, Question, RequestQuestion, Resume
from tests.server.added_question import LongestPrompt
from tests.server.engine_pool import engine_pool

OPTIONS: dict[str, Any] = {"model": "demo", "num_blocks": 64, "block_size": 16, "num_threads": 1}


def test_every_question_has_an_answer() -> None:
    bases = {Question, OneEngineQuestion, RequestQuestion}
    declared = {one for one in vars(questions).values() if isinstance(one, type) and issubclass(one, Question)}
    assert declared - bases == set(_FUNCTIONS) - {LongestPrompt} and len(declared - bases) == 12


@pytest.mark.e2e
def test_question_class_outside_the_server_is_answered_by_the_engine() -> None:
    """The question passes the fleet, the client and the engine process, whose code does not mention it."""

    async def test(client: EngineClient) -> None:
        fleet = EngineFleet([client])
        app = create_app(fleet, ServerConfig())

        @app.get("/longest_prompt")
        async def longest_prompt(unit: int) -> int:
            return await fleet.ask(LongestPrompt(unit))

        await fleet.ask(Pause("keep", clear_cache=False))
        streams = [fleet.generate(EngineRequest(f"r{size}", [5] * size, SamplingParams())) for size in (7, 33, 12)]
        await fleet.queue(streams)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            assert (await http.get("/longest_prompt", params={"unit": 1})).json() == 33
            assert (await http.get("/longest_prompt", params={"unit": 16})).json() == 3
        with pytest.raises(ValueError, match="unit is 0; it must be at least 1"):
            await fleet.ask(LongestPrompt(0))
        assert await client.ask(LongestPrompt()) == 33
        for stream in streams:
            await stream.aclose()
        await fleet.ask(Resume())

    engine_pool().run(test, **OPTIONS)


def test_fleet_merges_the_answers_of_its_engines() -> None:
    assert LongestPrompt().merge({0: 4, 2: 9}) == 9
    assert questions.IsPaused().merge({0: False, 1: True}) is True
    assert questions.SetMaxNumActiveSeqs(4).merge({1: 4, 2: 4}) == 4
    assert questions.SetPriority(("c", "a", "b"), 1).merge({0: ["a"], 1: ["b", "a"]}) == ["a", "b"]
