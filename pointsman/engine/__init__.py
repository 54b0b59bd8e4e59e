"""The engine: runs a Hugging Face model under the scheduler, over a paged KV pool.

    from pointsman.engine import LLM, SamplingParams

Importing this package is cheap: what needs PyTorch and transformers is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.engine.aio.async_engine import AsyncEngine, RequestStream
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
    from pointsman.engine.outputs.embedding import EmbeddingRequestOutput
    from pointsman.engine.outputs.request_output import CompletionOutput, Logprob, RequestOutput
    from pointsman.engine.params.pooling import PoolingParams
    from pointsman.engine.params.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from pointsman.engine.params.structured_outputs import StructuredOutputsParams
    from pointsman.engine.stats import EngineStats

_HOMES = {
    "LLM": "llm",
    "Engine": "engine",
    "AsyncEngine": "aio.async_engine",
    "RequestStream": "aio.async_engine",
    "EmbeddingRequestOutput": "outputs.embedding",
    "PoolingParams": "params.pooling",
    "EngineStats": "stats",
    "EngineDeadError": "errors",
    "SamplingParams": "params.sampling",
    "RepetitionDetectionParams": "params.sampling",
    "RequestOutputKind": "params.sampling",
    "StructuredOutputsParams": "params.structured_outputs",
    "Logprob": "outputs.request_output",
    "RequestOutput": "outputs.request_output",
    "CompletionOutput": "outputs.request_output",
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
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
