"""Encoder inputs: parts of a prompt (images, audio) whose embeddings an encoder computes before the model needs them.

An input stands at placeholder tokens of the prompt. What stands there decides the KV of all that follows, so it is part
of the key of the prefix cache: in the bytes by which a prompt is found, a placeholder is a number that belongs to its
content and its place in it alone. Token ids are never negative, so these numbers are.

The numbers are handed out one after the other, so equal bytes mean equal content, without a digest that could collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.step.checks import checked_integer

if TYPE_CHECKING:
    from pointsman.core.state.request import Request

NUM_MARKS = 2**31 - 1  # negative int32 numbers, but for the least one
MAX_CONTENTS = 1 << 14  # contents whose marks are remembered; one that is forgotten is found no longer


class EncoderEntry(NamedTuple):
    """What the encoder makes of an input, as the encoder cache knows it."""

    key: str
    num_embeddings: int


class EncoderInput(NamedTuple):
    """An input of the encoder, at placeholder tokens of a prompt."""

    key: str
    """Names the content exactly, such as a digest of it and of all else that decides its embeddings. Requests with
    equal keys share embeddings and cached prefixes."""
    start: int
    """The first placeholder's position in the prompt."""
    length: int
    """Placeholders, one behind the other."""
    num_embeddings: int | None = None
    """Embeddings that the encoder makes, which budget and cache are counted in; None: one for each placeholder."""

    @property
    def end(self) -> int:
        """The position behind its last placeholder."""
        return self.start + self.length

    @property
    def entry(self) -> EncoderEntry:
        """What holds its embeddings."""
        return EncoderEntry(self.key, self.length if self.num_embeddings is None else self.num_embeddings)


def read_encoder_inputs(
    given: Sequence[EncoderInput | Sequence[Any]], num_tokens: int, of: str = "prompt"
) -> tuple[EncoderInput, ...]:
    """The encoder inputs of a prompt, or of what else is to be named, of `num_tokens` tokens.

    Raises:
        ValueError: they are none, or not in the order of placeholders among these tokens which do not overlap.
    """
    inputs: list[EncoderInput] = []
    end = 0
    for item in given:
        if not isinstance(item, (tuple, list)) or not 3 <= len(item) <= 4 or not (isinstance(item[0], str) and item[0]):
            raise ValueError(f"an encoder input is {item!r}; give (key, start, length, num_embeddings), the key a text")
        key, start, length, num_embeddings = (*item, None)[:4]
        start = checked_integer("an encoder input's start", start, 0)
        length = checked_integer("an encoder input's length", length, 1)
        num_embeddings = length if num_embeddings is None else num_embeddings
        num_embeddings = checked_integer("an encoder input's num_embeddings", num_embeddings, 1)
        if start < end:
            raise ValueError(f"encoder input {key!r} starts at {start}, before {end}, where the one before it ends")
        end = start + length
        if end > num_tokens:
            raise ValueError(f"encoder input {key!r} ends at {end}, and the {of} has {num_tokens} tokens")
        inputs.append(EncoderInput(key, start, length, num_embeddings))
    return tuple(inputs)


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
        if request.content_generation == self.generation:
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
        request.set_prompt_key(tokens.tobytes(), self.generation)
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
