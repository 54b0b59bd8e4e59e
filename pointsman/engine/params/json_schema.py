"""JSON schemas as they are enforced.

The compiler of grammars leaves out what it does not know, silently or with a warning, and the output would then break
a schema that it was promised to keep. So a schema that says something of the kind is refused when it is given, with
the keyword and where it stands. Only places where a schema may stand are looked at: a property may well be called
"contains".

What the compiler reads otherwise than JSON Schema means it is rewritten: an object or array of which the schema
says nothing more may hold anything; an e-mail address is given as a pattern.

A schema comes from a client, and is checked while other requests wait: all of it takes time in proportion to
its length.

One keyword means less than it says: of the schemas in `oneOf` at least one holds, as in `anyOf`. Schemas that
describe tagged unions are written so, and there it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

MAX_DEPTH = 32
"""Levels of schemas within schemas."""
MAX_NESTING = 128
"""Levels of objects and arrays within each other, in values that are listed, too."""

FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference",
    "uri-template", "uuid",
)  # fmt: skip
"""Values of `format` that the compiler knows, and whose texts need no escapes in JSON."""
EMAIL = (
    r"^[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9]([A-Za-z0-9\-]*[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9\-]*[A-Za-z0-9])?)+$"
)

NEVER = (
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "multipleOf", "not", "then", "uniqueItems",
)  # fmt: skip
"""Keywords that would be ignored."""
_IGNORED = frozenset(NEVER)

_ONE = (
    "additionalItems", "additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_ANNOTATIONS = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
    "example", "examples", "nullable", "readOnly", "title", "writeOnly",
}  # fmt: skip
_NEED_TYPE = (
    "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "pattern",
)  # fmt: skip
_SAYS_OBJECT = ("additionalProperties", "patternProperties", "properties", "propertyNames", "unevaluatedProperties")
_SAYS_ARRAY = ("items", "prefixItems", "unevaluatedItems")

_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}


_Path: TypeAlias = "tuple[_Path, str | int] | None"
"""Where a schema stands: the path of the one around it, and the step from there. It is written out for errors only."""


def prepare_schema(schema: Any) -> Any:
    """A schema, as `json.loads` gives it, as the compiler shall read it, with everything within.

    Raises:
        ValueError: it is no schema, is nested too deeply, or says what cannot be enforced.
    """
    within = [schema]
    for _ in range(MAX_NESTING + 1):
        if not within:
            return _prepare(schema, None, 1)
        nested = [one for one in within if isinstance(one, (Mapping, list))]
        within = [value for one in nested for value in (one.values() if isinstance(one, Mapping) else one)]
    raise ValueError(f"the JSON schema is nested too deeply, and the maximum is {MAX_NESTING} levels; flatten it")


def _prepare(schema: Any, path: _Path, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(
            f"the JSON schema has {_shown(schema)} where a schema belongs, at {_written(path)}; correct it"
        )
    if depth > MAX_DEPTH:
        raise ValueError(
            f"the JSON schema is nested more than {MAX_DEPTH} levels deep, at {_written(path)}; flatten it"
        )
    if not schema:
        return {}
    problem = _problem(schema)
    if problem:
        raise ValueError(f"the JSON schema cannot be enforced at {_written(path)}: {problem}")
    prepared = dict(schema)
    for key in _ONE:
        if key in schema:
            prepared[key] = _prepare(schema[key], (path, key), depth + 1)
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            prepared[key] = [_prepare(one, ((path, key), at), depth + 1) for at, one in enumerate(schema[key])]
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            prepared[key] = {name: _prepare(one, ((path, key), name), depth + 1) for name, one in schema[key].items()}
    types = _types(schema)
    if "object" in types and not any(key in schema for key in _SAYS_OBJECT):
        prepared["additionalProperties"] = True
    if "array" in types and not any(key in schema for key in _SAYS_ARRAY):
        prepared["items"] = True
    if prepared.get("format") == "email":
        del prepared["format"]
        prepared["pattern"] = EMAIL
    return prepared


def _problem(schema: Mapping[str, Any]) -> str | None:
    """What a schema says, not looking within, that would be ignored."""
    for key in () if _IGNORED.isdisjoint(schema) else NEVER:
        if schema.get(key) not in (None, False):
            return f"the keyword {key!r} is not supported; remove it"
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        return f"$ref is {_shown(reference)}; refer to a part of this schema (#/$defs/...)"
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        beside = sorted(set(schema) - _ANNOTATIONS - {key}) if key in schema else ()
        if beside:
            return f"{key!r} stands beside {beside[0]!r}; put them into one schema"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "'allOf' has more than one schema; merge them"
    return _problem_of_values(schema) or _problem_of_strings(schema) or _problem_of_objects(schema)


def _problem_of_values(schema: Mapping[str, Any]) -> str | None:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    types = _types(schema)
    unknown = [one for one in types if not isinstance(one, str) or one not in _OF_TYPE]
    if unknown:
        return f"the type {_shown(unknown[0])} is not known; use one of {', '.join(_OF_TYPE)}"
    if values is None:
        untyped = [key for key in _NEED_TYPE if key in schema]
        return f"{untyped[0]!r} stands without 'type'; say of which type it speaks" if untyped and not types else None
    if not isinstance(values, list) or not values:
        return f"'enum' is {_shown(values)}; give a list of values"
    beside = sorted(set(schema) - _ANNOTATIONS - {"enum", "const", "type"})
    if beside or ("enum" in schema and "const" in schema):
        return f"values are listed beside {beside[0] if beside else 'const'!r}; list those that hold"
    types = list(dict.fromkeys(types))  # each value is compared with all of them
    wrong = [value for value in values if types and not any(_OF_TYPE[one](value) for one in types)]
    return f"the value {_shown(wrong[0])} is not of the type {'/'.join(types)}; remove it" if wrong else None


def _problem_of_strings(schema: Mapping[str, Any]) -> str | None:
    form, pattern = schema.get("format"), schema.get("pattern")
    if form is not None and "string" in _types(schema) and form not in FORMATS:
        return f"the format {_shown(form)} is not known; use one of {', '.join(FORMATS)}, or a pattern"
    bounds = [key for key in ("minLength", "maxLength") if key in schema]
    if pattern is not None and not isinstance(pattern, str):
        return f"'pattern' is {_shown(pattern)}; it must be a regular expression"
    if pattern is not None and form is not None:
        return "'pattern' stands beside 'format'; keep one of them"
    if bounds and (pattern is not None or (form is not None and "string" in _types(schema))):
        return (
            f"{'pattern' if pattern is not None else 'format'!r} stands beside {bounds[0]!r}; write the length into it"
        )
    return None if pattern is None else _problem_of_pattern(pattern)


def _problem_of_objects(schema: Mapping[str, Any]) -> str | None:
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if "propertyNames" in schema:
        beside = [key for key in ("patternProperties", "properties", "unevaluatedProperties") if key in schema]
        if beside:
            return f"'propertyNames' stands beside {beside[0]!r}; keep one of them"
    if patterns is not None and properties is not None:
        return "'patternProperties' stands beside 'properties'; keep one of them"
    if isinstance(patterns, Mapping):
        if len(patterns) > 1:
            return "'patternProperties' has more than one pattern; keep one of them"
        for pattern in patterns:
            if problem := _problem_of_pattern(pattern):
                return problem
    required = schema.get("required")
    if required is not None:
        known = properties if isinstance(properties, Mapping) else {}
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            return f"'required' is {_shown(required)}; give a list of names"
        missing = [name for name in required if name not in known]
        if missing:
            return f"'required' names {_shown(missing[0])}, which 'properties' lacks; describe it there"
    return None


# ------------------------------------------------------------------------------------------------------ patterns

# Sets of characters are bits of an integer: one for each character of ASCII, and one for all beyond.
_BEYOND = 1 << 128
_ALL = 2 * _BEYOND - 1
_CONTROL = (1 << 0x20) - 1
_NEED_ESCAPES = _CONTROL | 1 << ord('"') | 1 << ord("\\")
"""What stands in JSON as an escape only."""
_NEED_ESCAPES_TEXT = frozenset(chr(code) for code in range(128) if _NEED_ESCAPES >> code & 1)

_TOKEN = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c.|.)?|.", re.DOTALL)
"""A character or an escape; a bracket's end is sought among these, so that reading stays linear."""
_WIDE = (".", r"\s", r"\S", r"\D", r"\W")
_DIGITS = sum(1 << ord(one) for one in "0123456789")
_WORD = sum(1 << code for code in range(128) if chr(code).isalnum()) | 1 << ord("_")
_SPACE = sum(1 << ord(one) for one in " \t\n\v\f\r") | _BEYOND
_ESCAPES = {
    "d": _DIGITS, "D": _ALL & ~_DIGITS, "w": _WORD, "W": _ALL & ~_WORD, "s": _SPACE, "S": _ALL & ~_SPACE | _BEYOND,
    "0": 1, "t": 1 << 9, "n": 1 << 10, "v": 1 << 11, "f": 1 << 12, "r": 1 << 13, "a": 1 << 7, "e": 1 << 27,
}  # fmt: skip


