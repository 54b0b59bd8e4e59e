"""Runs the largest step that an engine may schedule, so that its memory can be measured (`engine/memory.py`).

The maximum number of requests share the token budget. All requests sample, with the parameters that need most memory.
The scheduler is real, but every entry of its block tables is block 0 of a pool with one block, so the run needs almost
no KV memory. The results are meaningless.
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
"""Sampling parameters that need most memory: top-p sorts the vocabulary, penalties count its tokens, and log
probabilities need a second distribution. Prompt log probabilities, which need a distribution for every token, are not
included, because they are rare."""


class _OneBlockScheduler(Scheduler):
    """A scheduler whose block tables name block 0 for all KV."""

    __slots__ = ()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        return np.zeros_like(super().block_table)

    @property
    def group_block_tables(self) -> npt.NDArray[np.int32]:
        return np.zeros_like(super().group_block_tables)


def prompt_lengths(config: SchedulerConfig) -> list[int]:
    """Number of prompt tokens of each request of the largest step.

    There is one request for each token that a step may sample; with drafts there are more than `max_num_seqs` requests.
    The prompts together have `max_num_batched_tokens` tokens, or fewer if `max_model_len` limits each prompt.
    """
    num_rows = min(config.max_num_seqs * (1 + config.num_draft_tokens), config.max_num_batched_tokens)
    each, more = divmod(config.max_num_batched_tokens, num_rows)
    longest = max(1, config.max_model_len - 1)
    return [min(longest, each + (row < more)) for row in range(num_rows)]


def run_largest_step(
    loaded: LoadedModel, attention: AttentionBackend, config: SchedulerConfig, layout: KVLayout, kv_dtype: torch.dtype
) -> SchedulerOutput:
    """Run the largest step, and return the scheduler's output for it.

    Args:
        loaded: the model.
        attention: the attention backend.
        config: the engine's configuration; its policies are not used.
        layout: layout of the KV pool.
        kv_dtype: type of the pool's elements.
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
    scheduler = _OneBlockScheduler(own.replace(num_blocks=len(lengths) * own.max_blocks(max(lengths) + 1)))
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
