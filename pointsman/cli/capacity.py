"""`pointsman capacity`: finds the number of requests a second, users or replicas within the targets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.cli.capacity_text import (
    ITL_FIGURES,
    Answer,
    cost_lines,
    share_text,
    targets_text,
    time_text,
)
from pointsman.cli.durations import share as parse_share
from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_NOTHING, EXIT_OK, CommandError
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import print_setting, setting_as_json, stdout_console
from pointsman.cli.simulation import (
    Sampled,
    Service,
    check_routing,
    device_names,
    device_prices,
    samples_of_options,
    service_of_options,
    targets_of_options,
)
from pointsman.sim.capacity import DENSE_GAP, MAX_SIMULATED, Capacity, Measured, Question, find_capacity
from pointsman.sim.cost import Cost
from pointsman.sim.crossing import Interval
from pointsman.sim.errors import SimulationError
from pointsman.sim.neighbours import BUDGET, SEQUENCES, best_neighbour, short_search
from pointsman.sim.report.summary import Targets
from pointsman.sim.trial import itl_p99
from pointsman.sim.workers import Runner, available_cores, workers

DEFAULT_TARGETS = Targets(ttft=2.0)
_SMALL = 500
"""Requests of a sample below which starting worker processes takes more time than they save."""
_MAX_EXCESS = 9.99
"""Largest distance of an interval's ends that the progress shows."""
WITHIN = "10%"
"""Wanted distance of each end of the interval from the result, where none is given."""
MAX_ASKED = 1_000_000
"""Maximum number of simulated requests, for each replica, where `--within` is given."""
_COLUMNS = ("users", "requests/s", "replicas", "samples", "within targets", "TTFT p99", "", "")
_WIDTHS = (7, 10, 8, 7, 22, 9, 15, 3)


def run_capacity(
    options: Mapping[str, Any],
    *,
    replicas: str,
    share: float,
    rate: float | None,
    num_requests: int | None,
    max_samples: int,
    confidence: str,
    within: str | None,
    num_workers: int | None,
    prices: str | None,
    preset: str | None,
    as_json: bool,
) -> int:
    """Search for the capacity of each device; print each load and the result.

    Args:
        prices: price per hour of a replica on each device, as text.

    Returns:
        The exit code: 0, 3 if nothing meets the targets, or 130 after Ctrl-C, which prints the result so far.

    Raises:
        CommandError: an option, a file or the model is wrong.
    """
    low, high = replica_range(replicas, options)
    targets = targets_of_options(options, "ttft_target", "itl_target") or DEFAULT_TARGETS
    users = options.get("users")
    finds_num_users = users is not None or ("think" in options and "sessions" not in options)
    _check_loads(options, low, high, rate, finds_num_users)
    if not 0 < share < 1:
        raise CommandError(f"--share is {share}; it must be above 0 and below 1, like 0.99")
    if num_requests is not None and num_requests < 20:
        raise CommandError(
            f"--requests is {num_requests}; a sample needs at least 20, and thousands for a reliable result"
        )
    if max_samples < 2:
        raise CommandError(f"--samples is {max_samples}; it must be at least 2, for an interval")
    if num_workers is not None and num_workers < 1:
        raise CommandError(f"--workers is {num_workers}; it must be at least 1")
    certain, near = parse_share("confidence", confidence), parse_share("within", within or WITHIN)
    if certain >= 1:
        raise CommandError(f"--confidence is {confidence}; it must be below 100%")
    devices = device_names(options)
    priced = device_prices(prices, len(devices))
    services = [
        service_of_options(options if name is None else {**options, "device": name}, preset) for name in devices
    ]
    sampled = samples_of_options(options, num_requests, finds_num_users=finds_num_users)
    if low < high and users is None and rate is None and not math.isfinite(sampled.rate):
        raise CommandError("a range of --replicas needs the number of requests a second; give --requests-per-second")
    is_range = low < high
    free: Collection[str] = () if preset is not None or "profile" in options else {BUDGET, SEQUENCES} - options.keys()
    question = Question(
        samples=sampled.samples,
        config=services[0].config,
        targets=targets,
        unit="replicas" if is_range else "users" if finds_num_users else "rate",
        num_replicas=high,
        min_replicas=low if is_range else 1,
        load=float(users or rate or sampled.rate) if is_range else 0.0,
        share=share,
        num_requests=sampled.num_requests,
        max_samples=max_samples,
        is_watched="profile" in options,
        confidence=certain,
        within=near,
        max_simulated=MAX_SIMULATED if within is None else MAX_ASKED,
    )
    console = stdout_console()
    if num_workers is None:
        is_small = sampled.num_requests is not None and sampled.num_requests < _SMALL
        num_workers = 1 if is_small else available_cores()
    searches: list[_Search] = []
    for service, price in zip(services, priced, strict=True):
        search = _Search(
            service, sampled, replace(question, config=service.config), free, price, options.get("seed", 0), console
        )
        searches.append(search)
        if not as_json:
            search.print_heading()
        try:
            search.run(num_workers)
        except SimulationError as error:
            raise CommandError(str(error)) from None
        if not as_json:
            if len(services) == 1:
                search.print_loads()
            search.print_answer()
        if not search.is_complete:
            break
    if as_json:
        found = [search.as_json() for search in searches]
        print(json.dumps({**found[0], **({"devices": found} if len(services) > 1 else {})}, allow_nan=False))
    elif len(searches) > 1:
        console.print(_device_table(searches))
    if not all(search.is_complete for search in searches):
        return EXIT_INTERRUPTED
    return EXIT_NOTHING if all(search.answer.is_nothing for search in searches) else EXIT_OK


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


