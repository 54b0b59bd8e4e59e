"""What is told of verified drafts: to the loggers of vLLM, and in a request's own answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from pointsman.core import SchedulerOutput as Output
from pointsman.core import StepResult, StepUpdate
from pointsman.integrations.vllm.statistics import Statistics


class Drafts:
    """Counts them.

    Args:
        most: drafts that a request may have in a step.
        told: how much a request's answer tells of its drafts (`--per-request-spec-decode-metrics`): "none", "summary"
            or "detailed".
        statistics: of all requests; None: nobody logs them.
    """

    def __init__(self, most: int, told: str, statistics: Statistics | None) -> None:
        self._most = most
        self._told = told
        self._statistics = statistics

    def begin(self, request: Any) -> None:
        """One of vLLM's requests, or the next part of one, is queued."""
        if self._told != "none" and request.spec_decode_metrics is None:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self._most)

    def verified(self, output: Output, result: StepResult, update: StepUpdate) -> None:
        """A result of an output with drafts. Those behind a stop count, as vLLM counts; those of requests that ended
        meanwhile do not."""
        assert result.counts is not None
        which = ((output.num_draft_tokens > 0) & (update.counts > 0)).nonzero()[0]
        proposed, accepted = output.num_draft_tokens[which], np.asarray(result.counts)[which] - 1
        if self._statistics is not None:
            self._statistics.verified(proposed, accepted)
        if self._told == "none":
            return
        for index, num_drafts, num_accepted in zip(which.tolist(), proposed.tolist(), accepted.tolist(), strict=True):
            metrics = output.requests[index].metadata.spec_decode_metrics
            metrics.observe(num_drafts, num_accepted, detailed=self._told == "detailed")

    def tell(self, request: Any, output: Any) -> None:
        """The last output of a request says how its drafts fared."""
        if request.spec_decode_metrics is not None:
            output.spec_decode_metrics = request.spec_decode_metrics
