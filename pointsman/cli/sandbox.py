"""`pointsman play --sandbox`: a scheduler to play with, in a page on this machine."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from pointsman.cli.commands import serve_command, vllm_command
from pointsman.cli.errors import CommandError
from pointsman.cli.film import broken_films, film_recording, is_film
from pointsman.core import ConfigError, SchedulerConfig
from pointsman.web.film import Film
from pointsman.web.local import LocalServer
from pointsman.web.remake import remake
from pointsman.web.sandbox import MAX_PROMPTS, MAX_REQUESTS, Sandbox, SandboxError
from pointsman.web.sandbox_page import sandbox_server
from pointsman.web.scene import Scene

MODEL = "MODEL"
"""What stands in the command lines for a model: the sandbox has none."""
_SIZES = ("num_blocks", "num_reserved_blocks", "block_size", "max_model_len")
_NAMES = tuple(field.name for field in fields(SchedulerConfig) if field.name not in _SIZES)


def open_sandbox(file: str | None, port: int) -> LocalServer:
    """The server of a sandbox.

    Args:
        file: a film or a recording to begin with; None: none.
        port: 0: one that is free.

    Raises:
        CommandError: the file cannot be used, or the port is taken.
    """
    if not 0 <= port < 1 << 16:
        raise CommandError(f"--port is {port}; it must be between 0 (one that is free) and 65535")
    scene = None if file is None else _scene_of(Path(file))
    try:
        return sandbox_server(Sandbox(scene, commands=commands), title=_title(file), port=port)
    except (SandboxError, ConfigError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from None


def commands(config: SchedulerConfig) -> Mapping[str, str]:
    """The command lines that serve with these settings, by program."""
    blocks = config.num_usable_blocks + 1  # vLLM keeps one for itself
    theirs = {
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "num_gpu_blocks_override": blocks,
    }
    return {
        "vllm": vllm_command(MODEL, config, _NAMES, theirs, "default"),
        "pointsman": serve_command(MODEL, config, _NAMES, {"max_model_len": config.max_model_len}),
    }


def _scene_of(path: Path) -> Scene:
    if is_film(path):
        data = path.read_bytes()
    else:
        made = io.BytesIO()
        film_recording(path, made, with_blocks=False)
        data = made.getvalue()
    with broken_films(path):
        found = remake(Film(io.BytesIO(data), with_blocks=False), MAX_REQUESTS, MAX_PROMPTS)
    if found.num_left_out:
        print(f"{path} has {found.num_left_out} more requests than a sandbox takes: it has the first ones.")
    return found.scene


def _title(file: str | None) -> str:
    return "Sandbox" if file is None else f"Sandbox: {Path(file).name}"
