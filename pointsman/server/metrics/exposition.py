"""ServerMetrics: the text that a scrape of /metrics gets.

    metrics = ServerMetrics(client, "demo")
    client.inbox.on_steps = metrics.observations.steps  # steps and finished requests are counted from now on
    client.inbox.on_end = metrics.observations.end
    body, content_type = await metrics.render()

Totals and gauges of the engine come from one `EngineStats`, asked for at every scrape; histograms and refusals are
counted in this process as things happen (`observations.py`); `table.py` and `readings.py` list every
metric. `prometheus_client` makes the text.

A scrape must not disturb requests: it asks the engine one question at a time, however many scrapers there are; it waits
for the answer no longer than `STATS_TIMEOUT`, because an engine answers between two steps and one step may be long; and
it lets other tasks of the event loop run after every metric. When there is no new answer, the last one is shown, and
`pointsman:stats_age_seconds` says how old that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import pointsman
from pointsman.engine.errors import EngineDeadError
from pointsman.server.metrics.observations import Observations
from pointsman.server.metrics.readings import SCRAPED
from pointsman.server.metrics.table import (
    ADMISSION_REJECTIONS,
    BASE_LABELS,
    CACHE_CONFIG_INFO,
    ENGINE_INFO,
    ENGINE_UP,
    OPEN_STREAMS,
    REQUESTS_REFUSED,
    STATS_AGE,
    TENANT_METRICS,
    Definition,
    Reading,
)

if TYPE_CHECKING:
    from pointsman.engine.stats import EngineStats
    from pointsman.server.wire.messages import EngineInfo

STATS_TIMEOUT = 2.0
"""Seconds that a scrape waits for the engine; Prometheus gives up on a scrape after 10 by default."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the format that every version of Prometheus reads."""

ENGINE_PROCESS_PREFIX = "pointsman:engine"
"""Of the engine process's CPU, memory and files; those of the API process have none, as is the custom."""


class MeasuredEngine(Protocol):
    """What a scrape asks of an engine; `EngineClient` has it."""

    info: EngineInfo

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs."""

    async def stats(self) -> EngineStats:
        """Counters and gauges at one moment. Raises EngineDeadError: the process has ended."""


class ServerMetrics:
    """The metrics of one API process and its engine. To be used in the event loop's thread only.

    Args:
        client: the engine.
        model_name: what clients call the model; the label `model_name` of every metric.
        tenants: those that are known from the start.
    """

    def __init__(self, client: MeasuredEngine, model_name: str, tenants: Iterable[str] = ()) -> None:
        self._client = client
        self.observations = Observations(client.info.max_model_len, tenants)
        self._started = time.monotonic()
        self._stats: EngineStats | None = None
        self._asking: asyncio.Task[EngineStats] | None = None
        self.registry = CollectorRegistry()
        """Not the global one, so that one process can hold several servers."""
        self.registry.register(_ServerCollector(self, (model_name, "0")))
        ProcessCollector(registry=self.registry)
        pid = client.info.pid
        ProcessCollector(namespace=ENGINE_PROCESS_PREFIX, pid=lambda: pid, registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # ------------------------------------------------------------------ scraping

    async def render(self) -> tuple[bytes, str]:
        """The text for a scraper, and its content type."""
        await self._ask()
        parts = []
        for metric in self.registry.collect():
            parts.append(generate_latest(_Only(metric)))
            await asyncio.sleep(0)  # streams have priority: all metrics at once would hold the loop for milliseconds
        return b"".join(parts), CONTENT_TYPE

    async def _ask(self) -> None:
        """Take a new reading of the engine, if it gives one in time."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._client.stats())
            self._asking.add_done_callback(self._answered)
        await asyncio.wait({self._asking}, timeout=STATS_TIMEOUT)

    def _answered(self, asked: asyncio.Task[EngineStats]) -> None:
        # Also where no scrape waits any more: the next one asks again, and takes no old answer for a new one.
        self._asking = None
        if not asked.cancelled():
            with contextlib.suppress(EngineDeadError):  # of a dead engine, the last reading is shown
                self._stats = asked.result()

    @property
    def stats(self) -> EngineStats | None:
        """The engine's last reading; None before the first."""
        return self._stats

    @property
    def stats_age(self) -> float:
        """Seconds since that reading; before the first, since the start."""
        read = self._started if self._stats is None else self._stats.time
        return max(0.0, time.monotonic() - read)

    @property
    def client(self) -> MeasuredEngine:
        """The measured engine."""
        return self._client


class _Only(Collector):
    """A collector of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


class _ServerCollector(Collector):
    """Turns the figures into metrics, one after the other."""

    def __init__(self, metrics: ServerMetrics, base: tuple[str, str]) -> None:
        self._metrics = metrics
        self._base = base

    def collect(self) -> Iterator[Metric]:
        """Every metric of the table; those of the engine's totals only after a first reading."""
        yield from self._stated()
        stats = self._metrics.stats  # the same for all, even if another scrape gets a newer one meanwhile
        if stats is not None:
            for definition, read in SCRAPED:
                yield self._family(definition, read(stats))
        yield self._family(STATS_AGE, self._metrics.stats_age)
        yield from self._kept()

    def _stated(self) -> Iterator[Metric]:
        client = self._metrics.client
        yield self._family(ENGINE_UP, float(client.is_alive))
        yield self._info(CACHE_CONFIG_INFO, cache_labels(client.info))
        yield self._info(ENGINE_INFO, engine_labels(client.info))

    def _kept(self) -> Iterator[Metric]:
        observations = self._metrics.observations
        for definition, histogram in observations.histograms.items():
            family = HistogramMetricFamily(definition.name, definition.meaning, labels=BASE_LABELS)
            family.add_metric(self._base, histogram.buckets(), histogram.sum)
            yield family
        refused = observations.refused
        yield self._family(REQUESTS_REFUSED, refused)
        yield self._family(
            ADMISSION_REJECTIONS,
            {"max_num_queued_reqs": refused["queue_requests"], "max_num_queued_tokens": refused["queue_tokens"]},
        )
        yield self._family(OPEN_STREAMS, observations.open_streams)
        for definition, reading in zip(TENANT_METRICS, observations.tenants.readings(), strict=True):
            yield self._family(definition, reading)

    def _family(self, definition: Definition, reading: Reading) -> Metric:
        kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
        if not isinstance(reading, Mapping):
            family = kind(definition.name, definition.meaning, labels=BASE_LABELS)
            family.add_metric(self._base, reading)
            return family
        assert definition.label is not None
        family = kind(definition.name, definition.meaning, labels=(*BASE_LABELS, definition.label))
        for value, number in reading.items():
            family.add_metric((*self._base, value), number)
        return family

    def _info(self, definition: Definition, facts: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(definition.name, definition.meaning, labels=(*BASE_LABELS, *facts))
        family.add_metric((*self._base, *facts.values()), 1)
        return family


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """How the KV cache is set up, with vLLM's labels, which say "gpu" for every device."""
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(info.scheduler["enable_prefix_caching"]),
        "kv_cache_memory_bytes": str(info.kv_cache_bytes),
        "kv_cache_size_tokens": str(info.num_blocks * info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
    }


def engine_labels(info: EngineInfo) -> dict[str, str]:
    """The model and version, and the settings that decide how much fits."""
    knobs = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "order", "watermark")
    return {
        "version": pointsman.__version__,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "max_model_len": str(info.max_model_len),
        **{knob: str(info.scheduler[knob]) for knob in knobs},
    }
