"""Every command and every example in the documentation is executed here.

Outputs that a document shows (`console`, `pycon`) are those of SmolLM2, and are compared where it is installed.

A document that has a line `pointsman serve ...` or `make serve` in a block of shell commands starts a session: the
server is started with these options on a free port, the commands and Python examples below it use it, and SIGTERM ends
it. Files that a document shows, with their name as a comment in the first line, exist for its commands.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _server_process import ServerProcess
from _server_process import start_server as start_separate_server

from pointsman.cli.app import command_named
from pointsman.cli.options import KNOBS, SERVER
from pointsman.sim.profile import EngineSettings, load_profile
from tests.engine.real.weights import weights_of
from tests.forked_engines import start_server
from tests.forking import ForkingParent
from tests.forms import short_of, short_or_long
from tests.sim.measured_logs import measured_log
from tests.sim.observed_logs import write_observed

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
VLLM = [DOCS / "start" / "vllm.md", DOCS / "guides" / "run_inside_vllm.md", DOCS / "reference" / "vllm.md"]
"""Documents whose commands need vLLM: tests/integrations/test_vllm_docs.py runs them."""
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*.md") if path not in VLLM and DECISIONS not in path.parents),
]
ADDRESS = "http://127.0.0.1:8000"
"""Address of the server in the documents."""
CONFIGURATION = DOCS / "reference" / "configuration.md"
MONITORING = DOCS / "guides" / "monitor_a_server.md"
TEXTS = [*sorted({*DOCUMENTS, *VLLM, *ROOT.glob("*.md")}), *sorted(DECISIONS.glob("*.md"))]
"""Every document that names files."""


def name_of(path: Path) -> str:
    """The path of a document within docs/, or its name."""
    return path.relative_to(DOCS).as_posix() if DOCS in path.parents else path.name


def blocks(path: Path) -> Iterator[tuple[str, str, str]]:
    """(position, language, text) of every fenced block."""
    for index, (language, text) in enumerate(re.findall(r"```(\w+)\n(.*?)```", path.read_text(), re.DOTALL)):
        yield f"{name_of(path)}:{index}", language, text


def commands(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


@dataclass
class Session:
    """A server of a document, with the commands and programs that use it."""

    where: str
    options: list[str]
    talk: list[tuple[str, str, str]] = field(default_factory=list)
    """(position, language, a command or a program)."""
    files: dict[str, str] = field(default_factory=dict)


def sessions() -> list[Session]:
    found: list[Session] = []
    for path in DOCUMENTS:
        session: Session | None = None
        files: dict[str, str] = {}
        for where, language, text in blocks(path):
            if (name := re.match(r"# ([\w.-]+)\n", text)) is not None:
                files[name[1]] = text
            if language == "python" and ADDRESS in text:
                assert session is not None, f"{where} talks to a server before one is started"
                session.talk.append((where, language, text))
            if "vllm-router" in text:  # tests/server/test_router.py runs these
                continue
            for line in commands(text) if language == "sh" else ():
                if line.startswith(("pointsman serve", "make serve")):
                    session = Session(where, shlex.split(line, comments=True)[2:], files=files)
                    found.append(session)
                elif ADDRESS in line or "pointsman chat" in line:
                    assert session is not None, f"{where} talks to a server before one is started"
                    session.talk.append((where, language, line))
    return found


PYTHON = [
    (where, text)
    for path in DOCUMENTS
    for where, language, text in blocks(path)
    if language == "python" and ADDRESS not in text
]
COMMANDS = [
    (where, line)
    for path in DOCUMENTS
    for where, language, text in blocks(path)
    if language == "sh"
    for line in commands(text)
    if re.match(r"pointsman (?!serve|chat)", line)
]
TRANSCRIPTS, PYTHON_SESSIONS = (
    [
        (where, text)
        for path in DOCUMENTS
        if name_of(path) != "how_it_works/claims.md"  # its outputs are those of tests/sim
        for where, language, text in blocks(path)
        if language == shown
    ]
    for shown in ("console", "pycon")
)
SESSIONS = sessions()
OTHERS = sorted({where.split(":")[0] for where, _ in COMMANDS} - {"README.md"})
SHORT_DOCUMENTS = {
    "README.md",
    "guides/call_a_server.md",
    "guides/take_the_course.md",
    "how_it_works/claims.md",
    "start/server.md",
}
"""Documents whose commands and servers the short form runs."""
PLANNING = {f"guides/{name}.md" for name in ("size_a_deployment", "calibrate_step_times", "tune_settings")}
"""Documents whose commands read bench.json, a log of requests, and recording.jsonl, a recording of vLLM."""


def test_the_documents_have_examples_and_commands() -> None:
    assert len(PYTHON) >= 3
    assert len(COMMANDS) >= 4
    assert len(SESSIONS) >= 3
    assert sum(len(session.talk) for session in SESSIONS) >= 8


# ------------------------------------------------------------------ what the documents name


def files_named(text: str) -> set[str]:
    """Source files (`core/config.py`, with or without `pointsman/` in front) and folders (`tests/property/`)."""
    files = re.findall(r"(?<![\w./*-])[\w-]+(?:/[\w-]+)*\.(?:py|toml|txt)\b", text)
    folders = re.findall(r"`([\w-]+(?:/[\w-]+)*/)`", text)
    return {name for name in (*files, *folders) if name not in WRITTEN_BY_EXAMPLES}


WRITTEN_BY_EXAMPLES = {"prompts.txt", "start.py", "schedule_policy.py"}
PARTS = "|".join(sorted(path.stem for path in (ROOT / "pointsman").iterdir() if not path.name.startswith("_")))
"""Top-level modules of the package: `pointsman.core` is a module, `pointsman.json` a file."""


def exists(dotted: str) -> bool:
    """Whether `pointsman.a.b` is a module, or `b` a name in the module `pointsman.a`."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        stem = ROOT.joinpath(*parts[:end])
        module = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if module.is_file():
            return all(re.search(rf"\b{name}\b", module.read_text()) for name in parts[end:])
    return False


