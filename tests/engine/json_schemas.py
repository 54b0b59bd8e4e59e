"""Random JSON schemas that the compiler can enforce, and whose texts end even with a small model.

Strings, numbers and arrays are bounded, because a model with random weights would not end them.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "tags", "é", "is_open", "a b", "x-1", "contains", "value", "日本")
WORDS = ("red", "green", "blue", "naïve", 'q"uote', "back\\slash", "two words", "")


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema whose objects and arrays are nested in at most `depth` levels."""
    leaves = [_string, _integer, _number, _boolean, _null, _enum, _const]
    nested = [_object, _object, _array, _tuple, _any_of]
    make = rng.choice(leaves if depth <= 0 else [*leaves, *nested, *nested])
    return make(rng, depth)


def random_document(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema of an object, as clients of an API send it; some schemas have a reference to one of their
    parts."""
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, depth - 1)}
        schema["properties"]["first"] = {"$ref": "#/$defs/part"}
        schema["properties"]["second"] = {"$ref": "#/$defs/part"}
        schema["required"].append("second")
    return schema


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(["^[a-z]{1,6}$", "^(ab|cd){1,3}$", "^\\d{2}-[A-F]{2}$"])}
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randrange(-300, 300)
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + rng.randrange(1, 5000)}
    if rng.random() < 0.3:
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    least = rng.randrange(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + rng.randrange(1, 90)}


def _boolean(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", ["boolean", "null"]])}


def _null(_: random.Random, __: int) -> dict[str, Any]:
    return {"type": "null"}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    values: list[Any] = [*rng.sample(WORDS, 3), rng.randrange(100), None, True]
    return {"enum": rng.sample(values, rng.randrange(1, len(values)))}


def _const(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice([1, "one", None, False, [1, "a"], {"k": 2}])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    most = least + rng.randrange(1, 3)
    return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least, "maxItems": most}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
