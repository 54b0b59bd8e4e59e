"""A small server: refusals when it is full, at deadlines and beyond limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerProcess, wait_until

from tests.forked_engines import start_server

pytestmark = pytest.mark.e2e

KEY = "correct-horse"
SETTINGS = (
    *("--max-num-seqs", "1", "--max-waiting-requests", "2", "--max-waiting-prompt-tokens", "300"),
    *("--max-request-bytes", "20000", "--max-tokens-limit", "6000", "--max-n", "2", "--max-deadline", "30"),
)
LONG: dict[str, Any] = {"prompt": "The import statement", "max_tokens": 6000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    with start_server("--model", "demo", *SETTINGS, environment={"POINTSMAN_API_KEY": KEY}) as server:
        yield server


@pytest.fixture
def http(small: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=small.url, headers=headers, timeout=60) as http:
        yield http
        wait_until(lambda: not http.get("/v1/requests").json()["data"], 10, "the server is idle again")


def hold(http: httpx.Client, stack: ExitStack, **fields: Any) -> httpx.Response:
    """A request that runs until the stack is left."""
    response: httpx.Response = stack.enter_context(http.stream("POST", "/v1/completions", json={**LONG, **fields}))
    return response


def run(http: httpx.Client, stack: ExitStack, **fields: Any) -> None:
    """A request that runs until the stack is left; returns after its first token."""
    pieces = hold(http, stack, **fields).iter_bytes()
    next(pieces)
    stack.callback(pieces.close)  # type: ignore[attr-defined]  # a generator; letting go of it would close the response


def test_request_without_key_is_refused(small: ServerProcess) -> None:
    with httpx.Client(base_url=small.url, timeout=60) as http:
        response = http.get("/v1/models")
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == 401
        assert http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert KEY not in small.log()


def test_full_server_sends_retry_after(http: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(3):  # one runs, two wait
            assert hold(http, stack).status_code == 200
        refused = http.post("/v1/completions", json=LONG)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "RateLimitError"
        states = http.get("/v1/requests").json()["data"]
        assert [one["state"] for one in states] == ["running", "waiting", "waiting"]
        assert [one["position"] for one in states] == [None, 0, 1]
        assert states[1]["reason"] == "sequence_limit" and states[1]["blocker"] == states[0]["id"]
        assert states[1]["waiting_for"] > 0 and abs(states[1]["since"] - time.time()) < 60
        assert 'reason="queue_requests"' in http.get("/metrics").text
    wait_until(lambda: http.post("/v1/completions", json={"prompt": "a"}).status_code == 200, 10, "there is room again")


def test_waiting_prompts_are_limited_by_tokens(http: httpx.Client) -> None:
    alone = http.post("/v1/completions", json={"prompt": [5] * 500, "max_tokens": 1})
    assert alone.status_code == 200  # more than may wait, but it does not wait for others
    with ExitStack() as stack:
        run(http, stack)
        hold(http, stack, prompt=[5] * 200)
        refused = http.post("/v1/completions", json={"prompt": [5] * 101, "max_tokens": 1})
        assert refused.status_code == 429 and "prompt tokens" in refused.json()["error"]["message"]


def test_deadline_before_the_first_token_gets_408(http: httpx.Client) -> None:
    with ExitStack() as stack:
        run(http, stack)
        start = time.monotonic()
        late = http.post("/v1/completions", json={"prompt": "a", "deadline": 0.3})
        assert late.status_code == 408 and late.headers["x-should-retry"] == "false"
        assert time.monotonic() - start < 5
        late = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Deadline": "0.2"})
        assert late.status_code == 408


def test_deadline_ends_running_request_with_partial_output(http: httpx.Client) -> None:
    fields = {**LONG, "stream": False, "deadline": 0.5}
    answer = http.post("/v1/completions", json=fields)
    (choice,) = answer.json()["choices"]
    assert answer.status_code == 200 and choice["finish_reason"] == "deadline" and choice["text"]
    with http.stream("POST", "/v1/completions", json={**LONG, "deadline": 0.5}) as response:
        assert '"finish_reason":"deadline"' in response.read().decode().replace(" ", "")


def test_a_prompt_that_was_never_computed_has_no_log_probabilities(http: httpx.Client) -> None:
    fields = {"prompt": "a b c", "echo": True, "logprobs": 1, "deadline": 1e-6, "stream": True}
    first = http.post("/v1/completions", json=fields).text.split("\n\n")[0]
    assert '"finish_reason":"deadline"' in first and '"tokens":[]' in first


def test_server_limits_the_deadline_of_a_request(http: httpx.Client) -> None:
    with ExitStack() as stack:
        run(http, stack, deadline=10_000)
        (state,) = http.get("/v1/requests").json()["data"]
        assert 0 < state["deadline_in"] <= 30


def test_requests_beyond_the_operators_limits_get_400(http: httpx.Client) -> None:
    for fields, field in (({"max_tokens": 6001}, "max_tokens"), ({"n": 3}, "n"), ({"logprobs": 21}, "logprobs")):
        response = http.post("/v1/completions", json={"prompt": "a", **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] == field
    too_many = http.post("/v1/completions", json={"prompt": ["a"] * 4})
    assert too_many.status_code == 400 and "3" in too_many.json()["error"]["message"]


def test_large_bodies_are_refused_with_and_without_content_length(http: httpx.Client) -> None:
    body = b'{"prompt": "' + b"a" * 30_000 + b'"}'
    headers = {"content-type": "application/json"}
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 413
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
    refused = http.post("/v1/completions", content=pieces, headers=headers)
    assert refused.status_code == 413 and refused.json()["error"]["code"] == 413


def test_prompts_are_not_logged(small: ServerProcess, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a very secret prompt", "max_tokens": 1})
    http.post("/v1/completions", json={"prompt": "a very secret prompt", "max_tokens": -1})
    assert "secret" not in small.log()


def test_many_concurrent_requests_complete_or_get_429(http: httpx.Client) -> None:
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 24 and set(statuses) <= {200, 429} and statuses.count(200) >= 3
