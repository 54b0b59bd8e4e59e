"""The classes that make up a lesson: its paragraphs, variants (each with a film to step through) and questions. The
numbers in a lesson's texts come from the films.

Texts are templates. `{name}` stands for a figure of the lesson. A figure is a number, formatted as in `{name:,}`, or a
`Moment`, which becomes a button that shows a step. Digits that no run computes are quotations, and are listed in
`stated`, so that a test can tell them from figures.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pointsman.web.course.stage import Run


class Moment(NamedTuple):
    """A step of a film; in a text, a button that shows it."""

    step: int
    variant: int = 0
    """Index of the variant that the film belongs to."""
    request: str | None = None
    """Id of the request to follow."""


Figure: TypeAlias = int | float | str | Moment
Figures: TypeAlias = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the configurations that a lesson compares; a film shows its effect."""

    name: str
    shows: str
    """Template of the text that tells what to look for in the film."""
    run: Callable[[], Run]


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers to choose from in a question."""

    text: str
    why: str
    """Why the answer is right or wrong; shown when the answer is chosen."""
    is_right: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A question with one right answer."""

    text: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson, before its films are made."""

    title: str
    paragraphs: tuple[str, str, str]
    choice: str
    """Label of the variants' select element: what differs between the variants."""
    variants: tuple[Variant, ...]
    figures: Callable[[list[Run]], Figures]
    """Computes the lesson's figures from one run for each variant; the runs are in the order of the variants."""
    questions: tuple[Question, ...]
    stated: tuple[str, ...] = ()
    """Digits in the texts that are quoted from a document, or part of a name."""


Piece: TypeAlias = str | Moment


@dataclass(frozen=True, slots=True)
class Performed:
    """A lesson, with the runs of its variants and its figures."""

    lesson: Lesson
    runs: list[Run]
    figures: Figures = field(repr=False)

    def pieces(self, template: str) -> list[Piece]:
        """The template's text, with figures filled in, as a list of texts and moments in order.

        Raises:
            KeyError: the template contains a figure that the lesson lacks.
        """
        found: list[Piece] = []
        for text, name, spec, _ in string.Formatter().parse(template):
            found.append(text)
            if name is not None:
                figure = self.figures[name]
                found.append(figure if isinstance(figure, Moment) else format(figure, spec or ""))
        return _join_texts(found)

    def text(self, template: str) -> str:
        """A template as plain text."""
        return "".join(piece if isinstance(piece, str) else label(piece) for piece in self.pieces(template))


def label(moment: Moment) -> str:
    """The text of a moment's button."""
    return f"step {moment.step}"


def percent(share: float, digits: int = 0) -> str:
    """A share as "14 %"."""
    return f"{100 * share:.{digits}f} %"


def millis(seconds: float) -> str:
    """A time as "24 ms"."""
    return f"{1e3 * seconds:,.0f} ms"


def perform(lesson: Lesson) -> Performed:
    """Run every variant of a lesson, and compute the lesson's figures."""
    runs = [variant.run() for variant in lesson.variants]
    return Performed(lesson, runs, lesson.figures(runs))


def _join_texts(pieces: list[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif piece != "":
            found.append(piece)
    return found
