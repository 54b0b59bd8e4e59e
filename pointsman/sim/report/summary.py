"""Figures of a simulation: latencies, throughput, goodput, load and cost, with the definition of each.

    TTFT   time to first token: from the arrival of a request to its first token
    TPOT   time per output token, one value per request: (end-to-end - TTFT) / (output tokens - 1)
    ITL    inter-token latency, one value per gap: each time between two tokens of a request, all requests pooled

A request with many tokens counts once in TPOT, and many times in ITL. A stall of one step shows only in ITL.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import FinishReason, PreemptionCause, SchedulerConfig, SchedulerStats
from pointsman.sim.outcome import REASONS, UNFINISHED, Timings
from pointsman.sim.report.course import Course, courses, levels, scale_levels, sum_levels, time_span
from pointsman.sim.report.intervals import (
    MIN_BEYOND,
    MIN_BLOCKS,
    NONE,
    Distribution,
    Draws,
    Estimate,
    choose_num_blocks,
    consecutive_blocks,
    estimate_distribution,
    estimate_share,
    over_seeds,
)
from pointsman.sim.report.overload import Overload, overload
from pointsman.sim.simulator import Outcome

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

NUM_BOOTSTRAP = 500
DEFINITIONS = {
    "TTFT": "time to first token: from the arrival of a request to its first token",
    "TPOT": "time per output token, one value per request: (end-to-end - TTFT) / (output tokens - 1)",
    "ITL": "inter-token latency, one value per gap: each time between two tokens of a request, all requests pooled",
    "end-to-end": "from the arrival of a finished request to its last token",
    "queue time": "from the arrival of a request to its first admission",
    "goodput": "requests that finished and met every target, as a share of all that arrived; a target on the pooled "
    "ITL is a target of no single request, so the share of gaps within it stands beside",
    "output tokens": "generated, of unfinished requests too; tokens recomputed after a preemption count once",
    "all tokens": "generated, and the prompts of requests that have a first token, cached prompt tokens included",
    "over time": "weighted by time, from the first arrival to the last event, idle time included",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of events in a simulation; totals if several seeds are combined."""

    arrived: int
    finished: int
    """Number of requests that finished for any reason; see `finish_reasons`."""
    refused: int
    unfinished: int
    finish_reasons: Mapping[str, int]
    num_steps: int
    generated_tokens: int
    preemptions: Mapping[str, int]
    """Number of preemptions by cause."""
    recomputed_tokens: int
    preemption_decisions: Mapping[str, int] = field(default_factory=dict)
    """Number of preemptions by the decision of `preemption_mode`; empty if the mode makes no decisions."""
    copied_blocks: Mapping[str, int] = field(default_factory=dict)
    """Number of blocks copied to host memory ("offloaded") and back ("restored"); empty without host memory."""


