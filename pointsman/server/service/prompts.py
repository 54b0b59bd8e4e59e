"""Prompts: from a request's text, token ids or conversation to token ids, and from token ids to text.

    source = TextPrompts("prompt", ["The import", [5, 6, 7]])
    source.count()                                     # 2, before anything is tokenized
    prompts = await reader.read(source, "alice")

Tokenizing runs in threads of the API process (`text_work.py`), so that it delays neither the event loop nor a step of
the engine.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from pointsman.engine.text.detokenizer import TextDecoder
from pointsman.engine.text.tokenizer import PLAIN_CHAT_TEMPLATE, encode, render_chat
from pointsman.server.wire.answers import Prompt
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.logprobs import TextPlaces
from pointsman.server.wire.protocol import MAX_PROMPTS

if TYPE_CHECKING:
    from pointsman.server.service.text_work import TextWork
    from pointsman.server.wire.messages import EngineInfo
    from pointsman.server.wire.protocol import ChatFields

RESERVED_TEMPLATE_NAMES = frozenset({"conversations", "messages", "processor_kwargs"})
"""What chat_template_kwargs may not hold, beside the parameters of the tokenizer's function that runs templates."""
CHARACTERS_PER_TEXT = 64
"""What each text of a conversation counts as, beside its characters: a template does something with each."""
CHARACTERS_PER_TOKEN = 4
"""What a token counts as whose text or name is looked up."""
TOKENS_AT_ONCE = 16 * 1024
"""Tokens of a piece of JSON. Whatever makes one keeps the event loop waiting, for 1 ms."""
SHOWN_CHARACTERS, SHOWN_TOKENS = 10_000, 2048
"""Of a prompt in the log, at most: the event loop writes it."""


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

    def token_ids(self) -> list[list[int]] | None:
        """Each prompt's token ids; None: the prompts are texts.

        Raises:
            ApiError: 400, one of them is empty.
        """
        parts = self.parts()
        if isinstance(parts[0], str):
            return None
        if not all(parts):
            raise ApiError(400, f"{self.field}: one of them is empty; give one token or more", param=self.field)
        return parts  # type: ignore[return-value]  # the protocol has no lists of both

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
    """Reads prompts for one model. The tenant, where a method takes one, is that of the request: its turn comes beside
    those of the others (`TextWork`).

    Args:
        tokenizer: of the model; None if it has none.
        info: of the engine.
        work: the threads for all of this.
        chat_template: in place of the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any | None, info: EngineInfo, work: TextWork, chat_template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer)
        self._info = info
        self._work = work
        if tokenizer is not None:
            encode(tokenizer, "a")  # the first call sets a tokenizer up; later ones, of several threads, change nothing
        self._chat_template = chat_template
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        # A name that a function on the way has for a parameter would be taken for that, or stop the call.
        own = () if tokenizer is None else signature(type(tokenizer).apply_chat_template).parameters
        self._reserved_names = RESERVED_TEMPLATE_NAMES.union(own)
        self._longest_token = max(map(len, vocabulary), default=0)
        """Characters. A text has at most this many per token: in vocabularies of bytes, these are bytes."""
        self._known_names: dict[int, str] = {}
        """Of tokens, as JSON: a hundred bytes for each of the vocabulary at most, once it was asked for."""

    async def read(self, source: TextPrompts | ChatPrompt, tenant: str = "") -> list[Prompt]:
        """The prompts of a request, in order.

        Raises:
            ValueError, ApiError: one of them is not valid; 429, too many characters wait.
        """
        if isinstance(source, TextPrompts) and (given := source.token_ids()) is not None:
            return [Prompt(token_ids) for token_ids in given]
        size, jobs = self._prepare(source)
        with self._work.admit(tenant, size) as text:
            return [await text.run(cost, job) for cost, job in jobs]

    async def add_texts(self, source: TextPrompts | ChatPrompt, prompts: list[Prompt], tenant: str = "") -> None:
        """Complete prompts with what an answer says of their text.

        Raises:
            ValueError: a prompt of token ids has no text.
            ApiError: 429, too many characters wait.
        """
        if not (source.needs_text or source.has_logprobs):
            return
        if source.needs_text and any(prompt.text is None for prompt in prompts):
            self._required()
        decoder = self._decoder
        if decoder is None:
            return

        def add(prompt: Prompt) -> None:
            if source.needs_text and prompt.text is None:
                self._check_ids(prompt.token_ids)
            _add_text(decoder, source, prompt)

        sizes = [CHARACTERS_PER_TOKEN * len(prompt.token_ids) for prompt in prompts]
        with self._work.admit(tenant, sum(sizes)) as text:
            for prompt, size in zip(prompts, sizes, strict=True):
                await text.run(size, partial(add, prompt))

    async def tokens_as_json(
        self, source: TextPrompts | ChatPrompt, facts: Mapping[str, Any], tenant: str = "", *, has_names: bool
    ) -> list[bytes]:
        """The JSON of a prompt's tokens: `count` and `tokens`, what `facts` says, and `token_strs`, or null.

        There may be a million, so the JSON is in pieces, each of which is a turn of the tenant.

        Raises:
            ValueError, ApiError: as for `read`.
        """
        self._required()
        size, ((cost, job),) = self._prepare(source)
        with self._work.admit(tenant, size) as text:
            count, parts = await text.run(cost, lambda: _in_parts(job().token_ids))
            tokens: list[bytes] = []
            names = [b"["] if has_names else [b"null"]
            if has_names:
                for number, part in enumerate(parts):
                    names.append(await text.run(len(part), partial(_piece, number, part, self._names)))
                names.append(b"]")
            for number in range(len(parts)):
                part = parts.popleft()  # a million are not forgotten at once either
                tokens.append(await text.run(len(part), partial(_piece, number, part, _numbers)))
        head = _json({"count": count, **facts})[:-1].encode()
        return [head, b',"tokens":[', *tokens, b'],"token_strs":', *names, b"}"]

    def _names(self, token_ids: list[int]) -> str:
        """The vocabulary's names of tokens, as JSON with commas between them."""
        known = self._known_names
        new = [token_id for token_id in set(token_ids) if token_id not in known]
        names = self._required().convert_ids_to_tokens(new)
        known.update({token_id: _json(name) for token_id, name in zip(new, names, strict=True)})
        return ",".join(map(known.__getitem__, token_ids))

    async def text_as_json(self, token_ids: Sequence[int], tenant: str = "") -> list[bytes]:
        """The JSON of the tokens' text, special tokens included.

        Raises:
            ValueError: there is no tokenizer, or a token id is outside the vocabulary.
            ApiError: 429, too many characters wait.
        """
        tokenizer = self._required()

        def decode() -> bytes:
            self._check_ids(token_ids)
            return _json({"prompt": str(tokenizer.decode(list(token_ids)))}).encode()

        size = CHARACTERS_PER_TOKEN * len(token_ids)
        with self._work.admit(tenant, size) as text:
            return [await text.run(size, decode)]

    def shown(self, prompt: Prompt) -> str:
        """The beginning of a prompt's text, or of its ids where the model has no tokenizer, for the log."""
        if prompt.text is not None:
            return ascii(prompt.text[:SHOWN_CHARACTERS])
        first = prompt.token_ids[:SHOWN_TOKENS]
        return str(first) if self.tokenizer is None else ascii(self.tokenizer.decode(first))

    # ------------------------------------------------------------------ what there is to do

    def _prepare(self, source: TextPrompts | ChatPrompt) -> tuple[int, list[tuple[int, Callable[[], Prompt]]]]:
        """The size of a request's texts, and for each of them its own and what makes the prompt, in a thread.

        Raises:
            ValueError, ApiError: there is no tokenizer, or one of them is too long or not valid.
        """
        if isinstance(source, ChatPrompt):
            size, job = self._of_chat(source)
            return size, [(size, job)]
        texts = [part for part in source.parts() if isinstance(part, str)]
        for text in texts:
            self._check_length(text)
        tokenizer = self._required()

        def prompt_of(text: str) -> Prompt:
            return Prompt(encode(tokenizer, text, add_special_tokens=source.add_special_tokens), text)

        return sum(map(len, texts)), [(len(text), partial(prompt_of, text)) for text in texts]

    def _of_chat(self, source: ChatPrompt) -> tuple[int, Callable[[], Prompt]]:
        body = source.body
        kwargs = body.chat_template_kwargs or {}
        taken = self._reserved_names.intersection(kwargs)
        if taken:
            name = min(taken)
            raise ApiError(400, f"chat_template_kwargs: {name} is not for templates; leave it out", param=name)
        messages = [message.as_template_input() for message in body.messages]
        texts = list(_texts([messages, body.tools, body.documents, kwargs]))
        self._check_length(*texts)
        options: dict[str, Any] = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            **{name: value for name, value in source.template_input.items() if value is not None},
            **kwargs,
        }
        for name in ("tools", "documents"):
            if (value := getattr(body, name)) is not None:
                options[name] = value
        tokenizer = self._required()
        template = self._chat_template
        if template is None and not tokenizer.chat_template:
            template = PLAIN_CHAT_TEMPLATE

        def prompt_of() -> Prompt:
            text = render_chat(tokenizer, messages, {**options, "chat_template": template})
            # The template has written special tokens such as BOS itself; the plain one has none.
            return Prompt(encode(tokenizer, text, add_special_tokens=template is PLAIN_CHAT_TEMPLATE))

        return sum(map(len, texts)) + CHARACTERS_PER_TEXT * len(texts), prompt_of

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

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                raise ValueError(f"token id {token_id} is outside the model's vocabulary of {self._info.vocab_size}")

    def _required(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"the model in {self._info.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _in_parts(token_ids: list[int]) -> tuple[int, deque[list[int]]]:
    """How many there are, and the ids themselves, `TOKENS_AT_ONCE` together; they are taken from the list."""
    count = len(token_ids)
    parts = deque[list[int]]()
    while token_ids:
        start = (len(token_ids) - 1) // TOKENS_AT_ONCE * TOKENS_AT_ONCE
        parts.appendleft(token_ids[start:])
        del token_ids[start:]
    return count, parts


def _piece(number: int, part: list[int], write: Callable[[list[int]], str]) -> bytes:
    """A part of a JSON list, behind those before it."""
    comma = "," if number else ""
    return f"{comma}{write(part)}".encode()


def _numbers(token_ids: list[int]) -> str:
    return _json(token_ids)[1:-1]


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
