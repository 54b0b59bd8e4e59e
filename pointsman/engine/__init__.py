"""The engine: runs a Hugging Face model under the scheduler, over a paged KV pool.

    from pointsman.engine import LLM, SamplingParams

The package imports `pointsman.core` only; it imports PyTorch and transformers when a public name is first used.
`engine.py` adds a request. `step_loop.py` runs every step: schedule, `model/runner.py` (forward pass), `sampling/`,
update, `outputs/processor.py`. Three callers drive an engine: `llm.py` (offline), `aio/async_engine.py` (asyncio), and
the server's engine process, which uses `aio/engine_thread.py`. Read `engine.py` for a request and `step_loop.py` for a
step or a token; `pointsman.server` lists a token's way to an HTTP client.

| package | contents |
| --- | --- |
| `params/` | parameters of requests and engines, and their checks |
| `text/` | text to tokens, tokens to text |
| `attention/`, `kernels/` | paged attention |
| `sources/`, `gguf/` | finding and downloading models, reading GGUF files |
| `model/` | loading and checking a model, running a step on it |
| `grammar/` | structured output: the tokens that a grammar allows next |
| `sampling/` | drawing the next token |
| `drafts/` | speculative decoding: tokens proposed before the model has run |
| `kv/` | the KV pool, and KV outside it |
| `outputs/` | outputs for callers |
| `aio/` | asyncio, and the thread that runs the engine |
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
        GrammarUnavailableError,
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
    "GrammarUnavailableError": "errors",
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
    "GrammarUnavailableError",
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
            raise  # a mistake within this package, which no installation repairs
        raise ModuleNotFoundError(
            f"pointsman.engine.{name} needs {error.name}; install it with: pip install 'pointsman[engine]'",
            name=error.name,
        ) from error
