"""The result of `pointsman capacity` in words and tables."""

from __future__ import annotations

import math

from pointsman.cli.simulation import Sampled, Service
from pointsman.sim.capacity import MAX_SIMULATED, SPARSE_GAP, Capacity, Measured, Question
from pointsman.sim.cost import POWER_NOTE, Cost
from pointsman.sim.crossing import Interval, digits_text
from pointsman.sim.neighbours import Neighbour, limiting_target
from pointsman.sim.report.summary import ItlOf, Targets
from pointsman.sim.trial import itl_p99

ITL_FIGURES: dict[ItlOf, str] = {"pooled": "ITL p99", "request": "TPOT p99", "gap": "longest gap p99"}
"""Name of the figure that a target on the ITL holds for."""
_FASTER = "set longer targets, or take a faster device"
_WIDE = 1.5
"""Ratio of the widths of two intervals from which the step times count as the main part of the wider one."""


# ---------------------------------------------------------------------- figures


def targets_text(targets: Targets) -> str:
    """The given targets as text."""
    of_itl = {
        "pooled": "ITL of all requests together",
        "request": "mean ITL of a request",
        "gap": "every gap between two tokens",
    }
    limits = {"TTFT": targets.ttft, of_itl[targets.itl_of]: targets.itl, "end-to-end time": targets.e2e}
    return ", ".join(f"{name} at most {time_text(limit)}" for name, limit in limits.items() if limit is not None)


def time_text(value: float | None) -> str:
    """A duration as text, in seconds or milliseconds with three digits; "-": there is no value, or it is infinite."""
    if value is None or math.isinf(value):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def interval_text(interval: Interval, confidence: float, unit: str = "") -> str:
    """A figure with its interval, as "15 requests/s (90 %: 13 to 17)"; whole numbers if it has no digits to lose."""
    value, low, high = interval.text()
    if (low, high) == (value, value):
        return f"{value}{unit}"
    return f"{value}{unit} ({100 * confidence:.3g} %: {low} to {high})"


def whole_text(interval: Interval, confidence: float, unit: str) -> str:
    """The same for a whole number, such as of users."""
    value, low, high = (f"{end:,.0f}" if math.isfinite(end) else "no limit" for end in interval.figures)
    unit = unit[:-1] if value == "1" else unit
    if (low, high) == (value, value):
        return f"{value}{unit}"
    return f"{value}{unit} ({100 * confidence:.3g} %: {low} to {high})"


def share_text(share: Interval) -> str:
    """A share with its interval, in percent."""
    value, low, high = digits_text(100 * share.value, 100 * share.low, 100 * share.high)
    return f"{value} % ({low} to {high})"


def load_text(measured: Measured, question: Question) -> str:
    """The load of a result, as text."""
    if question.unit == "rate" or (question.unit == "replicas" and measured.load == measured.rate):
        return f"{measured.load:,.3g} requests/s"
    return f"{measured.load:,.0f} users"


def _figures_text(at: Measured, targets: Targets) -> str:
    kind = ITL_FIGURES[targets.itl_of]
    of = "requests" if at.gaps_share is None or at.gaps_share > at.share.value else "gaps"
    ttft, itl = time_text(at.figures.ttft_p99), time_text(itl_p99(at.figures, targets))
    return f"{100 * at.share.value:.4g} % of the {of} are within the targets, TTFT p99 is {ttft} and {kind} {itl}"


# ---------------------------------------------------------------------- the answer


