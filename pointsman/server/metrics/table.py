"""The table of the server's metrics: name, type, unit, meaning, labels, buckets and source of each metric.

Metrics that vLLM has keep its name (prefix "vllm:"), type, labels and bucket edges, so that dashboards and alerts for
vLLM continue to work. Other metrics have the prefix "pointsman:". Three sources:

    SCRAPED   read from one `EngineStats` at every scrape: the engine's totals and gauges, see `readings.py`
    KEPT      counted in the API process while requests run (`observations.py`): histograms, refusals, streams
    STATED    about the server itself: whether the engine is up, and its configuration

Every metric has the labels of `BASE_LABELS`; the name of one further label is in `label`. All values of such a label,
except of `tenant`, are exposed from the first scrape on, at 0: a rate over a series that appears with its first event
misses that event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# ---------------------------------------------------------------------- buckets

TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS_BUCKETS = tuple(float(2**power) for power in range(15) if power not in (1, 2))
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
NUM_PREEMPTIONS_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SCHEDULER_STEP_BUCKETS = (
    5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0,
)  # fmt: skip


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Upper bucket bounds 1, 2, 5, 10, 20, 50, ... tokens, up to the maximum length of a sequence."""
    steps = [factor * 10**power for power in range(len(str(max_model_len))) for factor in (1, 2, 5)]
    return tuple(float(step) for step in steps if step <= max_model_len)


BASE_LABELS = ("model_name", "engine")
"""Labels of every metric. `engine` is the number of the engine behind the API process, from "0" on."""

FINISH_REASONS = ("stop", "length", "repetition", "abort", "error", "deadline")
"""Finish reasons; "deadline" is Pointsman's own, vLLM has the others."""

REFUSALS = (
    "invalid",  # 400: the request is malformed, or can never run
    "unauthorized",  # 401: no valid key; 403: a page of another site
    "not_found",  # 404: an unknown model, request or path
    "deadline",  # 408: its deadline passed before its first token
    "too_large",  # 413: its body is longer than allowed
    "queue_requests",  # 429: too many requests are open
    "queue_tokens",  # 429: too many prompt tokens wait
    "queue_characters",  # 429: too many characters wait to be tokenized
    "queue_bytes",  # 429: the bodies of open requests are too large together
    "queue_grammars",  # 429: too many requests wait for a grammar
    "connections",  # 503: all connections are in use
    "draining",  # 503: the server is ending
    "engine_dead",  # 500 or 503: the engine's process has ended
    "other",
)
"""Reasons of refused requests. A closed list: clients must not be able to add labels."""


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """The fixed properties of a metric. Compared by identity, as the constants below are keys of dictionaries."""

    name: str
    """The name in Prometheus; histograms also get the suffixes _bucket, _sum and _count."""
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    label: str | None = None
    """Name of the metric's own label, in addition to `BASE_LABELS`; None: there is no such label."""
    second_label: str | None = None
    """Name of a further label in addition to `label`; the values of this second label are not known from the start.
    None: there is no second label."""
    buckets: tuple[float, ...] | None = None
    """Inclusive upper bounds of the histogram's buckets; None: those of `token_buckets`."""