def _check_loads(options: Mapping[str, Any], low: int, high: int, rate: float | None, finds_num_users: bool) -> None:
    users = options.get("users")
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


@dataclass(slots=True)
class _Search:
    """The search on one device, and its result."""

    service: Service
    sampled: Sampled
    question: Question
    free: Collection[str]
    """Limits of a step that may be changed."""
    price: float | None
    seed: int
    console: Console
    answer: Answer

    def __init__(
        self,
        service: Service,
        sampled: Sampled,
        question: Question,
        free: Collection[str],
        price: float | None,
        seed: int,
        console: Console,
    ) -> None:
        self.service, self.sampled, self.free, self.price, self.seed = service, sampled, free, price, seed
        self.console = console
        self.question = replace(question, num_models=1 + len(service.alternatives))
        self.answer = Answer(service, sampled, self.question, Capacity())

    @property
    def is_complete(self) -> bool:
        return self.answer.found.is_complete

    def run(self, num_workers: int) -> None:
        """Search; then with another limit of a step, if the given one is why the targets are missed.

        Raises:
            SimulationError: no request can ever run, or a worker died.
        """
        judge = self.service.judge(self.sampled.samples, self.question.targets, self.seed)
        figure = "the ends of the interval within {task.fields[now]:.0%} so far"
        with (
            ProgressBar("simulated", None, figure=figure) as bar,
            workers(judge, num_workers) as runner,
        ):
            question = replace(
                self.question, progress=lambda number, excess: bar.update(number, min(excess, _MAX_EXCESS))
            )
            if self.free and self._try_neighbours(question, runner):
                return
            found = find_capacity(question, runner)
            if not found.is_complete and found.interval is None:
                self.answer.found.is_complete = False  # the short search, if there was one
                return
            self.answer = Answer(self.service, self.sampled, self.question, found)

    def _try_neighbours(self, question: Question, runner: Runner) -> bool:
        """Whether another limit is better, or the search was interrupted: the answer is then known. The given limits
        are searched shortly first, as their result only decides which of them is searched at length."""
        rough = find_capacity(short_search(question), runner)
        self.answer = Answer(self.service, self.sampled, self.question, rough)
        if not rough.is_complete:
            return True
        try:
            changed = best_neighbour(question, rough, runner, self.free, self.service.sized)
        except KeyboardInterrupt:
            rough.is_complete = False
            return True
        if changed is None:
            return False
        found = find_capacity(replace(question, config=changed.config), runner)
        assert rough.interval is not None
        if found.interval is not None and found.interval.value > rough.interval.value:
            better = replace(self.question, config=changed.config)
            self.answer = Answer(self.service, self.sampled, better, found, changed, rough)
            return True
        rough.is_complete = found.is_complete
        return not found.is_complete

    # ------------------------------------------------------------------ cost

    def cost(self) -> Cost | None:
        """Price and energy at the capacity; None: no load meets the targets, or neither is known."""
        at, interval, question = self.answer.found.at, self.answer.found.interval, self.question
        device = self.service.device
        has_figure = self.price is not None or (device is not None and device.board_watts > 0)
        if at is None or interval is None or not 0 < interval.value < math.inf or not has_figure:
            return None
        # The figures are of the nearest simulated load; the tokens of the capacity itself are in proportion to it.
        factor = interval.value / at.load if question.unit != "replicas" else 1.0
        count = int(interval.value) if question.unit == "replicas" else question.num_replicas
        rate = max(1e-9, at.rate)
        return self.service.cost(
            rate=rate * factor,
            prompt_tokens_per_second=at.prompt_tokens_per_second * factor,
            output_tokens_per_second=at.output_tokens_per_second * factor,
            busy=at.busy * factor * (at.num_replicas / count),
            num_running=rate * (at.e2e_mean or 0.0),
            num_replicas=count,
            price_per_hour=self.price,
            config=self.answer.question.config,
        )

    # ------------------------------------------------------------------ in words

    def print_heading(self) -> None:
        """Print the service, the workload and the targets."""
        question = self.question
        print_setting(self.service, self.sampled, 1)
        self.console.print(Text(self.service.about_times, style="yellow"))
        of_gaps = "; of the gaps, for the ITL" if question.targets.pooled_itl is not None else ""
        share = f"at least {100 * question.share:.6g} % of the requests{of_gaps}"
        self.console.print(f"Targets: {targets_text(question.targets)}, for {share}.")
        about = f"{self.sampled.about_trace} {self.sampled.about_left_out}".strip()
        self.console.print(f"{about}\n" if about else "")

    def print_loads(self) -> None:
        """Print a row for each load with the samples of the result."""
        question = self.answer.question
        if not self.answer.found.loads:
            return
        self._print_cells([*_COLUMNS[:6], ITL_FIGURES[question.targets.itl_of], _COLUMNS[7]], "bold")
        for measured in self.answer.found.loads:
            is_dense = measured.rate >= 1 / DENSE_GAP
            rate = measured.rate if self.sampled.is_of_users else measured.load
            cells = [
                f"{measured.load:,.0f}" if self.sampled.is_of_users else "",
                "all at once" if is_dense else f"{rate:,.3g}" if rate < 100 else f"{rate:,.0f}",
                str(measured.num_replicas),
                str(measured.num_samples),
                share_text(measured.share),
                time_text(measured.figures.ttft_p99),
                time_text(itl_p99(measured.figures, question.targets)),
                "yes" if measured.meets else "no",
            ]
            self._print_cells(cells, "green" if measured.meets else "")

    def _print_cells(self, cells: list[str], style: str) -> None:
        first = 0 if self.sampled.is_of_users else 1  # no column for users where there are none
        columns = list(zip(cells, _WIDTHS, strict=True))[first:]
        self.console.print(Text("  ".join(f"{cell:>{width}}" for cell, width in columns).rstrip(), style=style))

    def print_answer(self) -> None:
        """Print the result in sentences."""
        self.console.print()
        for place, line in enumerate(self.lines()):
            self.console.print(Text(line, style="" if place else "bold"))
        self.console.print()

    def lines(self) -> list[str]:
        """The result, its cost and warnings, in sentences."""
        return [*self.answer.lines(), *cost_lines(self.cost()), *self.extrapolations()]

    def extrapolations(self) -> list[str]:
        """Warnings about loads of steps that the profile's log does not have, at the highest load within the
        targets."""
        at = self.answer.found.at
        return [] if at is None or at.seen is None else self.service.extrapolations(at.seen)

    # ------------------------------------------------------------------ JSON

    def as_json(self) -> dict[str, Any]:
        """The search and its result as one JSON object."""
        answer, question, found = self.answer, self.question, self.answer.found
        cost, targets = self.cost(), self.question.targets
        notes = [self.service.about_times, self.sampled.about_left_out, *self.extrapolations()]
        changed = None
        if answer.neighbour is not None and answer.before is not None:
            before = _interval_json(answer.before.interval)
            changed = {"setting": answer.neighbour.setting, "value": answer.neighbour.value, "capacity_before": before}
        return {
            **setting_as_json(self.service, self.sampled),
            "targets": {**asdict(targets), "share": question.share},
            "is_complete": self.is_complete,
            "answer": " ".join(answer.lines()),
            "unit": question.unit,
            "confidence": question.confidence,
            "within": question.within,
            "capacity": _interval_json(found.interval),
            "capacity_of_best_step_times": _interval_json(found.sampling),
            "alternatives": [_finite(value) for value in found.alternatives],
            "changed": changed,
            "is_narrow": found.is_narrow,
            "is_short": found.is_short,
            "num_samples": found.num_samples,
            "num_requests": found.num_requests,
            "num_simulated": found.num_simulated,
            "at": _measured_json(found.at),
            "beyond": _measured_json(found.beyond),
            "loads": [_measured_json(each) for each in found.loads],
            "cost": None if cost is None else asdict(cost),
            "notes": [note for note in notes if note],
        }


