"""Lesson: reading `explain`, which says why a request waits, for how much of what, and which requests hold it."""

from __future__ import annotations

from pointsman.core import ParkReason
from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

ASKED = 6
"""The step that was decided last when the request is asked about."""


def _stage(**settings: int) -> Stage:
    stage = Stage(**{"num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})

    def ask() -> None:
        for name in ("C", "D"):
            found = stage.scheduler.explain(name)
            stage.notes[name] = found
    stage.at(ASKED + 1, ask)
    return stage


def _blocks() -> Run:
    stage = _stage()
    stage.add("A", 60, max_tokens=12)
    stage.add("B", 60, max_tokens=30)
    stage.add("C", 60, max_tokens=6, step=3)
    stage.add("D", 20, max_tokens=6, step=4)
    return stage.run()


def _slots() -> Run:
    stage = _stage(max_num_seqs=2)
    stage.add("A", 20, max_tokens=10)
    stage.add("B", 20, max_tokens=16)
    stage.add("C", 20, max_tokens=6, step=3)
    stage.add("D", 20, max_tokens=6, step=4)
    return stage.run()


def _budget() -> Run:
    stage = _stage(num_blocks=40)
    stage.add("A", 20, max_tokens=12)
    stage.add("B", 200, max_tokens=6, step=5)
    stage.add("C", 60, max_tokens=6, step=5)
    stage.add("D", 20, max_tokens=6, step=6)
    return stage.run()


def _parked() -> Run:
    stage = _stage()
    stage.add("A", 20, max_tokens=12)
    stage.add("C", 20, max_tokens=6, step=3, park=ParkReason.GRAMMAR)
    stage.add("D", 20, max_tokens=6, step=4)
    stage.at(9, lambda: stage.scheduler.ready("C", stage.now))
    return stage.run()


def _figures(runs: list[Run]) -> Figures:
    for r in runs:
        for n in "CD": print(r.notes[n].sentence, r.notes[n].reason, r.notes[n].missing, r.notes[n].holders, r.notes[n].since, r.notes[n].position, r.starts(n))
    return {}


LESSON = Lesson(
    title="Reading explain",
    paragraphs=("a", "b", "c"),
    choice="C waits for",
    variants=(Variant("blocks", "", _blocks), Variant("slot", "", _slots), Variant("budget", "", _budget), Variant("grammar", "", _parked)),
    figures=_figures,
    questions=(),
)
