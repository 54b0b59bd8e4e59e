"""Measured requests: JSON lines with times, results of vLLM's benchmark, guidellm's reports and Pointsman's
recordings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core.recording import Recorder
from pointsman.traces import LeftOut, MeasuredRequest, TraceError, TraceRequest, read_measurements, read_trace
from tests.core.helpers import Host
from tests.traces.test_traces import REAL_TRACES, write


def measured(**changes: object) -> str:
    fields = {"request_id": "r", "input_toks": 10, "output_toks": 5, "arrival_time": 7.0}
    times = {"queued_ts": 100.0, "scheduled_ts": 100.5, "first_token_ts": 101.0, "last_token_ts": 103.0}
    return json.dumps(fields | times | changes)


def bench(**changes: object) -> str:
    """A result of `vllm bench serve --save-result --save-detailed` of vLLM 0.32, shortened."""
    result: dict[str, object] = {
        "date": "20261124-120000",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "request_rate": "inf",
        "max_concurrency": None,
        "completed": 2,
        "input_lens": [100, 50, 70],
        "output_lens": [3, 0, 1],
        "ttfts": [0.5, 0.0, 0.25],
        "itls": [[0.125, 0.25], [], []],
        "latencies": [0.875, 0.0, 0.25],
        "start_times": [1000.0, 1000.5, 999.0],
        "generated_texts": ['a "text" ]}', "", "b"],
        "errors": ["", "Traceback", ""],
        "mean_ttft_ms": 375.0,
    }
    return json.dumps(result | changes)


def guidellm(version: object = 2, **changes: object) -> dict[str, Any]:
    """A report of guidellm 0.8, shortened."""

    def request(
        start: float, first: float | None, last: float | None, prompt: object, output: object
    ) -> dict[str, Any]:
        timings = {"queued": start - 1, "request_start": start, "first_token_iteration": first}
        info = {"request_id": f"at-{start}", "timings": timings | {"last_token_iteration": last}}
        return {
            "type_": "generative_request_stats",
            "request_id": f"at-{start}",
            "info": info,
            "output": "text",
            "prompt_tokens": prompt,
            "output_tokens": output,
        }

    requests = {
        "successful": [request(20.0, 20.5, 22.5, 100, 5), request(10.0, 10.25, 10.25, 60, 1)],
        "errored": [request(30.0, None, None, 40, None)],
        "incomplete": [request(31.0, 31.5, 32.0, 30, 2), request(32.0, None, None, None, None)],
        "total": None,
    }
    one = {"type_": "generative_benchmark", "metrics": {"request_totals": {"successful": 2}}, "requests": requests}
    return {"metadata": {"version": version, "guidellm_version": "0.8.1"}, "config": {}, "benchmarks": [one]} | changes


# ---------------------------------------------------------------------- what is read


def test_measured_lines_are_read_with_their_times(tmp_path: Path) -> None:
    lines = [measured(), measured(request_id="s", queued_ts=99.0, output_toks=1, last_token_ts=101.0)]
    first, second = read_measurements(
        write(tmp_path, "\n".join([*lines, measured(output_toks=0, first_token_ts=None)]))
    )
    assert second == MeasuredRequest(TraceRequest(1.0, 10, 5), "r", queued=1.0, first_token=2.0, last_token=4.0)
    assert (second.ttft, second.e2e, second.tpot) == (1.0, 3.0, 0.5)
    assert (first.request_id, first.queued, first.ttft, first.tpot) == ("s", 0.0, 2.0, None)


def test_a_vllm_bench_result_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, bench())
    assert read_trace(path) == [TraceRequest(0.0, 70, 1), TraceRequest(1.0, 100, 3), TraceRequest(1.5, 50, 0)]
    last, first = read_measurements(path)
    assert first == MeasuredRequest(TraceRequest(1.0, 100, 3), "request-0", 1.0, 1.5, 1.875)
    assert (last.request_id, last.ttft, last.e2e) == ("request-2", 0.25, 0.25)


def test_a_bench_request_that_was_never_sent_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, bench(start_times=[1000.0, 0.0, 999.0]))
    for found in (read_trace(path), read_measurements(path)):
        assert (len(found), found.num_rows, found.left_out) == (2, 3, {LeftOut.NOT_SENT: 1})


def test_requests_with_empty_prompts_are_left_out_of_results(tmp_path: Path) -> None:
    path = write(tmp_path, bench(input_lens=[100, 50, 0]))
    assert read_trace(path) == [TraceRequest(0.0, 100, 3), TraceRequest(0.5, 50, 0)]
    assert read_trace(path).left_out == {LeftOut.NO_PROMPT: 1}
    report = guidellm()
    requests = report["benchmarks"][0]["requests"]["successful"]
    requests[0]["prompt_tokens"], requests[1]["output_tokens"] = 0, 0
    found = read_trace(write(tmp_path, json.dumps(report)))
    assert [r.num_output_tokens for r in found] == [0, 0, 2]
    assert found.left_out == {LeftOut.NO_PROMPT: 2}  # one of them failed, so its length is unknown


def test_requests_without_times_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [measured(), measured(output_toks=0), measured(input_toks=0)]
    found = read_measurements(write(tmp_path, "\n".join(lines)))
    assert (len(found), found.left_out) == (1, {LeftOut.NO_PROMPT: 1, LeftOut.NO_OUTPUT: 1})
    found = read_measurements(write(tmp_path, json.dumps(guidellm())))
    assert (len(found), found.left_out) == (2, {LeftOut.NO_PROMPT: 1, LeftOut.NO_OUTPUT: 1, LeftOut.NO_TIMES: 1})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_guidellm_report_is_read(tmp_path: Path, version: int, indent: int | None) -> None:
    path = write(tmp_path, json.dumps(guidellm(version), indent=indent))
    lengths = [(r.arrival_time, r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(path)]
    assert lengths == [(0, 60, 1), (10, 100, 5), (20, 40, 0), (21, 30, 2)]
    first, second = read_measurements(path)
    assert (first.queued, first.ttft, first.tpot) == (0.0, 0.25, None)
    assert (second.request_id, second.queued, second.ttft, second.tpot) == ("at-20.0", 10.0, 0.5, 0.5)


def test_a_recording_is_read_with_its_times(tmp_path: Path) -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), num_blocks=40, max_model_len=64, block_size=4)
    shared = list(range(10, 19))
    host.add("a", [*shared, 1], max_tokens=5)
    host.step()
    host.add("b", [*shared, 2], max_tokens=5, priority=3)
    host.add("c", [*shared, 2], max_tokens=5, cache_salt="x")
    host.run_to_end()
    path = write(tmp_path, file.getvalue())
    a, b, c = read_trace(path)
    assert [r.num_prompt_tokens for r in (a, b, c)] == [10, 10, 10]
    assert [r.num_output_tokens for r in (a, b, c)] == [5, 5, 5]
    assert (a.hash_block_size, len(a.block_hash_ids), a.max_tokens, b.priority) == (4, 2, 5, 3)
    assert a.block_hash_ids == b.block_hash_ids and not set(a.block_hash_ids) & set(c.block_hash_ids)
    times = read_measurements(path)
    assert [each.request_id for each in times] == ["a", "b", "c"]
    assert all(each.queued < each.first_token < each.last_token for each in times)
    assert [each.request for each in times] == [a, b, c]


def test_a_recording_with_advance_is_read(tmp_path: Path) -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), num_blocks=40, max_model_len=64, block_size=4)
    host.add("a", 5, max_tokens=7)
    host.step()
    times = [host.now + 10 * index for index in range(1, 5)]
    assert host.scheduler.guaranteed_steps() >= 3
    host.scheduler.advance(times, [7])
    host.now = times[-1]
    (each,) = read_measurements(write(tmp_path, file.getvalue()))
    assert (each.request.num_output_tokens, each.last_token + 1.0) == (4, times[-1]), "queued at 1 second"
    host.run_to_end()
    (each,) = read_measurements(write(tmp_path, file.getvalue()))
    assert each.request.num_output_tokens == 7 and each.ttft < 5


def test_a_recording_of_a_prompt_in_parts_is_read(tmp_path: Path) -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), num_blocks=40, max_model_len=64, block_size=4)
    host.add("a", [1, 2, 3], max_tokens=0, more_input=True)
    host.extend("a", [4, 5, 6, 7, 8], max_tokens=2)
    host.run_to_end()
    (request,) = read_trace(write(tmp_path, file.getvalue()))
    assert (request.num_prompt_tokens, request.num_output_tokens, len(request.block_hash_ids)) == (8, 2, 2)


# ---------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (measured(first_token_ts=99.0), "line 1: the first token came at 99.0, before its request arrived at 100.0"),
        (measured() + "\n" + measured(last_token_ts=100.5), "line 2: the last token came at 100.5, before the first"),
        (measured(queued_ts=None), "line 1: queued_ts is None; it must be a finite number"),
        (measured(output_toks=-1), "line 1: output_toks is -1; it must be between 0"),
        (bench(ttfts=[-0.5, 0, 0]), "request 0 (ttfts[0], itls[0]): the first token came at 999.5, before its request"),
        (bench(itls=[[-0.5], [], []]), "request 0 (ttfts[0], itls[0]): the last token came at 1000.0, before the"),
        (bench(input_lens=[100, -50, 70]), "line 1: input_lens[1] is -50; it must be between 0"),
        (bench(itls=[[0.1], [], 0.1]), "line 1: itls[2] is 0.1; it must be a list of seconds"),
        (bench(ttfts=[0.5, 0.0]), "the lists have different lengths"),
        (bench(ttfts=None), "ttfts must be a list with one item per request; run vllm bench serve with --save-result"),
        ('{"endpoint_type": "vllm", "completed": 3}', 'no list "input_lens" in the result of vLLM\'s benchmark'),
        (bench() + "\n" + bench(), "line 2: a second result begins here"),
        (bench()[:-60], "not JSON"),
        (json.dumps(guidellm(3)), "line 1: metadata.version is 3; only versions 1 and 2 can be read"),
        (json.dumps({"benchmarks": []}), 'no "metadata" before "benchmarks"'),
        (json.dumps(guidellm()).replace('"request_totals": {"successful": 2', '"request_totals": {"successful": 3'),
         "benchmarks[0] has only 2 of 3 successful requests"),
        (json.dumps(guidellm()).replace('"prompt_tokens": 100', '"prompt_tokens": null'),
         "benchmarks[0].requests.successful[0]: prompt_tokens is None"),
        ('{"format": "pointsman-recording", "format_version": 9}', "line 1: format_version is 9; this library reads"),
        ('{"format": "pointsman-recording", "format_version": 1, "config": {"block_size": 4}}\n{"now": 1}',
         "line 2: not a recorded call (KeyError: 'call')"),
        ('{"format": "another"}', 'the line has no "input_length" and no "input_toks"'),
    ],
)  # fmt: skip
def test_broken_measurements_are_reported(tmp_path: Path, text: str, wrong: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_measurements(path)
    assert str(caught.value).startswith(f"{path}, ")
    assert wrong in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_without_times_has_no_measurements(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no measured times in the file"):
        read_measurements(write(tmp_path, '{"timestamp": 0, "input_length": 6, "output_length": 5}'))


def test_a_published_measured_run_of_vllm_is_read() -> None:
    path = REAL_TRACES / "vllm_0.19_rtxpro6000_llama31_8b.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {REAL_TRACES}")
    found = read_measurements(path)
    assert len(found) == 300 and found[0].queued == 0.0
    assert np.mean([each.ttft for each in found]) > 0.05
    tpots = [each.tpot for each in found if each.tpot is not None]
    assert 0.005 < np.mean(tpots) < 0.1
    lengths = {(r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(path)}
    assert lengths == {(each.request.num_prompt_tokens, each.request.num_output_tokens) for each in found}
