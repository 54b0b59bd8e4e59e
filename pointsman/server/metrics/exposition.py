"""ServerMetrics: writes the text of a scrape of /metrics.

    metrics = ServerMetrics(fleet, "demo")  # steps and finished requests are counted from now on
    body, content_type = await metrics.render()

Totals and gauges of an engine come from one `EngineStats`, requested at every scrape. Histograms and refusals are
counted in this process (`observations.py`). `table.py` and `readings.py` list all metrics. `prometheus_client` makes
the text.

A scrape must not disturb requests. It asks each engine one question at a time, for any number of scrapers. It waits at
most `STATS_TIMEOUT`, because an engine answers between two steps, and a step may be long. It lets other tasks of the
event loop run after every metric. Without a new answer, the last answer is shown, and `pointsman:stats_age_seconds` has
the age of that answer. The gauges of a dead engine are 0.

Each engine has its own series, by the label `engine`; counters of a restarted engine begin at 0. Metrics of
the server as a whole have engine="0" with one engine, and engine="" with several.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import pointsman
from pointsman.engine.errors import EngineDeadError, EngineStalledError
from pointsman.server.metrics.observations import EngineObservations, Observations
from pointsman.server.metrics.readings import SCRAPED
from pointsman.server.metrics.table import (
    ADMISSION_REJECTIONS,
    BASE_LABELS,
    CACHE_CONFIG_INFO,
    CONNECTIONS_CLOSED,
    ENGINE_HANGS,
    ENGINE_INFO,
    ENGINE_RESTARTS,
    ENGINE_UP,
    HISTOGRAMS,
    OPEN_STREAMS,
    REQUESTS_REFUSED,
    REQUESTS_RESUMED,
    STAGE_HELD,
    STAGE_ROOM,
    STATS_AGE,
    TENANT_METRICS,
    TENANT_STAGE_HELD,
    Definition,
    Reading,
)
from pointsman.server.stages import CONNECTIONS
from pointsman.server.wire.connections import Connections
from pointsman.server.wire.questions import AnswerT, Question, Stats

if TYPE_CHECKING:
    from pointsman.engine.stats import EngineStats
    from pointsman.server.stages import StageLimit
    from pointsman.server.wire.messages import EngineInfo

STATS_TIMEOUT = 2.0
"""Maximum seconds that a scrape waits for the engine; Prometheus ends a scrape after 10 s by default."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text format that every version of Prometheus reads."""

ENGINE_PROCESS_PREFIX = "pointsman:engine"
"""Prefix of the metrics of the engine process's CPU, memory and files; those of the API process have none, as usual."""


class MeasuredClient(Protocol):
    """The methods of an engine that a scrape calls; `EngineClient` implements them."""

    info: EngineInfo
    is_here: bool
    """Whether the engine process runs on this machine."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs."""

    async def ask(self, question: Question[AnswerT]) -> AnswerT:
        """The answer to a question.

        Raises:
            EngineDeadError: the process has ended.
            EngineStalledError: the engine gives no sign of life.
        """


class MeasuredFleet(Protocol):
    """The methods of all engines that a scrape calls; `EngineFleet` implements them."""

    @property
    def info(self) -> EngineInfo:
        """The description of the first engine."""

    @property
    def engines(self) -> Sequence[MeasuredClient]:
        """The engines, in the order of their numbers; a restart replaces an engine by a new one."""

    @property
    def expected(self) -> list[int]:
        """The numbers of the engines that live or should live."""

    @property
    def num_restarts(self) -> Sequence[int]:
        """How often each engine was restarted."""

    @property
    def num_resumed(self) -> Sequence[int]:
        """How many requests of each engine were resumed after it died."""

    @property
    def num_hangs(self) -> Sequence[int]:
        """How often each engine counted as dead because it gave no sign of life."""

    def observe(self, observations: Sequence[EngineObservations]) -> None:
        """Report steps and finished requests of each engine to its observations from now on."""


