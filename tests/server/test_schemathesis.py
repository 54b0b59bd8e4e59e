"""Whatever its own description allows a client to send, and whatever it does not allow, the server answers.

schemathesis reads the OpenAPI description of a running server and makes up requests: such that fit it, and such that
break it somewhere. No answer may be a server error (503 aside, where the description says so), have a status or a
content type that the description does not list, or a JSON body of another shape. 200 requests, 2,000 with
POINTSMAN_SOAK=1; those that have a body or a parameter share them evenly, the others are sent once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from _server_process import ServerProcess, start_server
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import CHECKS, load_all_checks  # noqa: E402 - not before it is known to be there
from schemathesis.generation import GenerationMode  # noqa: E402

NUM_CASES = 2000 if os.environ.get("POINTSMAN_SOAK") == "1" else 200
CHECK_NAMES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
SECONDS_TO_ANSWER = 30
LIMITS = ("--max-tokens-limit", "8", "--max-n", "2", "--max-model-len", "256", "--num-blocks", "128")
"""So that no made-up request takes long."""


@pytest.fixture(scope="module")
def limited_server() -> Iterator[ServerProcess]:
    with start_server("--model", "demo", *LIMITS) as server:
        yield server


@pytest.mark.e2e
def test_no_request_makes_a_server_error_or_an_answer_that_is_not_described(limited_server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{limited_server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    varied = [operation for operation in operations if _varies(operation)]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= {each.path for each in varied}
    share = -(-NUM_CASES // (len(MODES) * len(varied)))
    statuses: Counter[int] = Counter()
    for operation in operations:
        for mode in MODES if operation in varied else MODES[:1]:
            statuses += explore(operation, mode, share if operation in varied else 1)
    print(f"{statuses.total()} requests to {len(operations)} operations, by status: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= NUM_CASES
    assert statuses[200] > NUM_CASES / 20 and statuses[400] > NUM_CASES / 20  # both sides of the line were seen
    assert limited_server.engine_pid  # it is still the process that was started


def explore(operation: Any, mode: GenerationMode, num_cases: int) -> Counter[int]:
    """Send so many made-up requests of one operation; how often each status came."""
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

    send()
    return statuses


def _varies(operation: Any) -> bool:
    """Whether its requests differ from each other."""
    return bool(operation.body or operation.path_parameters or operation.query)
