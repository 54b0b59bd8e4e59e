"""Numbers that stand for the content of encoder inputs in the keys of the prefix cache.

What stands at the placeholders of an encoder input decides the KV of all that follows, so it is part of the key of the
prefix cache: in the bytes by which a prompt is found, a placeholder is a number that belongs to its content and its
place in it alone. Token ids are never negative, so these numbers are.

The numbers are handed out one after the other, so equal bytes mean equal content, without a digest that could collide.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.state.inputs import EncoderInput
from pointsman.core.state.request import Request

NUM_MARKS = 2**31 - 1  # negative int32 numbers, but for the least one
MAX_CONTENTS = 1 << 14  # contents whose marks are remembered; one that is forgotten is found no longer

Content = tuple[str, int, int | bytes]  # key, placeholders, and their tokens: one number if all are the same


class ContentMarks:
    """Gives contents their numbers: each a range of its own, never given to another one.

    A content is a key with the tokens of its placeholders (a model may read some of them as the tokens that they are).
    When all numbers are used up it begins anew, and says so: what was keyed before must then be forgotten.
    """

    def __init__(self, num_marks: int = NUM_MARKS) -> None:
        self._num_marks = num_marks
        self._first: dict[Content, int] = {}
        self._next = 1
        self.generation = 0

    def key(self, request: Request) -> bool:
        """See to it that a request's prompt is keyed by its contents. Returns whether a new generation began."""
        if request._state.content_generation == self.generation:
            return False
        tokens = request.prompt_token_ids.copy()
        contents = [_content(item, tokens[item.start : item.end]) for item in request.encoder_inputs]
        wanted = sum(length for key, length, text in contents if (key, length, text) not in self._first)
        begins = self._next + wanted > self._num_marks
        if begins:
            self._first, self._next = {}, 1
            self.generation += 1
        for item, content in zip(request.encoder_inputs, contents, strict=True):
            first = self._range(content)
            tokens[item.start : item.end] = -np.arange(first, first + item.length, dtype=np.int32)
        request._state.set_prompt_key(tokens.tobytes(), self.generation)
        return begins

    def _range(self, content: Content) -> int:
        first = self._first.pop(content, None)
        if first is None:
            first = self._next
            self._next += content[1]
            if len(self._first) >= MAX_CONTENTS:
                del self._first[next(iter(self._first))]
        self._first[content] = first  # now the one used last
        return first


def _content(item: EncoderInput, tokens: npt.NDArray[np.int32]) -> Content:
    same = bool((tokens == tokens[0]).all())
    return (item.key, item.length, int(tokens[0]) if same else tokens.tobytes())
