"""Digests of KV blocks (chained SHA-256): names of block contents that mean the same in every process.

    key of a root   = SHA-256(canonical JSON of [cache salt, adapter name, adapter version])
    key of a block  = SHA-256(key of the block before it, or of the root; its tokens as little-endian int32;
                              for a block with placeholders: canonical JSON of the encoder inputs)

The JSON of an encoder input is [key of the input, offset of the first placeholder from the block's first token, number
of placeholders, SHA-256 of the placeholders' tokens in hex].

    name of a block = key of the block; with several groups of layers, followed by the group's index as two bytes,
    big-endian

The prefix tree compares tokens and needs no digest. Keys are for KV events (`events.py`) and connectors
(`connector.py`), and are computed only if events or a connector are in use. A key does not cover the constants of a
pool (model, weights, element type, block size). A store that several engines share must separate pools that differ in
one of these constants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pointsman.core.kv.prefix_tree import TOKEN_BYTES, Root

if TYPE_CHECKING:
    from pointsman.core.state.request import Request


class Placed(NamedTuple):
    """An encoder input and its offset in a block that contains placeholders of the input."""

    key: str
    offset: int
    """Offset of the input's first placeholder from the block's first token; negative if the input begins in an earlier
    block."""
    length: int
    tokens_digest: str


def root_key(root: Root) -> bytes:
    """The key of a root: the digest of a sequence's salt and adapter, from which the key of its first block is
    computed."""
    name, version = root.adapter if root.adapter is not None else (None, None)
    return hashlib.sha256(_canonical_json([root.cache_salt, name, version])).digest()


def block_key(parent_key: bytes, token_bytes: bytes, inputs: Sequence[Placed] = ()) -> bytes:
    """The key of a block. `parent_key`: the key of the block before it, or of the root. `token_bytes`: the block's
    tokens."""
    return hashlib.sha256(parent_key + token_bytes + (_canonical_json(inputs) if inputs else b"")).digest()


def block_keys(request: Request, block_size: int) -> tuple[bytes, ...]:
    """The keys of all full blocks of a request's known tokens, 32 bytes each.

    The keys are stored with the request, so that each block is hashed once.
    """
    state = request._state
    first, end = len(state.block_keys), state.num_tokens // block_size
    if first >= end:
        return state.block_keys
    keys = list(state.block_keys)
    last = keys[-1] if keys else root_key(Root.of(request))
    placed = placed_inputs(request, first, end, block_size)
    token_bytes = request.tokens(first * block_size, end * block_size).tobytes()
    size = block_size * TOKEN_BYTES
    for index in range(first, end):
        start = (index - first) * size
        last = block_key(last, token_bytes[start : start + size], placed.get(index, ()))
        keys.append(last)
    state.block_keys = tuple(keys)
    return state.block_keys


def block_name(key: bytes, group: int, num_groups: int) -> bytes:
    """The name of a block for stores outside the pool; the block is in group `group` of `num_groups` groups of
    layers."""
    return key if num_groups == 1 else key + group.to_bytes(2, "big")


def placed_inputs(request: Request, first: int, end: int, block_size: int) -> dict[int, list[Placed]]:
    """By block index, from `first` to `end` - 1: the encoder inputs with placeholders in the block, in the order of the
    prompt. Blocks without encoder inputs are left out."""
    placed: dict[int, list[Placed]] = {}
    for item in request._state.encoder_inputs:
        blocks = range(max(first, item.start // block_size), min(end, -(-item.end // block_size)))
        digest = tokens_digest(request._state.prompt_token_ids[item.start : item.end].tobytes()) if blocks else ""
        for block in blocks:
            entry = Placed(item.key, item.start - block * block_size, item.length, digest)
            placed.setdefault(block, []).append(entry)
    return placed


def tokens_digest(token_bytes: bytes) -> str:
    """The SHA-256 digest, in hex, of the tokens of an input's placeholders."""
    return hashlib.sha256(token_bytes).hexdigest()


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
