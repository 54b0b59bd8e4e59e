"""StructuredOutputsParams: every value is checked when it is given, and constructs that cannot be enforced are
refused."""

from __future__ import annotations

import json
import pickle
import random
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.engine import SamplingParams, StructuredOutputsParams
from pointsman.engine.params.json_schema import FORMATS, MAX_DEPTH, MAX_NESTING, NEVER, prepare_schema
from pointsman.engine.params.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, GrammarSpec
from tests.engine.json_schemas import random_document, random_schema

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def spec_of(**options: Any) -> GrammarSpec:
    return StructuredOutputsParams(**options).spec


def test_each_kind_of_structured_output_becomes_a_grammar() -> None:
    assert spec_of(json=OBJECT) == spec_of(json=json.dumps(OBJECT, indent=3)) == ("json", json.dumps(OBJECT), True)
    assert spec_of(json=OBJECT, disable_any_whitespace=True).any_whitespace is False
    assert spec_of(regex="a+", disable_any_whitespace=True) == ("regex", "a+", True)
    assert spec_of(grammar='root ::= "a"') == ("ebnf", 'root ::= "a"', True)
    assert spec_of(choice=["a", 'b"\\', "c\n"]) == ("ebnf", r'root ::= "a" | "b\"\\" | "c\u000a"', True)
    assert spec_of(json_object=True).kind == "json"


def test_the_order_of_properties_is_part_of_a_schema() -> None:
    first = spec_of(json={"type": "object", "properties": {"a": {}, "b": {}}})
    assert first != spec_of(json={"type": "object", "properties": {"b": {}, "a": {}}})


def test_parameters_are_compared_hashed_and_pickled_by_value() -> None:
    """Parameters are compared and hashed, and pickled for other processes."""
    one = SamplingParams(structured_outputs=StructuredOutputsParams(json=OBJECT))
    other = SamplingParams(structured_outputs=StructuredOutputsParams(json=dict(OBJECT)))
    assert one == other and hash(one) == hash(other)
    assert one != SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and copy.structured_outputs.spec == one.structured_outputs.spec  # type: ignore[union-attr]
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no form"),
        ({"json_object": False}, "no form"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice; give exactly one"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": ""}, "regex is ''; it must be text"),
        ({"regex": 3}, "regex is 3; it must be text"),
        ({"grammar": ["a"]}, "it must be text"),
        ({"regex": "a\x00"}, "NUL"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"json": '{"const": "\\ud800"}'}, "lone surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "65,537 bytes, and the maximum is 65,536"),
        ({"grammar": "é" * MAX_GRAMMAR_BYTES}, "131,072 bytes"),
        ({"json": "{" + " " * MAX_GRAMMAR_BYTES + "}"}, "bytes, and the maximum"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": '"a"'}, "must be a JSON schema"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"const": {1, 2}}}, "a value that JSON cannot express"),
        ({"json": {"const": float("nan")}}, "a value that JSON cannot express: Out of range"),
        ({"json": "[" * 30_000 + "]" * 30_000}, "nested too deeply"),
        ({"choice": []}, "0 texts; give 1 to 4,096"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "4,097 texts"),
        ({"choice": "abc"}, "must be a list of texts"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"choice": ["a" * 40_000] * 2}, "choice has 80,000 characters, and the maximum is 65,536"),
        ({"json": {"const": "\ud800"}}, "lone surrogate"),
        ({"json": {"const": "a\0"}}, "NUL"),
        ({"json": '{"const": NaN}'}, "a value that JSON cannot express"),
        (
            {"json": {"const": [[[]]], "default": {"a": "b" * MAX_GRAMMAR_BYTES}}},
            "and the maximum is 65,536; shorten it",
        ),
        ({"regex": "a", "disable_any_whitespace": "yes"}, "disable_any_whitespace is 'yes'"),
    ],
)
def test_structured_output_errors_have_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        StructuredOutputsParams(**options)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message and len(message) < 300


