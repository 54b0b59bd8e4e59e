"""The commands of `pointsman`. The commands' options are in `options.py`; the commands call `generate.py`, `chat.py`,
the core's `replay`, `pointsman.server.serve` and others.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BufferedReader
from typing import TYPE_CHECKING, Annotated, Any

import typer

import pointsman
from pointsman.cli import models, options, vllm
from pointsman.cli import simulator_options as sim
from pointsman.cli.calibrate import calibrate
from pointsman.cli.display import choose_display, one_line
from pointsman.cli.errors import EXIT_FAILED, EXIT_OK, EXIT_TERMINATED, CommandError, log_to_stderr, not_installed
from pointsman.cli.film import check_is_recording, film
from pointsman.cli.generate import run_workload
from pointsman.cli.knobs import engine_arguments
from pointsman.cli.learn import learn
from pointsman.cli.play import play
from pointsman.cli.plot import plot
from pointsman.cli.serve import API_KEY_VARIABLE, serve_settings
from pointsman.cli.workload import (
    Sampling,
    Workload,
    demo_workload,
    prompts_workload,
    text_workload,
    trace_workload,
)
from pointsman.core import BackgroundFile, Recorder, ReplayDifference
from pointsman.core import replay as core_replay
from pointsman.engine.interruption import exit_on_signals
from pointsman.engine.machine import wait_briefly
from pointsman.engine.sources.named import SERVED, default_served_model
from pointsman.files import open_input, read_text_lines, represented

if TYPE_CHECKING:
    from pointsman.engine import Engine

# Plain help: Typer's framed help cuts off long option names at 80 columns.
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)

app.add_typer(vllm.app, name="vllm")
app.add_typer(models.app, name="models")
app.command()(calibrate)
app.command()(film)
app.command()(plot)
app.command()(play)
app.command()(learn)

# The built-in prompts run with few sequence slots in a small pool, so that requests wait and are preempted.
DEMO_STEP = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
DEMO_POOL = {"num_blocks": 40, "block_size": 16, "max_model_len": 640}


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The scheduler of an LLM inference engine, an engine and a server that run on it."""
    if version:
        print(f"pointsman {pointsman.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=options.grouped(options.GENERATE_HELP))
@options.takes(options.KNOBS)
def generate(
    model_argument: options.ModelArgument = None,
    model: options.Model = None,
    prompt: options.PromptTexts = None,
    prompts: options.PromptFile = None,
    trace: options.TraceFile = None,
    speed: options.Speed = None,
    limit: options.Limit = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    ignore_eos: options.IgnoreEos = False,
    stop: options.Stop = None,
    as_json: options.AsJson = False,
    record: options.RecordFile = None,
    preset: options.Preset = None,
    **knobs: Any,
) -> int:
    """Run prompts or a trace offline and watch the scheduler.

    Without options the demo model continues built-in prompts, in a pool so small that requests wait and are preempted.
    """
    model = options.one_model(model_argument, model)
    sampling = Sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=ignore_eos, stop=stop or ()
    )
    try:
        sampling.params()  # check the options before anything is read or loaded
        arguments = engine_arguments(options.given(knobs), preset)
        if not (prompt or prompts or trace):
            arguments = _demo_knobs(arguments) | arguments
    except ValueError as error:
        raise CommandError(str(error)) from None
    workload = _choose_workload(prompt, prompts, trace, speed, limit, seed, sampling)
    _warn_about_ignored_priorities(workload, knobs["order"])
    with _open_recorder(record) as recorder:
        engine = _load_engine(model="demo" if model is None else model, seed=seed, recorder=recorder, **arguments)
        display = choose_display(as_json=as_json, texts=not workload.is_trace)
        return run_workload(engine, workload, display)


