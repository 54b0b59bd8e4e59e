"""The metrics that vLLM does not have of this scheduler, as text for Prometheus.

Names, types and meanings are those of `pointsman serve` (`pointsman/server/metrics/table.py`). What vLLM counts itself
is not here: its own page has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from pointsman.core import SchedulerStats
from pointsman.server.metrics.readings import SCRAPED
from pointsman.server.metrics.table import BASE_LABELS, REQUESTS_REFUSED, Definition, Reading

NAMES = (
    "pointsman:requests_waiting",
    "pointsman:parked",
    "pointsman:kv_blocks",
    "pointsman:preemptions_total",
    "pointsman:recomputed_tokens_total",
    "pointsman:resumed_prefix_cache_queries_total",
    "pointsman:resumed_prefix_cache_hits_total",
    "pointsman:evictions_total",
    "pointsman:deferrals_total",
    "pointsman:steps_total",
    "pointsman:failed_steps_total",
    "pointsman:scheduler_seconds_total",
)
"""Of the scheduler, in the words of `SCRAPED`. The other ones there are vLLM's own too, or of our engine."""


def render(answer: Mapping[str, Any]) -> str:
    """The text, of the answer of a control socket to "metrics".

    Raises:
        ValueError: the answer is that of another version.
    """
    stats = _stats(answer["stats"])
    reading = SimpleNamespace(
        scheduler=stats,
        counters=SimpleNamespace(num_steps=stats.num_steps, scheduler_time=answer["scheduler_seconds"]),
    )
    labels = dict(zip(BASE_LABELS, (answer["model"], str(answer["engine"])), strict=True))
    lines: list[str] = []
    for definition, read in SCRAPED:
        if definition.name in NAMES:
            lines += _lines(definition, read(reading), labels)  # type: ignore[arg-type]
    lines += _lines(REQUESTS_REFUSED, {"invalid": stats.num_refused}, labels)
    return "\n".join([*lines, ""])


def _stats(values: Mapping[str, Any]) -> SchedulerStats:
    names = {field.name for field in fields(SchedulerStats)}
    if missing := names - values.keys():
        raise ValueError(f"the Pointsman in vLLM is of another version than this one: it tells no {min(missing)}")
    return SchedulerStats(**{name: values[name] for name in names})


def _lines(definition: Definition, reading: Reading, labels: Mapping[str, str]) -> Iterator[str]:
    yield f"# HELP {definition.name} {definition.meaning}"
    yield f"# TYPE {definition.name} {definition.kind}"
    if not isinstance(reading, Mapping):
        yield f"{definition.name}{_braced(labels)} {reading}"
        return
    assert definition.label is not None
    for value, number in reading.items():
        yield f"{definition.name}{_braced({**labels, definition.label: value})} {number}"


def _braced(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
