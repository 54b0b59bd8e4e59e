"""What counts as a prompt; text, chat templates and token ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pointsman.engine.text.tokenizer import model_directory, read_tokenizer
from pointsman.server.service.prompts import PromptReader, TextPrompts
from pointsman.server.wire.errors import ApiError
from tests.server.engine_info import engine_info


@pytest.mark.parametrize(
    ("prompt", "number"), [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), (["a"] * 1024, 1024)]
)
def test_prompts_are_counted_before_they_are_read(prompt: Any, number: int) -> None:
    assert TextPrompts("prompt", prompt).count() == number


def test_too_many_are_refused() -> None:
    with pytest.raises(ApiError, match="1025") as caught:
        TextPrompts("prompt", ["a"] * 1025).count()
    assert caught.value.status_code == 400 and caught.value.param == "prompt"


def test_chat_templates_and_text() -> None:
    tokenizer = read_tokenizer(model_directory("demo"))
    reader = PromptReader(tokenizer, engine_info(vocab_size=len(tokenizer.get_vocab())))

    async def run() -> None:
        messages = [{"role": "user", "content": "What is a list?"}]
        tokens = await reader.render_chat(messages, add_generation_prompt=True)
        assert "What is a list?" in await reader.decode(tokens)
        plain = await reader.render_chat(messages, chat_template="{{ messages[0]['content'] }}!")
        assert await reader.decode(plain) == "What is a list?!"
        with pytest.raises(ValueError, match="the chat template failed"):
            await reader.render_chat(messages, chat_template="{{ raise_exception('no') }}")
        with pytest.raises(ValueError, match="lone surrogate"):
            await reader.encode("\ud800")
        with pytest.raises(ValueError, match="token id 123456 is outside"):
            await reader.decode([123456])

    asyncio.run(run())
