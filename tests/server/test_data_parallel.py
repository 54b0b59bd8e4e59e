"""Several engines behind one API process, seen by clients and operators: real processes, real HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _server_process import ServerFailed, ServerProcess, free_port, wait_until

from pointsman.core import replay
from pointsman.engine.machine import num_cores
from pointsman.server.shares import share_out
from tests.forked_engines import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(num_cores() < 2, reason="two engines need two cores")]

SMALL = ("--model", "demo", "--num-blocks", "128", "--block-size", "16", "--max-model-len", "1024")
FIELDS: dict[str, Any] = {"prompt": "The import statement", "max_tokens": 24, "ignore_eos": True, "temperature": 0}


TWO = (*SMALL, "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def two() -> Iterator[ServerProcess]:
    """A server with two engines; a test that kills one waits until it is restarted."""
    with start_server(*TWO) as server:
        yield server


@pytest.fixture
def http(two: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=two.url, timeout=60) as http:
        yield http


def samples(http: httpx.Client, name: str) -> dict[str, float]:
    """The values of a metric by its label `engine`."""
    text = http.get("/metrics").text
    found = re.findall(rf'^{name}{{(?:[^}}]*,)?engine="([0-9]*)"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def until_all_live(http: httpx.Client) -> None:
    wait_until(lambda: set(samples(http, "pointsman:engine_up").values()) == {1.0}, 60, "all engines live")


def test_requests_are_routed_by_prefix_and_metrics_are_per_engine(http: httpx.Client) -> None:
    """Requests are distributed, equal prefixes stay together, and every question goes to both engines."""
    prompts = [f"{number} {FIELDS['prompt']} " * 12 for number in range(6)]
    before = samples(http, "pointsman:steps_total")
    texts, engines = [], []
    for _ in range(2):
        for prompt in prompts:
            answer = http.post("/v1/completions", json={**FIELDS, "prompt": prompt})
            texts.append(answer.json()["choices"][0]["text"])
            engines.append(answer.headers["x-engine"])
    assert texts[:6] == texts[6:]
    assert engines[:6] == engines[6:] and set(engines) == {"0", "1"}
    streamed = http.post("/v1/completions", json={**FIELDS, "prompt": prompts[0], "stream": True})
    assert streamed.headers["x-engine"] == engines[0]
    after = samples(http, "pointsman:steps_total")
    assert set(after) == {"0", "1"} and all(after[one] > before[one] for one in after)
    hits, queries = samples(http, "vllm:prefix_cache_hits_total"), samples(http, "vllm:prefix_cache_queries_total")
    assert all(hits[engine] > 0.4 * queries[engine] for engine in queries), "each prefix was sent where it was"
    assert set(samples(http, "vllm:e2e_request_latency_seconds_count")) == {"0", "1"}
    assert set(samples(http, "pointsman:http_open_streams")) == {""}, "it belongs to no engine"
    assert http.post("/reset_prefix_cache").status_code == 200
    assert samples(http, "vllm:kv_cache_usage_perc") == {"0": 0.0, "1": 0.0}


def test_operator_commands_reach_both_engines(http: httpx.Client) -> None:
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    done: list[int] = []

    def ask(number: int) -> None:
        with httpx.Client(base_url=http.base_url, timeout=60) as own:
            answer = own.post("/v1/completions", json={**FIELDS, "prompt": f"{number} is"},
                              headers={"x-request-id": f"own-{number}"})  # fmt: skip
            done.append(answer.status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(http.get("/v1/requests").json()["data"]) == 4, 20, "all requests wait")
    listed = http.get("/v1/requests").json()["data"]
    assert {one["engine"] for one in listed} == {0, 1}
    for one in listed:
        own = http.get(f"/v1/requests/{one['id']}").json()
        assert (own["engine"], own["engine_id"], own["reason"]) == (one["engine"], one["engine_id"], one["reason"])
    assert http.get("/v1/requests/no-such-request").status_code == 404
    assert http.get("/is_paused").json() == {"is_paused": True} and not done
    assert http.post("/max_num_active_seqs", params={"limit": 1}).json() == {"max_num_active_seqs": 1}
    assert http.post("/resume").status_code == 200
    for thread in threads:
        thread.join(60)
    assert done == [200] * 4
    assert http.post("/max_num_active_seqs").json()["max_num_active_seqs"] > 1


def test_live_film_shows_the_requested_engine(http: httpx.Client) -> None:
    for engine in (0, 1):
        with http.stream("GET", "/live/film", params={"engine": engine}) as film:
            assert (film.status_code, film.headers["x-engines"]) == (200, "2")
            assert next(film.iter_raw())[:1] == b"H"
    refused = http.get("/live/film", params={"engine": 2})
    assert refused.status_code == 400 and "engine" in refused.json()["error"]["message"]
    page = http.get("/live").text
    assert 'id="engine"' in page and "X-Engines" in page


def test_restarted_engine_keeps_operator_settings(two: ServerProcess, http: httpx.Client) -> None:
    assert http.post("/max_num_active_seqs", params={"limit": 3}).status_code == 200
    assert http.post("/pause", params={"mode": "keep", "clear_cache": False}).status_code == 200
    done: list[int] = []
    threads = []

    def ask(number: int) -> None:
        body = {**FIELDS, "prompt": f"{number} x"}
        threads.append(threading.Thread(target=lambda: done.append(
            httpx.post(f"{two.url}/v1/completions", json=body, timeout=60).status_code)))  # fmt: skip
        threads[-1].start()

    for number in range(4):
        ask(number)
    wait_until(lambda: len(listed(http)) == 4, 20, "they wait")
    held = [one["engine"] for one in listed(http)].count(1)
    assert 0 < held < 4
    before = two.engine_pids
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: samples(http, "pointsman:engine_up")["1"] == 0, 10, "the death is noticed")
    wait_until(lambda: samples(http, "vllm:num_requests_waiting") == {"0": 4.0, "1": 0.0}, 10, "each counts once")
    assert f"engine 1, process {before[1]}, was ended by signal SIGKILL" in two.log()
    assert f"{held} requests of engine 1 are resumed: {held} in engine 0" in two.log()
    assert samples(http, "pointsman:requests_resumed_total") == {"0": 0.0, "1": held}
    assert http.get("/health").status_code == http.get("/ready").status_code == 200, "the other one serves"
    until_all_live(http)
    after = two.engine_pids
    assert after[0] == before[0] and after[1] != before[1]
    assert samples(http, "pointsman:engine_restarts_total") == {"0": 0.0, "1": 1.0}
    for number in range(4, 10):
        ask(number)
    wait_until(lambda: len(http.get("/v1/requests").json()["data"]) == 10, 20, "they wait in both engines")
    assert {one["engine"] for one in http.get("/v1/requests").json()["data"]} == {0, 1} and not done
    assert http.post("/resume").status_code == 200
    most = 0
    while len(done) < 10:
        running = [one["engine"] for one in http.get("/v1/requests").json()["data"] if one["state"] == "running"]
        most = max(most, running.count(0), running.count(1))
    assert most <= 3
    assert done == [200] * 10
    assert http.post("/max_num_active_seqs").status_code == 200


@pytest.mark.long
def test_engine_death_loses_no_request_and_changes_no_output(two: ServerProcess, http: httpx.Client) -> None:
    """Streams, whole answers, chats and several samples, each cut once or twice; the names are the clients'."""
    bodies = [
        ("/v1/completions", {**FIELDS, "max_tokens": 200, "temperature": 1, "seed": 3, "logprobs": 2, "n": 2}),
        ("/v1/completions", {**FIELDS, "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**FIELDS, "max_tokens": 200, "temperature": 0.8, "seed": 4, "presence_penalty": 0.5,
                             "stream": True, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is import?"}], "max_tokens": 200,
                                  "ignore_eos": True, "temperature": 0.7, "seed": 5, "stream": True}),
        ("/v1/embeddings", {"input": "The import statement"}),
    ]  # fmt: skip

    def outcome(number: int) -> Any:
        path, body = bodies[number % len(bodies)]
        answer = httpx.post(f"{two.url}{path}", json=body, timeout=100)
        assert answer.status_code == 200, answer.text
        assert '"error"' not in answer.text
        if not body.get("stream"):
            return telling(answer.json())
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert answer.text.endswith("data: [DONE]\n\n")
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        for event in events:
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
        usage = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        return texts, ends, usage

    expected = [outcome(number) for number in range(len(bodies))]
    for victim in range(8):
        until_all_live(http)
        with ThreadPoolExecutor(10) as pool:
            asked = [pool.submit(outcome, number) for number in range(10)]
            wait_until(lambda: sum(one["num_output_tokens"] > 5 for one in listed(http)) >= 4, 30, "they run")
            os.kill(two.engine_pids[victim % 2], signal.SIGKILL)
            found = [one.result(120) for one in asked]
        for number, one in enumerate(found):
            like = expected[number % len(bodies)]
            assert one == (pytest.approx(like, abs=1e-3) if isinstance(like, list) else like), bodies[number % 5]
    until_all_live(http)
    wait_until(lambda: set(samples(http, "vllm:kv_cache_usage_perc").values()) == {0.0}, 10, "no block is held")


