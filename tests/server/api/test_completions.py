"""Completions over a real socket, mostly as the official client sees them."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerProcess, wait_until

from pointsman.server.wire.responses import CompletionResponse

pytestmark = pytest.mark.e2e

PROMPT = "The import statement"
GREEDY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A completion as JSON, which must match the description exactly."""
    response = http.post("/v1/completions", json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    described = CompletionResponse.model_validate(body).model_dump(exclude_unset=True)
    assert described == body
    return body


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion, which must end with [DONE]."""
    with http.stream("POST", "/v1/completions", json={**GREEDY, "stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(one.removeprefix("data: ")) for one in events[:-2]]


def test_completion_has_text_usage_and_finish_reason(client: Any) -> None:
    found = client.completions.create(**GREEDY)
    assert found.object == "text_completion" and found.model == "demo" and found.id.startswith("cmpl-")
    (choice,) = found.choices
    assert choice.text and choice.index == 0 and choice.finish_reason == "length" and choice.logprobs is None
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


def test_completion_defaults_are_16_tokens_and_the_served_model(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT})
    assert response.json()["usage"]["completion_tokens"] <= 16
    assert response.json()["model"] == "demo"


def test_stream_equals_the_whole_response(client: Any) -> None:
    whole = client.completions.create(**GREEDY).choices[0]
    seen = list(client.completions.create(**GREEDY, stream=True))
    assert "".join(one.choices[0].text for one in seen) == whole.text
    assert [one.choices[0].finish_reason for one in seen][-1] == "length"
    assert all(one.choices[0].finish_reason is None for one in seen[:-1])
    assert len({one.id for one in seen}) == 1
    assert all(one.usage is None for one in seen)


def test_fast_path_writes_the_same_chunks_as_the_general_path(http: httpx.Client) -> None:
    """A faster function writes plain chunks, as most chunks are plain."""
    full, *plain, _ = chunks(http)
    assert plain
    for one in plain:
        assert one == {**full, "choices": [{**full["choices"][0], "text": one["choices"][0]["text"]}]}


def test_stream_includes_usage_if_requested(client: Any) -> None:
    seen = list(client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert seen[-1].choices == [] and seen[-1].usage.completion_tokens == 12
    assert all(one.usage is None for one in seen[:-1])


def test_every_chunk_has_usage_if_requested(http: httpx.Client) -> None:
    seen = chunks(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [one["usage"]["completion_tokens"] for one in seen]
    assert counts == sorted(counts) and counts[-1] == 12


def test_prompt_may_be_token_ids(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    texts = [one["text"] for one in post(http, prompt=[tokens, tokens])["choices"]]
    assert texts == [post(http)["choices"][0]["text"]] * 2
    assert post(http, prompt=tokens)["choices"][0]["text"] == texts[0]


def test_choices_follow_the_order_of_several_prompts(http: httpx.Client) -> None:
    prompts = [PROMPT, "A list is", "Raises"]
    alone = [post(http, prompt=one)["choices"][0]["text"] for one in prompts]
    together = post(http, prompt=prompts)
    assert [one["text"] for one in together["choices"]] == alone
    assert [one["index"] for one in together["choices"]] == [0, 1, 2]
    texts: defaultdict[int, str] = defaultdict(str)
    for chunk in chunks(http, prompt=prompts):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert [texts[index] for index in range(3)] == alone


def test_each_of_n_samples_has_its_own_seed(client: Any) -> None:
    ask = {**GREEDY, "temperature": 1.0, "seed": 7}
    found = client.completions.create(**ask, n=3)
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    single = [client.completions.create(**{**ask, "seed": 7 + index}).choices[0].text for index in range(3)]
    assert texts == single
    assert found.usage.completion_tokens == sum(
        client.completions.create(**{**ask, "seed": 7 + index}).usage.completion_tokens for index in range(3)
    )
    assert found.usage.prompt_tokens == client.completions.create(**ask).usage.prompt_tokens


def test_n_samples_are_streamed_by_index(client: Any) -> None:
    ask = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
    whole = [choice.text for choice in client.completions.create(**ask).choices]
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in client.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert texts == whole and ends == [1, 1, 1]


def test_samples_of_a_prompt_share_its_blocks(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "A function that " * 60}).json()["tokens"]
    http.post("/reset_prefix_cache")
    before = metric(http, "vllm:prefix_cache_hits_total")
    post(http, prompt=tokens, n=4, temperature=1, max_tokens=2)
    assert metric(http, "vllm:prefix_cache_hits_total") - before >= 3 * (len(tokens) // 32 - 1) * 32


def test_repeated_prompt_is_a_prefix_cache_hit(http: httpx.Client) -> None:
    prompt = "class Example: " * 40
    post(http, prompt=prompt)
    again = post(http, prompt=prompt)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > again["prompt_tokens"] // 2


def test_a_stop_string_ends_the_text_before_it(client: Any) -> None:
    text = client.completions.create(**GREEDY).choices[0].text
    stop = text[4:7]
    found = client.completions.create(**GREEDY, stop=[stop, "\x00"]).choices[0]
    assert found.text == text[: text.index(stop)] and found.finish_reason == "stop" and found.stop_reason == stop
    kept = client.completions.create(**GREEDY, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == text[: text.index(stop) + len(stop)]


def test_a_stop_token_ends_the_text(http: httpx.Client) -> None:
    token_ids = post(http, return_token_ids=True)["choices"][0]["token_ids"]
    (choice,) = post(http, stop_token_ids=[token_ids[3]], return_token_ids=True)["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == token_ids[3]
    assert choice["token_ids"] == token_ids[: token_ids.index(token_ids[3]) + 1]


def test_logit_bias_and_allowed_tokens_constrain_output(http: httpx.Client) -> None:
    assert post(http, allowed_token_ids=[40], return_token_ids=True)["choices"][0]["token_ids"] == [40] * 12
    biased = post(http, logit_bias={"41": 100}, max_tokens=3, return_token_ids=True)["choices"][0]
    assert biased["token_ids"] == [41] * 3


def test_log_probabilities_belong_to_the_tokens_of_the_text(client: Any) -> None:
    (choice,) = client.completions.create(**GREEDY, logprobs=3).choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 12
    for token, own, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3  # the sampled one is the most likely one
        assert top[token] == own == max(top.values()) <= 0
    offsets = [sum(map(len, logprobs.tokens[:index])) for index in range(12)]
    assert logprobs.text_offset == offsets


@pytest.mark.parametrize("fields", [{}, {"stop": ["\n" + "never" * 20, " the" + "x" * 50]}, {"echo": True}])
def test_log_probabilities_are_streamed(http: httpx.Client, fields: dict[str, Any]) -> None:
    whole = post(http, logprobs=2, **fields)["choices"][0]["logprobs"]
    joined: defaultdict[str, list[Any]] = defaultdict(list)
    for chunk in chunks(http, logprobs=2, **fields):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined["tokens"] == whole["tokens"] and joined["text_offset"] == whole["text_offset"]
    assert joined["token_logprobs"] == pytest.approx(whole["token_logprobs"], abs=1e-4)


def test_echo_puts_the_prompt_before_the_generated_text(http: httpx.Client) -> None:
    text = post(http)["choices"][0]["text"]
    assert post(http, echo=True)["choices"][0]["text"] == PROMPT + text
    assert "".join(one["choices"][0]["text"] for one in chunks(http, echo=True)) == PROMPT + text
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert post(http, echo=True, prompt=tokens)["choices"][0]["text"] == PROMPT + text


@pytest.mark.parametrize("stream", [False, True])
def test_echo_includes_log_probabilities_of_the_prompt(http: httpx.Client, stream: bool) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    answer = chunks(http, **fields)[0] if stream else post(http, **fields)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]).startswith(PROMPT)
    assert logprobs["text_offset"][0] == 0


def test_echo_with_zero_max_tokens_returns_prompt_logprobs(http: httpx.Client) -> None:
    answer = post(http, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT and answer["usage"]["completion_tokens"] == 0
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    (chunk,) = chunks(http, echo=True, max_tokens=0)
    assert chunk["choices"][0]["text"] == PROMPT


def test_prompt_logprobs_have_token_ids_as_keys(http: httpx.Client) -> None:
    answer = post(http, prompt_logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(choice["prompt_token_ids"]) - 1
    for token_id, entry in zip(choice["prompt_token_ids"][1:], rest, strict=True):
        assert entry[str(token_id)]["logprob"] <= 0 and entry[str(token_id)]["rank"] >= 1


def test_impossible_tokens_have_a_finite_logprob(http: httpx.Client) -> None:
    logprobs = post(http, allowed_token_ids=[40], logprobs=5)["choices"][0]["logprobs"]
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"])


def test_log_probabilities_show_tokens_as_ids_if_requested(http: httpx.Client) -> None:
    choice = post(http, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]


@pytest.mark.parametrize(
    ("structured", "check"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
    ],
)
def test_structured_outputs_constrain_the_text(http: httpx.Client, structured: dict[str, Any], check: Any) -> None:
    (choice,) = post(http, structured_outputs=structured, max_tokens=64)["choices"]
    assert choice["finish_reason"] == "stop" and check(choice["text"])
    streamed = "".join(one["choices"][0]["text"] for one in chunks(http, structured_outputs=structured, max_tokens=64))
    assert streamed == choice["text"]


def test_grammar_that_does_not_compile_gets_400(http: httpx.Client) -> None:
    for structured in ({"regex": "(["}, {"grammar": "root ::= nothing_of_this_name"}):
        response = http.post("/v1/completions", json={**GREEDY, "structured_outputs": structured})
        assert response.status_code == 400, response.text


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_tokens_that_contradict_the_grammar_get_400(http: httpx.Client, stream: bool) -> None:
    tokens = http.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    fields = {"allowed_token_ids": tokens, "structured_outputs": {"regex": "[0-9]+"}, "stream": stream}
    response = http.post("/v1/completions", json={**GREEDY, **fields})
    assert response.status_code == (200 if stream else 400)
    text = response.text.split("\n\n")[0].removeprefix("data: ")
    assert json.loads(text)["error"]["code"] == 400


def test_repetitive_output_has_finish_reason_repetition(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    detection = {"max_pattern_size": 5, "min_count": 4}
    answer = post(http, allowed_token_ids=tokens[-1:], ignore_eos=True, max_tokens=20, repetition_detection=detection)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert answer["usage"]["completion_tokens"] == 4
    assert metric(http, "vllm:request_success_total", 'finished_reason="repetition"') >= 1
    response = http.post("/v1/completions", json={**GREEDY, "repetition_detection": {"max_pattern_size": 5}})
    assert response.status_code == 400 and "min_count is 0" in response.text


def test_client_may_choose_the_request_id(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=GREEDY, headers={"X-Request-Id": "order-66"})
    assert response.json()["id"] == "cmpl-order-66" == response.headers["x-request-id"]
    assert post(http, request_id="abc")["id"] == "cmpl-abc"
    for _ in range(2):  # an id is free again once its request has ended
        assert post(http, request_id="again")["id"] == "cmpl-again"
    response = http.post("/v1/completions", json=GREEDY, headers={"X-Request-Id": "a b"})
    assert response.status_code == 400


# ------------------------------------------------------------------------------------------------- disconnects


def metric(http: httpx.Client, name: str, label: str = "") -> float:
    """The sum of a metric's series that have a label."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_idle(http: httpx.Client) -> bool:
    return not http.get("/v1/requests").json()["data"] and metric(http, "vllm:kv_cache_usage_perc") == 0


LONG: dict[str, Any] = {**GREEDY, "max_tokens": 8000, "ignore_eos": True}


def test_disconnect_from_a_stream_aborts_its_requests(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json={**LONG, "n": 2, "stream": True}) as response:
        pieces = response.iter_bytes()
        next(pieces)
        wait_until(lambda: len(http.get("/v1/requests").json()["data"]) == 2, 10, "both samples run")
    wait_until(lambda: is_idle(http), 10, "the blocks are free")


def test_disconnect_before_the_response_aborts_its_requests(server: ServerProcess, http: httpx.Client) -> None:
    def leave_early() -> None:
        with httpx.Client(base_url=server.url, timeout=0.7) as other, pytest.raises(httpx.TimeoutException):
            other.post("/v1/completions", json={**LONG, "request_id": "early"})

    thread = threading.Thread(target=leave_early)
    thread.start()
    wait_until(lambda: http.get("/v1/requests/cmpl-early").status_code == 200, 5, "the request runs")
    thread.join()
    wait_until(lambda: is_idle(http), 10, "the blocks are free")
