"""Helpers that make limits of stages."""

from __future__ import annotations

from pointsman.server.service.backlog import Backlog
from pointsman.server.service.text_work import TextWork
from pointsman.server.stages import BODIES, PROMPT_TOKENS, REQUESTS, TEXTS, Stage, StageLimit


def stage_limit(stage: Stage, size: int | None, *, is_shared: bool = False) -> StageLimit:
    """The limit of a stage, for one tenant or for several."""
    return StageLimit(stage, size, is_shared=is_shared)


def backlog(max_requests: int, max_prompt_tokens: int | None = None, *, is_shared: bool = False) -> Backlog:
    """A backlog with these limits, for one tenant or for several."""
    return Backlog(
        stage_limit(REQUESTS, max_requests, is_shared=is_shared),
        stage_limit(PROMPT_TOKENS, max_prompt_tokens, is_shared=is_shared),
    )


def bodies_limit(max_bytes: int, *, is_shared: bool = False) -> StageLimit:
    """The limit of the stage `BODIES`, for one tenant or for several."""
    return stage_limit(BODIES, max_bytes, is_shared=is_shared)


def text_work(size: int = 1 << 24, *, is_shared: bool = False) -> TextWork:
    """The threads for texts, for one tenant or for several."""
    return TextWork(stage_limit(TEXTS, size, is_shared=is_shared))
