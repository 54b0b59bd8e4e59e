"""Versions of vLLM for the tests with real vLLM: the long form runs on every supported one, the short form on
`VLLM_VERSION`, and tests with the mark `next_vllm` on the next one too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_env import FOLDERS, NEXT_VERSION, PREVIOUS_VERSION, VLLM_VERSION

from tests.forms import is_long
from tests.integrations import vllm_process

VERSIONS = (PREVIOUS_VERSION, VLLM_VERSION, NEXT_VERSION)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "vllm" not in marks:
        return
    chosen = [version for version in VERSIONS if version == VLLM_VERSION or is_long()]
    if "next_vllm" in marks and not is_long():
        chosen.append(NEXT_VERSION)
    parameters = [pytest.param(version, marks=_skip_without(version)) for version in chosen]
    metafunc.parametrize("vllm_version", parameters, indirect=True, scope="session")


def _skip_without(version: str) -> pytest.MarkDecorator:
    folder = FOLDERS.get(version)
    return pytest.mark.skipif(
        folder is not None and not folder.exists(),
        reason=f"vLLM {version} is not in .venv-vllm; benchmarks/vllm_env.py --all-versions fetches it",
    )


@pytest.fixture(scope="session", autouse=True)
def vllm_version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version of vLLM that a test runs."""
    version: str = getattr(request, "param", VLLM_VERSION)
    with vllm_process.version_in_use(version):
        yield version
