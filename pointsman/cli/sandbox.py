"""`pointsman sandbox`: serves a scheduler to play with, in a page on this machine."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.command_lines import change_commands, serve_command, vllm_command
from pointsman.cli.errors import CommandError
from pointsman.cli.film import broken_films, film_recording, is_film
from pointsman.cli.local_page import PagePort, listening_on, serve_page
from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.observe.film_format import Op
from pointsman.web.film import Film
from pointsman.web.local import LocalServer
from pointsman.web.remake import Remade, remake
from pointsman.web.sandbox import MAX_PROMPTS, MAX_REQUESTS, Sandbox, SandboxError
from pointsman.web.sandbox_page import sandbox_server
from pointsman.web.scene import Scene, play

MODEL = "MODEL"
"""Placeholder for a model in the command lines: the sandbox has none."""
_SIZES = ("num_blocks", "num_reserved_blocks", "block_size", "max_model_len")
_NAMES = tuple(field.name for field in fields(SchedulerConfig) if field.name not in _SIZES)


def sandbox(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="A film or a recording, with whose requests and settings the sandbox starts."
        ),
    ] = None,
    port: PagePort = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> int:
    """Play with a scheduler in the browser: add requests, change settings, step and undo.

    The real scheduler decides. The command prints the address of the page, which only this machine can open; Ctrl-C
    ends it.
    """
    return serve_page(open_sandbox(file, port), open_page=open_page)


def open_sandbox(file: str | None, port: int) -> LocalServer:
    """The server of a sandbox.

    Args:
        file: a film or a recording to start from; None: start without requests.
        port: port of the server; 0: a free port.

    Raises:
        CommandError: the file cannot be used, or the port is taken.
    """
    scene, about = (None, "") if file is None else scene_of(Path(file))
    try:
        made = Sandbox(scene, commands=commands, about=about)
    except (SandboxError, ConfigError) as error:
        raise CommandError(str(error)) from None
    with listening_on(port):
        return sandbox_server(made, title=_film_name(file), port=port)


def commands(config: SchedulerConfig, base: SchedulerConfig) -> Mapping[str, str]:
    """The command lines that serve with these settings: under "change" with the settings that differ from `base`, under
    "all" with all settings. Lines that begin with # are remarks."""
    changed = change_commands(MODEL, config, base)
    if changed is None:
        change = "# no setting of a server differs from the start\n"
    else:
        change = (
            "# settings that differ from the start: add them to the command that you serve with, and merge\n"
            "# --additional-config into yours; tried with Pointsman's scheduler (--scheduler-cls)\n"
            + "\n\n".join(changed)
        )
    return {"change": change, "all": _every_setting(config)}


def _every_setting(config: SchedulerConfig) -> str:
    blocks = config.num_usable_blocks + 1  # vLLM keeps one block for itself
    theirs = {
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "num_gpu_blocks_override": blocks,
    }
    capacity = config.num_usable_blocks * config.block_size
    notes = ["# every setting; MODEL must allow so long a sequence, and its KV blocks must fit into memory"]
    if config.max_model_len > capacity:
        notes.append(
            f"# the pool holds {capacity:,} tokens, and --max-model-len is {config.max_model_len:,}: vLLM does not "
            "start so; lower it, or give more blocks"
        )
    vllm = vllm_command(MODEL, config, _NAMES, theirs, "default")
    ours = serve_command(MODEL, config, _NAMES, {"max_model_len": config.max_model_len})
    return "\n".join(notes) + f"\n{vllm}\n\n{ours}"


def scene_of(path: Path) -> tuple[Scene, str]:
    """The scene of a film or of a recording, and a text about how closely the scene matches the film."""
    if is_film(path):
        data = path.read_bytes()
    else:
        made = io.BytesIO()
        film_recording(path, made, with_blocks=False)
        data = made.getvalue()
    with broken_films(path):
        film = Film(io.BytesIO(data), with_blocks=False)
        found = remake(film, MAX_REQUESTS, MAX_PROMPTS)
    if found.num_left_out:
        print(f"{path} has {found.num_left_out} more requests than a sandbox takes: only the first ones are used.")
    return found.scene, _scene_text(path.name, film, found)


def _scene_text(name: str, film: Film, found: Remade) -> str:
    """The page's text about a scene that was made from a film."""
    scene, count = found.scene, len(found.scene.arrivals)
    clock = (
        f"From {name}: the same requests and settings. A step takes {1e3 * scene.seconds_per_step:.3g} ms and "
        f"{1e3 * scene.seconds_per_token:.3g} ms for each of its tokens, fitted to the steps of {name}"
    )
    if found.num_left_out:
        return (
            f"{clock}. It has {found.num_left_out:,} more requests than a sandbox takes; the first {count:,} are here."
        )
    try:
        played = play(replace(scene, to_the_end=True))
    except ConfigError:
        return f"{clock}."  # the sandbox reports it
    if not played.is_over:
        return f"{clock}. Prefixes that requests shared are not in a film."
    preemptions = sum(event.op is Op.PREEMPTED for event in film.events(0, None))
    return (
        f"{clock}; what the fit leaves out differs, and so do prefixes that requests shared, which no film has. Run to "
        f"the end, this takes {played.now:,.1f} s and {played.num_steps:,} steps with "
        f"{played.scheduler.stats().num_preemptions:,} preemptions, where {name} took {film.end:,.1f} s and "
        f"{film.num_steps:,} steps with {preemptions:,}: read differences between runs of this page, not seconds."
    )


def _film_name(file: str | None) -> str:
    return "Sandbox" if file is None else f"Sandbox: {Path(file).name}"
