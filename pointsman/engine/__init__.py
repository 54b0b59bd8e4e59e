"""The engine: runs a Hugging Face model under the scheduler, over a paged KV pool.

    from pointsman.engine import LLM, SamplingParams

Importing this package is cheap: what needs PyTorch and transformers is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.engine.engine import Engine
    from pointsman.engine.errors import EngineStepError, ModelLoadError, UnsupportedModel
    from pointsman.engine.llm import LLM
    from pointsman.engine.output import CompletionOutput, RequestOutput
    from pointsman.engine.sampling_params import SamplingParams

_HOMES = {
    "LLM": "llm",
    "Engine": "engine",
    "SamplingParams": "sampling_params",
    "RequestOutput": "output",
    "CompletionOutput": "output",
    "EngineStepError": "errors",
    "ModelLoadError": "errors",
    "UnsupportedModel": "errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStepError",
    "ModelLoadError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
