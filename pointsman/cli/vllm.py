"""Commands about vLLM. `explain`, `metrics` and `record` call the control socket of a vLLM with this scheduler.
`pointsman vllm check` reads the configuration of the installed vLLM, `pointsman vllm interface` its sources, and
`pointsman vllm compare` a recording.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.cli.errors import EXIT_FAILED, EXIT_OK, CommandError, missing_library
from pointsman.cli.options import one_model
from pointsman.cli.typer_app import plain_typer
from pointsman.core import SchedulerStats
from pointsman.core.observe.explain import CAUSES, in_words, lacking
from pointsman.core.policy.guard import Replaced
from pointsman.integrations.vllm.client import Connection, ControlUnavailable, Refused, connect

if TYPE_CHECKING:
    from pointsman.integrations.vllm.interface import Findings
    from pointsman.integrations.vllm.interface.uses import Assumption

COLUMNS = ("request", "state", "place", "age", "prompt", "output", "computed", "blocks", "preempted", "why it waits")
ROUNDED = ("waiting_for", "age")
GUIDE = "docs/guides/find_out_why_a_request_waits.md"
REMEDIES = {reason.value: cause.remedy for reason, cause in CAUSES.items()}
METRICS = (
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
    "pointsman:policy_failures_total",
    "pointsman:replaced_policies",
    "pointsman:scheduler_seconds_total",
)
"""Metrics of the scheduler that `metrics` prints, by their names in `SCRAPED`. All other metrics are vLLM's own, or
belong to the engine."""

NEVER_EMPTY = (
    "A server that is never without requests is recorded from its start: --additional-config "
    '\'{"pointsman": {"record": "FILE"}}\''
)
"""Remedy to print if a recording cannot begin, or begins only when the requests of interest have finished."""


def explain(socket: str, name: str | None, limit: int, *, as_json: bool) -> int:
    """Show the request with the id `name`, or all requests of the completion `name`; None: the oldest requests."""
    with scheduler_connection(socket) as connection:
        answer = connection.ask("explain", id=name, limit=limit)
    return show_requests(answer, name, limit, as_json=as_json)


def show_requests(answer: Mapping[str, Any], name: str | None, limit: int, *, as_json: bool) -> int:
    """Show the requests of an answer: one in full, several as a table, or as JSON lines.

    Args:
        answer: "requests", and in "counts" the numbers of running, waiting and parked ones.
        name: the id that was asked for, if any.
        limit: maximum number of requests that the answer has if no id was asked for.
        as_json: whether to print a JSON line for each request.
    """
    requests = answer["requests"]
    if as_json:
        for request in requests:
            print(json.dumps(request))
    elif name is not None and len(requests) == 1:
        _show_request(requests[0])
    else:
        _show_table(answer, limit if name is None else None)
    return EXIT_OK


def metrics(socket: str) -> int:
    """Print the metrics as Prometheus text."""
    with scheduler_connection(socket) as connection:
        answer = connection.ask("metrics")
    try:
        print(exposition(answer), end="")
    except ValueError as error:
        raise CommandError(str(error), EXIT_FAILED) from None
    return EXIT_OK


def record(socket: str, path: str, seconds: float | None) -> int:
    """Record to a file until `seconds` after the first recorded step, or until Ctrl-C.

    Raises:
        CommandError: `seconds` is not more than 0, the file cannot be written, or no step was recorded.
    """
    if seconds is not None and not seconds > 0:
        raise CommandError(f"--seconds is {seconds:g}; it must be more than 0")
    with scheduler_connection(socket) as connection, _new_private_file(path) as descriptor:
        answer = connection.ask("record", file=descriptor)
        try:
            if answer["state"] == "waiting":
                _print_status(
                    f"waiting for a moment without requests ({answer['num_running']} run and {answer['num_waiting']} "
                    f"wait now), because a recording starts with an empty scheduler; Ctrl-C cancels. {NEVER_EMPTY}"
                )
                answer = connection.next_line()
            _print_status("recording; the prefix cache was emptied for it. Waiting for the first step; Ctrl-C ends it")
            answer = connection.next_line()
            if answer["state"] == "stepping":
                _print_status("the first step is recorded" + (f"; {seconds:g} s to go" if seconds is not None else ""))
                done = connection.wait_for_line(seconds)
            else:
                done = answer
        except KeyboardInterrupt:
            done = None
        if done is None:
            connection.end_input()
            done = connection.next_line()
            while done["state"] in ("recording", "stepping"):  # vLLM is still starting
                done = connection.next_line()
    if done["state"] == "cancelled":
        Path(path).unlink(missing_ok=True)
        raise CommandError(f"there was no moment without requests, so nothing was recorded. {NEVER_EMPTY}", EXIT_FAILED)
    if done["ended_by"]:
        raise CommandError(
            f"the recording {path} ended early, after {done['num_steps']} steps: {done['ended_by']}", EXIT_FAILED
        )
    if not done["num_steps"]:
        Path(path).unlink(missing_ok=True)
        raise CommandError(
            "no request arrived during the recording, so nothing was recorded. Send requests after the line that "
            f'begins with "recording". {NEVER_EMPTY}',
            EXIT_FAILED,
        )
    _print_status(f"{done['num_steps']} steps in {path}, {done['num_bytes']} bytes: pointsman replay {path}")
    return EXIT_OK


@contextmanager
def scheduler_connection(socket: str) -> Iterator[Connection]:
    try:
        with connect(socket) as connection:
            yield connection
    except (ControlUnavailable, Refused) as error:
        raise CommandError(str(error), EXIT_FAILED) from None


@contextmanager
def _new_private_file(path: str) -> Iterator[int]:
    """Context with the descriptor of a new file that only its owner may read, because the file will contain prompts."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise CommandError(f"cannot write the recording {path}: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _print_status(text: str) -> None:
    print(f"pointsman: {text}", file=sys.stderr)


