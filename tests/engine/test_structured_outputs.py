"""What may be asked of a text's form: every value is checked when it is given, and so is what could not be enforced."""

from __future__ import annotations

import json
import pickle
import random
import re
from typing import Any

import pytest
from json_schemas import random_document, random_schema

from pointsman.engine import SamplingParams, StructuredOutputsParams
from pointsman.engine.json_schema_support import MAX_DEPTH, prepare_schema
from pointsman.engine.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, GrammarSpec

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def spec_of(**options: Any) -> GrammarSpec:
    return StructuredOutputsParams(**options).spec


def test_each_way_becomes_a_grammar() -> None:
    assert spec_of(json=OBJECT) == spec_of(json=json.dumps(OBJECT, indent=3)) == ("json", json.dumps(OBJECT), True)
    assert spec_of(json=OBJECT, disable_any_whitespace=True).any_whitespace is False
    assert spec_of(regex="a+", disable_any_whitespace=True) == ("regex", "a+", True)
    assert spec_of(grammar='root ::= "a"') == ("ebnf", 'root ::= "a"', True)
    assert spec_of(choice=["a", 'b"\\', "c\n"]) == ("ebnf", r'root ::= "a" | "b\"\\" | "c\u000a"', True)
    assert spec_of(json_object=True).kind == "json"


def test_the_order_of_properties_is_part_of_a_schema() -> None:
    first = spec_of(json={"type": "object", "properties": {"a": {}, "b": {}}})
    assert first != spec_of(json={"type": "object", "properties": {"b": {}, "a": {}}})


def test_parameters_are_values() -> None:
    """They are compared, hashed and sent to other processes."""
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
        ({}, "none of them"),
        ({"json_object": False}, "none of them"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice; give exactly one"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": ""}, "regex is ''; it must be text"),
        ({"regex": 3}, "regex is 3; it must be text"),
        ({"grammar": ["a"]}, "it must be text"),
        ({"regex": "a\x00"}, "NUL"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"json": '{"const": "\\ud800"}'}, "lone surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "65,537 bytes, and the most is 65,536"),
        ({"grammar": "é" * MAX_GRAMMAR_BYTES}, "131,072 bytes"),
        ({"json": "{" + " " * MAX_GRAMMAR_BYTES + "}"}, "bytes, and the most"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": '"a"'}, "must be a JSON schema"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"const": {1, 2}}}, "what JSON cannot express"),
        ({"json": {"const": float("nan")}}, "what JSON cannot express: Out of range"),
        ({"json": "[" * 30_000 + "]" * 30_000}, "nested too deeply"),
        ({"choice": []}, "0 texts; give 1 to 1,000"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "1,001 texts"),
        ({"choice": "abc"}, "must be a list of texts"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"regex": "a", "disable_any_whitespace": "yes"}, "disable_any_whitespace is 'yes'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        StructuredOutputsParams(**options)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message and len(message) < 300


def test_the_field_takes_nothing_else() -> None:
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
        ({"type": "string", "pattern": 'say "yes"'}, "the pattern has '\"'"),
        ({"type": "string", "pattern": r"a\\b"}, "which may be a quotation mark, a backslash"),
        ({"type": "string", "pattern": "é.{3}"}, "the pattern has '.'"),
        ({"type": "string", "pattern": r"a\nb"}, "a control character"),
        ({"type": "string", "pattern": 3}, "'pattern' is 3"),
        ({"type": "string", "pattern": "a*", "maxLength": 3}, "'pattern' stands beside 'maxLength'"),
        ({"type": "string", "format": "date", "minLength": 3}, "'format' stands beside 'minLength'"),
        ({"patternProperties": {"a": {}}, "properties": {}}, "'patternProperties' stands beside 'properties'"),
        ({"patternProperties": {"a": {}, "b": {}}}, "more than one pattern"),
        ({"propertyNames": {}, "properties": {}}, "'propertyNames' stands beside 'properties'"),
        ({"properties": {"a": 3}}, "has 3 where a schema belongs, at /properties/a"),
    ],
)
def test_what_could_not_be_enforced_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        StructuredOutputsParams(json=schema)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keywords_are_sought_only_where_schemas_stand() -> None:
    prepare_schema({"properties": {"not": {"type": "string"}, "format": {"type": "integer"}}, "default": {"if": 1}})
    prepare_schema({"enum": [{"multipleOf": 3}], "description": "contains"})
    prepare_schema({"type": "integer", "format": "int64"})  # says nothing about an integer
    prepare_schema({"type": "array", "uniqueItems": False, "items": True})
    prepare_schema({"$ref": "#/$defs/a", "description": "a part", "$defs": {"a": {}}})


def test_what_the_compiler_reads_otherwise_is_written_anew() -> None:
    assert prepare_schema({"type": "object", "nullable": True})["additionalProperties"] is True
    assert prepare_schema({"items": {"type": "array", "minItems": 2}})["items"]["items"] is True
    email = prepare_schema({"type": "string", "format": "email"})
    assert "format" not in email
    assert re.search(email["pattern"], "some.one+x@example.co.uk") and not re.search(email["pattern"], "a@b")
    for plain in ({"type": "object", "properties": {}}, {"type": "string", "pattern": r"^[^a-z\\]\s.{3}$"}, {}, True):
        assert prepare_schema(plain) == plain


def test_depth_is_limited() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        schema = {"items": schema}
    prepare_schema(schema)
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} levels"):
        prepare_schema({"items": schema})
