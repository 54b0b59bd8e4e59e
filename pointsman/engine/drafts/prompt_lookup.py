"""PromptLookup: proposes drafts from the request's own tokens, without a second model.

`ngram_lookup.py` finds the tokens that followed the same n-gram earlier in a request. `draft_counts.py` chooses how
many drafts of each request are worth verifying. So a request whose text does not repeat itself costs next to nothing,
and a step that many requests share verifies only the likeliest drafts.

Requests whose logits are edited by their earlier tokens (penalties, bad words, grammars) get no drafts, because each
draft would need its own edits of the logits.
"""

from __future__ import annotations

from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from pointsman.engine.drafts.draft_counts import MIN_GAIN, Odds, StepCost, choose_draft_counts
from pointsman.engine.drafts.ngram_lookup import NgramLookup
from pointsman.engine.params.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pointsman.core import Request, Scheduler, SchedulerOutput, StepUpdate
    from pointsman.engine.counters import EngineCounters

LONGEST_PAUSE = 8
"""Maximum number of steps from one search for drafts to the next. Each search doubles the number of steps, an accepted
draft resets the number to one. With a small model this saves most of the search time where text does not repeat
itself."""
SEARCH_SHARE = 1 / 256
"""Share of the time of steps that searching may take; if a search takes less than this share of one step, every step
has a search."""


def can_have_drafts(params: SamplingParams) -> bool:
    """Whether a request with these parameters can have drafts: no parameter edits the logits of a position by the
    tokens before the position."""
    return not (params.has_penalties or params.bad_words or params.structured_outputs is not None)


class PromptLookup:
    """Proposes drafts that continue the newest tokens of a step's rows, for the next step to verify.

    Args:
        scheduler: the scheduler that gets the drafts; its `max_drafts` is the maximum number per request.
        min_ngram, max_ngram: minimum and maximum length of the suffix that is looked up, see `NgramLookup`.
        counters: the engine's counters, from which the time of each step is read.
        rounded: function that takes a number of tokens and returns the number of rows that the model computes for these
            tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        min_ngram: int,
        max_ngram: int,
        counters: EngineCounters,
        rounded: Callable[[int], int],
    ) -> None:
        self._scheduler = scheduler
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._counters = counters
        self._lookups: dict[Request, NgramLookup] = {}  # entries remain until the request's finish is reported
        self._odds = Odds()
        self._cost = StepCost(rounded)
        self._work = counters.work_time
        self._pause = 1
        """Number of steps from one search to the next."""
        self._wait = 1
        """Number of steps until the next search."""
        self._step_seconds = self._search_seconds = 0.0
        """Seconds of the last step, and of the last search."""

    def propose(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Propose drafts that continue the newest tokens of the rows of `output`, the step with which the scheduler was
        updated last.

        Args:
            update: the return value of the scheduler's `update` for this output.
        """
        for request in output.finished:
            self._lookups.pop(request, None)
        self._observe_step_cost(output)
        if len(output.draft_token_ids) and len(update.token_ids) > np.count_nonzero(update.counts):  # draft accepted
            self._pause = self._wait = 1
        self._wait -= 1
        if not self._wait:
            start = perf_counter()
            self._search_drafts(output, update, now)
            self._search_seconds = perf_counter() - start
            self._wait, self._pause = self._pause, min(2 * self._pause, self._max_pause())

    def _max_pause(self) -> int:
        """Maximum number of steps from one search to the next. It is the smallest number with which searches take at
        most `SEARCH_SHARE` of the time of the steps, but at most `LONGEST_PAUSE`."""
        steps = self._search_seconds / max(SEARCH_SHARE * self._step_seconds, 1e-9)
        return min(LONGEST_PAUSE, max(1, ceil(steps)))

    def _search_drafts(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Propose the drafts with which the next step gives the most tokens per second."""
        max_drafts = self._scheduler.max_drafts
        if not max_drafts:
            return
        found, num_rows = self._append_newest_tokens(output, update)
        if not found:
            return
        lengths = [lookup.length for _, lookup in found]
        if num_rows + self._odds.max_gain(lengths) < MIN_GAIN * num_rows:
            return
        probabilities = self._odds.probabilities(lengths, max_drafts)
        drafts: list[int] = []
        counts = np.zeros(output.num_rows, dtype=np.int64)
        num_drafts = choose_draft_counts(probabilities, num_rows, self._cost).tolist()
        for (index, lookup), count in zip(found, num_drafts, strict=True):
            if count:
                drafts += lookup.expected_tokens(count)
                counts[index] = count
        if drafts:
            self._scheduler.propose(output, drafts, counts, now)

    def _observe_step_cost(self, output: SchedulerOutput) -> None:
        """Add the time since the last call to `StepCost`, as the time of this step. Steps that compute prompts are left
        out."""
        before, self._work = self._work, self._counters.work_time
        self._step_seconds = seconds = self._work - before
        num_tokens, num_rows = output.total_num_scheduled_tokens, len(output.requests)
        if num_rows and num_tokens == num_rows + len(output.draft_token_ids):
            self._cost.observe(num_tokens, seconds)

    def _append_newest_tokens(
        self, output: SchedulerOutput, update: StepUpdate
    ) -> tuple[list[tuple[int, NgramLookup]], int]:
        """Append each row's newest tokens to the `NgramLookup` of the row's request. Return (row index, lookup) for
        each row whose lookup expects a continuation, and the number of rows that decode.
        """
        lookups = self._lookups
        token_ids, start = update.token_ids.tolist(), 0
        found: list[tuple[int, NgramLookup]] = []
        num_rows = 0
        known = output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens
        rows = zip(output.requests, update.counts.tolist(), known.tolist(), strict=True)
        for index, (request, count, num_known) in enumerate(rows):
            newest = token_ids[start : start + count]
            start += count
            if not newest or request.row is None:
                continue
            num_rows += 1
            lookup = lookups.get(request)
            if lookup is not None:
                if len(lookup) != num_known:  # without a search, steps in between were not followed
                    newest = request.output_since(len(lookup) - request.num_prompt_tokens).tolist()
                judged = lookup.append(newest)
                if judged:
                    self._odds.observe_matches(judged)
            elif can_have_drafts(request.metadata):
                lookup = lookups[request] = NgramLookup(request.all_token_ids, self._min_ngram, self._max_ngram)
            if lookup is not None and lookup.length:
                found.append((index, lookup))
        return found, num_rows
