"""What is asked for and given when a prompt is made a vector; without PyTorch, for processes that only pass it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import RequestOutput

Pooling = Literal["last", "mean"]
Float32Array = npt.NDArray[np.float32]

SILENT = SamplingParams(max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
"""What stands in for sampling parameters where every request has some."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a vector is made of a prompt.

    Raises:
        ValueError: there is no such pooling.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    """Whether the vector is scaled to length 1."""

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise ValueError(f'pooling is {self.pooling!r}; choose "last" or "mean"')

    @property
    def max_tokens(self) -> int:
        """Nothing is generated."""
        return 0

    @property
    def output_kind(self) -> RequestOutputKind:
        """There is one output, at the end."""
        return RequestOutputKind.FINAL_ONLY


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: Float32Array
    """[hidden_size]."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector, in the shape that vLLM's users know."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """What the last output of a request says.

        Raises:
            RuntimeError: it ended without a vector; the message says why.
        """
        if output.embedding is None:
            why = output.finish_detail or output.finish_reason
            raise RuntimeError(f"request {output.request_id!r} ended without an embedding: {why}")
        result = EmbeddingOutput(output.embedding)
        return cls(output.request_id, result, output.prompt_token_ids, output.num_cached_tokens)
