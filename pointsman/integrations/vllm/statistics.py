"""What vLLM's loggers and its Prometheus metrics read of a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.metrics.perf import ModelMetrics
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from pointsman.core import Request, Scheduler
from pointsman.integrations.vllm.versions import maker

new_stats = maker(
    SchedulerStats,
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "kv_cache_usage",
    "prefix_cache_stats",
    "spec_decoding_stats",
    "cudagraph_stats",
    "perf_stats",
)


class Statistics:
    """Counts between two reports.

    Args:
        scheduler: whose.
        num_drafts: most drafts that a request may have in a step.
        vllm_config: whether the work of each step is estimated (`--enable-mfu-metrics`).
    """

    def __init__(self, scheduler: Scheduler, num_drafts: int, vllm_config: Any) -> None:
        self._scheduler = scheduler
        self._num_drafts = num_drafts
        self._no_look_ups = PrefixCacheStats()
        self._prefix = self._no_look_ups
        self._looks_up = scheduler.config.enable_prefix_caching
        self._drafts: Any = None
        work = ModelMetrics(vllm_config) if vllm_config.observability_config.enable_mfu_metrics else None
        self._work = work if work is not None and work.is_enabled() else None

    def looked_up(self, request: Request, num_hits: int, is_resumed: bool) -> None:
        """A request was admitted, and so many of its tokens were in the prefix cache."""
        if self._looks_up and request.use_prefix_cache:
            if self._prefix is self._no_look_ups:
                self._prefix = PrefixCacheStats()
            self._prefix.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=is_resumed)

    def verified(self, proposed: npt.NDArray[np.int64], accepted: npt.NDArray[np.int64]) -> None:
        """Drafts came back: [n] of each row how many, and how many of them the model would have chosen."""
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
        """The prefix cache is empty, and the counts of its hits begin anew."""
        self._prefix = PrefixCacheStats()
        self._prefix.reset = True

    def take(self, of_vllm: Any = None, result: Any = None) -> Any:
        """The `SchedulerStats` since the last call, and the gauges of this moment.

        Args:
            of_vllm: the `SchedulerOutput` that was updated; None: none.
            result: its `ModelRunnerOutput`.
        """
        scheduler = self._scheduler
        prefix, self._prefix = self._prefix, self._no_look_ups
        drafts, self._drafts = self._drafts, None
        return new_stats(
            num_running_reqs=scheduler.num_running,
            num_waiting_reqs=scheduler.num_queued,
            num_skipped_waiting_reqs=scheduler.num_parked,
            kv_cache_usage=scheduler.kv_cache_usage,
            prefix_cache_stats=prefix,
            spec_decoding_stats=drafts,
            cudagraph_stats=None if result is None else result.cudagraph_stats,
            perf_stats=None if self._work is None or result is None else self._estimate(of_vllm),
        )

    def _estimate(self, of_vllm: Any) -> Any:
        assert self._work is not None
        return self._work.get_step_perf_stats_per_gpu(of_vllm)
