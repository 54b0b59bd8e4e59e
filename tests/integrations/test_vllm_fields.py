"""Every output fulfils the assumptions of vLLM's model runners, with the dataclasses of each supported version."""

from __future__ import annotations

import pytest

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

pytestmark = [*NEEDS_VLLM, pytest.mark.next_vllm]


def test_scheduler_outputs_fulfil_the_model_runners_assumptions(vllm_version: str) -> None:
    seen = run_in_vllm("vllm_fields.py")
    assert seen.pop("version") == vllm_version
    assert 30 < seen.pop("warned") <= 60, "each of 60 schedulers warns once of a mistyped key"
    assert min(seen[what] for what in ("preempted", "resumed", "aborted", "skipped", "lost", "tenants")) > 100


def test_single_requests_end_as_in_vllm() -> None:
    found = run_in_vllm("vllm_cases.py")
    assert len(found) >= 10
    assert not any(found.values()), "\n".join(filter(None, found.values()))
