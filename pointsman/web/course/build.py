"""Makes the course: runs every variant of every lesson, and puts films and texts into one HTML file."""

from __future__ import annotations

import json
from typing import Any

from pointsman.web.course import (
    batching,
    blocks,
    budget,
    chunked_prefill,
    explaining,
    myths,
    preemption,
    prefix_sharing,
    priority,
    speculation,
    states,
    step_order,
    thrash,
)
from pointsman.web.course.lesson import Performed, Question, label, perform
from pointsman.web.page import assemble

TITLE = "What a scheduler does"
LESSONS = tuple(
    module.LESSON
    for module in (
        batching,
        states,
        step_order,
        budget,
        chunked_prefill,
        blocks,
        prefix_sharing,
        preemption,
        thrash,
        priority,
        speculation,
        myths,
        explaining,
    )
)
"""All lessons, in the order of the course."""


def perform_all() -> list[Performed]:
    """Run all lessons."""
    return [perform(lesson) for lesson in LESSONS]


def course_page(performed: list[Performed]) -> str:
    """The course's page, as the text of one self-contained HTML file."""
    data = {"lessons-data": json.dumps([_lesson_content(one) for one in performed], ensure_ascii=False).encode()}
    for number, one in enumerate(performed):
        data |= {f"film-{number}-{variant}": run.film for variant, run in enumerate(one.runs)}
    return assemble("course", TITLE, data=data)


def _lesson_content(one: Performed) -> dict[str, Any]:
    lesson = one.lesson
    return {
        "title": lesson.title,
        "paragraphs": [_template_pieces(one, text) for text in lesson.paragraphs],
        "choice": lesson.choice,
        "variants": [{"name": each.name, "shows": _template_pieces(one, each.shows)} for each in lesson.variants],
        "questions": [_question_content(one, each) for each in lesson.questions],
    }


def _question_content(one: Performed, question: Question) -> dict[str, Any]:
    answers = [
        {"text": one.text(answer.text), "why": _template_pieces(one, answer.why), "isRight": answer.is_right}
        for answer in question.answers
    ]
    return {"text": one.text(question.text), "answers": answers}


def _template_pieces(one: Performed, template: str) -> list[Any]:
    """The text of a template in the form that `course.js` reads: strings, and the data of the buttons between them."""
    return [
        piece
        if isinstance(piece, str)
        else {"text": label(piece), "step": piece.step, "variant": piece.variant, "request": piece.request}
        for piece in one.pieces(template)
    ]
