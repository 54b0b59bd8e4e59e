"""What a model runner of vLLM returned, as our `StepResult`; and what our scheduler made of it, as outputs for clients.

In a step where every row has a token and nobody's output says more than tokens, the outputs are made by one `map`.
Whoever's output says more (events, log probabilities, an end, ...) is gone through afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from pointsman.core import FinishReason as Reason
from pointsman.core import Request, StepResult, StepUpdate
from pointsman.core import SchedulerOutput as Output

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


@dataclass(slots=True)
class Sampled:
    """What came back, in the order of our output's rows."""

    lists: list[list[int]]
    """[n] the tokens of each row."""
    places: list[int] | None
    """[n] where each row is in the runner's arrays; None: at its own index."""

    def place(self, index: int) -> int:
        return index if self.places is None else self.places[index]


def read_sampled(result: Any, ids: list[str]) -> Sampled:
    """The tokens of a `ModelRunnerOutput`, which has an order of its own."""
    if not ids:
        return Sampled([], None)
    lists = result.sampled_token_ids
    if result.req_ids == ids:
        return Sampled(lists or [[] for _ in ids], None)
    index_of = result.req_id_to_index
    places = [index_of[name] for name in ids]
    return Sampled([lists[place] for place in places] if lists else [[] for _ in ids], places)


def to_result(output: Output, sampled: Sampled) -> StepResult:
    """What our scheduler's `update` takes."""
    if not len(output.draft_token_ids):
        return StepResult(_flat(sampled.lists))
    counts = np.fromiter(map(len, sampled.lists), dtype=np.int64, count=output.num_rows)
    return StepResult(_flat(sampled.lists), counts=counts)


def _flat(lists: list[list[int]]) -> npt.NDArray[np.integer]:
    """All tokens. Mostly each row has one, and is read in a third of the time."""
    try:
        return np.frombuffer(array("I", [token for (token,) in lists]), dtype=np.uint32)
    except (ValueError, OverflowError):  # it has none, or several; or one is out of range, which the scheduler says
        return np.fromiter(chain.from_iterable(lists), dtype=np.int64)


def plain_outputs(
    output: Output, update: StepUpdate, ids: list[str], sampled: Sampled
) -> tuple[list[Any], Sequence[int]]:
    """An output of its tokens for each row that has some, and their row indices.

    The tokens that do not count are cut off the runner's lists, as vLLM's own scheduler does.
    """
    lists = sampled.lists
    if len(update.token_ids) == len(ids) and not len(output.draft_token_ids):
        return list(map(EngineCoreOutput, ids, lists)), range(len(ids))
    indices = []
    for index, count in enumerate(update.counts.tolist()):
        del lists[index][count:]
        if count:
            indices.append(index)
    return [EngineCoreOutput(ids[index], lists[index]) for index in indices], indices


def finish_reason(request: Request) -> FinishReason:
    """How vLLM calls the reason for which a request ended."""
    assert request.finish_reason is not None
    return FINISH_REASONS[request.finish_reason]
