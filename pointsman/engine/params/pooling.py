"""PoolingParams: parameters of an embedding request, which turns a prompt into one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    pass

Pooling = Literal["last", "mean"]

SILENT = SamplingParams(max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
"""The sampling parameters of embedding requests: every request has sampling parameters, and these generate nothing."""


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters for the vector of a prompt.

    Raises:
        ValueError: `pooling` is neither "last" nor "mean".
    """

    pooling: Pooling = "last"
    normalize: bool = True
    """Whether the vector is scaled to length 1."""

    def __post_init__(self) -> None:
        if self.pooling not in ("last", "mean"):
            raise ValueError(f'pooling is {self.pooling!r}; choose "last" or "mean"')

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens: 0, because nothing is generated."""
        return 0

    @property
    def output_kind(self) -> RequestOutputKind:
        """Content of each output: FINAL_ONLY, because there is one output, at the end."""
        return RequestOutputKind.FINAL_ONLY
