"""Draws the pictures of docs/reference/policies.md from simulations of the real scheduler.

    python scripts/draw_policies.py [NAME ...]

It writes docs/policies/NAME.svg and prints the figures. As in docs/how_it_works/claims.md, step times are those of
Llama 3.1 8B on an H100 and the pool is that of an RTX 4090, so only ratios are meaningful. `least-cost`,
`preemption-mode` and `eviction` use scenarios of benchmarks/policies.py, each with its own device and pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pointsman.cli.scenario import print_figures
from pointsman.cli.simulation import service_of_options
from pointsman.core import SchedulerConfig
from pointsman.sim.report.course import Levels, courses, levels, scale_levels, time_span
from pointsman.sim.scenarios.picture import write_svg
from pointsman.sim.scenarios.scenario import (
    H100_BLOCKS,
    RTX_4090_BLOCKS,
    Bars,
    Course,
    Figure,
    Panel,
    Points,
    Run,
    Scenario,
    Variant,
    itl_p99,
    output_rate,
    preemptions,
    quantile,
    recomputed,
    settings,
    ttft_p99,
)
from pointsman.sim.scenarios.workloads import Stream, Streams, arriving
from pointsman.sim.simulator import Outcome
from pointsman.sim.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "benchmarks"))  # some pictures use its scenarios

import _policy_scenario as benchmark  # noqa: E402
from _policy_agents import AGENTS, AGENTS_AND_GREED, AGENTS_BESIDE_FLOOD  # noqa: E402
from _policy_azure import AZURE, AZURE_CACHED  # noqa: E402
from _policy_long_outputs import LONG_OUTPUTS, LONG_OUTPUTS_CACHED, LONG_OUTPUTS_SLOW_LINK  # noqa: E402
from _policy_mooncake import MOONCAKE  # noqa: E402

# ---------------------------------------------------------------------- figures


def mean_ttft(run: Run) -> float:
    return float(np.nanmean(run.ttft))


def ttft_p50(run: Run) -> float | None:
    return quantile(run.ttft, 0.5)


def longest_ttft(run: Run) -> float:
    return float(np.nanmax(run.ttft))


def mean_ttft_of(stream: str, run: Run) -> float | None:
    """Mean TTFT of a stream; None: there is no such stream."""
    own = run.ttft[run.is_of_streams(stream)]
    return float(np.nanmean(own)) if len(own) else None


def within(seconds: float, run: Run) -> float:
    """Share of requests with a TTFT of at most `seconds`."""
    return float((run.ttft <= seconds).mean())


def recomputed_tokens(run: Run) -> float:
    return run.total("num_recomputed_tokens")


def hits(run: Run) -> float | None:
    """Share of cached tokens in the prompt tokens of new requests."""
    return run.report.prefix_hit_rate.value


def hits_of(stream: str, run: Run) -> float | None:
    """Share of cached tokens of a stream; None: there is no such stream."""
    timings, own = run.outcome.timings, run.is_of_streams(stream)
    if not own.any():
        return None
    return float(timings.num_cached_tokens[own].sum() / timings.num_prompt_tokens[own].sum())


MEAN, P50, P99, LONGEST = "mean TTFT", "TTFT p50", "TTFT p99", "longest TTFT"
TTFTS = (
    Figure(MEAN, "s", mean_ttft),
    Figure(P50, "s", ttft_p50),
    Figure(P99, "s", ttft_p99),
    Figure(LONGEST, "s", longest_ttft),
)
PREEMPTIONS, RECOMPUTED, ITL, IN_TIME = "preemptions", "recomputed", "ITL p99", "TTFT within 5 s"
RECOMPUTED_TOKENS, OUTPUT_RATE = "recomputed tokens", "output tokens a second"
HITS, AGENTS_HITS, AGENTS_MEAN = "prefix hits", "prefix hits of agents", "mean TTFT of agents"


def kv_use(outcome: Outcome, config: SchedulerConfig) -> Levels:
    """Used blocks over time, in percent of the pool."""
    (run,) = courses(outcome)
    return scale_levels(levels(run, run.kv_cache_usage, *time_span(outcome)), 100)


def queued(most: int, outcome: Outcome, config: SchedulerConfig) -> Levels:
    """Waiting requests over time, in percent of `most`."""
    (run,) = courses(outcome)
    return scale_levels(levels(run, run.num_waiting, *time_span(outcome)), 100 / most)


def ttft_over_time(tenant: str, most: float, outcome: Outcome, config: SchedulerConfig) -> Levels:
    """TTFT of a tenant's requests by arrival, in percent of `most` seconds."""
    timings = outcome.timings
    own = np.array([request.tenant == tenant for request in outcome.requests], dtype=bool)
    arrival = timings.arrival[: timings.count][own]
    seconds = timings.first_token[: timings.count][own] - arrival
    return Levels(arrival, seconds * 100 / most, float(arrival[-1]))


