"""`pointsman tune`: finds the settings with the highest goodput, and prints them with the commands that use them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from pointsman.cli.capacity import DEFAULT_TARGETS, replica_range
from pointsman.cli.capacity_text import ITL_FIGURES, targets_text, time_text
from pointsman.cli.command_lines import serve_command, vllm_command
from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_NOTHING, EXIT_OK, CommandError, missing_library
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import print_setting, setting_as_json, stdout_console
from pointsman.cli.simulation import Arriving, Service, service_of_options, targets_of_options, workload_of_options
from pointsman.core import SchedulerConfig
from pointsman.core.errors import PointsmanError
from pointsman.sim.crossing import digits_text
from pointsman.sim.report.intervals import Estimate
from pointsman.sim.report.summary import Targets
from pointsman.sim.stretches import MIN_REQUESTS, Parts, Stretches, split
from pointsman.sim.trial import Score, itl_p99
from pointsman.sim.tunables import NAMES, REPLICAS, Space
from pointsman.sim.tune import MIN_GAIN, P99, Judged, Search, Trial, Tuning
from pointsman.sim.tune import tune as search_settings
from pointsman.sim.vllm_defaults import VLLM_VERSION
from pointsman.sim.workers import available_cores, workers

PRESET = "vllm"
"""Preset of all settings that are not searched: the decisions of vLLM's own scheduler. So a result is also a command
line for vLLM, if vLLM has the settings."""
_SMALL = 20_000
"""Number of simulated requests below which starting worker processes takes more time than they save."""
_MAX_ROWS = 12
_MAIN = {"max_num_batched_tokens": "budget", "max_num_seqs": "seqs", REPLICAS: "replicas"}
"""Settings with their own column in the table, and the column's title."""
_SERVED_AS = ("gpu_memory_utilization", "max_model_len", "block_size")
"""Options that the commands of both servers get if they were given to `tune`."""
_VLLM_RANKS = ("data_parallel_size", "enable_expert_parallel", "disable_hybrid_kv_cache_manager")
"""Options that only the command of `vllm serve` gets if they were given to `tune`."""
_SWAPPED_AS = ("kv_offload_bytes", "preemption_mode")
"""Options that only the command of `pointsman serve` gets if they were given to `tune`."""


def run_tune(
    options: Mapping[str, Any],
    *,
    replicas: str,
    num_trials: int,
    num_requests: int,
    workers: int | None,
    ray: str | None,
    preset: str | None,
    as_json: bool,
) -> int:
    """Search for the best settings, and print the result.

    Returns:
        The exit code: 0, 3 if the recommended settings miss the targets at the 99th percentile,
        or 130 after Ctrl-C, which prints the best settings so far.

    Raises:
        CommandError: an option, a file or the model is wrong.
    """
    try:
        import optuna  # noqa: F401  before time is spent
    except ModuleNotFoundError:
        raise CommandError(missing_library("tune", "optuna", "sim")) from None
    low, high = replica_range(replicas, options)
    targets = targets_of_options(options, "ttft_p99", "itl_p99", "e2e_p99")
    speed = options.get("rate", 1.0)
    if not 0 < speed < math.inf:
        raise CommandError(f"--rate is {speed}; it must be above 0, like 2 for twice the speed")
    for name, value, least in (
        ("--trials", num_trials, 1),
        ("--requests", num_requests, MIN_REQUESTS),
        ("--workers", workers, 1),
    ):
        if value is not None and value < least:
            raise CommandError(f"{name} is {value}; it must be at least {least}")
    service = service_of_options(options, preset or PRESET, as_vllm=True)
    arriving = workload_of_options(options, None if "trace" in options else 2 * num_requests)
    report = _Tuned(service, arriving, targets or DEFAULT_TARGETS, options, preset or PRESET, speed)
    try:
        report.split_workload(num_requests)
        space = Space(
            service.config,
            fixed=frozenset(options) & frozenset(NAMES),
            replicas=(low, high),
            varied=report.varied,
        )
        if workers is None and ray is None:
            is_small = num_trials * report.parts.num_requests < _SMALL
            workers = 1 if is_small else available_cores()
        if not as_json:
            report.print_search(low, high)
        with ProgressBar("tried", num_trials, noun="settings", figure="{task.fields[now]:.3g} requests/s") as bar:
            found = report.search(space, num_trials, workers or 0, ray, bar)
    except (PointsmanError, ValueError) as error:
        raise CommandError(str(error)) from None
    if as_json:
        print(json.dumps(report.as_json(found), allow_nan=False))
    else:
        report.print_result(found)
    if not found.is_complete:
        return EXIT_INTERRUPTED
    is_met = not found.meets_nothing and found.recommended is not None and found.recommended.meets_p99
    return EXIT_OK if is_met else EXIT_NOTHING


