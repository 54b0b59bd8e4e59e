"""Helpers that make rooms of stages."""

from __future__ import annotations

from pointsman.server.service.backlog import Backlog
from pointsman.server.service.text_work import TextWork
from pointsman.server.stages import BODIES, PROMPT_TOKENS, REQUESTS, TEXTS, Stage, StageRoom


def room(stage: Stage, size: int | None, *, is_shared: bool = False) -> StageRoom:
    """A room of one tenant, or of several."""
    return StageRoom(stage, size, is_shared=is_shared)


def backlog(max_requests: int, max_prompt_tokens: int | None = None, *, is_shared: bool = False) -> Backlog:
    """A backlog of one tenant, or of several."""
    return Backlog(
        room(REQUESTS, max_requests, is_shared=is_shared), room(PROMPT_TOKENS, max_prompt_tokens, is_shared=is_shared)
    )


def bodies_room(max_bytes: int, *, is_shared: bool = False) -> StageRoom:
    """A budget for bodies of one tenant, or of several."""
    return room(BODIES, max_bytes, is_shared=is_shared)


def text_work(size: int = 1 << 24, *, is_shared: bool = False) -> TextWork:
    """Threads for the texts of one tenant, or of several."""
    return TextWork(room(TEXTS, size, is_shared=is_shared))