# ---------------------------------------------------------------------- workloads


def short_and_long(count: int, rate: float, seed: int) -> Workload:
    """Requests with prompts of 200 to 16,000 tokens."""
    return arriving(count, f"poisson:{rate:g}", "lognormal:1200,1.1", "lognormal:200,0.6", seed)


def two_tenants(seed: int) -> Workload:
    """One tenant sends 300 requests within ten seconds, the other tenant one request a second."""
    prompts, outputs = "lognormal:1000,0.5", "lognormal:250,0.5"
    heavy = Stream("heavy", 300, prompts, outputs, "poisson:30")
    return Streams((heavy, Stream("light", 40, prompts, outputs, "poisson:1")), seed)


def chats_and_documents(seed: int) -> Workload:
    """Decoding chats, and occasionally a document."""
    chats = Stream("chat", 250, "lognormal:200,0.5", "lognormal:200,0.5", "poisson:8")
    return Streams((chats, Stream("document", 25, "lognormal:12000,0.4", "100", "poisson:0.8")), seed)


# ---------------------------------------------------------------------- the pictures

SHORT = settings(RTX_4090_BLOCKS)
ROOMY = settings(H100_BLOCKS)


def drawing(
    name: str,
    about: str,
    workload: Callable[[int], Workload],
    config: SchedulerConfig,
    variants: dict[str, dict[str, Any]],
    figures: tuple[Figure, ...],
    *panels: Panel,
) -> Scenario:
    """A picture of one workload."""
    made = tuple(Variant(each, config.replace(**knobs), workload) for each, knobs in variants.items())
    return drawing_of(name, about, made, figures, *panels)


def drawing_of(
    name: str, about: str, variants: tuple[Variant, ...], figures: tuple[Figure, ...], *panels: Panel
) -> Scenario:
    """A picture whose figures are not checked."""
    return Scenario(
        name=name,
        claim=about,
        source="docs/reference/policies.md",
        setting=about,
        variants=variants,
        figures=figures,
        checks=lambda found: [],
        panels=panels,
    )


def measured(
    load: str, scenario: benchmark.Scenario, at: benchmark.Load, variants: dict[str, dict[str, Any]]
) -> tuple[Variant, ...]:
    """Variants of a benchmark's scenario at one of its speeds."""

    def workload(seed: int) -> Workload:
        return scenario.workload(scenario.speeds[at])

    configs = {name: benchmark.configured(scenario, knobs) for name, knobs in variants.items()}
    return tuple(
        Variant(
            name,
            config,
            workload,
            load,
            step_time=scenario.step_time,
            host_memory=None if config.preemption_mode == "recompute" else scenario.host_memory,
        )
        for name, config in configs.items()
    )


