"""Summaries of runs: JSON lines, each with the settings of a server, the arrivals of a run, and what a client measured.

    {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "prompt_tokens": 25000, "output_tokens": 32,
     "arrivals": [9.3, 11.4, ...], "avg_ttft": 1.8, "avg_tpot": 0.035, "avg_latency": 2.9, ...}

A line may also have `device`, `model`, `policy` (the scheduler's policy; without it "fcfs"), `phases` (a description of
the load), `seed`, `failed` (number of failed requests), `makespan`, and `p95_ttft`, `p95_tpot`, `p95_latency`. All
times are seconds. All prompts are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from typing import Any

from pointsman.files import MAX_LINE, MAX_MESSAGE, open_input, open_regular, shown
from pointsman.traces.lines import numbered_lines
from pointsman.traces.requests import TraceError, TraceRequest
from pointsman.traces.values import Broken, check_number, check_tokens, get_field, parse_json_object

FIGURES = ("ttft", "tpot", "latency")
"""Names of the measured figures of a run. Latency is the time from sending a request to its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run of a server, and the figures that a client measured."""

    requests: tuple[TraceRequest, ...]
    """Requests by arrival, in seconds of the run's own clock; their prompts share nothing."""
    max_num_batched_tokens: int
    max_num_seqs: int
    mean: dict[str, float]
    """Mean over the requests of each of `FIGURES`, in seconds; "tpot" is missing if outputs have one token."""
    p95: dict[str, float]
    """95th percentiles, as far as the line has them."""
    makespan: float | None = None
    """Seconds from the first request sent to the last token; None: unknown."""
    device: str = ""
    model: str = ""
    policy: str = "fcfs"
    """The scheduler's policy; "fcfs" is vLLM's default."""
    phases: str = ""
    """Description of the load, such as seconds:requests a second of each phase."""
    seed: int | None = None
    """Seed of the arrivals; None: unknown."""
    num_failed: int = 0


def read_run_summaries(path: str | PathLike[str]) -> list[RunSummary]:
    """The runs of a file, in its order.

    Raises:
        TraceError: a line is broken, or the file has no run.
        OSError: the file cannot be read.
    """
    runs = []
    try:
        with open_input(path) as file:
            for line_number, line in numbered_lines(file):
                try:
                    runs.append(_read_run(parse_json_object(line)))
                except Broken as error:
                    raise Broken(f"line {line_number}: {error}") from None
    except Broken as error:
        raise TraceError(f"{path}, {shown(str(error), MAX_MESSAGE)}") from None
    if not runs:
        raise TraceError(f"{path}: the file has no run; give JSON lines with arrivals, avg_ttft and avg_latency")
    return runs


def is_run_summaries(path: str | PathLike[str]) -> bool:
    """Whether the first line of a file is the summary of a run.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        head = BufferedReader(file).readline(MAX_LINE)
    try:
        values = parse_json_object(head.decode("utf-8-sig").strip())
    except (Broken, UnicodeDecodeError):
        return False
    return "arrivals" in values and "avg_ttft" in values


def _read_run(values: dict[str, Any]) -> RunSummary:
    arrivals = get_field(values, "arrivals")
    if not isinstance(arrivals, list) or not arrivals:
        raise Broken("arrivals must be a list of seconds, with at least one")
    times = [check_number("an arrival", each) for each in arrivals]
    if times != sorted(times):
        raise Broken("arrivals must be in order of time")
    prompts = _lengths(values, "prompt_tokens", len(times))
    outputs = _lengths(values, "output_tokens", len(times))
    return RunSummary(
        requests=tuple(
            TraceRequest(at, prompt, output, max_tokens=output)
            for at, prompt, output in zip(times, prompts, outputs, strict=True)
        ),
        max_num_batched_tokens=check_tokens("max_num_batched_tokens", get_field(values, "max_num_batched_tokens"), 1),
        max_num_seqs=check_tokens("max_num_seqs", values.get("max_num_seqs", 256), 1),
        mean=_figures(values, "avg", is_needed=True, has_gaps=max(outputs) > 1),
        p95=_figures(values, "p95", is_needed=False, has_gaps=max(outputs) > 1),
        makespan=None if values.get("makespan") is None else _seconds("makespan", values["makespan"]),
        device=str(values.get("device", "")),
        model=str(values.get("model", "")),
        policy=str(values.get("policy", "fcfs")),
        phases=str(values.get("phases", "")),
        seed=None if values.get("seed") is None else check_tokens("seed", values["seed"], 0),
        num_failed=check_tokens("failed", values.get("failed", 0), 0),
    )


def _lengths(values: dict[str, Any], name: str, count: int) -> list[int]:
    """The number of tokens of each request: a number for all, or a list."""
    value = get_field(values, name)
    each = value if isinstance(value, list) else [value] * count
    if len(each) != count:
        raise Broken(f"{name} has {len(each)} values for {count} arrivals; give one for all, or one for each")
    return [check_tokens(name, length, 1) for length in each]


def _figures(values: dict[str, Any], prefix: str, *, is_needed: bool, has_gaps: bool) -> dict[str, float]:
    found = {}
    for name in FIGURES:
        key = f"{prefix}_{name}"
        if name == "tpot" and not has_gaps:
            continue
        if is_needed or values.get(key) is not None:
            found[name] = _seconds(key, get_field(values, key))
    return found


def _seconds(name: str, value: object) -> float:
    seconds = check_number(name, value)
    if not seconds > 0:
        raise Broken(f"{name} is {seconds:g}; it must be a number of seconds above 0")
    return seconds