ItlOf = Literal["pooled", "request", "gap"]
"""What a target on the ITL holds for:

    pooled    the gaps of all requests together, as the P99 ITL that `vllm bench serve` prints
    request   the mean gap of each request (TPOT), as `vllm bench serve --goodput tpot:...`
    gap       every gap of each request, the longest included
"""
ITL_OF: tuple[ItlOf, ...] = ("pooled", "request", "gap")


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; None: no target."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None
    itl_of: ItlOf = "pooled"

    def __bool__(self) -> bool:
        return (self.ttft, self.itl, self.e2e) != (None, None, None)

    @property
    def pooled_itl(self) -> float | None:
        """The target on the gaps of all requests together; None: there is none."""
        return self.itl if self.itl_of == "pooled" else None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met all targets of their own, and the gaps that met a target on the pooled ITL."""

    share: Estimate
    requests_per_second: Estimate
    gaps_share: Estimate = NONE
    """Share of the gaps of all requests within `Targets.pooled_itl`; no value: there is no such target, or no gap."""


@dataclass(frozen=True, slots=True)
class Level:
    """Mean and maximum of a quantity that changes from step to step."""

    mean: Estimate
    max: Estimate


class _Load(NamedTuple):
    running: Level
    waiting: Level
    kv_cache_usage: Level
    busy: Estimate


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a simulation, or of several that differ in their seed. Times are in seconds."""

    counts: Counts
    seconds: Estimate
    """Virtual seconds from the first arrival to the last event."""
    num_replicas: int
    num_seeds: int
    is_complete: bool
    """Whether the simulation ran to its end; False: it was interrupted."""
    requests_per_second: Estimate
    """Finished requests a second."""
    output_tokens_per_second: Estimate
    total_tokens_per_second: Estimate
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    queue: Distribution
    targets: Targets
    goodput: Goodput | None
    """Goodput for the targets; None: no target was given."""
    kv_cache_usage: Level
    """Share of the blocks that requests hold, over time: the mean over the replicas, the maximum of any."""
    running: Level
    """Number of requests in the steps of all replicas, over time."""
    waiting: Level
    """Number of requests in the queues of all replicas, over time."""
    busy: Estimate
    """Share of the time in which a replica ran a step, mean over the replicas."""
    rows_per_step: Level
    """Rows of a step; each step counts once."""
    tokens_per_step: Level
    budget_used: Estimate
    """Share of the token budget that steps used."""
    slots_used: Estimate
    """Share of the sequence slots that steps used."""
    recomputed_share: Estimate
    """Recomputed tokens, as a share of all computed tokens."""
    prefix_hit_rate: Estimate
    """Share of the prompt tokens of fresh requests found in the prefix cache; no value: no lookup was made."""
    price_per_million_output_tokens: Estimate
    """Price in the currency of `price_per_hour`; no value: no price was given, or no token was generated."""
    method: str
    """How the confidence intervals were computed, as text."""
    notes: tuple[str, ...]
    """Remarks to read before the figures."""
    overload: Overload | None = None
    """Arrivals that exceed the service, so that the queue grows without end; None: it does not, the run is too short to
    show it, or the arrivals depend on the service."""

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON: None for a missing figure, never NaN."""
        return {**_jsonable(asdict(self)), "definitions": dict(DEFINITIONS)}


def figures(
    outcome: Outcome,
    config: SchedulerConfig,
    *,
    ttft_target: float | None = None,
    itl_target: float | None = None,
    e2e_target: float | None = None,
    itl_of: ItlOf = "pooled",
    price_per_hour: float | None = None,
    num_bootstrap: int = NUM_BOOTSTRAP,
    seed: int = 0,
    is_open: bool = False,
) -> Report:
    """The report of one simulation.

    Args:
        config: configuration of each replica's scheduler.
        ttft_target, itl_target, e2e_target: targets in seconds, for the goodput.
        itl_of: what `itl_target` holds for.
        price_per_hour: price of one replica.
        num_bootstrap: number of resamples for the intervals; 0: no intervals.
        seed: seed of the resamples.
        is_open: whether the arrivals do not depend on the service, so that the service may be overloaded.

    TPOT is per request, (end-to-end - TTFT) / (output tokens - 1); ITL is per gap, all requests pooled.
    """
    timings, stats = outcome.timings, outcome.stats
    count = timings.count
    arrival, first, last = timings.arrival[:count], timings.first_token[:count], timings.last_token[:count]
    scheduled, reason = timings.scheduled[:count], timings.reason[:count]
    num_output = timings.num_output_tokens[:count]
    is_refused = reason == REASONS.index(FinishReason.REFUSED)
    is_finished = _is_finished(timings)

    draws = Draws(choose_num_blocks(count), num_bootstrap, seed)
    blocks = consecutive_blocks(count, draws.num_blocks)
    gaps, gap_counts = timings.gaps()
    runs = courses(outcome)
    load = _over_time(outcome, runs)

    def of_requests(values: FloatArray) -> Distribution:
        return estimate_distribution(values, None, blocks, draws)

    counts = _counts(outcome, timings, stats, is_finished, is_refused)
    seconds = outcome.seconds
    prompts = int(timings.num_prompt_tokens[:count][~np.isnan(first)].sum())
    targets = Targets(ttft_target, itl_target, e2e_target, itl_of)
    of_gaps = gap_blocks(runs, len(gaps), draws.num_blocks)
    steps = _concatenate([run.num_steps for run in runs])
    rows, tokens = _concatenate([run.num_rows for run in runs]), _concatenate([run.num_tokens for run in runs])
    num_steps, num_tokens = int(steps.sum()), int(tokens.sum())
    looked_up, hits = sum(each.prefix_queries for each in stats), sum(each.prefix_hits for each in stats)
    price = None if price_per_hour is None else price_per_hour * len(runs) * seconds / 3600
    return Report(
        counts=counts,
        seconds=Estimate(seconds),
        num_replicas=len(runs),
        num_seeds=1,
        is_complete=outcome.is_complete,
        requests_per_second=_ratio(counts.finished, seconds),
        output_tokens_per_second=_ratio(counts.generated_tokens, seconds),
        total_tokens_per_second=_ratio(counts.generated_tokens + prompts, seconds),
        ttft=of_requests(first - arrival),
        tpot=of_requests(np.where(is_finished & (num_output > 1), mean_gaps(timings), np.nan)),
        itl=estimate_distribution(gaps, gap_counts, of_gaps, draws),
        e2e=of_requests(np.where(is_finished, last - arrival, np.nan)),
        queue=of_requests(scheduled - arrival),
        targets=targets,
        goodput=_goodput(timings, targets, blocks, of_gaps, draws, seconds) if targets else None,
        kv_cache_usage=load.kv_cache_usage,
        running=load.running,
        waiting=load.waiting,
        busy=load.busy,
        rows_per_step=Level(_ratio(int(rows @ steps), num_steps), _max_or_none(rows)),
        tokens_per_step=Level(_ratio(num_tokens, num_steps), _max_or_none(tokens / np.maximum(steps, 1))),
        budget_used=_ratio(num_tokens, num_steps * config.max_num_batched_tokens),
        slots_used=_ratio(int(rows @ steps), num_steps * config.num_sequence_slots),
        recomputed_share=_ratio(counts.recomputed_tokens, num_tokens),
        prefix_hit_rate=_ratio(hits, looked_up),
        price_per_million_output_tokens=NONE if price is None else _ratio(price * 1e6, counts.generated_tokens),
        method=_method(draws, count, num_bootstrap),
        notes=_notes(outcome, counts, targets),
        overload=overload(timings, _ratio(counts.finished, seconds)) if is_open else None,
    )


def meets_targets(timings: Timings, targets: Targets) -> npt.NDArray[np.bool_]:
    """Whether each request finished and met every target of its own, as for the goodput, [requests]. A target on the
    pooled ITL is no target of a request. `timings` must be closed."""
    count = timings.count
    arrival, is_good = timings.arrival[:count], _is_finished(timings)
    with np.errstate(invalid="ignore"):  # NaN (has not happened) meets no target
        if targets.ttft is not None:
            is_good &= timings.first_token[:count] - arrival <= targets.ttft
        if targets.itl is not None and targets.itl_of == "gap":
            is_good &= timings.max_gap[:count] <= targets.itl
        if targets.itl is not None and targets.itl_of == "request":
            is_good &= mean_gaps(timings) <= targets.itl
        if targets.e2e is not None:
            is_good &= timings.last_token[:count] - arrival <= targets.e2e
    return is_good


def mean_gaps(timings: Timings) -> FloatArray:
    """Mean seconds between two tokens of each request (TPOT), [requests]; 0 for a request of one token, NaN for one
    without tokens. `timings` must be closed."""
    count = timings.count
    later = np.maximum(timings.num_output_tokens[:count] - 1, 1)
    found: FloatArray = (timings.last_token[:count] - timings.first_token[:count]) / later
    return found


def _is_finished(timings: Timings) -> npt.NDArray[np.bool_]:
    reason = timings.reason[: timings.count]
    found: npt.NDArray[np.bool_] = (reason != UNFINISHED) & (reason != REASONS.index(FinishReason.REFUSED))
    return found


def combine(reports: Sequence[Report]) -> Report:
    """Combine reports of workloads that differ only in their seeds: the mean of each figure, with Student's interval.

    Counts are totals. A figure that a run lacks is left out.
    """
    if not reports:
        raise ValueError("no reports to combine; give at least one")
    first = reports[0]
    for report in reports:
        if (report.num_replicas, report.targets) != (first.num_replicas, first.targets):
            raise ValueError(
                f"one report has {first.num_replicas} replicas and {first.targets}, another has {report.num_replicas} "
                f"and {report.targets}; combine only reports of runs that differ in nothing but their seed"
            )
    if len(reports) == 1:
        return first
    count = sum(report.num_seeds for report in reports)
    merged: Report = _merge(list(reports))
    return replace(
        merged,
        num_replicas=first.num_replicas,
        num_seeds=count,
        is_complete=all(report.is_complete for report in reports),
        targets=first.targets,
        method=f"Each figure is the mean over {len(reports)} runs that differ in their seed. 95 % intervals: Student's "
        "t over these runs. Counts are totals.",
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _counts(
    outcome: Outcome,
    timings: Timings,
    stats: Sequence[SchedulerStats],
    is_finished: npt.NDArray[np.bool_],
    is_refused: npt.NDArray[np.bool_],
) -> Counts:
    reasons = np.bincount(timings.reason[: timings.count][is_finished], minlength=len(REASONS))
    finished, refused = int(np.count_nonzero(is_finished)), int(np.count_nonzero(is_refused))
    preemptions = {
        PreemptionCause.DISPLACED.value: sum(each.num_displaced for each in stats),
        PreemptionCause.PARKED.value: sum(each.num_preempted_by_parking for each in stats),
        PreemptionCause.RESET.value: sum(each.num_preempted_by_reset for each in stats),
        PreemptionCause.UNSAMPLED.value: sum(each.num_preempted_unsampled for each in stats),
    }
    in_all, copies = sum(each.num_preemptions for each in stats), outcome.copies
    return Counts(
        arrived=timings.count,
        finished=finished,
        refused=refused,
        unfinished=timings.count - finished - refused,
        finish_reasons={reason.value: int(found) for reason, found in zip(REASONS, reasons, strict=True) if found},
        num_steps=sum(each.num_steps for each in stats),
        generated_tokens=sum(each.num_generated_tokens for each in stats),
        preemptions={PreemptionCause.MEMORY.value: in_all - sum(preemptions.values()), **preemptions},
        recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
        preemption_decisions=_totals(each.preemption_decisions for each in stats),
        copied_blocks=_totals({"offloaded": each.num_offloaded, "restored": each.num_restored} for each in copies),
    )


def _totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of the counts of each name; empty if all sums are 0."""
    found = Counter[str]()
    for each in counts:
        found.update(each)
    return dict(found) if any(found.values()) else {}