@app.command(cls=options.grouped(options.SERVE_HELP, takes_vllm_options=True))
@options.takes(options.SERVER, options.KNOBS)
def serve(
    model_argument: options.ModelArgument = None,
    config: options.ConfigFile = None,
    preset: options.Preset = None,
    **values: Any,
) -> int:
    """Serve a model over HTTP with OpenAI's API.

    Without options it serves smollm2 if that is installed (see pointsman models), otherwise the demo model, at
    http://127.0.0.1:8000, without API keys. SIGTERM or Ctrl-C lets running requests finish. Options of vllm serve are
    understood too; one that has no meaning here is answered with what does the same.

    Exit code 0: stopped by a signal; 1: the engine died, restart it; 2: an option, a file or the model is wrong.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise CommandError("serve needs Unix sockets, which this Python lacks; run it on Linux or macOS")
    log_to_stderr()
    values["model"] = options.one_model(model_argument, values["model"])
    settings = serve_settings({"preset": preset, **values}, config, os.environ, _default_model)
    wait_briefly()
    try:
        for name in ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"):
            import_module(name)  # `run` would report a missing library only after loading the model
        from pointsman.server.serve import run
    except ModuleNotFoundError as error:
        raise not_installed("serve", error, "server") from None
    try:
        return run(settings.engine, settings.server, **settings.options)
    except ValueError as error:  # the model, the address, or a knob that depends on the model
        raise CommandError(settings.message_with_place(error)) from None


@app.command()
def chat(
    url: options.Url = "http://127.0.0.1:8000",
    model: options.ChatModel = None,
    api_key: options.ChatApiKey = None,
    system: options.System = None,
    temperature: options.ChatTemperature = None,
    max_tokens: options.ChatMaxTokens = None,
) -> int:
    """Talk to a running server from the terminal.

    Ctrl-C stops a completion, Ctrl-D ends the conversation. From a pipe, each line is a message.
    """
    try:
        from pointsman.cli.chat import run_chat
    except ModuleNotFoundError as error:
        raise not_installed("chat", error, "server") from None
    key = api_key or os.environ.get(API_KEY_VARIABLE, "").strip() or None
    return run_chat(url, model=model, api_key=key, system=system, temperature=temperature, max_tokens=max_tokens)


@app.command(cls=options.grouped(sim.SIMULATE_HELP))
@options.takes(sim.ARRIVING, sim.SIMULATED, sim.SERVED_BY, sim.SCHEDULER, sim.TARGETS)
def simulate(
    preset: sim.SimulatedPreset = None,
    replicas: sim.Replicas = 1,
    scenario: sim.ScenarioName = None,
    seeds: sim.Seeds = 1,
    price_per_hour: sim.PricePerHour = None,
    as_json: sim.AsJsonObject = False,
    html: sim.HtmlFile = None,
    perfetto: sim.PerfettoFile = None,
    film: sim.FilmFile = None,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Simulate requests on a model and a device: latencies, throughput and load, in seconds.

    The scheduler is the real one, under a virtual clock. Without options a built-in example runs. Ctrl-C prints the
    report so far.
    """
    from pointsman.cli.simulate import run_simulation
    from pointsman.cli.simulation import names

    if list_names:
        print(names())
        return EXIT_OK
    if scenario is not None:
        from pointsman.cli.scenario import run_scenario

        others = {
            "preset": preset is not None,
            "replicas": replicas != 1,
            "perfetto": perfetto is not None,
            "film": film is not None,
        }
        others["price_per_hour"] = price_per_hour is not None
        return run_scenario(
            scenario,
            options.given(values),
            seeds=seeds,
            others=[name for name, is_given in others.items() if is_given],
            as_json=as_json,
            html=html,
        )
    return run_simulation(
        options.given(values),
        preset=preset,
        replicas=replicas,
        seeds=seeds,
        price_per_hour=price_per_hour,
        as_json=as_json,
        html=html,
        perfetto=perfetto,
        film=film,
    )


