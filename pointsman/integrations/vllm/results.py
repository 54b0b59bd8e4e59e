"""Converts the output of vLLM's model runner to the core's `StepResult`, and the core's `StepUpdate` to clients'
outputs.

If every row of a step has a token, one `map` makes the outputs. Outputs with further values (events, log probabilities,
a finish reason) are completed afterwards.

The result of a model runner is checked row by row only if it does not fit the step as a whole (`Judge`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from pointsman.core import FinishReason as Reason
from pointsman.core import Request, StepResult, StepResultError, StepUpdate
from pointsman.core import SchedulerOutput as Output
from pointsman.core.state.numbers import INT32
from pointsman.integrations.vllm.support import maker

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VLLMRequest

FINISH_REASONS: Mapping[Reason, FinishReason] = {
    Reason.STOP: FinishReason.STOP,
    Reason.LENGTH: FinishReason.LENGTH,
    Reason.ABORT: FinishReason.ABORT,
    Reason.ERROR: FinishReason.ERROR,
    Reason.REFUSED: FinishReason.ERROR,
    Reason.DEADLINE: FinishReason.ABORT,
    Reason.REPETITION: FinishReason.REPETITION,
}

STATUSES = {
    Reason.STOP: RequestStatus.FINISHED_STOPPED,
    Reason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    Reason.ABORT: RequestStatus.FINISHED_ABORTED,
    Reason.ERROR: RequestStatus.FINISHED_ERROR,
    Reason.REPETITION: RequestStatus.FINISHED_REPETITION,
}
REASONS = {status: reason for reason, status in STATUSES.items()} | {
    RequestStatus.FINISHED_IGNORED: Reason.ERROR,
}

new_output = maker(
    EngineCoreOutput,
    "request_id",
    "new_token_ids",
    left=(
        "ec_transfer_params",
        "kv_transfer_params",
        "mm_cache_miss_hashes",
        "routed_experts",
    ),  # fields that stay unset, because `support.py` refuses their features
)

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id: token ids are int32."""


@dataclass(slots=True)
class Sampled:
    """Sampled tokens, in the order of the core's output rows."""

    lists: list[Any]
    """[rows] list of the tokens of each row; None: the runner returned nothing for the row."""
    places: list[int] | None
    """[rows] index of each row in the runner's arrays, -1 if the row is missing; None: the arrays have the order of the
    rows."""

    def runner_index(self, index: int) -> int:
        return index if self.places is None else self.places[index]


def read_sampled(result: ModelRunnerOutput, ids: list[str]) -> Sampled:
    """The tokens of a `ModelRunnerOutput`, which has its own order of rows."""
    if not ids:
        return Sampled([], None)
    lists = result.sampled_token_ids
    if result.req_ids == ids and len(lists or ids) == len(ids):
        return Sampled(lists or [[] for _ in ids], None)
    index_of = result.req_id_to_index
    try:
        places = [index_of[name] for name in ids]
        return Sampled([lists[place] for place in places] if lists else [[] for _ in ids], places)
    except (KeyError, IndexError):  # some rows are missing
        places = [index_of.get(name, -1) for name in ids]
        ends = len(lists) if lists else len(result.req_ids)
        places = [place if place < ends else -1 for place in places]
        return Sampled([None if place < 0 else lists[place] if lists else [] for place in places], places)


def to_result(output: Output, sampled: Sampled) -> StepResult:
    """The sampled tokens as the `StepResult` for the core's `update`.

    Raises:
        StepResultError: a row has anything other than a list of tokens.
    """
    lists = sampled.lists
    has_drafts = len(output.draft_token_ids)
    try:
        # A token too large for int32 becomes negative.
        tokens: npt.NDArray[np.integer] = np.frombuffer(array("I", [token for (token,) in lists]), dtype=INT32)
        if not has_drafts:  # takes a third of the time of the other cases
            return StepResult(tokens)
    except (ValueError, OverflowError):  # a row has no token, several tokens, or a token out of range
        tokens = _join_token_lists(lists)
    except TypeError as error:
        raise StepResultError(f"the model runner must return one list of integers for each row: {error}") from None
    return StepResult(tokens, counts=np.fromiter(map(len, lists), dtype=np.int64, count=output.num_rows))


