"""Prompts: text, chat templates and token ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pointsman.engine.text.tokenizer import model_directory, read_tokenizer
from pointsman.server.service import prompts
from pointsman.server.service.prompts import ChatPrompt, PromptReader, TextPrompts
from pointsman.server.wire.answers import Prompt
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.protocol import TokenizeChatRequest
from tests.server.engine_info import engine_info
from tests.server.limits import text_work


@pytest.mark.parametrize(
    ("prompt", "number"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), (["a"] * 1024, 1024)]
)
def test_prompts_are_counted_before_they_are_read(prompt: Any, number: int) -> None:
    assert TextPrompts("prompt", prompt).count() == number


def test_more_prompts_than_the_maximum_are_refused() -> None:
    with pytest.raises(ApiError, match="1025") as caught:
        TextPrompts("prompt", ["a"] * 1025).count()
    assert caught.value.status_code == 400 and caught.value.param == "prompt"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_tokenizer(model_directory("demo"))


def reader_of(tokenizer: Any, chat_template: str | None = None) -> PromptReader:
    info = engine_info(vocab_size=0 if tokenizer is None else len(tokenizer.get_vocab()))
    return PromptReader(tokenizer, info, text_work(), chat_template)


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt(TokenizeChatRequest(**fields))


def test_chat_template_renders_a_conversation_to_token_ids(tokenizer: Any) -> None:
    async def ids(source: ChatPrompt | TextPrompts, template: str | None = None) -> list[int]:
        (prompt,) = await reader_of(tokenizer, template).read(source)
        return prompt.token_ids

    async def text(token_ids: list[int]) -> str:
        found: str = json.loads(b"".join(await reader_of(tokenizer).text_as_json(token_ids)))["prompt"]
        return found

    async def run() -> None:
        question = chat(messages=[{"role": "user", "content": "What is a list?"}])
        assert "What is a list?" in await text(await ids(question))
        assert await text(await ids(question, "{{ messages[0]['content'] }}!")) == "What is a list?!"
        with pytest.raises(ValueError, match="the chat template failed"):
            await ids(question, "{{ raise_exception('no') }}")
        with pytest.raises(ValueError, match="lone surrogate"):
            await ids(TextPrompts("prompt", "\ud800"))
        with pytest.raises(ValueError, match="token id 123456 is outside"):
            await text([123456])

    asyncio.run(run())


def test_token_json_is_the_same_for_any_number_of_pieces(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TOKENS_AT_ONCE", 7)
    text = 'a "quoted" text, \U0001f600 and\nmore'
    ids = tokenizer(text)["input_ids"]

    async def made(source: str, has_names: bool) -> Any:
        reader = reader_of(tokenizer)
        prompt = TextPrompts("prompt", source)
        return json.loads(b"".join(await reader.tokens_as_json(prompt, {"max_model_len": 9}, has_names=has_names)))

    names = tokenizer.convert_ids_to_tokens(ids)
    expected = {"count": len(ids), "max_model_len": 9, "tokens": ids, "token_strs": names}
    assert asyncio.run(made(text, True)) == expected and len(ids) > 14
    assert asyncio.run(made(text, False)) == {**expected, "token_strs": None}
    assert asyncio.run(made("", True))["count"] == len(tokenizer("")["input_ids"])


def test_without_a_tokenizer_prompts_must_be_token_ids() -> None:
    reader = reader_of(None)

    async def run() -> None:
        assert [one.token_ids for one in await reader.read(TextPrompts("prompt", [[1], [2, 3]]))] == [[1], [2, 3]]
        echoed = TextPrompts("prompt", [1], needs_text=True)
        for work in (
            reader.read(TextPrompts("prompt", "a")),
            reader.text_as_json([1]),
            reader.tokens_as_json(TextPrompts("prompt", "a"), {}, has_names=False),
            reader.add_texts(echoed, await reader.read(echoed)),
        ):
            with pytest.raises(ValueError, match="has no tokenizer"):
                await work
        assert reader.shown((await reader.read(echoed))[0]) == "[1]"

    asyncio.run(run())


def test_an_empty_prompt_among_others_is_refused() -> None:
    with pytest.raises(ApiError, match="a prompt is empty"):
        asyncio.run(reader_of(None).read(TextPrompts("prompt", [[1], []])))


def test_log_shows_only_the_beginning_of_a_prompt(tokenizer: Any) -> None:
    shown = reader_of(tokenizer).shown(Prompt([1] * 10**6))
    assert len(shown) < 10 * prompts.SHOWN_TOKENS
    assert len(reader_of(tokenizer).shown(Prompt([], "\U0001f600" * 10**6))) < 11 * prompts.SHOWN_CHARACTERS