def _goodput(
    timings: Timings,
    targets: Targets,
    blocks: Int64Array,
    of_gaps: Int64Array,
    draws: Draws,
    seconds: float,
) -> Goodput:
    """`blocks`, `of_gaps`: the block number of each request, and of each value of `Timings.gaps`."""
    count = timings.count
    is_good = meets_targets(timings, targets)
    found = estimate_share(is_good, None, blocks, draws)
    rate = count / seconds if seconds else math.nan
    return Goodput(
        found,
        Estimate(_scale_or_none(found.value, rate), _scale_or_none(found.low, rate), _scale_or_none(found.high, rate)),
        NONE if targets.pooled_itl is None else estimate_share(*_within(timings, targets.pooled_itl), of_gaps, draws),
    )


def _within(timings: Timings, limit: float) -> tuple[npt.NDArray[np.bool_], Int64Array]:
    gaps, counts = timings.gaps()
    return gaps <= limit, counts


def gap_blocks(runs: Sequence[Course], num_values: int, num_blocks: int) -> Int64Array:
    """The block number of each value of `Timings.gaps`: blocks have about the same number of gaps, in order of time.

    `gaps` first has the gaps of single steps and of the first step of each run of decodes, then the gaps of the later
    steps of each run, both kinds in the order in which events ended. A run of k steps gives k - 1 gaps of the second
    kind. An event has one gap of the first kind for each row that got a token before. Nearly all rows of an event did,
    so the event's place among the values follows from its share of all rows.
    """
    order = _concatenate([run.end for run in runs]).argsort(kind="stable")
    steps = _concatenate([run.num_steps for run in runs])[order]
    rows = _concatenate([run.num_rows for run in runs])[order]
    num_single = num_values - int(np.maximum(steps - 1, 0).sum())
    num_blocks = max(1, num_blocks)
    if not len(order) or num_single < 0:  # timings without their timelines
        return consecutive_blocks(num_values, num_blocks)
    weights = rows * steps
    blocks = (weights.cumsum() - weights) * num_blocks // weights.sum()
    below = rows.cumsum()
    place = (np.arange(num_single) + 0.5) * (below[-1] / max(1, num_single))
    single = blocks[np.minimum(below.searchsorted(place), len(blocks) - 1)]
    return np.concatenate([single, blocks.repeat(np.maximum(steps - 1, 0))])


