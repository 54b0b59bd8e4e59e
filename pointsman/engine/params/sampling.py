"""SamplingParams: the parameters of a request for sampling tokens and stopping, with vLLM's names.

Names, defaults and ranges are those of vLLM's class, with two exceptions: a bias beyond 100 is refused instead of
clipped silently, and a repetition penalty has a minimum and a maximum. Every value is checked when the object is built,
so later code needs no checks. Only the existence of token ids is checked later, by `check_token_ids`, because it
depends on the model's vocabulary.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from pointsman.core import RepetitionDetectionParams as RepetitionDetectionParams  # a public name
from pointsman.engine.params.structured_outputs import StructuredOutputsParams

GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy: dividing logits by a smaller temperature would overflow."""

MAX_TOKEN_ID = 2**31 - 1

ALL_TOKENS = -1
"""Value of `logprobs` and `prompt_logprobs` that asks for the whole vocabulary."""

LOGIT_BIAS_LIMIT = 100.0
"""Maximum absolute value of a logit bias, as in OpenAI's API."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Minimum and maximum repetition penalty; values beyond them would make logits infinite instead of tokens less
likely."""


class RequestOutputKind(enum.Enum):
    """The tokens that each output of a streamed request has; names and values are vLLM's."""

    CUMULATIVE = 0
    """Every output has all tokens generated so far."""
    DELTA = 1
    """Every output has the tokens since the output before."""
    FINAL_ONLY = 2
    """The only output, at the end, has all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. Immutable, and checked when built.

    Raises:
        ValueError: a value is out of range; the message is one line with the value, the limit and the remedy.
    """

    n: int = 1
    """Number of samples per prompt; only 1 is supported. For more samples, add the prompt several times: the requests
    share its cached prefix."""
    temperature: float = 1.0
    """Divisor of the logits; 0: the most likely token is always chosen (greedy)."""
    top_p: float = 1.0
    """Probability mass to sample from: only the smallest set of most likely tokens whose probabilities sum to at least
    `top_p` can be sampled."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1: all tokens."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate; None: limited by the model's length only."""
    min_tokens: int = 0
    """Number of tokens before which neither EOS nor a stop token can be sampled; with `structured_outputs`, they can if
    the grammar allows no other token."""
    seed: int | None = None
    """Seed that makes the request's tokens reproducible, independent of other requests; None or -1 (stored as None):
    derived from the engine's seed and the request's id."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the request, in addition to the model's EOS."""
    ignore_eos: bool = False
    """Whether generation continues after EOS; with `structured_outputs`, whether it continues while the grammar
    allows."""
    min_p: float = 0.0
    """Minimum probability of tokens that can be sampled, as a fraction of the most likely token's probability; 0: all
    tokens."""
    repetition_penalty: float = 1.0
    """Factor, 0.01 to 100, for tokens that are in the prompt or in the output so far: their positive logits are divided
    by it, negative logits multiplied. Above 1 these tokens become less likely."""
    presence_penalty: float = 0.0
    """Number, -2 to 2, that is subtracted from the logit of every token that is in the output so far."""
    frequency_penalty: float = 0.0
    """Number, -2 to 2, that is subtracted from the logit of a token once for each occurrence of the token in the output
    so far."""
    logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned beside that of the sampled token; 0: only the
    sampled token's; -1: the whole vocabulary's; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned for each prompt token, from the second on;
    values as for `logprobs`."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Token id -> bias, -100 to 100, that is added to the token's logit; other values are refused."""
    bad_words: Sequence[str] = ()
    """Texts that must not be generated: a token that would complete such a text cannot be sampled. Needs a
    tokenizer."""
    allowed_token_ids: Sequence[int] | None = None
    """Ids of the only tokens that can be sampled; None: all tokens."""
    stop: str | Sequence[str] | None = ()
    """Stop strings: texts that end the request; kept as a tuple. The output's text ends before the stop string, unless
    `include_stop_str_in_output`."""
    include_stop_str_in_output: bool = False
    """Whether the output's text includes the stop string that ended it."""
    detokenize: bool = True
    """Whether the output has text; otherwise only token ids."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens such as EOS."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility, without effect: tokenizers of transformers 5 have no such option."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output's text must have; None: any form. Needs a tokenizer."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Kind of repetition that ends the output, with `finish_reason` "repetition"; None: repetitions do not end it."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The tokens that each output of a streamed request has."""
    stream_interval: int | None = None
    """Number of tokens from one output to the next, if larger than the engine's `stream_interval`; None: the
    engine's."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tokens()
        self._check_logprobs()
        self._check_text()

    def _check_numbers(self) -> None:
        if self.n != 1:
            raise ValueError(f"n is {self.n}; only 1 is supported: add the prompt n times instead")
        _check_number("temperature", self.temperature, "a number of 0 (greedy) or more")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        _check_number("top_p", self.top_p, "a number above 0 and at most 1")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        _check_int("top_k", self.top_k, -1, "use 0 or -1 to turn it off")
        _check_range("min_p", self.min_p, 0.0, 1.0, 0)
        _check_range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES, 1)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, 0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "ask for one token or more")
        _check_int("min_tokens", self.min_tokens, 0, "use 0 for no minimum")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it")
        if self.stream_interval is not None:
            _check_int("stream_interval", self.stream_interval, 1, "1 is every token, None the engine's interval")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer, or None for one derived by the engine")
        if self.seed == -1:
            self._set("seed", None)

    def _check_tokens(self) -> None:
        """Check the parameters that have token ids; sequences become tuples, and `logit_bias` is copied."""
        stop_ids = _checked_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self._set("stop_token_ids", _checked_token_ids("a stop token id", stop_ids))
        if self.allowed_token_ids is not None:
            allowed = _checked_tuple(
                "allowed_token_ids", self.allowed_token_ids, "a list of token ids, or None for all"
            )
            self._set("allowed_token_ids", _checked_token_ids("an id in allowed_token_ids", allowed))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty; name one token or more, or leave it None for all")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers")
            _checked_token_ids("an id in logit_bias", self.logit_bias)
            for token_id, bias in self.logit_bias.items():
                _check_range(f"logit_bias of token {token_id}", bias, -LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT, 0)
            self._set("logit_bias", dict(self.logit_bias) or None)

    def _check_logprobs(self) -> None:
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, -1, "-1 is the whole vocabulary, None turns it off")
                if value > MAX_TOKEN_ID:
                    raise ValueError(f"{name} is above {MAX_TOKEN_ID}; use -1 for the whole vocabulary")

    def _check_text(self) -> None:
        """Check the parameters that concern text; `stop` and `bad_words` become tuples of non-empty strings."""
        self._set("stop", _checked_strings("stop", self.stop))
        self._set("bad_words", _checked_strings("bad_words", self.bad_words))
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop is {self.stop[0]!r} and detokenize is False; stop strings need text: leave it True")
        structured: object = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            what = type(structured).__name__
            raise ValueError(f"structured_outputs is of type {what}; it must be StructuredOutputsParams, or None")
        repetition: object = self.repetition_detection
        if repetition is not None and not isinstance(repetition, RepetitionDetectionParams):
            raise ValueError(f"repetition_detection is {repetition!r}; it must be RepetitionDetectionParams, or None")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind is {self.output_kind!r}; it must be a RequestOutputKind")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the object is frozen for callers

    def __getstate__(self) -> tuple[Any, ...]:
        """The values of all fields, in order. Every request is pickled, and the method of dataclasses is slow, because
        it looks up the fields each time."""
        return _VALUES(self)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(_NAMES, state, strict=True):
            self._set(name, value)

    def check_token_ids(self, vocab_size: int) -> None:
        """Check token ids against the model's vocabulary.

        Raises:
            ValueError: `logit_bias` or `allowed_token_ids` has a token outside a vocabulary of this size.
        """
        for name, token_ids in (("logit_bias", self.logit_bias), ("allowed_token_ids", self.allowed_token_ids)):
            worst = max(token_ids or (), default=0)
            if worst >= vocab_size:
                raise ValueError(
                    f"{name} names token {worst}, and the model's vocabulary has {vocab_size} tokens; remove it"
                )

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty makes logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether any parameter changes logits before the temperature is applied."""
        return bool(
            self.has_penalties
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.structured_outputs is not None
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW


_NAMES = tuple(one.name for one in fields(SamplingParams))
_VALUES: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_NAMES)


