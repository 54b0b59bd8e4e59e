"""The command `pointsman`: its commands in groups. The module of a command is imported only when the command is used,
so that the help page, a completion and the commands that need no PyTorch begin fast.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pointsman.cli.typer_app import plain_typer
from pointsman.version import __version__

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Serve a model": {
        "serve": ("engine_commands", "Serve a model over HTTP with OpenAI's API."),
        "chat": ("engine_commands", "Talk to a running server from the terminal."),
        "generate": ("engine_commands", "Run prompts or a trace, and watch the scheduler."),
        "models": ("models", "List, install and remove small models with a name."),
    },
    "Understand a run": {
        "explain": ("observe_commands", "Show why the requests of a server wait."),
        "metrics": ("observe_commands", "Print the scheduler's metrics of a server."),
        "live": ("observe_commands", "Show in a browser what a server decides now."),
        "record": ("observe_commands", "Record the scheduler of a running vLLM."),
        "replay": ("replay", "Replay a recording, and compare every decision."),
        "film": ("film", "Make a film from a recording, or show a step of it."),
        "play": ("play", "Make a page that steps through one run, or two."),
        "plot": ("plot", "Draw a run: batches, the KV pool, each request."),
        "sandbox": ("sandbox", "Play with a scheduler in the browser."),
        "learn": ("learn", "Make the course on how a scheduler works."),
    },
    "Plan hardware and settings": {
        "simulate": ("simulator_commands", "Simulate requests on a model and a device."),
        "capacity": ("simulator_commands", "Find the request rate within latency targets."),
        "frontier": ("simulator_commands", "Draw latencies over the request rate."),
        "tune": ("simulator_commands", "Find the settings with the highest goodput."),
        "calibrate": ("calibrate", "Fit step times to a log of a running engine."),
        "policies": ("simulator_commands", "List the policies and their parameters."),
    },
    "Use inside vLLM": {
        "vllm": ("vllm", "Check a vLLM, compare settings on its recording."),
    },
}
"""Commands by group, with their module in `pointsman.cli` and a summary of at most 55 characters, so that a line of the
help page fits 80 columns. A module has a Typer app with its commands, or the function of one command."""

_GROUPS = ("models", "vllm")
"""Commands that have commands of their own."""
_MODULES = {name: module for group in COMMANDS.values() for name, (module, _) in group.items()}


def command_named(name: str) -> Any:
    """Import a command of `COMMANDS`, and return it as a Click command."""
    module = import_module(f"pointsman.cli.{_MODULES[name]}")
    made = getattr(module, "app", None)
    if made is None:
        made = plain_typer()
        made.command(name)(getattr(module, name))
    command = get_command(made)
    if name in _GROUPS or not isinstance(command, TyperGroup):
        return command
    return command.commands[name]


class Commands(TyperGroup):
    """The group of all commands, which imports a command when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in _MODULES:
            nearest = get_close_matches(args[0], _MODULES, n=1)
            ctx.fail(f"No such command {args[0]!r}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_named(cmd_name) if cmd_name in _MODULES else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in commands.items()], col_max=12)


app = plain_typer(cls=Commands, add_completion=True)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Pointsman decides which requests run in each step of an LLM server.

    It serves models, explains what a server does, and simulates what hardware and settings you need.
    """
    if version:
        print(f"pointsman {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
