"""Lowers thresholds, so that these short sequences and small batches also run the code for long and large ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pointsman.core.kv import tables
from pointsman.core.state import batch


@pytest.fixture(autouse=True, scope="package")
def keep_few_recent_tokens() -> Iterator[None]:
    """Keep only a few recent tokens of each row, instead of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "RECENT", 4)
        patch.setattr(batch, "RECENT_WITH_DRAFTS", 8)
        yield


@pytest.fixture(autouse=True, scope="package")
def arrays_for_every_batch() -> Iterator[None]:
    """Three running rows are written as a slice, and two that get blocks by NumPy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "SPANNED_FROM", 3)
        patch.setattr(tables, "MAX_LOOP_ROWS", 1)
        yield
