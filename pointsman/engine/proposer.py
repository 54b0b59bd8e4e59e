"""Prompt lookup: drafts for speculation from the request's own tokens, without a second model.

What a request has just generated often stands in its tokens already: in a passage that it quotes, in code that it
edits, in the turn before. So the longest suffix of `min_ngram` to `max_ngram` tokens that occurred earlier is looked
up, and what followed it there is proposed (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method "ngram"). Of several
places the first is taken, behind which most is known.

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
    from pointsman.core import Scheduler, SchedulerOutput

DEFAULT_MIN, DEFAULT_MAX = 2, 5
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

    def propose(self, output: SchedulerOutput, now: float) -> None:
        """Propose drafts behind the newest tokens of the output's rows; the output was updated last."""
        most = self._scheduler.max_drafts
        if not most:
            return
        counts: Int64Array = np.zeros(output.num_rows, dtype=np.int64)
        drafts = []
        for index, request in enumerate(output.requests):
            if output.samples[index] and request.row is not None and takes_drafts(request.metadata):
                found = look_up(request.all_token_ids, most, self._min_ngram, self._max_ngram)
                counts[index] = len(found)
                drafts.append(found)
        if counts.any():
            self._scheduler.propose(output, np.concatenate(drafts), counts, now)