def _check_number(name: str, value: object, requirement: str) -> None:
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} is too large a number; it must be {requirement}")  # its digits would fill the screen
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be {requirement}")


def _check_int(name: str, value: object, minimum: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}: {remedy}")


def _check_range(name: str, value: object, minimum: float, maximum: float, neutral: float) -> None:
    requirement = f"between {minimum:g} and {maximum:g} ({neutral:g} turns it off)"
    _check_number(name, value, requirement)
    if not minimum <= value <= maximum:  # type: ignore[operator]
        raise ValueError(f"{name} is {value}; it must be {requirement}")


def _checked_token_ids(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    ids = tuple(token_ids)
    for token_id in ids:
        _check_int(name, token_id, 0, "give ids of the model's vocabulary")
        if token_id > MAX_TOKEN_ID:
            raise ValueError(f"{name} is {token_id}; it must be at most {MAX_TOKEN_ID}")
    return ids


def _checked_tuple(name: str, values: Iterable[Any] | None, requirement: str) -> tuple[Any, ...]:
    try:
        return () if values is None else tuple(values)
    except TypeError:  # not iterable
        raise ValueError(f"{name} is {values!r}; it must be {requirement}") from None


def _checked_strings(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _checked_tuple(name, value, "a list of strings")
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"{name} holds {one!r}; it must hold strings of one character or more")
    return strings