class Answer:
    """The result of one search, in sentences.

    Args:
        question, found: the search and its result.
        neighbour: the changed limit of a step; None: none was changed.
        before: the result without the change.
    """

    def __init__(
        self,
        service: Service,
        sampled: Sampled,
        question: Question,
        found: Capacity,
        neighbour: Neighbour | None = None,
        before: Capacity | None = None,
    ) -> None:
        self._service, self._sampled, self.question, self.found = service, sampled, question, found
        self.neighbour, self.before = neighbour, before

    @property
    def is_nothing(self) -> bool:
        """Whether nothing meets the targets."""
        interval = self.found.interval
        return interval is not None and interval.value == (math.inf if self.question.unit == "replicas" else 0)

    def short_text(self, interval: Interval | None = None) -> str:
        """The result as one phrase."""
        found, question = interval or self.found.interval, self.question
        if found is None:
            return "-"
        if question.unit == "rate":
            return interval_text(found, question.confidence, " requests/s")
        return whole_text(found, question.confidence, " users" if question.unit == "users" else " replicas")

    def lines(self) -> list[str]:
        """The result in sentences; the first one is the result itself."""
        found, question = self.found, self.question
        if found.interval is None:
            return ["Interrupted before the first estimate."]
        lines = [] if found.is_complete else ["Interrupted: this is the estimate so far."]
        if question.unit == "replicas":
            lines += self._replica_lines(found.interval)
        else:
            lines += self._load_lines(found.interval)
        lines += self._remedy_lines()
        lines += self._interval_lines(found.interval)
        refused = max((each.figures.num_refused for each in found.loads), default=0)
        if refused:
            count = found.num_samples * found.num_requests
            lines.append(
                f"{refused:,} of {count:,} requests can never run and count as misses; pointsman simulate names them."
            )
        if found.is_short and found.at is not None:
            span = found.num_requests / found.at.rate
            lines.append(
                f"The requests of a sample arrive within {span:.0f} s, too short to show a slowly growing queue: "
                f"{self._longer()} before you rely on it."
            )
        return lines

    def _load_lines(self, interval: Interval) -> list[str]:
        found, question = self.found, self.question
        first, last = found.loads[0], found.loads[-1]
        least = f"one request each {SPARSE_GAP:,.0f} s" if question.unit == "rate" else "one user"
        if interval.value == 0:
            may = ""
            if interval.high > 0:
                end = digits_text(*[interval.high] * 3)[0] if question.unit == "rate" else f"{interval.high:,.0f}"
                may = f" The interval of the result ends at {end}."
            load = least if self._is_least(first) else load_text(first, question)
            return [
                f"Nothing meets the targets: even with {load}, {_figures_text(first, question.targets)}; "
                f"{self._remedy(first)}.{may}"
            ]
        if interval.value == math.inf:
            load = load_text(last, question) if last.rate < 1e5 else "all at once"
            return [
                f"Every load meets the targets: with {load}, {_figures_text(last, question.targets)}; "
                f"{self._longer()}, or set a shorter target."
            ]
        on = f" on {_replicas_text(question.num_replicas)}"
        lines = [f"Capacity: {self.short_text()}{self.changed_text()}{on}."]
        if found.at is not None:
            sent = f"with {load_text(found.at, question)}, who send {found.at.rate:,.3g} requests/s"
            where = f"At {load_text(found.at, question)}" if question.unit == "rate" else sent.capitalize()
            lines.append(f"{where}, {_figures_text(found.at, question.targets)}.")
        if self.before is not None and self.neighbour is not None:
            before = self.before.interval
            assert before is not None
            base = self._service.config
            with_default = (
                f"With the default --{_dashed(self.neighbour.setting)} {getattr(base, self.neighbour.setting)}"
            )
            nothing = "nothing meets the targets" if before.value == 0 else f"it is {self.short_text(before)}"
            lines.append(f"{with_default} {nothing}.")
        return lines

    def _is_least(self, first: Measured) -> bool:
        question = self.question
        return first.load <= (question.num_replicas / SPARSE_GAP * 1.001 if question.unit == "rate" else 1)

    def _replica_lines(self, interval: Interval) -> list[str]:
        found, question = self.found, self.question
        wanted = f"{question.load:,.4g} {'users' if self._sampled.is_of_users else 'requests/s'}"
        by_count = sorted(found.loads, key=lambda each: each.num_replicas)
        if interval.value == math.inf:
            may = "" if interval.low == math.inf else f" By chance, {interval.low:.0f} may be enough."
            most = by_count[-1]
            return [
                f"Even {_replicas_text(question.num_replicas)} {_verb('miss', question.num_replicas)} the targets with "
                f"{wanted}: {_figures_text(most, question.targets)}; give a range with more of them, "
                f"{self._remedy(most)}.{may}"
            ]
        count = int(interval.value)
        fewest = ", the fewest of the range," if count == question.min_replicas and question.min_replicas > 1 else ""
        lines = [f"{self.short_text()}{fewest} {_verb('meet', count)} the targets with {wanted}."]
        at = next((each for each in by_count if each.num_replicas == count), None)
        if at is not None:
            lines.append(f"On {_replicas_text(count)}, {_figures_text(at, question.targets)}.")
        return lines

    def changed_text(self) -> str:
        """The option that was changed, as text; empty: none."""
        if self.neighbour is None:
            return ""
        return f" with --{_dashed(self.neighbour.setting)} {self.neighbour.value}"

    def _interval_lines(self, interval: Interval) -> list[str]:
        """How the interval was computed, and why it is wider than wanted."""
        found, question, sampling = self.found, self.question, self.found.sampling
        assert sampling is not None
        if not 0 < interval.value < math.inf:
            return []
        kind = "stretches of the trace" if self._sampled.about_trace else "samples, each with a seed of its own"
        if found.num_samples == 1:
            where = f"{found.num_groups} blocks of the whole trace"
        else:
            where = f"{found.num_samples} {kind}, {found.num_requests:,} requests each"
        models = len(found.alternatives)
        lines = [f"The interval is over {where}{f', and {models + 1} plausible step times' if models else ''}."]
        if models and _is_wider(interval, sampling):
            lines.append(
                f"From chance alone it is {' to '.join(self._end_text(sampling))}: most of it comes from the step "
                "times. Calibrate with a log to make it narrower."
            )
        if not found.is_narrow and found.is_complete:
            lines.append(
                f"Without the step times it is still wider than the {100 * question.within:.3g} % of --within: "
                f"{self._wider_reason()}."
            )
        return lines

    def _wider_reason(self) -> str:
        found, question = self.found, self.question
        available = question.samples.num_available
        if found.is_of_start:
            return f"samples that begin with a backlog differ from those that begin empty; {self._longer()}"
        if available is not None and found.num_samples * found.num_requests >= 0.5 * available:
            return "the trace has no more requests; take a longer one"
        if question.num_requests is not None:
            return "leave out --requests, so that samples are as long as needed"
        remedy = "" if question.max_simulated > MAX_SIMULATED else "; with --within the search goes on"
        return f"{question.max_simulated:,} requests for each replica were simulated, which is the limit{remedy}"

    def _end_text(self, interval: Interval) -> tuple[str, str]:
        if self.question.unit == "rate":
            return interval.text()[1:]
        return f"{interval.low:,.0f}", f"{interval.high:,.0f}"

    def _remedy_lines(self) -> list[str]:
        """What to change, if ITL limits the result."""
        found, question = self.found, self.question
        if self.neighbour is not None or limiting_target(found, question.targets) != "itl":
            return []
        config = question.config
        return [
            f"{ITL_FIGURES[question.targets.itl_of]} limits the result. A step has at most "
            f"{config.max_num_batched_tokens:,} tokens and {config.max_num_seqs:,} requests, and each of them waits "
            "for the whole step: a smaller --max-num-batched-tokens or --max-num-seqs may help."
        ]

    def _remedy(self, nearest: Measured) -> str:
        if nearest.figures.num_refused > (1 - self.question.share) * nearest.figures.num_requests:
            return "shorten the requests that can never run"
        return _FASTER

    def _longer(self) -> str:
        available = self.question.samples.num_available
        return "take a longer trace" if available is not None else "raise --requests"


