"""Reads regular expressions so that every dialect agrees on the result.

    read_regex("[A-Z]\\\\d{2,}")      the whole text is a match

Where the dialects of Python, ECMAScript (used by JSON schemas) and Rust differ, the generated text matches in all of
them, or the expression is refused:

| construct | meaning |
| --- | --- |
| `\\d`, `\\w`, `\\s` | the ASCII characters of the class |
| `\\D`, `\\W`, `\\S` | characters outside the class in every dialect |
| `.` | any character except line ends: `\\n`, `\\r`, U+2028, U+2029 |
| `\\xNN`, `\\uNNNN`, `\\u{N...}`, `\\UNNNNNNNN`, `\\cX`, `\\a`, `\\e`, `\\0`, ... | one character |
| lazy quantifiers, names of groups | no effect on the matching texts |
| `^`, `$` | allowed at the beginning and the end of the text |
| look-around, `\\b`, back references, flags, `\\p{...}`, possessive quantifiers, octal escapes, `[]` | refused |
"""

from __future__ import annotations

import re
from functools import cache

from pointsman.engine.grammar.nodes import (
    CODE_ESCAPE,
    FIRST_SURROGATE,
    MAX_NESTING,
    Characters,
    CharacterSet,
    Choice,
    Node,
    Range,
    Repeat,
    Sequence,
    Text,
    Unreadable,
    is_character,
    problem_of_counts,
)

