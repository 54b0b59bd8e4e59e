"""Structured output of the official client, with names and literals in ten languages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel, Field, create_model

from tests.engine.text_tokenizers import HARD_KINDS
from tests.engine.tiny_models import FAMILIES, build
from tests.forked_engines import start_server
from tests.forms import short_or_long

pytestmark = pytest.mark.e2e

LANGUAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Latin": ("année", ("Québec", "naïve façade", "Ærøskøbing", "żółw")),
    "Greek": ("χώρα", ("Ελλάδα", "ώρα")),
    "Cyrillic": ("страна", ("Україна", "ёлка")),
    "Arabic": ("بلد", ("مصر", "لبنان")),
    "Devanagari": ("देश", ("भारत", "नमस्ते")),
    "Chinese": ("国家", ("中国", "𠮷野家")),
    "Japanese": ("くに", ("日本", "カタカナ")),
    "Korean": ("나라", ("대한민국", "서울")),
    "emoji": ("icon", ("😀", "👩‍👩‍👧", "🇩🇪", "e\u0301")),
    "signs": ("unit", ("°C", "°F", "£5", "§ 3", "½", "ÿ1", '"\\/\t')),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path, tokenizer = tmp_path_factory.mktemp("model"), HARD_KINDS["byte-level"]()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = FAMILIES["llama"]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 2048
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    build(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with (
        start_server("--model", str(path)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one,
    ):
        yield one


def answer_class(language: str) -> type[BaseModel]:
    """A class with a field of this name, of these literals, and with lists, options and nested objects of them."""
    name, literals = LANGUAGES[language]
    choice = Literal[literals]  # type: ignore[valid-type]
    inner = create_model(f"Inner{language}", **{name: (choice, ...), "count": (int, Field(ge=0, le=9))})  # type: ignore[call-overload]
    fields: Any = {
        name: (choice, ...),
        f"{name}_2": (list[choice], Field(min_length=1, max_length=3)),
        "one": (Literal[literals[0]], ...),
        "other": (choice | None, ...),
        "within": (inner, ...),
    }
    made: type[BaseModel] = create_model(f"Answer{language}", **fields)
    return made


@pytest.mark.parametrize("language", LANGUAGES)
def test_parsed_response_is_an_instance_of_its_class(client: openai.OpenAI, language: str) -> None:
    wanted = answer_class(language)
    for seed in range(short_or_long(1, 5)):
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "messages": [{"role": "user", "content": "The text"}],
            "response_format": wanted,
            "max_tokens": 1000,
            "seed": seed,
            "extra_body": {"structured_outputs": None},
        }
        (choice,) = client.chat.completions.parse(**asked).choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, wanted)
        with client.chat.completions.stream(**asked) as stream:
            parsed = stream.get_final_completion().choices[0].message.parsed
        assert parsed == choice.message.parsed


def test_every_literal_of_a_schema_can_be_generated(client: openai.OpenAI) -> None:
    literals = [one for _, many in LANGUAGES.values() for one in many]
    model = client.models.list().data[0].id
    for literal in literals[:: short_or_long(3, 1)]:
        wanted = create_model("Answer", value=(Literal[literal], ...))  # type: ignore[valid-type]
        (choice,) = client.chat.completions.parse(
            model=model, messages=[{"role": "user", "content": "x"}], response_format=wanted, max_tokens=300
        ).choices
        assert choice.message.parsed is not None and choice.message.parsed.value == literal  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"x": {"anyOf": []}}, "required": ["x"]}, "'anyOf' is []"),
        ({"type": []}, "'type' is []"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "required": ["x"],
          "$defs": {"A": {"$ref": "#/$defs/A"}}}, "it allows no text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_allows_no_text_is_refused(
    client: openai.OpenAI, schema: dict[str, Any], words: str, stream: bool
) -> None:
    check_refusal(client, {"json": schema}, words, stream)


@pytest.mark.parametrize(
    "constraint", [{"grammar": 'root ::= "a" x\nx ::= x "b"'}, {"regex": r"a[^\s\S]"}, {"regex": r"[^\d\D]"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_grammar_without_matches_is_refused_before_it_runs(
    client: openai.OpenAI, constraint: dict[str, str], stream: bool
) -> None:
    check_refusal(client, constraint, "it allows no text", stream)


def check_refusal(client: openai.OpenAI, constraint: dict[str, Any], words: str, stream: bool) -> None:
    """The refusal has a status, in streams too: no step has run."""
    body = {"prompt": "The text", "max_tokens": 9, "stream": stream, "structured_outputs": constraint}
    answer = httpx.post(f"{client.base_url}completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
