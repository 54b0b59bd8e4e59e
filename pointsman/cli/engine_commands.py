"""The commands that run a model or talk to a server of one: `generate`, `serve`, `chat`. Their options are in
`options.py`; they call `generate.py`, `chat.py` and `pointsman.server.serve`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pointsman.cli import options
from pointsman.cli.display import choose_display, one_line
from pointsman.cli.errors import (
    EXIT_FAILED,
    EXIT_TERMINATED,
    CommandError,
    log_to_stderr,
    missing_library,
    not_installed,
)
from pointsman.cli.generate import run_workload
from pointsman.cli.knobs import engine_arguments
from pointsman.cli.serve import serve_settings
from pointsman.cli.server_client import API_KEY_VARIABLE
from pointsman.cli.typer_app import plain_typer
from pointsman.cli.workload import (
    Sampling,
    Workload,
    demo_workload,
    prompts_workload,
    text_workload,
    trace_workload,
)
from pointsman.core import BackgroundFile, Recorder
from pointsman.engine.interruption import exit_on_signals
from pointsman.engine.kernels_ahead import kernels_compiled_ahead
from pointsman.engine.machine import wait_briefly
from pointsman.engine.sources.named import SERVED, default_served_model

if TYPE_CHECKING:
    from pointsman.engine import Engine

app = plain_typer()

# The built-in prompts run with few sequence slots in a small pool, so that requests wait and are preempted.
DEMO_STEP = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
DEMO_POOL = {"num_blocks": 40, "block_size": 16, "max_model_len": 640}


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
    verbose: options.Verbose = False,
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
    log_to_stderr(verbose=verbose)
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
    verbose: options.Verbose = False,
    **values: Any,
) -> int:
    """Serve a model over HTTP with OpenAI's API.

    Without options it serves smollm2 if that is installed (see pointsman models), otherwise the demo model, at
    http://127.0.0.1:8000, without API keys. SIGTERM or Ctrl-C lets running requests finish. Options of vllm serve are
    accepted too; for an option without a meaning here, the error names the setting that does the same.

    Exit code 0: stopped by a signal; 1: the engine died, restart the server; 2: an option, a file or the model is
    wrong.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise CommandError("serve needs Unix sockets, which this Python lacks; run it on Linux or macOS")
    log_to_stderr(verbose=verbose)
    values["model"] = options.one_model(model_argument, values["model"])
    settings = serve_settings({"preset": preset, **values}, config, os.environ, _default_model)
    wait_briefly()
    for name in ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"):
        if find_spec(name) is None:  # `run` would report a missing library only after loading the model
            raise CommandError(missing_library("serve", name, "server"))
    try:
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

    Ctrl-C stops a completion, Ctrl-D ends the conversation. If standard input is a pipe, each line is a message.
    """
    try:
        from pointsman.cli.chat import run_chat
    except ModuleNotFoundError as error:
        raise not_installed("chat", error, "server") from None
    key = api_key or os.environ.get(API_KEY_VARIABLE, "").strip() or None
    return run_chat(url, model=model, api_key=key, system=system, temperature=temperature, max_tokens=max_tokens)


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
    logging.getLogger("pointsman").info("loading the model %s", one_line(model))
    wait_briefly()
    try:
        with exit_on_signals({signal.SIGTERM: EXIT_TERMINATED}), kernels_compiled_ahead(arguments):
            from pointsman.engine import Engine

            return Engine(model, **arguments)
    except ModuleNotFoundError as error:
        raise not_installed("generate", error, "engine") from None
    except ValueError as error:  # the model, or a knob that depends on it
        raise CommandError(str(error)) from None
