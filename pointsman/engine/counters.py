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
    """How many of `num_prompt_tokens` were found in the prefix cache, and so were not computed."""
    num_generated_tokens: int = 0
    scheduler_time: float = 0.0
    """Seconds in the scheduler's `schedule` and `update`."""
    execute_time: float = 0.0
    """Seconds in which the engine's thread prepared steps, ran the model or waited for it."""
