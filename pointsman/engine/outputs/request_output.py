"""RequestOutput: a request's text and tokens so far, and its finish reason.

A request's tokens, their texts and log probabilities are kept once, in the request's `Transcript`, which only grows. A
`RequestOutput` is a view of a range of the transcript. Making a view takes constant time; lists and texts are built
when they are read. So an engine can return a view per token and request, and a caller that reads only the last view
pays for one.

    earlier.token_ids, earlier.text      # do not change when more tokens follow
    later.since(earlier).text            # the text that `later` has after `earlier`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core import FinishReason, PreemptionCause, Request, RequestEvent

if TYPE_CHECKING:
    from pointsman.engine.sampling.logprobs import TokenLogprobs
    from pointsman.engine.text.detokenizer import Detokenizer, TextDecoder


@dataclass(slots=True)
class RequestMetrics:
    """A request's times, in seconds on the engine's clock, cache hits and preemptions."""

    arrival_time: float
    first_scheduled_time: float | None = None
    """Time of the request's first admission: until then it waited in the queue."""
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was in the prefix cache, in host memory or in the KV store at the admission that
    led to the request's first token."""
    num_external_tokens: int = 0
    """Part of `num_cached_tokens`: number of tokens whose KV was loaded from host memory or the KV store."""
    num_preemptions: int = 0
    preemption_causes: tuple[PreemptionCause, ...] = ()
    """The cause of each preemption of the request, in order."""
    events: list[RequestEvent] = field(default_factory=list)
    """The request's events and their times; empty unless the scheduler's knob `log_request_events` is set."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The output that one engine has reported for a request, for another engine that continues it."""

    token_ids: list[int]
    """Ids of the tokens generated so far, at least one."""
    first_token_time: float
    """Time of the first of these tokens, in seconds on the clock that both engines share."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that the first engine did not compute."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position of a text."""

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int | None
    """Rank of the token in the vocabulary by probability; 1 is the most likely token."""
    decoded_token: str | None
    """The text that the token adds to the tokens before it; a character belongs to the token that completes it. None if
    the request makes no text."""


Piece: TypeAlias = bytes | str | None
"""The text of a token after other text, as UTF-8 bytes, which may be part of a character; for a token that the text
leaves out, such as EOS, the token's name as str; None if the request makes no text."""

NUM_BEFORE = 8
"""Number of tokens before a token among which the beginning of the token's first character is searched."""


