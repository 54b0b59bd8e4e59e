"""The command line. `main` is its entry point.

    app.py           the commands
    options.py       their options, those that commands share once
    knobs.py         from options to arguments of the engine: presets, sizes, checks
    config_file.py   the YAML file of `serve`
    serve.py         what the server is started with, and where each setting comes from
    chat.py          a conversation with a running server
    ask.py           questions to a scheduler inside vLLM
    vllm.py          what concerns a vLLM that is installed here
    workload.py      what to run: built-in prompts, a file of prompts, a trace
    generate.py      the loop around the engine: arrivals, steps, an orderly end
    progress.py      what is known about the run, and its summary
    display.py       how it is shown: live, as plain lines, as JSON lines

Exit codes: 0 all went well; 1 a replay differs, a step failed or the engine died; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

from pointsman.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, CommandError


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line; every error that a user can cause is one line on stderr.

    Args:
        args: the arguments; None: those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows a mark instead of failing
    try:
        from pointsman.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _fail(f"the command line needs {error.name}; install it with: pip install 'pointsman[engine]'")
    try:
        code = app(args=args, prog_name="pointsman", standalone_mode=False)
    except CommandError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has gone; nothing is left to tell them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        # Usage errors come from Typer or from Click, by version; both know how to phrase themselves.
        phrase = getattr(error, "format_message", None)
        if phrase is None:
            raise
        _fail(f"{phrase()} (pointsman --help says more)")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> NoReturn:
    print(f"pointsman: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