class _Tuned:
    """A search for settings, with the texts and tables that describe its result."""

    parts: Parts

    def __init__(
        self,
        service: Service,
        arriving: Arriving,
        targets: Targets,
        options: Mapping[str, Any],
        preset: str,
        speed: float,
    ) -> None:
        self._service, self._arriving, self._targets = service, arriving, targets
        self._options, self._preset, self._speed = options, preset, speed
        self._console = stdout_console()
        self.varied: frozenset[str] = frozenset()

    def split_workload(self, num_requests: int) -> None:
        """Split the workload into a training part and a held-out part.

        Raises:
            WorkloadError: the workload is too short, or all requests arrive at one time.
        """
        arrivals = list(self._arriving.at_speed(self._speed).first_arrivals())
        self.parts = split(arrivals, num_requests)
        fields = ("priority", "tenant", "retention")
        self.varied = frozenset(name for name in fields if len({getattr(request, name) for _, request in arrivals}) > 1)

    def search(self, space: Space, num_trials: int, num_workers: int, ray: str | None, bar: ProgressBar) -> Tuning:
        def progress(num_tried: int, expected: int, best: float) -> None:
            bar.expect(expected)
            bar.update(num_tried, best)

        seed = self._options.get("seed", 0)
        judge = self._service.judge(Stretches((*self.parts.train, *self.parts.held_out)), self._targets, seed)
        search = Search(
            space=space,
            parts=self.parts,
            targets=self._targets,
            sized=self._service.sized,
            num_models=len(judge.step_times),
            num_trials=num_trials,
            seed=seed,
            progress=progress,
        )
        with workers(judge, num_workers, ray) as runner:
            return search_settings(search, runner)

    # ------------------------------------------------------------------ in words

    def print_search(self, low: int, high: int) -> None:
        print_setting(self._service, self._arriving, low, self._speed, is_searched=True)
        self._print_line(self._service.about_times, "yellow")
        self._print_line(
            f"Goodput: requests a second with {targets_text(self._targets)}{', for each replica' if high > 1 else ''}."
        )
        self._print_line(f"{self._parts_text()}\n")

    def _parts_text(self) -> str:
        train, held_out = self.parts.train, self.parts.held_out
        count = sum(stretch.num_requests for stretch in train)
        rates = [
            sum(stretch.num_requests for stretch in part) / sum(stretch.seconds for stretch in part)
            for part in (train, held_out)
        ]
        where = f"{len(train)} stretches" if len(train) > 1 else "the first half"
        others = (
            f"the same number in the {len(held_out)} between them" if len(train) > 1 else "those in the second half"
        )
        return (
            f"Settings are chosen on {count:,} requests in {where} ({rates[0]:.3g} requests/s) and judged on {others} "
            f"({rates[1]:.3g} requests/s)."
        )

    def result_lines(self, found: Tuning) -> list[str]:
        """The result in sentences; the first one is the recommendation."""
        if not found.is_complete:
            if found.chosen is None:
                return ["Interrupted before the first settings were tried."]
            return [f"Interrupted after {len(found.trials)} settings: this is the best so far, not judged."]
        assert found.judged is not None and found.judged_defaults is not None
        kind = "defaults" if VLLM_VERSION in self._service.settings_of else "settings"
        defaults = f"the {kind} of {self._service.settings_of}"
        if found.meets_nothing:
            fastest = min((trial.train.ttft_p99 or math.inf for trial in found.trials), default=math.inf)
            gap = min((trial.train.longest_gap_p99 or math.inf for trial in found.trials), default=math.inf)
            return [
                f"Nothing meets the targets: no request does with any of {len(found.trials)} settings. The lowest TTFT "
                f"p99 of any is {time_text(fastest)}, the shortest longest gap p99 {time_text(gap)}: set longer "
                "targets, or take a lower rate, more replicas or a faster device."
            ]
        mine, theirs = _goodput_text(found.judged), _goodput_text(found.judged_defaults)
        missed = self._missed_lines(found)
        if not found.is_gain:
            best = "they are the best" if found.chosen is found.defaults else f"the best found has {mine}"
            return [
                f"No gain: {defaults} have a goodput of {theirs} on the held-out part, and {best}; a gain below "
                f"{100 * MIN_GAIN:.0f} %, or with an interval that contains 0, does not count.",
                *missed,
            ]
        gain = found.gain
        assert gain is not None
        if math.isinf(gain):
            return [f"Gain: a goodput of {mine} on the held-out part, where {defaults} have none.", *missed]
        return [
            f"Gain: a goodput of {mine} on the held-out part, {_gain_text(gain, found.gain_interval)} the {theirs} of "
            f"{defaults}.",
            *missed,
        ]

    def _missed_lines(self, found: Tuning) -> list[str]:
        """Whether the recommended settings miss the targets at the 99th percentile."""
        best = found.recommended
        if best is None or best.meets_p99:
            return []
        figures = best.held_out
        return [
            f"The targets are missed: {100 * figures.share:.1f} % are within them with these settings, not "
            f"{100 * P99:.0f} % (TTFT p99 {time_text(figures.ttft_p99)}, {ITL_FIGURES[self._targets.itl_of]} "
            f"{time_text(itl_p99(figures, self._targets))}). Take a lower rate, more replicas or a faster device; "
            "pointsman capacity finds the rate that meets them."
        ]

    def notes(self, found: Tuning) -> list[str]:
        """Remarks to print below the result."""
        notes = [self._service.about_times]
        notes += self._other_times_notes(found)
        if found.not_searched:
            notes.append(f"The KV pool is never short, so these have no effect: {', '.join(found.not_searched)}.")
        if found.seen is not None:
            notes += self._service.extrapolations(found.seen)
        judged = found.recommended
        if judged is not None and judged.held_out.num_refused:
            refused = judged.held_out
            notes.append(f"{refused.num_refused:,} of {refused.num_requests:,} held-out requests can never run.")
        if self._arriving.about_left_out:
            notes.append(self._arriving.about_left_out)
        return notes

    def _other_times_notes(self, found: Tuning) -> list[str]:
        """The goodput and the gain with other step times that are about as plausible."""
        best, gains = found.recommended, [gain for gain in found.other_gains if math.isfinite(gain)]
        if best is None or not best.alternatives or found.meets_nothing:
            return []
        goodputs = [best.goodput, *best.alternatives]
        text = (
            f"With {len(best.alternatives)} other plausible step times the goodput is {min(goodputs):.3g} to "
            f"{max(goodputs):.3g}/s"
        )
        if found.is_gain and gains:
            text += f", and the gain {100 * min(gains):.0f} to {100 * max(gains):.0f} %"
        return [f"{text}; the intervals do not contain this."]

    def print_result(self, found: Tuning) -> None:
        answer = self.result_lines(found)
        if found.chosen is None:
            self._print_line(answer[0], "bold")
            return
        self._console.print(self._comparison_table(found))
        self._print_line("")
        self._console.print(self._settings_table(found))
        self._print_line("")
        for line in answer:
            self._print_line(line, "bold")
        if not found.meets_nothing:
            self._print_line("")
            self._console.print(self._frontier_table(found))
            if found.neighbours:
                self._print_line("")
                self._console.print(self._neighbour_table(found))
        for note in self.notes(found)[1:]:
            self._print_line(f"\n{note}", "yellow")
        if found.recommended is not None and not found.meets_nothing:
            for line in self.commands(found.recommended.trial).values():
                print(f"\n{line}")

    def _comparison_table(self, found: Tuning) -> Table:
        table = _new_table("", "goodput, chosen on", "judged on", "in time", "TTFT p99", "ITL p99", "longest gap p99")
        rows = [(self._service.settings_of, found.defaults, found.judged_defaults)]
        if found.chosen is not found.defaults:
            rows.append(("best found", found.chosen, found.judged))
        for name, trial, judged in rows:
            assert trial is not None
            figures = trial.train if judged is None else judged.held_out
            table.add_row(
                name,
                _rate_text(trial.goodput),
                "-" if judged is None else _rate_text(judged.goodput),
                f"{100 * figures.share:.1f} %",
                *_time_texts(figures),
            )
        return table

    def _settings_table(self, found: Tuning) -> Table:
        defaults, chosen = found.defaults, found.chosen
        assert defaults is not None and chosen is not None
        table = _new_table("setting", self._service.settings_of, "best found")
        for name, value in chosen.settings.items():
            if name in _MAIN or value != defaults.settings[name]:
                table.add_row(name, _setting_text(defaults.settings[name]), _setting_text(value))
        return table

    def _frontier_table(self, found: Tuning) -> Table:
        titles = [_MAIN[name] for name in found.trials[0].settings if name in _MAIN]
        table = _new_table("Frontier", *titles, "goodput", "in time", "TTFT p99", "ITL p99")
        for trial in found.frontier()[:_MAX_ROWS]:
            main = [f"{value}" for name, value in trial.settings.items() if name in _MAIN]
            share = f"{100 * trial.train.share:.1f} %"
            table.add_row(
                _other_settings(trial, self._service.config),
                *main,
                _rate_text(trial.goodput),
                share,
                *_time_texts(trial.train)[:2],
            )
        return table

    def _neighbour_table(self, found: Tuning) -> Table:
        table = _new_table("One notch from the best", "goodput", "change", "TTFT p99", "ITL p99")
        best = found.chosen
        assert best is not None
        table.add_row("the best", _rate_text(best.goodput), "", *_time_texts(best.train)[:2])
        for name, trial in found.neighbours:
            value = f"{name} {_setting_text(trial.settings[name])}"
            if trial.is_hopeless:  # figures of a hopeless trial come from one stretch
                table.add_row(value, "-", "far less", "-", "-")
                continue
            change = f"{100 * (trial.goodput / best.goodput - 1):+.1f} %" if best.goodput else ""
            table.add_row(value, _rate_text(trial.goodput), change, *_time_texts(trial.train)[:2])
        return table

    def _print_line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))

    # ------------------------------------------------------------------ commands

    def commands(self, trial: Trial) -> dict[str, str]:
        """The command lines that serve with the settings of a trial, by program."""
        options, config, model = self._options, trial.config, self._service.model
        theirs = {name: options[name] for name in _SERVED_AS if name in options}
        ours = {name: options[name] for name in ("max_model_len", *_SWAPPED_AS) if name in options}
        if options.get("tensor_parallel", 1) > 1:
            theirs["tensor_parallel_size"] = options["tensor_parallel"]
        if config.num_draft_tokens:
            drafts = {"method": "METHOD", "num_speculative_tokens": config.num_draft_tokens}
            theirs["speculative_config"] = json.dumps(drafts)
            ours["num_draft_tokens"] = config.num_draft_tokens
        if config.max_loras:  # `pointsman serve` has no adapters
            theirs |= {"enable_lora": True, "max_loras": config.max_loras}
        theirs |= {name: options[name] for name in _VLLM_RANKS if name in options}
        return {
            "vllm": vllm_command(model, config, NAMES, theirs, self._preset),
            "pointsman": serve_command(model, config, NAMES, ours),
        }

    # ------------------------------------------------------------------ JSON

    def as_json(self, found: Tuning) -> dict[str, Any]:
        """The search and its result as one JSON object."""
        gain, recommended = found.gain, found.recommended
        return {
            **setting_as_json(self._service, self._arriving),
            "speed": self._speed,
            "targets": asdict(self._targets),
            "parts": {
                name: [{"num_requests": each.num_requests, "seconds": each.seconds} for each in part]
                for name, part in (("train", self.parts.train), ("held_out", self.parts.held_out))
            },
            "is_complete": found.is_complete,
            "answer": " ".join(self.result_lines(found)),
            "is_gain": found.is_gain,
            "gain": gain if gain is not None and math.isfinite(gain) else None,
            "gain_interval": asdict(found.gain_interval),
            "meets_p99": recommended is not None and recommended.meets_p99,
            "defaults_of": self._service.settings_of,
            "defaults": _trial_as_json(found.defaults, found.judged_defaults),
            "chosen": _trial_as_json(found.chosen, found.judged),
            "recommended": None if recommended is None else recommended.trial.settings,
            "commands": None if recommended is None else self.commands(recommended.trial),
            "frontier": [_trial_as_json(trial) for trial in found.frontier()],
            "neighbours": [{"setting": name, **(_trial_as_json(trial) or {})} for name, trial in found.neighbours],
            "not_searched": found.not_searched,
            "num_trials": len(found.trials),
            "notes": self.notes(found),
        }