class Transcript:
    """The generated tokens of a request. The lists only grow, and a token's text never changes once it exists.

    Args:
        prompt: the prompt as text, if it is known.
        decoder: decoder of the model's tokenizer; None: no text is made.
        detokenizer: makes this request's text; None if `decoder` is None.
        skips_special_tokens: whether the text leaves special tokens out.
        is_verbatim: whether the text is independent of the prompt.
        is_eager: whether only `make_text` makes text, in the engine's thread; otherwise reading makes text too.
        keeps_logprobs: whether the caller asked for log probabilities of the output.
        keeps_prompt_logprobs: whether the caller asked for log probabilities of the prompt.
        stream_interval: number of tokens from one output to the next.
    """

    __slots__ = ("_final_text", "_has_begun", "_is_verbatim", "_num_unshown", "_prompt_token_ids", "_rest", "decoder",
                 "detokenizer", "embedding", "error", "finish_detail", "finish_reason", "has_hidden_end", "is_eager",
                 "logprob_sums", "logprobs", "metrics", "mode", "num_reported", "num_resumed", "prompt",
                 "prompt_logprobs", "request", "skips_special_tokens", "stop_reason", "stream_interval", "texts",
                 "token_ids")  # fmt: skip

    def __init__(
        self,
        request: Request,
        prompt: str | None = None,
        *,
        decoder: TextDecoder | None = None,
        detokenizer: Detokenizer | None = None,
        skips_special_tokens: bool = True,
        is_verbatim: bool = False,
        is_eager: bool = False,
        keeps_logprobs: bool = False,
        keeps_prompt_logprobs: bool = False,
        stream_interval: int = 1,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.decoder = decoder
        self.detokenizer = detokenizer
        self.skips_special_tokens = skips_special_tokens
        self.is_eager = is_eager
        self.stream_interval = stream_interval
        self.num_reported = 0
        """Number of tokens that earlier outputs had; kept only if `stream_interval` is above 1."""
        self.mode = 0  # the output processor's mode for this request
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        """For each token the text that it settled; as long as `token_ids` if `is_eager`, otherwise up to the last token
        whose text was read."""
        self.logprobs: list[TokenLogprobs] | None = [] if keeps_logprobs else None
        """One entry per token that was generated in this engine, see `add_logprobs`."""
        self.logprob_sums: list[float] = []
        """For each entry of `logprobs` the sum of log probabilities up to its token."""
        self.num_resumed = 0
        """Number of leading tokens that another engine has generated; their log probabilities are unknown."""
        self.embedding: npt.NDArray[np.float32] | None = None
        """The vector of an embedding request; None before its prompt is computed, and for other requests."""
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if keeps_prompt_logprobs else None
        """One entry per prompt token, from the second on; None: the caller did not ask for log probabilities of the
        prompt."""
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.finish_reason: str | None = None
        self.finish_detail = ""
        self.error: Exception | None = None
        """The error that finished the request outside a step; None: no error finished it."""
        self.stop_reason: int | str | None = None
        self.has_hidden_end = False
        """Whether the last token, which stopped the request, is not part of the text."""
        self._is_verbatim = is_verbatim
        self._has_begun = is_verbatim
        self._num_unshown = 0  # number of leading tokens that are known not to be in the text
        self._rest: str | None = None  # text that is settled only because no token follows
        self._final_text: str | None = None
        self._prompt_token_ids: list[int] | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        known = self._prompt_token_ids
        if known is None or len(known) != self.request.num_prompt_tokens:  # a prompt may come in parts
            self._prompt_token_ids = self.request.prompt_token_ids.tolist()
            return self._prompt_token_ids
        return known

    def resume(self, resumed: Resumed) -> None:
        """Begin the transcript with the tokens that another engine has reported. Their log probabilities are unknown.

        The time of the first admission is unknown too: all time before the first token counts as time in the queue.
        """
        self.token_ids += resumed.token_ids
        if self.is_eager:
            self.make_text(len(self.token_ids))
        self.num_resumed = len(self.token_ids)
        self.num_reported = len(self.token_ids)
        metrics = self.metrics
        metrics.first_scheduled_time = metrics.first_token_time = resumed.first_token_time
        metrics.num_cached_tokens = resumed.num_cached_tokens

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Keep the log probabilities of the next token, if the caller asked for them."""
        if self.logprobs is not None:
            before = self.logprob_sums[-1] if self.logprob_sums else 0.0
            self.logprob_sums.append(before + float(entry.logprobs[0]))
            self.logprobs.append(entry)

    def make_text(self, num_tokens: int) -> None:
        """Make the text of the first `num_tokens` tokens; raises the tokenizer's exceptions."""
        if self.detokenizer is None:
            return
        texts = self.texts
        self._begin_text()
        last = len(self.token_ids) - 1 if self.has_hidden_end else -1
        for index in range(len(texts), num_tokens):
            texts.append("" if index == last else self.detokenizer.feed(self.token_ids[index]))

    def _begin_text(self) -> None:
        """Pass the prompt to the detokenizer, before the first text is made. At an earlier time, a prompt that arrives
        in parts may be incomplete."""
        if not self._has_begun and self.detokenizer is not None:
            self._has_begun = True
            prompt: Any = self.request.prompt_token_ids  # an array, of which only the end is read
            self.detokenizer.continue_prompt(prompt)

    def make_remaining_text(self) -> str:
        """Make and return the text that is settled only because no token follows; called after `make_text` for all
        tokens."""
        if self._rest is None:
            self._begin_text()
            self._rest = self.detokenizer.finish() if self.detokenizer is not None else ""
        return self._rest

    def give_up_text(self) -> None:
        """Set the text of all remaining tokens to "", so that the tokenizer is not called for them again."""
        self.texts += [""] * (len(self.token_ids) - len(self.texts))
        self._rest = self._rest or ""

    def text(self, start: int, end: int, *, to_the_end: bool) -> str:
        """The text of tokens `start` to `end` - 1; if `to_the_end`, also the text that is settled only because no token
        follows."""
        if self.detokenizer is None or self.decoder is None:
            return ""
        if to_the_end and start == 0 and not self.is_eager and not self.texts:
            if self._final_text is None:  # no text has been read: decoding all tokens in one call is fastest
                self._begin_text()
                shown = self.token_ids[:-1] if self.has_hidden_end else self.token_ids
                self._final_text = self.detokenizer.decode_rest(shown)
            return self._final_text
        self.make_text(end)
        text = "".join(self.texts[start:end])
        return text + self.make_remaining_text() if to_the_end else text

    def finish(self, finish_reason: str, finish_detail: str, stop_reason: int | str | None) -> None:
        """Set the reason of the request's finish; no token will follow."""
        self.finish_reason = finish_reason
        self.finish_detail = finish_detail
        self.stop_reason = stop_reason

    def describe(self, entry: TokenLogprobs, before: list[int]) -> dict[int, Logprob]:
        """Convert the log probabilities of one position for callers; the token itself comes first.

        Args:
            entry: the log probabilities of the position.
            before: ids of up to `NUM_BEFORE` tokens before the position.
        """
        decoder = self.decoder
        ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
        ranks = chain((entry.rank,), range(1, len(ids)))
        return {
            token_id: Logprob(value, rank, None if decoder is None else decoder.added_text(token_id, before))
            for token_id, value, rank in zip(ids, values, ranks, strict=True)
        }

    def describe_output(self, start: int, end: int) -> list[dict[int, Logprob]] | None:
        """The log probabilities of the generated tokens `start` to `end` - 1, as far as they are known."""
        if self.logprobs is None:
            return None
        described = []
        for index in range(max(start, self.num_resumed), end):
            before = self.token_ids[max(0, index - NUM_BEFORE) : index]
            if index < NUM_BEFORE:
                before = self.request.prompt_token_ids[-NUM_BEFORE:].tolist() + before
            described.append(self.describe(self.logprobs[index - self.num_resumed], before))
        return described

    def describe_prompt(self) -> list[dict[int, Logprob] | None] | None:
        """The log probabilities of the prompt's tokens, with None for the first token; None if the caller did not ask
        for them."""
        if self.prompt_logprobs is None:
            return None
        tokens = self.prompt_token_ids
        entries = enumerate(self.prompt_logprobs, start=1)
        return [None, *(self.describe(entry, tokens[max(0, index - NUM_BEFORE) : index]) for index, entry in entries)]

    def piece(self, token_id: int) -> Piece:
        """The text of a token, or its name if the text leaves it out."""
        decoder = self.decoder
        if decoder is None:
            return None
        if self.skips_special_tokens and decoder.is_special(token_id):
            return decoder.token_name(token_id)
        return decoder.token_bytes(token_id)

    def pieces(self, start: int, end: int) -> list[Piece]:
        """For each of the generated tokens `start` to `end` - 1 its text at this position, or its name if the text
        leaves it out."""
        pieces = [self.piece(token_id) for token_id in self.token_ids[start:end]]
        if self.decoder is None:
            return pieces
        if self.has_hidden_end and start < end == len(self.token_ids):
            pieces[-1] = self.decoder.token_name(self.token_ids[-1])
        first = self._find_first_shown(end)
        if start <= first < end and isinstance(pieces[first - start], bytes) and self._is_at_text_start():
            pieces[first - start] = self.decoder.first_token_bytes(self.token_ids[first])
        return pieces

    def _find_first_shown(self, end: int) -> int:
        """Index of the first generated token that is in the text, at most `end`. Each token is checked only once,
        because the text may leave out many tokens."""
        index = self._num_unshown
        while index < end and not isinstance(self.piece(self.token_ids[index]), bytes):
            index += 1
        self._num_unshown = index
        return index

    def _is_at_text_start(self) -> bool:
        """Whether the text of the first generated token is the beginning of a text, because the prompt has no text."""
        prompt = self.request.prompt_token_ids.tolist()
        return not self._is_verbatim and not any(
            isinstance(piece, bytes) and piece for piece in map(self.piece, prompt)
        )


class CompletionOutput:
    """The generated tokens of a request, or a range of them, with their text and log probabilities."""

    __slots__ = ("_end", "_finished", "_logprobs", "_start", "_text", "_token_ids", "_transcript", "index")

    def __init__(self, transcript: Transcript, start: int, end: int, finished: bool) -> None:
        self.index = 0
        self._transcript = transcript
        self._start = start
        self._end = end
        self._finished = finished
        self._text: str | None = None
        self._token_ids: list[int] | None = None
        self._logprobs: list[dict[int, Logprob]] | None = None

    @property
    def text(self) -> str:
        """The text of `token_ids`, as far as it is settled; "" if the model has no tokenizer.

        Text that a later token may change, or that may begin a stop string, is in a later output. Stop strings and stop
        tokens are left out, unless `include_stop_str_in_output`.
        """
        if self._text is None:
            self._text = self._transcript.text(self._start, self._end, to_the_end=self._finished)
        return self._text

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens, including the token that finished the request."""
        if self._token_ids is None:
            self._token_ids = self._transcript.token_ids[self._start : self._end]
        return self._token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each of `token_ids` the log probabilities of the token and of the most likely tokens; None if the caller
        did not ask for log probabilities."""
        if self._logprobs is None:
            self._logprobs = self._transcript.describe_output(self._start, self._end)
        return self._logprobs

    @property
    def token_logprobs(self) -> list[TokenLogprobs] | None:
        """`logprobs` as arrays, which are much faster to read than thousands of small objects."""
        entries, before = self._transcript.logprobs, self._transcript.num_resumed
        return None if entries is None else entries[max(0, self._start - before) : max(0, self._end - before)]

    @property
    def token_pieces(self) -> list[Piece]:
        """For each entry of `token_logprobs` the text of its token."""
        return self._transcript.pieces(max(self._start, self._transcript.num_resumed), self._end)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of all tokens generated so far in this engine; None if log probabilities were
        not requested."""
        if self._transcript.logprobs is None:
            return None
        num_tokens = self._end - self._transcript.num_resumed
        return self._transcript.logprob_sums[num_tokens - 1] if num_tokens > 0 else 0.0

    @property
    def finish_reason(self) -> str | None:
        """Reason of the finish: "stop", "length", "repetition", "abort", "deadline" or "error"; None while the request
        runs."""
        return self._transcript.finish_reason if self._finished else None

    @property
    def finish_detail(self) -> str:
        """The limit or the error that finished the request, as text; "": `finish_reason` needs no detail."""
        return self._transcript.finish_detail if self._finished else ""

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop string that finished the request, or "repetition_detected"; None for EOS or other
        reasons."""
        return self._transcript.stop_reason if self._finished else None

    @property
    def finished(self) -> bool:
        return self._finished

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(text={self.text!r}, finish_reason={self.finish_reason!r}, tokens={len(self.token_ids)})"
        )


