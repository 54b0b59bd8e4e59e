"""The help page, the groups of commands, and shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.cli.app import COMMANDS, command_named
from tests.cli.conftest import Finished

Run = Callable[..., Finished]
NAMES = [name for group in COMMANDS.values() for name in group]


def test_the_help_page_shows_each_summary_whole_in_80_columns(pointsman: Run) -> None:
    lines = pointsman("--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    for title, commands in COMMANDS.items():
        assert f"{title}:" in lines
        for name, (_, summary) in commands.items():
            assert summary.endswith(".") and any(line.split() == [name, *summary.split()] for line in lines), name


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_help_text(name: str) -> None:
    command = command_named(name)
    assert command.help


def test_help_imports_neither_numpy_nor_a_command() -> None:
    code = (
        "import sys; from pointsman.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'torch', 'pointsman.core', 'pointsman.cli.serve', 'pointsman.sim')\n"
        "print('imported:', [name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.endswith("imported: []\n")


def test_an_unknown_command_names_the_nearest(pointsman: Run) -> None:
    done = pointsman("simulte")
    assert done.code == 2
    assert "No such command 'simulte'; did you mean simulate?" in done.err


@pytest.mark.e2e
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_lists_commands_in_a_shell(shell: str, tmp_path: Path) -> None:
    """Runs the completion script that `--show-completion` prints, in the shell itself."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "pointsman"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pointsman "$@"\n')
    command.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [str(command), "--show-completion", shell], capture_output=True, text=True, env=environment, check=True
    ).stdout
    asked = {
        "bash": "COMP_WORDS=(pointsman sim); COMP_CWORD=1; _pointsman_completion pointsman; echo ${COMPREPLY[@]}",
        "zsh": "_arguments() { :; }; _TYPER_COMPLETE_ARGS='pointsman sim' _POINTSMAN_COMPLETE=complete_zsh pointsman",
        "fish": "complete -C 'pointsman sim'",
    }[shell]
    program_text = script + "\n" + asked if shell != "zsh" else f"autoload -Uz compinit; compinit -u; {script}\n{asked}"
    found = subprocess.run([program, "-c", program_text], capture_output=True, text=True, env=environment, timeout=60)
    assert "simulate" in found.stdout, found.stdout + found.stderr


@pytest.mark.e2e
@pytest.mark.parametrize(("option", "is_shown"), [((), False), (("-v",), True)])
def test_developers_lines_are_logged_only_when_asked_for(
    pointsman_process: Run, option: tuple[str, ...], is_shown: bool
) -> None:
    done = pointsman_process("generate", "--prompt", "The import statement", "--max-tokens", 2, *option)
    assert done.code == 0, done.err
    assert ("pointsman: fused: " in done.err) == is_shown
    assert "pointsman: loading the model demo" in done.err
