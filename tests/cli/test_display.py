"""The display of a run: text from outside is shown as text, not as markup of rich or commands to the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pointsman.cli.display import Display, LiveDisplay, PlainDisplay
from pointsman.cli.generate import run_workload
from pointsman.cli.workload import Sampling, prompts_workload

IDS = ["[/foo]", "[bold]b", "\x1b]0;title\x07", "line\nbreak", "\x9b31m"]
PROMPTS = ["[/bar] x", "[red]", "\x1b[31m", "plain", "\x9b31m"]


def show(model: str, tmp_path: Path, display: Display) -> None:
    from pointsman.engine import Engine

    path = tmp_path / "prompts.jsonl"
    jobs = [{"request_id": name, "prompt": prompt, "max_tokens": 3} for name, prompt in zip(IDS, PROMPTS, strict=True)]
    path.write_text("\n".join(map(json.dumps, jobs)))
    sampling = Sampling(max_tokens=None, temperature=0, top_p=1, top_k=0, ignore_eos=True)
    assert run_workload(Engine(model, num_blocks=64), prompts_workload(str(path), sampling), display) == 0


def test_ids_and_prompts_are_escaped_on_a_terminal(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.cli.display.REFRESH_SECONDS", 0.0)  # every step
    screen = io.StringIO()
    show(
        model, tmp_path, LiveDisplay(Console(file=screen, force_terminal=True, width=120, highlight=False), texts=True)
    )
    shown = screen.getvalue()
    for text in ("[/foo]", "[bold]b", "[/bar] x", "[red]", "\ufffd]0;title\ufffd", "line break", "\ufffd31m"):
        assert text in shown
    for command in ("\x1b]0;", "\x07", "\x9b", "line\nbreak"):
        assert command not in shown


def test_ids_and_prompts_are_escaped_in_a_log(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(model, tmp_path, PlainDisplay(texts=True))
    shown = capsys.readouterr().out
    ends = [line for line in shown.splitlines() if ", 3 tokens" in line]
    assert [line.split(" length")[0] for line in ends] == [
        "[/foo]", "[bold]b", "\ufffd]0;title\ufffd", "line break", "\ufffd31m"
    ]  # fmt: skip
    assert not set("\x1b\x07\x9b") & set(shown)