VICTIMS = {name: {"victim": name} for name in ("latest", "least-cost")}
MODES = {name: {"preemption_mode": name} for name in ("recompute", "swap", "cheaper")}
EVICTIONS = {name: {"eviction": name} for name in ("lru", "retention", "reuse")}
BUDGETS = ("256", "512", "1024", "2048", "8192")
DRAWINGS = {
    each.name: each
    for each in (
        drawing(
            "growth",
            "400 requests, 22 a second, prompts of about 200 and outputs of about 400 tokens",
            partial(arriving, 400, "poisson:22", "lognormal:200,0.5", "lognormal:400,0.5"),
            SHORT,
            {
                "no reserve": {},
                "growth": {"reserves": ("growth",)},
                "watermark 0.01": {"watermark": 0.01},
                "watermark 0.05": {"watermark": 0.05},
            },
            (
                Figure(PREEMPTIONS, "", preemptions),
                Figure(RECOMPUTED, "%", recomputed),
                *TTFTS,
                Figure(ITL, "s", itl_p99),
            ),
            Course("KV use, %", kv_use),
            Bars(PREEMPTIONS),
            Bars(MEAN),
            Bars(ITL),
        ),
        drawing(
            "target-itl",
            "250 chats, 8 a second, beside 25 documents of about 12,000 tokens",
            chats_and_documents,
            ROOMY,
            {
                **{budget: {"max_num_batched_tokens": int(budget), "max_num_seqs": 128} for budget in BUDGETS},
                "target 30 ms": {"token_limits": ("target-itl:seconds=0.03",)},
                "target 50 ms": {"token_limits": ("target-itl:seconds=0.05",)},
            },
            (Figure(ITL, "s", itl_p99), *TTFTS),
            Points(ITL, MEAN, ("256", "512", "target 30 ms", "1024", "target 50 ms", "2048")),
            Bars(ITL),
            Bars(MEAN),
            Bars(P99),
        ),
        drawing(
            "orders",
            "400 requests, 24 a second, prompts of 200 to 16,000 tokens: more than the pool serves",
            partial(short_and_long, 400, 24),
            SHORT.replace(reserves=("growth",)),
            {name: {"order": name} for name in ("fcfs", "shortest-prefill", "earliest-ttft")},
            (*TTFTS, Figure(IN_TIME, "%", partial(within, 5.0))),
            Bars(MEAN),
            Bars(IN_TIME),
            Bars(P50),
            Bars(P99),
        ),
        drawing(
            "fair",
            "A tenant sends 300 requests within ten seconds, another one a second",
            two_tenants,
            SHORT.replace(reserves=("growth",)),
            {name: {"order": name} for name in ("fcfs", "fair")},
            (
                Figure("light tenant, mean TTFT", "s", partial(mean_ttft_of, "light")),
                Figure("heavy tenant, mean TTFT", "s", partial(mean_ttft_of, "heavy")),
            ),
            Course("TTFT of the light tenant by arrival, % of 25 s", partial(ttft_over_time, "light", 25.0)),
            Course("TTFT of the heavy tenant by arrival, % of 25 s", partial(ttft_over_time, "heavy", 25.0)),
            Bars("light tenant, mean TTFT"),
            Bars("heavy tenant, mean TTFT"),
        ),
        drawing(
            "bypass",
            "400 requests, 9 a second, prompts of 200 to 16,000 tokens",
            partial(short_and_long, 400, 9),
            SHORT,
            {
                "growth": {"reserves": ("growth",)},
                "growth and bypass": {"reserves": ("growth", "bypass")},
                "bypass alone": {"reserves": ("bypass",)},
                "neither": {},
            },
            (*TTFTS, Figure(PREEMPTIONS, "", preemptions)),
            Course("Waiting requests, % of 200", partial(queued, 200)),
            Bars(MEAN),
            Bars(LONGEST),
            Bars(PREEMPTIONS),
        ),
        drawing_of(
            "least-cost",
            "The first 6,000 requests of the Azure hour, and 6,000 with long outputs, above saturation",
            (
                *measured("Azure, no prefix cache", AZURE, "above", VICTIMS),
                *measured("Azure, prefix cache", AZURE_CACHED, "above", VICTIMS),
                *measured("long outputs, no prefix cache", LONG_OUTPUTS, "above", VICTIMS),
            ),
            (
                Figure(RECOMPUTED_TOKENS, "", recomputed_tokens),
                Figure(PREEMPTIONS, "", preemptions),
                *TTFTS,
            ),
            Bars(RECOMPUTED_TOKENS),
            Bars(PREEMPTIONS),
            Bars(MEAN),
            Bars(P99),
        ),
        drawing_of(
            "preemption-mode",
            "6,000 requests with long outputs above saturation, 64 GiB of host memory",
            (
                *measured("PCIe 4.0 x16", LONG_OUTPUTS_CACHED, "above", MODES),
                *measured("a hundredth of its bandwidth", LONG_OUTPUTS_SLOW_LINK, "above", MODES),
            ),
            (
                Figure(RECOMPUTED, "%", recomputed),
                Figure(PREEMPTIONS, "", preemptions),
                *TTFTS,
                Figure(OUTPUT_RATE, "", output_rate),
            ),
            Bars(RECOMPUTED),
            Bars(MEAN),
            Bars(OUTPUT_RATE),
            Bars(P99),
        ),
        drawing_of(
            "eviction",
            "Mooncake, and agents beside prompts that are sent once; greedy ones ask to be retained too; at saturation",
            (
                *measured("Mooncake", MOONCAKE, "at", EVICTIONS),
                *measured("agents", AGENTS_BESIDE_FLOOD, "at", EVICTIONS),
                *measured("agents and greed", AGENTS_AND_GREED, "at", EVICTIONS),
            ),
            (
                Figure(HITS, "%", hits),
                Figure(AGENTS_HITS, "%", partial(hits_of, AGENTS)),
                Figure(AGENTS_MEAN, "s", partial(mean_ttft_of, AGENTS)),
                *TTFTS,
            ),
            Bars(HITS),
            Bars(AGENTS_HITS),
            Bars(MEAN),
            Bars(AGENTS_MEAN),
        ),
    )
}


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(DRAWINGS))
    if unknown:
        sys.exit(f"no picture is called {unknown[0]!r}; choose from {', '.join(DRAWINGS)}")
    step_time = service_of_options({}, None).step_time
    (DOCS / "policies").mkdir(exist_ok=True)
    for name in names or DRAWINGS:
        found = DRAWINGS[name].run(step_time)
        if not found.is_complete:
            sys.exit(f"interrupted at {name}")
        print(f"\n{name}: {found.scenario.setting}")
        print_figures(found, Console(highlight=False, width=110))
        write_svg(found, DOCS / "policies" / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
