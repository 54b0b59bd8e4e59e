"""JSON schemas as grammars: letters, pointers, and bounded numbers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pointsman.engine import StructuredOutputsParams
from pointsman.engine.grammar.worker import read_tree
from pointsman.engine.params.json_schema import _Preparation, prepare_schema
from pointsman.engine.params.structured_outputs import MAX_WHITESPACE
from tests.engine.grammar_texts import Language


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("text", ["Québec", "°C", "naïve", "½", "ÿb1", "\x80", 'q"\\', "日本", "😀", "é\n"])
def test_any_letters_in_texts_of_a_schema_are_kept(text: str) -> None:
    name = written(text)
    for schema, right in (
        ({"enum": [text]}, name),
        ({"const": {text: [text]}}, f"{{{name}:[{name}]}}"),
        ({"type": "object", "properties": {text: {"const": 1}}, "required": [text]}, f"{{{name}:1}}"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [text]}}}, name),
        ({"anyOf": [{"type": "null"}, {"enum": [text]}]}, name),
        ({"type": "array", "items": {"enum": [text]}}, f"[{name},{name}]"),
    ):
        assert right in Language(json=schema), schema


@pytest.mark.parametrize(
    ("pattern", "values", "others"),
    [
        ("^[éa]b$", ["éb", "ab"], ["b", "éab", "Ãb"]),
        (r"^\x41b$", ["Ab"], ["Л"]),
        (r"^\xe9b$", ["éb"], ["\u0e9b"]),
        ('^say "yes"$', ['say "yes"'], []),
        (r"^a\\b$", ["a\\b"], ["ab"]),
        (r"^a\nb$", ["a\nb"], ["anb"]),
        ('^["\\\\]{2}$', ['"\\', "\\\\"], ["\\"]),
        (r"^\t?x$", ["x", "\tx"], []),
        (r"^\cA\u001f$", ["\x01\x1f"], []),
        ("^é.{2}$", ["éab", "é日😀"], ["é", 'é"a']),
        ("^[^a]$", ["b", "é", "😀"], ["a", "bb"]),
        ("[0-9]+", ["0", "12"], ["a", ""]),
        ("^$", [""], ["a"]),
    ],
)
def test_strings_match_their_pattern(pattern: str, values: list[str], others: list[str]) -> None:
    language = Language(json={"type": "string", "pattern": pattern})
    assert [one for one in values if written(one) in language] == values
    assert [one for one in others if written(one) in language] == []
    names = Language(json={"type": "object", "patternProperties": {pattern: {"const": 1}}})
    assert [one for one in values if written({one: 1}) in names] == values
    assert [one for one in others if written({one: 1}) in names] == []
    names = Language(json={"type": "object", "propertyNames": {"type": "string", "pattern": pattern}})
    assert [one for one in values if written({one: 1}) in names] == values


def test_strings_with_length_limits_have_no_raw_control_characters() -> None:
    language = Language(json={"type": "string", "minLength": 1, "maxLength": 2})
    assert language.allows('"a"', '"é😀"', '"\t"', '"\x01"', '""', '"abc"', '"\ud800"') == ['"a"', '"é😀"']


def test_strings_have_no_lone_surrogates() -> None:
    for schema in ({"type": "string"}, {"type": "object"}, {"type": "array", "items": {}}):
        language = Language(json=schema)
        for around in ('"{}"', '{{"a":"{}"}}', '["{}"]'):
            assert around.format("\ud800") not in language


@pytest.mark.parametrize(
    ("name", "pointer"),
    [
        ("a/b", "#/$defs/a~1b"), ("a~b", "#/$defs/a~0b"), ("a~1b", "#/$defs/a~01b"), ("ä", "#/$defs/%C3%A4"),
        ("ä", "#/$defs/ä"), ("a%b", "#/$defs/a%25b"), ("a b", "#/$defs/a%20b"), ("", "#/$defs/"), ("0", "#/$defs/0"),
    ],
)  # fmt: skip
def test_json_pointers_are_read_by_rfc_6901(name: str, pointer: str) -> None:
    schema = {"type": "array", "items": {"$ref": pointer}, "$defs": {name: {"enum": ["é"]}}}
    assert Language(json=schema).allows('["é"]', '["a"]') == ['["é"]']


def test_refs_may_point_to_any_part_of_the_schema() -> None:
    whole = {"properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}, "required": ["b"]}
    assert Language(json={"type": "object", **whole}).allows('{"b":null}', '{"b":1}') == ['{"b":null}']
    listed = {"anyOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}
    assert Language(json=listed).allows("1", "[1,1]", "[2]") == ["1", "[1,1]"]
    elsewhere = {"items": {"$ref": "#/components/schemas/A"}, "components": {"schemas": {"A": {"const": 3}}}}
    assert Language(json={"type": "array", **elsewhere}).allows("[3]", "[4]") == ["[3]"]
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert Language(json=tree).allows("[[],[[]]]", "[1]") == ["[[],[[]]]"]


@pytest.mark.parametrize("pointer", ["#/$defs/b", "#/$defs/a/type/x", "#a", "#/$defs/a~1b", "#/x/3"])
def test_a_ref_to_a_missing_part_of_the_schema_is_refused(pointer: str) -> None:
    with pytest.raises(ValueError, match="and the schema has nothing at this path; add the definition"):
        Language(json={"type": "array", "items": {"$ref": pointer}, "$defs": {"a": {"type": "null"}}, "x": [1]})


def test_targets_of_refs_are_checked_anywhere_in_the_schema() -> None:
    with pytest.raises(ValueError, match=r"at /#/components/A: the keyword 'not' is not supported"):
        Language(json={"items": {"$ref": "#/components/A"}, "components": {"A": {"not": {}}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "required": ["x"],
         "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "string", "pattern": r"^a[^\s\S]$"},
    ],
)  # fmt: skip
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it allows no text"):
        Language(json=schema)


def test_alternatives_without_a_finite_value_are_left_out() -> None:
    schema = {"anyOf": [{"$ref": "#/$defs/A"}, {"const": 1}], "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert Language(json=schema).allows("1", "2") == ["1"]
    optional = {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"const": 1}}}
    assert Language(json={**optional, "$defs": {"A": {"$ref": "#/$defs/A"}}}).allows('{"y":1}', "{}") == [
        '{"y":1}',
        "{}",
    ]


def test_numbers_without_bounds_have_a_maximum_length() -> None:
    nines = "9" * 18
    for schema in (
        {"type": "integer"}, {"type": ["integer", "null"]}, {"type": "number"}, {},
        {"minimum": 5, "type": "integer"}, {"type": "number", "minimum": 0.5},
    ):  # fmt: skip
        assert Language(json=schema).allows(nines, f"9{nines}") == [nines]
    for schema in ({"type": "integer", "maximum": -3}, {"type": "integer"}, {"type": "number", "exclusiveMaximum": 1}):
        assert Language(json=schema).allows(f"-{nines}", f"-9{nines}") == [f"-{nines}"]
    inside = Language(json={"type": "object"})
    assert inside.allows(f'{{"a":{nines}}}', f'{{"a":9{nines}}}') == [f'{{"a":{nines}}}']
    number = Language(json={"type": "number"})
    assert number.allows("-0.5", "1.5e-7", "1e99", "0." + "1" * 17) == ["-0.5", "1.5e-7", "1e99", "0." + "1" * 17]
    assert number.allows("0." + "1" * 18, "1e100", "01", "1.", "+1", ".5") == []


def test_numbers_have_the_bounds_of_the_schema() -> None:
    large = Language(json={"type": "integer", "minimum": 10**18, "maximum": 2**63 - 1})
    assert large.allows(str(10**18), str(2**63 - 1), str(2**63), str(10**18 - 1)) == [str(10**18), str(2**63 - 1)]
    beyond = Language(json={"type": "integer", "minimum": 10**18})
    assert beyond.allows(str(10**18), str(2**63 - 1), str(2**63)) == [str(10**18), str(2**63 - 1)]
    with pytest.raises(ValueError, match="'minimum' is 100000000000000000000; it must be a number of 64 bits"):
        Language(json={"type": "integer", "minimum": 10**20})


def test_thousands_of_choices_are_compiled() -> None:
    choices = [f"é{number}" for number in range(4096)]
    assert Language(choice=choices).allows(choices[0], choices[-1], "é4096") == [choices[0], choices[-1]]


def test_a_tagged_union_allows_each_of_its_definitions() -> None:
    def tagged(*kinds: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"enum": list(kinds)}}, "required": ["kind"]}

    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    language = Language(json={**union, "$defs": {"a": tagged("a", "c"), "b": tagged("b")}})
    assert language.allows('{"kind":"a"}', '{"kind":"b"}', '{"kind":"d"}') == ['{"kind":"a"}', '{"kind":"b"}']
    assert "anyOf" in prepare_schema({**union, "$defs": {"a": {"type": "integer"}, "b": {"type": "string"}}})
    for first, second in (
        (tagged("a", "b"), tagged("b")),
        (tagged("a"), {**tagged("b"), "required": []}),
        ({"type": "integer"}, {"type": "number"}),
        ({"type": ["object", "null"]}, tagged("a")),
        ({"type": [[]]}, tagged("a")),
        ({"$ref": "#/$defs/b"}, tagged("a")),
        (True, tagged("a")),
    ):
        assert "oneOf" in _Preparation({**union, "$defs": {"a": first, "b": second}})._prepare(union, None, 1)
    same = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/%61"}], "$defs": {"a": tagged("a")}}
    assert "oneOf" in prepare_schema(same)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "no number of 6 digits behind the point"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "no number of 6 digits"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no number that is an integer"),
        ({"type": "integer", "minimum": 1.5}, "'minimum' of an integer is 1.5; round it"),
        ({"type": "string", "pattern": None}, "'pattern' is None; it must be a regular expression"),
        ({"const": 2**64 + 1}, "18446744073709551617, which is no number of 64 bits"),
        ({"enum": [{"a": [-(2**80)]}]}, "which is no number of 64 bits"),
    ],
)
def test_constructs_that_the_compiler_misreads_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Language(json={"type": "array", "items": schema})


def test_schema_lengths_may_be_written_as_floats() -> None:
    assert Language(json={"type": "string", "minLength": 2.0, "maxLength": 3.0}).allows('"a"', '"ab"') == ['"ab"']
    assert Language(json={"type": "array", "maxItems": 1.0}).allows("[1]", "[1,1]") == ["[1]"]


def test_long_strings_are_checked_quickly() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 500}}, "required": ["a"]}
    spec = StructuredOutputsParams(json=schema).spec
    tree = read_tree({**spec._asdict(), "max_whitespace": MAX_WHITESPACE})
    # The quotation marks stand beside the repetition, and not around the name of a rule that holds it.
    assert re.search(r'"\\"" own_pattern-\d+_1\{0, 500\} "\\""', str(tree.grammar()))


@pytest.mark.parametrize("name", ["a", "é", "日本", "😀", 'a"b', "\\", "a\n", ""])
def test_additional_properties_never_have_a_propertys_name(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"const": 1}, "ab": {}}, "additionalProperties": {"const": 2}}
    language = Language(json=schema)
    assert written({name: 1}) in language and written({name: 2}) not in language
    escaped = "".join(f"\\u{ord(one):04x}" for one in name if ord(one) < 0x10000)
    assert f'{{"{escaped}":2}}' not in language or not escaped
    for other in (f"{name}c", f"{name}é", "zebra", "ü", "日", "x\n", 'x"'):
        assert written({other: 2}) in language, other
        assert written({other: 1}) not in language
    assert written({name: 1, "ab": 3, "zebra": 2}) in language


def test_escapes_of_surrogates_come_in_pairs() -> None:
    for schema in ({"type": "string"}, {}):
        language = Language(json=schema)
        texts = ['"\\ud83d\\ude00"', '"\\uD7ff"', '"\\ue000"', '"\\u00e9"', '"\\n"']
        assert language.allows(*texts, '"\\ud83d"', '"\\ude00"', '"\\ud83d\\n"', '"\\ud83d\\ud83d"') == texts
