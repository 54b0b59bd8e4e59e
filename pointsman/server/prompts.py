"""From what clients call a prompt to token ids: text, token ids, lists of either, conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.engine.errors import first_line
from pointsman.engine.text.tokenizer import model_directory, read_tokenizer, render_chat
from pointsman.server.errors import ApiError
from pointsman.server.protocol import MAX_PROMPTS

if TYPE_CHECKING:
    from pointsman.server.engine_client import EngineClient
    from pointsman.server.protocol import ChatFields, CompletionRequest

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "max_length",
    }
)
"""What the function that runs templates takes for itself, so that chat_template_kwargs cannot be called so."""


def check_chat_template(template: str, model: str | Path | None) -> None:
    """Refuse a chat template that no conversation could be written with: one that is empty, does not compile, or fails
    on a user's message. Reads the model's tokenizer, which brings the special tokens, and nothing else of the model.

    Args:
        template: in place of the tokenizer's own.
        model: as `Engine` takes it; nothing is rendered if it has no tokenizer, as its prompts must be token ids.

    Raises:
        ValueError: the template is none.
        ModelLoadError: the tokenizer cannot be read.
    """
    if not template.strip():
        raise ValueError("chat_template is empty; give a Jinja template, or leave it out for the model's own")
    tokenizer = read_tokenizer(model_directory(model))
    if tokenizer is None:
        return
    messages = [{"role": "user", "content": "Hello"}]
    try:
        render_chat(tokenizer, messages, {"chat_template": template, "add_generation_prompt": True})
    except ValueError as error:
        cause = error.__cause__ or error  # an error of Jinja's syntax knows its line
        line = getattr(cause, "lineno", None)
        where = "" if line is None else f" (line {line})"
        raise ValueError(
            f"chat_template cannot be used: {first_line(cause)}{where}; correct it, or leave it out for the model's own"
        ) from error


@dataclass(slots=True)
class Prompt:
    """A prompt, ready for the engine."""

    token_ids: list[int]
    text: str | None = None
    """As the client wrote it; None if it sent token ids, or a conversation."""


def count_prompts(prompt: str | Sequence[Any], field: str = "prompt") -> int:
    """How many prompts a request has, before any is looked at.

    Raises:
        ApiError: 400, too many.
    """
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return 1
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400,
            f"{field}: a list of {len(prompt)}; at most {MAX_PROMPTS} fit in one request: send several",
            param=field,
        )
    return len(prompt)


class PromptReader:
    """Makes prompts for one model.

    Args:
        client: tokenizes, in a thread of its own.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        vocabulary = {} if client.tokenizer is None else client.tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary), default=0)
        """Characters. No text is more characters than so many per token: in vocabularies of bytes, these are bytes."""

    async def of_completion(self, body: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion request, in order.

        Raises:
            ValueError, ApiError: one of them is none.
        """
        return await self.of_field("prompt", body.prompt, body.add_special_tokens)

    async def of_field(self, field: str, value: Any, add_special_tokens: bool) -> list[Prompt]:
        """The prompts in a field of a request: text, token ids, or a list of either, and not empty.

        Raises:
            ValueError, ApiError: one of them is none.
        """
        if isinstance(value, str) or isinstance(value[0], int):
            value = [value]
        return [await self._of_part(field, part, add_special_tokens) for part in value]

    async def _of_part(self, field: str, part: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(part, str):
            self.check_length(part)
            return Prompt(await self._client.encode(part, add_special_tokens), part)
        if not part:
            raise ApiError(400, f"{field}: one of them is empty; give one token or more", param=field)
        return Prompt(part)

    async def of_chat(self, body: ChatFields, **template_input: Any) -> Prompt:
        """The prompt that the chat template makes of a conversation.

        Args:
            body: the conversation.
            template_input: what the template may read beside what `body` says.

        Raises:
            ValueError, ApiError: the template refuses it, or the request what is not its to set.
        """
        kwargs = body.chat_template_kwargs or {}
        taken = RESERVED_TEMPLATE_NAMES.intersection(kwargs)
        if taken:
            name = min(taken)
            raise ApiError(400, f"chat_template_kwargs: {name} is not for templates; leave it out", param=name)
        messages = [message.as_template_input() for message in body.messages]
        self.check_length(*_texts([messages, body.tools, body.documents, kwargs]))
        options: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            **{name: value for name, value in template_input.items() if value is not None},
            **kwargs,
        }
        for name in ("tools", "documents"):
            if (value := getattr(body, name)) is not None:
                options[name] = value
        return Prompt(await self._client.render_chat(messages, **options))

    async def text_of(self, prompt: Prompt) -> str:
        """The prompt as text, to be echoed."""
        return await self._client.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def check_length(self, *texts: str) -> None:
        """Refuse texts that cannot fit, before tokenizing them costs seconds.

        Raises:
            ApiError: 400.
        """
        limit = self._client.info.max_model_len * self._longest_token
        length = sum(map(len, texts))
        if limit and length > limit:
            raise ApiError(
                400,
                f"the prompt has {length} characters, more than the {self._client.info.max_model_len} tokens of "
                f"max_model_len can hold; shorten it",
                param="prompt",
            )


def _texts(value: Any) -> Iterator[str]:
    """Every text in what a template is given, names of fields aside: it may write all of them."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one
