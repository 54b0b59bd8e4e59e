"""Random regular expressions, grammars and JSON schemas, over an alphabet of characters that parsers often get wrong.

Each is made as a whole, with a form that an independent validator reads: Python's `re`, Lark, `jsonschema`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jsonschema
from hypothesis import strategies as st

LETTERS = "ab41Zxéüß°½ñЖλع日本語한😀𝔸ê" + "\u0301\u200d\u2028\xa0\x7f"
SIGNS = " !#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\"£§"
CONTROLS = "\t\n\r\f\v\x01\x1b"
ALPHABET = LETTERS + SIGNS + CONTROLS

characters = st.sampled_from(ALPHABET)
texts = st.text(characters, max_size=5)


# ------------------------------------------------------------------------------------------------- expressions


def _as_escape(draw: Any, character: str, wide: str = "U") -> str:
    """A character written as one of the escapes that name its code point."""
    code = ord(character)
    forms = [f"\\U{code:08x}"] if wide == "U" else [f"\\u{{{code:x}}}"]
    if code < 0x10000:
        forms.append(f"\\u{code:04X}")
    if code < 0x100:
        forms.append(f"\\x{code:02x}")
    return draw(st.sampled_from(forms))


@st.composite
def _literal(draw: Any) -> str:
    character = draw(characters)
    if draw(st.integers(0, 2)) == 0:
        return _as_escape(draw, character)
    return re.escape(character) if character in SIGNS or character in CONTROLS else character


@st.composite
def _member(draw: Any) -> str:
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.sampled_from([r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n", r"\t"]))
    first, last = sorted(draw(st.tuples(characters, characters)))
    if kind in (1, 2):
        return f"{_as_escape(draw, first)}-{_as_escape(draw, last)}"
    return _as_escape(draw, first) if first in SIGNS + CONTROLS or kind == 3 else first


@st.composite
def _class(draw: Any) -> str:
    members = draw(st.lists(_member(), min_size=1, max_size=4))
    return f"[{draw(st.sampled_from(['', '^']))}{''.join(members)}]"


_atoms = st.one_of(_literal(), _class(), st.sampled_from([".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\n"]))
_quantifiers = st.sampled_from(["", "", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "{0}"])


def _group(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A group that is repeated a few times at most, because Python tries every division of a text among nested
    repetitions."""
    counts = st.sampled_from(["", "", "?", "{2}", "{0,2}"])
    return st.builds("{0}{1}){2}".format, st.sampled_from(["(", "(?:"]), inner, counts)


def _sequences(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.lists(parts, max_size=4).map("".join), min_size=1, max_size=3).map("|".join)


_parts = st.builds("{0}{1}".format, _atoms, _quantifiers)
expressions = st.recursive(_sequences(_parts), lambda inner: _sequences(st.one_of(_parts, _group(inner))), max_leaves=6)
"""Regular expressions in Python's syntax. The engine may refuse an expression, and an expression may allow no text."""


def is_match(expression: str, text: str) -> bool:
    """Whether the whole text matches the expression, with character classes limited to ASCII."""
    return re.fullmatch(expression, text, re.ASCII) is not None


# ------------------------------------------------------------------------------------------------- grammars


class Grammar(NamedTuple):
    """A grammar in two languages: GBNF and Lark's."""

    gbnf: str
    lark: str


class _Part(NamedTuple):
    gbnf: str
    lark: str


def _in_lark(character: str) -> str:
    """A character of a class in Lark's syntax. Lark replaces escapes by characters before it reads the class."""
    return f"\\{character}" if character in SIGNS and character not in ' "' else f"\\U{ord(character):08x}"


def _lark_class(ranges: list[tuple[str, str]], is_negated: bool) -> str:
    inside = "".join(f"{_in_lark(first)}-{_in_lark(last)}" for first, last in ranges)
    return f"/[{'^' if is_negated else ''}{inside}]/"


@st.composite
def _terminal(draw: Any) -> _Part:
    if draw(st.booleans()):
        text = draw(st.text(characters, min_size=1, max_size=3))
        written = []
        for character in text:
            is_special = character in '"\\' or character in CONTROLS
            as_number = is_special or draw(st.integers(0, 2)) == 0
            written.append(_as_escape(draw, character) if as_number else character)
        return _Part(f'"{"".join(written)}"', " ".join(_lark_class([(one, one)], False) for one in text))
    ranges = [tuple(sorted(draw(st.tuples(characters, characters)))) for _ in range(draw(st.integers(1, 3)))]
    is_negated = draw(st.integers(0, 3)) == 0
    members = []
    for first, last in ranges:
        ends = [
            _as_escape(draw, one) if one in SIGNS + CONTROLS or draw(st.booleans()) else one for one in (first, last)
        ]
        members.append(ends[0] if first == last else "-".join(ends))
    return _Part(f"[{'^' if is_negated else ''}{''.join(members)}]", _lark_class(ranges, is_negated))  # type: ignore[arg-type]


