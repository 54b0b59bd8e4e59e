"""Nodes: the syntax tree of regular expressions and grammars, and the writer of EBNF for the compiler.

    node = read_regex("[^a]b*")     -> Sequence([Characters(...), Repeat(Text("b"), 0, None)])
    written_rules({"root": node})   -> 'root ::= [^a\\ud800-\\udfff] "b"*'

xgrammar's own readers differ from other dialects: they read every hexadecimal digit after `\\x` as a part of the
escape, read `.` as any character and allow half a surrogate pair in `[^a]`. So Pointsman reads both languages itself,
and writes a small, unambiguous part of EBNF: literals and classes. Their characters outside printable ASCII are escapes
of a fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeAlias

LAST = 0x10FFFF
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
MAX_REPETITIONS = 65_536
"""Maximum count of a repetition such as {m,n}."""
MAX_NESTING = 64
"""Maximum number of levels of nested groups."""

CODE_ESCAPE = r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})"
"""Pattern of an escape, without the backslash, that gives a character's code point in hexadecimal; the pattern has four
groups, one per form of the escape."""

Range: TypeAlias = tuple[int, int]


class Unreadable(ValueError):
    """A regular expression or a grammar that Pointsman cannot read, with the position and the remedy."""


def is_character(code: int) -> bool:
    """Whether a code point is a character: not a surrogate, and not above U+10FFFF."""
    return code <= LAST and not FIRST_SURROGATE <= code <= LAST_SURROGATE


def problem_of_counts(minimum: int, maximum: int | None) -> str | None:
    """The problem with the counts of a repetition and its remedy; None: the counts are valid."""
    if max(minimum, maximum or 0) > MAX_REPETITIONS:
        return f"the maximum is {MAX_REPETITIONS:,}: lower it"
    if maximum is not None and maximum < minimum:
        return "its minimum is above its maximum: swap them"
    return None


class CharacterSet:
    """A set of characters: code points without surrogates, because no text contains surrogates.

    Args:
        ranges: first and last code point of each range, in any order.
    """

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        merged: list[Range] = []
        for first, last in sorted(_without_surrogates(ranges)):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.ranges: tuple[Range, ...] = tuple(merged)
        """First and last code point of each range; ascending, disjoint and not adjacent."""

    @classmethod
    def of(cls, text: str) -> CharacterSet:
        """The characters of a text."""
        return cls((ord(one), ord(one)) for one in text)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __or__(self, other: CharacterSet) -> CharacterSet:
        return CharacterSet((*self.ranges, *other.ranges))

    def __invert__(self) -> CharacterSet:
        gaps, next_one = [], 0
        for first, last in self.ranges:
            if first > next_one:
                gaps.append((next_one, first - 1))
            next_one = last + 1
        if next_one <= LAST:
            gaps.append((next_one, LAST))
        return CharacterSet(gaps)

    def __sub__(self, other: CharacterSet) -> CharacterSet:
        return ~(~self | other)


def _without_surrogates(ranges: Iterable[Range]) -> Iterable[Range]:
    for first, last in ranges:
        if first < FIRST_SURROGATE:
            yield first, min(last, FIRST_SURROGATE - 1)
        if last > LAST_SURROGATE:
            yield max(first, LAST_SURROGATE + 1), last


# ------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True, slots=True)
class Text:
    """Matches this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    """Matches one character of a set; an empty set matches no text."""

    characters: CharacterSet


@dataclass(frozen=True, slots=True)
class Sequence:
    """Matches a text of each part, one after the other."""

    parts: SequenceOf[Node]


@dataclass(frozen=True, slots=True)
class Choice:
    """Matches a text of any of the options."""

    options: SequenceOf[Node]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches `minimum` to `maximum` texts of the part, one after the other; `maximum` None: no maximum."""

    part: Node
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Matches a text of the rule with this name."""

    name: str


Node: TypeAlias = Text | Characters | Sequence | Choice | Repeat | Rule

NEVER = "never"
"""Name of the rule for an empty class, which allows no text."""


def written_rules(rules: Mapping[str, Node], names: Mapping[str, str] | None = None) -> str:
    """Write rules as EBNF.

    Args:
        rules: name -> node.
        names: name in `rules` -> name in the EBNF; None: the same names.
    """
    names = names or {name: name for name in rules}
    lines = [f"{names[name]} ::= {_write_node(node, names)}" for name, node in rules.items()]
    return "\n".join((*lines, f'{NEVER} ::= "x" {NEVER}'))


def _write_node(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Text(text):
            return _write_literal(text)
        case Characters(characters):
            return _write_separate_class(characters)
        case Sequence(parts):
            return " ".join(_write_grouped(part, names) for part in parts) or '""'
        case Choice(options):
            return " | ".join(_write_node(option, names) for option in options)
        case Repeat(Characters(characters), 1, None) if not _lists_multibyte_characters(
            characters
        ):  # xgrammar would make a separate rule for `+`
            return f"{_write_class(characters)} {_write_class(characters)}*"
        case Repeat(Characters(characters), 0, None) if _lists_multibyte_characters(characters):  # and none for `*`
            return f"({_write_class(characters)}+)?"
        case Repeat(Characters(characters), minimum, maximum):
            return f"{_write_class(characters)}{_write_count(minimum, maximum)}"
        case Repeat(part, minimum, maximum):
            return f"{_write_grouped(part, names)}{_write_count(minimum, maximum)}"
        case Rule(name):
            return names[name]


def _write_grouped(node: Node, names: Mapping[str, str]) -> str:
    text = _write_node(node, names)
    return text if isinstance(node, (Text, Characters, Rule)) else f"({text})"


def _write_count(minimum: int, maximum: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((minimum, maximum))
    return known or f"{{{minimum},{'' if maximum is None else maximum}}}"


def _write_literal(text: str) -> str:
    return f'"{"".join(_escaped(ord(one), chr(34)) for one in text)}"'


def _write_class(characters: CharacterSet) -> str:
    """Write a set of characters as a class in EBNF. A set that contains the last code point is written as its excluded
    characters and the surrogates."""
    if not characters:
        return NEVER
    if characters.ranges[-1][1] == LAST:
        excluded = sorted((*(~characters).ranges, (FIRST_SURROGATE, LAST_SURROGATE)))
        return f"[^{''.join(_write_range(first, last) for first, last in excluded)}]"
    return f"[{''.join(_write_range(first, last) for first, last in characters.ranges)}]"


def _write_separate_class(characters: CharacterSet) -> str:
    """Write a set of characters as a class in EBNF outside a repetition. A class that lists multi-byte characters gets
    an alternative, so that xgrammar makes a rule for it; in a counted repetition a rule would be slow."""
    return (
        f"({_write_class(characters)} | {NEVER})"
        if _lists_multibyte_characters(characters)
        else _write_class(characters)
    )


def _lists_multibyte_characters(characters: CharacterSet) -> bool:
    """Whether the class of a set lists multi-byte characters: then xgrammar 0.2.8 may allow wrong tokens in a
    repetition before the class."""
    return bool(characters) and 0x80 <= characters.ranges[-1][1] < LAST


def _write_range(first: int, last: int) -> str:
    special = "[]^-\\"
    text = _escaped(first, special)
    return text if first == last else f"{text}-{_escaped(last, special)}"


def _escaped(code: int, special: str) -> str:
    """The character of a code point, escaped if it is not printable ASCII, is a backslash, or is in `special`."""
    character = chr(code)
    if 0x20 <= code < 0x7F and character != "\\" and character not in special:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
