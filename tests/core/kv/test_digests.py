"""Digests of blocks: names that mean the same in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from pointsman.core import Adapter, EncoderInput, Request
from pointsman.core.kv.digests import block_keys


def request(*prompt: int, **fields: Any) -> Request:
    return Request("r", prompt, arrival_time=0.0, max_tokens=8, **fields)


def keys_of_blocks(*prompt: int, **fields: Any) -> list[bytes]:
    """The keys of blocks of two tokens."""
    return list(block_keys(request(*prompt, **fields), 2))


def keys_with_encoder_inputs(*inputs: EncoderInput, prompt: tuple[int, ...] = (7, 0, 0, 0, 7, 7)) -> list[bytes]:
    return keys_of_blocks(*prompt, encoder_inputs=inputs)


def test_block_keys_equal_the_documented_digests() -> None:
    def digest(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    def block(*tokens: int) -> bytes:
        return np.array(tokens, dtype="<i4").tobytes()

    first = digest(digest(b'["s","x",3]'), block(1, 2))
    assert keys_of_blocks(1, 2, 3, 4, 5, cache_salt="s", adapter=Adapter("x", 3)) == [first, digest(first, block(3, 4))]
    tokens = hashlib.sha256(block(0, 0, 0)).hexdigest()
    inputs = [json.dumps([["cat", offset, 3, tokens]], separators=(",", ":")).encode() for offset in (1, -1)]
    first = digest(digest(b"[null,null,null]"), block(7, 0), inputs[0])
    second = digest(first, block(0, 0), inputs[1])
    assert keys_with_encoder_inputs(EncoderInput("cat", 1, 3)) == [first, second, digest(second, block(7, 7))]


def test_block_keys_are_chained_and_equal_for_equal_content() -> None:
    assert keys_of_blocks(1, 2, 3, 4, 5) == keys_of_blocks(1, 2, 3, 4)
    assert keys_of_blocks(1, 2, 3, 4)[0] == keys_of_blocks(1, 2, 7, 8)[0]
    assert keys_of_blocks(9, 9, 3, 4)[1] != keys_of_blocks(1, 2, 3, 4)[1]
    assert not set(keys_of_blocks(1, 2, 3, 4, cache_salt="a")) & set(keys_of_blocks(1, 2, 3, 4, cache_salt="b"))


def test_block_keys_depend_on_encoder_inputs_and_their_positions() -> None:
    plain, cat = keys_with_encoder_inputs(), keys_with_encoder_inputs(EncoderInput("cat", 1, 3))
    assert cat == keys_with_encoder_inputs(EncoderInput("cat", 1, 3))
    others = [
        keys_with_encoder_inputs(EncoderInput("dog", 1, 3)),
        keys_with_encoder_inputs(EncoderInput("cat", 1, 2)),
        keys_with_encoder_inputs(EncoderInput("cat", 1, 1), EncoderInput("cat", 2, 2)),
        keys_with_encoder_inputs(EncoderInput("cat", 1, 3), prompt=(7, 0, 0, 9, 7, 7)),
    ]
    for other in others:
        assert not set(other) & {*plain, *cat}
    late = keys_with_encoder_inputs(EncoderInput("cat", 3, 1))
    assert late[0] == plain[0] and not set(late[1:]) & {*plain, *cat}


def test_block_keys_differ_for_an_encoder_input_and_its_two_halves() -> None:
    """An image in two encoder inputs, one for each half, gets other keys than in one encoder input."""
    whole = keys_of_blocks(0, 0, 0, 0, encoder_inputs=[EncoderInput("cat", 0, 4)])
    halves = keys_of_blocks(0, 0, 0, 0, encoder_inputs=[EncoderInput("cat", 0, 2), EncoderInput("cat", 2, 2)])
    assert not set(whole) & set(halves)


def test_generated_blocks_get_keys_and_each_block_is_hashed_once() -> None:
    grows = request(1, 2, 3)
    assert len(block_keys(grows, 2)) == 1
    first = block_keys(grows, 2)[0]
    grows._state.append_output([4, 5])
    assert list(block_keys(grows, 2)) == keys_of_blocks(1, 2, 3, 4) and block_keys(grows, 2)[0] is first
