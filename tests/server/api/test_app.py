"""Endpoints other than completions: models, tokens, health, requests; and invalid requests."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerProcess

import pointsman
from pointsman.engine.grammar.compiler import MAX_WAITING
from pointsman.engine.text.tokenizer import DEMO_MODEL
from pointsman.server.api.app import create_app
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.wire.questions import ExplainAll, Pause, Resume
from pointsman.server.wire.responses import (
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    RequestList,
    RequestState,
    TokenizeResponse,
)
from tests.server.engine_pool import engine_pool
from tests.server.metrics.test_metrics import flat

pytestmark = pytest.mark.e2e

PROMPT = "The import statement"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, in the common form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    ErrorResponse.model_validate_json(response.content)
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status and error["message"] and "\n" not in error["message"]
    return error


def test_the_model_is_listed_by_its_name(http: httpx.Client) -> None:
    models = ModelList.model_validate(http.get("/v1/models").json())
    (card,) = models.data
    assert card.id == "demo" and card.max_model_len > 0
    assert ModelCard.model_validate(http.get("/v1/models/demo").json()) == card
    assert error_of(http.get("/v1/models/other/one"), 404)["type"] == "NotFoundError"


def test_detokenize_reverses_tokenize(http: httpx.Client) -> None:
    answer = TokenizeResponse.model_validate(
        http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    )
    assert answer.count == len(answer.tokens) == len(answer.token_strs or ())
    text = DetokenizeResponse.model_validate(http.post("/detokenize", json={"tokens": answer.tokens}).json())
    assert text.prompt == PROMPT
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": PROMPT}]})
    assert chat.json()["count"] >= answer.count and chat.json()["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_token_ids_outside_the_vocabulary_are_refused(http: httpx.Client) -> None:
    error_of(http.post("/detokenize", json={"tokens": [2**31 - 1]}), 400)
    error_of(http.post("/v1/completions", json={"prompt": [2**31 - 1]}), 400)


def test_health_and_version_respond(http: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        response = http.get(path)
        assert (response.status_code, response.content) == (200, b"")
        assert http.head(path).status_code == 200
    assert http.get("/version").json() == {"version": pointsman.__version__}
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_the_prefix_cache_can_be_emptied(http: httpx.Client) -> None:
    fields = {"prompt": "one two three " * 40, "max_tokens": 1}
    http.post("/v1/completions", json=fields)
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    usage = http.post("/v1/completions", json=fields).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_cache_salt_isolates_prefixes(http: httpx.Client) -> None:
    def cached(salt: str | None) -> int:
        fields = {"prompt": "salted words " * 40, "max_tokens": 1, "cache_salt": salt}
        tokens: int = http.post("/v1/completions", json=fields).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return tokens

    http.post("/reset_prefix_cache")
    assert [cached(salt) > 0 for salt in ("a", "b", None, "a", "b", None)] == [False] * 3 + [True] * 3


# ------------------------------------------------------------------------------------------------- no requests


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 100 + b"}",
        b'{"prompt": [' + b"9" * 30 + b"]}",
        b'{"prompt": "a\\ud800b"}',
        b'{"prompt": "a", "user": "\\udc00"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "a", "structured_outputs": {"json": ' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}}",
        b'{"prompt": "a", "logit_bias": {"99999999": 1}}',
        b'{"prompt": "a", "deadline": 1e999}',
    ],
)
def test_invalid_requests_get_400(http: httpx.Client, body: bytes) -> None:
    error_of(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)


def test_null_character_in_prompt_is_accepted(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a\x00b", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_bodies_of_other_types_than_json_are_refused(http: httpx.Client, content_type: str) -> None:
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert "application/json" in error_of(response, 400)["message"]
    fine = http.post(
        "/tokenize", content=b'{"prompt": "a"}', headers={"content-type": "application/json; charset=utf-8"}
    )
    assert fine.status_code == 200


def test_unknown_paths_and_methods_get_errors_in_the_common_form(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    response = http.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_invalid_request_headers_get_400(http: httpx.Client) -> None:
    for headers in ({"X-Request-Deadline": "soon"}, {"X-Request-Deadline": "0"}, {"X-Request-Deadline": "nan"}):
        error_of(http.post("/v1/completions", json={"prompt": "a"}, headers=headers), 400)
    for target, words in (("0", "greater than 0"), ("soon", "valid number"), ("2", "order fcfs, which ignores")):
        for path, body in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
            response = http.post(f"/v1/{path}", json=body, headers={"X-Request-TTFT-Target": target})
            assert words in error_of(response, 400)["message"]
    odd = {"X-Request-Id": "é".encode()}
    error_of(http.post("/v1/completions", json={"prompt": "a"}, headers=odd), 400)


def test_too_long_prompt_is_refused_with_its_length_and_the_limit(http: httpx.Client) -> None:
    length = http.get("/v1/models").json()["data"][0]["max_model_len"]
    message = error_of(http.post("/v1/completions", json={"prompt": [1] * length}), 400)["message"]
    assert str(length) in message and str(length - 1) in message
    error_of(http.post("/v1/completions", json={"prompt": "word " * 500_000}), 400)  # without tokenizing it
    error_of(http.post("/v1/completions", json={"prompt": ["a"] * 1025}), 400)
    error_of(http.post("/v1/completions", json={"prompt": "a", "n": 17}), 400)


def test_openapi_description_lists_the_possible_responses(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    text = json.dumps(description)
    assert "422" not in text and "HTTPValidationError" not in text
    completion = description["paths"]["/v1/completions"]["post"]
    assert {"200", "400", "404", "408", "413", "429", "500", "503"} <= set(completion["responses"])
    assert set(completion["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "401" not in completion["responses"]  # this server asks for no key


# ------------------------------------------------------------------------------------------------- requests


def test_requests_endpoint_shows_every_request_state(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True, "request_id": "watched"}
    body |= {"user": "alice", "deadline": 600}
    with http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_bytes()
        next(pieces)
        found = RequestList.model_validate(http.get("/v1/requests").json()).data
        (state,) = (one for one in found if one.id == "cmpl-watched")
        assert state.state == "running" and state.reason is None and state.num_blocks > 0
        assert (state.user, state.tenant, state.ttft_target) == ("alice", "", None)
        assert state.max_tokens == 4000 and 0 < (state.deadline_in or 0) <= 600
        assert state.num_output_tokens > 0 and state.age > 0
        one = RequestState.model_validate(http.get("/v1/requests/cmpl-watched").json())
        assert one.id == state.id and one.num_output_tokens >= state.num_output_tokens
        assert one.engine_id.startswith("cmpl-watched-")
        same = RequestState.model_validate(http.get(f"/v1/requests/{one.engine_id}").json())
        assert (same.id, same.engine_id) == (one.id, one.engine_id)
        again = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "watched"})
        assert again.json()["id"] == again.headers["x-request-id"] == "cmpl-watched"  # retries may have the same id
    assert error_of(http.get("/v1/requests/cmpl-nobody"), 404)["type"] == "NotFoundError"


def test_no_request_was_logged_as_a_server_fault(server: ServerProcess) -> None:
    assert "Traceback" not in server.log()


# ------------------------------------------------------------------------------------------------- in this process


def with_app(test: Callable[[EngineClient, Any, httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    """An app of its own, called without a socket, in front of a real engine process."""

    async def run(client: EngineClient) -> None:
        app = create_app(EngineFleet([client]), ServerConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            await test(client, app, http)

    engine_pool().run(run, **{"model": "demo", "num_blocks": 512, "num_threads": 1, **options})


def test_max_tokens_is_clamped_to_the_model_length() -> None:
    async def test(_: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        async def lengths(path: str, **fields: Any) -> list[int]:
            body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
            response = await http.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            events = [response.text] if not fields.get("stream") else response.text.split("\n\n")[:-2]
            found: Counter[int] = Counter()
            for event in events:
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    found[choice["index"]] += len(choice.get("token_ids") or ())
                    assert choice["finish_reason"] in (None, "length")
            return [found[index] for index in range(len(found))]

        prompts = [[5] * 200, [5] * 20]
        messages = [{"role": "user", "content": "list " * 100}]
        room = 256 - (await http.post("/tokenize", json={"messages": messages})).json()["count"]
        assert 0 < room < 200
        for stream in (False, True):
            more = {"stream": stream}
            assert await lengths("completions", prompt=[5] * 200, max_tokens=100, **more) == [56]
            assert await lengths("completions", prompt=prompts, max_tokens=100, n=2, **more) == [56, 56, 100, 100]
            for field in ("max_tokens", "max_completion_tokens"):
                assert await lengths("chat/completions", messages=messages, **{field: 4096}, **more) == [room]
        full = await http.post("/v1/completions", json={"prompt": [5] * 256, "max_tokens": 1})
        assert "leaves no room" in error_of(full, 400)["message"]

    with_app(test, max_model_len=256)


def test_choices_share_prompt_logprobs_computed_once() -> None:
    prompts = [[5 + index % 300 for index in range(400)], [9 + index % 200 for index in range(300)]]
    fields = {"max_tokens": 3, "ignore_eos": True, "seed": 1, "logprobs": 1}

    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        async def num_computed() -> float:
            found = flat((await http.get("/metrics")).text)
            return found["vllm:prompt_tokens_total"] - found["vllm:prompt_tokens_cached_total"]

        async def choices(n: int, **more: Any) -> list[dict[str, Any]]:
            """The choices of a response. The engine computes each prompt once, and a block per further choice."""
            await http.post("/reset_prefix_cache")
            before = await num_computed()
            response = await http.post("/v1/completions", json={"prompt": prompts, "n": n, **fields, **more})
            assert response.status_code == 200, response.text
            limit = sum(map(len, prompts)) + (n - 1) * len(prompts) * client.info.block_size
            assert sum(map(len, prompts)) <= await num_computed() - before <= limit
            if not more.get("stream"):
                return list(response.json()["choices"])
            first: dict[int, dict[str, Any]] = {}
            for event in response.text.split("\n\n")[:-2]:
                (choice,) = json.loads(event.removeprefix("data: "))["choices"]
                first.setdefault(choice["index"], choice)
            return [first[index] for index in range(len(first))]

        for n in (1, 2, 4):
            found = [one["prompt_logprobs"] for one in await choices(n, prompt_logprobs=1)]
            assert found == [found[0]] * n + [found[n]] * n
            assert [len(found[0]), len(found[n])] == [400, 300]
            assert all(str(token) in one for token, one in zip(prompts[1][1:], found[n][1:], strict=True))
        for stream in (False, True):
            echoed = await choices(3, echo=True, stream=stream)
            for index, one in enumerate(echoed):
                length = len(prompts[index // 3])
                values = one["logprobs"]["token_logprobs"]
                assert values[:length] == echoed[index // 3 * 3]["logprobs"]["token_logprobs"][:length]
                assert values[0] is None and None not in values[1:] and len(values) > length

    with_app(test, max_model_len=512)


def test_model_sampling_defaults_apply_with_and_without_do_sample(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    recommended = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 1.5, "max_new_tokens": 20}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended))
    given = {name: value for name, value in recommended.items() if name != "max_new_tokens"}

    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        async def text(path: str, **fields: Any) -> tuple[str, int]:
            answer = (await http.post(f"/v1/{path}", json={"ignore_eos": True, **fields})).json()
            (choice,) = answer["choices"]
            return choice.get("text") or choice["message"]["content"], answer["usage"]["completion_tokens"]

        assert client.info.generation_defaults == {**given, "max_tokens": 20}
        whole = await text("completions", prompt=PROMPT)
        assert whole == await text("completions", prompt=PROMPT, max_tokens=16, seed=5, **given)
        assert whole != await text("completions", prompt=PROMPT, temperature=0, repetition_penalty=1)
        messages = [{"role": "user", "content": PROMPT}]
        assert (await text("chat/completions", messages=messages))[1] == 20
        assert (await text("chat/completions", messages=messages, max_tokens=None, max_completion_tokens=None))[1] == 20
        assert (await text("chat/completions", messages=messages, max_tokens=30))[1] == 30

    with_app(test, model=str(tmp_path / "model"), max_model_len=512, num_blocks=64)


def test_draining_server_finishes_requests_and_refuses_new_ones() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        fields = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        running = asyncio.ensure_future(http.post("/v1/completions", json=fields))
        while not await client.ask(ExplainAll()):
            await asyncio.sleep(0.001)
        app.state.gate.close()
        refused = await http.post("/v1/completions", json=fields)
        assert int(refused.headers["retry-after"]) >= 1
        assert error_of(refused, 503)["type"] == "ServiceUnavailableError"
        error_of(await http.get("/ready"), 503)
        assert (await http.get("/health")).status_code == 200
        assert app.state.gate.num_open == 1
        assert (await running).json()["usage"]["completion_tokens"] == 100
        await app.state.gate.wait_empty()

    with_app(test)


def test_two_requests_with_one_id_are_both_served() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        await client.ask(Pause("keep", False))  # no request may finish during the search
        fields = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "request_id": "twin"}
        twins = [asyncio.ensure_future(http.post("/v1/completions", json={**fields, "n": n})) for n in (1, 2)]
        while len(await client.ask(ExplainAll())) < 3:
            await asyncio.sleep(0.001)
        found = (await http.get("/v1/requests", params={"id": "cmpl-twin"})).json()["data"]
        assert sorted(one["id"] for one in found) == ["cmpl-twin", "cmpl-twin-0", "cmpl-twin-1"]
        assert (await http.get("/v1/requests", params={"id": "cmpl-other"})).json()["data"] == []
        assert "3 requests" in error_of(await http.get("/v1/requests/cmpl-twin"), 400)["message"]
        assert (await http.get("/v1/requests/cmpl-twin-1")).json()["id"] == "cmpl-twin-1"
        for one in found:
            shown = (await http.get(f"/v1/requests/{one['engine_id']}")).json()
            assert shown["engine_id"] == one["engine_id"]
        await client.ask(Resume())
        answers = [await twin for twin in twins]
        assert [one.json()["usage"]["completion_tokens"] for one in answers] == [8, 16]
        error_of(await http.get("/v1/requests/cmpl-twin"), 404)

    with_app(test)


def test_questions_to_a_stopped_engine_fail_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.server.service.service.ENGINE_TIMEOUT", 0.3)

    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        age = [line for line in (await http.get("/metrics")).text.splitlines() if "stats_age_seconds{" in line]
        assert len(age) == 1
        fields = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "deadline": 1.0}
        whole = asyncio.ensure_future(http.post("/v1/completions", json=fields))
        stream = asyncio.ensure_future(http.post("/v1/completions", json={**fields, "stream": True, "n": 2}))
        while len(await client.ask(ExplainAll())) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        os.kill(client.info.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            late = asyncio.ensure_future(http.post("/v1/completions", json={**fields, "deadline": 0.2}))
            for path in ("/v1/requests", "/v1/requests/cmpl-a"):
                assert "0.3 s" in error_of(await http.get(path), 503)["message"]
            error_of(await http.post("/reset_prefix_cache"), 503)
            error_of(await late, 408)
            assert (await whole).json()["choices"][0]["finish_reason"] == "deadline"
            reasons = [
                json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"]
                for event in (await stream).text.split("\n\n")[:-2]
            ]
            assert reasons.count("deadline") == 2
            assert time.monotonic() - start < 4
        finally:
            os.kill(client.info.pid, signal.SIGCONT)

    with_app(test)


def test_unstarted_requests_get_503_when_the_server_ends() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        fields = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
        running = [asyncio.ensure_future(http.post("/v1/completions", json=fields)) for _ in range(2)]
        while sum(one.num_output_tokens > 0 for one in await client.ask(ExplainAll())) < 2:
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=fields))
        while len(await client.ask(ExplainAll())) < 3:
            await asyncio.sleep(0.001)
        app.state.gate.close()
        await client.shutdown()
        refused = await waiting
        assert int(refused.headers["retry-after"]) >= 1
        error_of(refused, 503)
        for one in running:
            assert (await one).json()["choices"][0]["finish_reason"] == "abort"
        for _ in range(2):
            error_of(await http.post("/v1/completions", json=fields), 503)  # not: 500, the engine has ended
            error_of(await http.post("/tokenize", json={"prompt": "a"}), 503)
        error_of(await http.get("/ready"), 503)
        assert 'reason="draining"} 5.0' in (await http.get("/metrics")).text  # without the probe

    with_app(test, max_num_seqs=2)


def test_many_samples_do_not_block_other_clients() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        schema = {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(1500)}}
        fields = {"prompt": ["a"] * 32, "n": 16, "max_tokens": 1, "structured_outputs": {"json": schema}}
        fields["stop_token_ids"] = list(range(5, 500))
        asked = asyncio.ensure_future(http.post("/v1/completions", json=fields))
        longest, last = 0.0, time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert (await asked).status_code in (200, 400)  # the grammar may take too long
        assert longest < 1.5, longest

    with_app(test)


def test_full_grammar_queue_gets_retry_after() -> None:
    """The request is valid: this is an overload, as with too many waiting requests."""

    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        def ask(number: int) -> asyncio.Task[httpx.Response]:
            slow = f'root ::= "{number}" ' + "[^ ]*" * 12_500
            fields = {"prompt": PROMPT, "max_tokens": 1, "structured_outputs": {"grammar": slow}}
            return asyncio.ensure_future(http.post("/v1/completions", json=fields))

        asked = [ask(number) for number in range(MAX_WAITING + 8)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for one in done:
            refused = await one
            error = error_of(refused, 503)
            assert error["message"].startswith("too many grammars") and error["type"] == "ServiceUnavailableError"
            assert int(refused.headers["retry-after"]) >= 1
        fields = {"prompt": PROMPT, "structured_outputs": {"choice": ["again"]}}
        while (answer := await http.post("/v1/completions", json=fields)).status_code == 503:
            await asyncio.sleep(0.1)
        assert answer.json()["choices"][0]["text"] == "again"

    with_app(test)


def test_characters_waiting_for_tokenization_are_limited() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        body = {"prompt": "a word or two " * 15_000}
        answers = await asyncio.gather(*(http.post("/tokenize", json=body) for _ in range(90)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 79
        assert app.state.gate.num_open == 0
        role = {"role": "user", "content": "", "name": "u" * 256}
        error = error_of(await http.post("/tokenize", json={"messages": [role] * 4000}), 400)
        assert "characters" in error["message"]

    with_app(test)


def test_engine_death_fails_all_requests() -> None:
    async def test(client: EngineClient, app: Any, http: httpx.AsyncClient) -> None:
        fields = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
        whole = asyncio.ensure_future(http.post("/v1/completions", json=fields))
        stream = asyncio.ensure_future(http.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": PROMPT}], "stream": True, "ignore_eos": True, "n": 2,
        }))  # fmt: skip
        while sum(one.num_output_tokens > 0 for one in await client.ask(ExplainAll())) < 3:  # so answers have begun
            await asyncio.sleep(0.001)
        os.kill(client.info.pid, signal.SIGKILL)
        assert "SIGKILL" in error_of(await whole, 500)["message"]
        events = (await stream).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == 500
        for path in ("/health", "/ready"):
            error_of(await http.get(path), 503)
        error_of(await http.post("/v1/completions", json=fields), 500)
        error_of(await http.get("/v1/requests"), 500)
        assert "engine_dead" in (await http.get("/metrics")).text
        assert app.state.gate.num_open == 0

    with_app(test)