# ---------------------------------------------------------------------- how requests are shown


def _show_table(answer: Mapping[str, Any], limit: int | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        right = column in ("place", "age", "prompt", "output", "computed", "blocks", "preempted")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for request in answer["requests"]:
        table.add_row(*(Text(cell) for cell in _request_row(request)))
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    counts = answer["counts"]
    console.print(f"{counts['running']} running, {counts['waiting']} waiting, {counts['parked']} parked")
    if answer["requests"]:
        console.print(table)
        for replaced in answer["requests"][0]["replaced_policies"]:
            console.print(Text(in_words(Replaced(**replaced))), soft_wrap=True)
    _print_remedy(console, answer["requests"])
    if limit is not None and len(answer["requests"]) == limit < sum(counts.values()):
        console.print(f"only the {limit} oldest are shown; --limit shows more")


def _print_remedy(console: Console, requests: Sequence[Mapping[str, Any]]) -> None:
    """If a request waits: print the usual remedy for the head of the queue, or for a request alone, and where to find
    the others."""
    if all(request["reason"] is None for request in requests):
        return
    heads = requests if len(requests) == 1 else [request for request in requests if request["position"] == 0]
    reason = next((request["reason"] for request in heads), "")
    remedy = REMEDIES.get(reason, "")
    usual = f"Usual remedy for {reason}: {remedy}. " if remedy else ""
    console.print(Text(f"{usual}All reasons and remedies: {GUIDE}"), soft_wrap=True)


def _request_row(request: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        request["id"],
        request["state"],
        _place_text(request["position"]),
        _duration_text(request["age"]),
        str(request["num_prompt_tokens"]),
        f"{request['num_output_tokens']}/{request['max_tokens']}",
        str(request["num_computed_tokens"]),
        str(request["num_blocks"]),
        str(request["num_preemptions"]),
        _reason_text(request),
    )


def _reason_text(request: Mapping[str, Any]) -> str:
    if request["reason"] is None:
        return ""
    is_counted = request["missing"] and request["resource"]
    lacks = f", {lacking(request['missing'], request['resource'])}" if is_counted else ""
    waiting = f" for {_duration_text(request['waiting_for'])}" if request["waiting_for"] is not None else ""
    return f"{request['reason']}{waiting}{lacks}"


def _show_request(request: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(request["explanation"], style="bold"))
    apart = ("explanation", "holders", "num_holders", "replaced_policies")  # the explanation already names the policies
    facts = {key: value for key, value in request.items() if key not in apart}
    width = max(map(len, facts))
    for key, value in facts.items():
        if value is None:
            continue
        if key == "position":
            key, value = "place", _place_text(value)
        shown = _duration_text(value) if key in ROUNDED else str(value)
        console.print(Text(f"{key:{width}}  {shown}"))
    for holder in request["holders"]:
        what = f" of adapter {holder['what']}" if holder["what"] else f" {request['resource'] or ''}".rstrip()
        amount = f": {holder['amount']}{what}" if holder["amount"] else ""
        console.print(Text(f"{'held by':{width}}  {holder['id']}{amount}"))
    if request["num_holders"] > len(request["holders"]):
        console.print(f"{'':{width}}  and {request['num_holders'] - len(request['holders'])} more")
    _print_remedy(console, [request])


def _place_text(position: int | None) -> str:
    """The place of a request in the queue, counted from 1; "": it is not in the queue."""
    return "" if position is None else str(position + 1)


def _duration_text(seconds: float) -> str:
    """A duration like 8.7s, 42.0s, 1m05.0s or 2h00m05.0s."""
    minutes, left = divmod(round(seconds, 1), 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours}h{minutes:02}m{left:04.1f}s"
    return f"{minutes}m{left:04.1f}s" if minutes else f"{left:.1f}s"


# ---------------------------------------------------------------------- metrics as text


def exposition(answer: Mapping[str, Any]) -> str:
    """The metrics in a control socket's answer to "metrics", as Prometheus text. Names, types and meanings are those of
    `pointsman serve`.

    Raises:
        ValueError: the answer is from another version of Pointsman.
    """
    from pointsman.server.metrics.readings import SCRAPED
    from pointsman.server.metrics.table import BASE_LABELS, REQUESTS_REFUSED

    stats = _make_stats(answer["stats"])
    reading = SimpleNamespace(
        scheduler=stats,
        counters=SimpleNamespace(num_steps=stats.num_steps, scheduler_time=answer["scheduler_seconds"]),
    )
    labels = dict(zip(BASE_LABELS, (answer["model"], str(answer["engine"])), strict=True))
    lines: list[str] = []
    for definition, read in SCRAPED:
        if definition.name in METRICS:
            lines += _metric_lines(definition, read(reading), labels)  # type: ignore[arg-type]
    lines += _metric_lines(REQUESTS_REFUSED, {"invalid": stats.num_refused}, labels)
    return "\n".join([*lines, ""])


def _make_stats(values: Mapping[str, Any]) -> SchedulerStats:
    names = {field.name for field in fields(SchedulerStats)}
    if missing := names - values.keys():
        raise ValueError(
            f"the Pointsman inside vLLM has another version: it does not report {min(missing)}; install the same "
            "version for vLLM and for this command"
        )
    return SchedulerStats(**{name: values[name] for name in names})


def _metric_lines(definition: Any, reading: Any, labels: Mapping[str, str]) -> Iterator[str]:
    yield f"# HELP {definition.name} {definition.meaning}"
    yield f"# TYPE {definition.name} {definition.kind}"
    if not isinstance(reading, Mapping):
        yield f"{definition.name}{_labels_text(labels)} {reading}"
        return
    further = [label for label in (definition.label, definition.second_label) if label is not None]
    for value, number in reading.items():
        values = (value,) if isinstance(value, str) else value
        yield f"{definition.name}{_labels_text({**labels, **dict(zip(further, values, strict=True))})} {number}"


def _labels_text(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items()) + "}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ---------------------------------------------------------------------- pointsman vllm check, interface, compare

app = plain_typer(help="Pointsman as the scheduler of vLLM.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Pointsman as the scheduler of vLLM."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The model, as for vllm serve; its weights are not loaded."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model, in place of the argument.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Log of a vLLM with these options, to show how many requests fit."),
    ] = None,
) -> int:
    """Check whether the installed vLLM can serve a model with this scheduler, and how the model keeps its KV.

    All further options are those of vllm serve.

    Exit code 0: it can; 1: it cannot, for the printed reasons; 2: vLLM is not installed, or rejects the options; 3:
    unknown, because vLLM cannot build the layers here.
    """
    from pointsman.integrations.vllm.check import CannotCheck
    from pointsman.integrations.vllm.check import check as check_vllm

    name = one_model(model_argument, model)
    if name is None:
        raise CommandError("there is no model to check; give it as vllm serve takes it: pointsman vllm check MODEL")
    try:
        report = check_vllm(name, list(context.args), log)
    except CannotCheck as error:
        raise CommandError(str(error)) from None
    for line in report.lines():
        print(line)
    return 1 if report.will_not_work else 3 if report.unknown else 0


