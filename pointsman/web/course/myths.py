"""Lesson: three things that beginners believe of schedulers, after the course on nano-vLLM."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BLOCKS, ENOUGH = 9, 32


def _run(num_blocks: int) -> Run:
    """Three requests that come, and go, at different times."""
    stage = Stage(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=32)
    stage.add("A", 30, max_tokens=44)
    stage.add("B", 20, max_tokens=10, step=8)
    stage.add("C", 44, max_tokens=24, step=12)
    return stage.run()


def _figures(runs: list[Run]) -> Figures:
    short, large = runs
    for i in range(short.num_steps): print(i, short.tokens(i), end=" ")
    print(short.preemptions(), short.starts("C"), short.cached("C"), [(n, short.end(n), large.end(n)) for n in "ABC"])
    return {}


LESSON = Lesson(
    title="Three myths",
    paragraphs=("a", "b", "c"),
    choice="Pool",
    variants=(Variant("9", "", partial(_run, BLOCKS)), Variant("32", "", partial(_run, ENOUGH))),
    figures=_figures,
    questions=(),
)
