"""The display of a run: live on a terminal, plain lines in a pipe or a log, JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pointsman.cli.progress import Entry, Progress, Status

REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 1.0
_STYLES = {
    "decoding": "green",
    "prefill": "cyan",
    "waiting": "yellow",
    "preempted": "magenta",
    "expected": "dim",
    "stop": "dim",
    "length": "dim",
    "refused": "red",
    "error": "red",
    "abort": "red",
}
_URGENCY = {"decoding": 0, "prefill": 0, "preempted": 1, "waiting": 2}


class Display(Protocol):
    """Shows a run. A context manager, because the terminal must be restored."""

    shows_progress: bool
    """Whether the display shows progress; if not, lines of statistics go to the log."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def refresh(self, progress: Progress, now: float) -> None:
        """Redraw the display, at limited frequency. Called after every step."""

    def ended(self, entry: Entry) -> None:
        """Show a request that has finished or was refused."""

    def summary(self, summary: dict[str, Any]) -> None:
        """Show the summary of the run. Called after the end of the context."""


def choose_display(*, as_json: bool, texts: bool) -> Display:
    """The display for standard output; `texts`: whether to show the texts of prompts and outputs."""
    if as_json:
        return JsonDisplay()
    console = Console(highlight=False)
    return LiveDisplay(console, texts=texts) if console.is_terminal else PlainDisplay(texts=texts)


class JsonDisplay:
    """Prints one JSON line for each finished request and one for the summary."""

    shows_progress = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()

    def refresh(self, progress: Progress, now: float) -> None:
        pass

    def ended(self, entry: Entry) -> None:
        self._write(entry.record())

    def summary(self, summary: dict[str, Any]) -> None:
        self._write(summary)

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line, ensure_ascii=False), flush=True)


class PlainDisplay:
    """Prints a status line per second and a line for each finished request."""

    shows_progress = True

    def __init__(self, *, texts: bool) -> None:
        self._texts = texts
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.stdout.flush()

    def refresh(self, progress: Progress, now: float) -> None:
        if now >= self._next:
            self._next = now + PLAIN_SECONDS
            status = progress.status(now)
            print(f"[{status.seconds:6.1f} s] {_status_text(status)}", flush=True)

    def ended(self, entry: Entry) -> None:
        if entry.end == "refused":
            return  # the caller reports it on stderr, or counts it
        answer = f": {one_line(entry.prompt)} ▸ {one_line(entry.text)}" if self._texts else ""
        print(f"{one_line(entry.request_id)} {_end_text(entry)}{answer}", flush=True)

    def summary(self, summary: dict[str, Any]) -> None:
        print("\n".join(summary_lines(summary)), flush=True)


class LiveDisplay:
    """Shows a table that is redrawn: the scheduler's current state, and every request's text as it grows."""

    shows_progress = True

    def __init__(self, console: Console, *, texts: bool) -> None:
        self._console = console
        self._texts = texts
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def refresh(self, progress: Progress, now: float) -> None:
        if now >= self._next:
            self._next = now + REFRESH_SECONDS
            self._live.update(Group(*self._frame(progress, now)), refresh=True)

    def ended(self, entry: Entry) -> None:
        if entry.end == "refused" or not self._texts:
            return
        # Printed above the table, so that complete texts stay in the terminal's history.
        answer = Text.assemble(
            (f"{one_line(entry.request_id)} ({_end_text(entry)})\n", "dim"),
            (printable(entry.prompt), "bold"),
            printable(entry.text),
        )
        self._live.console.print(answer, end="\n\n", soft_wrap=True)

    def summary(self, summary: dict[str, Any]) -> None:
        self._console.print("\n".join(summary_lines(summary)), markup=False)

    def _frame(self, progress: Progress, now: float) -> Sequence[Text | Table]:
        status = progress.status(now)
        figures = Text(_status_text(status), style="bold", no_wrap=True, overflow="ellipsis")
        table = Table(box=None, pad_edge=False, expand=True, show_header=True, header_style="dim")
        for name, width in (("request", 12), ("state", 20), ("tokens", 11)):
            table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
        table.add_column("text" if self._texts else "", ratio=1, no_wrap=True, overflow="ellipsis")
        width = max(self._console.width - 50, 10)
        for entry in self._shown(progress):
            state = entry.state()
            table.add_row(  # Text throughout: in a plain string, rich would take "[...]" for markup
                Text(one_line(entry.request_id)),
                Text(_state_with_reason(progress, entry, state), style=_STYLES.get(state, "")),
                Text(_computed_tokens_text(entry)),
                Text(tail(entry.prompt + entry.text, width) if self._texts else ""),
            )
        return [figures, _pool_bar(status, self._console.width), table]

    def _shown(self, progress: Progress) -> list[Entry]:
        """The unfinished requests that fit the terminal, running ones first."""
        entries = progress.unfinished()
        num_shown = max(self._console.height - 5, 3)
        if len(entries) > num_shown:
            entries.sort(key=lambda entry: _URGENCY.get(entry.state(), 3))  # stable: otherwise by arrival
        return entries[:num_shown]


