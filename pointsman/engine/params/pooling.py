"""PoolingParams: how a prompt becomes one vector, an embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    pass

Pooling = Literal["last", "mean"]

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