@pytest.mark.parametrize("path", TEXTS, ids=[name_of(path) for path in TEXTS])
def test_every_file_name_and_link_of_a_document_exists(path: Path) -> None:
    text = path.read_text()
    bases = (ROOT, ROOT / "pointsman")
    missing = {name for name in files_named(text) if not any((base / name).exists() for base in bases)}
    missing |= {
        name for name in re.findall(rf"\bpointsman\.(?:{PARTS})\b(?:\.[A-Za-z_]\w*)*", text) if not exists(name)
    }
    links = {link for link in re.findall(r"\]\(([^)\s#]+)", text) if "://" not in link}
    missing |= {link for link in links if not (path.parent / link).exists()}
    assert not missing, f"{path.relative_to(ROOT)} names missing files: {', '.join(sorted(missing))}"


def test_every_page_that_the_code_names_exists() -> None:
    named = {
        (page, path.relative_to(ROOT).as_posix())
        for folder in ("pointsman", "scripts", "examples", "benchmarks", "dashboards")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".js", ".html", ".md", ".yaml", ".json"}
        for page in re.findall(r"(?<![\w/])docs/[\w/]+\.md", path.read_text())
    }
    assert len(named) > 10
    assert not {one for one in named if not (ROOT / one[0]).exists()}


def test_file_names_are_found_in_documentation_text() -> None:
    assert files_named("see `core/config.py` and `tests/property/`, not run.jsonl, a.b or `/v1/`") == {
        "core/config.py",
        "tests/property/",
    }
    assert exists("pointsman.core.config.SchedulerConfig")
    assert not exists("pointsman.core.config.NoSuchName")
    assert len(files_named((DOCS / "how_it_works" / "map.md").read_text())) > 40