def _problem_of_pattern(pattern: str) -> str | None:
    """Whether texts of a pattern would stand in JSON without the escapes that they need.

    As a rule the compiler sees to it that they do not, or have them; but not in patterns that demand such a character,
    nor in those with letters beyond ASCII.
    """
    is_plain = pattern.isascii() and "\\c" not in pattern and "\\0" not in pattern and "[[:" not in pattern
    tokens: list[str] = _TOKEN.findall(pattern)
    at = 0
    while at < len(tokens):
        token, start, at = tokens[at], at, at + 1
        if token == "[":
            try:
                at = tokens.index("]", at) + 1
            except ValueError:
                return (
                    f"the pattern has a '[' without ']' after {start} characters or escapes; close it, or write '\\['"
                )
            is_unsafe = _is_unsafe_class(tokens[start + 1 : at - 1], is_plain)
        elif token == "\\":
            return "the pattern ends within an escape; write a backslash as '\\\\'"
        elif token in _WIDE:
            is_unsafe = not is_plain
        elif len(token) == 1:
            is_unsafe = token in _NEED_ESCAPES_TEXT
        else:
            is_unsafe = token != r"\b" and bool(_characters(token) & _NEED_ESCAPES)  # outside brackets, a boundary
        if is_unsafe:
            return (
                f"the pattern has {_shown(''.join(tokens[start:at]))}, which may be a quotation mark, a backslash or a "
                "control character; write out the characters that it may be"
            )
    return None


