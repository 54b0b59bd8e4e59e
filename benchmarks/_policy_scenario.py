"""Scenarios of policies: fixed requests, scheduler, device and three loads, so that figures have a known workload.

    measure(scenario, "above", {"watermark": 0.02})     one simulation, and its figures
    saturation(scenario)                                the speed above which the queue grows
    highest_speed(scenario, {}, {"itl_p99": 0.05})      the highest speed within limits

A load is a speed: the factor by which requests arrive faster than in the source. The speeds of a scenario are fixed
numbers, chosen from its saturation under the settings of the scenario; one of them may be published with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any, Literal

import numpy as np

from pointsman.core import SchedulerConfig
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.outcome import Timings
from pointsman.sim.report.summary import figures
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.stretches import Stretch
from pointsman.sim.workload import Arrival

Load = Literal["below", "at", "above"]
LOADS: tuple[Load, ...] = ("below", "at", "above")
TTFT_TARGET, GAP_TARGET = 2.0, 0.1
"""Targets of goodput, in seconds: the first token, and every gap between two tokens of a request."""
FARTHEST = 16
"""A speed within limits is searched from this divisor of the lowest load up to this multiple of the highest."""
NOT_GROWING = {"wait_growth": 0.01}
"""A queue grows if waits grow by this share of the elapsed time: the server falls behind by 1 %."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The requests, settings and device of a simulation."""

    name: str
    about: str
    """Requests, pool and device, in a sentence."""
    arrivals: Callable[[float], Sequence[Arrival]]
    """Makes all requests at a speed, in order of time; the same ones at every speed."""
    config: SchedulerConfig
    step_time: StepTime
    speeds: Mapping[Load, float]
    host_memory: HostMemory | None = None
    """Host memory for settings that swap; other settings run without it."""

    def workload(self, speed: float, num_requests: int | None = None) -> Stretch:
        """The first `num_requests` requests of the scenario, at a speed."""
        arrivals = tuple(self.arrivals(speed)[:num_requests])
        return Stretch(arrivals, arrivals[-1][0] - arrivals[0][0])


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a simulation. Times are in seconds of the virtual clock, shares of 1."""

    requests: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    latency_mean: float
    """Mean time from the arrival of a request to its last token."""
    itl_p50: float
    itl_p99: float
    """99th percentile of all gaps between two tokens, requests pooled."""
    goodput: float
    """Share of the requests whose TTFT is at most `TTFT_TARGET` and whose every gap is at most `GAP_TARGET`."""
    within_target: float | None
    """Share of the requests with a `ttft_target` that meet it; None: no request has one."""
    recomputed_share: float
    """Recomputed tokens, as a share of all computed tokens."""
    recomputed_tokens: int
    preemptions: int
    prefix_hit_share: float | None
    """Share of the prompt tokens of fresh requests found in the prefix cache; None: no lookup was made."""
    agents_hit_share: float | None
    """`prefix_hit_share` of the tenant "agents"; None: there is no such tenant."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft_mean_of: Mapping[str, float]
    """Mean TTFT of each tenant."""
    light_ttft_mean: float | None
    """Mean TTFT of all tenants except "heavy"; None: there is no such tenant."""
    wait_growth: float
    """Seconds by which the queue time of requests grows with each second of arrivals (least squares)."""
    cpu_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON, to four digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def measure(
    scenario: Scenario,
    load: Load | float,
    overrides: Mapping[str, Any] | None = None,
    num_requests: int | None = None,
) -> Figures:
    """Simulate a scenario at a load, or at a speed, with other settings than its own.

    Raises:
        ConfigError: a setting is not known or out of range.
        RuntimeError: a request could never run, or has not finished.
    """
    config = configured(scenario, overrides or {})
    workload = scenario.workload(scenario.speeds[load] if isinstance(load, str) else load, num_requests)
    start = process_time()
    host_memory = None if config.preemption_mode == "recompute" else scenario.host_memory
    outcome = simulate(workload, config, scenario.step_time, host_memory=host_memory)
    return read_figures(outcome, config, process_time() - start)


def configured(scenario: Scenario, overrides: Mapping[str, Any]) -> SchedulerConfig:
    """The settings of a scenario with `overrides`.

    Raises:
        ConfigError: a setting is out of range, or contradicts another one.
        KeyError: a setting is not known.
    """
    if unknown := sorted(set(overrides) - set(SchedulerConfig.__dataclass_fields__)):
        raise KeyError(f"{unknown[0]} is not a field of SchedulerConfig")
    return scenario.config.replace(**overrides)