@app.command()
def interface(
    sources: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of unpacked sources of vLLM [default: the installed one]."),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also list assumptions that cannot be checked, and missing parts that are not needed."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> int:
    """List the assumptions of this scheduler about vLLM that no longer hold, from vLLM's sources.

    vLLM is not imported. An assumption is a name that is imported, an attribute or method of one of vLLM's objects, the
    arguments of a call, a field of an object that is constructed, or a call of vLLM to a scheduler.

    Exit code 0: all assumptions hold; 1: some do not; 2: there is no vLLM.
    """
    from pointsman.integrations.vllm.interface import NoVLLM, examine

    try:
        found = examine(sources)
    except NoVLLM as error:
        raise CommandError(str(error)) from None
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _show_findings(found, everything)
    return EXIT_FAILED if found.broken else EXIT_OK


def _show_findings(found: Findings, everything: bool) -> None:
    from pointsman.integrations.vllm.interface import KINDS

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(Text(f"vLLM {found.version} in {found.path}"))
    counts = ", ".join(f"{count} {KINDS[kind]}" for kind, count in found.counts().items())
    console.print(Text(f"{len(found.assumptions)} assumptions: {counts}"))
    if not found.broken:
        known = len(found.assumptions) - len(found.unknown)
        console.print(Text(f"all {known} that can be checked hold", style="bold green"))
    _show_part(console, f"{len(found.broken)} do not hold:", found.broken, "vLLM has", "bold red")
    _show_part(console, f"{len(found.new)} new in vLLM:", found.new, "here", "bold")
    done_without, unknown = (
        f"{len(found.fallbacks)} missing in vLLM, and done without",
        f"{len(found.unknown)} not known",
    )
    if everything:
        _show_part(console, f"{done_without}:", found.fallbacks, "here", "bold")
        _show_part(console, f"{unknown}:", found.unknown, "because", "bold")
    elif found.fallbacks or found.unknown:
        console.print(Text(f"{done_without}; {unknown} (--all lists them)", style="dim"))


def _show_part(console: Console, title: str, part: Sequence[Assumption], last: str, style: str) -> None:
    if not part:
        return
    console.print()
    console.print(Text(title, style=style))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("where", "what", last):
        table.add_column(column, overflow="fold")
    for each in part:
        table.add_row(*(Text(cell) for cell in (each.place, each.expected, each.found)))
    console.print(table)


@app.command()
def compare(
    recording: Annotated[
        str, typer.Argument(metavar="RECORDING", help="File of pointsman.integrations.vllm.Observer, finished or not.")
    ],
    ttft_target: Annotated[
        str | None, typer.Option(metavar="TIME", help="For the goodput: maximum time to the first token, like 500ms.")
    ] = None,
    itl_target: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For the goodput: maximum time between two tokens, like 50ms."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KNOBS",
            help="Compare these settings too, like max_num_seqs=64,decode_reserve=mean or preset=textbook; may be "
            "repeated.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Simulate only the first N requests [default: all].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> int:
    """Simulate the traffic of a vLLM with other settings, and compare with what vLLM did.

    The recording comes from vllm serve MODEL --scheduler-cls pointsman.integrations.vllm.Observer. Its requests are
    simulated with the step times of the recording itself: first with vLLM's own settings and decisions, to compare the
    simulation with the measurement, then with other settings.

    Exit code 0: compared; 2: the recording or an option is wrong, or the simulator lacks something of the server.
    """
    try:
        import scipy  # noqa: F401  before the recording is read
    except ModuleNotFoundError:
        raise CommandError(missing_library("vllm compare", "scipy", "sim")) from None
    from pointsman.cli import compare as comparison

    return comparison.compare(
        recording,
        ttft_target=ttft_target,
        itl_target=itl_target,
        settings=setting or (),
        limit=limit,
        as_json=as_json,
    )
