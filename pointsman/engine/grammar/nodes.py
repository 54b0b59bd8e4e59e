"""Nodes: what regular expressions and grammars are read into, and how nodes are written for the compiler.

    node = read_regex("[^a]b*")     -> Sequence([Characters(...), Repeat(Text("b"), 0, None)])
    written_rules({"root": node})   -> 'root ::= [^a\\ud800-\\udfff] "b"*'

xgrammar has readers of its own, which differ from other dialects: they take every hexadecimal digit that follows `\\x`,
read `.` as any character and let half a surrogate pair into `[^a]`. So Pointsman reads both languages itself, and
writes the small part of EBNF that can be read in one way only: literals and classes, whose characters outside printable
ASCII are escapes of a fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeAlias

LAST = 0x10FFFF
FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
MAX_REPETITIONS = 65_536
"""The maximum of a counted repetition."""
MAX_NESTING = 64
"""Levels of groups within groups."""

Range: TypeAlias = tuple[int, int]


class Unreadable(ValueError):
    """A regular expression or a grammar that Pointsman does not read, with the place and the remedy."""


class CharacterSet:
    """A set of characters: code points without surrogates, which no text has.

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
        """Ascending, disjoint, as few as possible."""

    @classmethod
    def of(cls, text: str) -> CharacterSet:
        """The characters of a text."""
        return cls((ord(one), ord(one)) for one in text)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharacterSet) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

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

    def __and__(self, other: CharacterSet) -> CharacterSet:
        return ~(~self | ~other)

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
    """The characters of a text, in this order."""

    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set; an empty set allows no text."""

    characters: CharacterSet


@dataclass(frozen=True, slots=True)
class Sequence:
    """One text of each part, in this order."""

    parts: SequenceOf[Node]


@dataclass(frozen=True, slots=True)
class Choice:
    """A text of one of the options."""

    options: SequenceOf[Node]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Texts of a part, `minimum` to `maximum` of them; None: without a maximum."""

    part: Node
    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A text of the rule of this name."""

    name: str


Node: TypeAlias = Text | Characters | Sequence | Choice | Repeat | Rule

NEVER = "never"
"""The rule that stands for an empty class: it allows no text."""


def written_rules(rules: Mapping[str, Node], names: Mapping[str, str] | None = None) -> str:
    """Rules as EBNF.

    Args:
        rules: by their names.
        names: what each of them is called in the EBNF; None: what it is called here.
    """
    names = names or {name: name for name in rules}
    lines = [f"{names[name]} ::= {_written(node, names)}" for name, node in rules.items()]
    return "\n".join((*lines, f'{NEVER} ::= "x" {NEVER}'))


def _written(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Text(text):
            return _literal(text)
        case Characters(characters):
            return _class(characters)
        case Sequence(parts):
            return " ".join(_grouped(part, names) for part in parts) or '""'
        case Choice(options):
            return " | ".join(_written(option, names) for option in options)
        case Repeat(Characters(characters), 1, None):  # a `+` would be a rule that wrong tokens may follow, too
            return f"{_class(characters)} {_class(characters)}*"
        case Repeat(part, minimum, maximum):
            return f"{_grouped(part, names)}{_count(minimum, maximum)}"
        case Rule(name):
            return names[name]


def _grouped(node: Node, names: Mapping[str, str]) -> str:
    text = _written(node, names)
    return text if isinstance(node, (Text, Characters, Rule)) else f"({text})"


def _count(minimum: int, maximum: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((minimum, maximum))
    return known or f"{{{minimum},{'' if maximum is None else maximum}}}"


def _literal(text: str) -> str:
    return f'"{"".join(_escaped(ord(one), chr(34)) for one in text)}"'


def _class(characters: CharacterSet) -> str:
    """A class as EBNF.

    xgrammar 0.2.8 allows wrong tokens beside some classes of characters beyond U+FFFF. So a class that reaches the last
    character is written by those that it excludes, surrogates among them; and any other has a rule of its own, which is
    slow in a counted repetition.
    """
    if not characters:
        return NEVER
    if characters.ranges[-1][1] == LAST:
        excluded = sorted((*(~characters).ranges, (FIRST_SURROGATE, LAST_SURROGATE)))
        return f"[^{''.join(_range(first, last) for first, last in excluded)}]"
    text = f"[{''.join(_range(first, last) for first, last in characters.ranges)}]"
    return f"({text} | {NEVER})" if characters.ranges[-1][1] >= 0x10000 else text


def _range(first: int, last: int) -> str:
    special = "[]^-\\"
    text = _escaped(first, special)
    return text if first == last else f"{text}-{_escaped(last, special)}"


def _escaped(code: int, special: str) -> str:
    """A character; as an escape if it is no printable ASCII, a backslash, or one of the special ones."""
    character = chr(code)
    if 0x20 <= code < 0x7F and character != "\\" and character not in special:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