def listed(http: httpx.Client) -> list[dict[str, Any]]:
    found = http.get("/v1/requests")
    data: list[dict[str, Any]] = found.json()["data"] if found.status_code == 200 else []
    return data


def telling(answer: dict[str, Any]) -> Any:
    """The facts of a request that do not depend on the shapes of steps."""
    if "data" in answer:
        return answer["data"][0]["embedding"]
    choices = [(one["text"], one["finish_reason"], one["logprobs"]["tokens"]) for one in answer["choices"]]
    return choices, answer["usage"]["completion_tokens"]


def test_each_engine_has_its_own_recording(tmp_path: Path) -> None:
    recordings = tmp_path / "run.jsonl"
    with start_server(*TWO, "--record", str(recordings)) as server, httpx.Client(base_url=server.url) as http:
        until_all_live(http)
        os.kill(server.engine_pids[1], signal.SIGKILL)
        wait_until(lambda: samples(http, "pointsman:engine_restarts_total")["1"] == 1.0, 60, "one is started again")
        until_all_live(http)
        for number in range(4):
            assert http.post("/v1/completions", json={**FIELDS, "prompt": f"{number} x"}).status_code == 200
        assert server.stop() == 0
    files = sorted(one.name for one in recordings.parent.iterdir())
    assert files[:2] == ["run.jsonl", "run.jsonl.1"]
    restarted = [one for one in files if ".restart-" in one]
    assert restarted, "a dead engine's recording is not overwritten"
    for one in (recordings.with_name(restarted[-1]),):
        with one.open() as file:
            replay(file)