def cost_lines(cost: Cost | None, currency: str = "") -> list[str]:
    """Price and power of a load, in sentences; empty: neither is known."""
    if cost is None:
        return []
    lines = []
    if cost.price_per_million_tokens is not None:
        parts = [f"{cost.price_per_million_tokens:.3g} per million tokens"]
        for name, value in (
            ("prompt", cost.price_per_million_prompt_tokens),
            ("output", cost.price_per_million_output_tokens),
        ):
            if value is not None:
                parts.append(f"{value:.3g} per million {name} tokens")
        lines.append(
            f"Price at the capacity: {parts[0]}"
            + (f"; divided by the time that each takes, {' and '.join(parts[1:])}." if parts[1:] else ".")
        )
    if cost.watts is not None and cost.joules_per_million_tokens is not None:
        lines.append(
            f"Power at the capacity: {cost.watts:,.0f} W, {cost.joules_per_million_tokens / 3.6e6:.3g} kWh per million "
            f"tokens. {POWER_NOTE}"
        )
    return lines


def _is_wider(whole: Interval, part: Interval) -> bool:
    width = whole.high - whole.low
    return width > _WIDE * (part.high - part.low)


def _replicas_text(count: int) -> str:
    return f"{count} replica{'s' * (count > 1)}"


def _verb(verb: str, count: int) -> str:
    return verb if count > 1 else f"{verb}{'es' if verb.endswith('s') else 's'}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")
