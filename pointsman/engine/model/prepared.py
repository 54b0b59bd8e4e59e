"""A step that is ready for the model: all that executing it needs, beside the model and the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from pointsman.engine.arrays import Int64Array
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.drafts.verification import Verification
from pointsman.engine.model.pooling import PooledChunk
from pointsman.engine.sampling.batch import SamplingBatch

if TYPE_CHECKING:
    from pointsman.engine.kv.connector import StepTransfers


@dataclass(slots=True)
class PromptChunk:
    """The part of a prompt whose log probabilities are wanted from a step."""

    row_index: int
    start: int
    """Position in the prompt of the first token of `token_ids`."""
    token_ids: Int64Array
    """[m] the tokens whose log probabilities are wanted."""
    num_logprobs: int


@dataclass(slots=True)
class PreparedStep:
    """All that executing one step needs, beside the model and the pool. n rows, T tokens, s of the rows sample."""

    num_rows: int
    batches: list[PagedBatch]
    """By group of layers: the same tokens, over the tables of the group."""
    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    sampling: Int64Array
    """[s] row indices that sample; a row with drafts once for each of its positions."""
    sampling_batch: SamplingBatch
    logits_at: Int64Array
    """Flat positions whose logits are wanted: first the s that are sampled from, then those of `prompt_chunks`; behind
    them those whose hidden states are, of `pooled_chunks`."""
    num_logits: int
    prompt_chunks: Sequence[PromptChunk] = ()
    pooled_chunks: Sequence[PooledChunk] = ()
    verification: Verification | None = None
    """Of its drafts; None: it has none."""
    links: StepLinks | None = None
    """Tokens exchanged with other steps in flight; None: there are none."""
    transfers: StepTransfers | None = None
    """KV that is copied before the step computes; None: none is."""

    @property
    def batch(self) -> PagedBatch:
        """Of the first group; what is not about blocks is the same in all."""
        return self.batches[0]

    @property
    def wants_all_logits(self) -> bool:
        """Whether the logits of all tokens are wanted, in their order: decodes only."""
        is_every = len(self.logits_at) == self.batch.num_tokens
        return is_every and not self.prompt_chunks and not self.pooled_chunks


@dataclass(slots=True)
class StepLinks:
    """Tokens that a step takes from those before it and leaves for those behind it, as places in `SampledTokens`."""

    sampled: Int64Array
    """[s] for the tokens that the step samples."""
    unsampled: Int64Array
    """[u] flat positions of input tokens that were yet to be sampled when the step was prepared;"""
    sources: Int64Array
    """[u] and where they will be."""