def _join_token_lists(lists: list[Any]) -> npt.NDArray[np.integer]:
    """[tokens] the tokens of all rows, one row after the other."""
    try:
        return np.fromiter(chain.from_iterable(lists), dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise StepResultError(f"the model runner must return one list of integers for each row: {error}") from None


class Judge:
    """Finds the errors of a result that does not fit its step, row by row.

    A row that samples may have no token if requests are aborted or preempted in flight. vLLM's own scheduler accepts a
    missing token: the row samples again. A row that contradicts its step fails only the row's own request.
    """

    MAX_ATTEMPTS = 4
    """Number of consecutive steps without a token for a request after which the request fails."""

    def __init__(self) -> None:
        self._attempts: dict[Request, tuple[int, int]] = {}  # (number of tokens, steps without a new token)

    def find_errors(self, output: Output, sampled: Sampled) -> StepResult:
        """The result of a step, with an error for every row that contradicts the step. Updates `sampled` to match."""
        self._attempts = {request: value for request, value in self._attempts.items() if not request.is_finished}
        errors: dict[int, str] = {}
        unsampled: list[int] = []
        for index, request in enumerate(output.requests):
            run = sampled.lists[index]
            is_live = request.row is not None and request.serial == output.serials[index]
            why = _contradiction(run, bool(output.samples[index]), int(output.num_draft_tokens[index]), is_live)
            if why is None and output.samples[index] and not _num_tokens(run):
                why = self._sample_again(request) if is_live else None
                if why is None:
                    unsampled.append(index)
            if why is not None:
                errors[index] = why
            if why is not None or not _num_tokens(run):
                sampled.lists[index] = []
        counts = [len(run) for run in sampled.lists]
        return StepResult(list(chain.from_iterable(sampled.lists)), counts, errors, unsampled=unsampled)

    def _sample_again(self, request: Request) -> str | None:
        """Count an attempt without a token. Returns None if the request may sample again, and an error message after
        too many attempts."""
        num_tokens, attempts = self._attempts.get(request, (0, 0))
        attempts = attempts + 1 if num_tokens == request.num_tokens else 1
        self._attempts[request] = request.num_tokens, attempts
        if attempts < self.MAX_ATTEMPTS:
            return None
        return f"{attempts} steps in a row had no token for it"


def _num_tokens(tokens: Any) -> int:
    return 0 if tokens is None else len(tokens)


def _contradiction(tokens: Any, samples: bool, num_drafts: int, is_live: bool) -> str | None:
    """Why the tokens of a row contradict the step; None: they do not. `is_live`: whether the row's request still runs,
    and has not been preempted since the step was scheduled."""
    if tokens is None:
        return "the model runner returned nothing for it" if is_live else None
    most = 1 + num_drafts if samples else 0
    if len(tokens) > most:
        return f"{len(tokens)} tokens came from a step that yields at most {most}"
    for token in tokens:
        if not isinstance(token, (int, np.integer)) or not 0 <= token <= MAX_TOKEN_ID:
            return f"token id {token} was sampled; ids must be between 0 and {MAX_TOKEN_ID}"
    return None


def add_missing_vectors(output: Output, sampled: Sampled, pooled: Any, result: StepResult) -> StepResult:
    """The result of a step, with an error for every completed prompt for which a pooling model returned no output."""
    rows = [index for index in output.completes.tolist() if index not in result.errors]
    missing = [index for index in rows if pooled is None or _vector(pooled, sampled.runner_index(index)) is None]
    if not missing:
        return result
    errors = {**result.errors, **dict.fromkeys(missing, "the model runner returned no output for its prompt")}
    return replace(result, errors=errors)


def _vector(pooled: Any, place: int) -> Any:
    return pooled[place] if 0 <= place < len(pooled) else None


def plain_outputs(
    output: Output, update: StepUpdate, ids: list[str], sampled: Sampled
) -> tuple[list[EngineCoreOutput], Sequence[int]]:
    """One output for each row with tokens, and the indices of these rows.

    Tokens after a stop are cut off the runner's lists in place, as in vLLM's own scheduler.
    """
    lists = sampled.lists
    if not len(output.draft_token_ids):
        if len(update.token_ids) == len(ids):
            return list(map(new_output, ids, lists)), range(len(ids))
        # No row has more than one token.
        for index in (update.counts == 0).nonzero()[0].tolist():
            lists[index].clear()
        has_token = update.counts.tolist()
        outputs = list(map(new_output, compress(ids, has_token), compress(lists, has_token)))
        return outputs, update.counts.nonzero()[0].tolist()
    indices = []
    for index, count in enumerate(update.counts.tolist()):
        del lists[index][count:]
        if count:
            indices.append(index)
    return [new_output(ids[index], lists[index]) for index in indices], indices


def finish_reason(request: Request) -> FinishReason:
    """vLLM's finish reason of a finished request."""
    assert request.finish_reason is not None
    return FINISH_REASONS[request.finish_reason]


class Details:
    """Adds the details of an output for a client: events, log probabilities, how the prompt was computed.

    Most outputs have no details. The requests whose next output has details are registered in this object, and only
    their outputs are visited.

    Args:
        requests: vLLM's unfinished requests, by id.
        of_id: the core's requests, by vLLM's ids.
        count_cached: returns the number of tokens of one of the core's requests that the prefix cache can find; None:
            prefix caching is off.
    """

    def __init__(
        self,
        requests: Mapping[str, VLLMRequest],
        of_id: Mapping[str, Request],
        count_cached: Callable[[Request], int] | None,
    ) -> None:
        self._requests = requests
        self._of_id = of_id
        self._count_cached = count_cached
        self._once: set[str] = set()  # requests whose next output has details
        self._without_blocks: set[str] = set()  # requests preempted while their samples are in flight
        self._always: set[str] = set()  # requests whose every output has details

    def add(self, request: VLLMRequest) -> None:
        """Register a queued request of vLLM's if each of its outputs has details."""
        sampling = request.sampling_params
        if request.trace_headers or (sampling is not None and sampling.num_logprobs is not None):
            self._always.add(request.request_id)

    def note_admitted(self, name: str) -> None:
        """Register an admitted request; its next output has details."""
        self._once.add(name)
        self._without_blocks.discard(name)

    def note_preempted(self, name: str) -> None:
        """Register a request that was preempted while its samples were in flight; its next output has details. It has
        no blocks when the samples arrive, so none of its tokens count as cached, as in vLLM's own scheduler."""
        self._once.add(name)
        self._without_blocks.add(name)

    def forget(self, name: str) -> None:
        """Drop what is kept for a request, because it will have no further outputs."""
        self._once.discard(name)
        self._without_blocks.discard(name)
        self._always.discard(name)

    def add_to(
        self, outputs: list[EngineCoreOutput], indices: Sequence[int], sampled: Sampled, result: ModelRunnerOutput
    ) -> None:
        """Add the details to a step's outputs; `indices`: the core's output row of each output; `result`: vLLM's
        `ModelRunnerOutput` of the step."""
        masks, nans = result.sampling_masks, result.num_nans_in_logits
        if self._always or nans or masks is not None:
            self._add_tensors(outputs, indices, sampled, result)
        if not self._once:
            return
        for output in reversed(outputs):  # mostly the last outputs: they are of requests admitted in this step
            name = output.request_id
            if name in self._once:
                self._once.discard(name)
                self._add_events(name, output)
                output.new_prompt_logprobs_tensors = result.prompt_logprobs_dict.get(name)
                output.prompt_token_id_logprobs = result.prompt_token_id_logprobs_dict.get(name)
                if not self._once:
                    return

    def _add_tensors(
        self, outputs: list[EngineCoreOutput], indices: Sequence[int], sampled: Sampled, result: ModelRunnerOutput
    ) -> None:
        """Add the model runner's log probabilities, sampling masks and counts of NaN, and the trace headers."""
        masks, nans = result.sampling_masks, result.num_nans_in_logits
        for index, output in zip(indices, outputs, strict=True):
            name = output.request_id
            if name in self._always:
                request = self._requests[name]
                output.trace_headers = request.trace_headers
                if result.logprobs is not None and request.sampling_params.num_logprobs is not None:
                    place, count = sampled.runner_index(index), len(output.new_token_ids)
                    output.new_logprobs = result.logprobs.slice_request(place, count)
            if masks is not None and output.new_token_ids:
                output.new_sampling_mask = masks.slice_request(sampled.runner_index(index), len(output.new_token_ids))
            if nans and name in nans:
                output.num_nans_in_logits = nans[name]

    def _add_events(self, name: str, output: EngineCoreOutput) -> None:
        request = self._requests[name]
        output.events = request.take_events()
        stats = request.take_prefill_stats()
        if stats is not None:
            if self._count_cached is not None and name not in self._without_blocks:
                stats.finalize(self._count_cached(self._of_id[name]))
            output.prefill_stats = stats