def _over_time(outcome: Outcome, runs: Sequence[Course]) -> _Load:
    begin, end = time_span(outcome)
    running = sum_levels([levels(run, run.num_rows, begin, end) for run in runs])
    waiting = sum_levels([levels(run, run.num_waiting, begin, end) for run in runs])
    usage = [levels(run, run.kv_cache_usage, begin, end) for run in runs]
    mean = scale_levels(sum_levels(usage), 1 / len(runs))
    busy = sum(float((run.end - run.start).sum()) for run in runs)
    return _Load(
        Level(Estimate(running.mean), Estimate(running.max)),
        Level(Estimate(waiting.mean), Estimate(waiting.max)),
        Level(Estimate(mean.mean), Estimate(max(each.max or 0.0 for each in usage))),
        _ratio(busy, (end - begin) * len(runs)),
    )


def _method(draws: Draws, count: int, num_bootstrap: int) -> str:
    if not num_bootstrap:
        return "No intervals were requested."
    if not draws.num_resamples:
        return (
            f"No intervals: {count} requests are fewer than the {MIN_BLOCKS**2} that a bootstrap in at "
            f"least {MIN_BLOCKS} blocks needs."
        )
    return (
        f"95 % intervals: bootstrap over requests in blocks of time, {draws.num_resamples} resamples of "
        f"{draws.num_blocks} blocks of about {count / draws.num_blocks:.0f} requests that arrived one after the other "
        "(for ITL, of consecutive gaps), widened for the number of blocks as Student's t is. They hold for a longer "
        "time of this workload, if a queue is forgotten within a block. A maximum has none, nor a percentile with "
        f"fewer than {MIN_BEYOND} values beyond it."
    )


