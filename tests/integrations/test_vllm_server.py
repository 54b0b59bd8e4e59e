"""vLLM's API server with our scheduler: vLLM's load generator, disconnecting clients, and metrics."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _server_sides import SERVED_MODEL_NAME, Knobs, VllmSide
from prometheus_client.parser import text_string_to_metric_families
from server_throughput import bench

from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, vllm_folders

OURS = ("--scheduler-cls", "pointsman.integrations.vllm.Scheduler")
KNOBS = Knobs(DEMO, threads=1, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512)
SMALL_POOL = ("--num-gpu-blocks-override", "40")
NUM_REQUESTS = 200

pytestmark = [*NEEDS_VLLM, pytest.mark.long]  # the server of test_vllm_docs.py is in the short form


@pytest.fixture(scope="module")
def ours() -> Iterator[VllmSide]:
    side = VllmSide(KNOBS, eager=True, options=(*OURS, *SMALL_POOL), folders=vllm_folders())
    yield side
    side.stop()


def metrics(side: VllmSide) -> dict[str, float]:
    """vLLM's values in /metrics, by name, summed over labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{side.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                found[sample.name] += sample.value
    return found


def complete(side: VllmSide, prompt: str, max_tokens: int) -> str:
    body = {"model": SERVED_MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{side.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def leave_after_the_first_token(side: VllmSide) -> socket.socket:
    """A streaming request; closing the socket disconnects its client."""
    body = {"model": SERVED_MODEL_NAME, "prompt": "A", "max_tokens": 480, "stream": True, "ignore_eos": True}
    payload = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", side.port), timeout=60)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + payload)
    while b"data:" not in connection.recv(65536):
        pass
    return connection


def test_vllms_load_generator_gets_all_completions(ours: VllmSide, tmp_path: Path) -> None:
    result = bench(ours, DEMO, float("inf"), NUM_REQUESTS, seed=1, folder=tmp_path)
    assert result["completed"] == NUM_REQUESTS


def test_disconnected_clients_release_all_blocks(ours: VllmSide) -> None:
    connections = [leave_after_the_first_token(ours) for _ in range(8)]
    assert metrics(ours)["vllm:num_requests_running"] > 0
    for connection in connections:
        connection.close()
    limit = time.monotonic() + 30
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any((seen := metrics(ours))[gauge] for gauge in gauges):
        assert time.monotonic() < limit, {gauge: seen[gauge] for gauge in gauges}
        complete(ours, "Is anybody there", 1)  # gauges are written by steps
        time.sleep(0.2)


def test_the_metrics_of_a_run_are_plausible(ours: VllmSide, tmp_path: Path) -> None:
    bench(ours, DEMO, float("inf"), NUM_REQUESTS, seed=2, folder=tmp_path)  # the first test may run in another process
    long_prompt = "The import statement combines two operations. " * 8
    text = complete(ours, long_prompt, 20)
    assert text and complete(ours, long_prompt, 20) == text
    seen = metrics(ours)
    assert seen["vllm:num_preemptions_total"] > 0
    assert seen["vllm:prefix_cache_hits_total"] > 0 and seen["vllm:prompt_tokens_cached_total"] > 0
    assert seen["vllm:prefix_cache_queries_total"] > seen["vllm:prefix_cache_hits_total"]
    assert seen["vllm:request_success_total"] > NUM_REQUESTS
    for timed in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token"):
        assert seen[f"vllm:{timed}_seconds_count"] >= NUM_REQUESTS, timed
        assert seen[f"vllm:{timed}_seconds_sum"] > 0, timed
