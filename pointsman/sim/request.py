"""Requests that the simulator sends to a scheduler, and the tokens of their prompts.

No model reads the tokens. They only show which prompts share a prefix, at the lowest possible cost.

    first n tokens of `content`   digits of a number that names the content, so that different content differs there
    all other tokens              one token, repeated

Content is a shared block (named by its hash id) or the text of one request (named by its index). A request generates
`filler_token(index)`, repeated. The next prompt of its session contains this output, so that the prefix cache finds it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from struct import pack

import numpy as np
import numpy.typing as npt

from pointsman.traces import MAX_TOKENS, TraceRequest, prompt_token_ids

EOS_TOKEN = 2**31 - 1
"""The end-of-sequence token of simulated models; no other token is equal to it."""
VOCAB_SIZE = 100_000
"""Default number of token ids in prompts."""
MAX_INDEX = 2**30
"""Limit of the index of a request. Filler tokens are between 2**30 and 2**31 - 2, above the vocabulary of any model."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that an earlier request of a session adds to the later prompts."""

    index: int
    num_new_tokens: int
    """Number of new tokens in the prompt of the earlier request."""
    num_output_tokens: int


@dataclass(slots=True)
class SimRequest:
    """An immutable request that the simulator sends. Lengths are tokens."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Length of the output; known only to the simulator, never to a policy."""
    block_hash_ids: tuple[int, ...] = ()
    """Hash ids of the blocks at the beginning of the prompt, as in `TraceRequest.block_hash_ids`."""
    hash_block_size: int = 512
    max_tokens: int | None = None
    """The limit that the client set; None: only the model's limit."""
    priority: int = 0
    tenant: str = ""
    ttft_target: float | None = None
    """The client's target for the TTFT, in seconds; None: the client sets no target."""
    retention: float | None = None
    """Seconds after the request's end within which the client expects to reuse its prefix; None: unknown."""
    session: str | None = None
    adapter: int | None = None
    """Number of the adapter (LoRA) that the request runs with; None: the model alone."""
    index: int = 0
    """Number of the request in its workload, in the order of generation, from 0. Determines the request's tokens."""
    turns: tuple[Turn, ...] = ()
    """The earlier requests of the session, oldest first. Their tokens follow those of `block_hash_ids`."""

    @property
    def num_generated_tokens(self) -> int:
        """Number of output tokens that the request gets; `max_tokens` may limit it."""
        return self.num_output_tokens if self.max_tokens is None else min(self.num_output_tokens, self.max_tokens)


def filler_token(index: int) -> int:
    """The token that request `index` generates repeatedly: no other request has it, and it is never `EOS_TOKEN`.

    Raises:
        ValueError: the index is not between 0 and `MAX_INDEX` - 2.
    """
    if not 0 <= index < MAX_INDEX - 1:
        raise ValueError(f"request index is {index}; it must be between 0 and {MAX_INDEX - 2}")
    return EOS_TOKEN - 1 - index


def prompt_tokens(request: SimRequest, index: int, vocab_size: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """The prompt of a request: equal tokens where hash ids or sessions are equal, different tokens elsewhere.

    Args:
        request: the request.
        index: determines the text that is new with this request, and its output: `request.index`, or in a workload
            without sessions any other distinct number.
        vocab_size: tokens of text are drawn from 0 to vocab_size - 1.
        seed: another seed changes the tokens of all text.

    Returns:
        [num_prompt_tokens] int32, read-only, over a bytes object: a `Request` uses it without a copy.

    Raises:
        ValueError: `vocab_size` is below 2 or above `MAX_INDEX`.
    """
    if not 2 <= vocab_size <= MAX_INDEX:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 2 and {MAX_INDEX}")
    length = request.num_prompt_tokens
    if not request.block_hash_ids and not request.turns:
        return np.frombuffer(_own_text(index, length, vocab_size, seed), dtype=np.int32)
    pieces = [_shared_text(request, vocab_size, seed)]
    for turn in request.turns:
        pieces.append(_own_text(turn.index, turn.num_new_tokens, vocab_size, seed))
        pieces.append(_token_bytes(filler_token(turn.index)) * turn.num_output_tokens)
    missing = length - sum(map(len, pieces)) // 4
    pieces.append(_own_text(index, max(missing, 0), vocab_size, seed))
    return np.frombuffer(b"".join(pieces)[: 4 * length], dtype=np.int32)


@lru_cache(maxsize=256)
def blank_prompt(length: int) -> npt.NDArray[np.int32]:
    """A prompt of zeros, for schedulers without a prefix cache: [length] int32, read-only, shared among its callers."""
    return np.frombuffer(bytes(4 * length), dtype=np.int32)


def _token_bytes(token: int) -> bytes:
    return token.to_bytes(4, sys.byteorder)


def _own_text(index: int, length: int, vocab_size: int, seed: int) -> bytes:
    """Text of one request: the digits of an odd number, then one of these digits, repeated."""
    key, digits = 2 * index + 1, list[int]()
    for _ in range(min(_num_digits(vocab_size), length)):
        digits.append((key + seed) % vocab_size)
        key //= vocab_size
    text = pack(f"{len(digits)}i", *digits)
    return text + text[:4] * (length - len(digits))


def _shared_text(request: SimRequest, vocab_size: int, seed: int) -> bytes:
    """Text of shared blocks: each block has the digits of an even number, then one of these digits, repeated."""
    ids, size = request.block_hash_ids, request.hash_block_size
    length = min(len(ids) * size, request.num_prompt_tokens)
    if not length:
        return b""
    num_digits = _num_digits(vocab_size)
    if size < num_digits:  # the block is too small for its id
        shared = TraceRequest(0.0, length, 0, ids, size)
        return prompt_token_ids(shared, min(vocab_size, MAX_TOKENS), seed, 0).tobytes()
    keys = np.array(ids, dtype=np.uint64) * np.uint64(2)
    base, shift = np.uint64(vocab_size), np.uint64(seed % vocab_size)
    blocks = np.empty((len(ids), size), dtype=np.int32)
    blocks[:] = ((keys + shift) % base)[:, None]
    for at in range(num_digits):
        blocks[:, at] = (keys + shift) % base
        keys //= base
    return blocks.tobytes()[: 4 * length]


@lru_cache(maxsize=16)
def _num_digits(vocab_size: int) -> int:
    """The number of digits, in base `vocab_size`, that distinguish 2**64 numbers."""
    return math.ceil(64 / math.log2(vocab_size))
