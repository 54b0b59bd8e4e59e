"""`pointsman vllm ...`: commands about the vLLM that is installed here."""

from __future__ import annotations

from typing import Annotated

import typer

from pointsman.cli.errors import CommandError

app = typer.Typer(help="Pointsman as the scheduler of vLLM.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def root() -> None:
    """Pointsman as the scheduler of vLLM."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As vllm serve takes it; its weights are not loaded.")],
) -> int:
    """Whether the installed vLLM can serve a model with this scheduler.

    All further options are those of vllm serve.

    Exit code 0: it can; 1: it cannot, for the printed reasons; 2: vLLM is not installed, or rejects the options.
    """
    from pointsman.integrations.vllm.check import CannotCheck
    from pointsman.integrations.vllm.check import check as check_vllm

    try:
        report = check_vllm(model, list(context.args))
    except CannotCheck as error:
        raise CommandError(str(error)) from None
    for line in report.lines():
        print(line)
    return 1 if report.problems else 0
