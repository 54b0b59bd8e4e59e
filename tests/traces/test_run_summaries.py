"""Summaries of runs: what is read, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman.traces import TraceError, TraceRequest, is_run_summaries, read_run_summaries, read_trace
from tests.traces.test_traces import REAL_TRACES, write


def run(**changes: object) -> str:
    fields = {
        "device": "NVIDIA GeForce RTX 5090", "model": "Qwen/Qwen2.5-3B-Instruct", "max_num_batched_tokens": 2048,
        "max_num_seqs": 128, "policy": "fcfs", "phases": "10:0.2,10:0.4", "seed": 3, "prompt_tokens": 25000,
        "output_tokens": 32, "arrivals": [9.5, 11.25], "avg_latency": 2.9, "p95_latency": 5.0, "avg_ttft": 1.8,
        "avg_tpot": 0.035, "makespan": 32.4, "failed": 0,
    }  # fmt: skip
    return json.dumps({key: value for key, value in (fields | changes).items() if value is not None})


def test_a_run_is_read_with_its_arrivals_and_means(tmp_path: Path) -> None:
    first, second = read_run_summaries(write(tmp_path, f"{run()}\n\n{run(policy='ppas', seed=None, makespan=None)}\n"))
    assert first.requests == (
        TraceRequest(9.5, 25000, 32, max_tokens=32),
        TraceRequest(11.25, 25000, 32, max_tokens=32),
    )
    assert (first.device, first.model) == ("NVIDIA GeForce RTX 5090", "Qwen/Qwen2.5-3B-Instruct")
    assert (first.max_num_batched_tokens, first.max_num_seqs, first.policy, first.seed) == (2048, 128, "fcfs", 3)
    assert first.mean == {"ttft": 1.8, "tpot": 0.035, "latency": 2.9}
    assert (first.p95, first.makespan, first.phases) == ({"latency": 5.0}, 32.4, "10:0.2,10:0.4")
    assert (second.policy, second.seed, second.makespan) == ("ppas", None, None)


def test_lengths_may_differ_and_outputs_of_one_token_have_no_tpot(tmp_path: Path) -> None:
    text = run(prompt_tokens=[10, 20], output_tokens=1, avg_tpot=None)
    (found,) = read_run_summaries(write(tmp_path, text))
    assert [each.num_prompt_tokens for each in found.requests] == [10, 20]
    assert set(found.mean) == {"ttft", "latency"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"arrivals": []}, "arrivals must be a list"),
        ({"arrivals": [2.0, 1.0]}, "in order of time"),
        ({"arrivals": None}, '"arrivals" is missing'),
        ({"prompt_tokens": [1]}, "prompt_tokens has 1 values for 2 arrivals"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"avg_ttft": -1.0}, "avg_ttft is -1"),
        ({"avg_tpot": None}, '"avg_tpot" is missing'),
        ({"p95_latency": "slow"}, "p95_latency is 'slow'"),
        ({"max_num_batched_tokens": None}, '"max_num_batched_tokens" is missing'),
        ({"makespan": 0}, "makespan is 0"),
    ],
)
def test_error_names_the_line_and_the_wrong_value(changes: dict[str, object], match: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"line 2: .*{match}"):
        read_run_summaries(write(tmp_path, f"{run()}\n{run(**changes)}"))


def test_a_file_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no run"):
        read_run_summaries(write(tmp_path, "\n"))


def test_summaries_are_recognised_and_are_no_trace(tmp_path: Path) -> None:
    path = write(tmp_path, run())
    assert is_run_summaries(path)
    with pytest.raises(TraceError, match="summary of a whole run, which pointsman calibrate reads"):
        read_trace(path)
    for text in ('{"arrivals": [1]}', "TIMESTAMP,ContextTokens", "[", b"\xff\xfe"):
        assert not is_run_summaries(write(tmp_path, text))


def test_the_shared_runs_are_read() -> None:
    path = REAL_TRACES / "vllm_0.22_budget_runs.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {path.parent}")
    found = read_run_summaries(path)
    assert len(found) == 530
    assert sum(each.policy == "fcfs" for each in found) == 420
    assert {each.num_failed for each in found} == {0}
    assert all(set(each.mean) == set(each.p95) == {"ttft", "tpot", "latency"} for each in found)
