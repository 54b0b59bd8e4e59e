"""Scenarios of KV pressure: watermarks, full-sequence admission, recovery, and countermeasures of an operator."""

from __future__ import annotations

from functools import partial
from typing import Any

from pointsman.sim.report.layout import format_number
from pointsman.sim.scenarios.scenario import (
    RTX_4090_BLOCKS,
    Bars,
    Check,
    Figure,
    Finding,
    Run,
    Scenario,
    Variant,
    format_ratio,
    itl_p99,
    mean_e2e,
    output_rate,
    preemptions,
    recomputed,
    settings,
    ttft_p99,
)
from pointsman.sim.scenarios.workloads import arriving, backlog

_PREEMPTIONS, _PER_STEP, _RECOMPUTED = "preemptions", "per 100 steps", "recomputed"
_RUNNING, _RATE, _MEAN_E2E = "running", "output tok/s", "mean end-to-end"
_TTFT, _ITL = "TTFT p99", "ITL p99"

# ---------------------------------------------------------------------- watermark

_WATERMARKS = {"no watermark": 0.0, "watermark 0.01": 0.01, "watermark 0.05": 0.05}
_GROWTH = "reserve growth"
_RESERVED: dict[str, dict[str, Any]] = {
    **{name: {"watermark": share} for name, share in _WATERMARKS.items()},
    _GROWTH: {"reserves": ("growth",)},
}


def _per_100_steps(run: Run) -> float:
    return 100 * preemptions(run) / run.report.counts.num_steps


def _running(run: Run) -> float | None:
    return run.report.running.mean.value


def _check_watermark(found: Finding) -> list[Check]:
    names = list(_WATERMARKS)
    none, high = names[0], names[-1]
    before, after = (found.value(_PREEMPTIONS, name) for name in (none, high))
    rates = [found.value(_RATE, name) for name in (none, high)]
    lowest = 1.02 * min(found.value(_MEAN_E2E, name) for name in names)
    return [
        Check(
            "without one, nearly every step preempts",
            found.value(_PER_STEP, none) > 80,
            f"{found.text(_PER_STEP, none)} preemptions in 100 steps",
        ),
        Check(
            "it makes preemptions far fewer",
            after < before / 2,
            ", ".join(found.text(_PREEMPTIONS, name) for name in names),
        ),
        Check(
            "it costs little concurrency",
            found.value(_RUNNING, high) > 0.9 * found.value(_RUNNING, none),
            ", ".join(found.text(_RUNNING, name) for name in names) + " running",
        ),
        Check(
            "it costs no throughput",
            rates[1] >= rates[0],
            ", ".join(found.text(_RATE, name) for name in names) + " output tokens/s",
        ),
        Check(
            "growth finds a reserve as good by itself",
            found.value(_PREEMPTIONS, _GROWTH) < before / 2 and found.value(_MEAN_E2E, _GROWTH) < lowest,
            f"{found.text(_PREEMPTIONS, _GROWTH)} preemptions, {found.text(_RATE, _GROWTH)} output tokens/s; mean "
            f"end-to-end {found.text(_MEAN_E2E, _GROWTH)}, {found.text(_MEAN_E2E, high)} with {high}",
        ),
    ]


WATERMARK = Scenario(
    name="watermark",
    claim="Without a watermark the engine thrashes under pressure, preempting on nearly every step; a watermark trades "
    "a little concurrency for far fewer preemptions.",
    source="a book on vLLM",
    setting="250 requests that are all there, prompts lognormal:200,0.5, outputs lognormal:400,0.5, in a pool of "
    f"{RTX_4090_BLOCKS:,} blocks. Beside the watermarks: the reserve growth, which has no number to be set.",
    variants=tuple(
        Variant(
            name,
            settings(RTX_4090_BLOCKS, **values),
            partial(backlog, 250, "lognormal:200,0.5", "lognormal:400,0.5"),
        )
        for name, values in _RESERVED.items()
    ),
    figures=(
        Figure(_PREEMPTIONS, "", preemptions),
        Figure(_PER_STEP, "", _per_100_steps),
        Figure(_RECOMPUTED, "%", recomputed),
        Figure(_RUNNING, "", _running),
        Figure(_RATE, "", output_rate),
        Figure(_MEAN_E2E, "s", mean_e2e),
    ),
    checks=_check_watermark,
    panels=(Bars(_PREEMPTIONS), Bars(_RECOMPUTED), Bars(_RUNNING), Bars(_RATE)),
)

