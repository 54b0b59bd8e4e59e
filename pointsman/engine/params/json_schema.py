"""Checks JSON schemas, and rewrites them for the compiler of grammars.

The compiler ignores keywords that it does not know, silently or with a warning, and the output would then violate the
schema. So a schema with such a keyword is refused when it is given, with the keyword and its path. Keywords are checked
only at places where a schema may be: a property may be called "contains".

Constructs that the compiler reads differently from JSON Schema are rewritten. An object or array without further
keywords may hold anything; the format "email" becomes a pattern; the targets of `$ref` get plain names; a number with a
bound on one side gets a bound on the other side too. Patterns are read where they are compiled (`grammar/schema.py`).

A schema comes from a client and is checked while other requests wait, so all checks take time linear in its length.

The compiler treats `oneOf` as a choice, and refuses options that it cannot distinguish. It does not follow `$ref`,
which tagged unions use, so options behind `$ref` are distinguished here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias
from urllib.parse import unquote

MAX_DEPTH = 32
"""Maximum number of levels of nested schemas."""
MAX_NESTING = 128
"""Maximum levels of nested objects and arrays in the schema's JSON, also in listed values."""

INTEGER_DIGITS, FRACTION_DIGITS = 18, 17
"""Maximum number of digits before and after the point of a number without bounds in the schema, so that it fits 64
bits."""
_LARGEST = 10**INTEGER_DIGITS - 1
_INT64 = 2**63
_LENGTHS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
BOUND_DIGITS = 6
"""Maximum number of digits after the point that the compiler allows in numbers with bounds."""
_EXACT = 1e9
"""Number below which floats are exact to more than `BOUND_DIGITS` digits after the point."""

FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference",
    "uri-template", "uuid",
)  # fmt: skip
"""Values of `format` that the compiler knows and whose texts need no escapes in JSON."""
EMAIL = (
    r"^[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9]([A-Za-z0-9\-]*[A-Za-z0-9])?"
    r"(\.[A-Za-z0-9]([A-Za-z0-9\-]*[A-Za-z0-9])?)+$"
)

NEVER = (
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "multipleOf", "not", "then", "uniqueItems",
)  # fmt: skip
"""Keywords that are refused, because the compiler would ignore them."""
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
"""The position of a subschema: the path of its parent, and the key or index in the parent. None: the root. Only errors
turn a path into text."""


def prepare_schema(schema: Any) -> Any:
    """Check and rewrite a schema, as returned by `json.loads`, for the compiler.

    Raises:
        ValueError: the value is not a schema, is nested too deeply, or cannot be enforced.
    """
    within = [schema]
    for _ in range(MAX_NESTING + 1):
        if not within:
            return _Preparation(schema).prepared()
        nested = [one for one in within if isinstance(one, (Mapping, list))]
        within = [value for one in nested for value in (one.values() if isinstance(one, Mapping) else one)]
    raise ValueError(f"the JSON schema is nested too deeply, and the maximum is {MAX_NESTING} levels; flatten it")


def map_subschemas(schema: Mapping[str, Any], change: Callable[[Any, tuple[str | int, ...]], Any]) -> dict[str, Any]:
    """Copy a schema with its direct subschemas replaced.

    Args:
        schema: the schema to copy.
        change: function of a subschema and the keys and indices that lead to it; returns the replacement.
    """
    changed = dict(schema)
    for key in _ONE:
        if key in schema:
            changed[key] = change(schema[key], (key,))
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            changed[key] = [change(one, (key, at)) for at, one in enumerate(schema[key])]
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            changed[key] = {name: change(one, (key, name)) for name, one in schema[key].items()}
    return changed


