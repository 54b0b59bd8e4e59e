"""What the command line asks a scheduler that runs inside vLLM, and how it shows the answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.cli.errors import EXIT_FAILED, EXIT_OK, CommandError
from pointsman.integrations.vllm.client import Connection, ControlUnavailable, Refused, connect

COLUMNS = ("request", "state", "place", "age", "prompt", "output", "computed", "blocks", "preempted", "why it waits")
ROUNDED = ("waiting_for", "age")


def explain(socket: str, name: str | None, limit: int, *, as_json: bool) -> int:
    """Show where requests stand: those that are called `name`, or as vLLM calls parts of it; None: the oldest."""
    with _asking(socket) as connection:
        answer = connection.ask("explain", id=name, limit=limit)
    requests = answer["requests"]
    if as_json:
        for request in requests:
            print(json.dumps(request))
    elif name is not None and len(requests) == 1:
        _show_one(requests[0])
    else:
        _show_table(answer, limit if name is None else None)
    return EXIT_OK


def metrics(socket: str) -> int:
    """Print the metrics, as Prometheus reads them."""
    from pointsman.integrations.vllm.exposition import render

    with _asking(socket) as connection:
        answer = connection.ask("metrics")
    try:
        print(render(answer), end="")
    except ValueError as error:
        raise CommandError(str(error), EXIT_FAILED) from None
    return EXIT_OK


def record(socket: str, path: str, seconds: float | None) -> int:
    """Have a recording written to a file, until so many seconds of it are over, or Ctrl-C."""
    if seconds is not None and not seconds > 0:
        raise CommandError(f"--seconds is {seconds:g}; it must be more than 0")
    with _asking(socket) as connection, _written(path) as descriptor:
        answer = connection.ask("record", file=descriptor)
        try:
            if answer["state"] == "waiting":
                _say(
                    f"waiting for a moment without requests ({answer['num_running']} run and {answer['num_waiting']} "
                    "wait now), because a recording begins with one; Ctrl-C gives up"
                )
                answer = connection.next_line()
            _say("recording; the prefix cache was emptied for it. Ctrl-C ends it")
            done = connection.wait_for_line(seconds)
        except KeyboardInterrupt:
            done = None
        if done is None:
            connection.say_no_more()
            done = connection.next_line()
            while done["state"] == "recording":  # it has just begun
                done = connection.next_line()
    if done["state"] == "cancelled":
        Path(path).unlink(missing_ok=True)
        raise CommandError("there was no moment without requests, so nothing was recorded", EXIT_FAILED)
    _say(f"{done['num_steps']} steps in {path}, {done['num_bytes']} bytes: pointsman replay {path}")
    if done["ended_by"]:
        raise CommandError(f"the recording ended early: {done['ended_by']}", EXIT_FAILED)
    return EXIT_OK


@contextmanager
def _asking(socket: str) -> Iterator[Connection]:
    try:
        with connect(socket) as connection:
            yield connection
    except (ControlUnavailable, Refused) as error:
        raise CommandError(str(error), EXIT_FAILED) from None


@contextmanager
def _written(path: str) -> Iterator[int]:
    """A new file that its owner alone may read, because it will hold prompts."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise CommandError(f"cannot write the recording {path}: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"pointsman: {text}", file=sys.stderr)


# ---------------------------------------------------------------------- how requests are shown


def _show_table(answer: Mapping[str, Any], limit: int | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        right = column in ("place", "age", "prompt", "output", "computed", "blocks", "preempted")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for request in answer["requests"]:
        table.add_row(*(Text(cell) for cell in _row(request)))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    counts = answer["counts"]
    console.print(f"{counts['running']} running, {counts['waiting']} waiting, {counts['parked']} parked")
    if answer["requests"]:
        console.print(table)
    if limit is not None and len(answer["requests"]) == limit < sum(counts.values()):
        console.print(f"only the {limit} oldest are shown; --limit shows more")


def _row(request: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        request["id"],
        request["state"],
        "" if request["position"] is None else str(request["position"] + 1),
        _duration(request["age"]),
        str(request["num_prompt_tokens"]),
        f"{request['num_output_tokens']}/{request['max_tokens']}",
        str(request["num_computed_tokens"]),
        str(request["num_blocks"]),
        str(request["num_preemptions"]),
        _why(request),
    )


def _why(request: Mapping[str, Any]) -> str:
    if request["reason"] is None:
        return ""
    lacks = f", {request['missing']} more {request['resource']}" if request["missing"] and request["resource"] else ""
    waiting = f" for {_duration(request['waiting_for'])}" if request["waiting_for"] is not None else ""
    return f"{request['reason']}{waiting}{lacks}"


def _show_one(request: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(request["explanation"], style="bold"))
    facts = {key: value for key, value in request.items() if key not in ("explanation", "holders", "num_holders")}
    width = max(map(len, facts))
    for key, value in facts.items():
        if value is not None:
            shown = _duration(value) if key in ROUNDED else str(value)
            console.print(Text(f"{key:{width}}  {shown}"))
    for holder in request["holders"]:
        what = f" of adapter {holder['what']}" if holder["what"] else f" {request['resource'] or ''}".rstrip()
        amount = f": {holder['amount']}{what}" if holder["amount"] else ""
        console.print(Text(f"{'held by':{width}}  {holder['id']}{amount}"))
    if request["num_holders"] > len(request["holders"]):
        console.print(f"{'':{width}}  and {request['num_holders'] - len(request['holders'])} more")


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{left:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
