"""GrammarTree: changes a grammar after xgrammar has read it and before it is compiled.

xgrammar exports a grammar as JSON: rules, each with the number of an expression, and expressions that refer to rules
and to each other by number. The methods find and change rules and expressions:

- `exclude_surrogates`: remove halves of surrogate pairs, which xgrammar allows, from classes such as `[^a]`;
- `replace_bodies`: give a rule the body of a rule of another grammar;
- `excluded_names`: find the names that an object's additional properties may not have; xgrammar excludes them only
  partly;
- `placeholder_rules`: find the rules of placeholder texts;
- `remove_empty_options`: remove options that allow no text. A model that chose such an option could never end its text.

`tests/engine/grammar/test_schema.py` fails if a new version of xgrammar has another format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from pointsman.engine.grammar.nodes import FIRST_SURROGATE, LAST_SURROGATE

if TYPE_CHECKING:
    import xgrammar

TEXT, CLASS, CLASS_STAR, EMPTY, RULE, SEQUENCE, CHOICES, TAGS, REPEAT = range(9)
"""Kinds of expressions, as xgrammar numbers them. Kinds with higher numbers contain no other expressions."""


class GrammarTree:
    """A copy of one grammar as rules and expressions, for changes.

    Args:
        grammar: the grammar to copy.
    """

    def __init__(self, grammar: xgrammar.Grammar) -> None:
        self._content: dict[str, Any] = json.loads(grammar.serialize_json())
        self._rules: list[list[Any]] = self._content["rules"]
        data, starts = self._content["grammar_expr_data"], self._content["grammar_expr_indptr"]
        self._expressions = [(data[at], data[at + 2 : at + 2 + data[at + 1]]) for at in starts]

    def grammar(self) -> xgrammar.Grammar:
        """Make xgrammar's grammar with all changes."""
        import xgrammar

        data, starts = list[int](), list[int]()
        for kind, payload in self._expressions:
            starts.append(len(data))
            data += (kind, len(payload), *payload)
        self._content["grammar_expr_data"], self._content["grammar_expr_indptr"] = data, starts
        return xgrammar.Grammar.deserialize_json(json.dumps(self._content))

    def rule(self, name: str) -> int:
        """The number of the rule with a name.

        Raises:
            KeyError: there is no rule of this name.
        """
        for number, rule in enumerate(self._rules):
            if rule[0] == name:
                return number
        raise KeyError(name)

    def add_rules(self, other: GrammarTree, prefix: str) -> dict[str, int]:
        """Add the rules of another grammar, with `prefix` before their names.

        Returns:
            Name of a rule in the other grammar -> the rule's number in this grammar.
        """
        first_rule, first_expression = len(self._rules), len(self._expressions)
        for kind, payload in other._expressions:
            if kind in (SEQUENCE, CHOICES):
                payload = [one + first_expression for one in payload]
            elif kind == RULE:
                payload = [payload[0] + first_rule]
            elif kind == REPEAT:
                payload = [payload[0] + first_rule, *payload[1:]]
            self._expressions.append((kind, payload))
        for name, body, lookahead, *rest in other._rules:
            shifted = lookahead if lookahead < 0 else lookahead + first_expression
            self._rules.append([f"{prefix}{name}", body + first_expression, shifted, *rest])
        return {rule[0]: first_rule + number for number, rule in enumerate(other._rules)}

    def replace_bodies(self, replacements: Mapping[int, int]) -> None:
        """Replace the bodies of rules. `replacements`: number of the rule whose body is replaced -> number of the rule
        with the new body.

        A new body that is a single sequence is inlined in the sequences that refer to the rule: xgrammar cannot look
        ahead behind a rule that ends with a long repetition, and each token of the repetition would take milliseconds.
        """
        parts: dict[int, list[int]] = {}
        for replaced, replacement in replacements.items():
            body = self._rules[replaced][1] = self._rules[replacement][1]
            kind, options = self._expressions[body]
            if kind == CHOICES and len(options) == 1 and self._expressions[options[0]][0] == SEQUENCE:
                parts[replaced] = self._expressions[options[0]][1]
        named = {
            number: parts[payload[0]]
            for number, (kind, payload) in enumerate(self._expressions)
            if kind == RULE and payload[0] in parts
        }
        for number, (kind, payload) in enumerate(self._expressions):
            if kind == SEQUENCE and not named.keys().isdisjoint(payload):
                spliced = chain.from_iterable(named.get(one, [one]) for one in payload)
                self._expressions[number] = SEQUENCE, list(spliced)

    def placeholder_rules(self, mark: str) -> dict[str, list[int]]:
        """The rules of placeholder texts, whose whole text is `mark` and a name: name -> numbers of the rules.

        Raises:
            RuntimeError: `mark` also occurs elsewhere, because xgrammar writes such texts in another format.
        """
        found: dict[str, list[int]] = {}
        expected = sum(kind == TEXT and bytes(payload).startswith(mark.encode()) for kind, payload in self._expressions)
        for number, rule in enumerate(self._rules):
            text = self._only_text(rule[1])
            if text.startswith(mark):
                found.setdefault(text.removeprefix(mark), []).append(number)
        if sum(map(len, found.values())) != expected:
            raise RuntimeError(
                "the installed xgrammar exports patterns in an unknown format; pip install 'pointsman[engine]'"
            )
        return found

    def excluded_names(self) -> dict[int, list[str]]:
        """The rules for names of additional properties: number of the rule -> the names that the rule excludes.

        xgrammar spells the names byte by byte, with a rule for each byte, and wrongly allows names that begin with
        another byte of the same character.

        Raises:
            RuntimeError: xgrammar writes these rules in another format.
        """
        found = {}
        for rule in self._rules:
            if rule[0].endswith("_addl_key"):
                ((quote, start),) = self._body_options(rule[1])
                if (quote, start[0]) != ((TEXT, b'"'), RULE):
                    raise RuntimeError(
                        "the installed xgrammar exports names in an unknown format; pip install 'pointsman[engine]'"
                    )
                found[start[1][0]] = [name.decode() for name in self._spelled_names(start[1][0])]
        return found

    def _spelled_names(self, start: int) -> Iterator[bytes]:
        """The names that a rule spells out byte by byte but does not accept as complete, and so excludes."""
        open_rules = [(start, b"")]
        while open_rules:
            rule, before = open_rules.pop()
            options = self._body_options(self._rules[rule][1])
            if [(TEXT, b'"')] not in options:
                yield before
            longer = (option for option in options if len(option) == 2 and option[0][0] == TEXT)
            open_rules += [(rest[1][0], before + text[1]) for text, rest in longer]

    def _body_options(self, body: int) -> list[list[tuple[int, Any]]]:
        """The options of a rule's body, each a sequence of (kind, payload); the payload of a text is its bytes."""
        found = []
        for option in self._expressions[body][1]:
            kind, payload = self._expressions[option]
            parts = [self._expressions[one] for one in payload] if kind == SEQUENCE else []
            found.append([(kind, bytes(payload) if kind == TEXT else payload) for kind, payload in parts])
        return found

    def _only_text(self, expression: int) -> str:
        """The only text that an expression allows; "" if it allows several texts or none."""
        kind, payload = self._expressions[expression]
        if kind == TEXT:
            return bytes(payload).decode("utf-8", "replace")
        if kind == SEQUENCE or (kind == CHOICES and len(payload) == 1):
            texts = [self._only_text(one) for one in payload]
            return "".join(texts) if all(texts) else ""
        return ""

    def exclude_surrogates(self) -> None:
        """Exclude surrogates from each negated class, because no text contains surrogates."""
        for number, (kind, payload) in enumerate(self._expressions):
            if kind in (CLASS, CLASS_STAR) and payload[0]:
                self._expressions[number] = kind, [*payload, FIRST_SURROGATE, LAST_SURROGATE]

    # ------------------------------------------------------------------ options without text

    def remove_empty_options(self) -> bool:
        """Remove options that allow no text.

        Returns:
            Whether the grammar allows any text.
        """
        allows = self._allows_text()
        for number, (kind, payload) in enumerate(self._expressions):
            if kind == CHOICES:
                self._expressions[number] = kind, [one for one in payload if allows[one]]
            elif kind == REPEAT and not allows[self._rules[payload[0]][1]]:
                self._expressions[number] = EMPTY, []  # zero repetitions; more would need a text of the rule
        body: int = self._rules[self._content["root_rule_id"]][1]
        return allows[body]

    def _allows_text(self) -> list[bool]:
        """[expressions] whether each expression allows any text. The least fixed point is computed in linear time."""
        allows = [False] * len(self._expressions)
        missing = [0] * len(self._expressions)
        holders: list[list[int]] = [[] for _ in self._expressions]
        news: list[int] = []
        for number, (kind, payload) in enumerate(self._expressions):
            needs = payload if kind in (SEQUENCE, CHOICES) else ()
            if kind == RULE or (kind == REPEAT and payload[1] > 0):
                needs = (self._rules[payload[0]][1],)
            for one in needs:
                holders[one].append(number)
            missing[number] = len(needs) if kind == SEQUENCE else min(len(needs), 1)
            if kind in (CLASS, CLASS_STAR):
                is_empty = kind == CLASS and not payload[0] and len(payload) == 1
                missing[number] = int(is_empty)
            if kind == CHOICES and not payload:
                missing[number] = 1
            if not missing[number]:
                news.append(number)
        while news:
            number = news.pop()
            if allows[number]:
                continue
            allows[number] = True
            for holder in holders[number]:
                missing[holder] -= 1
                if missing[holder] <= 0:
                    news.append(holder)
        return allows
