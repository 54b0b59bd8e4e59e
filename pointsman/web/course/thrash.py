"""Lesson: thrash, the watermark, and the four responses to a rising preemption counter."""

from __future__ import annotations

from functools import partial
from typing import Any

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant, millis, percent
from pointsman.web.course.stage import Run, Stage

REQUESTS, BLOCKS, WATERMARK, SEQS, BUDGET = 32, 48, 0.15, 5, 64


def _run(**settings: Any) -> Run:
    """Prompts of three blocks that grow to seven or eight, and a new one every third step."""
    stage = Stage(**{"num_blocks": BLOCKS, "max_num_seqs": 16, "max_num_batched_tokens": 512, **settings})
    for index in range(REQUESTS):
        stage.add(f"r{index + 1}", 36 + 5 * (index % 4), max_tokens=60 + 7 * (index % 5), step=2 * index)
    return stage.run()


def _figures(runs: list[Run]) -> Figures:
    found: dict[str, Any] = {}
    for name, run in zip(("plain", "mark", "seqs", "budget", "more"), runs, strict=True):
        found[f"n_{name}"] = len(run.preemptions())
        found[f"share_{name}"] = percent(run.num_recomputed / run.num_computed)
        found[f"time_{name}"] = millis(run.seconds)
        ttfts = [run.ttft(request) for request in run.requests]
        found[f"ttft_{name}"] = millis(sum(ttfts) / len(ttfts))
        rows = [output.num_rows for output in run.outputs]
        found[f"rows_{name}"] = f"{sum(rows) / len(rows):.1f}"
    print(found)
    return found


LESSON = Lesson(
    title="Thrash",
    paragraphs=("a", "b", "c"),
    choice="Response",
    variants=(
        Variant("none", "{n_plain}", partial(_run)),
        Variant("watermark", "{n_mark}", partial(_run, watermark=WATERMARK)),
        Variant("seqs", "{n_seqs}", partial(_run, max_num_seqs=SEQS)),
        Variant("budget", "{n_budget}", partial(_run, max_num_batched_tokens=BUDGET)),
        Variant("more", "{n_more}", partial(_run, num_blocks=2 * BLOCKS)),
    ),
    figures=_figures,
    questions=(),
)