@st.composite
def grammars(draw: Any) -> Grammar:
    """A grammar of some rules, which may refer to each other or to themselves."""
    num_rules = draw(st.integers(1, 4))
    names = ["root", *(f"r-{number}" for number in range(1, num_rules))]
    larks = ["start", *(f"r{number}" for number in range(1, num_rules))]
    counted: list[str] = []

    def part(depth: int) -> _Part:
        kind = draw(st.integers(0, 5 if depth else 3))
        if kind <= 2:
            made = draw(_terminal())
        elif kind == 3:
            number = draw(st.integers(0, num_rules - 1))
            made = _Part(names[number], larks[number])
        else:
            inner = choice(depth - 1)
            made = _Part(f"({inner.gbnf})", inner.lark)
        count = draw(st.sampled_from(["", "", "", "", "*", "+", "?", "{2}", "{1,2}"]))
        # In Lark each has a rule: options within a rule would become alternatives for each of their combinations.
        one, name = f"one{len(counted)}", f"counted{len(counted)}"
        repeated = {"": one, "*": f"| {name} {one}", "+": f"{one} | {name} {one}", "?": f"| {one}"}
        repeated |= {"{2}": f"{one} {one}", "{1,2}": f"{one} | {one} {one}"}
        counted.append(f"{one}: {made.lark}\n{name}: {repeated[count]}")
        return _Part(f"{made.gbnf}{count}", name)

    def choice(depth: int) -> _Part:
        options = [[part(depth) for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 3)))]
        return _Part(
            " | ".join(" ".join(one.gbnf for one in option) for option in options),
            " | ".join(" ".join(one.lark for one in option) for option in options),
        )

    bodies = [choice(2) for _ in range(num_rules)]
    space = draw(st.sampled_from(["\n", "\n\n", " # é\n"]))
    return Grammar(
        space.join(f"{name} ::= {body.gbnf}" for name, body in zip(names, bodies, strict=True)),
        "\n".join((*(f"{name}: {body.lark}" for name, body in zip(larks, bodies, strict=True)), *counted)),
    )


# ------------------------------------------------------------------------------------------------- schemas


_names = st.text(characters, min_size=1, max_size=3)
_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none(), st.sampled_from([0.5, -2.25, 1e30])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_names, inner, max_size=2)),
    max_leaves=3,
)
_patterns = st.one_of(
    expressions,
    expressions.map(lambda one: f"^(?:{one})$"),
    st.sampled_from(["^[éa]b$", "^\\x41b$", "^.{1,3}$", "^[^a]$", "^\\S+$", '^["\\\\]{2}$', "^\\t?x$"]),
)


@st.composite
def _object(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    kind = draw(st.integers(0, 3))
    if kind <= 1:
        schema["properties"] = draw(st.dictionaries(_names, inner, max_size=3))
        schema["required"] = [name for name in schema["properties"] if draw(st.booleans())]
        schema["additionalProperties"] = draw(st.one_of(st.just(False), st.just(False), inner))
    elif kind == 2:
        pattern = draw(_patterns) or "^$"  # jsonschema takes an empty one for none
        schema["patternProperties"] = {pattern: draw(inner)}
        schema["additionalProperties"] = False
    else:
        schema["propertyNames"] = {"type": "string", "pattern": draw(_patterns)}
        schema["additionalProperties"] = draw(inner)
    if draw(st.integers(0, 3)) == 0:
        schema["minProperties"] = draw(st.integers(0, 2))
        schema["maxProperties"] = schema["minProperties"] + draw(st.integers(0, 2))
    return schema


@st.composite
def _array(draw: Any, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, max_size=2))
        schema["items"] = draw(st.one_of(st.just(False), inner))
    else:
        schema["items"] = draw(inner)
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 2))
        schema["maxItems"] = schema["minItems"] + draw(st.integers(0, 2))
    return schema


@st.composite
def _number(draw: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number", ["integer", "null"]]))}
    numbers = st.one_of(st.integers(-120, 120), st.sampled_from([0.5, -1.25, 3.75, 10**12, -(10**17), 2**62]))
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if draw(st.integers(0, 3)) == 0:
            schema[key] = draw(numbers)
    return schema


@st.composite
def _string(draw: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = draw(st.integers(0, 2))
    if kind == 0:
        schema["pattern"] = draw(_patterns)
    elif kind == 1:
        schema["minLength"] = draw(st.integers(0, 3))
        schema["maxLength"] = schema["minLength"] + draw(st.integers(0, 3))
    return schema


_leaves = st.one_of(
    _string(),
    _string(),
    _number(),
    st.lists(_values, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _values.map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": []}, {"type": []}, {"anyOf": []}, True, {}]),
)
_schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        _object(inner),
        _object(inner),
        _array(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda many: {"anyOf": many}),
    ),
    max_leaves=5,
)


@st.composite
def schemas(draw: Any) -> dict[str, Any]:
    """A JSON schema that may have references to its own parts, with names that a JSON pointer must escape."""
    schema = draw(_schemas)
    if not isinstance(schema, dict) or draw(st.integers(0, 2)):
        return {"anyOf": [schema]} if not isinstance(schema, dict) else schema
    names = draw(
        st.lists(st.sampled_from(["a/b", "a~b", "ä", "a%b", "A", "$x", "c d"]), min_size=1, max_size=3, unique=True)
    )
    pointers = {name: "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace("%", "%25") for name in names}
    definitions: dict[str, Any] = {}
    for name in names:
        other = {"$ref": pointers[draw(st.sampled_from(names))]}
        definitions[name] = draw(
            st.one_of(_schemas, st.just(other),
                      st.just({"type": "array", "items": other, "maxItems": 2}))
        )  # fmt: skip
    whole = {
        "type": "object",
        "properties": {"v": schema, "w": {"$ref": pointers[names[0]]}},
        "required": ["w"],
        "additionalProperties": False,
        "$defs": definitions,
    }
    return whole


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Any:
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, _: Any) -> Any:
    for pattern, schema in patterns.items():
        for name, one in value.items() if isinstance(value, dict) else ():
            if re.search(pattern, name, re.ASCII):
                yield from validator.descend(one, schema)


_ASCII_CLASSES: Any = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def is_valid(schema: Any, value: Any) -> bool:
    """Whether a value is valid under a schema, with the character classes of patterns limited to ASCII."""
    validator = _ASCII_CLASSES(schema)
    return not list(validator.iter_errors(value))
