"""The engine: runs a Hugging Face model under the scheduler, over a paged KV pool.

    from pointsman.engine import LLM, SamplingParams

Importing this package is cheap: what needs PyTorch and transformers is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.engine.async_engine import AsyncEngine, RequestStream
    from pointsman.engine.engine import Engine
    from pointsman.engine.errors import (
        EngineDeadError,
        EngineStepError,
        GrammarError,
        GrammarQueueFullError,
        ModelLoadError,
        UnsupportedModel,
    )
    from pointsman.engine.llm import LLM
    from pointsman.engine.output import CompletionOutput, Logprob, RequestOutput
    from pointsman.engine.pooling_params import EmbeddingRequestOutput, PoolingParams
    from pointsman.engine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from pointsman.engine.stats_log import EngineStats
    from pointsman.engine.structured_outputs import StructuredOutputsParams

_HOMES = {
    "LLM": "llm",
    "Engine": "engine",
    "AsyncEngine": "async_engine",
    "RequestStream": "async_engine",
    "EmbeddingRequestOutput": "pooling_params",
    "PoolingParams": "pooling_params",
    "EngineStats": "stats_log",
    "EngineDeadError": "errors",
    "SamplingParams": "sampling_params",
    "RepetitionDetectionParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "Logprob": "output",
    "RequestOutput": "output",
    "CompletionOutput": "output",
    "EngineStepError": "errors",
    "GrammarError": "errors",
    "GrammarQueueFullError": "errors",
    "ModelLoadError": "errors",
    "UnsupportedModel": "errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineDeadError",
    "EngineStats",
    "EngineStepError",
    "GrammarError",
    "GrammarQueueFullError",
    "Logprob",
    "ModelLoadError",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStream",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pointsman":
            raise  # a mistake of ours, which no installing repairs
        raise ModuleNotFoundError(
            f"pointsman.engine.{name} needs {error.name}; install it with: pip install 'pointsman[engine]'",
            name=error.name,
        ) from error
