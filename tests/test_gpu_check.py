"""The check of the engine on a GPU: its options, processes, report and arithmetic; and each part on a CPU. Short tests
run small parts in real processes; the long form runs all real parts with tiny sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_check.__main__ import main, make_parser
from gpu_check.findings import Findings, read_findings
from gpu_check.part import Setting
from gpu_check.parts import kernels, throughput
from gpu_check.report import Report, goal_text, result_line
from gpu_check.roofline import (
    decode_bytes,
    decode_share,
    measure_bandwidth,
    measure_product,
    prompt_flops,
    prompt_share,
    seconds_of,
)
from gpu_check.running import PARTS, Options, Part, PartProcess, Result, run_parts
from gpu_check.steps import GraphTimes

from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.sampling.sampler import choose_with_pytorch
from pointsman.sim.model import ModelShape
from pointsman.sim.shapes import model_shape

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
LETTERS = "".join(part.letter for part in PARTS)

OWN_PARTS = """
import os, subprocess, sys, time
from pathlib import Path

def good(setting):
    setting.findings.figure("device", setting.device)
    setting.findings.row("rows", number=1, tiny=setting.tiny)

def goal(setting):
    setting.findings.goal("speed", 2.0, at_least=3.0)

def wrong(setting):
    setting.findings.check(True, "fine")
    setting.findings.check(False, "one is not two")

def raising(setting):
    setting.findings.figure("before", 1)
    raise RuntimeError("the reason of the failure")

def slow(setting):
    setting.findings.figure("before", 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["OWN_PARTS_PID"]).write_text(str(child.pid))
    time.sleep(600)

def told(setting):
    setting.findings.figure("environment", os.environ.get("OWN_PARTS_ON_CPU", ""))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Part]]:
    """Makes parts of the functions above, by name."""
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    paths = [tmp_path, ROOT / "scripts", ROOT / "benchmarks", ROOT]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("OWN_PARTS_PID", str(tmp_path / "pid"))

    def make(*names: str, seconds: float = 20.0) -> list[Part]:
        return [
            Part(chr(ord("a") + number), name, f"about {name}", f"own_parts:{name}", seconds)
            for number, name in enumerate(names)
        ]

    return make


def run_all(parts: list[Part], seconds: float = 60.0, **options: Any) -> list[Result]:
    return run_parts(parts, Options("cpu", **options), seconds, begins=lambda part: None, ends=lambda result: None)


# ----------------------------------------------------------------------------------------------------------- options


