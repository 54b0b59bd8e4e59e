"""Content marks: numbers that stand for encoder inputs in the keys of the prefix cache, one per placeholder.

The content of an encoder input determines the KV of all later tokens, so it is part of the key of the prefix cache. In
the bytes by which a prompt is looked up, each placeholder is a mark: a number that identifies the content and the
position in it. Marks are negative, because token ids never are.

Marks are assigned consecutively, so equal bytes mean equal content, without a digest that could collide.
"""

from __future__ import annotations

import sys

import numpy as np

from pointsman.core.kv.prefix_tree import TOKEN_BYTES
from pointsman.core.state.inputs import EncoderInput
from pointsman.core.state.request import Request

NUM_MARKS = 2**31 - 1  # negative int32 numbers, without the smallest one
MAX_CONTENTS = 1 << 14  # maximum number of remembered contents; a forgotten content no longer matches

Content = tuple[str, int, int | bytes, str | None]
"""(key of the encoder input, number of its placeholders, tokens of the placeholders as bytes (one token id if all are
equal), mask of the placeholders at which the model reads embeddings)."""


class ContentMarks:
    """Assigns each content a range of marks that no other content uses.

    A content is the key of an encoder input with the tokens of its placeholders (a model may read some placeholders as
    tokens). When all marks are used, a new generation of marks begins, and prompt keys with earlier marks become
    invalid.
    """

    def __init__(self, num_marks: int = NUM_MARKS) -> None:
        self._num_marks = num_marks
        self._first: dict[Content, int] = {}
        self._next = 1
        self.generation = 0

    def rekey_starts_generation(self, request: Request) -> bool:
        """Put the marks of a request's encoder inputs into the request's prompt key. Returns whether a new generation
        of marks began."""
        state = request._state
        if state.content_generation == self.generation:
            return False
        inputs = state.encoder_inputs
        given = state.prompt_bytes if state.content_generation < 0 else state.prompt_token_ids.tobytes()
        contents = [_content_of(item, given) for item in inputs]
        wanted = sum([content[1] for content in contents if content not in self._first])
        begins = self._next + wanted > self._num_marks
        if begins:
            self._first, self._next = {}, 1
            self.generation += 1
        parts: list[bytes] = []
        end = 0
        for (_, start, length, _, _), content in zip(inputs, contents, strict=True):
            first = self._marks_of(content)
            marks = np.arange(-first, -first - length, -1, dtype=np.int32).tobytes()
            parts += given[end * TOKEN_BYTES : start * TOKEN_BYTES], marks
            end = start + length
        parts.append(given[end * TOKEN_BYTES :])
        state.set_prompt_key(b"".join(parts), self.generation)
        return begins

    def _marks_of(self, content: Content) -> int:
        first = self._first.pop(content, None)
        if first is None:
            first = self._next
            self._next += content[1]
            if len(self._first) >= MAX_CONTENTS:
                del self._first[next(iter(self._first))]
        self._first[content] = first  # moves the content to the most recently used end
        return first


def _content_of(item: EncoderInput, prompt_bytes: bytes) -> Content:
    """The `Content` of an encoder input: its key, and the number, tokens and mask of its placeholders. `prompt_bytes`:
    the prompt's int32 tokens, as bytes."""
    key, start, length, _, mask = item
    tokens = prompt_bytes[start * TOKEN_BYTES : (start + length) * TOKEN_BYTES]
    first = tokens[:TOKEN_BYTES]
    return (key, length, int.from_bytes(first, sys.byteorder) if tokens == first * length else tokens, mask)
