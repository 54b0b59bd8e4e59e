"""EngineCounters: totals of an engine's steps, tokens, times and KV transfers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was made; every field only grows. The difference of two readings gives rates."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that reached their first token, including cached ones."""
    num_cached_tokens: int = 0
    """Tokens of `num_prompt_tokens` that were found in the prefix cache, or outside the pool, and not computed."""
    num_external_tokens: int = 0
    """Tokens of `num_cached_tokens` that came from host memory or the KV store."""
    num_generated_tokens: int = 0
    scheduler_time: float = 0.0
    """Seconds in the scheduler's `schedule` and `update`."""
    execute_time: float = 0.0
    """Seconds in which the engine's thread prepared steps, ran the model or waited for it."""
    num_external_queries: int = 0
    """With KV outside the pool: tokens of newly admitted requests that the prefix cache did not have."""
    num_external_hits: int = 0
    """Tokens of `num_external_queries` that came from outside the pool."""
    num_offloaded_blocks: int = 0
    """KV blocks that were copied to host memory."""
    num_restored_blocks: int = 0
    """KV blocks that were copied back from host memory."""
    num_stored_blocks: int = 0
    """KV blocks that were written to the KV store."""
    num_unstored_blocks: int = 0
    """KV blocks that could not be written to the store."""
    num_loaded_blocks: int = 0
    """KV blocks that were read from the store."""
    num_unloaded_blocks: int = 0
    """KV blocks that were to be read from the store and were gone, damaged, or no longer needed."""
    num_offloaded_bytes: int = 0
    num_restored_bytes: int = 0
    num_stored_bytes: int = 0
    num_loaded_bytes: int = 0

    @property
    def work_time(self) -> float:
        """Seconds in steps; with one step in flight no second counts twice."""
        return self.scheduler_time + self.execute_time
