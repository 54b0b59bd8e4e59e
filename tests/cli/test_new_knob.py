"""A knob that is declared in `pointsman/core/config.py`, and nowhere else, appears in every interface for knobs.

The tests run a copy of the package in which that one module has two more fields. Its other files are links.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.forking import ForkingParent

ROOT = Path(__file__).parents[2]
FIELDS = '''
    patience: Annotated[
        int,
        AtLeast(2),
        Option("Steps", "Steps that a request waits for company", default="5: five steps"),
        Tried((5, 7, 9), first=(5, 9)),
    ] = 5
    """How many steps a request waits for company. Up where requests are alone."""
    tempers: Annotated[
        int | Literal["mean"],
        AtLeast(0, of="steps"),
        Option("Steps", "Steps until a request is bored", flag="--temper", metavar="STEPS", is_simulated=False),
    ] = 3
    """Steps until a request is bored, or "mean"."""
    unseen: bool = False
    """A field without an option."""

'''
MODULES = (
    "pointsman.cli.engine_commands",
    "pointsman.cli.simulator_commands",
    "pointsman.cli.simulate",
    "pointsman.cli.tune",
    "tests.integrations.vllm_configs",
)
COMMANDS = ("generate", "serve", "simulate", "capacity", "tune")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingParent]:
    """A process that has imported the copy of the package with the two added fields."""
    folder = tmp_path_factory.mktemp("package")
    source, package = ROOT / "pointsman", folder / "pointsman"
    for real, copied in ((source, package), (source / "core", package / "core")):
        copied.mkdir()
        for path in real.iterdir():
            if path.name not in ("core", "config.py", "__pycache__") or path == source / "config.py":
                (copied / path.name).symlink_to(path)
    before, init, after = (source / "core" / "config.py").read_text(encoding="utf-8").partition("    def __post_init__")
    (package / "core" / "config.py").write_text(before + FIELDS + init + after, encoding="utf-8")
    paths = os.pathsep.join((str(folder), str(ROOT)))
    started = ForkingParent(sys.executable, MODULES, {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    yield started
    started.close()


def pointsman(parent: ForkingParent, *arguments: object) -> CompletedProcess[str]:
    return parent.run("-m", "pointsman", *arguments, timeout=120, COLUMNS="120")


def printed(parent: ForkingParent, program: str) -> Any:
    """The output of a program, as JSON."""
    run = parent.run("-c", f"import json, runpy\n{program}", timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_a_new_knob_in_its_panel(parent: ForkingParent, command: str) -> None:
    help_text = pointsman(parent, command, "--help").stdout
    (steps,) = re.findall(r"^Steps:\n((?:  .*\n)+)", help_text, re.MULTILINE)
    assert re.search(r"  --patience <int> +Steps that a request waits for company \[default: 5: five steps\]\.", steps)
    is_served = command in ("generate", "serve")
    temper = re.search(r"  --temper STEPS +Steps until a request is bored \[default: 3\]\.", steps)
    assert (temper is not None) is is_served, "it is not simulated"
    assert "unseen" not in help_text


def test_range_of_a_new_knob_is_checked_before_a_model_is_loaded(parent: ForkingParent) -> None:
    for command in ("generate", "serve", "simulate"):
        run = pointsman(parent, command, "--patience", 1)
        assert run.returncode == 2 and "patience is 1; it must be between 2 and" in run.stderr
    run = pointsman(parent, "serve", "--temper", "often")
    assert run.returncode == 2 and "tempers is 'often'; give a number of steps, or \"mean\"" in run.stderr


def test_the_engine_runs_with_a_new_knob(parent: ForkingParent, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = tmp_path / "run.jsonl"
    knobs = ("--patience", 7, "--temper", "mean", "--attention", "torch", "--no-fuse")  # without kernels to compile
    run = pointsman(parent, "generate", "--max-tokens", 1, "--record", record, *knobs)
    assert run.returncode == 0, run.stderr
    with record.open(encoding="utf-8") as lines:
        config = json.loads(next(lines))["config"]
    assert (config["patience"], config["tempers"]) == (7, "mean")


def test_a_simulation_runs_with_a_new_knob(parent: ForkingParent) -> None:
    for given, expected in ((("--patience", 9), 9), ((), 5)):
        run = pointsman(parent, "simulate", "--requests", 4, "--json", *given)
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["config"]["patience"] == expected


def test_tune_searches_a_new_knob_unless_the_knob_is_given(parent: ForkingParent) -> None:
    pytest.importorskip("optuna")
    small = ("--arrivals", "poisson:12", "--output-tokens", 20, "--requests", 16, "--trials", 10, "--json")
    targets = ("--ttft-p99", "1s", "--itl-p99", "30ms", "--workers", 1)
    found = json.loads(pointsman(parent, "tune", *small, *targets).stdout)
    assert found["defaults"]["settings"]["patience"] == 5
    tried = {each["settings"]["patience"] for each in (*found["frontier"], *found["neighbours"], found["chosen"])}
    assert len(tried) > 1 and tried <= {5, 7, 9}
    fixed = json.loads(pointsman(parent, "tune", *small, *targets, "--patience", 7).stdout)
    assert "patience" not in fixed["chosen"]["settings"]
    program = """
from pointsman.sim.tunables import DESIGN, tunables
(found,) = (each for each in tunables(frozenset()) if each.name == "patience")
print(json.dumps([DESIGN["patience"], found.values, found.is_ordered]))
"""
    assert printed(parent, program) == [[5, 9], [5, 7, 9], True]


def test_the_scheduler_for_vllm_accepts_a_new_knob(parent: ForkingParent) -> None:
    program = """
from types import SimpleNamespace
from pointsman.integrations.vllm.settings import read_settings, scheduler_config
from tests.integrations.vllm_configs import vllm_config
settings = read_settings({"pointsman": {"patience": 8, "tempers": "mean", "unseen": True}})
config = scheduler_config(vllm_config(), SimpleNamespace(num_blocks=40), 16, settings.knobs)
print(json.dumps([config.patience, config.tempers, config.unseen]))
"""
    assert printed(parent, program) == [8, "mean", True]


def test_ray_and_the_configuration_file_accept_a_new_knob(parent: ForkingParent, tmp_path: Path) -> None:
    file = tmp_path / "pointsman.yaml"
    file.write_text("patience: 8\ntempers: 4\n")
    program = f"""
from pointsman.cli.serve import serve_settings
from pointsman.integrations.ray.arguments import read_arguments
engines = [
    read_arguments({{"model": "demo", "patience": "8", "tempers": "mean"}}, {{}}).serve.engine,
    serve_settings({{}}, {str(file)!r}, {{}}).engine,
]
print(json.dumps([[engine["patience"], engine["tempers"]] for engine in engines]))
"""
    assert printed(parent, program) == [[8, "mean"], [8, 4]]


def test_the_table_of_the_docs_has_a_row_for_a_new_knob(parent: ForkingParent) -> None:
    script = str(ROOT / "scripts" / "write_knobs.py")
    table = printed(parent, f"print(json.dumps(runpy.run_path({script!r})['table']()))").splitlines()
    assert (
        "| `--patience` | 5: five steps | How many steps a request waits for company. Up where requests are alone. |"
        in (table)
    )
    assert '| `--temper` | 3 | Steps until a request is bored, or "mean". |' in table
    assert not any("unseen" in row for row in table)