def _notes(outcome: Outcome, counts: Counts, targets: Targets) -> tuple[str, ...]:
    notes = []
    if not outcome.is_complete:
        notes.append("The simulation was interrupted: these are the figures so far.")
    if not counts.arrived:
        notes.append("No request arrived.")
    elif not counts.finished:
        notes.append(f"No request finished: {counts.refused} were refused, {counts.unfinished} are unfinished.")
    if counts.unfinished and counts.finished:
        missed = "; they count as misses of the targets" if targets else ""
        notes.append(
            f"{counts.unfinished} requests are unfinished: latencies are those of what has happened, so the longest "
            f"are missing{missed}."
        )
    return tuple(notes)


def _concatenate(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(0)


def _max_or_none(values: npt.NDArray[Any]) -> Estimate:
    return Estimate(float(values.max())) if len(values) else NONE


def _ratio(part: float, whole: float) -> Estimate:
    return Estimate(part / whole) if whole else NONE


def _scale_or_none(value: float | None, factor: float) -> float | None:
    return None if value is None or math.isnan(factor) else value * factor


def _merge(values: list[Any]) -> Any:
    """Merge the values of a figure: estimates become means over the seeds, and counts become totals; mappings and
    dataclasses are merged entry by entry."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, Estimate):
        return over_seeds(values)
    if isinstance(first, int):
        return sum(values)
    if isinstance(first, Mapping):
        return {name: sum(value.get(name, 0) for value in values) for name in {**first, **_keys(values)}}
    if is_dataclass(first):
        parts = {f.name: _merge([getattr(value, f.name) for value in values]) for f in fields(first)}
        return replace(first, **parts)  # type: ignore[type-var]
    return first


def _keys(values: list[Any]) -> dict[str, None]:
    return {name: None for value in values for name in value}


def _jsonable(value: Any) -> Any:
    """The value for JSON, without NaN, infinity and tuples."""
    if isinstance(value, Mapping):
        return {name: _jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
