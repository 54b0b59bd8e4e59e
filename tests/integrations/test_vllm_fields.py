"""Every output is what the model runners of vLLM rely on, with the dataclasses of each supported version."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm_env

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm

pytestmark = NEEDS_VLLM


VERSIONS = [vllm_env.VLLM_VERSION, vllm_env.NEXT_VERSION]


def sources_of(version: str) -> Path | None:
    """Of a vLLM that is not the installed one."""
    if version == vllm_env.VLLM_VERSION:
        return None
    if not vllm_env.NEXT_SOURCES.exists():
        pytest.skip(f"the sources of vLLM {version} are not in .venv-vllm; benchmarks/vllm_env.py fetches them")
    return vllm_env.NEXT_SOURCES


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_keep_what_the_runners_rely_on(version: str) -> None:
    seen = run_in_vllm("vllm_fields.py", sources=sources_of(version))
    assert seen.pop("version") == version
    assert min(seen[what] for what in ("preempted", "resumed", "aborted", "skipped", "lost", "tenants")) > 100


@pytest.mark.parametrize("version", VERSIONS)
def test_single_requests_become_what_vllm_makes_of_them(version: str) -> None:
    found = run_in_vllm("vllm_cases.py", sources=sources_of(version))
    assert len(found) >= 10
    assert not any(found.values()), "\n".join(filter(None, found.values()))
