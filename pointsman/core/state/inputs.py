"""Inputs of a request beside its tokens: its adapter, its encoder inputs, and further parts of its prompt.

An encoder input (an image, audio) is a part of a prompt whose embeddings an encoder computes before the model needs
them. It occupies placeholder tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.state.numbers import MAX_INT, checked_integer


class Adapter(NamedTuple):
    """Weights that are added to the model's weights, such as a LoRA. Another version is another adapter."""

    name: str
    version: int | str = 0
    """Version of the weights: a number that counts up, or a digest of the weights."""


class EncoderEntry(NamedTuple):
    """The entry of the encoder cache for the embeddings of one input."""

    key: str
    num_embeddings: int


class EncoderInput(NamedTuple):
    """An input of the encoder, at placeholder tokens of a prompt."""

    key: str
    """Identifier of the exact content, such as a digest of the content and of everything else that determines the
    embeddings. Requests with equal keys share embeddings and cached prefixes."""
    start: int
    """Position of the first placeholder in the prompt."""
    length: int
    """Number of consecutive placeholders."""
    num_embeddings: int | None = None
    """Number of embeddings that the encoder computes, the unit of the encoder budget and cache. None: one for each
    placeholder, or for each "1" of the mask. 0: none, and the key alone identifies the content."""
    mask: str | None = None
    """One character for each placeholder: "1" where the model reads an embedding, "0" where it reads the token itself;
    None: embeddings everywhere."""

    def reads(self, start: int, end: int) -> bool:
        """Whether the model reads embeddings at positions `start` to `end` - 1 of the prompt."""
        first, last = max(start, self.start), min(end, self.end)
        if self.mask is None:
            return first < last and self.num_embeddings != 0
        return self.mask.find("1", first - self.start, max(last - self.start, 0)) >= 0

    @property
    def end(self) -> int:
        """The position after the input's last placeholder."""
        return self.start + self.length

    @property
    def entry(self) -> EncoderEntry:
        """The entry of the encoder cache for the input's embeddings."""
        if self.num_embeddings is not None:
            return EncoderEntry(self.key, self.num_embeddings)
        return EncoderEntry(self.key, self.length if self.mask is None else self.mask.count("1"))


def read_encoder_inputs(
    values: Sequence[EncoderInput | Sequence[Any]], num_tokens: int, owner: str = "prompt"
) -> tuple[EncoderInput, ...]:
    """The checked encoder inputs of a prompt of `num_tokens` tokens. `owner`: the prompt's name in error messages.

    Raises:
        ValueError: an input is malformed, out of order, out of range, or overlaps another input.
    """
    inputs: list[EncoderInput] = []
    end = 0
    for item in values:
        if type(item) is EncoderInput and item.mask is None and _is_valid_without_mask(item, end, num_tokens):
            inputs.append(item)
            end = item.start + item.length
            continue
        if not isinstance(item, (tuple, list)) or not 3 <= len(item) <= 5 or not (isinstance(item[0], str) and item[0]):
            raise ValueError(
                f"an encoder input is {item!r}; give (key, start, length, num_embeddings, mask), with a "
                "non-empty string as the key"
            )
        key, start, length, num_embeddings, mask = (*item, None, None)[:5]
        start = checked_integer("an encoder input's start", start, 0)
        length = checked_integer("an encoder input's length", length, 1)
        num_masked = length if mask is None else _checked_mask(key, length, mask)
        num_embeddings = num_masked if num_embeddings is None else num_embeddings
        num_embeddings = checked_integer("an encoder input's num_embeddings", num_embeddings, 0)
        if mask is not None and num_embeddings != num_masked:
            raise ValueError(
                f"encoder input {key!r} has num_embeddings {num_embeddings}, but its mask has {num_masked} "
                "ones; make them equal"
            )
        if start < end:
            raise ValueError(
                f"encoder input {key!r} starts at {start}, but the input before it ends at {end}; "
                "sort the inputs, without overlap"
            )
        end = start + length
        if end > num_tokens:
            raise ValueError(f"encoder input {key!r} ends at {end}, but the {owner} has only {num_tokens} tokens")
        inputs.append(EncoderInput(key, start, length, num_embeddings, mask))
    return tuple(inputs)


def _is_valid_without_mask(item: EncoderInput, minimum: int, maximum: int) -> bool:
    """Whether an input without a mask is well-formed, and its placeholders lie between positions `minimum` and
    `maximum`."""
    key, start, length, count, _ = item
    return (
        type(key) is str
        and key != ""
        and type(start) is type(length) is type(count) is int
        and minimum <= start
        and length >= 1
        and start + length <= maximum
        and 0 <= count <= MAX_INT
    )


def _checked_mask(key: str, length: int, mask: Any) -> int:
    """Check a mask, and return its number of embeddings."""
    if not isinstance(mask, str) or len(mask) != length or mask.count("0") + mask.count("1") != length:
        raise ValueError(f"encoder input {key!r} has the mask {mask!r}; give {length} characters, each 0 or 1")
    return mask.count("1")


class Part(NamedTuple):
    """A later part of a request's prompt (`Scheduler.extend`)."""

    token_ids: npt.NDArray[np.int32]
    """The tokens of the part, in a read-only array."""
    max_tokens: int
    """Maximum number of tokens to generate before the next part is appended; 0: the part is only computed."""
    encoder_inputs: tuple[EncoderInput, ...]
    """The encoder inputs of the part; their positions are relative to the part's first token."""