def test_gpu_check_option_only_accepts_letters_and_names() -> None:
    assert make_parser(PARTS).parse_args(["--only", "b, kernels"]).only == ["b", "a"]
    assert make_parser(PARTS).parse_args([]).only is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "a,z"], "there is no part 'z'; choose from a kernels, b tokens"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--seconds", "0"], "0 is not a time"),
        (["--out", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_gpu_check_reports_wrong_options(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        make_parser(PARTS).parse_args(arguments)
    assert exit_code.value.code == 2 and message in capsys.readouterr().err


def test_gpu_check_installs_wheels_beside_the_script(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    (scripts / "gpu_check").mkdir(parents=True)
    (scripts / ".whl").mkdir()
    (scripts / "gpu_check" / "__main__.py").write_text("import carried, sys; print(carried.WORD, sys.argv[1:])")
    info = "carried-1.0.dist-info"
    with zipfile.ZipFile(scripts / ".whl" / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "WORD = 'here'")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    script = shutil.copy(SCRIPT, scripts)
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    before = set(tmp_path.iterdir())
    run = subprocess.run([script, "--tiny", "x y"], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "here ['--tiny', 'x y']\n", run.stderr
    assert set(tmp_path.iterdir()) == before, "what was installed is removed"


def test_gpu_check_runs_its_parts_in_the_documented_order() -> None:
    assert LETTERS == "abcgdfhe"
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        module, function = part.function.split(":")
        assert (ROOT / "scripts" / (module.replace(".", "/") + ".py")).is_file() and function == "run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_reported_before_any_part_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "a"]) == 2
    assert "--device is cuda, and PyTorch finds no GPU; --device cpu --tiny" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- processes


def test_a_failing_part_of_the_gpu_check_does_not_stop_other_parts(own: Callable[..., list[Part]]) -> None:
    good, raising, wrong, last = run_all(own("good", "raising", "wrong", "good"), tiny=True)
    assert [each.status for each in (good, raising, wrong, last)] == ["passed", "failed", "failed", "passed"]
    assert raising.found.figures == {"before": 1} and "the reason of the failure" in raising.log
    assert wrong.found.wrong == ["one is not two"]
    assert last.found.tables == {"rows": [{"number": 1, "tiny": True}]} and last.found.figures == {"device": "cpu"}
    assert result_line(wrong).startswith("c wrong: failed (1 failed checks)")


def test_a_gpu_check_part_beyond_its_limit_is_killed_with_children(
    own: Callable[..., list[Part]], tmp_path: Path
) -> None:
    slow, good = run_all([*own("slow", seconds=3.0), *own("good")])
    assert slow.status == "killed" and slow.found.figures == {"before": 1} and 2.9 < slow.seconds < 12
    assert good.is_passed
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(child))


def test_parts_end_when_the_gpu_check_is_killed(own: Callable[..., list[Part]], tmp_path: Path) -> None:
    own("slow")
    program = (
        "from gpu_check.__main__ import main; from gpu_check.running import Part; "
        "main(['--device', 'cpu'], [Part('a', 'slow', '', 'own_parts:slow', 60.0)])"
    )
    check = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text() != "")
    check.kill()
    check.wait()
    wait_for(lambda: not is_alive(int(pid.read_text())))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_parts_of_the_gpu_check_share_one_time_limit(own: Callable[..., list[Part]]) -> None:
    slow, good = run_all(own("slow", "good"), seconds=1.0)
    assert slow.status == "killed" and good.status == "not run" and not good.found.figures


def test_a_gpu_check_part_sets_its_environment_on_a_cpu(own: Callable[..., list[Part]]) -> None:
    (part,) = own("told")
    part = Part(part.letter, part.name, part.title, part.function, 20.0, {"OWN_PARTS_ON_CPU": "yes"})
    assert run_all([part])[0].found.figures == {"environment": "yes"}


def test_a_prepared_gpu_check_part_waits_for_the_start_signal(own: Callable[..., list[Part]], tmp_path: Path) -> None:
    process = PartProcess(own("good")[0], Options("cpu"), tmp_path)
    try:
        time.sleep(0.5)
        assert not (tmp_path / "a.findings").exists()
        assert process.run(20).is_passed
    finally:
        process.kill()


def test_kernels_are_interpreted_on_a_cpu_alone() -> None:
    assert [part.letter for part in PARTS if part.on_cpu] == ["a"]
    assert PARTS[0].on_cpu == {"TRITON_INTERPRET": "1"}


# ------------------------------------------------------------------------------------------------------------ report


def test_gpu_check_writes_its_results_file_after_each_part(own: Callable[..., list[Part]], tmp_path: Path) -> None:
    """A reader sees the first part while the second runs, and never half a file."""
    out, seen = tmp_path / "check.json", []

    def watch() -> None:
        while len(seen) < 2 and watching.is_alive():
            if out.exists():
                parts = list(json.loads(out.read_text())["parts"])
                if parts not in seen:
                    seen.append(parts)
            time.sleep(0.005)

    watching = threading.current_thread()
    thread = threading.Thread(target=watch)
    thread.start()
    parts = [*own("good"), Part("b", "slow", "about", "own_parts:slow", 1.0)]
    assert main(["--device", "cpu", "--out", str(out)], parts) == 1
    thread.join(10)
    assert seen == [[], ["a"]]
    final = json.loads(out.read_text())
    assert final["failed"] == ["b slow: killed"] and final["planned"] == ["a", "b"]
    assert final["parts"]["b"]["figures"] == {"before": 1} and final["gpu_check"]["device"] == "cpu"


def test_gpu_check_ends_with_tables_and_one_line_of_json(
    own: Callable[..., list[Part]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--tiny", "--only", "b"], own("raising", "good")) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert list(found["parts"]) == ["b"] and found["failed"] == [] and found["gpu_check"]["tiny"] is True
    assert any(line.split() == ["b", "good", "passed", *line.split()[-2:]] for line in lines)


def test_missed_gpu_goals_are_reported_and_keep_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = Findings(tmp_path / "found", is_judged=True)
    findings.goal("speed", 2.0, at_least=3.0)
    findings.goal("delay", 1.0, at_most=1.05)
    findings.skip("memory", "no device")
    report = Report({}, ["a"])
    report.add(Result(PARTS[0], "passed", 1.0, read_findings(tmp_path / "found")))
    assert report.failed == [] and report.missed == ["speed is 2; goal: at least 3"]
    report.show()
    printed = capsys.readouterr().out
    assert "missed: speed is 2" in printed and "met: delay is 1; goal: at most 1.05" in printed
    assert "not measured: memory (no device)" in printed


def test_gpu_goals_are_not_judged_on_a_cpu(own: Callable[..., list[Part]]) -> None:
    (result,) = run_all(own("goal"))
    assert result.is_passed and result.found.goals == [] and result.found.skipped[0].startswith("speed (goals are for")


def test_a_gpu_goal_with_two_limits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at_least 1 and at_most 2; give one of them"):
        Findings(tmp_path / "found", is_judged=True).goal("speed", 1.0, at_least=1, at_most=2)


def test_findings_before_a_truncated_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "found"
    findings = Findings(path, is_judged=True)
    findings.figure("numbers of NumPy", np.float32(0.5))
    findings.note("a sentence")
    path.write_text(path.read_text() + '["figure", "half", 1')
    found = read_findings(path)
    assert found.figures == {"numbers of NumPy": 0.5} and found.notes == ["a sentence"]
    assert read_findings(tmp_path / "none").figures == {}
    assert goal_text({"name": "x", "value": 1.0, "target": 2.0, "is_least": False}) == "x is 1; goal: at most 2"


# ---------------------------------------------------------------------------------------------------------- roofline


def small() -> ModelShape:
    return ModelShape(
        name="small", num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=16,
        vocab_size=100, max_model_len=64, source="this test", tied_embeddings=True,
    )  # fmt: skip


def test_decode_bytes_count_weights_head_and_kv_once() -> None:
    attention, mlp = 8 * 16 + 2 * 8 * 8 + 16 * 8, 3 * 8 * 16  # queries, keys and values, output; gate, up, down
    weights = 2 * (attention + mlp) + 100 * 8
    kv = 2 * 2 * 2 * 4  # layers, keys and values, heads, dim
    assert decode_bytes(small(), 0) == 2 * weights
    assert decode_bytes(small(), 10) == 2 * (weights + 10 * kv)
    assert decode_share(small(), 10, seconds=2.0, bandwidth=weights + 10 * kv) == pytest.approx(1.0)


def test_prompt_flops_count_products_attention_and_one_head() -> None:
    products = 2 * 2 * ((8 * 16 + 2 * 8 * 8 + 16 * 8) + 3 * 8 * 16)
    attention = 2 * 2 * 2 * 4 * 4 * (1 + 2 + 3)  # layers, scores and sums, two each, heads, dim; positions attended to
    flops = 3 * products + attention + 2 * 100 * 8
    assert prompt_flops(small(), 3) == flops
    assert prompt_share(small(), 3, seconds=0.5, product_rate=4 * flops) == pytest.approx(0.5)


def test_shapes_have_the_parameter_counts_of_their_models() -> None:
    assert model_shape("Qwen/Qwen3-0.6B").num_params == pytest.approx(0.6e9, rel=0.02)
    assert model_shape("Qwen/Qwen3-8B").num_params == pytest.approx(8.19e9, rel=0.01)
    assert decode_bytes(model_shape("Qwen/Qwen3-8B"), 1024) == pytest.approx(2 * 7.57e9 + 1024 * 147456, rel=0.01)


def test_measured_bandwidth_and_product_rate_are_plausible() -> None:
    assert 1e8 < measure_bandwidth("cpu", tiny=True) < 1e12
    assert 1e6 < measure_product("cpu", tiny=True) < 1e14


def test_watching_cuda_graphs_on_a_cpu_records_no_replay() -> None:
    replay = torch.cuda.CUDAGraph.replay
    graphs = GraphTimes()
    with graphs.watching():
        assert torch.cuda.CUDAGraph.replay is not replay
    assert torch.cuda.CUDAGraph.replay is replay and graphs.take() is None


class StandInEvent:
    """A CUDA event on a clock that counts: each record is three milliseconds after the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        StandInEvent.now += 3.0
        self.at = StandInEvent.now

    def synchronize(self) -> None:
        """All work is done."""

    def elapsed_time(self, other: StandInEvent) -> float:
        return other.at - self.at


def test_cuda_graph_replays_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(graph))
    replay, graphs = torch.cuda.CUDAGraph.replay, GraphTimes()
    with pytest.raises(KeyError), graphs.watching():
        torch.cuda.CUDAGraph.replay("one")
        assert graphs.take() == pytest.approx(0.003)
        torch.cuda.CUDAGraph.replay("two")
        torch.cuda.CUDAGraph.replay("three")
        assert graphs.take() == pytest.approx(0.006) and graphs.num_taken == 3
        raise KeyError("what a part raises")
    assert replayed == ["one", "two", "three"] and torch.cuda.CUDAGraph.replay is replay


def test_work_on_a_gpu_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    calls: list[int] = []
    assert seconds_of(lambda: calls.append(1), "cuda", repeats=4, warmups=2) == pytest.approx(0.003)
    assert len(calls) == 6


# ----------------------------------------------------------------------------------------------------------- kernels

CASES = [
    kernels.Case("plain", LayerShape(2, 16, 16, 4), block_size=4),
    kernels.Case("all", LayerShape(1, 8, 12, 3), block_size=8, window=9, softcap=5.0, has_sinks=True),
]


class Broken(TorchAttention):
    """A backend with one fault, which the check must detect."""

    fault = ""

    def attend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if self.fault in options:
            options[self.fault] = None
        output = super().attend(*arguments, **options)
        if self.fault == "rows":
            output[-1] = float("nan")
        return output

    def write(self, plan: Any, key: Any, value: Any, keys: Any, values: Any) -> None:
        super().write(plan, key, value, keys, values)
        if self.fault == "write":
            keys[plan.slot_blocks[0], :, plan.slot_offsets[0]] = 3.0

    def plan(self, batch: PagedBatch) -> Any:
        plan = super().plan(batch)
        if self.fault == "tails":
            plan.tail_blocks = plan.tail_blocks[:0]
        return plan


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plain_backend_passes_the_check_of_kernels(case: kernels.Case, dtype: str) -> None:
    outcome = kernels.check_case(TorchAttention, case, dtype, "cpu", tiny=True)
    assert outcome.wrong == [] and outcome.num_steps == 2 and 0 < outcome.largest < kernels.MAX_UNITS
    assert outcome.rms == outcome.torch_rms


@pytest.mark.parametrize("fault", ["window", "softcap", "sinks", "rows", "write", "tails"])
def test_the_check_of_kernels_detects_each_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "fault", fault)
    outcome = kernels.check_case(Broken, CASES[1], "float32", "cpu", tiny=True)
    assert outcome.wrong, fault


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_of_sampling_detects_wrong_tokens(dtype: str) -> None:
    def right(logits: torch.Tensor, batch: Any) -> tuple[Any, Any]:
        return choose_with_pytorch(logits.float(), batch)

    def greedy(logits: torch.Tensor, batch: Any) -> tuple[Any, Any]:
        _, ok = right(logits, batch)
        return logits.float().argmax(dim=-1).numpy(), ok

    def careless(logits: torch.Tensor, batch: Any) -> tuple[Any, Any]:
        tokens, ok = right(logits, batch)
        return tokens, np.ones_like(ok)

    assert kernels.check_race(right, 12, 500, dtype, "cpu")["wrong"] == []
    assert "got another token" in kernels.check_race(greedy, 12, 500, dtype, "cpu")["wrong"][0]
    assert "ok is" in kernels.check_race(careless, 12, 500, dtype, "cpu")["wrong"][0]


# -------------------------------------------------------------------------------------------------- the whole of it


def test_throughput_requests_equal_those_of_the_published_benchmark() -> None:
    """In the order of its loop: a length, then the tokens of that prompt; the lengths of outputs last."""
    import random

    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    job = throughput.make_job(model_shape("Qwen/Qwen3-0.6B"), 256, (100, 1024))
    assert job.prompts == prompts and job.outputs == outputs and sum(outputs) > 130_000


def test_throughput_counts_only_tokens_within_its_time_span(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "found", is_judged=False)
    setting = Setting("cpu", True, time.monotonic() + 60, findings)
    throughput._report(setting, "somebody", throughput.Rate(2, 30, 3.0, True))
    (rows,) = read_findings(tmp_path / "found").tables.values()
    assert rows[0]["tokens_per_s"] == 10.0 and 50 < setting.seconds_left <= 60 and not setting.on_gpu


@pytest.mark.long
@pytest.mark.e2e
def test_every_part_of_the_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out)]
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=700)
    found = json.loads(out.read_text())
    assert run.returncode == 0, run.stdout[-6000:]
    assert found["failed"] == [] and "".join(found["parts"]) == LETTERS
    assert json.loads(run.stdout.splitlines()[-1]) == found
