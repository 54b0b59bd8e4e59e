"""Failures of vLLM's scheduler that were reported in public do not happen here."""

from __future__ import annotations

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

pytestmark = NEEDS_VLLM


def test_known_bugs_of_vllms_scheduler_do_not_occur() -> None:
    found = run_in_vllm("vllm_known_bugs.py")
    assert len(found) >= 7
    assert not any(found.values()), "\n".join(filter(None, found.values()))
