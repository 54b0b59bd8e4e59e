"""StructuredOutputsParams: the form that the text of a request must have, with vLLM's names.

    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))

There are five kinds of form: a JSON schema, "any JSON object", a regular expression, a list of texts, or a grammar in
EBNF. This module only checks a form, and converts it to one of three kinds for the compiler (`GrammarSpec`). A separate
process checks a grammar's syntax (`grammar/compiler.py`), because checking some grammars takes hours.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pointsman.engine.params.json_schema import prepare_schema

MAX_GRAMMAR_BYTES = 64 * 1024
"""Maximum length of a schema, expression, grammar or list of choices, in bytes of UTF-8."""
MAX_CHOICES = 4096
MAX_WHITESPACE = 16
"""Maximum consecutive whitespace characters between the elements of JSON: enough for a new line indented by 15. Without
a limit, a model may write whitespace up to its token limit."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


class GrammarSpec(NamedTuple):
    """A grammar for the compiler; equal grammars are compiled once."""

    kind: Literal["json", "regex", "ebnf"]
    text: str
    any_whitespace: bool = True
    """For JSON: whether the model may choose the whitespace between elements, up to `MAX_WHITESPACE` characters in a
    row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that a request's text must have: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.
    Checked when built.

    Raises:
        ValueError: none or several of the five are given, or the given one is too long, malformed, or cannot be
            enforced.
    """

    json: str | Mapping[str, Any] | None = field(default=None, hash=False)
    """A JSON schema, as text or as a dictionary. The output has the properties in the schema's order, and other
    properties only if the schema has `additionalProperties`."""
    regex: str | None = None
    """A regular expression that the whole text must match."""
    choice: Sequence[str] | None = None
    """A list of the allowed texts; kept as a tuple."""
    grammar: str | None = None
    """A grammar in llama.cpp's EBNF (GBNF); its rule `root` derives the text."""
    json_object: bool | None = None
    """Whether any JSON object is allowed."""
    disable_any_whitespace: bool = False
    """For JSON: whether no whitespace is allowed between elements, instead of up to `MAX_WHITESPACE` characters."""
    disable_additional_properties: bool = False
    """Accepted for compatibility, without effect: objects never have properties that the schema does not allow."""
    spec: GrammarSpec = field(init=False, repr=False, compare=False)
    """The grammar for the compiler."""

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = " and ".join(given) if given else "no form"
            raise ValueError(f"structured_outputs has {what}; give exactly one of {', '.join(_FORMS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        form = given[0]
        if form == "choice":
            object.__setattr__(self, "choice", _checked_choices(self.choice))
        kind: Literal["json", "regex", "ebnf"] = "json" if form.startswith("json") else "ebnf"
        text = self._grammar_text(form)
        if form == "regex":
            kind = "regex"
        _check_text(form, text)
        any_whitespace = kind != "json" or not self.disable_any_whitespace
        object.__setattr__(self, "spec", GrammarSpec(kind, text, any_whitespace))

    def _grammar_text(self, form: str) -> str:
        if form == "json":
            return _schema_text(self.json)
        if form == "json_object":
            if self.json_object is not True:
                raise ValueError(f"json_object is {self.json_object!r}; it must be True or False")
            return '{"type": "object"}'
        if form == "choice":
            return "root ::= " + " | ".join(_quoted(one) for one in self.choice or ())
        text = getattr(self, form)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{form} is {_shown(text)}; it must be text of at least one character")
        return text


def _schema_text(schema: object) -> str:
    """A JSON schema as text, prepared for the compiler; equal for a dictionary and for the JSON text of it.

    Raises:
        ValueError: the schema is not a JSON object, or cannot be enforced.
    """
    if not isinstance(schema, (str, Mapping)):
        raise ValueError(f"json is {_shown(schema)}; it must be a JSON schema: an object, or the text of one")
    text = schema if isinstance(schema, str) else _dumped(schema)
    _check_text("json", text)  # before any other processing
    try:
        parsed = json_module.loads(text)  # also for a dictionary, so that only JSON values remain
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
        raise ValueError(f"json has a value that JSON cannot express: {error}; give a JSON schema") from None
    except RecursionError:
        raise ValueError("json is nested too deeply; flatten the schema") from None


def _checked_choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise ValueError(f"choice is {_shown(choices)}; it must be a list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices):,} texts; give 1 to {MAX_CHOICES:,}")
    for one in choices:
        if not isinstance(one, str) or not one:
            raise ValueError(f"choice holds {_shown(one)}; it must hold texts of at least one character")
    num_characters = sum(map(len, choices))
    if num_characters > MAX_GRAMMAR_BYTES:  # checked before a grammar is written
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


def _check_text(form: str, text: str) -> None:
    if "\x00" in text or (form == "json" and "\\u0000" in text):
        raise ValueError(f"{form} holds a NUL character; remove it")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{form} is not valid Unicode (a lone surrogate); remove it") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{form} takes {num_bytes:,} bytes, and the maximum is {MAX_GRAMMAR_BYTES:,}; shorten it")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
