"""All errors have the same form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from pointsman.server.wire.errors import ApiError, ErrorAnswers, error_body, not_found, shown
from pointsman.server.wire.responses import ErrorResponse


def test_error_body_equals_vllms() -> None:
    assert error_body(400, "no", "n") == {
        "error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}
    }
    assert error_body(404, "no")["error"]["type"] == "NotFoundError"
    assert error_body(418, "no")["error"]["type"] == "BadRequestError"
    assert error_body(599, "no")["error"]["type"] == "InternalServerError"


def test_error_response_has_status_headers_and_body_and_is_counted() -> None:
    counted: list[str] = []
    answer = ErrorAnswers(counted.append)
    response = answer(ApiError(429, "later", headers={"retry-after": "3"}, reason="queue_requests"))
    assert response.status_code == 429 and response.headers["retry-after"] == "3"
    assert response.headers["content-type"] == "application/json"
    ErrorResponse.model_validate_json(bytes(response.body))
    answer(not_found("nothing here", "model"))
    answer(HTTPException(405, "no", {"Allow": "GET"}))
    assert counted == ["queue_requests", "not_found", "invalid"]


def test_error_response_escapes_any_text() -> None:
    response = ErrorAnswers(lambda _: None)(ApiError(400, "a \ud800 \u2028 \x00"))
    assert bytes(response.body).isascii()
    assert json.loads(bytes(response.body))["error"]["code"] == 400


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, 2], "a list of 2"),
        ({"a": 1}, "an object with 1 keys"),
        (b"abc", "3 bytes"),
        ("a\nb", "'a\\nb'"),
        ("é", "'\\xe9'"),
    ],
)
def test_values_are_quoted_readably(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 10**6, 2**20000, -(2**20000), 2**200, 1e300, ["x"] * 10**6], ids=range(6))
def test_quoted_values_are_shortened(value: Any) -> None:
    assert len(shown(value)) < 100
