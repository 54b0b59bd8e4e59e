"""Write docs/reference/command_line.md from the commands themselves.

    python scripts/write_command_line.py

The page has the help text of each command of `pointsman`, in the groups of `pointsman --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pointsman.cli.app import COMMANDS, command_named

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command_line.md"
WIDTH = 100


def page() -> str:
    """The page as Markdown."""
    parts = [
        "<!-- Written by scripts/write_command_line.py: change the commands instead. -->\n",
        "# Command line\n",
        "Each command prints its text below with `--help`.\n",
        "| exit code | meaning |\n"
        "| --- | --- |\n"
        "| 0 | The command succeeded. |\n"
        "| 1 | The command failed. |\n"
        "| 2 | An option or a file is wrong. |\n"
        "| 3 | Nothing meets the targets; for `vllm check`: unknown. |\n"
        "| 130 | The command was interrupted. |\n"
        "| 143 | SIGTERM ended the command while a model was loaded. |\n",
        "`pointsman --install-completion` installs completion for bash, zsh or fish.\n",
    ]
    for title, commands in COMMANDS.items():
        parts.append(f"## {title}\n")
        for name in commands:
            command = command_named(name)
            parts.append(f"### {name}\n\n```text\n{_help(command, f'pointsman {name}')}\n```\n")
            for inner, made in getattr(command, "commands", {}).items():
                parts.append(f"#### {name} {inner}\n\n```text\n{_help(made, f'pointsman {name} {inner}')}\n```\n")
    return "\n".join(parts)


def _help(command: Any, path: str) -> str:
    context = command.context_class(command, info_name=path, max_content_width=WIDTH, terminal_width=WIDTH)
    lines: list[str] = command.get_help(context).splitlines()
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