def _finite(value: float) -> float | None:
    """The value; None, which stands for no limit, if it is infinite."""
    return value if math.isfinite(value) else None


def _interval_json(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else {name: _finite(end) for name, end in asdict(interval).items()}


def _measured_json(measured: Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    values = asdict(replace(measured, seen=None))
    del values["seen"]
    return {name: _finite(value) if isinstance(value, float) else value for name, value in values.items()}


def _device_table(searches: list[_Search]) -> Table:
    """The devices side by side."""
    first = searches[0]
    columns = ["capacity", "TTFT p99", ITL_FIGURES[first.question.targets.itl_of]]
    costs = [search.cost() for search in searches]
    has_price = any(cost is not None and cost.price_per_million_tokens is not None for cost in costs)
    has_power = any(cost is not None and cost.watts is not None for cost in costs)
    columns += ["price / M tokens", "prompt", "output"] * has_price + ["W", "kWh / M tokens"] * has_power
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for search, cost in zip(searches, costs, strict=True):
        at = search.answer.found.at
        prices = (
            ()
            if cost is None
            else (
                cost.price_per_million_tokens,
                cost.price_per_million_prompt_tokens,
                cost.price_per_million_output_tokens,
            )
        )
        energy = None if cost is None or cost.joules_per_million_tokens is None else cost.joules_per_million_tokens
        cells = [
            search.service.title.split(" on ")[-1],
            search.answer.short_text() + search.answer.changed_text(),
            "-" if at is None else time_text(at.figures.ttft_p99),
            "-" if at is None else time_text(itl_p99(at.figures, search.question.targets)),
        ]
        if has_price:
            cells += [_number(price) for price in prices] or ["-"] * 3
        if has_power:
            cells += [
                _number(None if cost is None else cost.watts),
                _number(None if energy is None else energy / 3.6e6),
            ]
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
