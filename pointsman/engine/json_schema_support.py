"""JSON schemas as they are enforced.

The compiler of grammars leaves out what it does not know, silently or with a warning, and the output would then break
a schema that it was promised to keep. So a schema that says something of the kind is refused when it is given, with
the keyword and where it stands. Only places where a schema may stand are looked at: a property may well be called
"contains".

What the compiler reads otherwise than JSON Schema means it is written anew: an object or array of which the schema
says nothing more may hold anything; an e-mail address is given as a pattern.

One keyword means less than it says: of the schemas in `oneOf` at least one holds, as in `anyOf`. Schemas that
describe tagged unions are written so, and there it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 32
"""Levels of schemas within schemas."""

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


def prepare_schema(schema: Any) -> Any:
    """A schema as the compiler shall read it, with everything within.

    Raises:
        ValueError: it is no schema, is nested too deeply, or says what cannot be enforced.
    """
    return _prepare(schema, "", 1)


def _prepare(schema: Any, path: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"the JSON schema has {_shown(schema)} where a schema belongs, at {path or '/'}; correct it")
    if depth > MAX_DEPTH:
        raise ValueError(f"the JSON schema is nested more than {MAX_DEPTH} levels deep, at {path[:100]}; flatten it")
    problem = _problem(schema)
    if problem:
        raise ValueError(f"the JSON schema cannot be enforced at {path[:100] or '/'}: {problem}")
    prepared = dict(schema)
    for key in _ONE:
        if key in schema:
            prepared[key] = _prepare(schema[key], f"{path}/{key}", depth + 1)
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            prepared[key] = [_prepare(one, f"{path}/{key}/{at}", depth + 1) for at, one in enumerate(schema[key])]
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            prepared[key] = {
                name: _prepare(one, f"{path}/{key}/{name}", depth + 1) for name, one in schema[key].items()
            }
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
    for key in NEVER:
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
    unknown = [one for one in types if one not in _OF_TYPE]
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
        missing = [name for name in required if name not in known] if isinstance(required, list) else [required]
        if missing:
            return f"'required' names {_shown(missing[0])}, which 'properties' lacks; describe it there"
    return None


# ------------------------------------------------------------------------------------------------------ patterns

_NEED_ESCAPES = [chr(code) for code in range(0x20)] + ['"', "\\"]
"""What stands in JSON as an escape only."""
_ATOM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c.|.) | \[\^?(?:\\.|[^\]\\])*\] | .", re.DOTALL | re.VERBOSE)
_WIDE = (".", r"\s", r"\S", r"\D", r"\W")


def _problem_of_pattern(pattern: str) -> str | None:
    """Whether texts of a pattern would stand in JSON without the escapes that they need.

    As a rule the compiler sees to it that they do not, or have them; but not in patterns that demand such a character,
    nor in those with letters beyond ASCII.
    """
    is_plain = pattern.isascii() and "\\c" not in pattern and "\\0" not in pattern and "[[:" not in pattern
    for atom in _ATOM.findall(pattern):
        if is_plain and (atom in _WIDE or atom.startswith("[")):
            continue
        if _matches_some(atom, _NEED_ESCAPES):
            return (
                f"the pattern has {_shown(atom)}, which may be a quotation mark, a backslash or a control character; "
                "write out the characters that it may be"
            )
    return None


def _matches_some(atom: str, characters: list[str]) -> bool:
    if atom.startswith("\\c"):
        return True
    try:
        expression = re.compile(atom, re.DOTALL)
    except re.error:  # no atom: a bracket, a sign of repetition
        return False
    return any(expression.fullmatch(one) for one in characters)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a schema names; none if it speaks of all."""
    types = schema.get("type")
    return [] if types is None else list(types) if isinstance(types, list) else [types]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