def test_structured_outputs_accepts_no_other_type() -> None:
    with pytest.raises(ValueError, match="structured_outputs is of type dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("seed", range(50))
def test_schemas_that_are_enforced_pass(seed: int) -> None:
    rng = random.Random(seed)
    prepare_schema(random_document(rng))
    prepare_schema(random_schema(rng))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "multipleOf": 3}, "/: the keyword 'multipleOf' is not supported"),
        ({"properties": {"a": {"uniqueItems": True}}}, "at /properties/a: the keyword 'uniqueItems'"),
        ({"items": {"not": {}}}, "at /items: the keyword 'not'"),
        ({"prefixItems": [{}, {"contains": {}}]}, "at /prefixItems/1: the keyword 'contains'"),
        ({"$defs": {"x": {"if": {}}}}, "at /$defs/x: the keyword 'if'"),
        ({"additionalProperties": {"dependentRequired": {"a": ["b"]}}}, "'dependentRequired'"),
        ({"$ref": "https://example.com/schema"}, "$ref is 'https://example.com/schema'; refer to a part of this"),
        ({"$ref": "file:///etc/passwd"}, "refer to a part of this"),
        ({"$ref": "#/$defs/a", "type": "string"}, "'$ref' stands beside 'type'"),
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "'allOf' has more than one"),
        ({"anyOf": [{}], "type": "object"}, "'anyOf' stands beside 'type'"),
        ({"type": "string", "format": "iban"}, "the format 'iban' is not known"),
        ({"minLength": 3}, "'minLength' stands without 'type'"),
        ({"items": {"maximum": 3}}, "at /items: 'maximum' stands without 'type'"),
        ({"type": "text"}, "the type 'text' is not known"),
        ({"enum": ["a", 1], "type": "string"}, "the value 1 is not of the type string"),
        ({"const": True, "type": "integer"}, "the value True is not of the type integer"),
        ({"enum": []}, "'enum' is []; give a list of values"),
        ({"enum": ["abc"], "type": "string", "maxLength": 2}, "values are listed beside 'maxLength'"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "'required' names 'b', which 'properties' lacks"),
        ({"type": "string", "pattern": 3}, "'pattern' is 3"),
        ({"type": "string", "pattern": "a*", "maxLength": 3}, "'pattern' stands beside 'maxLength'"),
        ({"type": "string", "format": "date", "minLength": 3}, "'format' stands beside 'minLength'"),
        ({"patternProperties": {"a": {}}, "properties": {}}, "'patternProperties' stands beside 'properties'"),
        ({"patternProperties": {"a": {}, "b": {}}}, "more than one pattern"),
        ({"propertyNames": {}, "properties": {}}, "'propertyNames' stands beside 'properties'"),
        ({"type": {}}, "the type {} is not known"),
        ({"type": ["string", []]}, "the type [] is not known"),
        ({"type": ["string"] * 3, "enum": [1]}, "the value 1 is not of the type string; remove it"),
        ({"required": [{}]}, "'required' is [{}]; give a list of names"),
        ({"properties": {"a": {}}, "required": "a"}, "'required' is 'a'; give a list of names"),
        ({"properties": {"a\nb": {"not": {}}}}, "at /properties/a\\nb: the keyword 'not'"),
        ({"properties": {"a" * 200: {"items": 3}}}, f"has 3 where a schema belongs, at /properties/{'a' * 88}"),
        ({"anyOf": []}, "'anyOf' is []; give a list of one schema or more"),
        ({"properties": {"x": {"oneOf": []}}}, "at /properties/x: 'oneOf' is []; give a list of one schema or more"),
        ({"allOf": {}}, "'allOf' is {}; give a list of one schema or more"),
        ({"type": []}, "'type' is []; name one type or more"),
        ({"properties": ["a"]}, "'properties' is ['a']; give an object of schemas"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems' is 3, more than 'maxItems' 2; swap them"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' is 3, more than 'maxLength' 2; swap them"),
        ({"type": "string", "maxLength": -1}, "'maxLength' is -1; it must be an integer of 0 or more"),
        ({"type": "array", "minItems": "2"}, "'minItems' is '2'; it must be an integer of 0 or more"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 2}, "no number is at least 3 and at most 2; swap them"),
        ({"type": "number", "minimum": True}, "'minimum' is True; it must be a number of 64 bits"),
        ({"type": "object", "minProperties": 2}, "'minProperties' is 2, and a text may have one name twice"),
        ({"$ref": "#/$defs/missing"}, "$ref is '#/$defs/missing', and the schema has nothing at this path"),
        ({"properties": {"a": 3}}, "has 3 where a schema belongs, at /properties/a"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        StructuredOutputsParams(json=schema)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keywords_are_checked_only_at_positions_of_schemas() -> None:
    prepare_schema({"properties": {"not": {"type": "string"}, "format": {"type": "integer"}}, "default": {"if": 1}})
    prepare_schema({"enum": [{"multipleOf": 3}], "description": "contains"})
    prepare_schema({"type": "integer", "format": "int64"})  # says nothing about an integer
    prepare_schema({"type": "array", "uniqueItems": False, "items": True})
    prepare_schema({"$ref": "#/$defs/a", "description": "a part", "$defs": {"a": {}}})


def test_constructs_that_the_compiler_misreads_are_rewritten() -> None:
    assert prepare_schema({"type": "object", "nullable": True})["additionalProperties"] is True
    assert prepare_schema({"items": {"type": "array", "minItems": 2}})["items"]["items"] is True
    email = prepare_schema({"type": "string", "format": "email"})
    assert "format" not in email
    assert re.search(email["pattern"], "some.one+x@example.co.uk") and not re.search(email["pattern"], "a@b")
    for plain in ({"type": "object", "properties": {}}, {"type": "string", "pattern": r"^[^a-z\\]\s.{3}$"}, {}, True):
        assert prepare_schema(plain) == plain


def test_nesting_of_json_schemas_is_limited() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        schema = {"items": schema}
    prepare_schema(schema)
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} levels"):
        prepare_schema({"items": schema})
    nested: list[Any] = []
    for _ in range(MAX_NESTING - 2):
        nested = [nested]
    StructuredOutputsParams(json={"const": nested})
    with pytest.raises(ValueError, match=f"nested too deeply, and the maximum is {MAX_NESTING} levels"):
        StructuredOutputsParams(json={"const": [nested]})


