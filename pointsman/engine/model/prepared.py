"""PreparedStep: all inputs of a step's execution, except the model and the pool."""

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
    """The part of a prompt whose log probabilities a step computes."""

    row_index: int
    start: int
    """Position in the prompt of the first token of `token_ids`."""
    token_ids: Int64Array
    """[m] the tokens whose log probabilities are computed."""
    num_logprobs: int


@dataclass(slots=True)
class PreparedStep:
    """All inputs of a step, except the model and the pool. It has n rows and T tokens, and s of the rows sample."""

    num_rows: int
    batches: list[PagedBatch]
    """One for each group of layers: the same tokens, with the block tables of the group."""
    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    sampling: Int64Array
    """[s] indices of the rows that sample; a row with drafts occurs once for each of its positions."""
    sampling_batch: SamplingBatch
    logits_at: Int64Array
    """Flat positions whose outputs are needed: first the s sampled ones, then those of `prompt_chunks`, then those of
    `pooled_chunks` (their hidden states only)."""
    num_logits: int
    prompt_chunks: Sequence[PromptChunk] = ()
    pooled_chunks: Sequence[PooledChunk] = ()
    verification: Verification | None = None
    """Verifies the step's drafts; None: it has none."""
    links: StepLinks | None = None
    """Tokens exchanged with other steps in flight; None: only one step may be in flight."""
    transfers: StepTransfers | None = None
    """KV that is copied before the step computes; None: the step copies none."""

    @property
    def batch(self) -> PagedBatch:
        """The batch of the first group. Fields that do not concern blocks are the same in all groups."""
        return self.batches[0]

    @property
    def needs_all_logits(self) -> bool:
        """Whether the logits of all tokens are needed, in order: the step has decodes only."""
        is_every = len(self.logits_at) == self.batch.num_tokens
        return is_every and not self.prompt_chunks and not self.pooled_chunks


@dataclass(slots=True)
class StepLinks:
    """Tokens that a step takes from earlier steps and stores for later ones, as places in `SampledTokens`."""

    sampled: Int64Array
    """[s] places of the tokens that the step samples."""
    unsampled: Int64Array
    """[u] flat positions of the input tokens that were not yet sampled when the step was prepared."""
    sources: Int64Array
    """[u] places where these tokens will be."""
