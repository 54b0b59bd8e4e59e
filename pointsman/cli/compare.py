"""`pointsman vllm compare`: simulates the traffic of a vLLM with other settings, and compares with what vLLM did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import stdout_console
from pointsman.cli.simulation import seconds
from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.config import scheduler_knobs
from pointsman.core.errors import did_you_mean
from pointsman.core.policy.registry import check_policies
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.sim.accuracy import RequestErrors
from pointsman.sim.calibrate import calibrate_steps
from pointsman.sim.errors import SimulationError
from pointsman.sim.observed import Replayed, replayed, times_of
from pointsman.sim.profile import PARTS, Profile, WatchedStepTime
from pointsman.sim.report import Report, figures
from pointsman.sim.report.intervals import Distribution
from pointsman.sim.report.layout import format_number
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_log import observed_steps
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceError, about_left_out, read_observed

MEASURED, SIMULATED = "vLLM, measured", "vLLM, simulated"
OTHERS: dict[str, dict[str, Any]] = {
    "default": {},
    "decode_reserve=mean": {"decode_reserve": "mean"},
    **{name: PRESETS[name] for name in ("low-latency", "high-throughput", "long-context", "short-requests")},
}
"""Configurations to compare, by name: values that replace settings of the server (Pointsman's own decisions,
presets)."""
_OF_THE_SERVER = (
    "num_blocks",
    "num_reserved_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_steps_in_flight",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "kv_groups",
    "num_draft_tokens",
    "max_loras",
    "prefill_interval",
)
"""Settings of the recording that a compared configuration keeps unless it sets them. A compared configuration does not
keep vLLM's decisions."""
QUANTILES = ("p50", "p99")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison."""

    name: str
    report: Report
    outside: Mapping[str, int] = field(default_factory=dict)
    """Fields of a step's load (`StepLoad`) that exceed the loads of the recording, with their largest values."""


def compare(
    path: str,
    *,
    ttft_target: str | None,
    itl_target: str | None,
    settings: Sequence[str],
    limit: int | None,
    as_json: bool,
) -> int:
    """Simulate the requests of an observed recording, and print the results beside what vLLM did.

    Args:
        path: the recording.
        ttft_target, itl_target: targets for the goodput, as "500ms".
        settings: further configurations to compare, as "max_num_seqs=64,decode_reserve=mean" or "preset=low-latency".
        limit: maximum number of requests, from the first on; None: all requests.

    Raises:
        CommandError: the recording or an option is wrong, or the simulator lacks a feature of the server.
    """
    if limit is not None and limit < 1:
        raise CommandError(f"--limit is {limit}; it must be at least 1")
    ttft, itl = seconds("ttft_target", ttft_target), seconds("itl_target", itl_target)

    def make_report(outcome: Outcome, config: SchedulerConfig) -> Report:
        return figures(outcome, config, num_bootstrap=0, ttft_target=ttft, itl_target=itl)

    given = {text: _parse_setting(text) for text in settings}
    try:
        observed = read_observed(path)
        happened = replayed(observed, path, limit)
        log = observed_steps(observed, path)
        profile = calibrate_steps(log, path).profile
    except OSError as error:
        raise CommandError(f"cannot read the recording {path}: {error.strerror}") from None
    except (SimulationError, TraceError) as error:
        raise CommandError(str(error)) from None
    configs, problems = _make_configs(happened.config, given)
    rows = [Row(MEASURED, make_report(happened.outcome, happened.config))]
    check: RequestErrors | None = None
    for name, config in configs.items():
        outcome, outside = _simulate_config(name, happened, config, profile)
        if name == SIMULATED:
            check = _simulation_errors(path, happened, outcome)
        rows.append(Row(name, make_report(outcome, config), outside))
    assert check is not None
    title = f"{Path(path).name}: {observed.model} on {observed.scheduler}"
    if as_json:
        print(json.dumps(_as_json(title, happened, profile, check, rows, problems), allow_nan=False))
    else:
        _print_comparison(title, happened, profile, check, rows, problems, (ttft, itl) != (None, None))
    return EXIT_OK


# ---------------------------------------------------------------------- what is simulated


def _parse_setting(text: str) -> dict[str, Any]:
    """Knobs of "name=value,name=value"; `preset` stands for the knobs of a preset."""
    knobs = scheduler_knobs()
    values: dict[str, Any] = {}
    last = ""
    for name, value in _parse_pairs(text):
        if name == "preset":
            presets = PRESETS | SYSTEMS
            if value not in presets:
                raise CommandError(f"no preset is called {value!r}; choose one of {', '.join(presets)}")
            values = {**presets[value], **values}
            continue
        if name in knobs:
            values[name], last = value, name
        elif last and knobs[last].policy is not None and isinstance(values[last], str) and ":" in values[last]:
            values[last] += f",{name}={value}"  # a further parameter of the policy
        else:
            raise CommandError(
                f"--setting names {name!r}, which is not a knob of the scheduler; {did_you_mean(name, knobs)}see "
                "pointsman serve --help"
            )
    return values


