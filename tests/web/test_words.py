"""The words for events and reasons exist once, in `words.py`; pages use them from there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from pointsman.core.observe.film_format import Op
from pointsman.core.state.reason import Reason
from pointsman.web.page import assemble
from pointsman.web.words import MOVES, RECOVERIES, SENTENCES, Choice, fill, page_words

PAGE = files("pointsman.web").joinpath("page")


def texts(words: Any) -> Iterator[str]:
    """Every text in the templates that has at least two words and 10 letters."""
    if isinstance(words, dict):
        words = list(words.values())
    if isinstance(words, str):
        yield from (
            part for part in re.split(r"\{[^}]*\}|[\[\]]", words) if len(part.strip()) >= 10 and " " in part.strip()
        )
    elif words is not None:
        for one in words:
            yield from texts(one)


@pytest.mark.parametrize(
    ("template", "values", "sentence"),
    [
        ("{who} waits", {"who": "{who} [a]"}, "{who} [a] waits"),
        ("{n:token}, {m:token}, {n:,}, {n}", {"n": 1_500, "m": 1}, "1,500 tokens, 1 token, 1,500, 1500"),
        ("a[ of {tenant}][: {n:,}]", {"tenant": "", "n": 0}, "a"),
        ("a[ of {tenant}][: {n:,}]", {"tenant": "t", "n": 1}, "a of t: 1"),
        (Choice("mode", ("none", "{mode} once", "more")), {"mode": False}, "none"),
        (Choice("mode", ("none", "{mode} once", "more")), {"mode": 7}, "more"),
    ],
)
def test_a_template_is_filled_in(template: str | Choice, values: dict[str, Any], sentence: str) -> None:
    assert fill(template, values) == sentence


def test_every_event_but_steps_has_a_sentence() -> None:
    assert set(Op) - set(SENTENCES) == {Op.QUEUED, Op.STEP, Op.UPDATE, Op.STEPS}
    assert set(page_words()["reasons"]) == {reason.value for reason in Reason}
    assert len(RECOVERIES) == 3 and len(set(MOVES)) == len(MOVES)


def test_no_script_has_its_own_copy_of_a_text() -> None:
    every = set(texts(page_words()))
    assert len(every) > 60 and " is preempted: " in every
    for script in PAGE.iterdir():
        if script.name.endswith(".js"):
            source = re.sub(r"(^|\s)// .*", "", script.read_text(encoding="utf-8"))
            assert [text for text in every if text in source] == [], script.name


def test_the_first_script_of_a_page_defines_its_words() -> None:
    page = assemble("player", "a film", scripts=("figures.js",))
    strict, words = page.split("<script>")[-1].splitlines()[:2]
    assert strict == '"use strict";'
    assert json.loads(words.removeprefix("const WORDS = ").removesuffix(";")) == json.loads(json.dumps(page_words()))
