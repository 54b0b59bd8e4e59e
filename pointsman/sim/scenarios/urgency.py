"""Scenario of priority inversion, with and without priority preemption."""

from __future__ import annotations

from functools import partial

from pointsman.sim.scenarios.scenario import (
    Bars,
    Check,
    Figure,
    Finding,
    Run,
    Scenario,
    Variant,
    output_rate,
    quantile,
    recomputed,
    settings,
)
from pointsman.sim.scenarios.workloads import Stream, Streams
from pointsman.sim.workload import Workload

_URGENT, _BATCH = "urgent", "batch"
_FCFS, _WAITS, _PREEMPTS = "fcfs", "priority, waits", "priority, preempts"
_TTFT, _TTFT_MAX, _BATCH_E2E = "urgent TTFT p50", "urgent TTFT max", "batch end-to-end"
_PREEMPTED, _RECOMPUTED, _RATE = "preempted", "recomputed", "output tok/s"


def _batch_and_urgent(seed: int) -> Workload:
    """A backlog that always fills all sequence slots, and urgent requests that arrive one after the other."""
    streams = (
        Stream(_BATCH, 120, "lognormal:300,0.5", "lognormal:800,0.5", priority=10),
        Stream(_URGENT, 30, "lognormal:300,0.5", "lognormal:100,0.5", "poisson:2", start=2.0),
    )
    return Streams(streams, seed)


def _ttft(stream: str, share: float, run: Run) -> float | None:
    return quantile(run.ttft[run.is_of_streams(stream)], share)


def _mean_e2e(stream: str, run: Run) -> float | None:
    return float(run.e2e[run.is_of_streams(stream)].mean())


def _check_inversion(found: Finding) -> list[Check]:
    waits, preempts = (found.value(_TTFT_MAX, name) for name in (_WAITS, _PREEMPTS))
    slower = found.value(_BATCH_E2E, _PREEMPTS) / found.value(_BATCH_E2E, _WAITS) - 1
    return [
        Check(
            "ordering the queue by priority serves urgent requests first",
            found.value(_TTFT, _WAITS) < 0.1 * found.value(_TTFT, _FCFS),
            f"TTFT p50 {found.text(_TTFT, _WAITS)}, {found.text(_TTFT, _FCFS)} under fcfs",
        ),
        Check(
            "the order alone leaves an inversion: they wait for a slot of a less urgent request",
            waits > 3 * preempts,
            f"TTFT up to {found.text(_TTFT_MAX, _WAITS)}; {found.text(_TTFT_MAX, _PREEMPTS)} if they preempt",
        ),
        Check(
            "preempting for them costs the others little",
            slower < 0.05 and found.value(_RECOMPUTED, _PREEMPTS) < 0.05,
            f"mean end-to-end time {found.text(_BATCH_E2E, _PREEMPTS)}, {found.text(_BATCH_E2E, _WAITS)} if the urgent "
            f"ones wait; {found.text(_RECOMPUTED, _PREEMPTS)} of all tokens "
            f"recomputed, {found.text(_PREEMPTED, _PREEMPTS)} preemptions",
        ),
    ]


PRIORITY_INVERSION = Scenario(
    name="priority-inversion",
    claim="Under the priority policy urgent requests run first; without priority preemption they still wait for less "
    "urgent ones that run.",
    source="a deep dive into vLLM V1; that a more urgent waiting request preempts is Pointsman's decision",
    setting="16 sequence slots. 120 batch requests (priority 10, outputs lognormal:800,0.5) are there from the start; "
    "30 urgent ones (priority 0, outputs lognormal:100,0.5) arrive, two a second. vLLM's priority policy waits.",
    variants=(
        Variant(_FCFS, settings(max_num_seqs=16), _batch_and_urgent),
        Variant(_WAITS, settings(max_num_seqs=16, order="priority", displace=False), _batch_and_urgent),
        Variant(_PREEMPTS, settings(max_num_seqs=16, order="priority"), _batch_and_urgent),
    ),
    figures=(
        Figure(_TTFT, "s", partial(_ttft, _URGENT, 0.5)),
        Figure(_TTFT_MAX, "s", partial(_ttft, _URGENT, 1.0)),
        Figure(_BATCH_E2E, "s", partial(_mean_e2e, _BATCH)),
        Figure(_PREEMPTED, "", lambda run: run.total("num_displaced")),
        Figure(_RECOMPUTED, "%", recomputed),
        Figure(_RATE, "", output_rate),
    ),
    checks=_check_inversion,
    panels=(Bars(_TTFT), Bars(_TTFT_MAX), Bars(_BATCH_E2E), Bars(_RATE)),
)
