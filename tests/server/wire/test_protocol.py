"""Validation of request bodies, and the errors for clients."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from pointsman.server.wire.errors import ApiError, validation_error
from pointsman.server.wire.protocol import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    EmbeddingRequest,
    JsonSchemaFormat,
    Message,
    ProtocolModel,
    RepetitionDetection,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    StructuredOutputs,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeRequest,
)

USER = {"role": "user", "content": "hello"}


def refused(model: type[BaseModel], body: Any) -> ApiError:
    """The error for a body that is not valid for this request."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return validation_error({**error, "loc": ("body", *error["loc"])} for error in caught.value.errors())


def test_request_defaults_are_openais_and_vllms() -> None:
    body = CompletionRequest.model_validate({"prompt": "a"})
    assert (body.max_tokens, body.n, body.min_tokens, body.priority) == (16, 1, 0, 0)
    assert body.temperature is None and body.top_p is None and body.logprobs is None
    assert body.add_special_tokens and body.skip_special_tokens and not body.ignore_eos
    chat = ChatCompletionRequest.model_validate({"messages": [USER]})
    assert (chat.max_tokens, chat.max_completion_tokens, chat.n, chat.top_logprobs) == (None, None, 1, 0)
    assert chat.add_generation_prompt and not chat.continue_final_message and not chat.add_special_tokens


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_prompt_may_be_text_token_ids_or_a_list_of_either(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [None, 5, "", [], [[]], {}, [1, "a"], ["a", 1.5], [-1], [2**31], [[1], "a"], [10**4000], True]
)
def test_values_of_other_types_are_refused_as_prompts(prompt: Any) -> None:
    body = {"prompt": prompt}
    if prompt == [[]]:  # one of several is empty: the prompts' reader says so
        CompletionRequest.model_validate(body)
    else:
        error = refused(CompletionRequest, body)
        assert error.status_code == 400 and error.param == "prompt" and len(error.detail) < 400


USER_OF_PARTS = {"role": "user", "content": [{"type": "text", "text": 1}] * 5000}
HUGE: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": ["x", *[None] * 100_000]}, "at most 1024 "),
    (CompletionRequest, {"prompt": [[1]] * 100_000}, "at most 1024 "),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 100_000}}, "at most 4096 "),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(at): "x" for at in range(5000)}}, "at most 1024 "),
    (CompletionRequest, {"prompt": "a", "stop": [1] * 100_000}, "at most 64 "),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 100_000}, "at most 1024 "),
    (CompletionRequest, {"prompt": "a", "allowed_token_ids": ["x"] * 200_000}, "at most 131072 "),
    (CompletionRequest, {"prompt": "a", "bad_words": [1] * 100_000}, "at most 128 "),
    (ChatCompletionRequest, {"messages": [1] * 100_000}, "at most 4096 "),
    (ChatCompletionRequest, {"messages": [USER_OF_PARTS]}, "at most 4096 "),
    (ChatCompletionRequest, {"messages": [{"role": "a", "tool_calls": [1] * 100_000}]}, "at most 128 "),
    (ChatCompletionRequest, {"messages": [USER], "modalities": [1] * 100_000}, "at most 16 "),
    (ChatCompletionRequest, {"messages": [USER], "tools": [1] * 100_000}, "at most 128 "),
    (ChatCompletionRequest, {"messages": [USER], "documents": [1] * 100_000}, "at most 128 "),
    (
        ChatCompletionRequest,
        {"messages": [USER], "documents": [dict.fromkeys(map(str, range(5000)), 1)]},
        "at most 64 ",
    ),
    (DetokenizeRequest, {"tokens": ["x"] * 200_000}, "at most 131072 "),
    # The maximum number of elements: validation ends at the first wrong one.
    (CompletionRequest, {"prompt": [1, *[None] * 100_000]}, "valid integer"),
    (CompletionRequest, {"prompt": [[1], *[None] * 1000]}, "valid list"),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 4000}}, "valid string"),
    (ChatCompletionRequest, {"messages": [{}] * 4000}, "messages"),
    (ChatCompletionRequest, {"messages": [{"role": "a", "content": [1] * 4000}]}, "messages"),
]
"""Bodies with many wrong elements, and their errors."""


