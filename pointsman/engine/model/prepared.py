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
    """The tokens of one prompt whose log probabilities a step computes."""

    row_index: int
    start: int
    """Prompt position of the first token of `token_ids`."""
    token_ids: Int64Array
    """[m] prompt tokens whose log probabilities are computed."""
    num_logprobs: int


@dataclass(slots=True)
class PreparedStep:
    """All inputs of a step, except the model and the pool. The step has n rows and T tokens, and samples s tokens."""

    num_rows: int
    batches: list[PagedBatch]
    """One batch for each group of layers: the tokens of the step, with the block tables of the group."""
    token_ids: Tensor
    """[T] int64: input tokens, row after row."""
    positions: Tensor
    """[T] int64: position of each token within its sequence."""
    sampling: Int64Array
    """[s] index of the row of each sampled token; a row with drafts occurs once for each position that it samples."""
    sampling_batch: SamplingBatch
    logits_at: Int64Array
    """Flat positions whose logits are needed: first the s positions that sample, then the positions of `prompt_chunks`,
    then the positions of `pooled_chunks` (only their hidden states are needed)."""
    num_logits: int
    prompt_chunks: Sequence[PromptChunk] = ()
    pooled_chunks: Sequence[PooledChunk] = ()
    verification: Verification | None = None
    """Verification of the step's drafts; None: the step has no drafts."""
    links: StepLinks | None = None
    """Places of the tokens that the step reads from, or stores for, other steps in flight; None: only one step may be
    in flight."""
    transfers: StepTransfers | None = None
    """Copies of KV that run before the step computes; None: the step copies no KV."""

    @property
    def batch(self) -> PagedBatch:
        """The batch of the first group of layers. Fields that do not concern blocks are equal in the batches of all
        groups."""
        return self.batches[0]

    @property
    def needs_all_logits(self) -> bool:
        """Whether the logits of all tokens are needed, in the order of the tokens, as in a step that has only
        decodes."""
        is_every = len(self.logits_at) == self.batch.num_tokens
        return is_every and not self.prompt_chunks and not self.pooled_chunks


@dataclass(slots=True)
class StepLinks:
    """Places in `SampledTokens` of tokens that a step reads from earlier steps and stores for later steps."""

    sampled: Int64Array
    """[s] places to which the step stores its sampled tokens."""
    unsampled: Int64Array
    """[u] flat positions of the input tokens that were not yet sampled when the step was prepared."""
    sources: Int64Array
    """[u] places from which the input tokens at `unsampled` are read when the step executes."""