def test_a_drain_finishes_the_requests_of_an_engine_that_hangs() -> None:
    """During the hang, operators see that the engine is down and the server is not."""
    with start_server(*TWO, "--engine-timeout", "2", "--drain-timeout", "120") as server:
        with httpx.Client(base_url=server.url, timeout=120) as http, ThreadPoolExecutor(8) as pool:
            prompts = [f"{number} {FIELDS['prompt']}" for number in range(8)]
            expected = [http.post("/v1/completions", json={**FIELDS, "prompt": one}).json() for one in prompts]
            http.post("/pause", params={"mode": "keep"})
            asked = [pool.submit(http.post, "/v1/completions", json={**FIELDS, "prompt": one}) for one in prompts]
            wait_until(lambda: len(listed(http)) == 8, 20, "all requests are there")
            os.kill(server.engine_pids[1], signal.SIGSTOP)
            http.post("/resume")  # 503, where the engine was silent for long already
            server.signal(signal.SIGTERM)
            wait_until(lambda: 0.0 in samples(http, "pointsman:engine_up").values(), 20, "the hang is noticed")
            assert http.get("/health").status_code == 200
            answers = [one.result().json() for one in asked]
            assert [one["choices"][0]["text"] for one in answers] == [one["choices"][0]["text"] for one in expected]
        assert server.wait(60) == 0


@pytest.mark.long
def test_requests_wait_for_a_restart_and_server_ends_without_one() -> None:
    with start_server(*SMALL, "--max-engine-restarts", "1") as server, httpx.Client(base_url=server.url) as http:
        expected = http.post("/v1/completions", json=FIELDS).json()["choices"][0]["text"]
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: http.get("/ready").status_code == 503, 10, "the death is noticed")
        assert int(http.get("/ready").headers["retry-after"]) > 0
        assert http.get("/health").status_code == 200
        asked = http.get("/v1/requests")
        assert asked.status_code in (200, 503)
        answer = http.post("/v1/completions", json=FIELDS, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected
        assert http.get("/ready").status_code == 200
        os.kill(server.engine_pid, signal.SIGKILL)  # its second consecutive death
        assert server.wait(20) == 1
        assert "is not restarted" in server.log()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data-parallel-size", "1000"), "data_parallel_size is 1000 and this process may use [0-9]+ core"),
        (("--data-parallel-size", "0"), "data_parallel_size is 0; it must be at least 1"),
        (("--data-parallel-size", "2", "--threads", "1"), r"\(--threads\) is 1 and data_parallel_size is 2"),
        (("--data-parallel-size", "2", "--num-blocks", "1"), "num_blocks is 1, .*; raise it to at least 2"),
        (("--data-parallel-size", "2", "--kv-cache-bytes", "900TiB"), " are free; lower kv_cache_bytes$"),
    ],
)
def test_missing_resources_are_reported_before_any_start(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ServerFailed) as caught:
        start_server("--model", "demo", *arguments, timeout=20)
    assert re.search(message, str(caught.value), re.MULTILINE), str(caught.value)


def test_server_reports_a_kv_events_port_in_use() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1] - 1}"  # the second engine's is the next one
        events = json.dumps({"endpoint": "tcp://*:0", "replay_endpoint": address})
        with pytest.raises(ServerFailed, match="of replay_endpoint of engine 1 cannot be used: Address already in use"):
            start_server("--model", "demo", "--data-parallel-size", "2", "--kv-events-config", events, timeout=20)