def test_decision_records_have_three_parts_and_are_in_the_index() -> None:
    index = re.findall(r"^(\d+)\. \[(.+)\]\((.+)\)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert [file for _, _, file in index] == sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    for position, (number, title, file) in enumerate(index, 1):
        lines = (DECISIONS / file).read_text().splitlines()
        assert int(number) == position == int(file[:4]), file
        assert lines[0] == f"# {number}. {title}"
        parts = [
            part for part in ("Context", "Decision", "Consequence") if any(x.startswith(f"**{part}.**") for x in lines)
        ]
        assert len(parts) == 3, f"{file} has only {parts}"
        assert len(lines) <= 30, f"{file} is no short record"


@cache
def parent() -> ForkingParent:
    """A process that has imported the modules of the examples."""
    modules = ("pointsman.cli", "pointsman.engine.aio.async_engine", "pointsman.engine.llm")
    return ForkingParent(sys.executable, modules, {**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.e2e
@pytest.mark.parametrize(("where", "text"), PYTHON, ids=[where for where, _ in PYTHON])
def test_python_examples_of_documents_run(where: str, text: str, tmp_path: Path) -> None:
    run = parent().run("-c", text, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def bench_result(count: int) -> dict[str, Any]:
    """The fields that are read of a result of `vllm bench serve --save-result --save-detailed`, of a small engine."""
    log = measured_log(count, 4.0, settings=EngineSettings(num_blocks=3000), output=12)
    outputs = [each.request.num_output_tokens for each in log]
    return {
        "endpoint_type": "openai",
        "start_times": [1000 + each.queued for each in log],
        "input_lens": [each.request.num_prompt_tokens for each in log],
        "output_lens": outputs,
        "ttfts": [each.ttft for each in log],
        "itls": [
            [(each.last_token - each.first_token) / (output - 1)] * (output - 1) if output > 1 else []
            for each, output in zip(log, outputs, strict=True)
        ],
        "errors": [""] * count,
    }


@pytest.mark.e2e
@pytest.mark.parametrize("document", short_of(["README.md", *OTHERS], SHORT_DOCUMENTS))
def test_commands_of_documents_run_in_order(document: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("The import statement\nA list is\n")
    if document in PLANNING:
        (tmp_path / "bench.json").write_text(json.dumps(bench_result(short_or_long(24, 300))))
        write_observed(tmp_path / "recording.jsonl")
    for where, line in COMMANDS:
        if where.split(":")[0] != document:
            continue
        run = parent().run("-m", *shlex.split(line, comments=True), cwd=tmp_path, timeout=300)
        assert run.returncode == 0, f"{where}: {line}\n{run.stderr}"
    if document != "guides/calibrate_step_times.md":
        return
    errors = load_profile(tmp_path / "profile.json").held_out_errors  # written by calibrate, read by the others
    assert isinstance(errors["e2e_mape"], float) and errors["e2e_mape"] < short_or_long(20, 5) / 100


# ---------------------------------------------------------------------- the server


def talk(server: ServerProcess, language: str, text: str, cwd: Path) -> str:
    """Run a command or a program of a document against a server; returns its output."""
    text = text.replace(ADDRESS, server.url)
    if language == "python":
        words = [sys.executable, "-c", text]
    else:
        chat = f"{shlex.quote(sys.executable)} -m pointsman chat --url {server.url}"
        text = text.replace("pointsman chat", chat)
        words = ["bash", "-o", "pipefail", "-c", text]
    run = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"{text}\n{run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    "session",
    short_of(SESSIONS, [each for each in SESSIONS if each.where.split(":")[0] in SHORT_DOCUMENTS]),
    ids=[session.where for session in SESSIONS],
)
def test_server_sessions_of_documents_run(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    for name, text in session.files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POINTSMAN_API_KEY", raising=False)
    start = start_separate_server if session.where.startswith("README") else start_server
    with start(*session.options, "--port", "0", "--no-warm-up") as server:
        for where, language, text in session.talk:
            printed = talk(server, language, text, tmp_path)
            assert '{"error"' not in printed, f"{where}: {text}\n{printed}"
            assert printed or "-f" in text, f"{where}: {text} printed nothing"
        listening = next(line for line in server.log().splitlines() if "try it: " in line)
        assert '"content"' in talk(server, "sh", listening.partition("try it: ")[2], tmp_path)
        metrics = talk(server, "sh", f"curl -sf {server.url}/metrics", tmp_path)
        assert server.stop() == 0
    for name in set(re.findall(r"\b(?:vllm|pointsman):[a-z0-9_]+", MONITORING.read_text())):
        assert re.search(rf"^(# TYPE )?{name}\b", metrics, re.MULTILINE), f"{MONITORING.name} names {name}, no metric"


# ---------------------------------------------------------------------- what SmolLM2 says


@pytest.fixture(scope="module")
def models_folder() -> str:
    """The folder in which SmolLM2 is installed."""
    return str(weights_of("smollm2").parents[1])


@pytest.fixture(scope="module")
def smollm2(models_folder: str) -> Iterator[ServerProcess]:
    """A server of SmolLM2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POINTSMAN_MODELS", models_folder)
        with start_server("--model", "smollm2", "--port", "0", "--no-warm-up") as server:
            yield server


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize(("where", "text"), TRANSCRIPTS, ids=[where for where, _ in TRANSCRIPTS])
def test_commands_print_the_output_that_documents_show(
    where: str, text: str, models_folder: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    command, _, output = text.removeprefix("$ ").replace(".venv/bin/", "").partition("\n")
    if "pointsman chat" in command:
        printed = talk(request.getfixturevalue("smollm2"), "sh", command, tmp_path)
    else:
        run = parent().run("-m", *shlex.split(command), cwd=tmp_path, timeout=300, POINTSMAN_MODELS=models_folder)
        printed = run.stdout
    assert output in printed, f"{where}: {command}\n{printed}"


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize(("where", "text"), PYTHON_SESSIONS, ids=[where for where, _ in PYTHON_SESSIONS])
def test_python_sessions_print_what_documents_show(where: str, text: str, models_folder: str) -> None:
    program = f"import doctest, sys; sys.modules['__main__'].__doc__ = {text!r}; sys.exit(doctest.testmod().failed)"
    run = parent().run("-c", program, timeout=300, POINTSMAN_MODELS=models_folder)
    assert run.returncode == 0, f"{where}\n{run.stdout}\n{run.stderr}"


def test_make_serve_is_the_first_command_of_the_readme() -> None:
    first = next(text for _, language, text in blocks(ROOT / "README.md") if language == "sh")
    words = shlex.split(commands(first)[0], comments=True)
    assert words == ["make", "serve"]
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    dry = subprocess.run(
        ["make", "-n", "--no-print-directory", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert dry.returncode == 0, dry.stderr
    *_, installs, serves = dry.stdout.splitlines()
    assert installs.endswith("pointsman models get smollm2 --optional") and serves.endswith(
        "pointsman serve --port 8000"
    )


def test_the_table_of_knobs_matches_their_declarations() -> None:
    page = CONFIGURATION.read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "write_knobs.py"))
    assert page == script["with_table"](page), "run scripts/write_knobs.py"
    (row,) = (line for line in page.splitlines() if line.startswith("| `--watermark` |"))
    stale = page.replace(row, f"{row} and more")
    assert stale != page == script["with_table"](stale)
    with pytest.raises(ValueError, match="the page lacks the lines"):
        script["with_table"]("# A page without markers\n")


def test_the_page_of_the_command_line_is_that_of_the_commands() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_command_line.py"))
    written = (DOCS / "reference" / "command_line.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run scripts/write_command_line.py"


def test_the_configuration_page_lists_every_option_of_serve() -> None:
    page = CONFIGURATION.read_text()
    options = {option.name: option.opts for option in command_named("serve").params}
    for name in KNOBS | SERVER:
        assert any(f"{option}`" in page for option in options[name]), name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_accepts_the_alert_rules(tmp_path: Path) -> None:
    (rules,) = (text for _, _, text in blocks(MONITORING) if text.startswith("# alerts.yaml"))
    path = tmp_path / "alerts.yaml"
    path.write_text(rules)
    run = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"SUCCESS: {rules.count('- alert:')} rules" in run.stdout
