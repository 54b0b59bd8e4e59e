"""GET /metrics: what Prometheus reads of the server.

    metrics = ServerMetrics(client, "demo")
    metrics.attach()                                  # from now on steps and ends of requests are counted
    body, content_type = await metrics.render()

Totals and gauges of the engine come from one `EngineStats`, asked for at every scrape; histograms and refusals are
counted in this process as things happen (`observations.py`); `metric_table.py` and `metric_readings.py` list every
metric. `prometheus_client` makes the text.

A scrape must never disturb: it asks the engine one question at a time, however many scrapers there are; it waits for
the answer no longer than `STATS_TIMEOUT`, because an engine answers between two steps and one step may be long; and it
lets other tasks of the event loop run after every metric. When there is no new answer, the last one is shown, and
`pointsman:stats_age_seconds` says how old that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import pointsman
from pointsman.engine.errors import EngineDeadError
from pointsman.server.metric_readings import SCRAPED
from pointsman.server.metric_table import (
    ADMISSION_REJECTIONS,
    BASE_LABELS,
    CACHE_CONFIG_INFO,
    ENGINE_INFO,
    ENGINE_UP,
    OPEN_STREAMS,
    REQUESTS_REFUSED,
    STATS_AGE,
    Definition,
    Reading,
)
from pointsman.server.observations import Observations

if TYPE_CHECKING:
    from pointsman.engine.stats import EngineStats
    from pointsman.server.engine_client import EngineClient
    from pointsman.server.wire import EngineInfo

STATS_TIMEOUT = 2.0
"""Seconds that a scrape waits for the engine; Prometheus gives up on a scrape after 10 by default."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the format that every version of Prometheus reads."""

ENGINE_PROCESS_PREFIX = "pointsman:engine"
"""Of the engine process's CPU, memory and files; those of the API process have none, as is the custom."""


class ServerMetrics:
    """The metrics of one API process and its engine. To be used in the event loop's thread only.

    Args:
        client: the engine.
        model_name: what clients call the model; the label `model_name` of every metric.
    """

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self.observations = Observations(client.info.max_model_len)
        self._started = time.monotonic()
        self._stats: EngineStats | None = None
        self._asking: asyncio.Task[EngineStats] | None = None
        self.registry = CollectorRegistry()
        """Of its own, so that several servers can live in one process."""
        self.registry.register(_ServerCollector(self, (model_name, "0")))
        ProcessCollector(registry=self.registry)
        pid = client.info.pid
        ProcessCollector(namespace=ENGINE_PROCESS_PREFIX, pid=lambda: pid, registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def attach(self) -> None:
        """Count the client's steps and ends from now on."""
        self._client.on_steps = self.observations.steps
        self._client.on_end = self.observations.end

    # ------------------------------------------------------------------ what the HTTP interface tells

    def observe_first_token(self, seconds: float) -> None:
        """A request's first token was read, `seconds` after its arrival."""
        self.observations.first_token(seconds)

    def observe_inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens of a request were read together, `seconds` after those before them."""
        self.observations.inter_token(seconds, num_tokens)

    def observe_request(self, n: int, num_generated_tokens: int) -> None:
        """A client's request was answered: with `n` samples, the longest of `num_generated_tokens` tokens."""
        self.observations.client_request(n, num_generated_tokens)

    def count_refusal(self, reason: str) -> None:
        """A request got an error in place of an answer, for one of `metric_table.REFUSALS`."""
        self.observations.refusal(reason)

    def stream_opened(self) -> None:
        """An answer is being streamed from now on."""
        self.observations.open_streams += 1

    def stream_closed(self) -> None:
        """A stream has ended, in whatever way."""
        self.observations.open_streams -= 1

    # ------------------------------------------------------------------ scraping

    async def render(self) -> tuple[bytes, str]:
        """The text for a scraper, and its content type."""
        await self._ask()
        parts = []
        for metric in self.registry.collect():
            parts.append(generate_latest(_Only(metric)))
            await asyncio.sleep(0)  # whoever streams goes first: all of it at once would hold the loop for milliseconds
        return b"".join(parts), CONTENT_TYPE

    async def _ask(self) -> None:
        """Take a new reading of the engine, if it gives one in time."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._client.stats())
            self._asking.add_done_callback(self._answered)
        await asyncio.wait({self._asking}, timeout=STATS_TIMEOUT)

    def _answered(self, asked: asyncio.Task[EngineStats]) -> None:
        # Also if no scrape waits any more: the next one then asks anew, and takes no old answer for a new one.
        self._asking = None
        if not asked.cancelled():
            with contextlib.suppress(EngineDeadError):  # of a dead engine, the last reading is what there is
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
    def client(self) -> EngineClient:
        """The engine that is measured."""
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
    """How the KV cache is set up, in vLLM's words: it says "gpu" of whatever device holds the blocks."""
    return {
        "block_size": str(info.block_size),
        "cache_dtype": info.kv_cache_dtype,
        "enable_prefix_caching": str(info.scheduler["enable_prefix_caching"]),
        "kv_cache_memory_bytes": str(info.kv_cache_bytes),
        "kv_cache_size_tokens": str(info.num_blocks * info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
    }


def engine_labels(info: EngineInfo) -> dict[str, str]:
    """What is served, and the knobs that decide how much fits."""
    knobs = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "order", "watermark")
    return {
        "version": pointsman.__version__,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "max_model_len": str(info.max_model_len),
        **{knob: str(info.scheduler[knob]) for knob in knobs},
    }
