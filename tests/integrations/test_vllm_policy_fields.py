"""Warnings of keys in `vllm_xargs` that have no effect; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.integrations.vllm.policy_fields import FOR_POLICIES, MAX_WARNED, FieldWarnings
from tests.core.helpers import small_config

EVERY = {"pointsman_tenant": "a", "pointsman_ttft_target": 0.5, "pointsman_retention": 7}


def warnings_of(caplog: pytest.LogCaptureFixture, *requests: dict[str, Any] | None, **knobs: Any) -> list[str]:
    """The warnings about these requests, each sent twice."""
    warnings = FieldWarnings(small_config(**knobs))
    for extra_args in requests:
        warnings.check(extra_args)
        warnings.check(extra_args)
    return [record.getMessage() for record in caplog.records]


def test_a_mistyped_key_is_warned_of_once_with_the_nearest_key(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, None, {}, {"pointsman_tenent": "a", "other": 1})
    assert warning == (
        "a request has 'pointsman_tenent' in vllm_xargs, which is unknown and has no effect; did you mean "
        "pointsman_tenant? the keys are pointsman_tenant, pointsman_ttft_target, pointsman_retention"
    )


def test_fields_that_no_policy_reads_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    target, retention = warnings_of(caplog, EVERY)
    assert "pointsman_ttft_target in vllm_xargs, and no policy here reads it" in target
    assert target.endswith("set order earliest-ttft in --additional-config")
    assert "pointsman_retention" in retention and "set eviction retention in --additional-config" in retention


def test_fields_that_a_policy_reads_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert EVERY.keys() == FOR_POLICIES.keys()
    assert warnings_of(caplog, EVERY, order="earliest-ttft:default=2", eviction="retention") == []


def test_the_number_of_warnings_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    keys = [{f"pointsman_{number}": 1} for number in range(3 * MAX_WARNED)]
    assert len(warnings_of(caplog, *keys)) == MAX_WARNED
