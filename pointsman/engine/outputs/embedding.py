"""EmbeddingRequestOutput: the output of an embedding request. It imports no PyTorch, because an API process uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.engine.arrays import Float32Array

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: Float32Array
    """[hidden_size] the vector."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The output of an embedding request, with vLLM's fields."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Make the output from the last `RequestOutput` of an embedding request.

        Raises:
            RuntimeError: the request finished without a vector, with the reason.
        """
        if output.embedding is None:
            why = output.finish_detail or output.finish_reason
            raise RuntimeError(f"request {output.request_id!r} ended without an embedding: {why}")
        result = EmbeddingOutput(output.embedding)
        return cls(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)