def _parse_pairs(text: str) -> Iterator[tuple[str, Any]]:
    """The pairs of "name=value,name=value". A value is JSON, in which commas may stand, or text up to a comma."""
    left = text
    while True:
        name, equals, left = left.partition("=")
        if not equals:
            raise CommandError(f"--setting is {text!r}; give it like max_num_seqs=64,decode_reserve=mean")
        left = left.lstrip()
        try:
            value, end = json.JSONDecoder().raw_decode(left)
            is_whole = left[end : end + 1] in ("", ",")
        except ValueError:
            is_whole = False
        if is_whole:
            left = left[end + 1 :]
        else:
            value, _, left = left.partition(",")
        yield name.strip(), value
        if not left:
            return


def _make_configs(
    own: SchedulerConfig, given: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, SchedulerConfig], list[str]]:
    """The configurations by name: vLLM's own first, then those of `OTHERS`, then the given ones; and, for each
    configuration of `OTHERS` that is impossible on this server, the reason.

    Raises:
        CommandError: a given configuration is impossible.
    """
    configs, problems = {SIMULATED: own}, []
    for name, values in OTHERS.items():
        try:
            configs[name] = _make_config(own, values)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    for name, setting in given.items():
        try:
            configs[name] = _make_config(own, setting)
        except ConfigError as error:
            raise CommandError(f"--setting {name} cannot be simulated: {error}") from None
    return configs, problems


def _make_config(own: SchedulerConfig, values: Mapping[str, Any]) -> SchedulerConfig:
    """The configuration with these values on the server of the recording, whose own configuration is `own`."""
    merged = {name: getattr(own, name) for name in _OF_THE_SERVER}
    if str(own.order).startswith("priority"):
        merged["order"] = "priority"
    merged.update(values)
    if merged.get("enable_prefix_caching") is False:
        merged.pop("share_within_step", None)
    config = SchedulerConfig(**merged)
    check_policies(config)
    return config


def _simulate_config(
    name: str, happened: Replayed, config: SchedulerConfig, profile: Profile
) -> tuple[Outcome, dict[str, int]]:
    watched = WatchedStepTime(profile.step_time)
    with ProgressBar(f"of {name} simulated", len(happened.trace)) as bar:
        features = replace(happened.features, adapter_share=profile.adapter_share)
        if not config.num_draft_tokens:
            features = replace(features, speculation=None)
        outcome = simulate(OpenLoop(happened.trace), config, watched, features=features, progress=bar.update)
    if not outcome.is_complete:
        raise KeyboardInterrupt
    ranges, known = watched.hull.ranges, profile.hull.ranges
    most = {part: ranges[part][1] for part in ("num_tokens", "num_rows") if part in ranges}
    return outcome, {part: value for part, value in most.items() if value > known[part][1]}


def _simulation_errors(path: str, happened: Replayed, outcome: Outcome) -> RequestErrors:
    """Errors of the simulation with vLLM's own settings, relative to vLLM's measured times.

    Raises:
        CommandError: no request runs in the simulation, or measured times are zero, so there are no errors.
    """
    lengths = [request.num_output_tokens for request in happened.trace]
    predicted, measured = times_of(outcome, lengths), times_of(happened.outcome, lengths)
    has_run = np.isfinite(predicted.last_token).nonzero()[0]
    if not len(has_run) or not measured[has_run].e2e.all() or not np.percentile(measured[has_run].ttft, 50):
        raise CommandError(
            f"{path}: the recorded times cannot be compared with a simulation: no request runs with the recorded "
            "settings, or requests take no time; make a new recording"
        )
    return RequestErrors.between(predicted[has_run], measured[has_run])


# ---------------------------------------------------------------------- what is printed


def _row_as_json(row: Row) -> dict[str, Any]:
    report = row.report
    kinds = {"ttft": report.ttft, "tpot": report.tpot, "itl": report.itl, "e2e": report.e2e}
    found: dict[str, Any] = {
        f"{kind}_{quantile}": getattr(distribution, quantile).value
        for kind, distribution in kinds.items()
        for quantile in QUANTILES
    }
    return {
        **found,
        "preemptions": sum(report.counts.preemptions.values()),
        "refused": report.counts.refused,
        "output_tokens_per_second": report.output_tokens_per_second.value,
        "prefix_hit_rate": report.prefix_hit_rate.value,
        "goodput": None if report.goodput is None else report.goodput.share.value,
        "outside": dict(row.outside),
    }


