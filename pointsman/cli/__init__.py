"""The command line, `pointsman`: `main` is its entry point. It may import every other package; no package imports it.

Begin at `app.py`, which names the module of each command; a module is imported when its command is used. `options.py`
has the options of the commands that run a model, and the help pages.

    serve, generate, chat    `engine_commands.py`. serve: `serve.py` (where each setting comes from), `config_file.py`
                    (the YAML file), `vllm_options.py` (a command line of vllm serve). generate: `workload.py` (prompts
                    or a trace), `generate.py` (the loop around the engine), `progress.py` (the state of the run, its
                    summary), `display.py` (live, plain or JSON lines), `demo_prompts.py`. Both: `knobs.py` (from
                    options to arguments of the engine). chat: `chat.py`
    explain, metrics, record, live    `observe_commands.py`: `server_client.py` asks a pointsman serve, `vllm.py` and
                    `live.py` a vLLM
    simulate, capacity, tune, policies    `simulator_commands.py`: `simulator_options.py` (their options),
                    `simulation.py` (workload and service), `simulate.py` (the report), `capacity.py` and `tune.py`
                    (the searches)
    vllm check, compare, interface    `vllm.py`
    calibrate, film, learn, models, play, plot, replay, sandbox    the files of these names

Exit codes: 0 success; 1 a replay differs, a step failed or the engine died; 2 bad input; 3 nothing meets the targets of
`capacity` or `tune`, or `vllm check` cannot decide; 130 interrupted; 143 ended by SIGTERM while a model is loaded or
downloaded.
"""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

from pointsman.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, CommandError, missing_library


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line. Every error that a user can cause is one line on stderr.

    Args:
        args: command-line arguments; None: the arguments of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" instead of failing
    try:
        from pointsman.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        _fail(missing_library("the command line", error.name, "cli"))
    try:
        code = app(args=args, prog_name="pointsman", standalone_mode=False)
    except CommandError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except MemoryError as error:
        _fail(
            f"the memory is not enough ({error or 'nothing is left'}); give less work, or a machine with more",
            EXIT_FAILED,
        )
    except BrokenPipeError:  # the reader has closed the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        # Usage errors are Typer's or Click's, depending on the version; both have `format_message`.
        phrase = getattr(error, "format_message", None)
        if phrase is None:
            raise
        context = getattr(error, "ctx", None)
        _fail(f"{phrase()} (see {context.command_path if context else 'pointsman'} --help)")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = EXIT_BAD_INPUT) -> NoReturn:
    print(f"pointsman: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