@pytest.mark.parametrize(("model", "body", "words"), HUGE)
def test_list_validation_checks_length_first_and_stops_at_first_error(
    model: type[BaseModel], body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 5
    error = refused(model, body)
    assert words in error.detail and len(error.detail) < 400


@pytest.mark.parametrize(
    "field",
    [
        "n",
        "best_of",
        "max_tokens",
        "logprobs",
        "prompt_logprobs",
        "min_tokens",
        "seed",
        "priority",
        "top_k",
        "top_p",
        "min_p",
        "temperature",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "deadline",
        "ttft_target",
        "retention",
    ],
)
def test_booleans_are_refused_as_numbers(field: str) -> None:
    for value in (True, False):
        error = refused(CompletionRequest, {"prompt": "a", field: value})
        assert error.param == field and "true and false are no numbers" in error.detail
    error = refused(CompletionRequest, {"prompt": "a", field: "x"})
    assert error.param == field


def test_booleans_are_refused_as_logit_biases() -> None:
    assert refused(CompletionRequest, {"prompt": "a", "logit_bias": {"5": True}}).param == "logit_bias"


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_must_be_integers(field: str) -> None:
    for value in ([True], [1, False], [1.5], [None]):
        assert refused(CompletionRequest, {"prompt": "a", field: value}).param == field
    assert refused(CompletionRequest, {"prompt": [[1], [True]]}).param == "prompt"


def test_null_equals_a_field_left_out() -> None:
    nulls = ("max_tokens", "temperature", "stop", "seed", "stream", "logit_bias", "user", "stream_options", "echo")
    body = CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(nulls)})
    assert body.max_tokens is None and body.stop is None
    chat = ChatCompletionRequest.model_validate({"messages": [USER], "n": None, "top_logprobs": None, "tools": None})
    assert (chat.n, chat.top_logprobs) == (1, 0)


REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [USER]},
    EmbeddingRequest: {"input": "a"},
    TokenizeCompletionRequest: {"prompt": "a"},
    TokenizeChatRequest: {"messages": [USER]},
    DetokenizeRequest: {"tokens": [1]},
    Message: {**USER, "tool_calls": []},
    ContentPart: {"type": "text", "text": "a"},
    StreamOptions: {},
    RepetitionDetection: {},
    StructuredOutputs: {},
    ResponseFormat: {"type": "text"},
    JsonSchemaFormat: {"name": "a"},
}
"""The smallest body of each model."""


def models_below(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*map(models_below, model.__subclasses__()))


def test_required_bodies_include_every_request_model() -> None:
    bases = {ProtocolModel, ProtocolModel.__subclasses__()[0], SamplingFields, ChatFields}
    assert models_below(ProtocolModel) - bases == set(REQUIRED)


@pytest.mark.parametrize("model", REQUIRED)
def test_null_is_the_default_of_every_field_that_may_be_left_out(model: type[BaseModel]) -> None:
    described = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        known_as = field.alias or name
        body = {**REQUIRED[model], known_as: None}
        if field.is_required():
            refused(model, body)
            continue
        has_null = type(None) in get_args(field.annotation)
        default = None if has_null else field.get_default(call_default_factory=True)
        assert getattr(model.model_validate(body), name) == default, name
        assert {"type": "null"} in described[known_as]["anyOf"], name


def test_null_becomes_the_default_of_fields_without_a_null_type() -> None:
    """One of each kind: numbers, truth values, names, lists, and fields of an object in the request."""
    fields = dict.fromkeys(("n", "min_tokens", "priority", "ignore_eos", "skip_special_tokens", "bad_words"))
    parts = {
        "structured_outputs": {"regex": "a", "disable_any_whitespace": None},
        "repetition_detection": {"min_count": None},
    }
    body = CompletionRequest.model_validate({"prompt": "a", **fields, **parts})
    assert (body.n, body.min_tokens, body.priority, body.ignore_eos, body.skip_special_tokens) == (1, 0, 0, False, True)
    assert (
        body.bad_words == []
        and body.bad_words is not CompletionRequest.model_validate({"prompt": "a", **fields}).bad_words
    )
    assert body.structured_outputs is not None and body.structured_outputs.disable_any_whitespace is False
    assert body.repetition_detection is not None and body.repetition_detection.min_count == 0
    vector = EmbeddingRequest.model_validate({"input": "a", "encoding_format": None, "pooling": None})
    assert (vector.encoding_format, vector.pooling) == ("float", "last")
    continued = {"messages": [USER], "continue_final_message": True, "add_generation_prompt": None}
    assert ChatCompletionRequest.model_validate(continued).add_generation_prompt is False


