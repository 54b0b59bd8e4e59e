"""Errors that a command reports as one line on stderr and an exit code; and the log, which also goes to stderr."""

from __future__ import annotations

import logging
import sys

from pointsman import files

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NOTHING = 3
"""The search ended, and no load or setting meets the targets."""
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class CommandError(Exception):
    """An error that the user can repair.

    Args:
        message: names the value, the limit and the remedy.
        exit_code: 2 for bad input, 1 if the run failed with good input.
    """

    def __init__(self, message: str, exit_code: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_writable(path: str | None) -> None:
    """Refuse a file that cannot be written, before its content is computed. Does not leave a new file.

    Raises:
        CommandError: the file cannot be opened.
    """
    if path is None:
        return
    try:
        files.check_writable(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def not_installed(command: str, error: ModuleNotFoundError, extra: str) -> Exception:
    """The error for a missing library of a command; if a module of this package is missing, which is a bug, `error`
    itself."""
    if (error.name or "").startswith("pointsman"):
        return error
    return CommandError(missing_library(command, error.name, extra))


def missing_library(what: str, library: str | None, extra: str) -> str:
    """The message of an error: something needs a library, which comes with an extra of this package."""
    return f"{what} needs {library}; pip install 'pointsman[{extra}]', or in a checkout: pip install '.[{extra}]'"


def log_to_stderr(*, verbose: bool = False) -> None:
    """Print the log messages of the package to stderr; `verbose`: also those for developers."""
    logging.basicConfig(stream=sys.stderr, format="pointsman: %(message)s")
    logging.getLogger("pointsman").setLevel(logging.DEBUG if verbose else logging.INFO)
