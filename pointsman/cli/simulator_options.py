"""The options of `pointsman simulate`, `capacity` and `tune`: workload, service, and help pages.

The scheduler's knobs have the names of `pointsman serve`, and the defaults of `SchedulerConfig`, which are for
GPUs. None means that an option was not given.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pointsman.cli.options import ENGINE_PANELS, KNOBS, Panels
from pointsman.cli.scheduler_options import SERVED_DEFAULTS, knobs_of_panel, simulated_options

ARRIVING: dict[str, Any] = {
    "trace": Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Requests of a file: an Azure or BurstGPT CSV, Mooncake or Qwen-Bailian JSON lines, a result of "
            "vllm bench serve, a guidellm report or a recording.",
        ),
    ],
    "arrivals": Annotated[
        str | None,
        typer.Option(
            metavar="PROCESS",
            help="Generated arrivals per second: poisson:4, constant:4, gamma:4,2 or bursts:4,10 [default: poisson:4].",
        ),
    ],
    "prompt_tokens": Annotated[
        str | None,
        typer.Option(
            metavar="DIST",
            help="Length of generated prompts, like 512, uniform:100,200 or lognormal:1000,0.8 (median, sigma) "
            "[default: lognormal:1000,0.8].",
        ),
    ],
    "output_tokens": Annotated[
        str | None,
        typer.Option(metavar="DIST", help="Length of generated outputs [default: lognormal:130,0.8]."),
    ],
    "sessions": Annotated[
        int | None,
        typer.Option(help="Number of conversations, instead of single requests; each prompt extends the one before."),
    ],
    "turns": Annotated[
        str | None, typer.Option(metavar="DIST", help="Number of requests of a session [default: uniform:2,8].")
    ],
    "new_tokens": Annotated[
        str | None,
        typer.Option(metavar="DIST", help="Tokens that each later prompt of a session adds [default: lognormal:60,1]."),
    ],
    "think": Annotated[
        str | None,
        typer.Option(
            metavar="DIST", help="Seconds from an output to the next request of the same user or session [default: 0]."
        ),
    ],
    "retention": Annotated[
        float | None,
        typer.Option(
            help="Seconds for which the prefix of each request of a session, except the last, is retained; needs "
            "--eviction retention [default: none]."
        ),
    ],
    "users": Annotated[
        int | None,
        typer.Option(
            help="Number of users, each with at most one request at a time (a closed loop). For capacity: the number "
            "that a range of replicas must serve."
        ),
    ],
    "start": Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of the trace to leave out at its beginning, like 10min for a ramp-up."),
    ],
    "seed": Annotated[int | None, typer.Option(help="Seed of generated requests [default: 0].")],
}

SIMULATED: dict[str, Any] = {
    "rate": Annotated[
        float | None,
        typer.Option(help="Factor by which arrivals are sped up: 2 is twice as fast as the trace [default: 1]."),
    ],
    "limit": Annotated[int | None, typer.Option(help="Number of requests, from the start of the trace.")],
    "requests": Annotated[int | None, typer.Option(help="Number of generated requests [default: 1000].")],
}
"""Workload options of `pointsman simulate`, in addition to `ARRIVING`."""

SERVED_BY: dict[str, Any] = {
    "model": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A built-in shape (see --list), a directory or config.json, or a name in the Hugging Face cache "
            "[default: Llama-3.1-8B].",
        ),
    ],
    "device": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A built-in device (see --list), cpu for this machine, or a description: "
            "memory=32GiB,bandwidth=1792GB/s,bf16=209.5TFLOPS,watts=575, or a JSON file of it; for capacity and "
            "frontier also several, like h100,l40s [default: h100].",
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Calibrated step times, as pointsman calibrate writes them."),
    ],
    "tensor_parallel": Annotated[int | None, typer.Option(help="Devices that share the model [default: 1].")],
    "data_parallel_size": Annotated[
        int | None,
        typer.Option(
            help="Engines of each replica, each on --tensor-parallel devices; those of a mixture of experts share the "
            "experts and step together [default: 1]."
        ),
    ],
    "enable_expert_parallel": Annotated[
        bool | None,
        typer.Option(
            "--enable-expert-parallel/--no-enable-expert-parallel",
            help="Whether each device has whole experts, instead of a slice of each [default: no].",
        ),
    ],
    "prefill_replicas": Annotated[
        int | None,
        typer.Option(help="Engines that only compute prompts; needs --decode-replicas [default: none]."),
    ],
    "decode_replicas": Annotated[
        int | None,
        typer.Option(help="Engines that only decode, with the KV from --prefill-replicas [default: none]."),
    ],
    "kv_transfer_bandwidth": Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes a second between a prefill and a decode engine, like 25GB [default: 80 % of the bandwidth "
            "between the engine's devices and their host].",
        ),
    ],
    "kv_transfer_latency": Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of a transfer without any bytes, like 2ms [default: 0]."),
    ],
    "gpu_memory_utilization": Annotated[
        float | None, typer.Option(help="Share of the device's memory for the engine [default: 0.9].")
    ],
    "disable_hybrid_kv_cache_manager": Annotated[
        bool | None,
        typer.Option(
            "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
            help="Whether layers with a sliding window keep the KV of the whole context [default: no, as vLLM].",
        ),
    ],
    "kv_offload_bytes": KNOBS["kv_offload_bytes"],
    "routing": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Rule that chooses the replica: round-robin, least-loaded, prefix-affinity, vllm or vllm-0.26 "
            "[default: round-robin].",
        ),
    ],
}

SPECULATION_AND_ADAPTERS: dict[str, Any] = {
    "acceptance": Annotated[
        str | None,
        typer.Option(
            metavar="SHARES",
            help="Probability that each draft is accepted after the drafts before it, like 0.7,0.5,0.3; or length:2.4, "
            "the mean tokens of a step (vLLM's mean acceptance length); or rates:0.7,0.35,0.1, the per-position rates "
            "of vLLM's log [default: as the profile's log].",
        ),
    ],
    "drafter_time": Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time of the drafter after each step, like 2ms, or 10% of the step [default: 0]."
        ),
    ],
    "adapters": Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of LoRA adapters among which requests are drawn; the second is half as popular as the first, "
            "and so on. Also zipf:20,1.5 or uniform:20 [default: those of the trace, or none].",
        ),
    ],
    "adapter_time": Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Additional time of a step with adapters, as a share of the step, like 15%."
        ),
    ],
}
"""Options of drafts and adapters that are no knobs of the scheduler."""

SCHEDULER: dict[str, Any] = {
    **simulated_options({name: SERVED_DEFAULTS[name] for name in ("max_model_len", "token_limits")}),
    "num_draft_tokens": Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens",
            "--num-speculative-tokens",
            help="Maximum drafts per request and step; needs --acceptance or a profile with drafts [default: 0: no "
            "speculation].",
        ),
    ],
    "max_loras": Annotated[
        int | None, typer.Option(help="Maximum number of different adapters in a step [default: 1 with adapters].")
    ],
    "num_blocks": Annotated[
        int | None,
        typer.Option(
            help="KV blocks of each replica, as the engine's log reports them [default: estimated from memory]."
        ),
    ],
}
"""Knobs that are fields of `SchedulerConfig`; all other knobs of `pointsman serve` have no meaning without a running
model."""

TARGETS: dict[str, Any] = {
    "ttft_target": Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Maximum time to the first token, like 500ms or 2s."),
    ],
    "itl_target": Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Maximum time between two tokens of a request; see --itl-of."),
    ],
    "itl_of": Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="What the ITL target holds for: pooled, the gaps of all requests together, as the P99 ITL of vllm "
            "bench; request, the mean gap of each request (TPOT); gap, every gap of each request, the longest included "
            "[default: pooled].",
        ),
    ],
}

TUNED: dict[str, Any] = {
    **{name: ARRIVING[name] for name in ("trace", "arrivals", "prompt_tokens", "output_tokens")},
    "rate": Annotated[
        float | None,
        typer.Option(
            "--rate",
            "--rate-scale",
            help="Factor by which arrivals are sped up: 2 is twice as fast as the trace [default: 1].",
        ),
    ],
    "limit": SIMULATED["limit"],
    "start": ARRIVING["start"],
    "seed": Annotated[int | None, typer.Option(help="Seed of the search and of generated requests [default: 0].")],
    "ttft_p99": Annotated[
        str | None,
        typer.Option(
            "--ttft-p99",
            "--ttft-target",
            metavar="TIME",
            help="Maximum time to the first token for 99 % of the requests, like 500ms or 2s.",
        ),
    ],
    "itl_p99": Annotated[
        str | None,
        typer.Option(
            "--itl-p99",
            "--itl-target",
            metavar="TIME",
            help="Maximum time between two tokens, for 99 % of what --itl-of names.",
        ),
    ],
    "itl_of": TARGETS["itl_of"],
    "e2e_p99": Annotated[
        str | None,
        typer.Option(
            "--e2e-p99", "--e2e-target", metavar="TIME", help="Maximum time to the last token for 99 % of the requests."
        ),
    ],
}
"""Options of `pointsman tune` for the workload and the targets."""

SimulatedPreset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Scheduler settings to start from (see --list); options that are given override them.",
    ),
]
Replicas = Annotated[int, typer.Option(help="Replicas of the model, each with its own scheduler.")]
ReplicaRange = Annotated[
    str,
    typer.Option(
        metavar="N|LOW-HIGH",
        help="Number of replicas whose highest rate or number of users is found; of a range (1-16), the smallest "
        "sufficient number is found.",
    ),
]
WantedRate = Annotated[
    float | None,
    typer.Option(help="With a range of replicas: requests a second to serve [default: the workload's rate]."),
]
Share = Annotated[float, typer.Option(help="Share of the requests that must meet all targets.")]
SampleRequests = Annotated[
    int | None,
    typer.Option(
        help="Requests of each sample: generated with a seed of its own, or a stretch of the trace [default: enough "
        "for the targets, 600 to 20000]."
    ),
]
MaxSamples = Annotated[
    int, typer.Option(help="Maximum number of samples; fewer are taken if they make the interval as narrow as wanted.")
]
Confidence = Annotated[str, typer.Option(metavar="SHARE", help="Confidence of the interval of the result.")]
Within = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Wanted distance of each end of the interval from the result. Samples are added until it is reached, or "
        "1,000,000 requests are simulated for each replica. Default: 10%, and at most 60,000 requests.",
    ),
]
TunedReplicas = Annotated[
    str,
    typer.Option(
        metavar="N|LOW-HIGH",
        help="Number of replicas; in a range like 1-4, the one with the highest goodput per replica is found.",
    ),
]
PartRequests = Annotated[
    int,
    typer.Option(help="Number of requests in the part that chooses settings, and in the part that judges them."),
]
Trials = Annotated[int, typer.Option(help="Number of settings to try, before the neighbours of the best settings.")]
Workers = Annotated[
    int | None,
    typer.Option(help="Number of processes that simulate; the result does not depend on it [default: one per core]."),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Simulate on a Ray cluster: host:port, auto or local."),
]
PricePerHour = Annotated[
    float | None, typer.Option(help="Price of one replica per hour, to compute the price of tokens.")
]
PricesPerHour = Annotated[
    str | None,
    typer.Option(
        "--price-per-hour",
        metavar="PRICES",
        help="Price of one replica per hour, to compute the price of tokens; with several devices, one price for each, "
        "like 2.5,0.8.",
    ),
]
AsJsonObject = Annotated[bool, typer.Option("--json", help="Print one line with one JSON object.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME=OPTIONS",
        help="A further curve, with other options of the service, like 'small steps=--max-num-batched-tokens 512' or "
        "'two GPUs=--tensor-parallel 2'; may be repeated.",
    ),
]
VariantReplicas = Annotated[int | None, typer.Option(help="Replicas of the model.")]
ShownPercentile = Annotated[
    str, typer.Option(metavar="NAME", help="Percentile that must be within the targets: p50, p90, p95 or p99.")
]
GivenRates = Annotated[
    str | None,
    typer.Option(
        metavar="RATES", help="Requests a second to simulate, like 1,2,4,8 [default: chosen around the throughput]."
    ),
]
NumSamples = Annotated[int, typer.Option(help="Samples at each rate: of other seeds, or stretches of the trace.")]
SvgFile = Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Write the charts as a picture.")]
MovableHtmlFile = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="Write a page on which the targets can be moved."),
]
HtmlFile = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page with charts.")]
Seeds = Annotated[
    int,
    typer.Option(help="Number of seeds, from --seed on; figures are means over them, with intervals."),
]
ScenarioName = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help="Test a claim about schedulers instead (see --list, and docs/how_it_works/claims.md).",
    ),
]
PerfettoFile = Annotated[
    str | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]
FilmFile = Annotated[
    str | None, typer.Option("--film", metavar="FILE", help="Write every decision, for pointsman film.")
]
ListNames = Annotated[bool, typer.Option("--list", help="Show models, devices, scenarios, routing rules and presets.")]

_SERVICE_PANELS: Panels = {
    "Model, device and fleet": (
        "profile",
        "tensor_parallel",
        "data_parallel_size",
        "enable_expert_parallel",
        "prefill_replicas",
        "decode_replicas",
        "kv_transfer_bandwidth",
        "kv_transfer_latency",
        "gpu_memory_utilization",
        "routing",
    ),
    "KV pool and prefix cache": (
        "disable_hybrid_kv_cache_manager",
        *knobs_of_panel("KV pool and prefix cache"),
        "kv_offload_bytes",
    ),
    "Steps": ENGINE_PANELS["Steps"],
    "Admission and preemption": ("preset", *ENGINE_PANELS["Admission and preemption"]),
    "Speculation and adapters": ("num_draft_tokens", "draft_table", *SPECULATION_AND_ADAPTERS, "max_loras"),
}
SIMULATE_HELP: Panels = {
    "Main options": (
        "trace",
        "rate",
        "arrivals",
        "prompt_tokens",
        "output_tokens",
        "model",
        "device",
        "replicas",
        "ttft_target",
        "itl_target",
        "itl_of",
        "scenario",
    ),
    "What arrives": (
        "limit",
        "start",
        "requests",
        "users",
        "sessions",
        "turns",
        "new_tokens",
        "think",
        "retention",
        "seed",
        "seeds",
    ),
    "Output": ("as_json", "html", "perfetto", "film", "price_per_hour", "list_names"),
    **_SERVICE_PANELS,
}
CAPACITY_HELP: Panels = {
    "Main options": (
        "ttft_target",
        "itl_target",
        "itl_of",
        "share",
        "trace",
        "arrivals",
        "prompt_tokens",
        "output_tokens",
        "model",
        "device",
        "replicas",
    ),
    "The search": ("requests_per_second", "requests", "samples", "confidence", "within", "workers"),
    "What arrives": ("start", "users", "think", "sessions", "turns", "new_tokens", "retention", "seed"),
    "Output": ("as_json", "price_per_hour", "list_names"),
    **_SERVICE_PANELS,
}
FRONTIER_HELP: Panels = {
    "Main options": (
        "ttft_target",
        "itl_target",
        "itl_of",
        "percentile",
        "variant",
        "device",
        "trace",
        "arrivals",
        "prompt_tokens",
        "output_tokens",
        "model",
        "replicas",
    ),
    "The simulations": ("rates", "samples", "requests", "confidence", "workers"),
    "What arrives": ("start", "sessions", "turns", "new_tokens", "think", "retention", "seed"),
    "Output": ("html", "svg", "as_json", "price_per_hour", "list_names"),
    **_SERVICE_PANELS,
}
TUNE_HELP: Panels = {
    "Main options": (
        "ttft_p99",
        "itl_p99",
        "itl_of",
        "e2e_p99",
        "trace",
        "rate",
        "arrivals",
        "prompt_tokens",
        "output_tokens",
        "model",
        "device",
        "replicas",
    ),
    "The search": ("trials", "requests", "seed", "workers", "ray"),
    "What arrives": ("limit", "start"),
    "Output": ("as_json", "list_names"),
    **_SERVICE_PANELS,
}
