"""Models with windows beside full attention run as one KV group, which their refusal names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm, vllm_parent
from tests.soak import short_of

pytestmark = NEEDS_VLLM
FLAG = "--disable-hybrid-kv-cache-manager"


@pytest.mark.parametrize("family", short_of(["gemma3", "gpt-oss", "olmo3", "cohere2"], {"gemma3"}))
def test_tokens_as_one_group_are_those_of_vllms_own_scheduler(tmp_path: Path, family: str) -> None:
    """In a pool so short that requests wait; and without the flag it is refused, before and when vLLM starts."""
    theirs = run_in_vllm("vllm_windows.py", family, "theirs", tmp_path)
    assert len({tuple(tokens) for tokens in theirs}) == len(theirs)
    assert run_in_vllm("vllm_windows.py", family, "ours", tmp_path) == theirs
    assert f"give {FLAG}" in run_in_vllm("vllm_windows.py", family, "refused", tmp_path)
    check = ["-m", "pointsman", "vllm", "check", tmp_path, "--skip-tokenizer-init"]
    before = vllm_parent().run(*check, timeout=300)
    assert before.returncode == 1 and f"give {FLAG}" in before.stdout, before.stdout + before.stderr
    before = vllm_parent().run(*check, FLAG, timeout=300)
    assert before.returncode == 0, before.stdout + before.stderr
