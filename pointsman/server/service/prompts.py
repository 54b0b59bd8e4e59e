"""Prompts: from a request's text, token ids or conversation to token ids, and from token ids to text.

    source = TextPrompts("prompt", ["The import", [5, 6, 7]])
    source.count()                                     # 2, before anything is tokenized
    prompts = await reader.read(source)

Tokenizing runs in a thread of the API process, so that it delays neither the event loop nor a step of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from pointsman.engine.text.detokenizer import TextDecoder
from pointsman.engine.text.tokenizer import PLAIN_CHAT_TEMPLATE, encode, render_chat
from pointsman.server.wire.answers import Prompt
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.logprobs import TextPlaces
from pointsman.server.wire.protocol import MAX_PROMPTS

if TYPE_CHECKING:
    from pointsman.server.wire.messages import EngineInfo
    from pointsman.server.wire.protocol import ChatFields

ResultT = TypeVar("ResultT")

RESERVED_TEMPLATE_NAMES = frozenset({"conversations", "messages", "processor_kwargs"})
"""What chat_template_kwargs may not hold, beside the parameters of the tokenizer's function that runs templates."""


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The prompts in one field of a request: text, token ids, or a list of either."""

    field: str
    value: str | Sequence[Any]
    add_special_tokens: bool = True
    needs_text: bool = False
    """Whether the answer echoes the prompts."""
    has_logprobs: bool = False
    """Whether the answer has log probabilities, and says where in its text they are."""

    def count(self) -> int:
        """The number of prompts, before any is read.

        Raises:
            ApiError: 400, too many.
        """
        if self._is_one:
            return 1
        if len(self.value) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"{self.field}: a list of {len(self.value)}; at most {MAX_PROMPTS} fit in one request: send several",
                param=self.field,
            )
        return len(self.value)

    def parts(self) -> Sequence[str | list[int]]:
        """Each prompt, as the client wrote it."""
        return [self.value] if self._is_one else self.value  # type: ignore[list-item]  # by the check of `_is_one`

    @property
    def _is_one(self) -> bool:
        return isinstance(self.value, str) or bool(self.value and isinstance(self.value[0], int))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The one prompt that a chat template makes of a conversation."""

    body: ChatFields
    template_input: Mapping[str, Any] = field(default_factory=dict)
    """What the template may read beside what `body` holds."""
    needs_text = has_logprobs = False

    def count(self) -> int:
        """One."""
        return 1


