"""Chat completions over a real socket, as the official client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from pointsman.server.wire.responses import ChatCompletionResponse

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]
GREEDY: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A response as JSON, which must match the description exactly."""
    response = http.post("/v1/chat/completions", json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert ChatCompletionResponse.model_validate(body).model_dump(exclude_unset=True) == body
    return body


def test_chat_completion_has_a_role_and_a_text(client: Any) -> None:
    found = client.chat.completions.create(**GREEDY)
    assert found.object == "chat.completion" and found.id.startswith("chatcmpl-")
    (choice,) = found.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("length", "stop") and found.usage.completion_tokens <= 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_stream_begins_with_role_and_equals_the_whole_response(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY).choices[0]
    seen = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert seen[0].choices[0].delta.role == "assistant" and seen[0].choices[0].delta.content == ""
    assert "".join(one.choices[0].delta.content or "" for one in seen[:-1]) == whole.message.content
    assert seen[-2].choices[0].finish_reason == whole.finish_reason
    assert seen[-1].choices == [] and seen[-1].usage.completion_tokens <= 12
    assert {one.object for one in seen} == {"chat.completion.chunk"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        one.usage.completion_tokens
        for one in client.chat.completions.create(**GREEDY, stream=True, stream_options=options)
    ]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == seen[-1].usage.completion_tokens


def test_fast_path_writes_the_same_chunks_as_the_general_path(http: httpx.Client) -> None:
    """A faster function writes plain chunks, as most chunks are plain."""
    found = http.post("/v1/chat/completions", json={**GREEDY, "stream": True}).text.split("\n\n")[:-2]
    role, full, *plain, _ = [json.loads(one.removeprefix("data: ")) for one in found]
    assert role["choices"][0]["delta"]["role"] == "assistant" and plain
    for one in plain:
        text = one["choices"][0]["delta"]["content"]
        assert one == {**full, "choices": [{**full["choices"][0], "delta": {"content": text}}]}


def test_openai_client_can_accumulate_a_stream(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY).choices[0].message.content
    stop = whole[5:8]
    with client.chat.completions.stream(**GREEDY, stop=stop) as stream:  # which refuses an end for lack of tokens
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole[: whole.index(stop)]


def test_n_choices_are_streamed_by_index(client: Any) -> None:
    ask = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 3}
    whole = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    assert len(set(whole)) > 1
    texts, roles = ["", "", ""], [0, 0, 0]
    for chunk in client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
    assert texts == whole and roles == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_include_the_most_likely_tokens(client: Any, stream: bool) -> None:
    ask = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    if stream:
        seen = list(client.chat.completions.create(**ask, stream=True))
        content = [one for chunk in seen for one in (chunk.choices[0].logprobs or _NONE).content]
    else:
        content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert len(content) <= 12
    for one in content:
        assert bytes(one.bytes).decode() == one.token and one.logprob <= 0
        values = [top.logprob for top in one.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert one.top_logprobs[0].token == one.token  # greedy


class _NONE:
    content: tuple[Any, ...] = ()


def test_output_follows_the_json_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 150, "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = client.chat.completions.create(
        **{**GREEDY, "max_completion_tokens": 200, "temperature": 1, "seed": 1},
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    )
    person = json.loads(found.choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_default_max_tokens_is_the_remaining_length(http: httpx.Client) -> None:
    body = {key: value for key, value in GREEDY.items() if key != "max_completion_tokens"}
    response = http.post("/v1/chat/completions", json={**body, "stop": [" "]})
    assert response.status_code == 200 and response.json()["choices"][0]["finish_reason"] == "stop"
    assert post(http, max_tokens=5000, max_completion_tokens=3)["usage"]["completion_tokens"] <= 3


def test_text_parts_give_the_same_prompt_as_joined_text(http: httpx.Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joined = [{"role": "user", "content": "a\nb"}]
    found = [http.post("/tokenize", json={"messages": one}).json()["tokens"] for one in (parts, joined)]
    assert found[0] == found[1]


def test_a_message_can_be_continued_and_echoed(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = post(http, **fields)["choices"][0]["message"]["content"]
    assert post(http, **fields, echo=True)["choices"][0]["message"]["content"] == "One, two," + plain
    shown = http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": shown}).json()["prompt"].endswith("One, two,")


def test_response_has_token_ids_if_requested(http: httpx.Client) -> None:
    answer = post(http, return_token_ids=True)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def test_reserved_template_arguments_are_refused(http: httpx.Client) -> None:
    post(http, chat_template_kwargs={"enable_thinking": False})
    parameters = (
        "add_generation_prompt chat_template continue_final_message conversation conversations documents kwargs "
        "max_length messages padding processor_kwargs return_assistant_tokens_mask return_dict return_tensors self "
        "tokenize tokenizer_kwargs tools truncation"
    )
    for name in parameters.split():
        response = http.post("/v1/chat/completions", json={**GREEDY, "chat_template_kwargs": {name: "x"}})
        assert response.status_code == 400, name
    post(http, chat_template_kwargs={"no name": 1, "cls": 1, "template": 1, "context": 1, "source": 1, "": 1})


def test_openai_client_raises_its_own_exception_for_each_error(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**GREEDY, "model": "other"})
    assert missing.value.body["type"] == "NotFoundError" and missing.value.body["param"] == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**GREEDY, "temperature": -1})
    assert bad.value.body["param"] == "temperature" and bad.value.body["code"] == 400
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(
            **{**GREEDY, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
        )
