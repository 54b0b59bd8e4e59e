"""Features of real vLLM give the same results with our scheduler as with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forms import short_of
from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, run_in_vllm

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("feature", short_of(["offline", "online", "pooling", "lora", "drafts"], ["online"]))
def test_features_give_the_same_results_as_with_vllms_scheduler(tmp_path: Path, feature: str) -> None:
    if feature == "lora":
        run_in_vllm("vllm_features.py", "adapters", "-", DEMO, tmp_path)
    theirs = run_in_vllm("vllm_features.py", feature, "theirs", DEMO, tmp_path)
    assert theirs
    assert run_in_vllm("vllm_features.py", feature, "ours", DEMO, tmp_path) == theirs