class MeasuredEngine:
    """The newest reading of one engine.

    Args:
        fleet: the fleet of the engine, or of its replacement after a restart.
        index: the number of the engine in the fleet.
    """

    def __init__(self, fleet: MeasuredFleet, index: int) -> None:
        self._fleet = fleet
        self._index = index
        self._started = time.monotonic()
        self._asking: asyncio.Task[EngineStats] | None = None
        self.stats: EngineStats | None = None
        """Statistics that the engine gave at the newest reading; None before the first reading."""

    @property
    def client(self) -> MeasuredClient:
        """The engine that has this number now."""
        return self._fleet.engines[self._index]

    def ask(self) -> asyncio.Task[EngineStats]:
        """The task that gets new statistics from the engine: the task that is running, or a new task if none runs."""
        if self._asking is None:
            self._asking = asyncio.create_task(self.client.ask(Stats()))
            self._asking.add_done_callback(self._note_answer)
        return self._asking

    def _note_answer(self, asked: asyncio.Task[EngineStats]) -> None:
        # Runs even if no scrape waits any more, so that the next scrape asks again and does not get an old answer.
        self._asking = None
        if not asked.cancelled():
            with contextlib.suppress(EngineDeadError, EngineStalledError):  # then the last reading is shown
                self.stats = asked.result()

    @property
    def stats_age(self) -> float:
        """Seconds since the last reading; before the first reading, seconds since the start."""
        read = self._started if self.stats is None else self.stats.time
        return max(0.0, time.monotonic() - read)


class ServerMetrics:
    """The metrics of one API process and its engines. To be used in the event loop's thread only.

    Args:
        fleet: the engines.
        model_name: the model's name for clients; the label `model_name` of every metric.
        tenants: names of tenants that are known from the start.
        limits: the limits of the stages.
        connections: the clients' connections; None: another server (Ray Serve) counts them.
    """

    def __init__(
        self,
        fleet: MeasuredFleet,
        model_name: str,
        tenants: Iterable[str] = (),
        limits: Sequence[StageLimit] = (),
        connections: Connections | None = None,
    ) -> None:
        count = len(fleet.engines)
        self.fleet = fleet
        self.limits = limits
        self.connections = connections or Connections(0)
        self.observations = Observations(fleet.info.max_model_len, tenants, count)
        fleet.observe(self.observations.engines)
        self.engines = [MeasuredEngine(fleet, index) for index in range(count)]
        self.registry = CollectorRegistry()
        """Registry of this server, not the global one, so that one process can hold several servers."""
        self.registry.register(_ServerCollector(self, model_name))
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineProcesses(self.engines))
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    async def render(self) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        await asyncio.wait({engine.ask() for engine in self.engines}, timeout=STATS_TIMEOUT)
        parts = []
        for metric in self.registry.collect():
            parts.append(generate_latest(_SingleMetric(metric)))
            await asyncio.sleep(0)  # streams have priority: all metrics at once would hold the loop for milliseconds
        return b"".join(parts), CONTENT_TYPE


class _SingleMetric(Collector):
    """Yields one given metric to `prometheus_client`."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class _EngineProcesses(Collector):
    """Processor time, memory and files of the engine processes on this machine; with the label `engine` if there are
    several engines.
    """

    def __init__(self, engines: list[MeasuredEngine]) -> None:
        self._engines = engines
        self._collectors = [
            ProcessCollector(namespace=ENGINE_PROCESS_PREFIX, pid=partial(_pid_of, engine), registry=None)
            for engine in engines
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that `prometheus_client` measures of each engine process on this machine."""
        here = [index for index, engine in enumerate(self._engines) if engine.client.is_here]
        if len(self._collectors) == 1:
            yield from self._collectors[0].collect() if here else ()
            return
        families: dict[str, Metric] = {}
        for index in here:
            for metric in self._collectors[index].collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {**sample.labels, "engine": str(index)}, sample.value)
        yield from families.values()


def _pid_of(engine: MeasuredEngine) -> int:
    return engine.client.info.pid