def _is_unsafe_class(members: list[str], is_plain: bool) -> bool:
    """Whether brackets around these tokens stand for characters that need escapes, in a text that would lack them."""
    is_negated = members[:1] == ["^"]
    characters = _characters_of_class(members[1:] if is_negated else members)
    if is_negated:
        characters = _ALL & ~characters | _BEYOND
    if is_plain and characters & ~_NEED_ESCAPES and members != ["^"]:
        return False  # the compiler leaves out those that need escapes, as long as others remain
    return bool(characters & _NEED_ESCAPES)


def _characters_of_class(members: list[str]) -> int:
    if "-" not in members:
        members = list(set(members))
    characters, at = 0, 0
    while at < len(members):
        first = _characters(members[at])
        if at + 2 < len(members) and members[at + 1] == "-":
            last = _characters(members[at + 2])
            if first.bit_count() == last.bit_count() == 1:
                characters |= max(2 * last - first, 0)  # one bit each: this sets all from the one to the other
                at += 3
                continue
        characters |= first
        at += 1
    return characters


def _characters(token: str) -> int:
    """What a token stands for, within brackets where that differs; nothing, if the compiler does not know it."""
    if token[0] != "\\" or len(token) == 1:
        return 1 << min(ord(token), 128)
    kind = token[1]
    if len(token) > 2:
        code = ord(token[2]) % 32 if kind == "c" else int(token[2:].strip("{}"), 16)
        return 1 << min(code, 128)
    if kind == "b":
        return 1 << 8
    return _ESCAPES.get(kind, 0 if kind.isalnum() else 1 << min(ord(kind), 128))


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a schema names; none if it speaks of all."""
    types = schema.get("type")
    return [] if types is None else list(types) if isinstance(types, list) else [types]


def _written(path: _Path) -> str:
    """A path as one speaks of it, on one line; the beginning of a long one."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"/{step}"[:100])
    text = "".join(reversed(steps))[:100]
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text) or "/"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