class _Preparation:
    """Checks and rewrites one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        """Value of a `$ref` -> the new name of its target."""
        self._targets: list[tuple[str, Any]] = []
        """Value and target of each `$ref`, in the order of the new names."""
        self._tags: dict[int, dict[str, list[str]]] = {}
        """Results of `_tags_of`: `id` of a schema -> tags."""

    def prepared(self) -> Any:
        """Return the rewritten schema, with the rewritten targets of its references as "$defs".

        Raises:
            ValueError: see `prepare_schema`.
        """
        prepared = self._prepare(self._root, None, 1)
        if not isinstance(prepared, dict):
            return prepared
        for key in ("$defs", "definitions"):
            prepared.pop(key, None)
        definitions: dict[str, Any] = {}
        for reference, target in self._targets:  # the loop appends to it
            definitions[self._names[reference]] = self._prepare(target, (None, reference), 1)
        return {**prepared, "$defs": definitions} if definitions else prepared

    def _prepare(self, schema: Any, path: _Path, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"the JSON schema has {_shown(schema)} where a schema belongs, at {_path_text(path)}; correct it"
            )
        if depth > MAX_DEPTH:
            raise ValueError(
                f"the JSON schema is nested more than {MAX_DEPTH} levels deep, at {_path_text(path)}; flatten it"
            )
        if not schema:
            return {}
        problem = _find_problem(schema)
        if problem:
            raise ValueError(f"the JSON schema cannot be enforced at {_path_text(path)}: {problem}")

        def prepare_subschema(one: Any, steps: tuple[str | int, ...]) -> Any:
            place = path
            for step in steps:
                place = (place, step)
            return self._prepare(one, place, depth + 1)

        prepared = map_subschemas(schema, prepare_subschema)
        types = _types(schema)
        if "object" in types and not any(key in schema for key in _SAYS_OBJECT):
            prepared["additionalProperties"] = True
        if "array" in types and not any(key in schema for key in _SAYS_ARRAY):
            prepared["items"] = True
        if prepared.get("format") == "email":
            del prepared["format"]
            prepared["pattern"] = EMAIL
        for key in (one for both in _LENGTHS for one in both if one in schema):
            prepared[key] = int(schema[key])  # 2.0 is an integer too
        _bound_numbers(prepared)
        if "oneOf" in schema and self._exclude_each_other(schema["oneOf"], path):
            prepared["anyOf"] = prepared.pop("oneOf")
        reference = schema.get("$ref")
        if reference not in (None, "#"):
            if reference not in self._names:
                self._targets.append((reference, self._find_target(reference, path)))
                self._names[reference] = str(len(self._names))
            prepared["$ref"] = f"#/$defs/{self._names[reference]}"
        return prepared

    def _exclude_each_other(self, options: list[Any], path: _Path) -> bool:
        """Whether the options of a `oneOf` exclude each other, by their types or by a tag: a property that all object
        options require, with different values."""
        seen = set[int]()
        types: list[str] = []
        tags: dict[str, list[str]] | None = None
        for option in options:
            if isinstance(option, Mapping) and "$ref" in option:
                option = self._find_target(option["$ref"], path)
            found = _types(option) if isinstance(option, Mapping) else []
            if not found or id(option) in seen or not all(isinstance(one, str) for one in found):
                return False
            seen.add(id(option))
            if found != ["object"]:
                types += found
                continue
            others = self._tags_of(option)
            tags = others if tags is None else {name: tags[name] + others[name] for name in tags.keys() & others.keys()}
        if len(set(types)) < len(types) or {"integer", "number"} <= set(types) or ("object" in types and tags):
            return False
        return tags is None or any(len(set(values)) == len(values) for values in tags.values())

    def _tags_of(self, schema: Mapping[str, Any]) -> dict[str, list[str]]:
        """The possible tags of an object schema: name of a required property whose values are listed texts -> these
        texts."""
        known = self._tags.get(id(schema))
        if known is not None:
            return known
        tags = self._tags[id(schema)] = dict[str, list[str]]()
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            for name in required:
                one = properties.get(name) if isinstance(name, str) else None
                values = ([one["const"]] if "const" in one else one.get("enum")) if isinstance(one, Mapping) else None
                if isinstance(values, list) and all(isinstance(value, str) for value in values):
                    tags[name] = list(dict.fromkeys(values))
        return tags

    def _find_target(self, reference: str, path: _Path) -> Any:
        """Find the subschema to which a `$ref` points (RFC 6901, as the fragment of a URI).

        Raises:
            ValueError: the reference has no target.
        """
        target = self._root
        steps = unquote(reference.removeprefix("#")).split("/")
        for step in steps[1:] if not steps[0] else [None]:
            name = None if step is None else step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name is not None and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise ValueError(
                    f"the JSON schema cannot be enforced at {_path_text(path)}: $ref is {_shown(reference)}, "
                    "and the schema has nothing at this path; add the definition or correct $ref"
                )
        return target


def _bound_numbers(schema: dict[str, Any]) -> None:
    """Add the missing bound, in place, to a schema of numbers that has a bound on one side only."""
    if "integer" not in _types(schema) and "number" not in _types(schema):
        return
    lower = [key for key in ("minimum", "exclusiveMinimum") if key in schema]
    upper = [key for key in ("maximum", "exclusiveMaximum") if key in schema]
    if lower and not upper:
        schema["maximum"] = _LARGEST if max(schema[key] for key in lower) < _LARGEST else _INT64 - 1
    elif upper and not lower:
        schema["minimum"] = -_LARGEST if min(schema[key] for key in upper) > -_LARGEST else -_INT64


def _find_problem(schema: Mapping[str, Any]) -> str | None:
    """The first problem of a schema, with the remedy; subschemas are not checked. None: there is no problem."""
    for key in () if _IGNORED.isdisjoint(schema) else NEVER:
        if schema.get(key) not in (None, False):
            return f"the keyword {key!r} is not supported; remove it"
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        return f"$ref is {_shown(reference)}; refer to a part of this schema (#/$defs/...)"
    for key in _LISTS:
        if key in schema and not (isinstance(schema[key], list) and (schema[key] or key == "prefixItems")):
            return f"{key!r} is {_shown(schema[key])}; give a list of one schema or more"
    for key in _MAPS:
        if key in schema and not isinstance(schema[key], Mapping):
            return f"{key!r} is {_shown(schema[key])}; give an object of schemas"
    for key in ("$ref", "allOf", "anyOf", "oneOf"):
        beside = sorted(set(schema) - _ANNOTATIONS - {key}) if key in schema else ()
        if beside:
            return f"{key!r} stands beside {beside[0]!r}; put them into one schema"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return "'allOf' has more than one schema; merge them"
    return (
        _find_problem_of_values(schema)
        or _find_problem_of_bounds(schema)
        or _find_problem_of_strings(schema)
        or _find_problem_of_objects(schema)
    )


def _find_problem_of_values(schema: Mapping[str, Any]) -> str | None:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    types = _types(schema)
    unknown = [one for one in types if not isinstance(one, str) or one not in _OF_TYPE]
    if schema.get("type") == []:
        return "'type' is []; name one type or more"
    if unknown:
        return f"the type {_shown(unknown[0])} is not known; use one of {', '.join(_OF_TYPE)}"
    if values is None:
        untyped = [key for key in _NEED_TYPE if key in schema]
        return f"{untyped[0]!r} stands without 'type'; add 'type' beside it" if untyped and not types else None
    if not isinstance(values, list) or not values:
        return f"'enum' is {_shown(values)}; give a list of values"
    beside = sorted(set(schema) - _ANNOTATIONS - {"enum", "const", "type"})
    if beside or ("enum" in schema and "const" in schema):
        return f"values are listed beside {beside[0] if beside else 'const'!r}; list those that hold"
    large = _find_large_number(values)
    if large is not None:
        return f"a value holds {_shown(large)}, which is no number of 64 bits; write it as text"
    types = list(dict.fromkeys(types))  # each value is compared with all of them
    wrong = [value for value in values if types and not any(_OF_TYPE[one](value) for one in types)]
    return f"the value {_shown(wrong[0])} is not of the type {'/'.join(types)}; remove it" if wrong else None


def _find_large_number(values: list[Any]) -> int | None:
    """Find an integer in the values, nested ones included, that the compiler would round; None: there is none."""
    within = list(values)
    while within:
        value = within.pop()
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            return value
        if isinstance(value, (Mapping, list)):
            within += value.values() if isinstance(value, Mapping) else value
    return None


def _find_problem_of_bounds(schema: Mapping[str, Any]) -> str | None:
    """The first problem of a schema with lengths, counts and ranges; None: there is no problem."""
    for minimum, maximum in _LENGTHS:
        for key in (minimum, maximum):
            value = schema.get(key)
            if key in schema and (not _OF_TYPE["integer"](value) or not 0 <= value < _INT64):  # type: ignore[operator]
                return f"{key!r} is {_shown(value)}; it must be an integer of 0 or more"
        if minimum in schema and maximum in schema and schema[minimum] > schema[maximum]:
            return f"{minimum!r} is {schema[minimum]}, more than {maximum!r} {schema[maximum]}; swap them"
    bounds = [key for key in _BOUNDS if key in schema]
    for key in bounds:
        value = schema[key]
        if not _OF_TYPE["number"](value) or not -_INT64 <= value < _INT64:
            return f"{key!r} is {_shown(value)}; it must be a number of 64 bits"
        if "integer" in _types(schema) and not _OF_TYPE["integer"](value):
            return f"{key!r} of an integer is {_shown(value)}; round it"
    low = max((schema[key] for key in bounds if key.lower().endswith("minimum")), default=-math.inf)
    high = min((schema[key] for key in bounds if key.lower().endswith("maximum")), default=math.inf)
    if low > high:
        return f"no number is at least {low} and at most {high}; swap them"
    digits = BOUND_DIGITS if "number" in _types(schema) else 0
    if low > -_EXACT and high < _EXACT and _excludes_all_numbers(schema, digits):
        what = f"of {digits} digits behind the point" if digits else "that is an integer"
        return f"between {low} and {high} is no number {what}; widen the range"
    return None


def _excludes_all_numbers(schema: Mapping[str, Any], digits: int) -> bool:
    """Whether no number with at most `digits` digits after the point is within the schema's bounds. The schema has a
    bound on each side."""
    bounds = {key: Decimal(str(schema[key])).scaleb(digits) for key in _BOUNDS if key in schema}
    lower = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lower += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    upper = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    upper += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    return max(lower) > min(upper)


def _find_problem_of_strings(schema: Mapping[str, Any]) -> str | None:
    form, pattern = schema.get("format"), schema.get("pattern")
    if form is not None and "string" in _types(schema) and form not in FORMATS:
        return f"the format {_shown(form)} is not known; use one of {', '.join(FORMATS)}, or a pattern"
    bounds = [key for key in ("minLength", "maxLength") if key in schema]
    if "pattern" in schema and not isinstance(pattern, str):
        return f"'pattern' is {_shown(pattern)}; it must be a regular expression"
    if pattern is not None and form is not None:
        return "'pattern' stands beside 'format'; keep one of them"
    if bounds and (pattern is not None or (form is not None and "string" in _types(schema))):
        return (
            f"{'pattern' if pattern is not None else 'format'!r} stands beside {bounds[0]!r}; write the length into it"
        )
    return None


def _find_problem_of_objects(schema: Mapping[str, Any]) -> str | None:
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if "propertyNames" in schema:
        beside = [key for key in ("patternProperties", "properties", "unevaluatedProperties") if key in schema]
        if beside:
            return f"'propertyNames' stands beside {beside[0]!r}; keep one of them"
    minimum, names = schema.get("minProperties", 0), schema.get("required") or ()
    free = [schema[key] for key in ("additionalProperties", "unevaluatedProperties") if key in schema]
    has_free_names = properties is None or any(one is not False for one in free)
    if minimum > max(1, len(names)) and has_free_names:
        return (
            f"'minProperties' is {minimum}, and a text may have one name twice; ask for 1 at most, or list properties"
        )
    if patterns is not None and properties is not None:
        return "'patternProperties' stands beside 'properties'; keep one of them"
    if isinstance(patterns, Mapping) and len(patterns) > 1:
        return "'patternProperties' has more than one pattern; keep one of them"
    required = schema.get("required")
    if required is not None:
        known = properties if isinstance(properties, Mapping) else {}
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            return f"'required' is {_shown(required)}; give a list of names"
        missing = [name for name in required if name not in known]
        if missing:
            return f"'required' names {_shown(missing[0])}, which 'properties' lacks; describe it there"
    return None


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """The types in a schema's `type`; empty: it has no `type`."""
    types = schema.get("type")
    return [] if types is None else list(types) if isinstance(types, list) else [types]


def _path_text(path: _Path) -> str:
    """A path as text on one line, cut to 100 characters."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"/{step}"[:100])
    text = "".join(reversed(steps))[:100]
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text) or "/"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
