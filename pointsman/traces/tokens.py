"""Generates pseudo-random tokens for traced prompts; the tokens are equal where hash ids are equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.traces.requests import MAX_TOKENS, TraceRequest


def prompt_token_ids(request: TraceRequest, vocab_size: int, seed: int, index: int) -> npt.NDArray[np.int32]:
    """Generate tokens for a prompt of the traced length. Equal hash ids give equal tokens.

    A token is a hash of (seed, content, position) and depends on nothing else. The content is the hash id of the
    token's block, or else the request itself. Prompts with different content agree in a token only by chance, once in
    `vocab_size` positions.

    Args:
        request: the request of the trace.
        vocab_size: size of the vocabulary; token ids are from 0 to vocab_size - 1.
        seed: number that determines the tokens of the whole trace.
        index: the request's index in the trace, which distinguishes requests without hash ids.

    Returns:
        [num_prompt_tokens] int32 token ids.

    Raises:
        ValueError: `vocab_size` is below 1 or beyond int32.
    """
    if not 1 <= vocab_size <= MAX_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 1 and {MAX_TOKENS}")
    length = request.num_prompt_tokens
    content = np.full(length, 2 * index + 1, dtype=np.uint64)  # odd: this request alone; even: a shared block
    ids = np.array(request.block_hash_ids, dtype=np.uint64) * np.uint64(2)
    shared = np.repeat(ids, request.hash_block_size)[:length]
    content[: len(shared)] = shared
    seed_key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    keys = _mix(seed_key + content)
    positions: npt.NDArray[np.uint64] = np.arange(length, dtype=np.uint64)
    tokens = _mix(keys + positions) % np.uint64(vocab_size)
    return tokens.astype(np.int32)


def _mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map each 64-bit word to another word, so that neighbouring words become unrelated words (a bijection, the step of
    the SplitMix64 generator)."""
    words = keys + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
