"""Reads grammars in llama.cpp's format (GBNF), which vLLM calls EBNF.

    root ::= "a" (digit | [x-z]){1,3}   # a comment
    digit ::= [0-9]

A rule ends where the next rule begins. Texts and classes have the escapes `\\n`, `\\t`, `\\xNN`, `\\uNNNN`,
`\\UNNNNNNNN` and so on, each of a fixed length; `.` is any character.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pointsman.engine.grammar.nodes import (
    CODE_ESCAPE,
    MAX_NESTING,
    Characters,
    CharacterSet,
    Choice,
    Node,
    Range,
    Repeat,
    Rule,
    Sequence,
    Text,
    Unreadable,
    is_character,
    problem_of_counts,
)

ROOT = "root"

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<name>[A-Za-z0-9_][A-Za-z0-9_.\-]*)
    |(?P<defined>::=)
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |\[(?P<class>(?:[^\]\\\n]|\\.)*)\]
    |\{(?P<count>\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?)\}
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(rf"\\(?:{CODE_ESCAPE}|(0)(?![0-9])|(.))|(.)", re.DOTALL)
_ESCAPES = {
    "t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "a": "\a", "b": "\b", "e": "\x1b",
    **{one: one for one in "\\\"'[]-^?/"},
}  # fmt: skip


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def read_grammar(text: str) -> dict[str, Node]:
    """Read the rules of a grammar, `root` among them: name -> node.

    Raises:
        Unreadable: the grammar is malformed, or refers to a rule that it does not define.
    """
    return _Reader(text).read()


class _Reader:
    """Reads one grammar from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split_tokens()
        self._next = 0
        self._rules: dict[str, Node] = {}
        self._named: dict[str, int] = {}
        """Position of the first reference to each rule."""

    def read(self) -> dict[str, Node]:
        while self._peek().kind != "end":
            name = self._peek()
            if not self._is_rule():
                raise self._make_error(f"{name.text!r} where a rule must begin", "write 'name ::= ...'", name.at)
            if name.text in self._rules:
                raise self._make_error(f"a second rule {name.text!r}", "join the two rules with '|'", name.at)
            self._next += 2
            self._rules[name.text] = self._read_choice(depth=0)
            if self._peek().kind != "end" and not self._is_rule():
                raise self._make_error("a ')' without '('", "remove it", self._peek().at)
        for name_of, at in self._named.items():
            if name_of not in self._rules:
                raise self._make_error(f"a reference to the undefined rule {name_of!r}", "define the rule", at)
        if ROOT not in self._rules:
            raise Unreadable(f"the grammar has no rule {ROOT!r}; define it: texts are derived from it")
        return self._rules

    # ------------------------------------------------------------------ structure

    def _read_choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            at = self._peek().at
            raise self._make_error(f"groups nested more than {MAX_NESTING} levels deep", "replace some by rules", at)
        options = [self._read_sequence(depth)]
        while self._peek().text == "|" and self._peek().kind == "mark":
            self._next += 1
            options.append(self._read_sequence(depth))
        return options[0] if len(options) == 1 else Choice(options)

    def _read_sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while not self._is_end_of_sequence():
            parts.append(self._read_quantified(depth))
        return parts[0] if len(parts) == 1 else Sequence(parts)

    def _is_end_of_sequence(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "mark" and token.text in "|)") or self._is_rule()

    def _read_quantified(self, depth: int) -> Node:
        part = self._read_single(depth)
        token = self._peek()
        if not self._is_quantifier():
            return part
        self._next += 1
        if self._is_quantifier():
            raise self._make_error("a quantifier after a quantifier", "put the first in a group", self._peek().at)
        if token.kind == "mark":
            return Repeat(part, 1 if token.text == "+" else 0, 1 if token.text == "?" else None)
        first, comma, last = (one.strip() for one in token.text.partition(","))
        minimum = int(first)
        maximum = (int(last) if last else None) if comma else minimum
        if problem := problem_of_counts(minimum, maximum):
            raise self._make_error(f"the count {{{token.text}}}", problem, token.at)
        return Repeat(part, minimum, maximum)

    def _is_quantifier(self) -> bool:
        token = self._peek()
        return token.kind == "count" or (token.kind == "mark" and token.text in "*+?")

    def _read_single(self, depth: int) -> Node:
        token = self._peek()
        self._next += 1
        if token.kind == "name":
            self._named.setdefault(token.text, token.at)
            return Rule(token.text)
        if token.kind == "text":
            return Text("".join(chr(code) for code, _ in self._code_points(token)))
        if token.kind == "class":
            return Characters(self._read_class(token))
        if token.text == "." and token.kind == "mark":
            return Characters(~CharacterSet())
        if token.text == "(" and token.kind == "mark":
            node = self._read_choice(depth + 1)
            if self._peek().text != ")":
                raise self._make_error("a '(' without ')'", "close it", token.at)
            self._next += 1
            return node
        raise self._make_error(f"{token.text!r} with nothing before it", "write an expression before it", token.at)

    # ------------------------------------------------------------------ characters

    def _read_class(self, token: _Token) -> CharacterSet:
        is_negated = token.text.startswith("^")
        members = _Token(token.kind, token.text[is_negated:], token.at + is_negated)
        codes = self._code_points(members)
        ranges: list[Range] = []
        at = 0
        while at < len(codes):
            first = last = codes[at][0]
            if at + 2 < len(codes) and codes[at + 1] == (ord("-"), False):
                last = codes[at + 2][0]
                at += 2
            if last < first:
                raise self._make_error("a range whose last character is before its first", "swap them", token.at)
            ranges.append((first, last))
            at += 1
        characters = CharacterSet(ranges)
        return ~characters if is_negated else characters

    def _code_points(self, lexeme: _Token) -> list[tuple[int, bool]]:
        """The code point of each character of a text or a class, and whether it is written as an escape."""
        codes = []
        for found in _CHARACTER.finditer(lexeme.text):
            *numbers, null, letter, plain = found.groups()
            number = next((one for one in numbers if one is not None), None)
            if number is not None:
                code = int(number, 16)
            elif null is not None:
                code = 0
            elif letter is not None:
                if letter not in _ESCAPES:
                    remedy = "write \\xNN, \\uNNNN, or the character itself"
                    raise self._make_error(f"the unknown escape {found[0]!r}", remedy, lexeme.at)
                code = ord(_ESCAPES[letter])
            else:
                code = ord(plain)
            if not is_character(code):
                raise self._make_error(f"the escape {found[0]!r} of no valid character", "remove it", lexeme.at)
            codes.append((code, plain is None))
        return codes

    # ------------------------------------------------------------------ tokens

    def _split_tokens(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                raise self._make_error(f"an unexpected {self._text[at]!r}", "correct or remove it", at)
            kind = found.lastgroup or ""
            if kind != "space":
                tokens.append(_Token(kind, found[kind], at))
            at = found.end()
        return [*tokens, _Token("end", "its end", len(self._text)), _Token("end", "its end", len(self._text))]

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _is_rule(self) -> bool:
        """Whether a rule begins at the next token."""
        return self._peek().kind == "name" and self._tokens[self._next + 1].kind == "defined"

    def _make_error(self, problem: str, remedy: str, at: int) -> Unreadable:
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return Unreadable(f"the grammar has {problem} at line {line}, column {column}; {remedy}")
