"""What vLLM's loggers and its Prometheus metrics read of a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from pointsman.core import Scheduler, StepUpdate
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.versions import make


class Statistics:
    """Counts between two reports.

    Args:
        scheduler: whose.
        num_drafts: most drafts that a request may have in a step.
    """

    def __init__(self, scheduler: Scheduler, num_drafts: int) -> None:
        self._scheduler = scheduler
        self._num_drafts = num_drafts
        self._prefix = PrefixCacheStats()
        self._looks_up = scheduler.config.enable_prefix_caching
        self._drafts: Any = None

    def scheduled(self, output: Output) -> None:
        """An output with admitted rows: what each found in the prefix cache."""
        if not self._looks_up:
            return
        rows = zip(output.admitted, output.num_cached_tokens.tolist(), output.is_resumed.tolist(), strict=True)
        for request, num_hits, is_resumed in rows:
            if request.use_prefix_cache:
                self._prefix.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=is_resumed)

    def verified(self, output: Output, update: StepUpdate) -> None:
        """A result of an output with drafts."""
        which = ((output.num_draft_tokens > 0) & (update.counts > 0)).nonzero()[0]
        if not len(which):
            return
        if self._drafts is None:
            self._drafts = SpecDecodingStats.new(self._num_drafts)
        stats = self._drafts
        proposed = output.num_draft_tokens[which]
        accepted = np.asarray(update.counts)[which] - 1
        stats.num_drafts += len(which)
        stats.num_draft_tokens += int(proposed.sum())
        stats.num_accepted_tokens += int(accepted.sum())
        for place in range(self._num_drafts):
            stats.num_accepted_tokens_per_pos[place] += int((accepted > place).sum())
            stats.num_draft_tokens_per_pos[place] += int((proposed > place).sum())

    def reset_prefix_cache(self) -> None:
        """The prefix cache is empty, and the counts of its hits begin anew."""
        self._prefix = PrefixCacheStats()
        self._prefix.reset = True

    def take(self, cudagraph_stats: Any = None) -> Any:
        """The `SchedulerStats` since the last call, and the gauges of this moment."""
        scheduler = self._scheduler
        prefix, self._prefix = self._prefix, PrefixCacheStats()
        drafts, self._drafts = self._drafts, None
        return make(
            SchedulerStats,
            {
                "num_running_reqs": scheduler.num_running,
                "num_waiting_reqs": scheduler.num_queued,
                "num_skipped_waiting_reqs": scheduler.num_parked,
                "kv_cache_usage": scheduler.kv_cache_usage,
                "prefix_cache_stats": prefix,
                "spec_decoding_stats": drafts,
                "cudagraph_stats": cudagraph_stats,
            },
        )