Reading = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""The number that a metric has; or one number for each value of the metric's `label`; or one for each pair of values of
`label` and `second_label`."""


# ------------------------------------------------------------------------- KEPT

TIME_TO_FIRST_TOKEN = Definition(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "seconds",
    "From a request's arrival to its first token, at the API process.",
    buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
)
INTER_TOKEN_LATENCY = Definition(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "seconds",
    "From one token of a request to its next, at the API process. Tokens that come together share the time.",
    buckets=INTER_TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Definition(
    "vllm:request_time_per_output_token_seconds",
    "histogram",
    "seconds",
    "A request's mean time per token after its first.",
    buckets=INTER_TOKEN_BUCKETS,
)
E2E_LATENCY = Definition(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "seconds",
    "From a request's arrival to its end.",
    buckets=REQUEST_LATENCY_BUCKETS,
)
QUEUE_TIME = Definition(
    "vllm:request_queue_time_seconds",
    "histogram",
    "seconds",
    "From a request's arrival to its first step, or to its end if it had no step.",
    buckets=REQUEST_LATENCY_BUCKETS,
)
PREFILL_TIME = Definition(
    "vllm:request_prefill_time_seconds",
    "histogram",
    "seconds",
    "From a request's first step to its first token.",
    buckets=REQUEST_LATENCY_BUCKETS,
)
DECODE_TIME = Definition(
    "vllm:request_decode_time_seconds",
    "histogram",
    "seconds",
    "From a request's first token to its end.",
    buckets=REQUEST_LATENCY_BUCKETS,
)
INFERENCE_TIME = Definition(
    "vllm:request_inference_time_seconds",
    "histogram",
    "seconds",
    "From a request's first step to its end, preemptions included.",
    buckets=REQUEST_LATENCY_BUCKETS,
)
PROMPT_TOKENS = Definition(
    "vllm:request_prompt_tokens", "histogram", "tokens", "Prompt tokens of a request that has ended."
)
GENERATION_TOKENS = Definition(
    "vllm:request_generation_tokens", "histogram", "tokens", "Tokens that a request had generated when it ended."
)
PREFILL_COMPUTED_TOKENS = Definition(
    "vllm:request_prefill_kv_computed_tokens",
    "histogram",
    "tokens",
    "Prompt tokens of an ended request that were not in the prefix cache.",
)
MAX_GENERATION_TOKENS = Definition(
    "vllm:request_max_num_generation_tokens",
    "histogram",
    "tokens",
    "Tokens of the longest of a client's n samples.",
)
PARAMS_N = Definition(
    "vllm:request_params_n",
    "histogram",
    "samples",
    "The field n of a client's request.",
    buckets=PARAMS_N_BUCKETS,
)
PARAMS_MAX_TOKENS = Definition(
    "vllm:request_params_max_tokens", "histogram", "tokens", "Maximum number of tokens that a request may generate."
)
NUM_PREEMPTIONS = Definition(
    "vllm:request_num_preemptions",
    "histogram",
    "preemptions",
    "Preemptions of a request, as vllm:num_preemptions_total counts them.",
    buckets=NUM_PREEMPTIONS_BUCKETS,
)
ITERATION_TOKENS = Definition(
    "vllm:iteration_tokens_total",
    "histogram",
    "tokens",
    "Tokens that a step computed.",
    buckets=ITERATION_TOKENS_BUCKETS,
)
SCHEDULER_STEP = Definition(
    "pointsman:scheduler_step_seconds",
    "histogram",
    "seconds",
    "Time of the scheduler's decisions for a step.",
    buckets=SCHEDULER_STEP_BUCKETS,
)

HISTOGRAMS = (
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    E2E_LATENCY,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
    INFERENCE_TIME,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    PREFILL_COMPUTED_TOKENS,
    MAX_GENERATION_TOKENS,
    PARAMS_N,
    PARAMS_MAX_TOKENS,
    NUM_PREEMPTIONS,
    ITERATION_TOKENS,
    SCHEDULER_STEP,
)

REQUESTS_REFUSED = Definition(
    "pointsman:requests_refused_total",
    "counter",
    "requests",
    "Requests that got an error response, by reason.",
    "reason",
)
ADMISSION_REJECTIONS = Definition(
    "vllm:admission_rejections_total",
    "counter",
    "requests",
    "Requests refused because too many requests or prompt tokens were waiting.",
    "reason",
)
OPEN_STREAMS = Definition(
    "pointsman:http_open_streams", "gauge", "streams", "Responses that are being streamed to clients."
)
CONNECTIONS_CLOSED = Definition(
    "pointsman:http_connections_closed_total",
    "counter",
    "connections",
    "Connections that the server closed on its own, by reason.",
    "reason",
)

TENANT_PROMPT_TOKENS = Definition(
    "pointsman:tenant_prompt_tokens_total",
    "counter",
    "tokens",
    "vllm:prompt_tokens_total by tenant.",
    "tenant",
)
TENANT_GENERATION_TOKENS = Definition(
    "pointsman:tenant_generation_tokens_total",
    "counter",
    "tokens",
    "vllm:generation_tokens_total by tenant.",
    "tenant",
)
TENANT_OPEN_REQUESTS = Definition(
    "pointsman:tenant_open_requests",
    "gauge",
    "requests",
    "Unfinished requests of a tenant; each of n samples counts as one.",
    "tenant",
)
TENANT_UNSTARTED_REQUESTS = Definition(
    "pointsman:tenant_unstarted_requests",
    "gauge",
    "requests",
    "Unfinished requests of a tenant without a first token.",
    "tenant",
)
TENANT_METRICS = (TENANT_PROMPT_TOKENS, TENANT_GENERATION_TOKENS, TENANT_OPEN_REQUESTS, TENANT_UNSTARTED_REQUESTS)
"""Metrics by tenant, in the order of `TenantCounts.readings`. Values of their label are not known from the start."""

STAGE_HELD = Definition(
    "pointsman:stage_held",
    "gauge",
    "the stage's",
    "The amount that all tenants together hold at a stage.",
    "stage",
)
STAGE_ROOM = Definition(
    "pointsman:stage_room",
    "gauge",
    "the stage's",
    "The maximum of pointsman:stage_held; +Inf without a limit.",
    "stage",
)
TENANT_STAGE_HELD = Definition(
    "pointsman:tenant_stage_held",
    "gauge",
    "the stage's",
    "pointsman:stage_held by tenant.",
    "stage",
    "tenant",
)

# ----------------------------------------------------------------------- STATED

ENGINE_UP = Definition(
    "pointsman:engine_up",
    "gauge",
    "0 or 1",
    "Whether the engine's process is alive and responds. Engines that autoscaling has not started or has "
    "ended are left out.",
)
ENGINE_RESTARTS = Definition(
    "pointsman:engine_restarts_total",
    "counter",
    "restarts",
    "Restarts of the engine after a death or a failed start.",
)
ENGINE_HANGS = Definition(
    "pointsman:engine_hangs_total",
    "counter",
    "deaths",
    "How often the engine was ended because of --engine-timeout.",
)
REQUESTS_RESUMED = Definition(
    "pointsman:requests_resumed_total",
    "counter",
    "requests",
    "Requests that were resumed after the engine died.",
)
STATS_AGE = Definition(
    "pointsman:stats_age_seconds",
    "gauge",
    "seconds",
    "Age of the engine's values. It grows while the engine is dead or in a long step.",
)
CACHE_CONFIG_INFO = Definition(
    "vllm:cache_config_info", "gauge", "always 1", "The configuration of the KV cache, as labels."
)
ENGINE_INFO = Definition("pointsman:engine_info", "gauge", "always 1", "The served model and its settings, as labels.")