class _ServerCollector(Collector):
    """Yields the metrics of the table one by one."""

    def __init__(self, metrics: ServerMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._bases = [(model_name, str(index)) for index in range(len(metrics.engines))]
        self._whole = self._bases if len(self._bases) == 1 else [(model_name, "")]

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the table. An engine's totals and gauges are left out before the first reading of that
        engine."""
        engines, expected = self._metrics.engines, self._metrics.fleet.expected
        yield from self._stated_metrics(expected)
        # One reading for all metrics, even if another scrape gets a newer one meanwhile.
        read = [(base, engine.stats, engine.client.is_alive) for base, engine in zip(self._bases, engines, strict=True)]
        known = [(base, stats, is_alive) for base, stats, is_alive in read if stats is not None]
        if known:
            for definition, reading in SCRAPED:
                found = [
                    (base, reading(stats) if is_alive or definition.kind == "counter" else nothing(reading(stats)))
                    for base, stats, is_alive in known
                ]
                yield self._family(definition, found)
        yield self._family(STATS_AGE, [(self._bases[index], engines[index].stats_age) for index in expected])
        yield from self._kept_metrics()

    def _stated_metrics(self, expected: Sequence[int]) -> Iterator[Metric]:
        clients = [engine.client for engine in self._metrics.engines]
        up = [(self._bases[index], float(clients[index].is_alive)) for index in expected]
        yield self._family(ENGINE_UP, up)
        yield self._of_engines(ENGINE_RESTARTS, self._metrics.fleet.num_restarts)
        yield self._of_engines(ENGINE_HANGS, self._metrics.fleet.num_hangs)
        yield self._of_engines(REQUESTS_RESUMED, self._metrics.fleet.num_resumed)
        yield self._info(CACHE_CONFIG_INFO, [cache_labels(client.info) for client in clients])
        yield self._info(ENGINE_INFO, [engine_labels(client.info) for client in clients])

    def _kept_metrics(self) -> Iterator[Metric]:
        observations = self._metrics.observations
        for definition in HISTOGRAMS:
            family = HistogramMetricFamily(definition.name, definition.meaning, labels=BASE_LABELS)
            for base, engine in zip(self._bases, observations.engines, strict=True):
                labels = dict(zip(BASE_LABELS, base, strict=True))
                (counted,) = engine.histograms[definition].collect()
                for sample in counted.samples:
                    if not sample.name.endswith("_created"):  # redundant with the start time of the process
                        family.add_sample(sample.name, {**labels, **sample.labels}, sample.value)
            yield family
        refused = observations.refused
        yield self._of_server(REQUESTS_REFUSED, refused)
        yield self._of_server(
            ADMISSION_REJECTIONS,
            {"max_num_queued_reqs": refused["queue_requests"], "max_num_queued_tokens": refused["queue_tokens"]},
        )
        yield self._of_server(OPEN_STREAMS, observations.open_streams)
        yield self._of_server(CONNECTIONS_CLOSED, self._metrics.connections.closed)
        for definition, reading in zip(TENANT_METRICS, observations.tenants.readings(), strict=True):
            yield self._of_server(definition, reading)
        limits, connections = self._metrics.limits, self._metrics.connections
        totals = {CONNECTIONS.name: connections.num_open, **{limit.stage.name: limit.total for limit in limits}}
        yield self._of_server(STAGE_HELD, totals)
        sizes = {limit.stage.name: float("inf") if limit.size is None else limit.size for limit in limits}
        yield self._of_server(STAGE_ROOM, {CONNECTIONS.name: connections.size, **sizes})
        held = {limit.stage.name: observations.tenants.named(limit.by_tenant) for limit in limits}
        yield self._of_server(
            TENANT_STAGE_HELD,
            {(stage, tenant): amount for stage, by_tenant in held.items() for tenant, amount in by_tenant.items()},
        )

    def _of_server(self, definition: Definition, reading: Reading) -> Metric:
        return self._family(definition, [(self._whole[0], reading)])

    def _of_engines(self, definition: Definition, readings: Sequence[Reading]) -> Metric:
        return self._family(definition, list(zip(self._bases, readings, strict=True)))

    def _family(self, definition: Definition, readings: Sequence[tuple[tuple[str, str], Reading]]) -> Metric:
        kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
        further = (label for label in (definition.label, definition.second_label) if label is not None)
        labels = (*BASE_LABELS, *further)
        family = kind(definition.name, definition.meaning, labels=labels)
        for base, reading in readings:
            if isinstance(reading, Mapping):
                for value, number in reading.items():
                    family.add_metric((*base, *((value,) if isinstance(value, str) else value)), number)
            else:
                family.add_metric(base, reading)
        return family

    def _info(self, definition: Definition, facts: Sequence[Mapping[str, str]]) -> Metric:
        family = GaugeMetricFamily(definition.name, definition.meaning, labels=(*BASE_LABELS, *facts[0]))
        for base, some in zip(self._bases, facts, strict=True):
            family.add_metric((*base, *some.values()), 1)
        return family


def nothing(reading: Reading) -> Reading:
    """A gauge's reading with all values 0, for a dead engine."""
    if isinstance(reading, Mapping):
        return cast(Reading, dict.fromkeys(reading, 0))
    return 0


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """Labels with the configuration of the KV cache; vLLM's names, which have "gpu" for every device."""
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(info.scheduler["enable_prefix_caching"]),
        "kv_cache_memory_bytes": str(info.kv_cache_bytes),
        "kv_cache_size_tokens": str(info.kv_cache_tokens),
        "num_gpu_blocks": str(info.num_blocks),
    }


def engine_labels(info: EngineInfo) -> dict[str, str]:
    """Labels with Pointsman's version, the device, the model's data type and maximum length, and scheduler settings."""
    knobs = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "order", "watermark")
    return {
        "version": pointsman.__version__,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "max_model_len": str(info.max_model_len),
        **{knob: str(info.scheduler[knob]) for knob in knobs},
    }