# ---------------------------------------------------------------------- full-sequence admission

_ONE, _SEVERAL = "one at a time", "several at a time"
_FULL, _OWED, _FIRST, _NO_CACHE = "full sequence", "full, vLLM's count", "first chunk", "first chunk, no cache"
_BYPASS = "growth and bypass"
_ADMISSIONS: dict[str, dict[str, Any]] = {
    _FULL: {},
    _OWED: {"count_owed_blocks": False},
    _FIRST: {"full_sequence_must_fit": False},
    _NO_CACHE: {"full_sequence_must_fit": False, "enable_prefix_caching": False},
    _GROWTH: {"reserves": ("growth",)},
    _BYPASS: {"reserves": ("growth", "bypass")},
}
"""Variants of admission and their settings. The last two use the full-sequence check together with reserve policies."""
_THRASH = 0.1  # share of recomputed tokens


def _check_full(found: Finding) -> list[Check]:
    def both(figure: str, load: str, admission: str = _FIRST) -> str:
        return f"{found.text(figure, admission, load)}, {found.text(figure, _FULL, load)} with the check"

    return [
        Check(
            "a check of the first chunk alone admits too many",
            all(found.value(_PREEMPTIONS, _FIRST, load) > found.value(_PREEMPTIONS, _FULL, load) for load in _LOADS),
            "preemptions " + "; ".join(f"{both(_PREEMPTIONS, load)}, {load}" for load in _LOADS),
        ),
        *(
            Check(
                f"the pool then thrashes, {load}{', without prefix cache' if name == _NO_CACHE else ''}",
                found.value(_RECOMPUTED, name, load) > _THRASH
                and found.value(_RATE, name, load) < 0.95 * found.value(_RATE, _FULL, load),
                f"{found.text(_RECOMPUTED, name, load)} of all tokens recomputed; output tokens/s "
                f"{both(_RATE, load, name)}",
            )
            for load in _LOADS
            for name in (_FIRST, _NO_CACHE)
        ),
        Check(
            "the check prevents that",
            all(found.value(_RECOMPUTED, _FULL, load) < _THRASH / 10 for load in _LOADS),
            f"at most {format_number(100 * max(found.value(_RECOMPUTED, _FULL, load) for load in _LOADS))} % "
            "recomputed",
        ),
        Check(
            "it need not count what admitted prompts still lack",
            all(found.value(_RECOMPUTED, _OWED, load) < _THRASH / 10 for load in _LOADS),
            "; ".join(f"{found.text(_RECOMPUTED, _OWED, load)} recomputed, {load}" for load in _LOADS)
            + ", if it does not",
        ),
        Check(
            "short prompts can pass one that waits, beside the check",
            all(found.value(_MEAN_E2E, _BYPASS, load) < 0.98 * found.value(_MEAN_E2E, _FULL, load) for load in _LOADS)
            and all(found.value(_RECOMPUTED, _BYPASS, load) < _THRASH for load in _LOADS),
            "with growth and bypass mean end-to-end "
            + "; ".join(f"{both(_MEAN_E2E, load, _BYPASS)} alone, {load}" for load in _LOADS),
        ),
    ]


_LOADS = {_ONE: 0, _SEVERAL: 1024}

FULL_SEQUENCE = Scenario(
    name="full-sequence",
    claim="If admission checks only the blocks of the first chunk, long prompts over-commit the pool and thrash; "
    "checking the whole sequence prevents it.",
    source="a book on vLLM",
    setting="30 prompts of lognormal:16000,0.4 tokens that are all there, in a pool of 4,000 blocks. One at a time: "
    "the first prompt takes the whole budget of 8,192 tokens; several: each takes at most 1,024 of it "
    "(long_prefill_token_threshold). vLLM's count leaves out the blocks that admitted prompts still lack. "
    "The last two are the check with the reserves growth and bypass beside it.",
    variants=tuple(
        Variant(
            name,
            settings(4000, long_prefill_token_threshold=threshold, **values),
            partial(backlog, 30, "lognormal:16000,0.4", "lognormal:200,0.5"),
            load,
        )
        for load, threshold in _LOADS.items()
        for name, values in _ADMISSIONS.items()
    ),
    figures=(
        Figure(_PREEMPTIONS, "", preemptions),
        Figure(_RECOMPUTED, "%", recomputed),
        Figure(_RUNNING, "", _running),
        Figure(_RATE, "", output_rate),
        Figure(_MEAN_E2E, "s", mean_e2e),
    ),
    checks=_check_full,
    panels=(Bars(_PREEMPTIONS), Bars(_RECOMPUTED), Bars(_RATE), Bars(_MEAN_E2E)),
)

