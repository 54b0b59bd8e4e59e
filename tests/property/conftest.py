"""Sequences here are short, so the batch has room for few recent tokens and moves them on often."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pointsman.core.state import batch


@pytest.fixture(autouse=True, scope="package")
def little_room_for_recent_tokens() -> Iterator[None]:
    """A few tokens instead of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "RECENT", 4)
        patch.setattr(batch, "RECENT_WITH_DRAFTS", 8)
        yield
