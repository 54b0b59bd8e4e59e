"""Where chunks of prefills end in models that cache states of Mamba, linear attention or convolutions for prefixes.

vLLM calls it the mode "align". A state stands for all tokens before it, and is kept where a chunk ends, so a prefix can
be found up to the ends of chunks alone. A chunk therefore ends at a block's boundary if the step has the tokens for it,
and never runs past a position behind which other requests will look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import is_mamba_prefill_checkpoint_valid

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.kv_cache_interface import MambaSpec


class StateEnds:
    """The ends of chunks.

    Args:
        managers: vLLM's managers of the states.
        scheduler_block_size: the least common multiple of the groups' block sizes.
        hash_block_size: tokens of a hash.
        finds_parts: whether a prefix can be found up to a hash inside a block.
        max_chunk: tokens of the longest chunk that vLLM's flags allow.
        is_before_0_32: whether the workers are those of an older vLLM: they keep states within chunks at every hash,
            and a prompt that ends where a block does is not cut a block earlier.
    """

    def __init__(
        self,
        managers: Sequence[MambaManager],
        scheduler_block_size: int,
        hash_block_size: int,
        *,
        finds_parts: bool,
        max_chunk: int,
        is_before_0_32: bool,
    ) -> None:
        self.size = int(managers[0].block_size)
        """Tokens between two states that are kept."""
        self.hash_size = hash_block_size
        self.finds_parts = finds_parts and hash_block_size < scheduler_block_size
        by_hash = self.finds_parts or is_before_0_32
        self._checkpoint_size = hash_block_size if by_hash else scheduler_block_size
        self._num_left = 0 if is_before_0_32 else 1
        """Tokens of a prompt behind the last end that others are to find."""
        self._max_chunk = max_chunk
        specs: list[MambaSpec] = [each.kv_cache_spec for each in managers]
        self._has_checkpoints = all(spec.num_prefill_checkpoint_blocks > 0 for spec in specs)
        self._checkpoint_alignment = specs[0].prefill_checkpoint_alignment

    def cut(self, start: int, want: int, most: int, num_prompt_tokens: int, num_tokens: int, junction: int) -> int:
        """How many of `want` tokens from `start` on a request may compute in this step.

        Args:
            most: tokens that it might get in another step.
            num_tokens: that are known of it; those of its prompt, and its output before a preemption.
            junction: where the prefix ends that it has in common with others, and whose state nobody has kept; 0: none.

        Returns:
            0: it waits for a step with enough tokens to reach a boundary.
        """
        prefill_end = max(num_prompt_tokens, num_tokens - 1)
        if start >= prefill_end:
            return want
        size, end = self.size, start + want
        keeps_within = end >= prefill_end and self._keeps_within(start, end, prefill_end)
        if end < prefill_end:
            boundary = end // size * size
            # What is never given a whole block goes on within it, and stops at its end.
            if boundary > start or size <= min(most, self._max_chunk):
                end = boundary
        stops = [] if keeps_within else [(num_tokens - self._num_left) // size * size]
        last = stops[0] if stops else 0
        if start % size:  # also where vLLM's own does not: the block that it starts in would count as full
            stops.append((start // size + 1) * size)
        if self.finds_parts and not keeps_within:
            tail = (num_prompt_tokens - self._num_left) // self.hash_size * self.hash_size
            if last < tail:
                stops.append(tail)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(0, min([stop for stop in stops if start < stop < end], default=end) - start)

    def _keeps_within(self, start: int, end: int, prefill_end: int) -> bool:
        """Whether the layers keep the state behind the last boundary in the middle of this chunk."""
        return self._has_checkpoints and bool(
            is_mamba_prefill_checkpoint_valid(
                query_start=start,
                query_end=end,
                checkpoint_position=(prefill_end - 1) // self._checkpoint_size * self._checkpoint_size,
                hash_block_size=self.hash_size,
                mamba_block_size=self.size,
                checkpoint_alignment=self._checkpoint_alignment,
            )
        )