# ---------------------------------------------------------------------- recovery through the prefix cache

_LONG_PROMPTS, _MANY, _LONG_OUTPUTS = "long prompts", "many short", "long outputs"
_CACHED, _UNCACHED = "prefix cache", "no prefix cache"
_FOUND, _FOUND_EACH, _TWICE = "found", "tokens found each", "generated twice"
_LONG_OUTPUT_PROMPT = 64


def _found_share(run: Run) -> float | None:
    looked_up = run.total("resumed_prefix_queries")
    return run.total("resumed_prefix_hits") / looked_up if looked_up else None


def _found_each(run: Run) -> float | None:
    count = preemptions(run)
    return run.total("resumed_prefix_hits") / count if count else None


def _generated_twice(run: Run) -> float:
    """Number of generated output tokens beyond the lengths of the requests' outputs."""
    wanted = sum(request.num_generated_tokens for request in run.outcome.requests)
    return run.report.counts.generated_tokens - wanted


def _check_recovery(found: Finding) -> list[Check]:
    return [
        *(
            Check(
                f"a resumed request finds most of its tokens in the cache, {load}",
                found.value(_FOUND, _CACHED, load) > 0.5,
                f"{found.text(_FOUND, _CACHED, load)} found; {found.text(_RECOMPUTED, _CACHED, load)} of all computed "
                f"tokens are recomputed, {found.text(_RECOMPUTED, _UNCACHED, load)} without a cache",
            )
            for load in (_LONG_PROMPTS, _MANY)
        ),
        Check(
            "generated tokens cannot be found there",
            found.value(_FOUND_EACH, _CACHED, _LONG_OUTPUTS) <= _LONG_OUTPUT_PROMPT,
            f"{found.text(_FOUND_EACH, _CACHED, _LONG_OUTPUTS)} tokens found each time, of prompts of "
            f"{_LONG_OUTPUT_PROMPT}",
        ),
        Check(
            "they must be generated again, token by token",
            max(found.value(_TWICE, row.variant.name, row.variant.load) for row in found.rows) > 0,
            f"{format_number(sum(found.value(_TWICE, row.variant.name, row.variant.load) for row in found.rows))} "
            "tokens generated twice",
        ),
    ]


PREEMPTION_RECOVERY = Scenario(
    name="preemption-recovery",
    claim="A preempted request finds its blocks in the prefix cache when it comes back and skips most of the "
    "recomputation; what it has generated cannot be found there and must be generated again.",
    source="a book on vLLM",
    setting=f"All requests are there. Long prompts: 6,000 tokens, outputs 600, 4,000 blocks. Many short: 200 and 400, "
    f"{RTX_4090_BLOCKS:,} blocks. Long outputs: {_LONG_OUTPUT_PROMPT} and 2,500, 1,100 blocks, 8 slots.",
    variants=tuple(
        Variant(name, config.replace(enable_prefix_caching=name == _CACHED), workload, load)
        for load, config, workload in (
            (_LONG_PROMPTS, settings(4000), partial(backlog, 100, "lognormal:6000,0.2", "lognormal:600,0.5")),
            (_MANY, settings(RTX_4090_BLOCKS), partial(backlog, 200, "lognormal:200,0.2", "lognormal:400,0.5")),
            (
                _LONG_OUTPUTS,
                settings(1100, max_num_seqs=8),
                partial(backlog, 60, str(_LONG_OUTPUT_PROMPT), "lognormal:2500,0.3"),
            ),
        )
        for name in (_CACHED, _UNCACHED)
    ),
    figures=(
        Figure(_PREEMPTIONS, "", preemptions),
        Figure(_FOUND, "%", _found_share),
        Figure(_FOUND_EACH, "", _found_each),
        Figure(_RECOMPUTED, "%", recomputed),
        Figure(_TWICE, "", _generated_twice),
        Figure(_RATE, "", output_rate),
    ),
    checks=_check_recovery,
    panels=(Bars(_FOUND), Bars(_RECOMPUTED)),
)

# ---------------------------------------------------------------------- a rising preemption counter