def printable(text: str) -> str:
    """`text` without control characters: a model may generate any character, and a terminal interprets control
    characters."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def one_line(text: str) -> str:
    """`text` with each run of blank space as one space."""
    return printable(" ".join(text.split()))


def tail(text: str, width: int) -> str:
    """The end of `text`, at most `width` characters of it, on one line."""
    line = one_line(text[-8 * width :])
    return line if len(line) <= width else "…" + line[len(line) - width + 1 :]


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary as text."""
    ends = ", ".join(f"{count} {reason}" for reason, count in summary["finished"].items() if count) or "none ended"
    queries = summary["prefix_queries"]
    hits = f"{summary['prefix_hits'] / queries:.0%} of the prompt tokens" if queries else "nothing looked up"
    first, latency = summary["time_to_first_token"], summary["latency"]
    lines = ["interrupted; until then:"] if summary["interrupted"] else []
    lines += [
        f"requests     {summary['requests']}: {ends}",
        *([f"trace        {summary['left_out']}"] if summary["left_out"] else []),
        f"tokens       {summary['prompt_tokens']} in prompts, {summary['generated_tokens']} generated in "
        f"{summary['seconds']:.1f} s, {summary['tokens_per_second']:.0f} a second, in {summary['steps']} steps",
        f"KV cache     {summary['num_blocks']} blocks, at most {summary['peak_kv_usage']:.0%} in use; "
        f"{summary['preemptions']} preemptions, {summary['recomputed_tokens']} tokens computed again",
        f"prefix hits  {hits}",
    ]
    if first["p50"] is not None:
        lines.append(f"first token  after {first['p50']:.2f} s (median), {first['p99']:.2f} s (99th percentile)")
    if latency["p50"] is not None:
        lines.append(f"whole answer after {latency['p50']:.2f} s (median), {latency['p99']:.2f} s (99th percentile)")
    if summary["deferrals"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in summary["deferrals"].items())
        lines.append(f"head waited  in steps, by reason: {reasons}")
    return lines


def _status_text(status: Status) -> str:
    expected = f"expected {status.expected}  " if status.expected else ""
    return (
        f"running {status.running}  waiting {status.waiting}  {expected}ended {status.ended}  "
        f"KV {status.kv_usage:4.0%}  {status.tokens_per_second:.0f} tokens/s  "
        f"preemptions {status.preemptions}  prefix hits {status.hit_rate:.0%}"
    )


def _pool_bar(status: Status, width: int) -> Text:
    """The share of the pool that requests hold, as a bar."""
    label = f" {status.used_blocks}/{status.num_blocks} blocks"
    cells = max(width - len(label), 1)
    filled = round(status.kv_usage * cells)
    return Text.assemble(("█" * filled, "green"), ("░" * (cells - filled), "dim"), (label, "dim"))


def _state_with_reason(progress: Progress, entry: Entry, state: str) -> str:
    """The request's state and, if it waits, the reason."""
    if state not in ("waiting", "preempted"):
        return state
    reason = progress.engine.scheduler.explain(entry.request_id).reason
    return f"{state}: {reason.value}" if reason else state


def _computed_tokens_text(entry: Entry) -> str:
    request = entry.request
    return f"{request.num_computed_tokens}/{request.num_tokens}" if request else ""


def _end_text(entry: Entry) -> str:
    detail = f" ({one_line(entry.detail)})" if entry.detail else ""
    times = 0 if entry.request is None else entry.request.num_preemptions
    preempted = f", preempted {times} time{'s' * (times > 1)}" if times else ""
    return f"{entry.end}{detail}, {entry.num_output_tokens} tokens{preempted}"
