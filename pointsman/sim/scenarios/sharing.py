"""Scenario of the prefix cache: system prompts, conversations, and prompts that share nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pointsman.sim.report.layout import format_number
from pointsman.sim.scenarios.scenario import (
    Bars,
    Check,
    Figure,
    Finding,
    Run,
    Scenario,
    Variant,
    format_ratio,
    output_rate,
    settings,
    ttft_p99,
)
from pointsman.sim.scenarios.workloads import arriving, conversations
from pointsman.sim.workload import Workload

_SYSTEM_PROMPT = 2000
_SMALL_POOL = 800
_SHARED, _TALK, _SHORT_POOL, _UNRELATED = "system prompt", "conversations", "the same, short pool", "nothing shared"
_ON, _OFF = "cache", "no cache"
_FOUND, _COMPUTED, _TIMES = "found", "prompt tokens", "prefix computed"
_TTFT, _TTFT_P99, _RATE = "TTFT p50", "TTFT p99", "output tok/s"

_system_prompt = partial(
    conversations,
    80,
    "poisson:8",
    system_prompt=_SYSTEM_PROMPT,
    turns="1",
    first_prompt="lognormal:200,0.8",
    new_text="1",
    output="lognormal:130,0.8",
    think="0",
)
_talk = partial(
    conversations,
    25,
    "poisson:3",
    system_prompt=_SYSTEM_PROMPT,
    turns="uniform:2,8",
    first_prompt="lognormal:200,0.8",
    new_text="lognormal:60,1",
    output="lognormal:130,0.8",
    think="exponential:2",
)
_unrelated = partial(arriving, 80, "poisson:8", "lognormal:2200,0.2", "lognormal:130,0.8")
_LOADS = {
    _SHARED: (settings(), _system_prompt),
    _TALK: (settings(), _talk),
    _SHORT_POOL: (settings(_SMALL_POOL), _talk),
    _UNRELATED: (settings(), _unrelated),
}


def _of_seed(make: Callable[..., Workload], seed: int) -> Workload:
    return make(seed=seed)


def _found_share(run: Run) -> float | None:
    looked_up = run.total("prefix_queries")
    return run.total("prefix_hits") / looked_up if looked_up else None


def _computed_prompt_tokens(run: Run) -> float:
    """Number of computed prompt tokens, including tokens recomputed after a preemption."""
    return run.total("num_scheduled_tokens") - run.report.counts.generated_tokens + run.report.counts.arrived


def _prefix_times(run: Run) -> float | None:
    """Number of times that the system prompt was computed. None: not known, because some requests have several turns or
    no system prompt."""
    requests = run.outcome.requests
    if any(request.turns or not request.block_hash_ids for request in requests):
        return None
    own = sum(request.num_prompt_tokens - _SYSTEM_PROMPT for request in requests)
    return (_computed_prompt_tokens(run) - own) / _SYSTEM_PROMPT


def _check_reuse(found: Finding) -> list[Check]:
    def gain(load: str) -> float:
        return found.value(_TTFT, _OFF, load) / found.value(_TTFT, _ON, load)

    def both(figure: str, load: str) -> str:
        return f"{found.text(figure, _ON, load)}, {found.text(figure, _OFF, load)} without a cache"

    lost = 1 - found.value(_RATE, _ON, _UNRELATED) / found.value(_RATE, _OFF, _UNRELATED)
    return [
        Check(
            "a shared prefix is computed once",
            round(found.value(_TIMES, _ON, _SHARED), 1) == 1,
            f"{found.text(_TIMES, _ON, _SHARED)} time, {found.text(_TIMES, _OFF, _SHARED)} times without a cache",
        ),
        *(
            Check(f"it shortens TTFT several times, {load}", gain(load) > 3, f"p50 {both(_TTFT, load)}")
            for load in (_SHARED, _TALK)
        ),
        Check(
            "in a short pool, too, nothing is computed again",
            found.value(_COMPUTED, _ON, _SHORT_POOL) < 1.05 * found.value(_COMPUTED, _ON, _TALK),
            f"{format_ratio(found.value(_COMPUTED, _ON, _SHORT_POOL) / found.value(_COMPUTED, _ON, _TALK))} the prompt "
            f"tokens of the large pool, as entries are evicted; still TTFT p50 {both(_TTFT, _SHORT_POOL)}",
        ),
        Check(
            "where nothing is shared it costs no device time",
            lost < 0.01,
            f"{format_number(100 * max(lost, 0.0))} % of the output tokens/s; TTFT p50 {both(_TTFT, _UNRELATED)}",
        ),
    ]


PREFIX_REUSE = Scenario(
    name="prefix-reuse",
    claim="A prefix cache computes a shared prefix once and turns it into a lookup for all later requests: the largest "
    "lever on TTFT in real traffic.",
    source="a book on vLLM",
    setting=f"A system prompt of {_SYSTEM_PROMPT:,} tokens before prompts of lognormal:200,0.8: 80 requests, 8 a "
    "second; 25 conversations of 2 to 8 turns, 3 a second, also in a pool of "
    f"{_SMALL_POOL:,} blocks. Nothing shared: 80 prompts of lognormal:2200,0.2.",
    variants=tuple(
        Variant(name, config.replace(enable_prefix_caching=name == _ON), partial(_of_seed, make), load)
        for load, (config, make) in _LOADS.items()
        for name in (_ON, _OFF)
    ),
    figures=(
        Figure(_FOUND, "%", _found_share),
        Figure(_COMPUTED, "", _computed_prompt_tokens),
        Figure(_TIMES, "", _prefix_times),
        Figure(_TTFT, "s", lambda run: run.report.ttft.p50.value),
        Figure(_TTFT_P99, "s", ttft_p99),
        Figure(_RATE, "", output_rate),
    ),
    checks=_check_reuse,
    panels=(Bars(_FOUND), Bars(_COMPUTED), Bars(_TTFT), Bars(_RATE)),
)
