"""Metrics: their values, with real libraries and a real engine process; vLLM's names; the documentation."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pointsman.core import PreemptionCause, Request
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.registry import KINDS
from pointsman.engine import SamplingParams
from pointsman.engine.outputs.request_output import RequestMetrics
from pointsman.server.metrics import exposition as metrics
from pointsman.server.metrics import table as metric_table
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.metrics.observations import EngineObservations, Observations
from pointsman.server.metrics.readings import SCRAPED
from pointsman.server.metrics.table import (
    FINISH_REASONS,
    HISTOGRAMS,
    REFUSALS,
    Definition,
    token_buckets,
)
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.wire.messages import Delta, EngineRequest, StepNote
from pointsman.server.wire.questions import ResetPrefixCache
from tests.core.helpers import Host

ROOT = Path(__file__).resolve().parents[3]
DEFINITIONS = (
    *(definition for definition, _ in SCRAPED),
    *(value for value in vars(metric_table).values() if isinstance(value, Definition)),
)
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
VLLM_METRICS = sorted((ROOT / ".venv-vllm/lib").glob("python3*/site-packages/vllm/v1/metrics"))

Samples = dict[str, float]


def flat(text: str) -> Samples:
    """Every sample by its name and the labels other than the base labels, such as 'a_total{reason=x}'."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            rest = ",".join(f"{key}={value}" for key, value in own.items())
            found[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return found


# ---------------------------------------------------------------------------------------- histograms


@pytest.mark.parametrize(
    ("longest", "bounds"),
    [(1, [1]), (9, [1, 2, 5]), (512, [1, 2, 5, 10, 20, 50, 100, 200, 500]), (20, [1, 2, 5, 10, 20])],
)
def test_token_count_buckets_end_at_the_maximum_sequence_length(longest: int, bounds: list[float]) -> None:
    assert list(token_buckets(longest)) == bounds


def test_bucket_bounds_of_every_histogram_ascend() -> None:
    for definition in HISTOGRAMS:
        bounds = definition.buckets or token_buckets(4096)
        assert list(bounds) == sorted(set(bounds)), definition.name


# ---------------------------------------------------------------------------------------- observations


def ended(reason: str, metrics: RequestMetrics, num_output_tokens: int, prompt_length: int = 10) -> EngineObservations:
    """The observations of one finished request."""
    observations = EngineObservations(512)
    request = EngineRequest("a", list(range(prompt_length)), SamplingParams(max_tokens=64))
    observations.end(request, Delta(finish_reason=reason, metrics=metrics), num_output_tokens)
    return observations


def samples_of(histogram: prometheus_client.Histogram) -> dict[str, float]:
    """A histogram's count and sum, and its cumulative counts by upper bound."""
    (metric,) = histogram.collect()
    return {one.labels.get("le", one.name.rpartition("_")[2]): one.value for one in metric.samples}


def totals(observations: EngineObservations) -> dict[str, tuple[int, float]]:
    """(count, sum) of every histogram with observations."""
    found = {one.name.split(":")[1]: samples_of(histogram) for one, histogram in observations.histograms.items()}
    return {name: (own["count"], pytest.approx(own["sum"])) for name, own in found.items() if own["count"]}


def test_finished_request_is_observed_once_in_each_phase() -> None:
    causes = tuple(PreemptionCause)
    times = RequestMetrics(
        100.0, 101.0, 103.0, 111.0, num_cached_tokens=4, num_preemptions=len(causes), preemption_causes=causes
    )
    assert totals(ended("length", times, 5)) == {
        "request_prompt_tokens": (1, 10),
        "request_generation_tokens": (1, 5),
        "request_prefill_kv_computed_tokens": (1, 6),
        "request_params_max_tokens": (1, 64),
        "request_num_preemptions": (1, 2),  # for memory and by a reset, as vLLM counts
        "e2e_request_latency_seconds": (1, 11.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_inference_time_seconds": (1, 10.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 8.0),
        "request_time_per_output_token_seconds": (1, 2.0),
    }


def test_phases_that_a_request_did_not_reach_are_not_counted() -> None:
    never_ran = totals(ended("deadline", RequestMetrics(100.0, None, None, 107.0), 0))
    assert never_ran["request_queue_time_seconds"] == (1, 7.0)
    assert never_ran["e2e_request_latency_seconds"] == (1, 7.0)
    assert not {name for name in never_ran if "prefill_time" in name or "decode" in name or "inference" in name}

    in_prefill = totals(ended("deadline", RequestMetrics(100.0, 102.0, None, 107.0), 0))
    assert in_prefill["request_queue_time_seconds"] == (1, 2.0)
    assert in_prefill["request_inference_time_seconds"] == (1, 5.0)
    assert "request_prefill_time_seconds" not in in_prefill

    one_token = totals(ended("stop", RequestMetrics(100.0, 101.0, 102.0, 102.0), 1))
    assert one_token["request_decode_time_seconds"] == (1, 0.0)
    assert "request_time_per_output_token_seconds" not in one_token


def test_aborted_requests_are_not_observed() -> None:
    assert totals(ended("abort", RequestMetrics(100.0, 101.0, 102.0, 103.0), 3)) == {}


def test_tokens_of_one_delta_share_the_inter_token_time() -> None:
    observations = EngineObservations(512)
    observations.inter_token(0.3, 3)
    observations.inter_token(0.4, 1)
    observations.inter_token(9.0, 0)  # the end, without a token
    assert totals(observations) == {"inter_token_latency_seconds": (4, 0.7)}
    buckets = samples_of(observations.histograms[metric_table.INTER_TOKEN_LATENCY])
    assert (buckets["0.075"], buckets["0.1"], buckets["0.4"]) == (0, 3, 4)


def test_steps_and_client_requests_are_observed() -> None:
    observations = EngineObservations(512)
    observations.steps([StepNote(100, 3, 50e-6), StepNote(4, 4, 20e-6)])
    observations.client_request(3, 17)
    assert totals(observations) == {
        "iteration_tokens_total": (2, 104),
        "scheduler_step_seconds": (2, 70e-6),
        "request_params_n": (1, 3),
        "request_max_num_generation_tokens": (1, 17),
    }


def test_unknown_refusal_reason_is_counted_as_other() -> None:
    observations = Observations(512)
    for reason in ("draining", "queue_tokens", "something a client sent", "queue_tokens"):
        observations.refusal(reason)
    assert set(observations.refused) == set(REFUSALS)
    assert {reason: count for reason, count in observations.refused.items() if count} == {
        "draining": 1,
        "queue_tokens": 2,
        "other": 1,
    }


# ---------------------------------------------------------------------------------------- a real engine process


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def start() -> tuple[EngineClient, ServerMetrics]:
    options = {"num_blocks": 64, "block_size": 16, "max_model_len": 512, "max_num_seqs": 2, "num_threads": 1}
    client = await EngineClient.start({"model": "demo", **options}, log_stats_interval=None)
    measured = ServerMetrics(EngineFleet([client]), 'a "model"')
    return client, measured


@pytest.fixture(scope="module")
def engine(loop: asyncio.Runner) -> Iterator[tuple[EngineClient, ServerMetrics]]:
    client, measured = loop.run(start())
    yield client, measured
    loop.run(client.shutdown())


async def scrape(measured: ServerMetrics) -> Samples:
    body, content_type = await measured.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    return flat(body.decode())


async def generate(client: EngineClient, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    stream = client.generate(EngineRequest(name, prompt, params))
    async for _ in stream:
        pass


def total(samples: Samples, name: str) -> float:
    """The sum of a metric over all values of its label."""
    return sum(value for one, value in samples.items() if one.startswith(f"{name}{{"))


def difference(before: Samples, after: Samples, *names: str) -> list[float]:
    return [after[name] - before[name] for name in names]


@pytest.mark.e2e
def test_metrics_of_known_requests_have_expected_values(
    loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]
) -> None:
    client, measured = engine

    async def work() -> tuple[Samples, Samples]:
        await client.ask(ResetPrefixCache(preempt_running=False))
        before = await scrape(measured)
        for index in range(3):  # one after the other: the second and third find two full blocks of the first
            await generate(client, f"same-{index}", list(range(40, 80)), 8)
        return before, await scrape(measured)

    before, after = loop.run(work())
    assert difference(before, after, "vllm:prompt_tokens_total", "vllm:generation_tokens_total") == [120, 24]
    assert difference(before, after, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total") == [120, 64]
    by_source = "vllm:prompt_tokens_by_source_total{source=%s}"
    assert difference(before, after, by_source % "local_compute", by_source % "local_cache_hit") == [56, 64]
    ends = [f"vllm:request_success_total{{finished_reason={reason}}}" for reason in FINISH_REASONS]
    assert difference(before, after, *ends) == [0, 3, 0, 0, 0, 0]
    # Eight steps a request: the first computes the prompt, the others one token each.
    assert difference(before, after, "vllm:iteration_tokens_total_count") == [24]
    assert difference(before, after, "pointsman:steps_total")[0] >= 24  # empty steps may have reported ends
    assert difference(before, after, "vllm:iteration_tokens_total_sum") == [56 + 3 * 7]
    assert difference(before, after, "pointsman:scheduler_step_seconds_count") == [24]
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert difference(before, after, f"vllm:{name}_seconds_count") == [3], name
    assert 0 < after["pointsman:scheduler_step_seconds_sum"] <= after["pointsman:scheduler_seconds_total"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == after["pointsman:kv_blocks{state=held}"] == 0
    assert after["pointsman:kv_blocks{state=cached}"] + after["pointsman:kv_blocks{state=blank}"] == 64
    assert after["pointsman:engine_up"] == 1
    assert after["pointsman:engine_process_resident_memory_bytes"] > 50e6


@pytest.mark.e2e
def test_gauges_count_running_and_waiting_requests_but_not_aborted(
    loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]
) -> None:
    client, measured = engine
    aborted = "vllm:request_success_total{finished_reason=abort}"

    async def work() -> tuple[Samples, Samples, Samples]:
        before = await scrape(measured)
        params = SamplingParams(temperature=0, max_tokens=470, ignore_eos=True)
        prompts = [list(range(40 + index, 72 + index)) for index in range(3)]
        streams = [client.generate(EngineRequest(f"big-{prompt[0]}", prompt, params)) for prompt in prompts]
        for stream in streams:
            await stream.start()
        limited = "pointsman:requests_waiting{reason=sequence_limit}"
        async with asyncio.timeout(10):
            while not (during := await scrape(measured))[limited]:  # the next step finds that two run already
                await asyncio.sleep(0)
        for stream in streams:
            await stream.aclose()
        after = await scrape(measured)
        while after[aborted] - before[aborted] < 3:  # at the next step boundary
            await asyncio.sleep(0.01)
            after = await scrape(measured)
        return before, during, after

    before, during, after = loop.run(work())
    assert (during["vllm:num_requests_running"], during["vllm:num_requests_waiting"]) == (2, 1)
    by_reason = "vllm:num_requests_waiting_by_reason{reason=%s}"
    assert during[by_reason % "capacity"] + during[by_reason % "deferred"] == during["vllm:num_requests_waiting"]
    assert total(during, "pointsman:requests_waiting") == during[by_reason % "capacity"]
    assert total(during, "pointsman:parked") == during[by_reason % "deferred"]
    assert during["vllm:kv_cache_usage_perc"] == pytest.approx(during["pointsman:kv_blocks{state=held}"] / 64)
    assert during["vllm:kv_cache_usage_perc"] > 0
    assert difference(before, after, "pointsman:deferrals_total{reason=sequence_limit}")[0] > 0
    assert after["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.e2e
def test_counters_never_fall(loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]) -> None:
    client, measured = engine

    async def work() -> list[Samples]:
        requests = [
            asyncio.create_task(generate(client, f"many-{index}", list(range(50, 90 + index)), 40))
            for index in range(20)
        ]
        seen = []
        while not all(one.done() for one in requests):
            seen += await asyncio.gather(scrape(measured), scrape(measured))  # several scrapers at once, too
        await asyncio.gather(*requests)
        return [*seen, await scrape(measured)]

    seen = loop.run(work())
    assert len(seen) >= 5
    growing = [name for name in seen[0] if re.search(r"(_total|_bucket|_count|_sum)(\{|$)", name)]
    assert len(growing) > 200
    for earlier, later in pairwise(seen):
        fallen = [name for name in growing if later[name] < earlier[name]]
        assert fallen == []


@pytest.mark.e2e
def test_scrape_yields_to_other_tasks(loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]) -> None:
    _, measured = engine

    async def work() -> int:
        rendering = asyncio.create_task(measured.render())
        turns = 0
        while not rendering.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert loop.run(work()) >= len(DEFINITIONS)


@pytest.mark.e2e
def test_a_scrape_does_not_wait_for_a_stuck_engine(
    loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, measured = engine
    monkeypatch.setattr(metrics, "STATS_TIMEOUT", 0.1)

    async def work() -> tuple[Samples, Samples, Samples]:
        before = await scrape(measured)
        os.kill(client.info.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                stuck = (await asyncio.gather(*[scrape(measured) for _ in range(5)]))[-1]
        finally:
            os.kill(client.info.pid, signal.SIGCONT)
        await generate(client, "afterwards", [50, 51, 52], 4)
        return before, stuck, await scrape(measured)

    before, stuck, after = loop.run(work())
    assert stuck["pointsman:engine_up"] == 1
    assert stuck["pointsman:stats_age_seconds"] >= 0.1 > after["pointsman:stats_age_seconds"]
    assert stuck["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] + 4


@pytest.mark.e2e
def test_dead_engine_keeps_counters_and_has_zero_gauges(loop: asyncio.Runner) -> None:
    async def work() -> tuple[Samples, Samples]:
        client, measured = await start()
        try:
            await generate(client, "last", [50, 51, 52], 4)
            before = await scrape(measured)
            os.kill(client.info.pid, signal.SIGKILL)
            await asyncio.wait_for(client.dead.wait(), 10)
            return before, await scrape(measured)
        finally:
            await client.shutdown()

    before, after = loop.run(work())
    assert (before["pointsman:engine_up"], after["pointsman:engine_up"]) == (1, 0)
    assert after["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] == 4
    assert total(before, "pointsman:kv_blocks") == 64 and total(after, "pointsman:kv_blocks") == 0
    assert after["vllm:num_requests_running"] == 0
    assert after["pointsman:stats_age_seconds"] > before["pointsman:stats_age_seconds"]


@pytest.mark.e2e
def test_observations_appear_in_the_scrape(loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]) -> None:
    _, measured = engine
    before = loop.run(scrape(measured))
    measured.observations.engines[0].first_token(0.03)
    measured.observations.engines[0].inter_token(0.02, 2)
    measured.observations.engines[0].client_request(2, 9)
    measured.observations.refusal("queue_requests")
    measured.observations.refusal("invalid")
    measured.observations.open_streams += 1
    after = loop.run(scrape(measured))
    changes = {
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_bucket{le=0.02}": 0,
        "vllm:time_to_first_token_seconds_bucket{le=0.04}": 1,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:inter_token_latency_seconds_bucket{le=0.01}": 2,
        "vllm:request_params_n_sum": 2,
        "vllm:request_max_num_generation_tokens_sum": 9,
        "pointsman:requests_refused_total{reason=queue_requests}": 1,
        "pointsman:requests_refused_total{reason=invalid}": 1,
        "vllm:admission_rejections_total{reason=max_num_queued_reqs}": 1,
        "vllm:admission_rejections_total{reason=max_num_queued_tokens}": 0,
        "pointsman:http_open_streams": 1,
    }
    assert difference(before, after, *changes) == list(changes.values())
    measured.observations.open_streams -= 1


# ---------------------------------------------------------------------------------------- names and documentation


@pytest.mark.e2e
def test_exposition_matches_the_metric_table(loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]) -> None:
    body, _ = loop.run(engine[1].render())
    families = {}
    for family in text_string_to_metric_families(body.decode()):
        families[family.name + ("_total" if family.type == "counter" else "")] = family
    for definition in DEFINITIONS:
        family = families.pop(definition.name)
        assert (family.type, family.documentation) == (definition.kind, definition.meaning)
        labels = {"model_name", "engine", definition.label, definition.second_label} - {None}
        for sample in family.samples:
            assert labels <= set(sample.labels), definition.name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ('a "model"', "0")
            assert definition.name.endswith("_info") or set(sample.labels) - {"le"} == labels
    assert {name.rsplit("_process_")[0].rsplit("_gc_")[0].split("_")[0] for name in families} == {
        "process",
        "python",
        "pointsman:engine",
    }


@pytest.mark.e2e
def test_llm_d_endpoint_picker_finds_its_metrics(
    loop: asyncio.Runner, engine: tuple[EngineClient, ServerMetrics]
) -> None:
    """The names, types and labels that llm-d reads from vLLM, by its protocol for model servers:
    https://llm-d.ai/docs/architecture/core/model-servers. Its metrics of adapters exist only with adapters."""
    client, measured = engine
    body, _ = loop.run(measured.render())
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = families[name].samples
        assert families[name].type == "gauge" and sample.value == 0, name
    (sample,) = families["vllm:cache_config_info"].samples
    assert families["vllm:cache_config_info"].type == "gauge"
    sizes = {name: int(sample.labels[name]) for name in ("block_size", "num_gpu_blocks")}
    assert sizes == {"block_size": client.info.block_size, "num_gpu_blocks": client.info.num_blocks}


def documented() -> dict[str, list[str]]:
    """Cells of the rows of the tables of metrics, which have more than three columns, by the metric's name."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in re.findall(r"^\| `.*$", text, re.M)]
    return {row[0].strip("`"): row[1:] for row in rows if len(row) > 3}


def test_documented_metric_table_matches_the_definitions() -> None:
    rows = documented()
    for definition in DEFINITIONS:
        labels = ", ".join(f"`{label}`" for label in (definition.label, definition.second_label) if label)
        expected = [definition.kind, labels, definition.unit, definition.meaning]
        assert rows.pop(definition.name, None) == expected, (
            f"docs/reference/metrics.md lacks: | `{definition.name}` | {' | '.join(expected)} |"
        )
    assert {name.split("_")[0] for name in rows} == {"process", "python", "pointsman:engine"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.relative_to(ROOT).as_posix() for path in DOCUMENTS])
def test_documents_name_no_metric_that_does_not_exist(path: Path) -> None:
    exposed = {definition.name for definition in DEFINITIONS}
    exposed |= {f"{one.name}_{part}" for one in HISTOGRAMS for part in ("bucket", "sum", "count")}
    named = set(re.findall(r"\b(?:vllm|pointsman):\w+", path.read_text()))
    assert {name for name in named - exposed if not name.startswith("pointsman:engine_process_")} == set()


def test_no_metric_is_defined_twice() -> None:
    names = [definition.name for definition in DEFINITIONS]
    assert len(set(names)) == len(names)
    for definition in DEFINITIONS:
        is_counter = definition.kind == "counter"
        assert is_counter == definition.name.endswith("_total") or definition is metric_table.ITERATION_TOKENS


@pytest.mark.skipif(not VLLM_METRICS, reason="vLLM is not installed in .venv-vllm; `make bench` makes it")
def test_vllms_metrics_have_its_types_and_buckets() -> None:
    source = (VLLM_METRICS[0] / "loggers.py").read_text()
    found = re.findall(r"self\._(\w+)_cls\(\s*name=\"(vllm:\w+)\"", source)
    theirs = {name: kind for kind, name in found}  # counters are named without their suffix there
    speculation = (VLLM_METRICS[0].parent / "spec_decode" / "metrics.py").read_text()
    theirs |= dict.fromkeys(re.findall(r"\"(vllm:spec_decode_num_\w+)\"", speculation), "counter")
    assert len(theirs) > 30
    families: dict[str, Any] = runpy.run_path(str(VLLM_METRICS[0] / "buckets.py"))
    family_of = dict(re.findall(r"_histogram_cls\(\s*name=\"(vllm:\w+)\".*?buckets=(\w+)_buckets", source, re.DOTALL))
    for definition in DEFINITIONS:
        if not definition.name.startswith("vllm:") or definition.name == "vllm:cache_config_info":
            continue  # that one's name is put together
        kind = definition.kind
        assert theirs[definition.name.removesuffix("_total") if kind == "counter" else definition.name] == kind
        if kind == "histogram":
            bounds = definition.buckets or token_buckets(4096)
            assert list(bounds) == families["histogram_buckets"](family_of[definition.name], max_model_len=4096)


def test_failures_are_counted_by_kind_and_policy() -> None:
    class Raises(FirstComeFirstServed):
        name = "raises"

        def peek(self) -> Request:
            raise ZeroDivisionError

    host = Host(order=Raises())
    host.add("a", 3)
    host.scheduler.schedule_again(1.0)
    readings = {definition.name: read for definition, read in SCRAPED}
    stats: Any = SimpleNamespace(scheduler=host.scheduler.stats())
    assert readings["pointsman:policy_failures_total"](stats) == {("order", "raises"): 3}
    assert readings["pointsman:replaced_policies"](stats) == {**dict.fromkeys(KINDS, 0), "order": 1}
