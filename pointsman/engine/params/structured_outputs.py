"""StructuredOutputsParams: what the text of a request must look like, under the names vLLM's users know.

    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

One of five ways says it: a JSON schema, "any JSON object", a regular expression, a list of texts, or a grammar in EBNF.
Here they are only checked and brought into one of the three forms that are compiled (`GrammarSpec`); a grammar's own
syntax is checked by the compiler, in a process of its own (`grammar/compiler.py`), because some grammars take hours.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pointsman.engine.params.json_schema import prepare_schema

MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest schema, expression, grammar or list of choices, in bytes of UTF-8."""
MAX_CHOICES = 4096
MAX_WHITESPACE = 16
"""Whitespace characters in a row between the elements of JSON: enough for a new line indented by 15. Without a limit, a
model that likes whitespace writes nothing else until its tokens run out."""

_WAYS = ("json", "regex", "choice", "grammar", "json_object")


class GrammarSpec(NamedTuple):
    """A grammar as it is compiled; equal ones are compiled once."""

    kind: Literal["json", "regex", "ebnf"]
    text: str
    any_whitespace: bool = True
    """Of JSON: whether whitespace between elements is the model's choice, up to `MAX_WHITESPACE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is given. Checked when built.

    Raises:
        ValueError: none is given or several, or one is too long, malformed, or asks for what could not be enforced.
    """

    json: str | Mapping[str, Any] | None = field(default=None, hash=False)
    """A JSON schema, as text or as a dictionary. Properties come in its order, and others only if the schema itself
    says `additionalProperties`."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which the output is; kept as a tuple."""
    grammar: str | None = None
    """A grammar in EBNF as llama.cpp writes it (GBNF); the text is what its rule `root` derives."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """For JSON: no whitespace but what single separators bring, in place of up to `MAX_WHITESPACE` characters."""
    disable_additional_properties: bool = False
    """Accepted for compatibility: objects have no properties that the schema does not allow, with it and without."""
    spec: GrammarSpec = field(init=False, repr=False, compare=False)
    """What is compiled."""

    def __post_init__(self) -> None:
        given = [name for name in _WAYS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"structured_outputs has {what}; give exactly one of {', '.join(_WAYS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        way = given[0]
        if way == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        kind: Literal["json", "regex", "ebnf"] = "json" if way.startswith("json") else "ebnf"
        text = self._text(way)
        if way == "regex":
            kind = "regex"
        _check_text(way, text)
        any_whitespace = kind != "json" or not self.disable_any_whitespace
        object.__setattr__(self, "spec", GrammarSpec(kind, text, any_whitespace))

    def _text(self, way: str) -> str:
        if way == "json":
            return _schema_text(self.json)
        if way == "json_object":
            if self.json_object is not True:
                raise ValueError(f"json_object is {self.json_object!r}; it must be True or False")
            return '{"type": "object"}'
        if way == "choice":
            return "root ::= " + " | ".join(_quoted(one) for one in self.choice or ())
        text = getattr(self, way)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{way} is {_shown(text)}; it must be text of at least one character")
        return text


def _schema_text(schema: object) -> str:
    """A schema as text, the same for a dictionary and for its text.

    Raises:
        ValueError: it is no JSON object, or uses what could not be enforced.
    """
    if not isinstance(schema, (str, Mapping)):
        raise ValueError(f"json is {_shown(schema)}; it must be a JSON schema: an object, or the text of one")
    text = schema if isinstance(schema, str) else _dumped(schema)
    _check_text("json", text)  # before anything else is done with it
    try:
        parsed = json_module.loads(text)  # of a dictionary, too: what follows sees what JSON can hold and nothing else
    except ValueError as error:
        raise ValueError(f"json is not valid JSON: {error}; give a JSON schema") from None
    except RecursionError:
        raise ValueError("json is nested too deeply; flatten the schema") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"json is {_shown(parsed)}; it must be a JSON schema: an object, or the text of one")
    return _dumped(prepare_schema(parsed))


def _dumped(value: object) -> str:
    try:
        return json_module.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"json holds what JSON cannot express: {error}; give a JSON schema") from None
    except RecursionError:
        raise ValueError("json is nested too deeply; flatten the schema") from None


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise ValueError(f"choice is {_shown(choices)}; it must be a list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices):,} texts; give 1 to {MAX_CHOICES:,}")
    for one in choices:
        if not isinstance(one, str) or not one:
            raise ValueError(f"choice holds {_shown(one)}; it must hold texts of at least one character")
    num_characters = sum(map(len, choices))
    if num_characters > MAX_GRAMMAR_BYTES:  # before they are written as a grammar
        raise ValueError(
            f"choice has {num_characters:,} characters, and the maximum is {MAX_GRAMMAR_BYTES:,}; shorten it"
        )
    return tuple(choices)


def _quoted(text: str) -> str:
    """A text as a literal of EBNF."""
    pieces = []
    for character in text:
        if character in '"\\':
            pieces.append("\\" + character)
        elif ord(character) < 0x20 or ord(character) == 0x7F:
            pieces.append(f"\\u{ord(character):04x}")
        else:
            pieces.append(character)
    return '"' + "".join(pieces) + '"'


def _check_text(way: str, text: str) -> None:
    if "\x00" in text or (way == "json" and "\\u0000" in text):
        raise ValueError(f"{way} holds a NUL character; remove it")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{way} is not valid Unicode (a lone surrogate); remove it") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{way} takes {num_bytes:,} bytes, and the maximum is {MAX_GRAMMAR_BYTES:,}; shorten it")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
