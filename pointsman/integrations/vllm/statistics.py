"""Statistics in vLLM's form, for its loggers and Prometheus metrics, and the draft counts of single requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.v1.metrics.perf import ModelMetrics
from vllm.v1.metrics.stats import PrefixCacheStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from pointsman.core import Request, Scheduler, SchedulerOutput, StepResult, StepUpdate
from pointsman.integrations.vllm.support import maker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput as VLLMOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.perf import PerfStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VLLMRequest

new_stats = maker(
    SchedulerStats,
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    left=(  # fields that the engine core or its clients set, or whose feature is refused
        "connector_prefix_cache_stats",
        "current_wave",
        "ec_connector_stats",
        "iteration_details",
        "kv_cache_eviction_events",
        "kv_connector_stats",
        "num_kv_fetch_reqs_by_stage",
        "running_lora_adapters",
        "step_counter",
        "waiting_lora_adapters",
    ),
)


class Statistics:
    """Counts events between two reports to vLLM's loggers.

    Args:
        scheduler: the scheduler to measure.
        num_drafts: maximum number of drafts of a request in a step.
        vllm_config: decides whether the work of each step is estimated (`--enable-mfu-metrics`).
    """

    def __init__(self, scheduler: Scheduler, num_drafts: int, vllm_config: VllmConfig) -> None:
        self._scheduler = scheduler
        self._num_drafts = num_drafts
        self._no_lookups = PrefixCacheStats()
        self._prefix = self._no_lookups
        self._counts_lookups = scheduler.config.enable_prefix_caching
        self._drafts: SpecDecodingStats | None = None
        work = ModelMetrics(vllm_config) if vllm_config.observability_config.enable_mfu_metrics else None
        self._work = work if work is not None and work.is_enabled() else None

    def count_lookup(self, request: Request, num_hits: int, is_resumed: bool) -> None:
        """Count a lookup in the prefix cache: for this admitted request it found `num_hits` tokens."""
        if self._counts_lookups and request.reads_prefix_cache:
            if self._prefix is self._no_lookups:
                self._prefix = PrefixCacheStats()
            self._prefix.record(request.num_admitted_tokens, num_hits, is_resumed)

    def count_verified(self, proposed: npt.NDArray[np.integer], accepted: npt.NDArray[np.integer]) -> None:
        """Count verified drafts; `proposed` [rows]: number of drafts of each row, `accepted` [rows]: number of accepted
        drafts."""
        if not len(proposed):
            return
        if self._drafts is None:
            self._drafts = SpecDecodingStats.new(self._num_drafts)
        stats = self._drafts
        stats.num_drafts += len(proposed)
        stats.num_draft_tokens += int(proposed.sum())
        stats.num_accepted_tokens += int(accepted.sum())
        for place in range(self._num_drafts):
            stats.num_accepted_tokens_per_pos[place] += int((accepted > place).sum())
            stats.num_draft_tokens_per_pos[place] += int((proposed > place).sum())

    def reset_prefix_cache(self) -> None:
        """Restart the counts of cache hits. Called when the prefix cache has been emptied."""
        self._prefix = PrefixCacheStats()
        self._prefix.reset = True

    def take_stats(self, of_vllm: VLLMOutput | None = None, result: ModelRunnerOutput | None = None) -> SchedulerStats:
        """vLLM's `SchedulerStats`: the counts since the last call, and the current values of the gauges.

        Args:
            of_vllm: vLLM's `SchedulerOutput` of the updated step; None: no step was updated.
            result: `ModelRunnerOutput` of that step.
        """
        num_running, num_queued, num_parked, usage = self._scheduler.gauges()
        prefix, self._prefix = self._prefix, self._no_lookups
        drafts, self._drafts = self._drafts, None
        stats = new_stats(num_running, num_queued, num_parked, kv_cache_usage=usage, prefix_cache_stats=prefix)
        if drafts is not None:
            stats.spec_decoding_stats = drafts
        if result is not None:
            if result.cudagraph_stats is not None:
                stats.cudagraph_stats = result.cudagraph_stats
            if self._work is not None:
                stats.perf_stats = self._estimate_work(of_vllm)
        return stats

    def _estimate_work(self, of_vllm: VLLMOutput) -> PerfStats:
        assert self._work is not None
        return self._work.get_step_perf_stats_per_gpu(of_vllm)


class Drafts:
    """Counts verified drafts, for the statistics and for each request.

    Args:
        num_drafts: maximum number of drafts of a request in a step.
        detail: the draft metrics in a request's completion (`--per-request-spec-decode-metrics`): "none", "summary" or
            "detailed".
        statistics: statistics of all requests; None: statistics are not logged.
    """

    def __init__(self, num_drafts: int, detail: str, statistics: Statistics | None) -> None:
        self._num_drafts = num_drafts
        self._detail = detail
        self._statistics = statistics

    def begin(self, request: VLLMRequest) -> None:
        """Begin to count the drafts of a request of vLLM's that was queued, or whose next part was queued."""
        if self._detail != "none" and request.spec_decode_metrics is None:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self._num_drafts)

    def count_verified(self, output: SchedulerOutput, result: StepResult, update: StepUpdate) -> None:
        """Count the verified drafts of a step. Drafts behind a stop token count, as in vLLM. Drafts of requests that
        finished while the step was in flight do not count."""
        assert result.counts is not None
        which = ((output.num_draft_tokens > 0) & (update.counts > 0)).nonzero()[0]
        proposed, accepted = output.num_draft_tokens[which], np.asarray(result.counts)[which] - 1
        if self._statistics is not None:
            self._statistics.count_verified(proposed, accepted)
        if self._detail == "none":
            return
        for index, num_drafts, num_accepted in zip(which.tolist(), proposed.tolist(), accepted.tolist(), strict=True):
            metrics = output.requests[index].metadata.spec_decode_metrics
            metrics.observe(num_drafts, num_accepted, detailed=self._detail == "detailed")

    def report(self, request: VLLMRequest, output: EngineCoreOutput) -> None:
        """Add the draft counts of a request to its last output."""
        if request.spec_decode_metrics is not None:
            output.spec_decode_metrics = request.spec_decode_metrics
