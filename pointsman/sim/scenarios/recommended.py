"""Scenario of recommended settings: the presets of a text on vLLM, each on the workload it is meant for and on all
others."""

from __future__ import annotations

import math
from functools import partial

from pointsman.core.presets import PRESETS
from pointsman.sim.report.layout import format_number
from pointsman.sim.scenarios.scenario import (
    Bars,
    Check,
    Figure,
    Finding,
    Run,
    Scenario,
    Variant,
    itl_p99,
    output_rate,
    settings,
)
from pointsman.sim.scenarios.workloads import arriving, backlog

_DEFAULT = "default"
_ITL, _TTFT, _RATE, _REFUSED = "ITL p99", "mean TTFT", "output tok/s", "refused"
_CHAT, _BACKLOG, _LONG, _SHORT = "chat", "backlog", "long prompts", "short requests"
_LOADS = {
    _CHAT: partial(arriving, 150, "poisson:12", "lognormal:1000,0.8", "lognormal:130,0.8"),
    _BACKLOG: partial(backlog, 400, "lognormal:300,0.5", "lognormal:100,0.5"),
    _LONG: partial(arriving, 24, "poisson:0.6", "lognormal:20000,0.4", "lognormal:200,0.5"),
    _SHORT: partial(backlog, 600, "lognormal:60,0.5", "lognormal:40,0.5"),
}
_MEANT_FOR = {
    "low-latency": (_CHAT, _ITL),
    "high-throughput": (_BACKLOG, _RATE),
    "long-context": (_LONG, _TTFT),
    "short-requests": (_SHORT, _RATE),
}
"""The workload of each preset, and the figure that the preset should improve."""
_GENERAL = "general"
_GENERAL_SETTINGS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "long_prefill_token_threshold": 512,
    "order": "fcfs",
}
"""The text's settings for any load: the default, and chunks of at most 512 tokens, which should shorten TTFT."""
_SETTINGS = {preset: PRESETS[preset] for preset in (_DEFAULT, *_MEANT_FOR)} | {_GENERAL: _GENERAL_SETTINGS}

_GAIN, _HARM = 0.03, 0.05
"""Minimum relative changes that count as better and as worse than the default."""


def _improvement(found: Finding, preset: str, load: str, figure: str) -> float:
    """Relative improvement of `figure` with `preset`, compared with the default settings; negative: worse; -1: every
    request was refused."""
    value, default = found.value(figure, preset, load), found.value(figure, _DEFAULT, load)
    if math.isnan(value):
        return -1.0
    return value / default - 1 if figure == _RATE else 1 - value / default


def _check_settings(found: Finding) -> list[Check]:
    checks = []
    for preset, (load, figure) in _MEANT_FOR.items():
        gain = _improvement(found, preset, load, figure)
        others = {other: _improvement(found, other, load, figure) for other in _MEANT_FOR if other != preset}
        best = max(others, key=others.__getitem__)
        checks.append(
            Check(
                f"{preset} is better than the default on its workload, {load}",
                gain > _GAIN,
                f"{figure} {found.text(figure, preset, load)}, {found.text(figure, _DEFAULT, load)} with the default; "
                f"{best} {found.text(figure, best, load)}",
            )
        )
    checks += [
        Check(
            f"{_GENERAL} shortens TTFT, {load}",
            _improvement(found, _GENERAL, load, _TTFT) > _GAIN,
            f"mean {found.text(_TTFT, _GENERAL, load)}, {found.text(_TTFT, _DEFAULT, load)} with the default; "
            f"{_ITL} {found.text(_ITL, _GENERAL, load)}, {found.text(_ITL, _DEFAULT, load)} with the default",
        )
        for load in (_CHAT, _LONG)
    ]
    for preset, own in (*((preset, load) for preset, (load, _) in _MEANT_FOR.items()), (_GENERAL, None)):
        losses = {
            load: _improvement(found, preset, load, figure) for load, figure in _MEANT_FOR.values() if load != own
        }
        worst = min(losses, key=losses.__getitem__)  # all requests refused: -1
        figure = dict(_MEANT_FOR.values())[worst]
        refused = sum(found.value(_REFUSED, preset, each) for each in _LOADS)
        checks.append(
            Check(
                f"{preset} does no harm {'elsewhere' if own else 'on any load'}",
                losses[worst] > -_HARM and not refused,
                f"worst on {worst}: {figure} {found.text(figure, preset, worst)}, "
                f"{found.text(figure, _DEFAULT, worst)} with the default; {format_number(refused)} requests are "
                "refused",
            )
        )
    return checks


def _refused(run: Run) -> float:
    return run.report.counts.refused


RECOMMENDED_SETTINGS = Scenario(
    name="recommended-settings",
    claim="Low latency wants 64 sequences and a budget of 2,048 tokens, high throughput 256 and 16,384, long contexts "
    "128 and 8,192, short requests 512 and 4,096 without chunked prefill; any load 256 and 8,192, with chunks of at "
    "most 512 tokens.",
    source="a deep dive into vLLM V1",
    setting="Each preset, the general settings and the default, 256 and 8,192, on all four workloads. Chat: 12 "
    "requests a second; backlog: 400 requests at once; long prompts: lognormal:20000,0.4; short requests: 600 at once, "
    "prompts of 60 tokens, outputs of 40.",
    variants=tuple(
        Variant(name, settings(**values), workload, load)
        for load, workload in _LOADS.items()
        for name, values in _SETTINGS.items()
    ),
    figures=(
        Figure(_ITL, "s", itl_p99),
        Figure(_TTFT, "s", lambda run: run.report.ttft.mean.value),
        Figure(_RATE, "", output_rate),
        Figure(_REFUSED, "", _refused),
    ),
    checks=_check_settings,
    panels=(Bars(_ITL), Bars(_TTFT), Bars(_RATE), Bars(_REFUSED)),
)
