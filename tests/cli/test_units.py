"""Sizes as people write them, and text as a terminal may show it."""

from __future__ import annotations

import pytest

from pointsman.cli.display import one_line, printable, tail
from pointsman.cli.knobs import size as parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("64MiB", 64 * 1024**2),
        ("64M", 64 * 1024**2),
        ("64mb", 64 * 1000**2),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("2T", 2 * 1024**4),
    ],
)
def test_sizes_are_parsed_with_their_units(text: str, size: int) -> None:
    assert parse_size(text, "kv_cache_bytes") == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1e9", "64 apples", "64MiBMiB", "0", "0.1B", "nan"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_bytes .*64MiB"):
        parse_size(text, "kv_cache_bytes")


def test_control_characters_are_removed_from_displayed_text() -> None:
    assert printable("a\x1b[2Jb\x07\nc\td") == "a�[2Jb�\nc\td"
    assert one_line("  a\n\n b\r\tc ") == "a b c"


def test_the_tail_of_a_text_has_at_most_the_given_width() -> None:
    assert tail("short", 10) == "short"
    assert tail("0123456789abc", 10) == "…456789abc"
    assert len(tail("word " * 100, 30)) == 30