@pytest.mark.parametrize(
    "body", [{"prompt": None}, {"prompt": "a", "stop": [None]}, {"prompt": "a", "logit_bias": {"5": None}}]
)
def test_null_in_required_fields_is_refused(body: dict[str, Any]) -> None:
    refused(CompletionRequest, body)


def test_unknown_fields_are_ignored() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "guided_json": {}, "service_tier": "auto", "__class__": 1})
    assert type(body) is CompletionRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("n", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("max_tokens", "many"),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("seed", 2**63),
        ("stop", ["a"] * 65),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("priority", 2**63),
        ("deadline", 0),
        ("ttft_target", 0),
        ("ttft_target", "soon"),
        ("retention", -1),
        ("retention", "long"),
        ("cache_salt", ""),
        ("request_id", ""),
        ("user", 5),
        ("logit_bias", [1]),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("structured_outputs", {"regex": 5}),
        ("suffix", "x"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("prompt_embeds", "AAAA"),
        ("kv_transfer_params", {"a": 1}),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_error_for_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    error = refused(CompletionRequest, {"prompt": "a", field: value})
    assert error.param == field
    assert field in error.detail and "\n" not in error.detail


def test_error_in_a_nested_object_names_the_nested_field() -> None:
    error = refused(CompletionRequest, {"prompt": "a", "structured_outputs": {"structural_tag": "x"}})
    assert error.param == "structural_tag"


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    neutral = {"suffix": None, "best_of": 1, "use_beam_search": False, "kv_transfer_params": {}, "prompt_embeds": None}
    CompletionRequest.model_validate({"prompt": "a", **neutral})
    chat = {"audio": None, "functions": None, "function_call": "none", "chat_template": None, "modalities": ["text"]}
    ChatCompletionRequest.model_validate({"messages": [USER], **chat})


def test_zero_max_tokens_is_accepted_only_with_echo() -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "max_tokens": 0, "echo": True}).max_tokens == 0
    assert refused(CompletionRequest, {"prompt": "a", "max_tokens": 0}).param == "max_tokens"


# ------------------------------------------------------------------------------------------------- conversations


def test_text_parts_of_a_message_are_joined() -> None:
    message = Message.model_validate({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]})
    assert message.as_template_input() == {"role": "user", "content": "a\nb"}


def test_all_message_fields_reach_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = Message.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call], "name": "bob", "x": 1}
    )
    assert message.as_template_input() == {"role": "assistant", "content": "", "tool_calls": [call], "name": "bob"}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "", "content": "a"},
        {"role": "user: x\nassistant", "content": "a"},
        {"role": 5, "content": "a"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": [5]},
        "hello",
        None,
    ],
)
def test_invalid_messages_are_refused(message: Any) -> None:
    error = refused(ChatCompletionRequest, {"messages": [USER, message]})
    assert error.status_code == 400 and error.param == "messages"


