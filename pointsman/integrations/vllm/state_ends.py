"""Ends of prefill chunks for models that cache states of Mamba, linear attention or convolutions for prefixes.

vLLM calls this the mode "align". A state covers all tokens before it, and is stored at the end of a chunk, so a prefix
can only be found up to the end of a chunk. A chunk therefore ends at the boundary of a block if the token budget of the
step suffices, and never crosses a position at which other requests will look up a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import is_mamba_prefill_checkpoint_valid

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.kv_cache_interface import MambaSpec


class StateEnds:
    """Computes the ends of prefill chunks.

    Args:
        managers: vLLM's managers of the states.
        scheduler_block_size: the least common multiple of the groups' block sizes.
        hash_block_size: number of tokens covered by a block hash.
        finds_parts: whether a cached prefix can end at a hash inside a block.
        max_chunk: maximum number of tokens of a chunk under vLLM's flags.
        is_before_0_32: whether vLLM is older than 0.32: its workers store states within chunks at every hash, and a
            prompt that ends at the end of a block is not cut a block earlier.
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
        """Number of tokens between two positions at which states are stored: vLLM's block size for states."""
        self.hash_size = hash_block_size
        self.finds_parts = finds_parts and hash_block_size < scheduler_block_size
        by_hash = self.finds_parts or is_before_0_32
        self._checkpoint_size = hash_block_size if by_hash else scheduler_block_size
        self._num_left = 0 if is_before_0_32 else 1
        """Minimum number of prompt tokens after the last position at which other requests can find a state."""
        self._max_chunk = max_chunk
        specs: list[MambaSpec] = [each.kv_cache_spec for each in managers]
        self._has_checkpoints = all(spec.num_prefill_checkpoint_blocks > 0 for spec in specs)
        self._checkpoint_alignment = specs[0].prefill_checkpoint_alignment

    def limit_chunk(
        self, start: int, max_now: int, max_later: int, num_prompt_tokens: int, num_tokens: int, junction: int
    ) -> int:
        """Number of tokens from `start` on that a request may compute in this step, at most `max_now`.

        Args:
            max_later: maximum number of tokens that the request might compute in another step.
            num_tokens: number of known tokens of the request: its prompt, and its output before a preemption.
            junction: end of the prefix that the request shares with other requests, if no state is stored at this end;
                0: no such prefix.

        Returns:
            The number of tokens; 0: the request waits for a step with enough tokens to reach a boundary.
        """
        prefill_end = max(num_prompt_tokens, num_tokens - 1)
        if start >= prefill_end:
            return max_now
        size, end = self.size, start + max_now
        keeps_within = end >= prefill_end and self._stores_state_within(start, end, prefill_end)
        if end < prefill_end:
            boundary = end // size * size
            # A request that never gets tokens for a whole block ends a chunk within the block, then one at its end.
            if boundary > start or size <= min(max_later, self._max_chunk):
                end = boundary
        stops = [] if keeps_within else [(num_tokens - self._num_left) // size * size]
        last = stops[0] if stops else 0
        if start % size:  # in all cases, unlike vLLM's own scheduler: otherwise the first block would count as full
            stops.append((start // size + 1) * size)
        if self.finds_parts and not keeps_within:
            tail = (num_prompt_tokens - self._num_left) // self.hash_size * self.hash_size
            if last < tail:
                stops.append(tail)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(0, min([stop for stop in stops if start < stop < end], default=end) - start)

    def _stores_state_within(self, start: int, end: int, prefill_end: int) -> bool:
        """Whether the layers can store, in the middle of this chunk, the state at the last boundary before the end of
        the prefill."""
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