def test_kv_events_ports_that_engines_cannot_bind_are_refused() -> None:
    """Each engine's port is the given port plus the engine's number."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        local = f"tcp://127.0.0.1:{port}"
        for endpoints, message in (
            (
                {"endpoint": f"tcp://*:{port - 1}"},
                f"port {port} of endpoint of engine 1 .* in use; .* 2 in all, are free",
            ),
            ({"endpoint": "tcp://x:1", "replay_endpoint": local}, f"port {port} of replay_endpoint of engine 0 "),
            ({"endpoint": "tcp://*:65535"}, "port 65536 of endpoint of engine 1 .*: the highest port is 65535"),
            ({"endpoints": "tcp://*:28001"}, "kv_events_config has no field 'endpoints'"),
        ):
            with pytest.raises(ValueError, match=message):
                share_out({"model": "demo", "kv_events_config": endpoints}, 2)
        share_out({"model": "demo", "kv_events_config": {"endpoint": f"tcp://localhost:{port}"}}, 2)  # connected to
        share_out({"model": "demo", "kv_events_config": {"endpoint": "ipc:///tmp/x"}}, 2)
        share_out({"model": "demo", "kv_events_config": {"endpoint": f"tcp://*:{port - 1}", "publisher": "null"}}, 2)


def test_cores_threads_blocks_and_ports_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.server.shares.usable_cores", lambda: [0, 1, 2, 5, 6])
    monkeypatch.setattr("pointsman.server.shares.num_cores", lambda: 5)
    options = {"model": "demo", "num_blocks": 101, "num_threads": 4, "kv_events_config": {"replay_endpoint": "ipc://x"}}
    first, second = share_out(options, 2, "f")
    assert (first.cores, second.cores) == ([0, 1], [2, 5, 6])
    assert first.options["num_blocks"] == second.options["num_blocks"] == 50
    assert first.options["num_threads"] == second.options["num_threads"] == 2
    events = [share.options["kv_events_config"] for share in (first, second)]
    assert events == [
        {"endpoint": "tcp://*:5557", "replay_endpoint": "ipc://x", "data_parallel_rank": 0},
        {"endpoint": "tcp://*:5558", "replay_endpoint": "ipc://x_dp1", "data_parallel_rank": 1},
    ]
    assert (first.record, second.record, second.recording_path(2)) == ("f", "f.1", "f.1.restart-2")
    alone = share_out(options, 1, "f")[0]
    assert (alone.options, alone.cores, alone.record, alone.name) == (options, None, "f", "")
    # If processor time is limited, no engine may take all of it.
    monkeypatch.setattr("pointsman.server.shares.num_cores", lambda: 4)
    assert [one.options["num_threads"] for one in share_out({"model": "demo"}, 2)] == [2, 2]


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
        return True


def test_kv_events_port_in_use_is_reported_before_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.server.shares.usable_cores", lambda: [0, 1, 2])
    monkeypatch.setattr("pointsman.server.shares.num_cores", lambda: 3)

    def shared(num_engines: int, **events: object) -> str:
        with pytest.raises(ValueError) as caught:
            share_out({"model": "demo", "kv_events_config": events}, num_engines)
        return str(caught.value)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        of_one = shared(1, endpoint=f"tcp://*:{taken}")
        assert f"port {taken} of endpoint cannot be used: Address already in use" in of_one and "free ports" in of_one
        # The third engine's port is the one that is taken.
        of_three = shared(3, endpoint="tcp://*:0", replay_endpoint=f"tcp://127.0.0.1:{taken - 2}")
        assert f"port {taken} of replay_endpoint of engine 2 cannot" in of_three and "3 in all, are free" in of_three
        # A publisher that connects takes no port, and one that is off none either.
        share_out({"model": "demo", "kv_events_config": {"endpoint": f"tcp://127.0.0.1:{taken}"}}, 1)
        off = {"endpoint": f"tcp://*:{taken}", "enable_kv_cache_events": False}
        share_out({"model": "demo", "kv_events_config": off}, 1)
    # Neighbouring ports of the first engine are those of the second one.
    free = next(port for port in iter(free_port, None) if is_free(port + 1))
    both = shared(2, endpoint=f"tcp://*:{free}", replay_endpoint=f"tcp://*:{free + 1}")
    assert (
        f"port {free + 1} of endpoint of engine 1 cannot be used: it is also the port of replay_endpoint of engine 0"
        in both
    )
    assert "the highest port is 65535" in shared(2, endpoint="tcp://*:65535")
    share_out({"model": "demo", "kv_events_config": {"endpoint": "tcp://[::1]:0"}}, 2)