def test_image_is_refused_with_a_readable_message() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}
    assert "image_url" in refused(ChatCompletionRequest, body).detail
    assert "text only" in refused(ChatCompletionRequest, body).detail


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}, None])
def test_tools_are_refused_unless_tool_choice_is_none(choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body: dict[str, Any] = {"messages": [USER], "tools": tools}
    if choice is not None:
        body["tool_choice"] = choice
    assert refused(ChatCompletionRequest, body).param == "tool_choice"
    assert ChatCompletionRequest.model_validate({**body, "tool_choice": "none"}).tools == tools


def test_request_cannot_set_the_chat_template() -> None:
    assert refused(ChatCompletionRequest, {"messages": [USER], "chat_template": "{{ 1 }}"}).param == "chat_template"


def test_last_message_may_be_continued_instead_of_answered() -> None:
    body = {"messages": [USER], "continue_final_message": True}
    assert not ChatCompletionRequest.model_validate(body).add_generation_prompt
    error = refused(ChatCompletionRequest, {**body, "add_generation_prompt": True})
    assert error.param == "continue_final_message"


def test_top_logprobs_need_logprobs() -> None:
    assert refused(ChatCompletionRequest, {"messages": [USER], "top_logprobs": 2}).param == "top_logprobs"


# ------------------------------------------------------------------------------------------------- tokens


def test_tokenize_distinguishes_text_from_conversation() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TokenizeRequest)
    assert isinstance(adapter.validate_python({"prompt": "a"}), TokenizeCompletionRequest)
    assert isinstance(adapter.validate_python({"messages": [USER]}), TokenizeChatRequest)
    assert isinstance(adapter.validate_python({"prompt": "a", "messages": None}), TokenizeCompletionRequest)
    assert isinstance(adapter.validate_python({"prompt": None, "messages": [USER]}), TokenizeChatRequest)
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python({"messages": []})
    assert {error["loc"][0] for error in caught.value.errors()} == {"Chat"}  # not a word about a prompt


def test_detokenize_accepts_only_token_ids() -> None:
    assert DetokenizeRequest.model_validate({"tokens": []}).tokens == []
    assert refused(DetokenizeRequest, {"tokens": [-1]}).param == "tokens"


# ------------------------------------------------------------------------------------------------- messages


def test_error_contains_a_shortened_value_and_the_limit() -> None:
    error = refused(CompletionRequest, {"prompt": "a", "temperature": -1})
    assert "temperature" in error.detail and "-1" in error.detail and "0" in error.detail
    error = refused(CompletionRequest, {"prompt": "a", "user": "x" * 100_000})
    assert len(error.detail) < 300
    error = refused(CompletionRequest, {"prompt": "a", "n": 0, "top_p": 5, "min_p": 5, "top_k": -9, "deadline": -1})
    assert "more fields" in error.detail and len(error.detail) < 600


def test_error_is_one_line_for_any_value() -> None:
    error = refused(CompletionRequest, {"prompt": "a", "temperature": "\r\n\u2028\x1b[31m"})
    assert error.detail.isprintable()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_infinite_numbers_are_refused(number: str) -> None:
    text = f'{{"prompt": "a", "temperature": {number}}}'
    try:
        body = from_json(text, allow_inf_nan=False)
    except ValueError:
        return  # the parser knows already
    assert refused(CompletionRequest, body).param == "temperature"


@pytest.mark.parametrize(
    ("field", "most", "one"),
    [
        ("stop", 64, "x" * 1000),
        ("stop_token_ids", 1024, 5),
        ("allowed_token_ids", 131_072, 5),
        ("bad_words", 128, "x" * 100),
    ],
)
def test_lists_have_a_maximum_length(field: str, most: int, one: Any) -> None:
    assert len(getattr(CompletionRequest.model_validate({"prompt": "a", field: [one] * most}), field)) == most
    error = refused(CompletionRequest, {"prompt": "a", field: [one] * (most + 1)})
    assert error.param == field and str(most) in error.detail
    if isinstance(one, str):
        error = refused(CompletionRequest, {"prompt": "a", field: [one + "x"]})
        assert error.param == field and str(len(one)) in error.detail


def test_conversations_and_biases_have_a_maximum_length() -> None:
    biases = {str(token): 1.0 for token in range(1025)}
    assert "1024" in refused(CompletionRequest, {"prompt": "a", "logit_bias": biases}).detail
    assert "4096" in refused(ChatCompletionRequest, {"messages": [USER] * 4097}).detail
    assert "128" in refused(ChatCompletionRequest, {"messages": [USER], "documents": [{"text": "a"}] * 129}).detail
    assert "131072" in refused(DetokenizeRequest, {"tokens": [1] * 131_073}).detail


def test_error_names_its_field_only_once() -> None:
    assert refused(CompletionRequest, {"prompt": "a", "suffix": "b"}).detail.count("suffix:") == 1
    assert refused(CompletionRequest, {"prompt": ""}).detail.count("prompt:") == 1
    assert refused(CompletionRequest, {"prompt": "a", "temperature": -1}).detail.startswith("temperature: ")


def test_assistant_message_may_be_empty() -> None:
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": []})
    assert message.as_template_input()["content"] == ""
