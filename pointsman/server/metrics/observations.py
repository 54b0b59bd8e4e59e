"""Observations: histograms, refused requests and open streams, counted in the API process while requests run.

All calls are in the event loop's thread. The histograms are those of `prometheus_client`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Histogram

from pointsman.server.metrics.table import (
    DECODE_TIME,
    E2E_LATENCY,
    GENERATION_TOKENS,
    HISTOGRAMS,
    INFERENCE_TIME,
    INTER_TOKEN_LATENCY,
    ITERATION_TOKENS,
    MAX_GENERATION_TOKENS,
    NUM_PREEMPTIONS,
    PARAMS_MAX_TOKENS,
    PARAMS_N,
    PREFILL_COMPUTED_TOKENS,
    PREFILL_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REFUSALS,
    SCHEDULER_STEP,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Definition,
    token_buckets,
)
from pointsman.server.metrics.tenants import TenantCounts

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import RequestMetrics
    from pointsman.server.wire.messages import Delta, EngineRequest, StepNote


class Observations:
    """Counts of the server since its start. They never fall, except the number of open streams.

    Args:
        max_model_len: maximum number of tokens of a sequence; sets the buckets of histograms of token counts.
        tenants: names of tenants that are known from the start.
        num_engines: number of engines.

    Attributes:
        engines: the observations of each engine's requests and steps.
    """

    def __init__(self, max_model_len: int, tenants: Iterable[str] = (), num_engines: int = 1) -> None:
        self.engines = [EngineObservations(max_model_len) for _ in range(num_engines)]
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.open_streams = 0
        self.tenants = TenantCounts(tenants)

    def refusal(self, reason: str) -> None:
        """Count a request that got an error; a reason that is not in `REFUSALS` counts as "other"."""
        self.refused[reason if reason in self.refused else "other"] += 1


class EngineObservations:
    """Histograms of one engine's requests and steps since the server started; they survive restarts of the engine.

    Args:
        max_model_len: maximum number of tokens of a sequence; sets the buckets of histograms of token counts.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.histograms = {one: _histogram(one, one.buckets or tokens) for one in HISTOGRAMS}
        # Bound methods, because they are called for every delta and step.
        self.first_token = self.histograms[TIME_TO_FIRST_TOKEN].observe
        self._inter_token = self.histograms[INTER_TOKEN_LATENCY].observe
        self._iteration_tokens = self.histograms[ITERATION_TOKENS].observe
        self._scheduler_step = self.histograms[SCHEDULER_STEP].observe

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """Observe `num_tokens` tokens that arrived together, `seconds` after the token before them; each gets an equal
        share of this time."""
        for _ in range(num_tokens):
            self._inter_token(seconds / num_tokens)

    def steps(self, notes: Iterable[StepNote]) -> None:
        """Observe each step's number of scheduled tokens and the scheduler's time."""
        for num_scheduled_tokens, _, scheduler_seconds in notes:
            self._iteration_tokens(num_scheduled_tokens)
            self._scheduler_step(scheduler_seconds)

    def client_request(self, n: int, num_generated_tokens: int) -> None:
        """Observe a client's request that has completed, with `n` samples. The longest sample has
        `num_generated_tokens` tokens."""
        self.histograms[PARAMS_N].observe(n)
        self.histograms[MAX_GENERATION_TOKENS].observe(num_generated_tokens)

    def end(self, request: EngineRequest, delta: Delta, num_output_tokens: int) -> None:
        """Observe a finished request of the engine; `delta` is its last delta.

        Aborted requests are left out. The engine does not report the end of requests whose client disconnected, and the
        times of other aborted requests say nothing about the service.
        """
        if delta.finish_reason == "abort":
            return
        histograms = self.histograms
        histograms[PROMPT_TOKENS].observe(len(request.prompt_token_ids))
        histograms[GENERATION_TOKENS].observe(num_output_tokens)
        if request.params.max_tokens is not None:
            histograms[PARAMS_MAX_TOKENS].observe(request.params.max_tokens)
        if delta.metrics is not None:
            histograms[PREFILL_COMPUTED_TOKENS].observe(len(request.prompt_token_ids) - delta.metrics.num_cached_tokens)
            num_preemptions = sum(cause.exists_in_vllm for cause in delta.metrics.preemption_causes)
            histograms[NUM_PREEMPTIONS].observe(num_preemptions)
            self._observe_phases(delta.metrics, num_output_tokens)

    def _observe_phases(self, metrics: RequestMetrics, num_output_tokens: int) -> None:
        """Observe the time that a finished request spent in each phase that it reached."""
        histograms = self.histograms
        arrival, end = metrics.arrival_time, metrics.finished_time
        if end is None:
            return
        histograms[E2E_LATENCY].observe(end - arrival)
        scheduled, first_token = metrics.first_scheduled_time, metrics.first_token_time
        histograms[QUEUE_TIME].observe((end if scheduled is None else scheduled) - arrival)
        if scheduled is None:
            return
        histograms[INFERENCE_TIME].observe(end - scheduled)
        if first_token is None:
            return
        histograms[PREFILL_TIME].observe(first_token - scheduled)
        histograms[DECODE_TIME].observe(end - first_token)
        if num_output_tokens > 1:
            histograms[TIME_PER_OUTPUT_TOKEN].observe((end - first_token) / (num_output_tokens - 1))


def _histogram(definition: Definition, buckets: tuple[float, ...]) -> Histogram:
    """A histogram without labels; `exposition.py` adds the labels."""
    return Histogram(definition.name, definition.meaning, buckets=buckets, registry=None)