def _as_json(
    title: str, happened: Replayed, profile: Profile, check: RequestErrors, rows: Sequence[Row], problems: list[str]
) -> dict[str, Any]:
    return {
        "title": title,
        "num_requests": len(happened.trace),
        "num_left_out": sum(happened.recorded.left_out.values()),
        "steps": profile.held_out_errors,
        "check": check.to_dict(),
        "rows": {row.name: _row_as_json(row) for row in rows},
        "not_simulated": problems,
    }


def _print_comparison(
    title: str,
    happened: Replayed,
    profile: Profile,
    check: RequestErrors,
    rows: Sequence[Row],
    problems: list[str],
    has_targets: bool,
) -> None:
    console = stdout_console()
    config = happened.config
    console.print(Text(title, style="bold"))
    console.print(
        f"{len(happened.trace):,} requests in {happened.outcome.seconds:,.0f} s; {config.num_usable_blocks:,} KV "
        f"blocks of {config.block_size}, at most {config.max_num_seqs} requests and "
        f"{config.max_num_batched_tokens:,} tokens a step, {config.max_steps_in_flight} in flight, "
        f"prefix caching {'on' if config.enable_prefix_caching else 'off'}"
    )
    if happened.recorded.left_out:
        console.print(about_left_out(happened.recorded.num_rows, happened.recorded.left_out))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("ms")
    for kind in ("TTFT", "TPOT", "ITL", "e2e"):
        for quantile in QUANTILES:
            table.add_column(f"{kind}\n{quantile}", justify="right", no_wrap=True)
    for heading in ("pre-\nempted", "tokens\n/s", *(["good-\nput"] if has_targets else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_row_cells(row, has_targets))
    console.print(table)
    console.print()
    for line in _remarks(profile, check, rows, problems):
        console.print(Text(line))


def _row_cells(row: Row, has_targets: bool) -> list[str]:
    report = row.report
    cells = [row.name + (" *" if row.outside else "")]
    for distribution in (report.ttft, report.tpot, report.itl, report.e2e):
        cells += [_milliseconds(distribution, quantile) for quantile in QUANTILES]
    cells += [f"{sum(report.counts.preemptions.values()):,}", format_number(report.output_tokens_per_second.value)]
    if has_targets:
        assert report.goodput is not None
        share = report.goodput.share.value
        cells.append("-" if share is None else f"{100 * share:.1f} %")
    return cells


def _milliseconds(distribution: Distribution, quantile: str) -> str:
    value = getattr(distribution, quantile).value
    return format_number(None if value is None else 1e3 * value)


def _remarks(profile: Profile, check: RequestErrors, rows: Sequence[Row], problems: list[str]) -> list[str]:
    """Remarks to print below the table; the first remark has the errors of the simulation with vLLM's own settings."""
    measured, simulated = rows[0].report, rows[1].report
    errors = {
        "TTFT mean": check.ttft_mean_error,
        "TTFT p50": check.ttft_p50_error,
        "TTFT p99": check.ttft_p99_error,
        "TPOT mean": check.tpot_mean_error,
        "ITL p99": _relative_error(simulated.itl.p99.value, measured.itl.p99.value),
    }
    found = ", ".join(f"{name} {value:+.1%}" for name, value in errors.items() if value is not None)
    step = profile.held_out_errors["step_mape"]
    lines = [
        f"Check of the model: simulated with vLLM's own settings, the end-to-end time of a request is off by "
        f"{check.e2e_mape:.1%} on average ({check.e2e_bias:+.1%} signed); {found}. Steps are fitted "
        f"to this recording; fitted to its first half, a step of the other half is off by {step:.1%}.",
        f'Compare the other rows with "{SIMULATED}": a difference smaller than these errors says nothing.',
    ]
    if refused := [f"{row.name}: {row.report.counts.refused:,}" for row in rows if row.report.counts.refused]:
        lines.append(f"Requests that could never run, and count as missed: {', '.join(refused)}.")
    for part, (_, most) in profile.hull.ranges.items():
        if outside := [f"{row.name} {row.outside[part]:,}" for row in rows if part in row.outside]:
            lines.append(
                f"* {PARTS[part]} go up to more than the recording's {most:,}, so step times there are "
                f"extrapolated: {', '.join(outside)}."
            )
    return lines + [f"Not simulated, {problem}" for problem in problems]


def _relative_error(value: float | None, to: float | None) -> float | None:
    return value / to - 1 if value is not None and to else None
