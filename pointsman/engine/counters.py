"""What an engine has done: totals, of which two readings make rates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made; every field only grows. Two readings make rates."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that reached their first token, with those found in the prefix cache."""
    num_cached_tokens: int = 0
    """Those of `num_prompt_tokens` that were not computed: they were found in the prefix cache, or outside the pool."""
    num_external_tokens: int = 0
    """Those of `num_cached_tokens` that came from host memory or the KV store."""
    num_generated_tokens: int = 0
    scheduler_time: float = 0.0
    """Seconds in the scheduler's `schedule` and `update`."""
    execute_time: float = 0.0
    """Seconds in which the engine's thread prepared steps, ran the model or waited for it."""
    num_external_queries: int = 0
    """With KV outside the pool: tokens of newly admitted requests that the prefix cache did not have,"""
    num_external_hits: int = 0
    """and the number of them that came from there."""
    num_offloaded_blocks: int = 0
    """KV blocks that were copied to host memory,"""
    num_restored_blocks: int = 0
    """and back."""
    num_stored_blocks: int = 0
    """KV blocks that were written to the store,"""
    num_unstored_blocks: int = 0
    """those that could not be written,"""
    num_loaded_blocks: int = 0
    """those that were read from it,"""
    num_unloaded_blocks: int = 0
    """and those that were to be read and were not there any more, damaged, or not wanted any more."""
    num_offloaded_bytes: int = 0
    num_restored_bytes: int = 0
    num_stored_bytes: int = 0
    num_loaded_bytes: int = 0

    @property
    def work_time(self) -> float:
        """Seconds in steps; with one step in flight none counts twice."""
        return self.scheduler_time + self.execute_time
