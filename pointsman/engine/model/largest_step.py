"""The largest step that an engine may schedule, run once so that its memory can be measured (`engine/memory.py`).

As many requests as may run share all tokens of a step, all of them sample, and each uses what takes the sampler most
memory. The scheduler is real, its blocks are only numbers: every entry of the block tables is block 0 of a pool that
has no other, so that the run needs no KV memory. What it computes means nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pointsman.core import Scheduler, SchedulerConfig, SchedulerOutput
from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.layout import KVLayout
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.runner import ModelRunner
from pointsman.engine.params.requests import to_request
from pointsman.engine.params.sampling import SamplingParams

SAMPLING = SamplingParams(
    max_tokens=1, ignore_eos=True, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, logprobs=1, seed=0
)
"""A sort of the vocabulary, counts of its tokens and a second distribution over it. Log probabilities of prompts, which
take a distribution for every token, are not in it: they are few."""


class _InOneBlock(Scheduler):
    """A scheduler whose requests all have their KV in block 0."""

    __slots__ = ()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        return np.zeros_like(super().block_table)

    @property
    def group_block_tables(self) -> npt.NDArray[np.int32]:
        return np.zeros_like(super().group_block_tables)


def prompt_lengths(config: SchedulerConfig) -> list[int]:
    """Prompt tokens of each request of the largest step. There is a request for each token that a step may sample, with
    drafts more than `max_num_seqs`, and `max_num_batched_tokens` tokens in all, or what sequences of `max_model_len`
    with one output token hold.
    """
    num_rows = min(config.max_num_seqs * (1 + config.num_draft_tokens), config.max_num_batched_tokens)
    each, more = divmod(config.max_num_batched_tokens, num_rows)
    longest = max(1, config.max_model_len - 1)
    return [min(longest, each + (row < more)) for row in range(num_rows)]


def run_largest_step(
    loaded: LoadedModel, attention: AttentionBackend, config: SchedulerConfig, layout: KVLayout, kv_dtype: torch.dtype
) -> SchedulerOutput:
    """Run the largest step, and return it.

    Args:
        loaded: the model.
        attention: that computes its attention.
        config: of the engine; of its policies none takes part.
        layout: of the KV pool.
        kv_dtype: of its elements.
    """
    lengths = prompt_lengths(config)
    own = SchedulerConfig(
        num_blocks=1,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_groups=config.kv_groups,
        enable_prefix_caching=False,
    )
    scheduler = _InOneBlock(own.replace(num_blocks=len(lengths) * own.most_blocks(max(lengths) + 1)))
    pool = KVPool(
        loaded.layers,
        num_blocks=1,
        block_size=config.block_size,
        dtype=kv_dtype,
        device=loaded.model.device,
        layout=layout,
    )
    runner = ModelRunner(loaded, pool, scheduler, backend=attention)
    for row, length in enumerate(lengths):
        request = to_request(
            f"largest-step-{row}",
            np.arange(length, dtype=np.int32) % loaded.vocab_size,
            SAMPLING,
            arrival_time=0.0,
            eos_token_ids=loaded.eos_token_ids,
            max_model_len=config.max_model_len,
        )
        scheduler.add(request, 0.0)
    output = scheduler.schedule(0.0)
    runner.execute(output)
    return output
