"""PromptLookup: proposes drafts from the request's own tokens, without a second model.

`ngram_lookup.py` finds the tokens that followed the same n-gram earlier in a request. `draft_counts.py` chooses the
number of drafts of each request with which verification pays. So a request whose text does not repeat itself costs next
to nothing, and where many requests share a step, only the likeliest drafts are in it.

Requests whose logits depend on the tokens before (penalties, bad words, grammars) get no drafts, because each draft
would need its own edits of the logits.
"""

from __future__ import annotations

from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from pointsman.engine.drafts.draft_counts import MIN_GAIN, Odds, StepCost, best_counts
from pointsman.engine.drafts.ngram_lookup import NgramLookup
from pointsman.engine.params.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pointsman.core import Request, Scheduler, SchedulerOutput, StepUpdate
    from pointsman.engine.counters import EngineCounters

LONGEST_PAUSE = 8
"""Maximum number of steps from one search to the next. Each search doubles the number, an accepted draft resets it to
one. With a small model this saves most of the search time where text does not repeat itself."""
SEARCH_SHARE = 1 / 256
"""Share of a step's time that the search may take: where it takes less, every step is searched."""


def takes_drafts(params: SamplingParams) -> bool:
    """Whether the logits of each position are independent of the drafts that are accepted before it."""
    return not (params.has_penalties or params.bad_words or params.structured_outputs is not None)


class PromptLookup:
    """Proposes drafts for the rows of a step.

    Args:
        scheduler: gets the drafts; its `max_drafts` is the maximum per request.
        min_ngram, max_ngram: see `NgramLookup`.
        counters: the engine's; read for the time of its steps.
        rounded: the number of rows that the model computes for a number of tokens.
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
        self._lookups: dict[Request, NgramLookup] = {}  # until the request's finish is reported
        self._odds = Odds()
        self._cost = StepCost(rounded)
        self._work = counters.work_time
        self._pause = 1
        """Steps from one search to the next."""
        self._wait = 1
        """Steps until the next search."""
        self._step_seconds = self._search_seconds = 0.0
        """Time of the last step, and of the last search."""

    def propose(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Propose drafts to follow the newest tokens of the output's rows; the output is the one that was updated last.

        Args:
            update: the result of that update.
        """
        for request in output.finished:
            self._lookups.pop(request, None)
        self._observe_cost(output)
        if len(output.draft_token_ids) and len(update.token_ids) > np.count_nonzero(update.counts):  # one was accepted
            self._pause = self._wait = 1
        self._wait -= 1
        if not self._wait:
            start = perf_counter()
            self._search(output, update, now)
            self._search_seconds = perf_counter() - start
            self._wait, self._pause = self._pause, min(2 * self._pause, self._longest_pause())

    def _longest_pause(self) -> int:
        """Minimum number of steps between searches with which searching takes at most `SEARCH_SHARE` of the time."""
        steps = self._search_seconds / max(SEARCH_SHARE * self._step_seconds, 1e-9)
        return min(LONGEST_PAUSE, max(1, ceil(steps)))

    def _search(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Propose the drafts with which a step gives the most tokens per second."""
        max_drafts = self._scheduler.max_drafts
        if not max_drafts:
            return
        found, num_rows = self._follow(output, update)
        if not found:
            return
        lengths = [lookup.length for _, lookup in found]
        if num_rows + self._odds.max_gain(lengths) < MIN_GAIN * num_rows:
            return
        chances = self._odds.chances(lengths, max_drafts)
        drafts: list[int] = []
        counts = np.zeros(output.num_rows, dtype=np.int64)
        for (index, lookup), count in zip(found, best_counts(chances, num_rows, self._cost).tolist(), strict=True):
            if count:
                drafts += lookup.expected(count)
                counts[index] = count
        if drafts:
            self._scheduler.propose(output, drafts, counts, now)

    def _observe_cost(self, output: SchedulerOutput) -> None:
        """Take the time since the last output as the time of this step. Steps with prompts are left out."""
        before, self._work = self._work, self._counters.work_time
        self._step_seconds = seconds = self._work - before
        num_tokens, num_rows = output.total_num_scheduled_tokens, len(output.requests)
        if num_rows and num_tokens == num_rows + len(output.draft_token_ids):
            self._cost.observe(num_tokens, seconds)

    def _follow(self, output: SchedulerOutput, update: StepUpdate) -> tuple[list[tuple[int, NgramLookup]], int]:
        """Append the newest tokens. Return the row indices and lookups that expect a continuation, and the number of
        rows that decode.
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
                if len(lookup) != num_known:  # steps in between were not searched
                    newest = request.output_since(len(lookup) - request.num_prompt_tokens).tolist()
                judged = lookup.append(newest)
                if judged:
                    self._odds.note(judged)
            elif takes_drafts(request.metadata):
                lookup = lookups[request] = NgramLookup(request.all_token_ids, self._min_ngram, self._max_ngram)
            if lookup is not None and lookup.length:
                found.append((index, lookup))
        return found, num_rows
