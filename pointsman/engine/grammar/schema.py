"""Makes grammars of JSON schemas, and corrects the parts that xgrammar reads differently from JSON Schema.

    tree = schema_tree('{"type": "string", "pattern": "^é\\\\d+$"}', any_whitespace=True, max_whitespace=16)

Some parts of a schema are not given to xgrammar: patterns, strings with a minimum or maximum length, numbers, escapes,
and names of additional properties. Instead xgrammar makes a rule for each such part, and the rule's body is replaced by
Pointsman's own grammar afterwards (`tree.py`). For a pattern, xgrammar gets a placeholder text instead.

- A pattern describes the whole string. A character that JSON must escape is escaped if it is the only choice, and is
  left out of a class that has other characters.
- A number without bounds in the schema has at most `INTEGER_DIGITS` digits before the point, so that it fits into 64
  bits, `FRACTION_DIGITS` after it, and `EXPONENT_DIGITS` in its exponent. Otherwise a weak model would write digits up
  to its token limit.
- The name of an object's additional property is none of the names in the object's schema, written with escapes or
  without.
- An escape is never half of a surrogate pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pointsman.engine.grammar.nodes import (
    Characters,
    CharacterSet,
    Choice,
    Node,
    Repeat,
    Rule,
    Sequence,
    Text,
    Unreadable,
    written_rules,
)
from pointsman.engine.grammar.regex import read_regex
from pointsman.engine.grammar.tree import GrammarTree
from pointsman.engine.params.json_schema import FRACTION_DIGITS, INTEGER_DIGITS, map_subschemas

EXPONENT_DIGITS = 2
_MARK = "\ue000"
"""First character of placeholder texts. xgrammar makes a separate rule for the text of a pattern, without quotation
marks; all other texts of a schema have quotation marks."""

_NEED_ESCAPES = CharacterSet([(0, 0x1F)]) | CharacterSet.of('"\\')
_ANY_CHARACTER = Characters(~_NEED_ESCAPES)
_DIGIT = Characters(CharacterSet.of("0123456789"))
_INTEGER: Node = Choice([
    Text("0"),
    Sequence([
        Repeat(Text("-"), 0, 1), Characters(CharacterSet.of("123456789")), Repeat(_DIGIT, 0, INTEGER_DIGITS - 1),
    ]),
])  # fmt: skip
_NUMBER: Node = Sequence([
    Repeat(Text("-"), 0, 1),
    Choice([
        Text("0"),
        Sequence([Characters(CharacterSet.of("123456789")), Repeat(_DIGIT, 0, INTEGER_DIGITS - 1)]),
    ]),
    Repeat(Sequence([Text("."), Repeat(_DIGIT, 1, FRACTION_DIGITS)]), 0, 1),
    Repeat(Sequence([
        Characters(CharacterSet.of("eE")), Repeat(Characters(CharacterSet.of("+-")), 0, 1),
        Repeat(_DIGIT, 1, EXPONENT_DIGITS),
    ]), 0, 1),
])  # fmt: skip


_HEXADECIMAL = Characters(CharacterSet.of("0123456789abcdefABCDEF"))
_ESCAPE: Node = Choice([
    Characters(CharacterSet.of('"\\/bfnrt')),
    Sequence([Text("u"), Characters(CharacterSet.of("0123456789abcefABCEF")), Repeat(_HEXADECIMAL, 3, 3)]),
    Sequence([
        Text("u"), Characters(CharacterSet.of("dD")), Characters(CharacterSet.of("01234567")),
        Repeat(_HEXADECIMAL, 2, 2),
    ]),
    Sequence([
        Text("u"), Characters(CharacterSet.of("dD")), Characters(CharacterSet.of("89abAB")), Repeat(_HEXADECIMAL, 2, 2),
        Text("\\u"), Characters(CharacterSet.of("dD")), Characters(CharacterSet.of("cdefCDEF")),
        Repeat(_HEXADECIMAL, 2, 2),
    ]),
])  # fmt: skip
"""The text after a backslash in a JSON string. Surrogates must form pairs, because parsers may refuse half of a
pair."""
_CHARACTERS: Node = Choice([
    Text('"'),
    Sequence([_ANY_CHARACTER, Rule("characters")]),
    Sequence([Text("\\"), Rule("escape"), Rule("characters")]),
])  # fmt: skip
"""The remaining characters of a JSON string after its beginning, and the quotation mark at its end."""


def schema_tree(text: str, *, any_whitespace: bool, max_whitespace: int) -> GrammarTree:
    """Make the grammar of a schema that `prepare_schema` has prepared.

    Raises:
        Unreadable: a pattern of the schema cannot be enforced.
        RuntimeError: xgrammar cannot read the schema.
    """
    import xgrammar

    rules: dict[str, Node] = {"integer": _INTEGER, "number": _NUMBER, "escape": _ESCAPE, "characters": _CHARACTERS}
    schema = _with_placeholders(json.loads(text), rules)
    tree = GrammarTree(
        xgrammar.Grammar.from_json_schema(
            json.dumps(schema, ensure_ascii=False),
            any_whitespace=any_whitespace,
            separators=None if any_whitespace else (",", ":"),
            max_whitespace_cnt=max_whitespace if any_whitespace else None,
        )
    )
    tree.exclude_surrogates()
    places = tree.placeholder_rules(_MARK)
    places |= {name: [tree.rule(f"basic_{name}")] for name in ("integer", "number", "escape")}
    for number, (place, names) in enumerate(tree.excluded_names().items()):
        free = f"names-{number}"
        _add_free_names(free, names, rules)
        places[free] = [place]
    # Without this root xgrammar would drop rules that the root does not reach.
    rules["any"] = Choice([Rule(name) for name in rules])
    own = GrammarTree(xgrammar.Grammar.from_ebnf(written_rules(rules), root_rule_name="any"))
    added = tree.add_rules(own, "own_")
    tree.replace_bodies({number: added[name] for name, numbers in places.items() for number in numbers})
    return tree


def _with_placeholders(schema: Any, rules: dict[str, Node]) -> Any:
    """Copy a schema with each pattern or length replaced by a placeholder pattern, whose rule is added to `rules`."""
    if not isinstance(schema, Mapping):
        return schema
    changed = map_subschemas(schema, lambda one, _: _with_placeholders(one, rules))
    if "patternProperties" in changed:
        patterns = changed["patternProperties"].items()
        changed["patternProperties"] = {_add_placeholder(_json_string(name), rules): one for name, one in patterns}
    if "pattern" in changed:
        changed["pattern"] = _add_placeholder(_json_string(changed["pattern"]), rules)
    elif "minLength" in changed or "maxLength" in changed:
        minimum, maximum = changed.pop("minLength", 0), changed.pop("maxLength", None)
        changed["pattern"] = _add_placeholder(Repeat(_ANY_CHARACTER, minimum, maximum), rules)
    return changed


def _add_free_names(rule: str, names: Iterable[str], rules: dict[str, Node]) -> None:
    """Add a rule for any JSON string except `names`, without the opening quotation mark. The rule is a trie, with a
    rule for each prefix of a name. A string may not have escapes in the prefix that it shares with a name, because
    escapes could spell the name in another way.
    """
    trie: list[dict[str, int]] = [{}]
    ends = set()
    for name in names:
        at = 0
        for one in name:
            if one not in trie[at]:
                trie[at][one] = len(trie)
                trie.append({})
            at = trie[at][one]
        ends.add(at)
    called = [rule, *(f"{rule}-{number}" for number in range(1, len(trie)))]
    for at, following in enumerate(trie):
        others = Characters(_ANY_CHARACTER.characters - CharacterSet.of("".join(following)))
        options: list[Node] = [] if at in ends else [Text('"')]
        options.append(Sequence([others, Rule("characters")]))
        options += [Sequence([Text(_escaped_text(one)), Rule(called[end])]) for one, end in following.items()]
        rules[called[at]] = Choice(options)


def _add_placeholder(node: Node, rules: dict[str, Node]) -> str:
    """Add a rule for a node; return the placeholder pattern for xgrammar that stands for it."""
    name = f"pattern-{len(rules)}"
    rules[name] = node
    return f"^{_MARK}{name}$"


def _json_string(pattern: str) -> Node:
    """The node for a JSON string, without quotation marks, whose value matches a pattern."""
    try:
        return _escaped_for_json(read_regex(pattern))
    except Unreadable as error:
        raise Unreadable(
            f"in the pattern {pattern if len(pattern) <= 60 else pattern[:57] + '...'!r} {error}"
        ) from None


def _escaped_for_json(node: Node) -> Node:
    match node:
        case Text(text):
            return Text(_escaped_text(text))
        case Characters(characters):
            plain = characters - _NEED_ESCAPES
            if plain or not characters:
                return Characters(plain)
            return Choice([
                Text(_escaped_text(chr(code))) for first, last in characters.ranges for code in range(first, last + 1)
            ])  # fmt: skip
        case Sequence(parts):
            return Sequence([_escaped_for_json(part) for part in parts])
        case Choice(options):
            return Choice([_escaped_for_json(option) for option in options])
        case Repeat(part, minimum, maximum):
            return Repeat(_escaped_for_json(part), minimum, maximum)
        case _:
            return node


def _escaped_text(text: str) -> str:
    """A text as the content of a JSON string, without quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
