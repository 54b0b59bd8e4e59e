"""Computes log probabilities of sampled tokens and of prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.params.sampling import ALL_TOKENS


@dataclass(slots=True, eq=False)
class TokenLogprobs:
    """Log probabilities of one token, and of the most likely tokens at the same position.

    The log probabilities are computed from the model's unchanged logits (vLLM's "raw_logprobs"): before penalties,
    biases, masks and temperature.
    """

    token_ids: Int64Array
    """[k + 1] the token itself, then the k most likely tokens, most likely first. The k tokens may include the token
    itself."""
    logprobs: Float32Array
    """[k + 1] natural logarithms of the probabilities of `token_ids`."""
    rank: int
    """The token's rank among all tokens: 1 is the most likely token. Equally likely tokens share the best of their
    ranks."""


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log probabilities of one chunk of a prompt. The first token of a prompt has no log probability."""

    start: int
    """Prompt position of the first entry; at least 1. After a preemption, chunks begin at earlier positions again."""
    entries: list[TokenLogprobs]
    """One entry for each position, starting at `start`."""


def token_logprobs(logits: Tensor, token_ids: npt.NDArray[np.integer], k: int) -> list[TokenLogprobs]:
    """Log probabilities of one token per row and of the row's k most likely tokens.

    Args:
        logits: [m, vocab_size] logits in any floating dtype.
        token_ids: [m] one token for each row.
        k: number of most likely tokens for each row; -1, or more than the vocabulary: the whole vocabulary.
    """
    vocab_size = logits.shape[-1]
    k = vocab_size if k == ALL_TOKENS else min(k, vocab_size)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)[:, None]
    own = logprobs.gather(1, chosen)
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    ids, values = chosen, own
    if k:
        top = logprobs.topk(k, dim=-1)
        ids, values = torch.cat([chosen, top.indices], dim=-1), torch.cat([own, top.values], dim=-1)
    all_ids, all_values = ids.cpu().numpy(), values.cpu().numpy()
    return [TokenLogprobs(all_ids[i], all_values[i], rank) for i, rank in enumerate(ranks)]