@app.command(cls=options.grouped(sim.CAPACITY_HELP))
@options.takes(sim.ARRIVING, sim.SERVED_BY, sim.SCHEDULER, sim.TARGETS)
def capacity(
    replicas: sim.ReplicaRange = "1",
    share: sim.Share = 0.99,
    requests_per_second: sim.WantedRate = None,
    requests: sim.ProbeRequests = None,
    tolerance: sim.Tolerance = 0.02,
    preset: sim.SimulatedPreset = None,
    as_json: sim.AsJsonObject = False,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Find how many requests a second a service handles within its targets, how many users, or on how many replicas.

    Each probe simulates the same requests, faster or slower. With --think the requests come from users, each of which
    thinks before the next request, and the number of users is found. Without targets: TTFT within 2 s.

    Exit code 0: found; 2: an option, a file or the model is wrong; 3: nothing meets the targets.
    """
    from pointsman.cli.capacity import run_capacity
    from pointsman.cli.simulation import names

    if list_names:
        print(names())
        return EXIT_OK
    return run_capacity(
        options.given(values),
        replicas=replicas,
        share=share,
        rate=requests_per_second,
        num_requests=requests,
        tolerance=tolerance,
        preset=preset,
        as_json=as_json,
    )


@app.command(cls=options.grouped(sim.TUNE_HELP))
@options.takes(sim.TUNED, sim.SERVED_BY, sim.SCHEDULER)
def tune(
    replicas: sim.TunedReplicas = "1",
    trials: sim.Trials = 48,
    requests: sim.PartRequests = 1000,
    workers: sim.Workers = None,
    ray: sim.RayAddress = None,
    preset: sim.SimulatedPreset = None,
    as_json: sim.AsJsonObject = False,
    list_names: sim.ListNames = False,
    **values: Any,
) -> int:
    """Find the scheduler's settings with the highest goodput: requests a second within the targets.

    Settings are chosen on one part of the workload and judged on another, beside the defaults of vLLM. Knobs that are
    given keep their value, all others are searched. Without targets: TTFT within 2 s.

    Exit code 0: found, or no gain; 2: an option, a file or the model is wrong; 3: nothing meets the targets.
    """
    from pointsman.cli.simulation import names
    from pointsman.cli.tune import run_tune

    if list_names:
        print(names())
        return EXIT_OK
    return run_tune(
        options.given(values),
        replicas=replicas,
        num_trials=trials,
        num_requests=requests,
        workers=workers,
        ray=ray,
        preset=preset,
        as_json=as_json,
    )


@app.command()
def policies(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="order, victim, reserve, limit or eviction [default: all].")
    ] = None,
    as_json: sim.AsJsonObject = False,
) -> int:
    """List the policies of the scheduler, with their parameters.

    Policies of installed packages are included.
    """
    from pointsman.cli.policies import run_policies

    return run_policies(kind, as_json=as_json)


@app.command()
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording, as pointsman generate --record writes it.")],
) -> int:
    """Replay a recording and compare every decision.

    Exit code 0: no difference; 1: the first difference is printed; 2: the file is not a recording.
    """
    try:
        with BufferedReader(open_input(file)) as opened:
            check_is_recording(file, opened.peek(), takes_films=False)
            report = core_replay(read_text_lines(opened))
    except OSError as error:
        raise CommandError(f"cannot read the recording {file}: {error.strerror}") from None
    except ValueError as error:  # RecordingError, or a line that is not text
        raise CommandError(f"{file}: {error}") from None
    except ReplayDifference as difference:
        where = "a call outside steps" if difference.step_id is None else f"step {difference.step_id}"
        print(f"{file}, line {difference.line}: the replay differs at {where}, in {difference.field}")
        print(f"recorded: {represented(difference.recorded, 400)}")
        print(f"replayed: {represented(difference.replayed, 400)}")
        return EXIT_FAILED
    print(
        f"{report.num_steps} steps replayed ({report.num_calls} calls, {report.num_requests} requests, "
        f"{report.num_preemptions} preemptions): no difference"
        f"{' up to the last line, which was cut off' if report.is_cut else ''}"
    )
    return EXIT_OK


@app.command()
def explain(
    socket: options.Socket,
    request: options.AskedRequest = None,
    limit: options.MaxRequests = 100,
    as_json: options.AsJsonLines = False,
) -> int:
    """Show the requests of a running vLLM and why they wait.

    vLLM must run with this scheduler; its log names the socket at the start. With an ID, everything about one request;
    the id that the client knows is enough.
    """
    return vllm.explain(socket, request, limit, as_json=as_json)


@app.command()
def metrics(socket: options.Socket) -> int:
    """Print the scheduler's metrics that vLLM does not have.

    Prometheus text, from a running vLLM with this scheduler.
    """
    return vllm.metrics(socket)


@app.command()
def record(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write; it will contain prompts, as token ids.")],
    socket: options.Socket,
    seconds: Annotated[
        float | None, typer.Option(help="Duration, from the first recorded step on [default: until Ctrl-C].")
    ] = None,
) -> int:
    """Record the scheduler of a running vLLM for pointsman replay.

    Recording starts at the next moment without requests, and then empties the prefix cache, because a replay starts
    with an empty scheduler. The requests that come from then on are recorded. A server that is never without requests
    is recorded from its start: --additional-config '{"pointsman": {"record": "FILE"}}'.

    Exit code 0: recorded; 1: there was no step to record, or the recording ended early; 2: an option or the file is
    wrong.
    """
    return vllm.record(socket, file, seconds)


def _default_model() -> str:
    """The model to serve if the user names no model."""
    model = default_served_model()
    if model == "demo":
        logging.getLogger("pointsman").info(
            "serving the demo model, which cannot answer questions; to install one that can: pointsman models get %s",
            SERVED,
        )
    return model


def _demo_knobs(given: dict[str, Any]) -> dict[str, int]:
    """The knobs with which the built-in prompts run: the limits of a step, and the size of the pool. Each of the two is
    left out if an option in `given` determines it."""
    step = {} if given.keys() & DEMO_STEP.keys() else DEMO_STEP
    pool = {} if given.keys() & {"num_blocks", "kv_cache_bytes", "block_size"} else DEMO_POOL
    return step | pool


def _choose_workload(
    prompt: list[str] | None,
    prompts: str | None,
    trace: str | None,
    speed: float | None,
    limit: int | None,
    seed: int,
    sampling: Sampling,
) -> Workload:
    if sum(source is not None for source in (prompt or None, prompts, trace)) > 1:
        raise CommandError("--prompt, --prompts and --trace exclude each other; give only one of them")
    if trace is None and (speed is not None or limit is not None):
        raise CommandError(f"--{'speed' if speed is not None else 'limit'} needs a trace; give --trace FILE too")
    if trace is not None:
        speed = 1.0 if speed is None else speed
        if not 0.0 <= speed < float("inf"):
            raise CommandError(f"--speed is {speed:g}; it must be at least 0 (0: all requests arrive at the start)")
        if limit is not None and limit < 1:
            raise CommandError(f"--limit is {limit}; it must be at least 1")
        if sampling.stop:
            raise CommandError("--stop has no effect with --trace, which sets the output lengths; leave --stop out")
        return trace_workload(trace, speed, limit, seed, sampling)
    if prompts is not None:
        return prompts_workload(prompts, sampling)
    return text_workload(prompt, sampling) if prompt else demo_workload(sampling)


def _warn_about_ignored_priorities(workload: Workload, order: str | None) -> None:
    if order in (None, "fcfs") and any(job.priority for job in workload.jobs):
        print("pointsman: warning: priorities are read only under --order priority", file=sys.stderr)


@contextmanager
def _open_recorder(path: str | None) -> Iterator[Recorder | None]:
    """Context with a recorder that writes to `path`; the file is closed at the context's end. `path` None: no recorder.

    Raises:
        CommandError: the file cannot be created; or recording stopped before the end of the run (raised when the
        context is left).
    """
    if path is None:
        yield None
        return
    try:
        file = BackgroundFile.create(path)
    except OSError as error:
        raise CommandError(f"cannot write the recording {path}: {error.strerror}") from None
    try:
        yield Recorder(file)
    finally:
        file.close()
    if file.ended_by:
        raise CommandError(f"the recording {path} ended early: {file.ended_by}", EXIT_FAILED)


def _load_engine(*, model: str, **arguments: Any) -> Engine:
    log_to_stderr()
    logging.getLogger("pointsman").info("loading the model %s", one_line(model))
    wait_briefly()
    try:
        from pointsman.engine import Engine
    except ModuleNotFoundError as error:
        raise not_installed("generate", error, "engine") from None
    try:
        with exit_on_signals({signal.SIGTERM: EXIT_TERMINATED}):
            return Engine(model, **arguments)
    except ValueError as error:  # the model, or a knob that depends on it
        raise CommandError(str(error)) from None