class PromptReader:
    """Reads prompts for one model.

    Args:
        tokenizer: of the model; None if it has none.
        info: of the engine.
        chat_template: in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any | None, info: EngineInfo, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer)
        self._info = info
        self._chat_template = chat_template
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pointsman-tokenizer")
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        # A name that a function on the way has for a parameter would be taken for that, or stop the call.
        own = () if tokenizer is None else signature(type(tokenizer).apply_chat_template).parameters
        self._reserved_names = RESERVED_TEMPLATE_NAMES.union(own)
        self._longest_token = max(map(len, vocabulary), default=0)
        """Characters. A text has at most this many per token: in vocabularies of bytes, these are bytes."""

    async def read(self, source: TextPrompts | ChatPrompt) -> list[Prompt]:
        """The prompts of a request, in order.

        Raises:
            ValueError, ApiError: one of them is not valid.
        """
        if isinstance(source, ChatPrompt):
            return [await self._of_chat(source)]
        return [await self._of_part(source, part) for part in source.parts()]

    async def add_texts(self, source: TextPrompts | ChatPrompt, prompts: list[Prompt]) -> None:
        """Complete prompts with what an answer says of their text.

        Raises:
            ValueError: a prompt of token ids has no text.
        """
        for prompt in prompts:
            if source.needs_text and prompt.text is None:
                self._required()
                self._check_ids(prompt.token_ids)
            if self._decoder is not None and (source.needs_text or source.has_logprobs):
                await self._in_thread(partial(_add_text, self._decoder, source, prompt))

    async def _of_part(self, source: TextPrompts, part: str | list[int]) -> Prompt:
        if isinstance(part, str):
            self._check_length(part)
            return Prompt(await self.encode(part, source.add_special_tokens), part)
        if not part:
            raise ApiError(400, f"{source.field}: one of them is empty; give one token or more", param=source.field)
        return Prompt(part)

    async def _of_chat(self, source: ChatPrompt) -> Prompt:
        body = source.body
        kwargs = body.chat_template_kwargs or {}
        taken = self._reserved_names.intersection(kwargs)
        if taken:
            name = min(taken)
            raise ApiError(400, f"chat_template_kwargs: {name} is not for templates; leave it out", param=name)
        messages = [message.as_template_input() for message in body.messages]
        self._check_length(*_texts([messages, body.tools, body.documents, kwargs]))
        options: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            **{name: value for name, value in source.template_input.items() if value is not None},
            **kwargs,
        }
        for name in ("tools", "documents"):
            if (value := getattr(body, name)) is not None:
                options[name] = value
        return Prompt(await self.render_chat(messages, **options))

    def _check_length(self, *texts: str) -> None:
        """Refuse texts that cannot fit, before tokenizing them costs seconds.

        Raises:
            ApiError: 400.
        """
        limit = self._info.max_model_len * self._longest_token
        length = sum(map(len, texts))
        if limit and length > limit:
            raise ApiError(
                400,
                f"the prompt has {length} characters, more than the {self._info.max_model_len} tokens of max_model_len "
                "can hold; shorten it",
                param="prompt",
            )

    # ------------------------------------------------------------------ in the tokenizer's thread

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids.

        Raises:
            ValueError: there is no tokenizer, or the text is not valid Unicode.
        """
        tokenizer = self._required()
        return await self._in_thread(lambda: encode(tokenizer, text, add_special_tokens=add_special_tokens))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The token ids that a chat template makes of a conversation; a plain template if the model has none.

        Raises:
            ValueError: there is no tokenizer, or the template fails on this conversation.
        """
        tokenizer = self._required()
        template = options.pop("chat_template", None) or self._chat_template
        if template is None and not tokenizer.chat_template:
            template = PLAIN_CHAT_TEMPLATE

        def render() -> list[int]:
            text = render_chat(tokenizer, messages, {**options, "chat_template": template})
            # The template has written special tokens such as BOS itself; the plain one has none.
            return encode(tokenizer, text, add_special_tokens=template is PLAIN_CHAT_TEMPLATE)

        return await self._in_thread(render)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, special tokens included.

        Raises:
            ValueError: there is no tokenizer, or a token id is outside the vocabulary.
        """
        tokenizer = self._required()
        self._check_ids(token_ids)
        return await self._in_thread(lambda: str(tokenizer.decode(list(token_ids))))

    async def names(self, token_ids: list[int]) -> list[str] | None:
        """The tokens as the vocabulary names them; None without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return await self._in_thread(lambda: list(tokenizer.convert_ids_to_tokens(token_ids)))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                raise ValueError(f"token id {token_id} is outside the model's vocabulary of {self._info.vocab_size}")

    def _required(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"the model in {self._info.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    async def _in_thread(self, function: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _add_text(decoder: TextDecoder, source: TextPrompts | ChatPrompt, prompt: Prompt) -> None:
    """Complete a prompt."""
    if source.needs_text and prompt.text is None:
        prompt.text = decoder.prompt_text(prompt.token_ids)
    if source.has_logprobs:
        prompt.unfinished = decoder.unfinished(prompt.token_ids)
        if prompt.text is not None and source.needs_text:
            places = TextPlaces()
            places.add_text(prompt.text, is_last=True)
            prompt.pieces = decoder.prompt_pieces(prompt.token_ids, prompt.text)
            prompt.offsets = [places.place(piece) for piece in prompt.pieces]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a template's input, names of fields aside: the template may write all of them."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one