ROOM = MAX_GRAMMAR_BYTES - 100


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "pattern": ("[" * 64_000)[:size]} for size in (16_000, ROOM)),
        {"type": "string", "pattern": "[^" * (ROOM // 2)},
        {"type": "string", "pattern": r"[\w" * (ROOM // 5)},
        {"type": "string", "pattern": "a" * ROOM},
        {"type": "string", "pattern": r"\u{" * (ROOM // 4)},
        {"type": "string", "pattern": "".join(f"[a{chr(code)}-z]" for code in range(0x100, 0x100 + ROOM // 8))},
        {"type": "string", "pattern": "é" + "[" + "a-z" * (ROOM // 3) + "]"},
        {"type": "string", "pattern": "".join(chr(code) for code in range(0x1000, 0x1000 + ROOM // 3))},
        {"type": ["integer"] * 3_000 + ["string"], "enum": ["a"] * 6_000},
        {"properties": {"a" * 20_000: {"properties": {str(name): {} for name in range(3_000)}}}},
        {"required": ["a"] * 12_000, "properties": {"a": {}}},
        {"const": [[]] * 12_000},
        {"anyOf": [{}] * 15_000},
        "[" * MAX_GRAMMAR_BYTES,
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_the_longest_schemas_are_checked_in_milliseconds(schema: Any) -> None:
    """Schemas are checked in the API's event loop, while other requests wait; checks of quadratic time took seconds."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    assert len(text.encode()) <= MAX_GRAMMAR_BYTES
    assert seconds_to_check(text) < 0.2  # takes a quarter of that here; a busy machine takes longer


@pytest.mark.parametrize(
    "options",
    [
        {"json": {"type": "string", "pattern": "[" * 1_000_000}},
        {"json": {"properties": {str(name): {"type": "string", "pattern": r"[\w"} for name in range(30_000)}}},
        {"json": "{" * 1_000_000},
        {"regex": "[" * 1_000_000},
        {"choice": ["a" * 1_000_000] * 10},
    ],
    ids=lambda options: str(options)[:40],
)
def test_too_long_structured_outputs_are_refused_before_parsing(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"and the maximum is 65,536; shorten it"):
        StructuredOutputsParams(**options)
    assert seconds_to_check(**options) < 0.2


def seconds_to_check(schema: Any = None, **options: Any) -> float:
    """Seconds of processor time to check a schema: the minimum of three runs."""
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        with suppress(ValueError):
            StructuredOutputsParams(**(options or {"json": schema}))
        seconds.append(time.thread_time() - started)
    return min(seconds)


# ---------------------------------------------------------------------------------------------------- any schema

KEYWORDS = (
    "$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "items", "maximum",
    "minLength", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required",
    "type", "unevaluatedProperties", *NEVER,
)  # fmt: skip
TEXTS = st.sampled_from(
    (
        "string",
        "object",
        "array",
        "integer",
        "[",
        "[^]",
        "(?P<a>",
        "[z-a]",
        r"\1",
        r"\u{1}",
        "\\",
        "#",
        "#/$defs/a",
        "a\nb",
    )
) | st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from(FORMATS),
    lambda within: (
        st.lists(within, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS) | TEXTS, within, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4))
@example({"type": {}})
@example({"type": [[]], "enum": [1]})
@example({"required": [{}]})
@example({"properties": {"a": {}}, "required": [[]]})
def test_any_schema_passes_or_is_refused_in_one_line(schema: dict[str, Any]) -> None:
    for given_as in (schema, json.dumps(schema)):
        try:
            spec = spec_of(json=given_as)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            assert isinstance(json.loads(spec.text), dict)


@given(VALUES)
def test_any_value_as_a_schema_passes_or_is_refused(value: Any) -> None:
    try:
        StructuredOutputsParams(json=value)
    except ValueError as error:
        assert "\n" not in str(error)


@given(st.text(alphabet='[]^-\\"(){}*+?.|abcsdDSWwxu0127é\n:', max_size=30) | st.text())
def test_a_schema_pattern_is_kept_unchanged_or_refused_in_one_line(pattern: str) -> None:
    try:
        prepared = prepare_schema({"type": "string", "pattern": pattern})
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert prepared["pattern"] == pattern