_ASCII_DIGITS = CharacterSet([(0x30, 0x39)])
_ASCII_WORD = CharacterSet([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_ASCII_SPACE = CharacterSet.of(" \t\n\v\f\r")
_UNICODE_SPACE = CharacterSet.of(
    " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
) | CharacterSet([(0x2000, 0x200A)])
_ASCII = CharacterSet([(0, 0x7F)])
_SYMBOLS = CharacterSet(
    [
        (0xA1, 0xA9), (0xAB, 0xAC), (0xAE, 0xB1), (0xB4, 0xB4), (0xB6, 0xB6), (0xB8, 0xB8), (0xBB, 0xBB), (0xBF, 0xBF),
        (0xD7, 0xD7), (0xF7, 0xF7),
    ]
)  # fmt: skip
"""Symbols of Latin-1 that are in no dialect's `\\w`. Symbols beyond Latin-1 are left out: they would make classes slow
or risky, see `nodes.py`."""
_LINE_ENDS = CharacterSet.of("\n\r\u2028\u2029")

_DIGITS_END = 0x20000
"""Upper bound of the code points of all decimal digits."""

_Bounds = tuple[CharacterSet, CharacterSet]
"""A class in all dialects: the characters that it has in every dialect, and those that it has in at least one
dialect."""


def _negated(bounds: _Bounds) -> _Bounds:
    narrow, wide = bounds
    return ~wide, ~narrow


@cache
def _class_of(kind: str) -> _Bounds:
    """The class of `\\d`, `\\w`, `\\s`, `\\D`, `\\W` or `\\S`; `kind` is the letter."""
    if kind.isupper():
        return _negated(_class_of(kind.lower()))
    if kind == "d":
        return _ASCII_DIGITS, CharacterSet.of("".join(filter(str.isdecimal, map(chr, range(_DIGITS_END)))))
    if kind == "w":
        return _ASCII_WORD, ~((_ASCII | _SYMBOLS) - _ASCII_WORD)
    return _ASCII_SPACE, _UNICODE_SPACE


_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "a": 0x07, "e": 0x1B}

_CODE = re.compile(CODE_ESCAPE)
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_COUNT = re.compile(r"\{([0-9]{1,9})(,([0-9]{1,9})?)?\}")
_CLASS_END = re.compile(r"(?:[^\]\\]|\\.)*", re.DOTALL)
_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_REFUSED_GROUPS = {
    "?=": "a lookahead", "?!": "a lookahead", "?<=": "a lookbehind", "?<!": "a lookbehind", "?>": "an atomic group",
    "?#": "a comment", "?P=": "a back reference", "?(": "a condition",
}  # fmt: skip


def read_regex(pattern: str) -> Node:
    """Read a regular expression, which the whole text must match.

    Raises:
        Unreadable: the expression is malformed, cannot be enforced, or has constructs that dialects read differently.
    """
    return _Reader(pattern).read()


class _Reader:
    """Reads one regular expression from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._ends = _ends_of_groups(pattern)

    def read(self) -> Node:
        node = self._read_choice(depth=0, is_start=True, is_end=True)
        if self._at < len(self._pattern):
            raise self._make_error("a ')' without '('", "remove it, or write '\\)'", self._at)
        return node

    # ------------------------------------------------------------------ structure

    def _read_choice(self, *, depth: int, is_start: bool, is_end: bool) -> Node:
        """Read the options of a group, separated by "|", up to its end.

        Args:
            depth: number of groups around the options.
            is_start: whether the text begins with the group.
            is_end: whether the text ends with the group.
        """
        if depth > MAX_NESTING:
            raise self._make_error(f"groups nested more than {MAX_NESTING} levels deep", "flatten them", self._at)
        options = [self._read_sequence(depth, is_start, is_end)]
        while self._peek() == "|":
            self._at += 1
            options.append(self._read_sequence(depth, is_start, is_end))
        return options[0] if len(options) == 1 else Choice(options)

    def _read_sequence(self, depth: int, is_start: bool, is_end: bool) -> Node:
        parts: list[Node] = []
        end: int | None = None
        while (token := self._peek()) and token not in "|)":
            start = self._at
            if token == "^":
                self._at += 1
                if parts or not is_start:
                    raise self._make_error("a '^' after the start of the text", "remove it, or write '\\^'", start)
                self._refuse_quantifier("'^'")
                continue
            if token == "$":
                self._at += 1
                end = start
                self._refuse_quantifier("'$'")
                continue
            if end is not None:
                raise self._make_error("a '$' before the end of the text", "remove it, or write '\\$'", end)
            parts.append(self._read_quantified(depth, is_start and not parts, is_end))
        if end is not None and not is_end:
            raise self._make_error("a '$' before the end of the text", "remove it, or write '\\$'", end)
        return parts[0] if len(parts) == 1 else Sequence(_joined(parts))

    def _read_quantified(self, depth: int, is_start: bool, is_end: bool) -> Node:
        start = self._at
        if self._peek() == "(":
            behind = self._ends.get(start, len(self._pattern)) + 1
            follower = self._pattern[behind : behind + 1]
            is_repeated = follower in tuple("*+?{")
            node = self._read_group(depth, is_start and not is_repeated, is_end and follower in ("", *"|)$"))
        else:
            node = self._read_single()
        minimum, maximum = self._read_quantifier()
        return node if (minimum, maximum) == (1, 1) else Repeat(node, minimum, maximum)

    def _read_group(self, depth: int, is_start: bool, is_end: bool) -> Node:
        start = self._at
        self._at += 1
        if self._peek() == "?":
            named = _NAME.match(self._pattern, self._at)
            if named:
                self._at = named.end()
            elif self._pattern.startswith("?:", self._at):
                self._at += 2
            else:
                kinds = (what for mark, what in _REFUSED_GROUPS.items() if self._pattern.startswith(mark, self._at))
                raise self._make_error(
                    next(kinds, "a flag, or an unknown group,"), "rewrite the expression without it", start
                )
        node = self._read_choice(depth=depth + 1, is_start=is_start, is_end=is_end)
        if self._peek() != ")":
            raise self._make_error("a '(' without ')'", "close it, or write '\\('", start)
        self._at += 1
        return node

    def _read_quantifier(self) -> tuple[int, int | None]:
        start = self._at
        known = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        minimum: int
        maximum: int | None
        if known is not None:
            minimum, maximum = known
            self._at += 1
        elif self._peek() == "{":
            minimum, maximum = self._read_counts()
        else:
            return 1, 1
        if self._peek() == "?":  # lazy
            self._at += 1
        elif self._peek() == "+":
            raise self._make_error("a possessive quantifier", "remove the second '+'", start)
        self._refuse_quantifier("a quantifier")
        return minimum, maximum

    def _read_counts(self) -> tuple[int, int | None]:
        start = self._at
        found = _COUNT.match(self._pattern, start)
        if not found:
            raise self._make_error("a '{' that begins no {m}, {m,} or {m,n}", "write '\\{', or {0,n} for {,n}", start)
        self._at = found.end()
        minimum = int(found[1])
        maximum = (None if found[3] is None else int(found[3])) if found[2] else minimum
        if problem := problem_of_counts(minimum, maximum):
            raise self._make_error(f"the count {found[0]}", problem, start)
        return minimum, maximum

    def _refuse_quantifier(self, preceding: str) -> None:
        if self._peek() in tuple("*+?") or _COUNT.match(self._pattern, self._at):
            raise self._make_error(
                f"a quantifier after {preceding}", "remove it, or put the part before it in a group", self._at
            )

    # ------------------------------------------------------------------ characters

    def _read_single(self) -> Node:
        start, token = self._at, self._peek()
        if token in tuple("*+?"):
            raise self._make_error(f"a {token!r} with nothing to repeat", f"write '\\{token}'", start)
        if token == "{":
            raise self._make_error("a '{' with nothing to repeat", "write '\\{'", start)
        if token == "[":
            return Characters(self._read_class())
        if token == ".":
            self._at += 1
            return Characters(~_LINE_ENDS)
        if token == "\\":
            escape = self._read_escape()
            return Text(chr(escape)) if isinstance(escape, int) else Characters(escape[0])
        self._at += 1
        return Text(token)

    def _read_class(self) -> CharacterSet:
        start = self._at
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        if self._peek() == "]":
            raise self._make_error("a class that begins with ']'", "write '\\]' for the character", start)
        ranges: list[Range] = []
        narrow, wide = CharacterSet(), CharacterSet()
        while (token := self._peek()) != "]":
            if not token:
                raise self._make_error("a '[' without ']'", "close it, or write '\\['", start)
            first = self._read_member(start)
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                at = self._at
                self._at += 1
                last = self._read_member(start)
                if not (isinstance(first, int) and isinstance(last, int)):
                    raise self._make_error("a range with a class at one end", "write '\\-' for the character", at)
                if last < first:
                    raise self._make_error("a range whose last character is before its first", "swap them", at)
                ranges.append((first, last))
            elif isinstance(first, int):
                ranges.append((first, first))
            else:
                narrow, wide = narrow | first[0], wide | first[1]
        self._at += 1
        listed = CharacterSet(ranges)
        bounds = narrow | listed, wide | listed
        return _negated(bounds)[0] if is_negated else bounds[0]

    def _read_member(self, start: int) -> int | _Bounds:
        """Read a member of a class: the code point of a character, or the bounds of an escaped class such as `\\d`."""
        token = self._peek()
        if token == "\\":
            return self._read_escape(in_class=True)
        if not token:
            raise self._make_error("a '[' without ']'", "close it, or write '\\['", start)
        if token == "[" and self._peek(1) in tuple(":.="):
            raise self._make_error("a POSIX class", "write out its characters", self._at)
        if token in "&-~" and self._peek(1) == token:
            raise self._make_error(f"'{token}{token}' in a class", f"write '\\{token}' for the character", self._at)
        self._at += 1
        return ord(token)

    def _read_escape(self, *, in_class: bool = False) -> int | _Bounds:
        """Read an escape: the code point of its character, or the bounds of its class."""
        start = self._at
        kind = self._peek(1)
        if not kind:
            raise self._make_error("a backslash at its end", "write it as '\\\\'", start)
        if kind in "dDwWsS":
            self._at += 2
            return _class_of(kind)
        if kind in _CONTROLS:
            self._at += 2
            return _CONTROLS[kind]
        if kind == "b" and in_class:
            self._at += 2
            return 0x08
        if kind in "xuU":
            return self._read_code_point(start)
        if kind == "c" and self._peek(2).isascii() and self._peek(2).isalpha():
            self._at += 3
            return ord(self._pattern[start + 2]) % 32
        if kind == "0" and not self._peek(2).isdigit():
            self._at += 2
            return 0
        if (kind.isascii() and kind.isalnum()) or kind in "<>":
            what = {"b": "a word boundary", "B": "a word boundary", "p": "a Unicode class", "P": "a Unicode class"}.get(
                kind
            )
            what = what or ("a back reference or octal escape" if kind.isdigit() else "which dialects read differently")
            raise self._make_error(f"'\\{kind}', {what},", "write out its characters", start)
        self._at += 2
        return ord(kind)

    def _read_code_point(self, start: int) -> int:
        found = _CODE.match(self._pattern, start + 1)
        if not found:
            raise self._make_error(
                f"'\\{self._pattern[start + 1]}' without its hexadecimal digits", "write \\xNN or \\uNNNN", start
            )
        self._at = found.end()
        code = int(found[found.lastindex or 0], 16)
        if FIRST_SURROGATE <= code < 0xDC00 and (low := _LOW_SURROGATE.match(self._pattern, self._at)):
            self._at = low.end()
            return 0x10000 + ((code - FIRST_SURROGATE) << 10) + (int(low[1], 16) - 0xDC00)
        if not is_character(code):
            raise self._make_error(f"the escape '\\{found[0]}' of no valid character", "remove it", start)
        return code

    # ------------------------------------------------------------------ places

    def _peek(self, ahead: int = 0) -> str:
        """The character of the expression `ahead` characters after the current position; "" after the end."""
        return self._pattern[self._at + ahead : self._at + ahead + 1]

    def _make_error(self, problem: str, remedy: str, at: int) -> Unreadable:
        return Unreadable(f"the expression has {problem} at character {at + 1}; {remedy}")


def _ends_of_groups(pattern: str) -> dict[int, int]:
    """Position of each '(' -> position of its ')', as far as the expression is well formed."""
    ends, open_groups, at = dict[int, int](), list[int](), 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            at = _CLASS_END.match(pattern, at + 1).end()  # type: ignore[union-attr]  # it always matches, at least nothing
        elif pattern[at] == "(":
            open_groups.append(at)
        elif pattern[at] == ")" and open_groups:
            ends[open_groups.pop()] = at
        at += 1
    return ends


def _joined(parts: list[Node]) -> list[Node]:
    """The parts, with adjacent texts joined to one text."""
    joined: list[Node] = []
    for part in parts:
        if isinstance(part, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
