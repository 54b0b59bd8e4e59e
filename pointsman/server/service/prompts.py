"""Prompts: converts a request's text, token ids or conversation to token ids, and token ids to text.

    source = TextPrompts("prompt", ["The import", [5, 6, 7]])
    source.count()                                     # 2, before anything is tokenized
    prompts = await reader.read(source, "alice")

Tokenizing runs in threads of the API process (`text_work.py`), so it delays neither the event loop nor a step.
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
"""Names that chat_template_kwargs may not have. The names of the parameters of the tokenizer's `apply_chat_template`
are reserved, too."""
CHARACTERS_PER_TEXT = 64
"""Cost of each text of a conversation in addition to the text's characters: templates process each text."""
CHARACTERS_PER_TOKEN = 4
"""Cost of looking up a token's text or name, in characters."""
TOKENS_AT_ONCE = 16 * 1024
"""Number of tokens in a piece of JSON. Writing a piece blocks the event loop for 1 ms."""
SHOWN_CHARACTERS, SHOWN_TOKENS = 10_000, 2048
"""Maximum length of a prompt in the log, as the event loop writes the log."""


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The prompts in one field of a request: text, token ids, or a list of either."""

    field: str
    value: str | Sequence[Any]
    add_special_tokens: bool = True
    needs_text: bool = False
    """Whether the response echoes the prompts."""
    has_logprobs: bool = False
    """Whether the response has log probabilities, with offsets of the tokens in the text."""

    def count(self) -> int:
        """The number of prompts, without reading them.

        Raises:
            ApiError: 400, too many prompts.
        """
        if self._is_one:
            return 1
        if len(self.value) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"{self.field}: a list of {len(self.value)} prompts; at most {MAX_PROMPTS} are allowed: send several "
                "requests",
                param=self.field,
            )
        return len(self.value)

    def parts(self) -> Sequence[str | list[int]]:
        """Each prompt as the client sent it."""
        return [self.value] if self._is_one else self.value  # type: ignore[list-item]  # by the check of `_is_one`

    def token_ids(self) -> list[list[int]] | None:
        """Each prompt's token ids; None: the prompts are texts.

        Raises:
            ApiError: 400, a prompt is empty.
        """
        parts = self.parts()
        if isinstance(parts[0], str):
            return None
        if not all(parts):
            raise ApiError(400, f"{self.field}: a prompt is empty; give it one token or more", param=self.field)
        return parts  # type: ignore[return-value]  # the protocol has no lists of both

    @property
    def _is_one(self) -> bool:
        return isinstance(self.value, str) or bool(self.value and isinstance(self.value[0], int))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, which a chat template renders to one prompt."""

    body: ChatFields
    template_input: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, besides those in `body`."""
    needs_text = has_logprobs = False

    def count(self) -> int:
        """The number of prompts, which is one."""
        return 1


class PromptReader:
    """Reads prompts for one model. The argument `tenant` of methods is the request's tenant, as `TextWork` serves
    tenants in turn.

    Args:
        tokenizer: the model's tokenizer; None if the model has none.
        info: description of the engine.
        work: the threads that tokenize, render and decode.
        chat_template: chat template that replaces the tokenizer's own; None: no replacement.
    """

    def __init__(
        self, tokenizer: Any | None, info: EngineInfo, work: TextWork, chat_template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer)
        self._info = info
        self._work = work
        if tokenizer is not None:
            encode(tokenizer, "a")  # initializes the tokenizer; later calls, from several threads, do not change it
        self._chat_template = chat_template
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        # A variable named like a parameter of `apply_chat_template` would set that parameter, or make the call fail.
        own = () if tokenizer is None else signature(type(tokenizer).apply_chat_template).parameters
        self._reserved_names = RESERVED_TEMPLATE_NAMES.union(own)
        self._longest_token = max(map(len, vocabulary), default=0)
        """Maximum number of characters in a token (bytes, in byte vocabularies)."""
        self._known_names: dict[int, str] = {}
        """Names of tokens as JSON, added when a client asks for them: at most about a hundred bytes for each token."""

    async def read(self, source: TextPrompts | ChatPrompt, tenant: str = "") -> list[Prompt]:
        """The prompts of a request, in order.

        Raises:
            ValueError, ApiError: a prompt is not valid; 429, too many characters wait.
        """
        if isinstance(source, TextPrompts) and (given := source.token_ids()) is not None:
            return [Prompt(token_ids) for token_ids in given]
        size, jobs = self._prepare(source)
        with self._work.admit(tenant, size) as text:
            return [await text.run(cost, job) for cost, job in jobs]

    async def add_texts(self, source: TextPrompts | ChatPrompt, prompts: list[Prompt], tenant: str = "") -> None:
        """Add to each prompt its text, the text of each token, and the offsets of these texts, as far as the response
        needs them.

        Raises:
            ValueError: a prompt of token ids has no text.
            ApiError: 429, too many characters wait.
        """
        if not (source.needs_text or source.has_logprobs):
            return
        if source.needs_text and any(prompt.text is None for prompt in prompts):
            self._require_tokenizer()
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
        """The JSON of a prompt's tokens: `count`, `tokens`, the fields of `facts`, and `token_strs` or null.

        There may be a million tokens, so the JSON is written in pieces, each in a turn of the tenant.

        Raises:
            ValueError, ApiError: as for `read`.
        """
        self._require_tokenizer()
        size, ((cost, job),) = self._prepare(source)
        with self._work.admit(tenant, size) as text:
            count, parts = await text.run(cost, lambda: _in_parts(job().token_ids))
            tokens: list[bytes] = []
            names = [b"["] if has_names else [b"null"]
            if has_names:
                for number, part in enumerate(parts):
                    names.append(await text.run(len(part), partial(_list_piece, number, part, self._names)))
                names.append(b"]")
            for number in range(len(parts)):
                part = parts.popleft()  # in parts, as freeing a million tokens in one call takes long, too
                tokens.append(await text.run(len(part), partial(_list_piece, number, part, _ids_json)))
        head = _json({"count": count, **facts})[:-1].encode()
        return [head, b',"tokens":[', *tokens, b'],"token_strs":', *names, b"}"]

    def _names(self, token_ids: list[int]) -> str:
        """The vocabulary's names of the tokens, as elements of a JSON list."""
        known = self._known_names
        new = [token_id for token_id in set(token_ids) if token_id not in known]
        names = self._require_tokenizer().convert_ids_to_tokens(new)
        known.update({token_id: _json(name) for token_id, name in zip(new, names, strict=True)})
        return ",".join(map(known.__getitem__, token_ids))

    async def text_as_json(self, token_ids: Sequence[int], tenant: str = "") -> list[bytes]:
        """The JSON of the tokens' text, special tokens included.

        Raises:
            ValueError: there is no tokenizer, or a token id is outside the vocabulary.
            ApiError: 429, too many characters wait.
        """
        tokenizer = self._require_tokenizer()

        def decode() -> bytes:
            self._check_ids(token_ids)
            return _json({"prompt": str(tokenizer.decode(list(token_ids)))}).encode()

        size = CHARACTERS_PER_TOKEN * len(token_ids)
        with self._work.admit(tenant, size) as text:
            return [await text.run(size, decode)]

    def shown(self, prompt: Prompt) -> str:
        """The beginning of a prompt's text, or of its token ids if the model has no tokenizer, for the log."""
        if prompt.text is not None:
            return ascii(prompt.text[:SHOWN_CHARACTERS])
        first = prompt.token_ids[:SHOWN_TOKENS]
        return str(first) if self.tokenizer is None else ascii(self.tokenizer.decode(first))

    # ------------------------------------------------------------------ preparing the work

    def _prepare(self, source: TextPrompts | ChatPrompt) -> tuple[int, list[tuple[int, Callable[[], Prompt]]]]:
        """Returns the size of all texts of a request together; and for each text its size, and the function that
        converts the text to a prompt and is to be called in a thread. Sizes are in characters.

        Raises:
            ValueError, ApiError: there is no tokenizer, or a text is too long or invalid.
        """
        if isinstance(source, ChatPrompt):
            size, job = self._prepare_chat(source)
            return size, [(size, job)]
        texts = [part for part in source.parts() if isinstance(part, str)]
        for text in texts:
            self._check_length(text)
        tokenizer = self._require_tokenizer()

        def prompt_of(text: str) -> Prompt:
            return Prompt(encode(tokenizer, text, add_special_tokens=source.add_special_tokens), text)

        return sum(map(len, texts)), [(len(text), partial(prompt_of, text)) for text in texts]

    def _prepare_chat(self, source: ChatPrompt) -> tuple[int, Callable[[], Prompt]]:
        body = source.body
        kwargs = body.chat_template_kwargs or {}
        taken = self._reserved_names.intersection(kwargs)
        if taken:
            name = min(taken)
            raise ApiError(
                400, f"chat_template_kwargs: the server sets {name}, not the client; leave it out", param=name
            )
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
        tokenizer = self._require_tokenizer()
        template = self._chat_template
        if template is None and not tokenizer.chat_template:
            template = PLAIN_CHAT_TEMPLATE

        def prompt_of() -> Prompt:
            text = render_chat(tokenizer, messages, {**options, "chat_template": template})
            # The template writes special tokens such as BOS itself; the plain template does not.
            return Prompt(encode(tokenizer, text, add_special_tokens=template is PLAIN_CHAT_TEMPLATE))

        return sum(map(len, texts)) + CHARACTERS_PER_TEXT * len(texts), prompt_of

    def _check_length(self, *texts: str) -> None:
        """Refuse texts that cannot fit into `max_model_len`, before seconds are spent on tokenizing them.

        Raises:
            ApiError: 400, with the length and the limit.
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

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"the model in {self._info.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _in_parts(token_ids: list[int]) -> tuple[int, deque[list[int]]]:
    """Returns the number of token ids, and the token ids in parts of at most `TOKENS_AT_ONCE`. Empties the list
    `token_ids`."""
    count = len(token_ids)
    parts = deque[list[int]]()
    while token_ids:
        start = (len(token_ids) - 1) // TOKENS_AT_ONCE * TOKENS_AT_ONCE
        parts.appendleft(token_ids[start:])
        del token_ids[start:]
    return count, parts


def _list_piece(number: int, part: list[int], write: Callable[[list[int]], str]) -> bytes:
    """The JSON of a part of a list, with a comma in front unless `number`, the index of the part, is 0."""
    comma = "," if number else ""
    return f"{comma}{write(part)}".encode()


def _ids_json(token_ids: list[int]) -> str:
    return _json(token_ids)[1:-1]


def _add_text(decoder: TextDecoder, source: TextPrompts | ChatPrompt, prompt: Prompt) -> None:
    """Add to a prompt its text, the text of each token, and the offsets of these texts, as far as the response needs
    them."""
    if source.needs_text and prompt.text is None:
        prompt.text = decoder.prompt_text(prompt.token_ids)
    if source.has_logprobs:
        prompt.unfinished = decoder.incomplete_bytes(prompt.token_ids)
        if prompt.text is not None and source.needs_text:
            places = TextPlaces()
            places.add_text(prompt.text, is_last=True)
            prompt.pieces = decoder.prompt_pieces(prompt.token_ids, prompt.text)
            prompt.offsets = [places.place(piece) for piece in prompt.pieces]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a template's input, each of which the template may write; names of fields are left out."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one
