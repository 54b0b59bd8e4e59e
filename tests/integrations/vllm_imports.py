"""Almost all that an engine of vLLM imports, for a process that forks engines; see `tests/forking.py`."""

from __future__ import annotations

import os
from typing import Any

import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.qwen3
import vllm.v1.engine.async_llm
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms.cpu import CpuPlatform


def fork_engines() -> None:
    """Undo a setting of vLLM's CPU platform: the processes of an engine would import everything again."""
    hook = CpuPlatform.check_and_update_config.__func__

    def forking(cls: Any, vllm_config: Any) -> None:
        hook(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(forking)


fork_engines()
