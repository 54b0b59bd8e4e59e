"""`import pointsman` needs NumPy alone, and costs little time."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pointsman

ENGINE_NAMES = {"LLM", "AsyncEngine", "SamplingParams"}

PROGRAM = """
import json, sys, time
start = time.process_time()
import numpy
numpy_ends = time.process_time()
before = set(sys.modules)
import pointsman
pointsman.Scheduler
times_numpy = (time.process_time() - numpy_ends) / (numpy_ends - start)
print(json.dumps([times_numpy, sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""


@cache
def import_in_a_new_process(attempt: int = 0) -> tuple[float, list[str], list[str]]:
    """CPU time of the import as a multiple of NumPy's before it, the modules that it loaded, and all loaded modules."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    times_numpy, new, loaded = json.loads(run.stdout)
    return times_numpy, new, loaded


def test_import_loads_only_numpy_and_the_standard_library() -> None:
    _, new, loaded = import_in_a_new_process()
    tops = {name.partition(".")[0] for name in new}
    foreign = tops - set(sys.stdlib_module_names) - {"pointsman", "numpy"}
    assert foreign == set()
    assert {"torch", "transformers", "rich", "typer", "tokenizers", "safetensors", "matplotlib"}.isdisjoint(loaded)


def test_import_pointsman_loads_no_subpackage_except_core() -> None:
    _, _, loaded = import_in_a_new_process()
    ours = {name for name in loaded if name.startswith("pointsman.")}
    assert {name for name in ours if not name.startswith("pointsman.core")} == {"pointsman.files", "pointsman.version"}


def test_the_package_exports_every_public_name_of_the_core() -> None:
    """Except names that only a simulator needs."""
    assert set(pointsman.__all__) ^ set(pointsman.core.__all__) == {"StepRun", "__version__"}
    for name in set(pointsman.__all__) - {"__version__"}:
        assert getattr(pointsman, name) is getattr(pointsman.core, name)


def test_a_star_import_needs_numpy_alone() -> None:
    code = "import sys; from pointsman import *; print(Policy, sorted({'torch', 'typer', 'scipy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip().endswith(" []")


def test_dir_shows_public_names_alone() -> None:
    assert set(dir(pointsman)) == {*pointsman.__all__, *ENGINE_NAMES, "__doc__"}


def test_names_of_the_engine_are_listed_and_typed() -> None:
    """`dir` lists the names of the engine without an import; type checkers and editors see these names under
    `TYPE_CHECKING`."""
    assert set(dir(pointsman)) >= ENGINE_NAMES
    source = ast.parse(Path(pointsman.__file__).read_text())
    (typed,) = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == {*ENGINE_NAMES, *pointsman.__all__} - {"__version__"}


def test_the_core_is_imported_on_first_use() -> None:
    """The command line prints its help without NumPy."""
    code = "import sys, pointsman; print('numpy' in sys.modules); pointsman.Scheduler; print('numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "True"]


def test_names_of_the_engine_are_resolved_on_first_use() -> None:
    """In a new process, name after name, with the modules that each name loads; sampling parameters need no PyTorch."""
    program = """
import sys
import pointsman
from pointsman import SamplingParams
assert SamplingParams is pointsman.engine.SamplingParams
assert "torch" not in sys.modules
sys.modules["torch"] = None  # as if it were not installed
for name in ("LLM", "AsyncEngine"):
    try:
        getattr(pointsman, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    errors = run.stdout.splitlines()
    assert len(errors) == 2
    for name, error in zip(("LLM", "AsyncEngine"), errors, strict=True):
        assert error == f"pointsman.engine.{name} needs torch; install it with: pip install 'pointsman[engine]'"


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'pointsman' has no attribute 'Schedular'"):
        _ = pointsman.Schedular  # type: ignore[attr-defined]


def test_import_takes_less_than_twice_the_time_of_numpy() -> None:
    """CPU time, the best of three processes, so that a busy or slow machine does not fail it."""
    assert min(import_in_a_new_process(attempt)[0] for attempt in range(3)) < 2


def test_a_scheduler_runs_with_nothing_but_numpy() -> None:
    program = """
import sys
import numpy
before = set(sys.modules)
import pointsman as p
s = p.Scheduler(p.SchedulerConfig(num_blocks=8, max_model_len=64))
s.add(p.Request("a", [1, 2, 3], arrival_time=0.0, max_tokens=2), 0.0)
while s.has_unfinished_requests():
    output = s.schedule(0.0)
    s.update(output, p.StepResult([7] * output.num_rows), 0.0)
s.check_invariants()
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(tops - set(sys.stdlib_module_names) - {"pointsman", "numpy"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
