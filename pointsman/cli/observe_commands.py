"""The commands that ask a running server, or vLLM with this scheduler: `explain`, `metrics`, `record`, `live`."""

from __future__ import annotations

import webbrowser
from typing import Annotated, Any

import typer

from pointsman.cli import options, vllm
from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.local_page import PagePort, serve_page
from pointsman.cli.server_client import get_object, get_text, page_url
from pointsman.cli.typer_app import plain_typer

app = plain_typer()

ServerUrl = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="URL of a pointsman serve.", show_default="http://127.0.0.1:8000"),
]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        "--operator-key",
        metavar="KEY",
        help="Operator key of the server; the variable POINTSMAN_OPERATOR_KEY is safer.",
    ),
]
OptionalSocket = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Instead of a URL: control socket of a vLLM with Pointsman's scheduler."),
]


@app.command()
def explain(
    request: options.AskedRequest = None,
    url: ServerUrl = None,
    socket: OptionalSocket = None,
    operator_key: OperatorKey = None,
    limit: options.MaxRequests = 100,
    as_json: options.AsJsonLines = False,
) -> int:
    """Show the requests of a running server and why they wait.

    The server is a pointsman serve, or a vLLM with this scheduler, whose log names the socket at the start. With an ID,
    the command shows everything about one request; the ID that the client knows is enough.
    """
    if socket is not None:
        _check_one_server(socket, url=url, operator_key=operator_key)
        return vllm.explain(socket, request, limit, as_json=as_json)
    if limit < 1:
        raise CommandError(f"--limit is {limit}; it must be at least 1")
    page = page_url(url, "/v1/requests", None if request is None else {"id": request})
    requests: list[dict[str, Any]] = get_object(page, "data", operator_key)["data"]
    if request is not None and not requests:  # the engine's id, or the id of one choice
        requests = [get_object(page_url(url, f"/v1/requests/{request}"), "state", operator_key)]
    answer = {"counts": _counts(requests), "requests": requests[:limit] if request is None else requests}
    return vllm.show_requests(answer, request, limit, as_json=as_json)


@app.command()
def metrics(url: ServerUrl = None, socket: OptionalSocket = None, operator_key: OperatorKey = None) -> int:
    """Print the scheduler's metrics of a running server.

    The output is Prometheus text. A pointsman serve gives all its metrics; a vLLM with this scheduler gives the metrics
    that vLLM itself lacks.
    """
    if socket is not None:
        _check_one_server(socket, url=url, operator_key=operator_key)
        return vllm.metrics(socket)
    print(get_text(page_url(url, "/metrics"), operator_key), end="")
    return EXIT_OK


@app.command()
def live(
    url: ServerUrl = None,
    socket: OptionalSocket = None,
    port: PagePort = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> int:
    """Show in a browser what the scheduler of a running server decides.

    A pointsman serve has this page at /live. For a vLLM with this scheduler the command serves the page on this
    machine, on --port, until Ctrl-C.
    """
    if socket is not None:
        from pointsman.cli.live import live_server

        _check_one_server(socket, url=url)
        return serve_page(live_server(socket, port), open_page=open_page)
    if port:
        raise CommandError(f"--port is {port}, but a pointsman serve has the page on its own port; leave --port out")
    page = page_url(url, "/live")
    get_text(page)  # an error if no server answers
    print(page)
    if open_page:
        webbrowser.open(page)
    return EXIT_OK


@app.command()
def record(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write; it will contain prompts, as token ids.")],
    socket: options.Socket,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds to record, from the first step on [default: until Ctrl-C].")
    ] = None,
) -> int:
    """Record the scheduler of a running vLLM for pointsman replay.

    Recording starts when the server has no request. The prefix cache is then emptied, because a replay starts with an
    empty scheduler. Requests that arrive from then on are recorded. A server that always has requests must be recorded
    from its start: --additional-config '{"pointsman": {"record": "FILE"}}'.

    Exit code 0: recorded; 1: there was no step to record, or the recording ended early; 2: an option or the file is
    wrong.
    """
    return vllm.record(socket, file, seconds)


def _check_one_server(socket: str, **others: str | None) -> None:
    """Refuse options of a server beside the socket of a vLLM."""
    for name, value in others.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise CommandError(
                f"--socket {socket} names a vLLM, and {flag} belongs to a pointsman serve; leave one out"
            )


def _counts(requests: list[dict[str, Any]]) -> dict[str, int]:
    """Number of running, waiting and parked requests."""
    states = [request["state"] for request in requests]
    queued = sum(state in ("waiting", "preempted") for state in states)
    running = states.count("running")
    return {"running": running, "waiting": queued, "parked": len(states) - running - queued}
