"""Environments of peers: folders beside the project, each with a Python and packages of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

Pip = Callable[..., None]
"""Function that installs the packages that its arguments name, with further options of pip."""


def python_in(environment: Path) -> Path:
    """The interpreter of an environment, whether or not it exists."""
    return environment / "bin" / "python"


def make_environment(
    environment: Path, what: str, is_complete: Callable[[], bool], fill: Callable[[Pip], None], pip_options: list[str]
) -> int:
    """Create an environment and fill it, unless it is complete; print the result.

    Args:
        environment: the folder.
        what: the peer, with its version, for messages.
        is_complete: whether everything is installed.
        fill: installs everything.
        pip_options: options for every call of pip.

    Returns:
        The exit code: 1 where something could not be installed or does not work.
    """
    if is_complete():
        print(f"{environment}: {what} is there")
        return 0

    def pip_install(*arguments: str) -> None:
        options = ["--quiet", "--no-compile", *pip_options]  # few of the thousands of files are ever imported
        command = [str(python_in(environment)), "-m", "pip", "install", *options, *arguments]
        subprocess.run(command, check=True)

    try:
        venv.create(environment, with_pip=True, clear=False)
        fill(pip_install)
    except subprocess.CalledProcessError as error:  # pip has printed its own message
        print(f"could not make {environment}: {' '.join(map(str, error.cmd))} failed", file=sys.stderr)
        return 1
    if not is_complete():
        print(f"{environment} is made, but {what} cannot be imported there", file=sys.stderr)
        return 1
    print(f"{environment}: {what} installed")
    return 0
