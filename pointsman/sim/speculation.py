"""Speculation of a simulated engine: how many drafts a request gets, how many are accepted, and the drafter's time.

A simulation has no model that accepts or rejects drafts, so both numbers are random:

    proposed   draft i is proposed with a given probability, if the drafts before it are
    accepted   draft i is accepted with a given probability, if the drafts before it are

A draw depends on the seed, the request and the number of its known tokens, and on nothing else. So a request gets the
same drafts under every configuration and schedule, as long as its steps begin at the same tokens.

The step that verifies drafts, and everything that cuts their number, is the scheduler's (`core/step/drafts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.core.state.output import IntArray
from pointsman.sim.errors import SimulationError

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

LENGTH, RATES = "length:", "rates:"
"""Prefixes of the two other forms of an acceptance, see `parse_acceptance`."""
MAX_DRAFTS = 64
"""Maximum number of drafts of a request in a step, in a simulation."""
_NUM_HALVINGS = 60
_PROPOSED, _ACCEPTED = 1, 2
"""Purposes of draws: numbers proposed and accepted are independent."""
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The drafts of an engine, as probabilities, and the time of the drafter.

    Raises:
        SimulationError: a probability is not from 0 to 1, there are too many, or a time is negative.
    """

    acceptance: tuple[float, ...]
    """Probability that the model accepts draft i (from the first on), if it accepts the drafts before it."""
    proposal: tuple[float, ...] = ()
    """Probability that the drafter proposes draft i, if it proposes the drafts before it: below 1 for drafters that
    find nothing to propose in many steps, such as n-gram. (): every request has all drafts in every step."""
    drafter_seconds: float = 0.0
    """Seconds that the drafter adds to each step after which it proposes drafts."""
    drafter_share: float = 0.0
    """Further seconds of the drafter, as a share of the step's own time."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("acceptance", "proposal"):
            values = getattr(self, name)
            if not all(0 <= value <= 1 for value in values):
                raise SimulationError(f"{name} is {_listed(values)}; each probability must be from 0 to 1")
            if len(values) > MAX_DRAFTS:
                raise SimulationError(f"{name} has {len(values)} positions; at most {MAX_DRAFTS} can be simulated")
        if self.proposal and len(self.proposal) != len(self.acceptance):
            raise SimulationError(
                f"proposal has {len(self.proposal)} positions and acceptance {len(self.acceptance)}; give equally many"
            )
        for name in ("drafter_seconds", "drafter_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SimulationError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")

    @property
    def mean_length(self) -> float:
        """Mean number of tokens that a decode step gives a request, if nothing cuts its drafts."""
        return mean_length(
            [
                accepted * (self.proposal[position] if self.proposal else 1.0)
                for position, accepted in enumerate(self.acceptance)
            ]
        )

    def check(self, config: SchedulerConfig) -> None:
        """Check that the scheduler's configuration fits.

        Raises:
            SimulationError: the configuration has no drafts or more than there are probabilities for, or several steps
                in flight, with which no drafts are verified.
        """
        if not config.num_draft_tokens:
            raise SimulationError(
                "there is an acceptance of drafts, but num_draft_tokens is 0, so there are no drafts; set "
                "num_draft_tokens, or leave the acceptance out"
            )
        if config.num_draft_tokens > len(self.acceptance):
            raise SimulationError(
                f"num_draft_tokens is {config.num_draft_tokens}, but the acceptance is known for "
                f"{len(self.acceptance)} draft(s); give one probability for each draft, or lower num_draft_tokens"
            )
        if config.max_steps_in_flight > 1:
            raise SimulationError(
                f"num_draft_tokens is {config.num_draft_tokens} and max_steps_in_flight "
                f"{config.max_steps_in_flight}, with which drafts come too late to be verified; set "
                "max_steps_in_flight to 1"
            )

    def drafter_time(self, step_seconds: float) -> float:
        """Seconds of the drafter after a step that takes `step_seconds` itself."""
        return self.drafter_seconds + self.drafter_share * step_seconds

    def request_key(self, index: int) -> int:
        """The 64-bit key of a request's draws.

        Args:
            index: number of the request in its workload, see `SimRequest.index`.
        """
        return _mixed(_mixed(self.seed & _WORD) + (index + 1) * _GOLDEN & _WORD)

    def num_proposed(self, keys: UInt64Array, num_known: Int64Array, most: int) -> Int64Array:
        """[requests] number of drafts that the drafter proposes.

        Args:
            keys: [requests] the requests' keys, see `request_key`.
            num_known: [requests] number of known tokens of each request.
            most: maximum number of drafts of a request.
        """
        if not self.proposal:
            return np.full(len(keys), min(most, len(self.acceptance)))
        return np.minimum(_num_passed(self._proposed_at_least, _draw(keys, num_known, _PROPOSED)), most)

    def num_accepted(self, keys: UInt64Array, num_known: Int64Array, num_drafts: IntArray) -> Int64Array:
        """[requests] number of accepted drafts, of `num_drafts` [requests] verified ones; other arguments as for
        `num_proposed`, before the step's own tokens."""
        return np.minimum(_num_passed(self._accepted_at_least, _draw(keys, num_known, _ACCEPTED)), num_drafts)

    @cached_property
    def _proposed_at_least(self) -> FloatArray:
        return _at_least(self.proposal)

    @cached_property
    def _accepted_at_least(self) -> FloatArray:
        return _at_least(self.acceptance)


