"""Prompt lookup: drafts for speculation from the request's own tokens, without a second model.

What a request has just generated often stands in its tokens already: in a passage that it quotes, in code that it
edits, in the turn before. So the longest suffix of `min_ngram` to `max_ngram` tokens that occurred earlier is looked
up, and what followed it there is proposed (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method "ngram"). Of several
places the first is taken, behind which most is known. How many drafts a request gets follows how many were accepted of
those before (`Pace`).

Some requests get no drafts: those whose logits depend on the tokens before (penalties, bad words, grammars), because
each draft would need edits of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError
from pointsman.engine.race import Int64Array
from pointsman.engine.sampling_batch import has_penalties
from pointsman.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pointsman.core import Request, Scheduler, SchedulerOutput, StepUpdate

DEFAULT_MIN, DEFAULT_MAX = 2, 5
LONGEST_REST = 64  # steps
NO_DRAFTS: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)


def takes_drafts(params: SamplingParams) -> bool:
    """Whether each position's logits can be had without knowing which drafts before it are accepted."""
    return not (has_penalties(params) or params.bad_words or params.structured_outputs is not None)


def look_up(token_ids: npt.NDArray[np.int32], most: int, min_ngram: int, max_ngram: int) -> npt.NDArray[np.int32]:
    """What followed the longest suffix that occurred earlier.

    Args:
        token_ids: [n] the request's tokens.
        most: drafts to propose, at most.
        min_ngram: tokens of the shortest suffix that is worth a guess.
        max_ngram: of the longest that is looked for.

    Returns:
        int32 [0 to `most`].
    """
    last = len(token_ids) - 1
    if last < min_ngram or most < 1:
        return NO_DRAFTS
    ends = (token_ids[:last] == token_ids[last]).nonzero()[0]
    found = np.zeros(0, dtype=np.int64)
    for length in range(1, min(max_ngram, last) + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[token_ids[ends - (length - 1)] == token_ids[last - (length - 1)]]
        if not len(ends):
            break
        if length >= min_ngram:
            found = ends
    if not len(found):
        return NO_DRAFTS
    start = int(found[0]) + 1
    return token_ids[start : start + most]


def check_prompt_lookup(config: SchedulerConfig, min_ngram: int, max_ngram: int) -> None:
    """Raises ConfigError: the knobs of prompt lookup cannot be, or not beside the scheduler's."""
    for name, value in (("prompt_lookup_min", min_ngram), ("prompt_lookup_max", max_ngram)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1, a number of tokens")
    if min_ngram > max_ngram:
        raise ConfigError(
            f"prompt_lookup_min is {min_ngram}, more than prompt_lookup_max {max_ngram}; lower it or raise that"
        )
    if config.num_draft_tokens and config.max_steps_in_flight > 1:
        raise ConfigError(
            f"num_draft_tokens is {config.num_draft_tokens} and max_steps_in_flight {config.max_steps_in_flight}: "
            "drafts continue the newest token, which a step scheduled ahead does not know; leave one at its default"
        )
    if not config.num_draft_tokens and (min_ngram, max_ngram) != (DEFAULT_MIN, DEFAULT_MAX):
        raise ConfigError(
            f"prompt_lookup_min is {min_ngram} and prompt_lookup_max {max_ngram}, and no drafts are looked up, so they "
            "would have no effect; set num_draft_tokens or leave them at their defaults"
        )


class Pace:
    """How many drafts a request gets, by how it went before.

    As many as were accepted last time and one more, twice as many if all were. If none was, it gets none for the next
    1, 2, 4, ... up to `LONGEST_REST` steps. So a request whose text does not repeat itself costs next to nothing, and
    one that begins to is noticed.
    """

    __slots__ = ("_next_rest", "allowed", "rest")

    def __init__(self) -> None:
        self.allowed = 2
        self.rest = 0
        """Steps for which it gets none."""
        self._next_rest = 1

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """So many of its drafts were verified and accepted."""
        if num_accepted == 0:
            self.allowed, self.rest = 1, self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            return
        self.allowed = 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1
        self._next_rest = 1


class History:
    """The tokens of a request in one array that grows, so that looking something up copies nothing."""

    __slots__ = ("_array", "_length")

    def __init__(self) -> None:
        self._array: npt.NDArray[np.int32] = NO_DRAFTS
        self._length = 0

    def tokens(self, request: Request, newest: Int64Array) -> npt.NDArray[np.int32]:
        """All tokens of the request, of which `newest` came last; a view."""
        known, end = self._length, request.num_tokens
        if known + len(newest) != end:  # it rested, or its prompt has become longer
            everything = request.all_token_ids
            self._array = np.empty(end + end // 2 + 16, dtype=np.int32)
            self._array[:end] = everything
        elif end > len(self._array):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[:known] = self._array[:known]
            self._array = grown
        self._array[end - len(newest) : end] = newest
        self._length = end
        return self._array[:end]


class PromptLookup:
    """Proposes drafts for the rows of a step.

    Args:
        scheduler: it takes them; how many it would have verified is asked of it.
        min_ngram, max_ngram: see `look_up`.
    """

    def __init__(self, scheduler: Scheduler, min_ngram: int, max_ngram: int) -> None:
        self._scheduler = scheduler
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._known: dict[Request, tuple[Pace, History]] = {}  # until the request's end is reported

    def propose(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Propose drafts behind the newest tokens of the output's rows; the output was updated last.

        Args:
            update: what came of it.
        """
        for request in output.finished:
            self._known.pop(request, None)
        most = self._scheduler.max_drafts
        if not most:
            return
        counts: Int64Array = np.zeros(output.num_rows, dtype=np.int64)
        drafts = []
        start = 0
        told = zip(output.requests, update.counts.tolist(), output.num_draft_tokens.tolist(), strict=True)
        for index, (request, num_tokens, num_drafts) in enumerate(told):
            end = start + num_tokens
            if num_tokens and request.row is not None and takes_drafts(request.metadata):
                pace, history = self._known.get(request) or self._known.setdefault(request, (Pace(), History()))
                if num_drafts:
                    pace.learn(num_drafts, min(num_tokens - 1, num_drafts))
                if pace.rest:
                    pace.rest -= 1
                else:
                    tokens = history.tokens(request, update.token_ids[start:end])
                    found = look_up(tokens, min(most, pace.allowed), self._min_ngram, self._max_ngram)
                    counts[index] = len(found)
                    drafts.append(found)
            start = end
        if counts.any():
            self._scheduler.propose(output, np.concatenate(drafts), counts, now)
