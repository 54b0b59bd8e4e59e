"""Every output is what the model runners of vLLM rely on, with the dataclasses of each supported version."""

from __future__ import annotations

import pytest
import vllm_env

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("version", [vllm_env.VLLM_VERSION, vllm_env.NEXT_VERSION])
def test_outputs_keep_what_the_runners_rely_on(version: str) -> None:
    sources = None if version == vllm_env.VLLM_VERSION else vllm_env.NEXT_SOURCES
    if sources is not None and not sources.exists():
        pytest.skip(f"the sources of vLLM {version} are not in .venv-vllm; benchmarks/vllm_env.py fetches them")
    seen = run_in_vllm("vllm_fields.py", sources=sources)
    assert seen.pop("version") == version
    assert min(seen[what] for what in ("preempted", "resumed", "aborted", "skipped")) > 100
