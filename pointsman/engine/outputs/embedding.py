"""EmbeddingRequestOutput: the output of an embedding request. It imports no PyTorch, because an API process uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.engine.arrays import Float32Array

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: Float32Array
    """[hidden_size]."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector, in vLLM's form."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """The embedding in the last output of a request.

        Raises:
            RuntimeError: the request finished without a vector, with the reason.
        """
        if output.embedding is None:
            why = output.finish_detail or output.finish_reason
            raise RuntimeError(f"request {output.request_id!r} ended without an embedding: {why}")
        result = EmbeddingOutput(output.embedding)
        return cls(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)