# ---------------------------------------------------------------------- acceptances in other forms


def mean_length(acceptance: Iterable[float]) -> float:
    """Mean number of tokens of a verified row: its own token and the accepted drafts (vLLM's "mean acceptance
    length")."""
    return 1 + float(np.cumprod(list(acceptance)).sum())


def acceptance_of_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """The acceptance of `num_drafts` drafts that is equal at all positions and has the mean length `length`.

    Raises:
        SimulationError: no acceptance has this mean length.
    """
    if not 1 <= length <= 1 + num_drafts:
        raise SimulationError(
            f"the mean acceptance length is {length:g}; with {num_drafts} draft(s) it must be from 1 to "
            f"{1 + num_drafts}, the step's own token included"
        )
    low, high = 0.0, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length([middle] * num_drafts) < length else (low, middle)
    return (high,) * num_drafts


def acceptance_of_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The acceptance, from the share of all verified drafts at each position that were accepted. vLLM's log has these
    shares as "per-position acceptance rate".

    Raises:
        SimulationError: a share is not from 0 to 1, or larger than the share before it.
    """
    before, found = 1.0, list[float]()
    for rate in rates:
        if not 0 <= rate <= before:
            raise SimulationError(
                f"the acceptance rates are {_listed(rates)}; they must be from 0 to 1, and must not rise, as a draft "
                "is accepted only after the drafts before it"
            )
        found.append(rate / before if before else 0.0)
        before = rate
    return tuple(found)


def parse_acceptance(text: str, num_drafts: int) -> tuple[float, ...]:
    """The acceptance that a text describes.

    Args:
        text: "0.7,0.5,0.3", the probability at each position if the drafts before are accepted; "0.7", the same at all
            positions; "length:2.4", a mean acceptance length; or "rates:0.7,0.35,0.1", the rates in vLLM's log.
        num_drafts: maximum number of drafts of a request in a step.

    Raises:
        SimulationError: the text has another form, or has too few positions.
    """
    kind = next((prefix for prefix in (LENGTH, RATES) if text.startswith(prefix)), "")
    try:
        values = [float(number) for number in text.removeprefix(kind).split(",")]
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)) or (kind == LENGTH and len(values) > 1):
        raise SimulationError(
            f"the acceptance is {text!r}; give the probability that each draft is accepted after the drafts before it, "
            f"like 0.7,0.5,0.3, or {LENGTH}2.4, or {RATES}0.7,0.35,0.1"
        )
    if kind == LENGTH:
        return acceptance_of_length(values[0], num_drafts)
    if not all(0 <= value <= 1 for value in values):
        raise SimulationError(
            f"the acceptance is {text!r}; each probability must be from 0 to 1 (a mean number of tokens is written "
            f"{LENGTH}2.4)"
        )
    if kind == RATES:
        return acceptance_of_rates(values)
    return tuple(values * num_drafts if len(values) == 1 else values)


def measured_speculation(counts: Iterable[tuple[int, int, int]], num_drafts: int) -> Speculation:
    """The speculation of an engine whose steps were counted. A position without a verified draft counts as never
    accepted.

    Args:
        counts: (number of verified drafts, number of accepted drafts, number of steps of requests that could have had
            drafts).
        num_drafts: maximum number of drafts of a request in a step.
    """
    verified, possible, accepted = (np.zeros(num_drafts + 2, dtype=np.int64) for _ in range(3))
    for drafts, passed, steps in counts:
        drafts, passed = min(drafts, num_drafts), min(passed, num_drafts)
        verified[: drafts + 1] += steps  # [i] steps with at least i drafts
        possible[: min(passed + 1, drafts) + 1] += steps  # [i] ... of which the first i - 1 were accepted
        accepted[: passed + 1] += steps
    return Speculation(
        acceptance=_shares(accepted[1:-1], possible[1:-1]), proposal=_shares(verified[1:-1], verified[:-2])
    )


def _shares(counts: Int64Array, totals: Int64Array) -> tuple[float, ...]:
    return tuple((counts / np.maximum(totals, 1)).tolist())


# ---------------------------------------------------------------------- draws


def _at_least(probabilities: Sequence[float]) -> FloatArray:
    """Probabilities of at least 1, 2, ... drafts, in ascending order: of the last number first."""
    found: FloatArray = np.multiply.accumulate(np.array(probabilities, dtype=np.float64))
    return found[::-1]


def _num_passed(at_least: FloatArray, draws: FloatArray) -> Int64Array:
    """[draws] the largest number whose probability exceeds the draw. `at_least`: result of `_at_least`."""
    return len(at_least) - at_least.searchsorted(draws, side="right")


def _draw(keys: UInt64Array, num_known: Int64Array, purpose: int) -> FloatArray:
    """[requests] draws from 0 to less than 1, by SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number
    Generators"): a hash, so that a draw needs no state."""
    words = keys + (num_known.astype(np.uint64) * np.uint64(2) + np.uint64(purpose)) * np.uint64(_GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    draws: FloatArray = (words >> np.uint64(11)).astype(np.float64)
    draws *= 2.0**-53
    return draws


def _mixed(word: int) -> int:
    """The finaliser of SplitMix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
