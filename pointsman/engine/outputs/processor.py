"""OutputProcessor: turns a step's tokens into outputs for callers.

It keeps a `Transcript` per unfinished request. In the common case a row costs a lookup, an append and one small object;
only rows with more to do (the first token, text to make, a finish) take the slow path:

| mode | processing of the row's token |
| --- | --- |
| CAREFUL | everything: first token, text, stop strings, finish |
| CUMULATIVE, DELTA | appends it and returns a view |
| SILENT | appends it; the caller gets the final output only |
| SPACED | appends it, and returns a view every `stream_interval` tokens |
| EAGER, with one of these four | makes its text first, and checks for a complete stop string |

For requests with stop strings, and for requests whose outputs other threads read, this class makes the text, in the
engine's thread. For all other requests text is made when it is read. If the tokenizer fails on a request, that request
finishes with an error and other requests continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pointsman.core import FinishReason, Request, SchedulerOutput, StepUpdate
from pointsman.engine.outputs.request_output import RequestOutput, Resumed, Transcript, ended_by_token, stop_reason_of
from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams
from pointsman.engine.text.detokenizer import Detokenizer, TextDecoder

if TYPE_CHECKING:
    from pointsman.engine.counters import EngineCounters
    from pointsman.engine.model.runner import StepExecution

logger = logging.getLogger(__name__)

CAREFUL, CUMULATIVE, DELTA, SILENT, SPACED, EAGER = range(6)

_MODES = {
    RequestOutputKind.CUMULATIVE: CUMULATIVE,
    RequestOutputKind.DELTA: DELTA,
    RequestOutputKind.FINAL_ONLY: SILENT,
}


class StopFound(NamedTuple):
    """A request that a stop string or a failing tokenizer has ended; the step loop has yet to finish it in the
    scheduler."""

    request_id: str
    num_tokens: int
    """Number of the request's output tokens to keep."""
    stop: str | None
    """The stop string that was found; None if the tokenizer failed."""
    reason: FinishReason = FinishReason.STOP
    detail: str = ""


