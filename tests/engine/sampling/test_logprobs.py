"""Log probabilities equal log_softmax of each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pointsman.engine.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("k", [0, 1, 5, 30, -1, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_rows_equal_the_slow_reference(k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    tokens = np.array([0, 29, 3, 3, 15, 8, 2], dtype=np.int32)
    for row, token, entry in zip(
        logits.float().double(), tokens.tolist(), token_logprobs(logits, tokens, k), strict=True
    ):
        reference = (row - row.logsumexp(-1)).tolist()
        shown = 30 if k in (-1, 99) else k
        best = sorted(range(30), key=lambda t: -reference[t])[:shown]
        assert entry.token_ids[0] == token and len(entry.token_ids) == len(entry.logprobs) == shown + 1
        np.testing.assert_allclose(entry.logprobs, [reference[t] for t in [token, *best]], rtol=1e-5, atol=1e-5)
        assert entry.rank == 1 + sum(value > reference[token] for value in reference)
        assert (entry.token_ids.dtype, entry.logprobs.dtype) == (np.int64, np.float32)
        if dtype is torch.float32:
            assert entry.token_ids[1:].tolist() == best


def test_tokens_that_tie_share_the_best_rank() -> None:
    entries = token_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]).repeat(3, 1), np.array([2, 0, 1]), 0)
    assert [entry.rank for entry in entries] == [1, 3, 1]
