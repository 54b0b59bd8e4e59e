"""Encoder inputs: the number of embeddings that an entry of the encoder cache holds."""

from __future__ import annotations

import pytest

from pointsman.core import EncoderEntry, EncoderInput


@pytest.mark.parametrize(
    ("num_embeddings", "mask", "expected"),
    [(None, None, 3), (None, "010", 1), (None, "000", 0), (2, None, 2), (0, None, 0), (2, "101", 2)],
)
def test_an_entry_counts_the_given_embeddings_or_placeholders(
    num_embeddings: int | None, mask: str | None, expected: int
) -> None:
    assert EncoderInput("image", 4, 3, num_embeddings, mask).entry == EncoderEntry("image", expected)
