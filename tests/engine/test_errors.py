"""The first line of an error, as shown to a user."""

from __future__ import annotations

import pytest

from pointsman.engine.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one", "one"),
        ("one\ntwo", "one"),
        ("\n  one  \n", "one"),
        ("", "ValueError"),
        ("wrong field:\n  TypeError: no int", "wrong field: TypeError: no int"),
        ("one of:\n\n(1) a file,\n(2) a class.\nMore", "one of: (1) a file, (2) a class."),
        ("one of:", "one of"),
        (":\n:", "ValueError"),
        ("x" * 300, "x" * 200),
    ],
)
def test_a_line_ending_in_a_colon_is_joined_with_the_next(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line
