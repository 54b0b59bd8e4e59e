"""Load of each engine of a simulation: of each replica, data parallel rank, prefill engine and decode engine."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from pointsman.sim.disaggregation import TransferTotals
from pointsman.sim.report.course import courses, levels, time_span
from pointsman.sim.simulator import Outcome


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one engine. Means are over the time from the first arrival to the last event."""

    name: str
    num_requests: int
    """Number of requests that its scheduler got."""
    num_tokens: int
    """Number of computed tokens."""
    busy: float
    """Share of the time in which it ran a step of its own."""
    running: float
    """Mean number of requests in its steps."""
    waiting: float
    """Mean number of requests in its queue."""
    kv_cache_usage: float
    """Mean share of its blocks that requests hold."""
    max_kv_cache_usage: float
    num_preemptions: int


def engine_loads(outcome: Outcome) -> list[EngineLoad]:
    """The load of each engine, in the order of `Outcome.stats`."""
    begin, end = time_span(outcome)
    span = max(end - begin, 1e-12)
    names = outcome.names or [f"replica {index}" for index in range(len(outcome.stats))]
    found = []
    for name, stats, run in zip(names, outcome.stats, courses(outcome), strict=True):
        usage = levels(run, run.kv_cache_usage, begin, end)
        found.append(
            EngineLoad(
                name,
                stats.num_added,
                int(run.num_tokens.sum()),
                float((run.end - run.start).sum()) / span,
                levels(run, run.num_rows, begin, end).mean or 0.0,
                levels(run, run.num_waiting, begin, end).mean or 0.0,
                usage.mean or 0.0,
                usage.max or 0.0,
                stats.num_preemptions,
            )
        )
    return found


def engines_as_json(outcome: Outcome) -> dict[str, Any]:
    """The load of each engine and the transfers of KV, for JSON; empty for a single engine."""
    if len(outcome.stats) == 1:
        return {}
    found: dict[str, Any] = {"engines": [asdict(load) for load in engine_loads(outcome)]}
    if outcome.transfers:
        found["kv_transfers"] = asdict(sum_of(outcome.transfers))
    return found


def sum_of(transfers: list[TransferTotals]) -> TransferTotals:
    """The transfers of several replicas together."""
    return TransferTotals(*(sum(column) for column in zip(*map(astuple, transfers), strict=True)))


def transfers_text(transfers: list[TransferTotals]) -> str:
    """The transfers in one sentence."""
    total = sum_of(transfers)
    if not total.num_transfers:
        return f"No KV was transferred; decode engines computed {total.num_untransferred:,} prompts that were not held."
    took, waited = (1e3 * seconds / total.num_transfers for seconds in (total.seconds, total.waiting))
    text = f"{total.num_transfers:,} KV transfers took {took:.1f} ms each, after {waited:.1f} ms of waiting for a link"
    if total.num_untransferred:
        text += f"; decode engines computed {total.num_untransferred:,} prompts, because too many blocks were held"
    return f"{text}."
