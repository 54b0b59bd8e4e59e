"""`pointsman capacity`: finds the number of requests a second, users or replicas within the targets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_NOTHING, EXIT_OK, CommandError
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import print_setting, setting_as_json, stdout_console
from pointsman.cli.simulation import (
    Arriving,
    Service,
    check_routing,
    seconds,
    service_of_options,
    workload_of_options,
)
from pointsman.sim.capacity import (
    DENSE_GAP,
    SPARSE_GAP,
    Capacity,
    Probe,
    Question,
    fewest_replicas,
    highest_rate,
    max_users,
)
from pointsman.sim.errors import SimulationError
from pointsman.sim.report.summary import Targets

DEFAULT_TARGETS = Targets(ttft=2.0)
PER_REPLICA, AT_MOST = 2000, 10_000
"""Default number of requests of a probe, for each replica, and the maximum of this default for all replicas."""
_FASTER = "set longer targets, or take a faster device"
_COLUMNS = ("users", "requests/s", "replicas", "within targets", "TTFT p99", "ITL p99", "longest gap p99", "")
_WIDTHS = (7, *(max(10, len(column)) for column in _COLUMNS[1:]))


def run_capacity(
    options: Mapping[str, Any],
    *,
    replicas: str,
    share: float,
    rate: float | None,
    num_requests: int | None,
    tolerance: float,
    preset: str | None,
    as_json: bool,
) -> int:
    """Search for the capacity; print each probe and the result.

    Returns:
        The exit code: 0, 3 if nothing meets the targets, or 130 after Ctrl-C, which prints the bracket so far.

    Raises:
        CommandError: an option, a file or the model is wrong.
    """
    low, high = replica_range(replicas, options)
    targets = Targets(*(seconds(name, options.get(name)) for name in ("ttft_target", "itl_target"))) or DEFAULT_TARGETS
    users = options.get("users")
    finds_num_users = users is not None or ("think" in options and "sessions" not in options)
    for option, load in (("--requests-per-second", rate), ("--users", users)):
        if load is not None and low == high:
            raise CommandError(
                f"{option} has no effect with a fixed number of replicas, because the search finds this value; leave "
                f"{option} out, or give a range like --replicas 1-16"
            )
    if finds_num_users and rate is not None:
        raise CommandError("--requests-per-second has no effect with --users or --think; leave it out")
    if finds_num_users and users is None and low < high:
        raise CommandError("--think with a range of --replicas needs the number of users; give --users too")
    if rate is not None and not 0 < rate < math.inf:
        raise CommandError(f"--requests-per-second is {rate}; it must be above 0")
    if not 0 < tolerance < math.inf:
        raise CommandError(f"--tolerance is {tolerance}; it must be above 0, like 0.02 for a bracket of 2 %")
    if not 0 < share <= 1:
        raise CommandError(f"--share is {share}; it must be above 0 and at most 1")
    if num_requests is not None and num_requests < 2:
        raise CommandError(f"--requests is {num_requests}; it must be at least 2; give thousands for a reliable result")
    service = service_of_options(options, preset)
    num_requests = num_requests or min(PER_REPLICA * high, AT_MOST)
    arriving = workload_of_options(options, num_requests, finds_num_users=finds_num_users)
    if arriving.rate == math.inf and not finds_num_users:
        raise CommandError(
            f"--trace is {options['trace']}, whose requests all arrive at the same time and so have no rate; give "
            "--arrivals instead"
        )
    search = _Search(
        service,
        arriving,
        targets,
        share,
        wanted=num_requests if "trace" in options else 0,
        seed=options.get("seed", 0),
        console=stdout_console(),
        is_shown=not as_json,
    )
    is_complete = True
    try:
        with ProgressBar("probed", None) as bar:
            question = search.make_question(bar)
            if low < high:
                found = fewest_replicas(question, users or rate or arriving.rate, low, high)
            elif finds_num_users:
                found = max_users(question, high, tolerance=tolerance)
            else:
                found = highest_rate(question, high, tolerance=tolerance)
    except KeyboardInterrupt:
        found, is_complete = search.found, False
    except SimulationError as error:
        raise CommandError(str(error)) from None
    answer = _result_lines(found, search, low, high, is_complete)
    if as_json:
        print(json.dumps(search.as_json(found, answer, is_complete), allow_nan=False))
    else:
        print()
        for line in answer:
            search.console.print(Text(line, style="bold" if line == answer[0] else ""))
    if not is_complete:
        return EXIT_INTERRUPTED
    return EXIT_NOTHING if found.meets is None else EXIT_OK


def replica_range(text: str, options: Mapping[str, Any]) -> tuple[int, int]:
    """The minimum and maximum number of replicas in "4" or "1-16".

    Raises:
        CommandError: `text` is neither a number nor a range, or a routing rule is given for one replica.
    """
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise CommandError(f"--replicas is {text!r}; give a number of at least 1, like 4, or a range, like 1-16")
    check_routing(options, high)
    return low, high


class _Search:
    """A search for the capacity: the service, its requests and targets, and the probes so far."""

    def __init__(
        self,
        service: Service,
        arriving: Arriving,
        targets: Targets,
        share: float,
        *,
        wanted: int,
        seed: int,
        console: Console,
        is_shown: bool,
    ) -> None:
        self.service, self.arriving, self.targets, self.share = service, arriving, targets, share
        self.found = Capacity()
        """All probes so far, also of a search that was interrupted."""
        self._extrapolations: dict[Probe, list[str]] = {}
        self.console = console
        self._seed = seed
        self._wanted = wanted  # number of requests of a probe; a trace may have fewer
        self._is_shown = is_shown

    def remedy_text(self, misses: Probe) -> str:
        """The remedy to print if no load meets the targets. `misses`: the probe nearest to meeting them."""
        if misses.num_refused > (1 - self.share) * misses.num_requests:
            return "shorten the requests that can never run"
        return _FASTER

    def make_question(self, bar: ProgressBar) -> Question:
        """The `Question` of this search: its workload, service and targets. Prints the heading; each probe then prints
        a row below the heading."""
        arriving, of_users = self.arriving, self.arriving.of_users
        question = Question(
            workload=lambda load: of_users(int(load)) if of_users else arriving.at_speed(load / arriving.rate),
            is_of_users=of_users is not None,
            config=self.service.config,
            step_time=self.service.step_time,
            targets=self.targets,
            share=self.share,
            routing=self.service.routing,
            seed=self._seed,
            host_memory=self.service.host_memory,
            features=self.service.features,
            topology=self.service.topology,
            on_probe=self._print_probe,
            progress=bar.update,
        )
        if self._is_shown:
            print_setting(self.service, arriving, 1)
            self.console.print(Text(self.service.about_times, style="yellow"))
            self.console.print(f"Targets: {targets_text(self.targets)}; for at least {self.share:.6g} of the requests.")
            how = "from another number of users" if of_users else "faster or slower"
            self.console.print(f"Each probe is a simulation of these requests, which come {how}.")
            about_trace = f"{arriving.about_trace} {arriving.about_left_out}".strip()
            self.console.print(f"{about_trace}\n" if about_trace else "")
            self._print_cells(_COLUMNS, "bold")
        return question

    def extrapolations(self, probe: Probe | None) -> list[str]:
        """Warnings about steps of this probe whose loads exceed the loads in the profile's log; empty if `probe` is
        None."""
        return [] if probe is None else self._extrapolations[probe]

    def lengthening_remedy(self, probe: Probe) -> str:
        """The remedy to print if `probe` was too short: how to give a probe more requests."""
        return "raise --requests" if probe.num_requests >= self._wanted else "take a longer trace"

    def _print_probe(self, probe: Probe) -> None:
        self.found.add(probe)
        self._extrapolations[probe] = self.service.extrapolations()
        if not self._is_shown:
            return
        is_dense = probe.rate >= 1 / DENSE_GAP
        cells = (
            "" if probe.num_users is None else f"{probe.num_users:,}",
            "all at once" if is_dense else f"{probe.rate:,.3g}" if probe.rate < 100 else f"{probe.rate:,.0f}",
            str(probe.num_replicas),
            f"{100 * probe.share:.2f} %",
            time_text(probe.ttft_p99),
            time_text(probe.itl_p99),
            time_text(probe.longest_gap_p99),
            "yes" if probe.meets else "no",
        )
        self._print_cells(cells, "green" if probe.meets else "")

    def _print_cells(self, cells: tuple[str, ...], style: str) -> None:
        first = 0 if self.arriving.of_users else 1  # no column for users where there are none
        columns = list(zip(cells, _WIDTHS, strict=True))[first:]
        line = "  ".join(f"{cell:>{width}}" for cell, width in columns)
        self.console.print(Text(line.rstrip(), style=style))

    def notes(self, meets: Probe | None) -> list[str]:
        """Remarks to print below the result."""
        left_out = [self.arriving.about_left_out] if self.arriving.about_left_out else []
        return [self.service.about_times, *left_out, *self.extrapolations(meets)]

    def as_json(self, found: Capacity, answer: list[str], is_complete: bool) -> dict[str, Any]:
        """The search and its result as one JSON object."""
        return {
            **setting_as_json(self.service, self.arriving),
            "targets": {"ttft": self.targets.ttft, "itl": self.targets.itl, "share": self.share},
            "is_complete": is_complete,
            "answer": " ".join(answer),
            "meets": None if found.meets is None else asdict(found.meets),
            "misses": None if found.misses is None else asdict(found.misses),
            "probes": [asdict(probe) for probe in found.probes],
            "notes": self.notes(found.meets),
        }


# ---------------------------------------------------------------------- the answer in words


def _result_lines(found: Capacity, search: _Search, low: int, high: int, is_complete: bool) -> list[str]:
    if not found.probes:
        return ["Interrupted before the first probe."]
    lines = [] if is_complete else ["Interrupted: this is the bracket so far."]
    meets, misses = found.meets, found.misses
    last = found.probes[-1]
    if low < high:
        lines += _replica_result_lines(meets, misses, last, search, low, high)
    elif search.arriving.of_users:
        lines += _user_result_lines(meets, misses, last, search, high)
    elif meets is None:
        lines.append(
            f"Nothing meets the targets: even with one request each {SPARSE_GAP:,.0f} s, "
            f"{_figures_text(found.probes[0])}; {search.remedy_text(last)}."
        )
    elif misses is None:
        lines.append(
            f"Every rate meets the targets: all {last.num_requests:,} requests at once, {_figures_text(last)}; "
            f"{search.lengthening_remedy(last)}, or set a shorter target."
        )
    elif misses.rate >= 1 / DENSE_GAP:
        lines.append(f"At least {meets.rate:.3g} requests/s meet the targets; all at once do not.")
    else:
        lines.append(
            f"Capacity: {meets.rate:.4g} requests/s on {_replicas_text(high)} ({meets.rate:.4g} meet the targets, "
            f"{misses.rate:.4g} do not)."
        )
        lines.append(f"At {meets.rate:.4g} requests/s, {_figures_text(meets)}.")
    if misses is not None and _is_missed_by_gaps(misses, search.targets):
        lines.append(
            "The gaps miss their target: --itl-target holds for every gap of a request, the longest included. The ITL "
            f"p99 of all gaps together, which vllm bench prints, is {time_text(misses.itl_p99)} there. A long prompt "
            "in a step delays the next token of all others: a smaller --max-num-batched-tokens (here "
            f"{search.service.config.max_num_batched_tokens}) makes the longest gaps shorter."
        )
    if last.num_refused:
        lines.append(
            f"{last.num_refused:,} of {last.num_requests:,} requests can never run and count as misses; pointsman "
            "simulate names them."
        )
    if meets is not None and misses is not None and found.is_short(search.targets):
        span = (meets.num_requests - 1) / meets.rate
        lines.append(
            f"The requests of that probe arrive within {span:.0f} s, too short to show a slowly growing queue: "
            f"{search.lengthening_remedy(meets)} before you rely on it."
        )
    if search.arriving.num_left_out:
        lines.append(search.arriving.about_trace)
    return [*lines, *search.extrapolations(meets)]


def _is_missed_by_gaps(misses: Probe | None, targets: Targets) -> bool:
    """Whether the gaps between tokens, not the TTFT, are why the nearest probe misses the targets.

    If the p99 of gaps and of TTFT are both within the targets, the p99 that is nearer to its target is the reason.
    """
    if misses is None or targets.itl is None or misses.longest_gap_p99 is None or misses.ttft_p99 is None:
        return False
    gap, ttft = misses.longest_gap_p99 / targets.itl, misses.ttft_p99 / (targets.ttft or math.inf)
    return gap > ttft and ttft <= 1 and (gap > 1 or not misses.num_refused)


def _user_result_lines(meets: Probe | None, misses: Probe | None, last: Probe, search: _Search, high: int) -> list[str]:
    if meets is None:
        return [f"Nothing meets the targets: even with one user, {_figures_text(last)}; {search.remedy_text(last)}."]
    if misses is None:
        return [
            f"At least {meets.num_users:,} users meet the targets: {_figures_text(meets)}; "
            f"{search.lengthening_remedy(meets)} to test more users."
        ]
    return [
        f"Capacity: {meets.num_users:,} users on {_replicas_text(high)} ({meets.num_users:,} meet the targets, "
        f"{misses.num_users:,} do not).",
        f"They send {meets.rate:.4g} requests/s; {_figures_text(meets)}.",
    ]


def _replica_result_lines(
    meets: Probe | None, misses: Probe | None, last: Probe, search: _Search, low: int, high: int
) -> list[str]:
    if meets is None:
        return [
            f"Even {high} replicas miss the targets {_load_text(last)}: {_figures_text(last)}; give a range "
            f"with more of them, {search.remedy_text(last)}."
        ]
    if misses is None:
        return [
            f"{_replicas_text(meets.num_replicas)} {'is' if meets.num_replicas == 1 else 'are'} enough "
            f"{_load_text(meets)}, the fewest of {low} to {high}: {_figures_text(meets)}."
        ]
    return [
        f"{_replicas_text(meets.num_replicas)} meet the targets {_load_text(meets)}; {misses.num_replicas} "
        f"{'does' if misses.num_replicas == 1 else 'do'} not.",
        f"On {_replicas_text(meets.num_replicas)}, {_figures_text(meets)}; on {misses.num_replicas}, "
        f"{100 * misses.share:.2f} % meet them.",
    ]


def _load_text(probe: Probe) -> str:
    return f"at {probe.rate:.4g} requests/s" if probe.num_users is None else f"with {probe.num_users:,} users"


def _replicas_text(count: int) -> str:
    return f"{count} replica{'s' * (count > 1)}"


def _figures_text(probe: Probe) -> str:
    return (
        f"{100 * probe.share:.2f} % of the requests meet them, TTFT p99 is {time_text(probe.ttft_p99)}, ITL p99 "
        f"{time_text(probe.itl_p99)}, and 99 % have no gap longer than {time_text(probe.longest_gap_p99)}"
    )


def targets_text(targets: Targets) -> str:
    """The given targets as text."""
    limits = {
        "TTFT": targets.ttft,
        "every gap between two tokens": targets.itl,
        "end-to-end time": targets.e2e,
    }
    return ", ".join(f"{name} at most {time_text(limit)}" for name, limit in limits.items() if limit is not None)


def time_text(value: float | None) -> str:
    """A duration as text, in seconds or milliseconds with three digits; "-": there is no value, or it is infinite."""
    if value is None or math.isinf(value):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
