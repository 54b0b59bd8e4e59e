"""Random requests, valid and invalid by the server's OpenAPI description, get a described response.

schemathesis reads the OpenAPI description of a running server and generates requests that match it, and requests that
violate it. No response may be a server error (except a described 503), have an undescribed status or content type, or a
JSON body of another form. There are 100 requests, 2,000 in the long form. Operations with a body or a parameter share
them evenly; each other operation gets one request.

Of the matching requests, hardly any reaches the engine: almost every one exceeds a limit of this server, which the
general description does not contain. So a third of the requests match a narrower description, with the model's name,
the vocabulary and the limits; many of these must succeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from _server_process import ServerProcess
from hypothesis import HealthCheck, Phase, given, settings

from tests.forked_engines import start_server
from tests.forms import short_or_long

schemathesis = pytest.importorskip("schemathesis")

import requests  # noqa: E402 - schemathesis brings it along
from schemathesis.checks import CHECKS, load_all_checks  # noqa: E402 - not before it is known to be there
from schemathesis.generation import GenerationMode  # noqa: E402

NUM_CASES = short_or_long(100, 2000)
CHECK_NAMES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
GENERATING = ("/v1/completions", "/v1/chat/completions")
PAUSING = "/pause"
SECONDS_TO_ANSWER = 30
LIMITS = ("--max-tokens-limit", "8", "--max-n", "2", "--max-model-len", "256", "--num-blocks", "128")
"""Limits that keep every generated request short."""

_TOKEN = {"type": "integer", "minimum": 1, "maximum": 2047}
_TOKENS = {"type": "array", "items": _TOKEN, "minItems": 1, "maxItems": 8}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
_SMALL_COUNT = {"type": "integer", "minimum": 0, "maximum": 4}
NARROW: dict[str, Any] = {
    "model": {"enum": ["demo"]},
    "prompt": {"anyOf": [_TEXT, _TOKENS, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}]},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 3},
    "tokens": _TOKENS,
    "n": {"enum": [1, 2]},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "min_tokens": {"enum": [0, 1]},
    "top_logprobs": _SMALL_COUNT,
    "prompt_logprobs": _SMALL_COUNT,
    "stop": _TEXT,
    "bad_words": {"type": "array", "items": {"enum": ["the", "of"]}},
    "stop_token_ids": _TOKENS,
    "allowed_token_ids": _TOKENS,
    "logit_bias": {"type": "object", "properties": {"5": {"type": "number", "minimum": -100, "maximum": 100}},
                   "additionalProperties": False},
    "structured_outputs": {"enum": [None, {"regex": "[ab]{3}"}, {"choice": ["yes", "no"]}, {"json_object": True}]},
    "response_format": {"enum": [None, {"type": "text"}, {"type": "json_object"}]},
    "repetition_detection": {"enum": [None, {}, {"max_pattern_size": 3, "min_count": 2}]},
    "deadline": {"enum": [None, 20]},
    "add_generation_prompt": {"enum": [True]},
    "continue_final_message": {"enum": [False]},
}  # fmt: skip
"""Schemas of fields, with the ranges that this server accepts."""
NEEDED = {"prompt", "messages", "max_tokens"}
NEUTRAL = {"temperature", "top_p", "seed", "stream", "echo", "user", "priority", "ignore_eos", "return_token_ids"}
"""Fields whose description stays as it is; `narrowed` leaves out fields that are neither here nor in `NARROW`."""


@pytest.fixture(scope="module")
def limited_server() -> Iterator[ServerProcess]:
    with start_server("--model", "demo", *LIMITS) as server:
        yield server


@pytest.mark.e2e
def test_no_request_causes_a_server_error_or_undescribed_response(limited_server: ServerProcess) -> None:
    operations = operations_of(described(limited_server), limited_server)
    varied = [operation for operation in operations if _varies(operation)]
    assert {*GENERATING, "/tokenize", "/detokenize"} <= {each.path for each in varied}
    statuses: Counter[int] = Counter()
    for operation in operations:
        if operation not in varied:
            statuses += explore(operation, MODES[0], 1)
    # Without a body there may be fewer different requests than their share; those with one make up for it.
    turns = [(operation, mode) for operation in sorted(varied, key=lambda each: bool(each.body)) for mode in MODES]
    for number, (operation, mode) in enumerate(turns):
        share = -(-(NUM_CASES - statuses.total()) // (len(turns) - number))
        statuses += explore(operation, mode, max(1, share))
        if operation.path == PAUSING:  # nothing is generated until then
            assert requests.post(f"{limited_server.url}/resume", timeout=SECONDS_TO_ANSWER).ok
    print(f"{statuses.total()} requests to {len(operations)} operations, by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= NUM_CASES
    assert statuses[200] > 0 and statuses[400] > NUM_CASES / 20
    assert limited_server.engine_pid  # the process that was started is still there


@pytest.mark.e2e
def test_responses_within_limits_match_their_description(limited_server: ServerProcess) -> None:
    description = narrowed(described(limited_server))
    operations = [each for each in operations_of(description, limited_server) if each.path in GENERATING]
    statuses: Counter[int] = Counter()
    for operation in operations:
        statuses += explore(operation, GenerationMode.POSITIVE, NUM_CASES // 4)
    print(f"{statuses.total()} requests, by status: {dict(sorted(statuses.items()))}")
    assert statuses[200] > statuses.total() / 2


def described(server: ServerProcess) -> dict[str, Any]:
    """The server's description."""
    description: dict[str, Any] = requests.get(f"{server.url}/openapi.json", timeout=SECONDS_TO_ANSWER).json()
    return description


def narrowed(description: dict[str, Any]) -> dict[str, Any]:
    """The server's description, with bodies of completions within this server's limits."""
    schemas = description["components"]["schemas"]
    for path in GENERATING:
        operation = description["paths"][path]["post"]
        operation["parameters"] = []
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        body = schemas[reference.rsplit("/", 1)[1]]
        fields = body["properties"]
        body["properties"] = {
            name: NARROW.get(name, field) for name, field in fields.items() if name in NARROW or name in NEUTRAL
        }
        body["required"] = sorted(NEEDED & fields.keys())
        body["additionalProperties"] = False
    return description


def operations_of(description: dict[str, Any], server: ServerProcess) -> list[Any]:
    """Every operation, to be sent to the server."""
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=server.url)
    return [result.ok() for result in schema.get_all_operations()]


def explore(operation: Any, mode: GenerationMode, num_cases: int) -> Counter[int]:
    """Send generated requests of one operation; returns the number of responses by status."""
    load_all_checks()
    checks = CHECKS.get_by_names(CHECK_NAMES)
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # repeating what failed, smaller, would take longer than it explains
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(timeout=SECONDS_TO_ANSWER)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code == 503, f"{case.as_curl_command()}\n{response.text}"
        case.validate_response(response, checks=checks)
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n"), case.as_curl_command()

    send()
    return statuses


def _varies(operation: Any) -> bool:
    """Whether the operation has a body or parameters, so that generated requests differ."""
    return bool(operation.body or operation.path_parameters or operation.query)
