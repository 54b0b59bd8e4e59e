"""What a caller gets back for a request: its text and tokens so far, and once it ended, why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LOOK_BACK = 6
"""Tokens decoded again before each new part of a text, because a token's text may depend on those before it."""


class Detokenizer:
    """The growing text of one request. Each token is decoded a bounded number of times, however long the text is.

    Text that ends inside a character (a byte-level token with part of its bytes) is held back until the rest comes.
    """

    __slots__ = ("_num_settled", "_text", "_tokenizer")

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._num_settled = 0  # tokens whose text is in _text

    def text(self, token_ids: Sequence[int], *, finished: bool) -> str:
        """The text of `token_ids`, which extend those of the last call; "" without a tokenizer.

        When `finished`, all tokens are decoded at once and nothing is held back.
        """
        if self._tokenizer is None or not token_ids:
            return ""
        if finished or len(token_ids) < self._num_settled:
            return self._decode(token_ids)
        start = max(0, self._num_settled - LOOK_BACK)
        before = self._decode(token_ids[start : self._num_settled])
        whole = self._decode(token_ids[start:])
        if whole.endswith("\ufffd"):
            return self._text + whole[len(before) :].rstrip("\ufffd")
        self._text += whole[len(before) :]
        self._num_settled = len(token_ids)
        return self._text

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
        return text


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock, and what it cost."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache by the admission that led to its first token."""
    num_preemptions: int = 0


class CompletionOutput:
    """One sample of a prompt. `text` is decoded when it is first read."""

    __slots__ = ("_detokenizer", "_text", "finish_detail", "finish_reason", "index", "stop_reason", "token_ids")

    def __init__(
        self,
        detokenizer: Detokenizer,
        token_ids: list[int],
        finish_reason: str | None,
        finish_detail: str,
        stop_reason: int | str | None,
    ) -> None:
        self.index = 0
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        """"stop", "length", "abort" or "error"; None while it runs."""
        self.finish_detail = finish_detail
        """What exactly ended it: which limit, or the error."""
        self.stop_reason = stop_reason
        """The stop token that ended it, if one did; None for EOS."""
        self._detokenizer = detokenizer
        self._text: str | None = None

    @property
    def text(self) -> str:
        """The text of `token_ids`; "" if the model has no tokenizer."""
        if self._text is None:
            self._text = self._detokenizer.text(self.token_ids, finished=self.finished)
        return self._text

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(text={self.text!r}, finish_reason={self.finish_reason!r}, tokens={len(self.token_ids)})"
        )


@dataclass(slots=True)
class RequestOutput:
    """A request after a step in which it got tokens or ended."""

    request_id: str
    prompt: str | None
    """The prompt as text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One entry: the sample."""
    finished: bool
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """All tokens generated so far."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def finish_detail(self) -> str:
        return self.outputs[0].finish_detail

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.metrics.num_cached_tokens