_AS_IS, _RAISED = "as it is", "watermark 0.05"
_FEWER, _SMALLER, _MORE = "max_num_seqs 56", "budget 2048", "two replicas"
_RESPONSES = (_RAISED, _FEWER, _SMALLER, _MORE)
_LATEST, _CHEAPER = "no prefix cache", "same, least-cost"
_PRICE = "device s per 1000 tok"


def _device_seconds(run: Run) -> float | None:
    report = run.report
    tokens = report.counts.generated_tokens
    return None if report.seconds.value is None else 1000 * report.num_replicas * report.seconds.value / tokens


def _check_responses(found: Finding) -> list[Check]:
    before = found.value(_PREEMPTIONS, _AS_IS)
    checks = [
        Check(
            f"fewer preemptions with {name}",
            found.value(_PREEMPTIONS, name) < 0.8 * before,
            f"{found.text(_PREEMPTIONS, name)} of {format_number(before)}; TTFT p99 {found.text(_TTFT, name)} (as it "
            f"is: {found.text(_TTFT, _AS_IS)}), {found.text(_RATE, name)} output tokens/s "
            f"({found.text(_RATE, _AS_IS)})",
        )
        for name in (*_RESPONSES, _GROWTH)
    ]
    prices = [found.value(_PRICE, name) for name in _RESPONSES]
    waits = [found.value(_TTFT, name) for name in (_RAISED, _FEWER)]
    return [
        *checks,
        Check(
            "fewer slots cost more than a watermark",
            waits[1] > waits[0],
            f"TTFT p99 {found.text(_TTFT, _FEWER)}, {found.text(_TTFT, _RAISED)} with a watermark",
        ),
        Check(
            "more capacity costs the most device time",
            prices[-1] == max(prices),
            f"{format_ratio(prices[-1] / found.value(_PRICE, _AS_IS))} the device time of a token, and TTFT p99 "
            f"{found.text(_TTFT, _MORE)}",
        ),
        Check(
            "without a prefix cache another victim makes the same preemptions cheaper",
            found.value(_RECOMPUTED, _CHEAPER) < 0.7 * found.value(_RECOMPUTED, _LATEST),
            f"{found.text(_RECOMPUTED, _CHEAPER)} recomputed with least-cost, {found.text(_RECOMPUTED, _LATEST)} with "
            f"latest; TTFT p99 {found.text(_TTFT, _CHEAPER)} and {found.text(_TTFT, _LATEST)}",
        ),
    ]


PREEMPTION_RESPONSES = Scenario(
    name="preemption-responses",
    claim="If the preemption counter rises, an operator can raise the watermark, lower max_num_seqs, lower "
    "max_num_batched_tokens, or add capacity, in increasing order of cost.",
    source="a book on vLLM",
    setting="220 requests, 22 a second, prompts lognormal:200,0.5, outputs lognormal:400,0.5, in a pool of "
    f"{RTX_4090_BLOCKS:,} blocks, 256 slots, a budget of 8,192 tokens. Beside the book's responses: the reserve "
    "growth, and without a prefix cache the victim least-cost.",
    variants=tuple(
        Variant(
            name,
            settings(RTX_4090_BLOCKS, **values),
            partial(arriving, 220, "poisson:22", "lognormal:200,0.5", "lognormal:400,0.5"),
            num_replicas=2 if name == _MORE else 1,
        )
        for name, values in (
            (_AS_IS, {}),
            (_RAISED, {"watermark": 0.05}),
            (_FEWER, {"max_num_seqs": 56}),
            (_SMALLER, {"max_num_batched_tokens": 2048}),
            (_MORE, {}),
            (_GROWTH, {"reserves": ("growth",)}),
            (_LATEST, {"enable_prefix_caching": False}),
            (_CHEAPER, {"enable_prefix_caching": False, "victim": "least-cost"}),
        )
    ),
    figures=(
        Figure(_PREEMPTIONS, "", preemptions),
        Figure(_RECOMPUTED, "%", recomputed),
        Figure(_TTFT, "s", ttft_p99),
        Figure(_ITL, "s", itl_p99),
        Figure(_RATE, "", output_rate),
        Figure(_PRICE, "", _device_seconds),
    ),
    checks=_check_responses,
    panels=(Bars(_PREEMPTIONS), Bars(_TTFT), Bars(_ITL), Bars(_PRICE)),
)
