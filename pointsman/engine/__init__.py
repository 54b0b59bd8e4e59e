"""The engine: runs a Hugging Face model under the scheduler, over a paged KV pool.

    from pointsman.engine import LLM, SamplingParams

It imports `pointsman.core` only, and PyTorch and transformers when a public name is first used. A request passes from
`engine.py` (add) through `step_loop.py`, which has every step: schedule, `model/runner.py` (forward pass), `sampling/`,
update, `outputs/processor.py`. `llm.py` and `aio/` are the two ways to drive an engine. Begin with `engine.py`
for a request, with `step_loop.py` for a step or a token; `pointsman.server` lists a token's way to an HTTP client.

| package | question |
| --- | --- |
| `params/` | what does a caller ask for? |
| `text/` | how does text become tokens, and tokens text? |
| `attention/`, `kernels/` | how is paged attention computed? |
| `sources/`, `gguf/` | where does a model come from, and what is in a GGUF file? |
| `model/` | how is a model loaded and checked, how does a step run on it? |
| `grammar/` | which tokens may follow in a structured output? |
| `sampling/` | which token comes next? |
| `drafts/` | which tokens are proposed before the model has run? |
| `kv/` | where are keys and values? |
| `outputs/` | what does a caller get back? |
| `aio/` | how do asyncio and the engine's thread meet? |
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
            raise  # a mistake of ours, which no installing repairs
        raise ModuleNotFoundError(
            f"pointsman.engine.{name} needs {error.name}; install it with: pip install 'pointsman[engine]'",
            name=error.name,
        ) from error