class RequestOutput:
    """The output of a request after a step in which the request got tokens or finished: a view, made in constant
    time."""

    __slots__ = ("_completion", "_end", "_start", "_transcript", "finished")

    def __init__(self, transcript: Transcript, start: int, end: int, finished: bool = False) -> None:
        self._transcript = transcript
        self._start = start
        self._end = end
        self.finished = finished
        self._completion: CompletionOutput | None = None

    def since(self, previous: RequestOutput | None) -> RequestOutput:
        """The part of this output that is new since an earlier output: tokens, text and log probabilities.

        Args:
            previous: an earlier output of the same request; None: return all tokens so far, even if this output has
                only a part of them.

        Raises:
            ValueError: `previous` is an output of another request, or newer than this output.
        """
        start = 0
        if previous is not None:
            if previous._transcript is not self._transcript:
                raise ValueError(
                    f"previous is an output of request {previous.request_id!r}; give one of request {self.request_id!r}"
                )
            start = previous._end
            if start > self._end:
                raise ValueError(
                    f"previous has {start} tokens, but this output has only {self._end}; call since of the later output"
                )
        return RequestOutput(self._transcript, start, self._end, self.finished)

    @property
    def request_id(self) -> str:
        return self._transcript.request.request_id

    @property
    def prompt(self) -> str | None:
        """The prompt as text; None if it was given as token ids."""
        return self._transcript.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._transcript.prompt_token_ids

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """For each prompt token its log probabilities, with None for the first token; None if the caller did not ask
        for them, or if an earlier output had them."""
        return None if self._start else self._transcript.describe_prompt()

    @property
    def prompt_token_logprobs(self) -> list[TokenLogprobs | None] | None:
        """`prompt_logprobs` as arrays, see `CompletionOutput.token_logprobs`."""
        entries = self._transcript.prompt_logprobs
        return None if entries is None or self._start else [None, *entries]

    def token_piece(self, token_id: int) -> Piece:
        """The text of a token, or its name if the text leaves it out."""
        return self._transcript.piece(token_id)

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """[hidden_size] float32: the prompt's vector, in the last output of a request with `PoolingParams`."""
        return self._transcript.embedding if self.finished else None

    @property
    def outputs(self) -> list[CompletionOutput]:
        """A list of one entry, because a request has one sample."""
        return [self._sample]

    @property
    def metrics(self) -> RequestMetrics:
        """Times and counts of the request. All outputs share the object, so it is always up to date."""
        metrics = self._transcript.metrics
        request = self._transcript.request
        metrics.num_preemptions, metrics.preemption_causes = request.num_preemptions, request.preemption_causes
        metrics.events = list(request.events)
        return metrics

    @property
    def text(self) -> str:
        return self._sample.text

    @property
    def token_ids(self) -> list[int]:
        return self._sample.token_ids

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated up to this output, which may show only a part of them."""
        return self._end

    @property
    def finish_reason(self) -> str | None:
        return self._sample.finish_reason

    @property
    def finish_detail(self) -> str:
        return self._sample.finish_detail

    @property
    def error(self) -> Exception | None:
        """The error that prevented the request's computation (a `GrammarError`); None except in the request's last
        output."""
        return self._transcript.error if self.finished else None

    @property
    def stop_reason(self) -> int | str | None:
        return self._sample.stop_reason

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were not computed, because their KV was in the prefix cache, in host memory or
        in the KV store."""
        return self._transcript.metrics.num_cached_tokens

    @property
    def _sample(self) -> CompletionOutput:
        if self._completion is None:
            self._completion = CompletionOutput(self._transcript, self._start, self._end, self.finished)
        return self._completion

    def __repr__(self) -> str:
        return f"RequestOutput({self.request_id!r}, {self._sample!r})"


def stop_reason_of(request: Request) -> int | str | None:
    """The stop reason of a finished request, as in vLLM. If the model has several EOS tokens: None after the first of
    them, the token's id after another one."""
    further = request.eos_token_ids[1:]
    if further and request.stop_reason is None and ended_by_token(request) and request.num_output_tokens:
        last = int(request.output_since(request.num_output_tokens - 1)[0])
        return last if last in further else None
    return request.stop_reason


def ended_by_token(request: Request) -> bool:
    """Whether EOS or a stop token finished the request."""
    return request.finish_reason is FinishReason.STOP
