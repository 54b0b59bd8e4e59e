"""Scenarios of batching: static against continuous batching, and the size of a prompt's chunks."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from pointsman.core import SchedulerConfig
from pointsman.sim.report.course import Levels, courses, levels, scale_levels, sum_levels, time_span
from pointsman.sim.report.layout import format_number
from pointsman.sim.scenarios.scenario import (
    Bars,
    Check,
    Course,
    Figure,
    Finding,
    Points,
    Run,
    Scenario,
    Variant,
    format_ratio,
    mean_e2e,
    settings,
)
from pointsman.sim.scenarios.workloads import Stream, Streams, backlog
from pointsman.sim.simulator import Outcome
from pointsman.sim.workload import OpenLoop, Workload
from pointsman.traces import TraceRequest

# ---------------------------------------------------------------------- static against continuous

_SLOTS = 8
_EXAMPLE, _CHAT = "500 and 7 x 10", "chat"
_STATIC, _CONTINUOUS = "static", "continuous"
_USED, _RATE, _MEAN_E2E = "slots used", "requests/s", "mean end-to-end"


def _one_long_seven_short(seed: int) -> Workload:
    """Forty times, one request with 500 output tokens and seven requests with 10; all arrive at the start."""
    return OpenLoop([TraceRequest(0.0, 100, 10 if index % _SLOTS else 500) for index in range(40 * _SLOTS)])


def _slots(outcome: Outcome, config: SchedulerConfig) -> Levels:
    begin, end = time_span(outcome)
    rows = sum_levels([levels(run, run.num_rows, begin, end) for run in courses(outcome)])
    return scale_levels(rows, 100 / config.num_sequence_slots)


def _check_static(found: Finding) -> list[Check]:
    static, continuous = (found.value(_USED, name, _EXAMPLE) for name in (_STATIC, _CONTINUOUS))
    gain, chat_gain = (
        found.value(_RATE, _CONTINUOUS, load) / found.value(_RATE, _STATIC, load) for load in (_EXAMPLE, _CHAT)
    )
    slower, faster = (found.value(_MEAN_E2E, name, _CHAT) for name in (_STATIC, _CONTINUOUS))
    return [
        Check(
            "static batching uses about 23 % of the slots in the example",
            abs(static - 0.23) < 0.02,
            found.text(_USED, _STATIC, _EXAMPLE),
        ),
        Check(
            "continuous batching uses about 95 % of them",
            abs(continuous - 0.95) < 0.03,
            found.text(_USED, _CONTINUOUS, _EXAMPLE),
        ),
        Check("it serves 5 to 10 times as many requests there", 5 <= gain <= 10, format_ratio(gain)),
        Check(
            "so it does wherever output lengths are mixed", 5 <= chat_gain <= 10, f"{format_ratio(chat_gain)} with chat"
        ),
        Check(
            "its mean latency is lower",
            faster < slower,
            f"{found.text(_MEAN_E2E, _CONTINUOUS, _CHAT)}, static {found.text(_MEAN_E2E, _STATIC, _CHAT)}, with chat",
        ),
    ]


STATIC_BATCHING = Scenario(
    name="static-batching",
    claim="A static batch waits for its longest request and uses about 23 % of its slots; continuous batching uses "
    "about 95 % and serves 5 to 10 times as many requests.",
    source="a course on nano-vLLM",
    setting=f"{_SLOTS} sequence slots, 320 requests that are all there. Example: one output of 500 tokens and seven "
    "of 10, forty times. Chat: outputs lognormal:130,0.8.",
    variants=tuple(
        Variant(name, settings(batching=batching, max_num_seqs=_SLOTS), workload, load)
        for load, workload in (
            (_EXAMPLE, _one_long_seven_short),
            (_CHAT, partial(backlog, 40 * _SLOTS, "100", "lognormal:130,0.8")),
        )
        for name, batching in ((_STATIC, "static"), (_CONTINUOUS, "mixed"))
    ),
    figures=(
        Figure(_USED, "%", lambda run: run.report.slots_used.value),
        Figure(_RATE, "", lambda run: run.report.requests_per_second.value),
        Figure("steps", "", lambda run: run.report.counts.num_steps),
        Figure(_MEAN_E2E, "s", mean_e2e),
    ),
    checks=_check_static,
    panels=(
        Course("Slots used, %: 500 and 7 x 10", _slots, _EXAMPLE),
        Course("Slots used, %: chat", _slots, _CHAT),
        Bars(_USED),
        Bars(_RATE),
    ),
)

# ---------------------------------------------------------------------- the size of chunks

_CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_WHOLE, _THRESHOLD = "whole prompt", "8192, at most 512 a prompt"
_TARGET = 0.03
_TARGETED = "target-itl 30 ms"
_SIZES = (*map(str, _CHUNKS), _WHOLE)
_LONG_TTFT, _SHORT_TTFT, _LONGEST_ITL = "TTFT long", "TTFT short", "longest ITL"
_LONG, _SHORT, _DECODES = "long", "short", "decodes"


def _beside_decodes(seed: int) -> Workload:
    """32 requests decode when a prompt of 30,000 tokens arrives; a prompt of 100 tokens arrives 50 ms later."""
    streams = (
        Stream(_DECODES, 32, "100", "1200", "constant:20"),
        Stream(_LONG, 1, "30000", "100", start=4.0),
        Stream(_SHORT, 1, "100", "100", start=4.05),
    )
    return Streams(streams, seed)


def _ttft_of(stream: str, run: Run) -> float:
    return float(run.ttft[run.is_of_streams(stream)].max())


def _longest_gap(run: Run) -> float:
    return float(run.outcome.timings.max_gap[run.is_of_streams(_DECODES)].max())


def _chunked(budget: int) -> SchedulerConfig:
    return settings(max_num_batched_tokens=budget, max_num_seqs=64)


def _check_chunks(found: Finding) -> list[Check]:
    ttfts = [found.value(_LONG_TTFT, name) for name in _SIZES]
    gaps = [found.value(_LONGEST_ITL, name) for name in _SIZES]
    near = [
        name
        for name, ttft, gap in zip(_SIZES, ttfts, gaps, strict=True)
        if ttft <= 1.1 * min(ttfts) and gap <= 1.1 * min(gaps)
    ]
    knee = next(index for index, ttft in enumerate(ttfts) if ttft <= 1.1 * min(ttfts))
    at_512 = found.value(_LONG_TTFT, "512")
    short, whole = found.value(_SHORT_TTFT, "2048"), found.value(_SHORT_TTFT, _WHOLE)
    return [
        Check(
            "smaller chunks make the ITL of the decodes smoother",
            all(small <= large for small, large in pairwise(gaps)),
            f"longest {found.text(_LONGEST_ITL, _SIZES[0])} with {_SIZES[0]} tokens, "
            f"{found.text(_LONGEST_ITL, _WHOLE)} with the {_WHOLE}",
        ),
        Check(
            "they make the TTFT of the long prompt longer",
            all(small >= large for small, large in pairwise(ttfts)),
            f"{found.text(_LONG_TTFT, _SIZES[0])} with {_SIZES[0]} tokens, {found.text(_LONG_TTFT, _WHOLE)} with the "
            f"{_WHOLE}",
        ),
        Check(
            "no size has both within 10 % of the best",
            not near,
            ", ".join(near) or "none has",
        ),
        Check(
            "every step along the curve trades one for the other",
            all(large < 0.95 * small for small, large in pairwise(ttfts)),
            f"beyond {_SIZES[knee]} tokens the TTFT falls by {format_number(100 * (1 - min(ttfts) / ttfts[knee]))} % "
            f"in all, while the longest ITL grows {format_ratio(gaps[-1] / gaps[knee])}",
        ),
        Check(
            "chunks reduce the TTFT of a short prompt behind the long one",
            short < 0.5 * whole,
            f"{found.text(_SHORT_TTFT, '2048')} with 2048 tokens, {found.text(_SHORT_TTFT, _WHOLE)} with the {_WHOLE}; "
            f"{found.text(_SHORT_TTFT, _THRESHOLD)} with {_THRESHOLD}",
        ),
        Check(
            "a target for the ITL finds the size",
            found.value(_LONGEST_ITL, _TARGETED) < 1.1 * _TARGET and found.value(_LONG_TTFT, _TARGETED) < 1.1 * at_512,
            f"longest ITL {found.text(_LONGEST_ITL, _TARGETED)} with a target of 30 ms; TTFT of the long prompt "
            f"{found.text(_LONG_TTFT, _TARGETED)}, {found.text(_LONG_TTFT, '512')} with 512 tokens",
        ),
    ]


CHUNK_SIZE = Scenario(
    name="chunk-size",
    claim="Chunks let decodes go on beside a prompt of 30,000 tokens: smaller ones smooth their ITL and lengthen the "
    "prompt's TTFT, and no setting escapes that curve.",
    source="a book on vLLM; that chunks reduce TTFT: a deep dive into vLLM V1",
    setting="32 requests decode; a prompt of 30,000 tokens arrives, and 50 ms later one of 100. The token budget is "
    "the size of a chunk; the last two have long_prefill_token_threshold=512, and the limit target-itl.",
    variants=(
        *(Variant(str(chunk), _chunked(chunk), _beside_decodes) for chunk in _CHUNKS),
        Variant(_WHOLE, _chunked(32768).replace(enable_chunked_prefill=False), _beside_decodes),
        Variant(_THRESHOLD, _chunked(8192).replace(long_prefill_token_threshold=512), _beside_decodes),
        Variant(_TARGETED, _chunked(8192).replace(token_limits=(f"target-itl:seconds={_TARGET}",)), _beside_decodes),
    ),
    figures=(
        Figure(_LONG_TTFT, "s", partial(_ttft_of, _LONG)),
        Figure(_LONGEST_ITL, "s", _longest_gap),
        Figure(_SHORT_TTFT, "s", partial(_ttft_of, _SHORT)),
        Figure("steps", "", lambda run: run.report.counts.num_steps),
    ),
    checks=_check_chunks,
    panels=(Points(_LONGEST_ITL, _LONG_TTFT, _SIZES), Bars(_LONGEST_ITL), Bars(_LONG_TTFT), Bars(_SHORT_TTFT)),
)