class OutputProcessor:
    """Makes the outputs of one engine's requests.

    Args:
        tokenizer: the model's tokenizer; None: outputs have no text.
        counters: the engine's counters; this class adds to the counters of prompt tokens.
        stream_interval: number of tokens from one output of a request to its next output; the first token and the last
            output are reported without delay.

    Raises:
        ValueError: the interval is not an integer of at least 1.
    """

    def __init__(self, tokenizer: Any | None, counters: EngineCounters, stream_interval: int = 1) -> None:
        if not isinstance(stream_interval, int) or isinstance(stream_interval, bool) or stream_interval < 1:
            raise ValueError(
                f"stream_interval is {stream_interval!r}; it must be an integer of at least 1 (1: every token)"
            )
        self._stream_interval = stream_interval
        self.decoder = TextDecoder(tokenizer) if tokenizer is not None else None
        self._counters = counters
        self._live: dict[Request, Transcript] = {}
        self.on_output: Callable[[RequestOutput], None] | None = None
        """Listener that is called with every output as soon as it exists; None: outputs are kept for
        `take_kept_outputs`. `Engine.on_output` forwards to this attribute."""
        self._kept: list[RequestOutput] = []

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self._live)

    @property
    def requests(self) -> list[Request]:
        """The unfinished requests, in the order in which they were added."""
        return list(self._live)

    def check(self, request_id: str, params: SamplingParams) -> None:
        """Check that the model has a tokenizer if the parameters need text; raises ValueError if it has none."""
        if params.stop and self.decoder is None:
            raise ValueError(
                f"request {request_id!r}: stop is {params.stop[0]!r} and the model has no tokenizer; "
                "use stop_token_ids, or give the model a tokenizer"
            )

    def add(
        self,
        request: Request,
        prompt: str | None,
        params: SamplingParams,
        *,
        eager_text: bool,
        resumed: Resumed | None = None,
    ) -> None:
        """Add a request, whose outputs are made from now on.

        Args:
            prompt: the prompt's text, if it is known.
            eager_text: whether other threads may read the request's outputs.
            resumed: the output that another engine has reported for the request; None: there is none.
        """
        decoder = self.decoder if params.detokenize else None
        detokenizer = None
        is_verbatim = params.structured_outputs is not None  # the text is exactly the text that the grammar matched
        if decoder is not None:
            detokenizer = Detokenizer(
                decoder.stream(params.skip_special_tokens, is_verbatim=is_verbatim),
                tuple(params.stop or ()),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        transcript = Transcript(
            request,
            prompt,
            decoder=decoder,
            detokenizer=detokenizer,
            skips_special_tokens=params.skip_special_tokens,
            is_verbatim=is_verbatim,
            is_eager=decoder is not None and (eager_text or bool(params.stop)),
            keeps_logprobs=params.logprobs is not None,
            keeps_prompt_logprobs=params.prompt_logprobs is not None,
            stream_interval=max(self._stream_interval, params.stream_interval or 1),
        )
        if resumed is not None:
            transcript.resume(resumed)
        self._live[request] = transcript

    def output_so_far(self, request: Request) -> RequestOutput:
        """Make an output of a running request, with all tokens that it has generated so far."""
        transcript = self._live[request]
        return RequestOutput(transcript, 0, len(transcript.token_ids))

    def extend(self, request: Request, part: str | None) -> None:
        """Append the text of a part to a request's prompt text. None: the part's text is unknown, so the prompt's text
        is too."""
        transcript = self._live[request]
        known = part is not None and transcript.prompt is not None
        transcript.prompt = f"{transcript.prompt}{part}" if known else None

    def process(
        self, output: SchedulerOutput, update: StepUpdate, execution: StepExecution, now: float
    ) -> tuple[list[RequestOutput], list[StopFound]]:
        """Process a step: its tokens, log probabilities and embeddings.

        Returns:
            The outputs, in row order, of requests that got a token or finished, except outputs that `output_kind` or
            `stream_interval` delays; and the requests to finish in the scheduler.
        """
        live = self._live
        if execution.embeddings:
            self._keep_embeddings(output, execution)
        if execution.logprobs or execution.prompt_logprobs:
            self._keep_logprobs(output, update, execution)
        for request in update.finished:
            live[request].mode = CAREFUL
        if len(update.token_ids) > len(update.counts) or (update.counts > 1).any():
            return self._process_runs(output, update, now)
        outputs: list[RequestOutput] = []
        stops: list[StopFound] = []
        for request, token_id in _tokens_by_request(output, update):
            transcript = live[request]
            token_ids = transcript.token_ids
            token_ids.append(token_id)
            mode = transcript.mode
            try:
                if mode > EAGER:
                    mode -= EAGER
                    detokenizer: Detokenizer = transcript.detokenizer  # type: ignore[assignment]  # set if eager
                    transcript.texts.append(detokenizer.feed(token_id))
                    if detokenizer.stop_reason is not None:
                        outputs.append(self._finish_at_stop(transcript, now, stops))
                        continue
                if mode == CUMULATIVE:
                    outputs.append(RequestOutput(transcript, 0, len(token_ids)))
                elif mode == DELTA:
                    outputs.append(RequestOutput(transcript, len(token_ids) - 1, len(token_ids)))
                elif mode == SPACED:
                    if len(token_ids) - transcript.num_reported >= transcript.stream_interval:
                        outputs.append(self._make_output(transcript))
                elif mode == CAREFUL and (one := self._process_newest(transcript, now, stops)) is not None:
                    outputs.append(one)
            except Exception as error:  # from the tokenizer, a foreign library
                outputs.append(self._finish_with_error(transcript, error, now, stops))
        return outputs + self._finish_without_token(update, now), stops

    def _process_runs(
        self, output: SchedulerOutput, update: StepUpdate, now: float
    ) -> tuple[list[RequestOutput], list[StopFound]]:
        """Process a step that verified drafts, in which a request may get several tokens in one output."""
        outputs: list[RequestOutput] = []
        stops: list[StopFound] = []
        token_ids, start = update.token_ids.tolist(), 0
        for request, count in zip(output.requests, update.counts.tolist(), strict=True):
            run = token_ids[start : start + count]
            start += count
            if run and (one := self._process_run(self._live[request], run, now, stops)) is not None:
                outputs.append(one)
        return outputs + self._finish_without_token(update, now), stops

    def _process_run(
        self, transcript: Transcript, run: list[int], now: float, stops: list[StopFound]
    ) -> RequestOutput | None:
        """Append the tokens of one row one by one, up to a stop string, and make one output with them."""
        num_reported = len(transcript.token_ids)
        try:
            for token_id in run[:-1]:
                transcript.token_ids.append(token_id)
                if transcript.is_eager and transcript.detokenizer is not None:
                    transcript.make_text(len(transcript.token_ids))
                    if transcript.detokenizer.stop_reason is not None:
                        return self._finish_at_stop(transcript, now, stops, num_reported)
            transcript.token_ids.append(run[-1])
            return self._process_newest(transcript, now, stops, num_reported)
        except Exception as error:  # from the tokenizer, a foreign library
            return self._finish_with_error(transcript, error, now, stops, num_reported)

    def _finish_without_token(self, update: StepUpdate, now: float) -> list[RequestOutput]:
        """Make the last outputs of requests that finished without a token, because their rows had errors."""
        failed = [self._live[request] for request in update.finished if request in self._live]
        return [self._finish(transcript, len(transcript.token_ids), now) for transcript in failed]

    def record_admission(self, request: Request, now: float, num_external_tokens: int = 0) -> None:
        """Store, at an admission of a request, the time (if it is the first admission) and the number of tokens loaded
        from outside the pool."""
        transcript = self._live.get(request)
        if transcript is None:
            return
        if transcript.metrics.first_scheduled_time is None:
            transcript.metrics.first_scheduled_time = now
        if transcript.metrics.first_token_time is None:  # the request may have been preempted before
            transcript.metrics.num_external_tokens = num_external_tokens

    def make_last_output(self, request: Request, now: float, error: Exception | None = None) -> RequestOutput | None:
        """Return the last output of a request that was finished outside a step, possibly by an error; None if the
        request is unknown."""
        transcript = self._live.get(request)
        if transcript is None:
            return None
        transcript.error = error
        return self._finish(transcript, len(transcript.token_ids), now)

    def make_last_outputs(self, requests: Sequence[Request], now: float) -> list[RequestOutput]:
        """Return the last outputs of requests that the scheduler has finished, unless they were returned before."""
        return [output for request in requests if (output := self.make_last_output(request, now)) is not None]

    # ---------------------------------------------------------------------------------------- handing outputs out

    def deliver_outputs(self, outputs: list[RequestOutput]) -> None:
        """Pass outputs to `on_output`, or keep them for `take_kept_outputs`."""
        if self.on_output is None:
            self._kept += outputs
        else:
            for output in outputs:
                self.on_output(output)

    @property
    def has_kept_outputs(self) -> bool:
        """Whether outputs are kept for `take_kept_outputs`."""
        return bool(self._kept)

    def take_kept_outputs(self) -> list[RequestOutput]:
        """Return the outputs that were kept since the last call."""
        outputs, self._kept = self._kept, []
        return outputs

    # ------------------------------------------------------------------------------------------- single requests

    def _process_newest(
        self, transcript: Transcript, now: float, stops: list[StopFound], num_reported: int | None = None
    ) -> RequestOutput | None:
        """Handle the newest token in the slow path. `num_reported` tokens were in earlier outputs; None: all but the
        newest."""
        request, num_tokens = transcript.request, len(transcript.token_ids)
        num_reported = num_tokens - 1 if num_reported is None else num_reported
        params: SamplingParams = request.metadata
        if transcript.metrics.first_token_time is None:
            self._note_first_token(transcript, now)
        if request.is_finished:
            return self._finish(transcript, num_reported, now)
        kind = params.output_kind
        is_spaced = transcript.stream_interval > 1 and kind is not RequestOutputKind.FINAL_ONLY
        transcript.mode = SPACED if is_spaced else _MODES[kind]
        if transcript.is_eager:
            transcript.mode += EAGER
            transcript.make_text(num_tokens)
            if transcript.detokenizer is not None and transcript.detokenizer.stop_reason is not None:
                return self._finish_at_stop(transcript, now, stops, num_reported)
        if kind is RequestOutputKind.FINAL_ONLY:
            return None
        if is_spaced:
            is_due = num_reported == 0 or num_tokens - transcript.num_reported >= transcript.stream_interval
            return self._make_output(transcript) if is_due else None
        return RequestOutput(transcript, num_reported if kind is RequestOutputKind.DELTA else 0, num_tokens)

    def _make_output(self, transcript: Transcript) -> RequestOutput:
        """Make an output with the tokens since the last output (DELTA), or with all tokens."""
        params: SamplingParams = transcript.request.metadata
        start = transcript.num_reported if params.output_kind is RequestOutputKind.DELTA else 0
        transcript.num_reported = len(transcript.token_ids)
        return RequestOutput(transcript, start, transcript.num_reported)

    def _finish_at_stop(
        self, transcript: Transcript, now: float, stops: list[StopFound], num_reported: int | None = None
    ) -> RequestOutput:
        """Finish a running request whose newest token completed a stop string."""
        num_tokens = len(transcript.token_ids)
        output = self._finish(transcript, num_tokens - 1 if num_reported is None else num_reported, now)
        stops.append(StopFound(output.request_id, num_tokens, str(output.stop_reason)))
        return output

    def _finish_with_error(
        self,
        transcript: Transcript,
        error: Exception,
        now: float,
        stops: list[StopFound],
        num_reported: int | None = None,
    ) -> RequestOutput:
        """Finish a running request with an error, because the tokenizer failed on its text."""
        num_tokens = len(transcript.token_ids)
        detail = _give_up_text(transcript, error)
        output = self._finish(transcript, num_tokens - 1 if num_reported is None else num_reported, now)
        transcript.finish("error", detail, None)
        stops.append(StopFound(output.request_id, num_tokens, None, FinishReason.ERROR, detail))
        return output

    def _note_first_token(self, transcript: Transcript, now: float) -> None:
        transcript.metrics.first_token_time = now
        self._count_prompt(transcript)

    def _count_prompt(self, transcript: Transcript) -> None:
        request = transcript.request
        transcript.metrics.num_cached_tokens = request.num_cached_tokens
        self._counters.num_prompt_tokens += request.num_prompt_tokens
        self._counters.num_cached_tokens += request.num_cached_tokens
        self._counters.num_external_tokens += transcript.metrics.num_external_tokens

    def _finish(self, transcript: Transcript, num_reported: int, now: float) -> RequestOutput:
        """Make a request's last output and forget the request. `num_reported` tokens were in earlier outputs."""
        request, params = transcript.request, transcript.request.metadata
        del self._live[request]
        transcript.metrics.finished_time = now
        transcript.has_hidden_end = ended_by_token(request) and not params.include_stop_str_in_output
        stop, failure = None, ""
        if transcript.is_eager and transcript.detokenizer is not None:
            try:
                transcript.make_text(len(transcript.token_ids))
                transcript.make_remaining_text()
            except Exception as error:
                failure = _give_up_text(transcript, error)
            stop = transcript.detokenizer.stop_reason
        if failure and not _was_cut_short(request):
            transcript.finish("error", failure, None)
        elif stop is not None and not _was_cut_short(request):
            transcript.finish("stop", "", stop)  # even if the token ended the request for another reason
        elif request.finish_reason is not None:
            transcript.finish(request.finish_reason.value, request.finish_detail, stop_reason_of(request))
        if transcript.stream_interval > 1:
            num_reported = transcript.num_reported
        start = num_reported if params.output_kind is RequestOutputKind.DELTA else 0
        return RequestOutput(transcript, start, len(transcript.token_ids), finished=True)

    def _keep_embeddings(self, output: SchedulerOutput, execution: StepExecution) -> None:
        for row, vector in execution.embeddings.items():
            transcript = self._live.get(output.requests[row])
            if transcript is not None:
                transcript.embedding = vector
                self._count_prompt(transcript)

    def _keep_logprobs(self, output: SchedulerOutput, update: StepUpdate, execution: StepExecution) -> None:
        for row, entries in execution.logprobs.items():
            for entry in entries[: update.counts[row]]:
                self._live[output.requests[row]].add_logprobs(entry)
        for row, chunk in execution.prompt_logprobs.items():
            transcript = self._live.get(output.requests[row])
            if transcript is not None and transcript.prompt_logprobs is not None:
                first = chunk.start - 1  # the first token of a prompt has no log probability
                transcript.prompt_logprobs[first : first + len(chunk.entries)] = chunk.entries


def _tokens_by_request(output: SchedulerOutput, update: StepUpdate) -> zip[tuple[Request, int]]:
    """Pairs of a request and its token in this step, in row order; rows without a token are left out."""
    counts, requests = update.counts, output.requests
    token_ids = update.token_ids.tolist()
    if len(token_ids) != len(requests) or not counts.all():
        requests = [requests[row] for row in counts.nonzero()[0].tolist()]
    return zip(requests, token_ids, strict=True)


def _give_up_text(transcript: Transcript, error: Exception) -> str:
    """Leave a request's remaining text empty, because the tokenizer failed; return the reason in one line."""
    transcript.give_up_text()
    detail = " ".join(f"the tokenizer failed: {type(error).__name__}: {error}".split())
    logger.error("request %r: %s", transcript.request.request_id, detail)
    return detail


def _was_cut_short(request: Request) -> bool:
    """Whether a request finished for a reason ("abort", "error" or "deadline") that a stop string in its text does not
    override."""
    return request.finish_reason is not None and request.finish_reason.value in ("abort", "error", "deadline")