def _trial_as_json(trial: Trial | None, judged: Judged | None = None) -> dict[str, Any] | None:
    if trial is None:
        return None
    found: dict[str, Any] = {
        "settings": trial.settings,
        "num_replicas": trial.num_replicas,
        "num_blocks": trial.config.num_blocks,
        "goodput": trial.goodput,
        "train": asdict(trial.train),
        "is_hopeless": trial.is_hopeless,
    }
    if judged is not None:
        found["held_out"] = {**asdict(judged.held_out), "goodput_per_replica": judged.goodput}
        found["goodput_interval"] = asdict(judged.interval)
        found["goodput_with_other_step_times"] = list(judged.alternatives)
    return found


# ---------------------------------------------------------------------- tables


def _new_table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, ratio=1)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _other_settings(trial: Trial, base: SchedulerConfig) -> str:
    """The settings of a trial that differ from `base` and have no column, as text."""
    return ", ".join(
        f"{name} {_setting_text(value)}"
        for name, value in trial.settings.items()
        if name not in _MAIN and value != getattr(base, name)
    )


def _setting_text(value: object) -> str:
    """The value of a setting as text; for several policies, their names."""
    return (" + ".join(value) or "none") if isinstance(value, tuple) else f"{value}"


def _time_texts(figures: Score) -> Sequence[str]:
    return tuple(time_text(value) for value in (figures.ttft_p99, figures.itl_p99, figures.longest_gap_p99))


def _goodput_text(judged: Judged) -> str:
    """The goodput on the held-out part, with its 95 % interval if it has one."""
    low, high = judged.interval.low, judged.interval.high
    if low is None or high is None:
        return _rate_text(judged.goodput)
    value, *ends = digits_text(judged.goodput, low, high)
    return f"{value}/s (95 %: {' to '.join(ends)})"


def _gain_text(gain: float, interval: Estimate) -> str:
    """The gain as text, with its 95 % interval if it has one."""
    if gain >= 1:
        return f"{1 + gain:.1f} times"
    if interval.low is None or interval.high is None:
        return f"{100 * gain:.1f} % more than"
    value, *ends = digits_text(100 * gain, 100 * interval.low, 100 * interval.high)
    return f"{value} % (95 %: {' to '.join(ends)}) more than"


def _rate_text(value: float) -> str:
    return f"{value:.4g}/s"
