"""EngineCounters: totals of an engine's steps, tokens, times and KV transfers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Totals of one engine since it was made; every field only grows. Differences between two readings give rates."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Number of prompt tokens of requests that reached their first token, including cached tokens."""
    num_cached_tokens: int = 0
    """Part of `num_prompt_tokens`: number of tokens that were not computed, because their KV was in the prefix cache,
    in host memory or in the KV store."""
    num_external_tokens: int = 0
    """Part of `num_cached_tokens`: number of tokens whose KV was loaded from host memory or the KV store."""
    num_generated_tokens: int = 0
    scheduler_time: float = 0.0
    """Seconds in the scheduler's `schedule` and `update`."""
    execute_time: float = 0.0
    """Seconds in which the engine's thread prepared steps, ran the model or waited for it."""
    num_external_queries: int = 0
    """Number of tokens of newly admitted requests whose KV was not in the prefix cache; counted only if the engine
    keeps KV in host memory or a KV store."""
    num_external_hits: int = 0
    """Part of `num_external_queries`: number of tokens whose KV was loaded from host memory or the KV store."""
    num_offloaded_blocks: int = 0
    """Number of KV blocks that were copied to host memory."""
    num_restored_blocks: int = 0
    """Number of KV blocks that were copied back from host memory."""
    num_stored_blocks: int = 0
    """Number of KV blocks that were written to the KV store."""
    num_unstored_blocks: int = 0
    """Number of KV blocks that could not be written to the KV store."""
    num_loaded_blocks: int = 0
    """Number of KV blocks that were read from the KV store."""
    num_unloaded_blocks: int = 0
    """Number of KV blocks that were requested from the KV store but not read: the file was removed or damaged, or the
    request had finished."""
    num_offloaded_bytes: int = 0
    num_restored_bytes: int = 0
    num_stored_bytes: int = 0
    num_loaded_bytes: int = 0

    @property
    def work_time(self) -> float:
        """Sum of `scheduler_time` and `execute_time`, in seconds. With one step in flight the two times do not
        overlap."""
        return self.scheduler_time + self.execute_time
