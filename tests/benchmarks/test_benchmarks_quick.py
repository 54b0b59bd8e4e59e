"""Each benchmark runs in its quick form and ends with one JSON line of sensible figures.

Those that need no model guard a claim about the scheduler in every run; the others are in the long form, beside the
benchmarks in full. That they can be imported is seen in every run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _common import AZURE_TRACE

from benchmarks import openvino_env, vllm_env, vllm_scheduler

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_quick(script: str, *options: str) -> dict[str, Any]:
    """The figures of the last line that `script --quick` prints."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=BENCHMARKS.parent)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert figures["benchmark"] == Path(script).stem
    return figures


def imported_from_the_package(script: Path) -> list[tuple[str, str]]:
    """Modules and names that a script imports from Pointsman, inside of functions as well."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, name.name) for n in nodes if (n.module or "").startswith("pointsman") for name in n.names]


@pytest.mark.parametrize("script", [path.name for path in sorted(BENCHMARKS.glob("*.py"))])
def test_what_a_benchmark_imports_is_there(script: str) -> None:
    """Most benchmarks run in the long form alone; a name that has moved is noticed in every run."""
    for module, name in imported_from_the_package(BENCHMARKS / script):
        if module.startswith("pointsman.integrations"):  # needs vLLM
            assert importlib.util.find_spec(module), module
        elif not hasattr(importlib.import_module(module), name):
            assert importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_simulator() -> None:
    if not AZURE_TRACE.exists():
        pytest.skip(f"no trace at {AZURE_TRACE}")
    figures = run_quick("simulator.py", "--no-calibration")
    for name in ("azure", "azure, cached", "mooncake"):
        assert figures["exact"][name]["difference"] <= 1e-9, name
    assert figures["azure"]["plain"]["events"] < figures["azure"]["plain"]["steps"] / 3
    assert 0.5 < figures["growth"] < 3


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_tune() -> None:
    figures = run_quick("tune.py")
    (found,) = figures["workloads"].values()
    assert found["tuned"] >= 0.9 * found["grid"] > 0
    assert found["tuned"] >= found["defaults"]


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_auto() -> None:
    if not AZURE_TRACE.exists():
        pytest.skip(f"no trace at {AZURE_TRACE}")
    figures = run_quick("auto.py", "--check", "--workers", "2")
    assert all(row["auto"] > row["vllm"] for row in figures["judged"])


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_policies() -> None:
    """`--check`: every policy gains at least half of what it should. Two processes simulate."""
    if not AZURE_TRACE.exists():
        pytest.skip(f"no trace at {AZURE_TRACE}")
    figures = run_quick("policies.py", "--check", "--workers", "2")
    assert figures["comparisons"] and all(row["met"] for row in figures["comparisons"])


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_calibration() -> None:
    """The machine may be busy, so the limits are wide; what is wrong by a factor is noticed."""
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    figures = run_quick("calibration.py")
    assert (figures["vllm"] is not None) == vllm_env.is_complete()
    for found in filter(None, (figures["engine"], figures["vllm"])):
        assert set(found) == {"tokens_per_second", "ttft_p50", "itl_p50", "ttft_p99", "itl_p99"}
        assert all(each["measured"] > 0 and each["limit"] >= 0.1 for each in found.values())
        assert abs(found["tokens_per_second"]["error"]) < 0.3
        assert -0.5 < found["itl_p50"]["error"] < 1


@pytest.mark.in_turn
@pytest.mark.e2e
def test_scheduler_step() -> None:
    figures = run_quick("scheduler_step.py", "--sizes", "1,64", "--policies", "fair")
    assert figures["sides"] == ["pointsman"]
    assert set(figures["pointsman_us"]) == {"1", "64"}
    assert all(0 < microseconds < 10_000 for microseconds in figures["pointsman_us"].values())
    assert set(figures["waiting_pointsman_us"]) == {"0", "10000", "100000"}
    for feature in ("asynchronous", "speculation", "lora"):
        assert 0.5 < figures[f"{feature}_ratio"] < 4, feature
    assert set(figures["policy_ratios"]) == {"order fair"}
    assert all(0.5 < ratio < 4 for ratio in figures["policy_ratios"]["order fair"].values())


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_vllm_scheduler() -> None:
    figures = run_quick("vllm_scheduler.py", "--sizes", "16", "--no-backlog")["decode"]
    if not vllm_env.is_complete():
        assert figures is None
        return
    assert set(figures) == {"16", *(f"256, {way}" for way in vllm_scheduler.WAYS)}
    assert all(0 < each["pointsman_us"] < each["vllm_us"] for each in figures.values())


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_vllm_observer() -> None:
    figures = run_quick("vllm_observer.py")["loads"]
    if not vllm_env.is_complete():
        assert figures is None
        return
    assert len(figures) >= 4
    for name, each in figures.items():
        assert 0 < each["writer_us"] < each["own_us"] and 0.9 < each["ratio"] < 1.1, name


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_vllm_engine() -> None:
    """It fails, too, where both schedulers do not lead to the same tokens."""
    figures = run_quick("vllm_engine.py")["requests"]
    if not vllm_env.is_complete():
        assert figures is None
        return
    assert set(figures) == {"64"}
    ours, own = figures["64"]["pointsman"], figures["64"]["vllm"]
    assert 0 < ours["scheduler_us"] < own["scheduler_us"] < own["step_us"]
    assert 0.1 < figures["64"]["ratio"] < 1.5  # beside other tests, on the same cores, it says little
    assert ours["idle_ms"] < own["idle_ms"] + 50


@pytest.mark.e2e
def test_prefix_scaling() -> None:
    figures = run_quick("prefix_scaling.py")
    assert set(figures["admit_ms"]) == {"1000", "10000", "100000"}
    assert figures["growth"] < 10  # searching the pool block by block would make it 100


@pytest.mark.in_turn
@pytest.mark.e2e
def test_page() -> None:
    pytest.importorskip("playwright", reason="the page is measured with Playwright")
    if shutil.which("/usr/bin/chromium") is None:
        pytest.skip("the page is measured in Chromium, which is not there")
    figures = run_quick("page.py")["run"]
    assert figures["steps"] > 5_000 and 0 < figures["first_paint"] < 20 and 0 < figures["scrub_p95"] < 2
    assert 0 < figures["memory_mib"] < 300


@pytest.mark.e2e
def test_page_without_a_browser() -> None:
    environment = {**os.environ, "CHROMIUM": "/nowhere/chromium"}
    command = [sys.executable, str(BENCHMARKS / "page.py"), "--quick", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "missed: a page is shown in a real browser" in done.stdout


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_static_vs_continuous() -> None:
    pytest.importorskip("torch")
    figures = run_quick("static_vs_continuous.py")["experiment"]
    # Steps and slots do not depend on the machine's speed, so they are exact.
    assert 0.10 <= figures["static"]["utilisation"] <= 0.18
    assert figures["continuous"]["utilisation_while_queued"] >= 0.95
    assert figures["steps_ratio"] >= 6


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_engine_throughput() -> None:
    pytest.importorskip("torch")
    contenders = ["transformers-static", "transformers-continuous", "pointsman"]
    options = ["--contenders", ",".join(contenders), "--rounds", "2", "--requests", "3"]
    figures = run_quick("engine_throughput.py", *options)["float32"]
    assert set(figures) == set(contenders)
    for name in contenders[1:]:
        assert figures[name]["agreement"] == 1.0  # the same model and prompts, the same tokens
    assert figures["transformers-static"]["ratio"] > 0.1
    assert all(side["output_tokens_per_second"] > 1 for side in figures.values())


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_engine_throughput_beside_openvino() -> None:
    if not openvino_env.is_complete():
        pytest.skip("no environment for OpenVINO; python benchmarks/openvino_env.py makes it")
    options = ["--contenders", "openvino,pointsman", "--rounds", "1", "--requests", "6"]
    both = run_quick("engine_throughput.py", *options)["float32"]
    assert set(both) == {"openvino", "pointsman"}
    assert both["pointsman"]["agreement"] == 1.0


@pytest.mark.e2e
def test_engine_throughput_names_the_environment_that_is_not_there(tmp_path: Path) -> None:
    """Environments lie beside the benchmarks, so a copy of the benchmarks alone has none."""
    for source in BENCHMARKS.glob("*.py"):
        shutil.copy(source, tmp_path)
    command = [sys.executable, str(tmp_path / "engine_throughput.py"), "--quick", "--contenders", "openvino,vllm-eager"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert finished.returncode == 1
    printed = finished.stdout + finished.stderr
    assert "skipped: OpenVINO" in printed and "openvino_env.py" in printed
    assert "skipped: vLLM" in printed and "vllm_env.py" in printed
    assert "no contender is left" in printed


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_time_to_first_token() -> None:
    pytest.importorskip("torch")
    figures = run_quick("time_to_first_token.py", "--chats", "2")
    assert figures["cache_on"]["ratio"] > 2  # 12 times fewer tokens to compute
    assert figures["cache_off"]["ratio"] < figures["cache_on"]["ratio"]


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_step_overhead() -> None:
    pytest.importorskip("torch")
    figures = run_quick("step_overhead.py", "--blocks", "1")["threads"]["1"]
    assert 0 < figures["scheduler_ms"] < figures["step_ms"]
    assert 0 < figures["operators_ms"] < figures["profiled_step_ms"]
    least, most = figures["overhead_bounds"]
    assert least <= figures["overhead"] <= most < 1


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_async_scheduling() -> None:
    pytest.importorskip("torch")
    models = run_quick("async_scheduling.py")["models"]
    assert set(models) == {"demo", "10M"}
    # A second step in flight needs a core that other tests keep busy here, so that its pause says nothing.
    for figures in models.values():
        assert figures["throughput_ratio"] > 0
        assert all(0 < microseconds < 100_000 for microseconds in figures["pause_us"].values())


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_speculation() -> None:
    pytest.importorskip("torch")
    models = run_quick("speculation.py")["models"]
    assert set(models) == {"demo", "10M"}
    for workloads in models.values():
        assert all(figures["equal"] for name, figures in workloads.items() if name.startswith("repetitive"))
        assert all(figures["ratio"] > 0.1 for figures in workloads.values())
        assert workloads["repetitive, 1 request"]["acceptance"] > 0.1


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_kv_transfer() -> None:
    pytest.importorskip("torch")
    figures = run_quick("kv_transfer.py")
    assert figures["offload"]["computed_ratio"] < 0.4  # counts, which do not depend on the machine
    assert max(figures["offload"]["preemptions"]["without"]) > 0 < figures["offload"]["restored_blocks"]
    assert figures["swap"]["recomputed_ratio"]["swap"] < 0.25
    assert figures["swap"]["decisions"]["swap"]["swap"] > 10
    assert figures["store"]["first_token_ratio"] > 1  # 16 times fewer tokens to compute


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_server_throughput() -> None:
    pytest.importorskip("uvicorn")
    figures = run_quick("server_throughput.py")
    assert set(figures["rates"]) == {"inf", "20"}
    for rate in figures["rates"].values():
        ours = rate["pointsman"]
        assert ours["completed"] == figures["requests"]
        assert 0 < ours["median_itl_ms"] <= ours["p99_itl_ms"] < 10_000
        assert ours["output_throughput"] > 1


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_server_load() -> None:
    """`--check`: every request is answered once and completely, and nothing is left over."""
    pytest.importorskip("uvicorn")
    figures = run_quick("server_load.py", "--check", "--rounds", "2")
    assert len(figures["rounds"]) == 2
    for each in figures["rounds"]:
        assert each["faults"] == 0 and each["blocks_returned"] and each["preemptions"] > 0
        assert each["counts"]["malformed"] == each["counts"]["late"] == figures["requests"] // 20
        assert each["counts"]["hung up"] > 0


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_server_faults() -> None:
    """`--check`: clients are told, exit codes are right, nothing that was accepted is lost.

    Drains and a killed API process are in the long form; tests/server/test_serve.py has a test of each.
    """
    pytest.importorskip("uvicorn")
    figures = run_quick("server_faults.py", "--check", "--scenarios", "engine-killed,slow-readers")
    assert figures["engine-killed"]["with_error"] == figures["engine-killed"]["requests"]
    assert figures["slow-readers"]["complete"] == figures["slow-readers"]["readers"]


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_server_attacks() -> None:
    """Beside other tests, on the same cores, times say little; what came back does not depend on them."""
    pytest.importorskip("uvicorn")
    figures = run_quick("server_faults.py", "--scenarios", "attacks,crowds,large-bodies")
    assert len(figures["attacks"]) >= 4
    for name, each in figures["attacks"].items():
        assert each["status"] in ("200", "400"), name
        assert 0 <= each["held"] < 30 and 0 < each["plain gap"] < 30, name
    assert figures["crowds"]["idle connections"]["gap"] > 0
    bodies = figures["large-bodies"]
    assert bodies["left_mib"] <= 64
    assert bodies["announced_status"] == bodies["chunked_status"] == 413
    assert bodies["announced_closed"] and bodies["chunked_closed"]


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_server_overhead() -> None:
    pytest.importorskip("uvicorn")
    figures = run_quick("server_overhead.py", "--rounds", "1", "--requests", "24", "--streams", "12")
    assert figures["complete"] == 24
    assert -1 < figures["loss"] < 0.9  # beside other tests, on the same cores, it says little
    assert all(seconds > 0 for seconds in figures["cpu_seconds_per_1000_tokens"].values())


@pytest.mark.soak_in_turn
@pytest.mark.soak
@pytest.mark.e2e
def test_scale() -> None:
    """Beside other tests, on the same cores, times say little; what came back does not depend on them."""
    pytest.importorskip("uvicorn")
    figures = run_quick("scale.py")
    assert figures["hit_rates"]["two engines"] >= 0.8
    assert (figures["kill"]["failed"], figures["kill"]["differing"]) == (0, 0)
    assert figures["kill"]["blocks_back"]
    for fleet in figures["simulated"].values():
        assert abs(fleet["measured"] - fleet["simulated"]) <= 0.03
