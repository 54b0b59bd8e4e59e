"""Observed recordings: converts what vLLM did to an `Outcome`, as a simulation of the same requests would return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from pointsman.core import Scheduler, SchedulerConfig, SchedulerStats
from pointsman.core.policy.registry import check_policies
from pointsman.core.recording import check_num_blocks
from pointsman.files import MAX_MESSAGE, shown
from pointsman.sim.accuracy import Times
from pointsman.sim.errors import SimulationError
from pointsman.sim.features import Features
from pointsman.sim.outcome import REASONS, Event, Timeline, Timings
from pointsman.sim.simulator import Outcome
from pointsman.sim.step_log import observed_speculation
from pointsman.traces import LeftOut, Observed, ObservedRequest, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Replayed:
    """The requests of an observed recording that can be simulated, and how vLLM ran them."""

    trace: list[TraceRequest]
    """The requests to simulate, by arrival, the first one at 0 seconds; with a limit, fewer than in the recording."""
    config: SchedulerConfig
    """Configuration with vLLM's own settings and decisions."""
    outcome: Outcome
    """Outcome of vLLM's run, with the requests of `trace`, in the order of `trace`."""
    features: Features
    """The drafts of vLLM's run, with the acceptance that the recording shows; the drafter's time is part of the steps'
    times."""
    recorded: Trace[ObservedRequest]
    """The recorded requests that can be simulated, also those beyond `limit`; and the number of left-out requests,
    which did not finish or got no token."""


def replayed(observed: Observed, source: str, limit: int | None = None) -> Replayed:
    """The outcome of vLLM's run, and the requests to simulate.

    Args:
        observed: the recording.
        source: name of the recording, for messages.
        limit: maximum number of requests, in the order of arrival; None: all.

    Raises:
        SimulationError: the simulator lacks an observed feature, or no request finished.
    """
    if observed.lacking:
        raise SimulationError(
            f"{source}: {observed.scheduler} ran with {', '.join(observed.lacking)}, which the simulator does not "
            "support; record a server without these features"
        )
    known = {field.name for field in fields(SchedulerConfig)}
    if unknown := sorted(set(observed.config) - known):
        raise SimulationError(f"{source}: unknown setting {unknown[0]!r}; record with this version of Pointsman")
    try:
        check_num_blocks(observed.config.get("num_blocks"))
        config = SchedulerConfig(**observed.config)
        if config.num_draft_tokens and config.max_steps_in_flight > 1:
            # The core verifies drafts only with one step in flight. vLLM's asynchronous steps have as many drafts, and
            # a request starts and ends up to one step later than here.
            config = config.replace(max_steps_in_flight=1)
        check_policies(config)
        stats = Scheduler(config).stats()
    except (ValueError, TypeError) as error:
        raise SimulationError(
            f"{source}: the recorded settings cannot be used: {shown(str(error), MAX_MESSAGE)}; make a new recording"
        ) from None
    ended = [each for each in observed.requests if each.reason is not None]
    recorded = Trace(
        sorted((each for each in ended if each.runs), key=lambda each: each.queued),
        {
            LeftOut.NO_OUTPUT: sum(not each.runs for each in ended),
            LeftOut.UNFINISHED: len(observed.requests) - len(ended),
        },
    )
    if not recorded:
        raise SimulationError(f"{source}: none of its {len(observed.requests)} requests finished; record for longer")
    chosen = recorded[:limit]
    start = chosen[0].queued
    trace = [replace(observed.trace_request(each), arrival_time=each.queued - start) for each in chosen]
    outcome = _outcome(observed, chosen, config, start, stats)
    return Replayed(trace, config, outcome, Features(speculation=observed_speculation(observed)), recorded)


def times_of(outcome: Outcome, num_output_tokens: Sequence[int]) -> Times:
    """When each request of the outcome was queued and got its first and last token."""
    timings = outcome.timings
    count = timings.count
    lengths = np.array(num_output_tokens, dtype=np.int64)
    return Times(timings.arrival[:count], timings.first_token[:count], timings.last_token[:count], lengths)


def _outcome(
    observed: Observed,
    requests: Sequence[ObservedRequest],
    config: SchedulerConfig,
    start: float,
    stats: SchedulerStats,
) -> Outcome:
    ended = observed.ended - start
    timings = Timings(len(requests))
    for request in requests:
        number = timings.add_request(request.queued - start, request.num_prompt_tokens)
        if request.scheduled is not None:
            timings.record_admission(number, request.scheduled - start, request.num_cached_tokens)
        timings.num_output_tokens[number] = request.num_output_tokens
        timings.num_preemptions[number] = request.num_preemptions
        assert request.reason is not None
        timings.reason[number] = REASONS.index(request.reason)
        itself = np.array([number], dtype=np.int64)
        for step, last in request.runs:
            timings.record_token(itself, float(ended[step]))
            if last > step:
                timings.record_tokens(itself, ended[step : last + 1])
    timings.close()
    steps = observed.steps
    usable = config.num_usable_blocks
    began = ended - observed.seconds
    began[1:] = np.maximum(began[1:], ended[:-1])  # with steps in flight, a step is scheduled while another runs
    columns = [steps[name].tolist() for name in ("num_rows", "num_tokens", "num_waiting", "num_free_blocks")]
    timeline = Timeline()
    for begin, end, rows, tokens, waiting, free in zip(began.tolist(), ended.tolist(), *columns, strict=True):
        timeline.events.append(Event(begin, end, 1, rows, tokens, waiting, max(0.0, 1 - free / usable)))
    looked_up = sum(request.num_prompt_tokens for request in requests) if config.enable_prefix_caching else 0
    stats = replace(
        stats,
        num_steps=len(ended),
        num_scheduled_tokens=int(steps["num_tokens"].sum()),
        num_generated_tokens=sum(request.num_output_tokens for request in requests),
        num_preemptions=sum(request.num_preemptions for request in requests),
        num_draft_tokens=sum(drafts * count for each in requests for drafts, _, count in each.drafts),
        num_accepted_tokens=sum(accepted * count for each in requests for _, accepted, count in each.drafts),
        prefix_queries=looked_up,
        prefix_hits=sum(request.num_cached_tokens for request in requests),
    )
    return Outcome(timings, [timeline], [stats], float(timings.last_token.max()))