def read_figures(outcome: Outcome, config: SchedulerConfig, cpu_seconds: float) -> Figures:
    """The figures of a simulation that ran to its end.

    Raises:
        KeyboardInterrupt: it was interrupted.
        RuntimeError: a request could never run, or has not finished.
    """
    if not outcome.is_complete:
        raise KeyboardInterrupt
    if outcome.refused:
        raise RuntimeError(f"{len(outcome.refused)} requests were refused, the first: {outcome.refused[0][1]}")
    report = figures(outcome, config, ttft_target=TTFT_TARGET, itl_target=GAP_TARGET, itl_of="gap", num_bootstrap=0)
    if report.counts.unfinished:
        raise RuntimeError(f"{report.counts.unfinished} requests have not finished")
    timings, requests, stats = outcome.timings, outcome.requests, outcome.stats[0]
    ttft = timings.first_token - timings.arrival
    of_tenant = {tenant: _mean(ttft, requests, {tenant}) for tenant in sorted({each.tenant for each in requests})}
    light = set(of_tenant) - {"heavy"}
    target = np.array([np.nan if each.ttft_target is None else each.ttft_target for each in requests])
    has_target = ~np.isnan(target)
    assert report.goodput is not None
    return Figures(
        requests=timings.count,
        ttft_mean=_of(report.ttft.mean.value),
        ttft_p50=_of(report.ttft.p50.value),
        ttft_p99=_of(report.ttft.p99.value),
        ttft_max=_of(report.ttft.max.value),
        latency_mean=float(np.mean(timings.last_token - timings.arrival)),
        itl_p50=_of(report.itl.p50.value),
        itl_p99=_of(report.itl.p99.value),
        goodput=_of(report.goodput.share.value),
        within_target=float(np.mean(ttft[has_target] <= target[has_target])) if has_target.any() else None,
        recomputed_share=_of(report.recomputed_share.value),
        recomputed_tokens=stats.num_recomputed_tokens,
        preemptions=stats.num_preemptions,
        prefix_hit_share=report.prefix_hit_rate.value,
        agents_hit_share=_hit_share(timings, [each.tenant == "agents" for each in requests]),
        requests_per_second=_of(report.requests_per_second.value),
        output_tokens_per_second=_of(report.output_tokens_per_second.value),
        ttft_mean_of=of_tenant if set(of_tenant) != {""} else {},
        light_ttft_mean=_mean(ttft, requests, light) if "heavy" in of_tenant and light else None,
        wait_growth=float(np.polyfit(timings.arrival, timings.scheduled - timings.arrival, 1)[0]),
        cpu_seconds=cpu_seconds,
    )


def saturation(scenario: Scenario) -> float:
    """The highest speed at which the queue does not grow, under the scenario's own settings."""
    return highest_speed(scenario, {}, NOT_GROWING)


def highest_speed(
    scenario: Scenario,
    overrides: Mapping[str, Any],
    limits: Mapping[str, float],
    num_requests: int | None = None,
    tolerance: float = 0.02,
) -> float:
    """The highest speed at which figures are within limits.

    Args:
        overrides: as those of `measure`.
        limits: maximum values of figures, by their names.
        num_requests: only the first ones.
        tolerance: maximum relative distance, at the end, between a speed within the limits and one beyond them.

    Returns:
        The speed; 0 if none is within the limits, and at most `FARTHEST` times that of the load above saturation.
    """

    def is_within(speed: float) -> bool:
        found = measure(scenario, speed, overrides, num_requests)
        return all(getattr(found, name) <= most for name, most in limits.items())

    low, high = scenario.speeds["below"], scenario.speeds["above"]
    while not is_within(low):
        low, high = low / 2, low
        if low < scenario.speeds["below"] / FARTHEST:
            return 0.0
    while is_within(high):
        low, high = high, 1.5 * high
        if high > scenario.speeds["above"] * FARTHEST:
            return low
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def scaled(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, which arrive `speed` times as fast."""
    return [(time / speed, request) for time, request in arrivals]


def with_target(arrivals: Sequence[Arrival], ttft_target: float) -> list[Arrival]:
    """The same requests, each with a TTFT target."""
    return [(time, replace(request, ttft_target=ttft_target)) for time, request in arrivals]


def _mean(values: np.ndarray[Any, Any], requests: Sequence[SimRequest], tenants: set[str]) -> float:
    return float(values[[request.tenant in tenants for request in requests]].mean())


def _hit_share(timings: Timings, chosen: list[bool]) -> float | None:
    """Cached tokens of some requests, as a share of their prompt tokens."""
    if not any(chosen):
        return None
    cached, prompts = timings.num_cached_tokens[: len(chosen)], timings.num_prompt_tokens[: len(chosen)]
    return float(cached[chosen].sum() / prompts[chosen].sum())


def _of(value: float | None) -> float:
    return float("nan") if value is None else value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {name: _rounded(part) for name, part in value.items()} if isinstance(value, dict) else value
