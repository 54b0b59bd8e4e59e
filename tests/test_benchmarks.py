"""Every benchmark imports existing names, and runs in its quick form."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.recording import Recorder
from pointsman.sim.step_log import read_steps
from tests.engine.real.weights import weights_of

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = [path.name for path in sorted(BENCHMARKS.glob("[!_]*.py")) if not path.stem.endswith("_env")]
ENGINES = [sys.executable, str(BENCHMARKS / "engine_throughput.py"), "--quick"]
OVERHEAD = [sys.executable, str(BENCHMARKS / "server_overhead.py"), "--quick"]


def imported_from_the_package(script: Path) -> list[tuple[str, str]]:
    """Modules and names that a script imports from Pointsman, including imports inside functions."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, name.name) for n in nodes if (n.module or "").startswith("pointsman") for name in n.names]


@pytest.mark.parametrize("script", [path.name for path in sorted(BENCHMARKS.glob("*.py"))])
def test_names_that_benchmarks_import_exist(script: str) -> None:
    """Only the long form runs benchmarks; the short form finds names that have moved."""
    for module, name in imported_from_the_package(BENCHMARKS / script):
        if module.startswith("pointsman.integrations"):  # needs vLLM
            assert importlib.util.find_spec(module), module
        elif not hasattr(importlib.import_module(module), name):
            assert importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


@pytest.mark.parametrize(
    ("num_slow", "missed", "not_measured"), [(0, 0, 0), (8, 1, 0), (4, 0, 1)], ids=["equal", "slower", "unclear"]
)
def test_two_checkouts_are_compared_by_confidence_interval_of_the_mean(
    monkeypatch: pytest.MonkeyPatch, num_slow: int, missed: int, not_measured: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    against, common, model = map(importlib.import_module, ("_server_against", "_common", "_engine_model"))
    jobs = model.make_jobs(4, (1, 2), (10, 20))
    starts = [[against.Round((1.0, 1.1 if at < num_slow else 1.0), (1.0, 1.0), len(jobs))] * 3 for at in range(8)]
    targets = common.Targets()
    figures = against.report_against(Path("other"), starts, jobs, 4, targets)
    assert (len(targets.missed), len(targets.not_measured)) == (missed, not_measured)
    assert figures["cpu_ratio"] == pytest.approx(1 + num_slow / 8 * 0.05, abs=1e-4)
    cut = common.Targets()
    against.report_against(Path("other"), [[against.Round((1.0, 1.0), (1.0, 1.0), 3)]], jobs, 4, cut)
    assert cut.missed == ["3 of 4 requests are complete; target: all"]


@pytest.mark.e2e
def test_comparing_overhead_with_a_path_without_pointsman_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([*OVERHEAD, "--against", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"{tmp_path} has no pointsman to import" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
def test_benchmark_measures_the_overhead_of_two_checkouts() -> None:
    command = [*OVERHEAD, "--against", str(BENCHMARKS.parent), "--rounds", "2", "--starts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["complete"], len(found["cpu_ratios"])) == (32, 2)


@pytest.mark.long
@pytest.mark.e2e
def test_benchmark_reports_a_missing_real_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POINTSMAN_MODELS", str(tmp_path))
    command = [sys.executable, str(BENCHMARKS / "real_model.py"), "--quick", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "skipped: smollm2 is not installed; pointsman models get smollm2 installs it" in done.stdout
    not_measured = json.loads(done.stdout.splitlines()[-1])["not_measured"]
    assert [text.partition(" (")[0] for text in not_measured] == ["drafts", "prefixes", "explanations", "prediction"]


def test_benchmark_splits_a_server_recording_into_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    recording = tmp_path / "server.jsonl"
    with recording.open("w") as file:
        scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=32), recorder=Recorder(file))
        for start, count in ((0.0, 2), (10.0, 3)):
            for number in range(count):
                name = f"{start:g}-{number}"
                scheduler.add(Request(name, range(6), arrival_time=start, max_tokens=2), start)
            while not scheduler.is_idle:
                output = scheduler.schedule(start)
                start += 1
                tokens = [7] * int(output.samples.sum())
                scheduler.update(output, StepResult(tokens, step_time=0.5 * count), start)
    first, second = importlib.import_module("_real_prediction").parts_of(recording, [2, 3])
    for part, count in ((first, 2), (second, 3)):
        log = read_steps(part)
        assert (log.num_requests, len(log.seconds)) == (count, 2)
        assert log.loads[:, 1].tolist() == [count] * 2, "rows of each step"


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_runs_in_its_quick_form(script: str) -> None:
    """The output ends with one JSON line. Targets are not checked: other tests run on the same cores."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == Path(script).stem


def test_each_benchmark_round_has_different_real_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a prefix cache would serve the second round."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    real = importlib.import_module("_engine_real_model")
    workload = real.RealModel("demo", (1, 4), 8)
    rounds = [workload.requests(load, number) for number in (0, 1) for load in (1, 4)]
    prompts = [tuple(prompt) for requests in (workload.warm_up(), *rounds) for prompt in requests.prompts]
    assert len(set(prompts)) == len(prompts) == real.WARM_UP_REQUESTS + 2 * (1 + 4)
    assert all(real.MIN_PROMPT <= len(prompt) <= real.MAX_PROMPT for prompt in prompts)
    assert [requests.outputs for requests in rounds] == [[8], [8] * 4] * 2
    assert workload.requests(4, 1) == real.RealModel("demo", (1, 4), 8).requests(4, 1)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "quantized"], "--dtype quantized needs real weights; give --model"),
        (["--requests", "1,4"], "several numbers in --requests need real weights; give one number, or --model"),
        (["--model", "demo", "--dtype", "quantized"], "--contenders has nothing to compare"),
        (["--model", "demo", "--contenders", "orca"], "no contender is called orca; choose from pointsman-float32"),
        (["--model", "nowhere.gguf"], "no GGUF file at nowhere.gguf"),
    ],
)
def test_engines_that_cannot_be_compared_are_reported(options: list[str], message: str) -> None:
    done = subprocess.run([*ENGINES, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("model", "dtype", "ours", "peer"),
    [
        ("demo", "float32", "pointsman-float32", "transformers-static"),
        ("smollm2", "quantized", "pointsman-float32", "llama.cpp"),
    ],
)
def test_engines_are_compared_on_real_weights(
    model: str, dtype: str, ours: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peer == "llama.cpp":
        model = str(weights_of(model))
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        if not importlib.import_module("llama_cpp_env").is_complete():
            pytest.skip("benchmarks/llama_cpp_env.py has not made its environment")
    options = [
        "--model",
        model,
        "--dtype",
        dtype,
        "--contenders",
        f"{ours},{peer}",
        "--requests",
        "1,2",
        "--rounds",
        "1",
    ]
    done = subprocess.run([*ENGINES, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])[dtype]
    for name in (ours, peer):
        assert found[name]["first_answer_seconds"] > 0
        for load in ("1", "2"):
            figures = found[name]["loads"][load]
            assert 0 < figures["first_token_seconds"] < 32 * int(load) / figures["output_tokens_per_second"]
            assert figures["peak_mebibytes"] > 10
    assert found[ours]["agreement"] is None
    assert found[peer]["agreement"] is not None
    assert set(found["ratios"][f"{peer} / {ours}"]) == {"1", "2"}
