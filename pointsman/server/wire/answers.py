"""Response writers: turn the deltas of a request into JSON or events for its client.

    CompletionWriter   /v1/completions         whole, or as events
    ChatWriter         /v1/chat/completions    whole, or as events
    EmbeddingWriter    /v1/embeddings          whole

A writer writes one response. A response has choices, one per sample of each prompt; a choice's deltas become
events in order. A chunk between a choice's first and last one is usually plain: it differs from the previous chunk only
in the text. Plain chunks are written from three parts: the choice's head, the text, the tail.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, ClassVar

from pointsman.server.wire.logprobs import Logprobs, LogprobWriter, TextPlaces, UnplacedLogprobs, prompt_logprobs
from pointsman.server.wire.pieces import Pieces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pointsman.engine.outputs.request_output import Piece
    from pointsman.server.wire.errors import ApiError
    from pointsman.server.wire.messages import Delta
    from pointsman.server.wire.protocol import (
        ChatCompletionRequest,
        CompletionRequest,
        EmbeddingRequest,
        SamplingFields,
    )

quote: Callable[[str], str] = encode_basestring_ascii
"""Converts text to JSON in ASCII, as some clients split lines at characters such as U+2028."""


@dataclass(slots=True)
class Prompt:
    """A prompt as the engine gets it, and the parts of the prompt's text that a response repeats."""

    token_ids: list[int]
    text: str | None = None
    """The client's text, or the text to echo; None if the client sent token ids or a conversation."""
    pieces: Sequence[Piece] = ()
    """Text of each token, only for echoed prompts with log probabilities."""
    offsets: Sequence[int] = ()
    """Offset of each piece in the text, in characters."""
    unfinished: bytes = b""
    """Bytes of an unfinished character at the end of the prompt, which belongs to the generated text; only for
    responses with log probabilities."""


@dataclass(slots=True)
class Choice:
    """One choice of a response: a sample of a prompt, and the counts of tokens that were read from its stream."""

    index: int
    """Index of the choice in the response."""
    prompt_index: int
    """Index of the choice's prompt in the request."""
    prompt: Prompt
    num_tokens: int = 0
    """Number of generated tokens that were read."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    plain_head: str = ""
    """Head of the choice's plain chunks, up to the text; "" before the first chunk."""
    unplaced: UnplacedLogprobs | None = None
    """Log probabilities of tokens that were read and are not written yet; only for completions."""


def usage(choices: Sequence[Choice], num_completion_tokens: int | None = None) -> dict[str, Any]:
    """The JSON field `usage` of a response: numbers of prompt tokens and generated tokens. The tokens of a prompt are
    counted once, also if the prompt has several samples.

    Args:
        choices: all or some choices of the response.
        num_completion_tokens: number of generated tokens to report; None: all that were read.
    """
    prompts = {choice.prompt_index: choice for choice in reversed(choices)}  # the first choice of each prompt
    num_prompt = sum(len(choice.prompt.token_ids) for choice in prompts.values())
    num_cached = sum(choice.num_cached_tokens for choice in prompts.values())
    if num_completion_tokens is None:
        num_completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class AnswerWriter(ABC):
    """Writes one response.

    Args:
        body: the client's request.
        model: the name of the model in the response.
        request_id: part of the response's id; None: the body's own id, or a random one.
    """

    id_prefix: ClassVar[str]

    def __init__(self, body: SamplingFields | EmbeddingRequest, model: str, request_id: str | None = None) -> None:
        self.id = f"{self.id_prefix}-{request_id or body.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    @abstractmethod
    def whole(self, choices: list[Choice], outputs: list[Delta]) -> Pieces[str]:
        """The body of a response that is not streamed; one output per choice, with all its deltas merged.

        Raises:
            ValueError: JSON has no form for a value, such as a NaN.
        """

    def envelope(self, object_name: str) -> dict[str, Any]:
        """The first fields of every response, and of every event of a response."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class TextWriter(AnswerWriter):
    """Writes a response of generated text, whole or as events.

    Args:
        body: the client's request.
        model: the name of the model in the response.
        request_id: part of the response's id; None: the body's own id, or a random one.
        num_top: number of most likely tokens with log probabilities for each token; None: no log probabilities.
    """

    object_name: ClassVar[str]
    """Value of the JSON field `object` in the events of this kind of response."""
    head: ClassVar[str]
    """The part of a plain chunk between the choice's index and the text."""
    middle: ClassVar[str]
    """The part of a plain chunk between the text and the finish reasons."""
    tail: ClassVar[str]
    """The part of a plain chunk after the text, unless the chunk is the last: `middle`, and null for the finish
    reasons."""

    def __init__(self, body: SamplingFields, model: str, request_id: str | None = None, *, num_top: int | None) -> None:
        super().__init__(body, model, request_id)
        self._logprobs_of = LogprobWriter(num_top or 0, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._has_logprobs = num_top is not None
        self._returns_token_ids = bool(body.return_token_ids)
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._continuous_usage = self._includes_usage and bool(options and options.continuous_usage_stats)
        self._is_plain = not (self._has_logprobs or self._returns_token_ids or self._continuous_usage)
        self._has_opening = True
        """Whether a choice's first chunk has more fields than its other chunks."""

    def plain_chunk(self, choice: Choice, text: str) -> bytes | None:
        """The event of text between a choice's first and last delta. None: `chunk` must write the event, as for the
        first delta."""
        if self._is_plain and (head := choice.plain_head):
            return f"{head}{quote(text)}{self.tail}".encode("ascii")
        return None

    def chunk(self, choice: Choice, delta: Delta) -> Pieces[bytes]:
        """The events of a delta; empty if the delta has no token, no text and no finish reason."""
        if not (delta.token_ids or delta.text or delta.finish_reason is not None):
            return b""
        is_first = not choice.plain_head
        if is_first:
            choice.plain_head = (
                f'data: {{"id":{quote(self.id)},"object":{quote(self.object_name)},"created":{self.created},'
                f'"model":{quote(self.model)},"choices":[{{"index":{choice.index},{self.head}'
            )
        if not self._is_plain or (is_first and self._has_opening):
            return (yield from self._full_chunk(choice, delta, is_first=is_first))
        tail = self.tail
        if delta.finish_reason is not None:
            reasons = f'"finish_reason":{quote(delta.finish_reason)},"stop_reason":{to_json(delta.stop_reason)}'
            tail = f"{self.middle}{reasons}}}]}}\n\n"
        return f"{choice.plain_head}{quote(delta.text)}{tail}".encode("ascii")

    @abstractmethod
    def _full_chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Pieces[bytes]:
        """As `chunk`, with every field that the client asked for, and the fields of a choice's first or last chunk."""

    def _choice_event(
        self,
        choice: Choice,
        data: dict[str, Any],
        more: dict[str, Any] | None = None,
        *,
        logprobs: str = "null",
        num_tokens: int | None = None,
    ) -> bytes:
        """The event of a choice.

        Args:
            choice: the choice.
            data: further fields of the choice's object in the event.
            more: fields of the event in addition to `choices`.
            logprobs: log probabilities of the event's tokens, as JSON.
            num_tokens: number of generated tokens in the event's usage; None: all tokens so far.
        """
        fields = {**self.envelope(self.object_name), **(more or {})}
        if self._continuous_usage:
            fields["usage"] = self._usage([choice], num_tokens)
        return written_event(with_json(fields, {"choices": f"[{with_json(data, {'logprobs': logprobs})}]"}))

    def usage_event(self, choices: list[Choice]) -> bytes:
        """The event after the last chunk; empty unless the client asked for usage."""
        if not self._includes_usage:
            return b""
        return event({**self.envelope(self.object_name), "choices": [], "usage": self._usage(choices)})

    def _usage(self, choices: list[Choice], num_tokens: int | None = None) -> dict[str, Any]:
        return usage(choices, num_tokens)


# ------------------------------------------------------------------------------------------------- completions


class CompletionWriter(TextWriter):
    """Writes the response of /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    head = '"text":'
    middle = ',"logprobs":null,'
    tail = f'{middle}"finish_reason":null,"stop_reason":null}}]}}\n\n'

    def __init__(self, body: CompletionRequest, model: str, request_id: str | None = None) -> None:
        super().__init__(body, model, request_id, num_top=body.logprobs)
        self._echoes = bool(body.echo)
        self._is_echo_alone = body.max_tokens == 0
        self._is_plain = self._is_plain and not self._is_echo_alone
        self._has_opening = self._echoes
        self._has_prompt_logprobs = body.prompt_logprobs is not None

    def whole(self, choices: list[Choice], outputs: list[Delta]) -> Pieces[str]:
        written = []
        for choice, output in zip(choices, outputs, strict=True):
            written.append((yield from self._whole(choice, output)))
            yield
        answer = {**self.envelope(self.object_name), "usage": self._usage(choices)}
        return with_json(answer, {"choices": f"[{','.join(written)}]"}, is_ascii=False)

    def _whole(self, choice: Choice, output: Delta) -> Pieces[str]:
        data = {
            "index": choice.index,
            "text": self._echo(choice) + ("" if self._is_echo_alone else output.text),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._returns_token_ids:
            data["prompt_token_ids"] = choice.prompt.token_ids
            data["token_ids"] = [] if self._is_echo_alone else output.token_ids
        of_tokens = yield from self._logprobs(choice, output, is_first=True)
        of_prompt = yield from prompt_logprobs(output.prompt_logprobs if self._has_prompt_logprobs else None)
        return with_json(data, {"logprobs": of_tokens, "prompt_logprobs": of_prompt}, is_ascii=False)

    def _full_chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Pieces[bytes]:
        data: dict[str, Any] = {
            "index": choice.index,
            "text": (self._echo(choice) if is_first else "") + ("" if self._is_echo_alone else delta.text),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._returns_token_ids:
            data["token_ids"] = [] if self._is_echo_alone else delta.token_ids
            if is_first:
                data["prompt_token_ids"] = choice.prompt.token_ids
        logprobs = yield from self._logprobs(choice, delta, is_first=is_first)
        return self._choice_event(choice, data, logprobs=logprobs)

    def _echo(self, choice: Choice) -> str:
        return choice.prompt.text or "" if self._echoes else ""

    def _usage(self, choices: list[Choice], num_tokens: int | None = None) -> dict[str, Any]:
        return usage(choices, 0 if self._is_echo_alone else num_tokens)

    def _logprobs(self, choice: Choice, new: Delta, *, is_first: bool) -> Pieces[str]:
        """Log probabilities of the tokens whose place in the text is known now, preceded by those of an echoed prompt
        in the first call.

        In a stream, a token whose text is held back may be cut off later, so its log probability is sent together with
        its text.
        """
        if not self._has_logprobs:
            return "null"
        prompt, unplaced = choice.prompt, choice.unplaced
        if unplaced is None:
            places = TextPlaces(len(self._echo(choice)), prompt.unfinished)
            unplaced = choice.unplaced = UnplacedLogprobs(places)
        of_prompt = new.prompt_logprobs or Logprobs()
        is_complete = len(of_prompt) == len(prompt.token_ids)  # False if the request finished before its first token
        if self._echoes and is_first and is_complete:
            unplaced.add(prompt.token_ids, prompt.pieces, of_prompt, prompt.offsets)
        if not self._is_echo_alone:
            entries = new.logprobs or Logprobs()
            unplaced.add(new.token_ids, entries.own_pieces(), entries)
            unplaced.places.add_text(new.text, is_last=new.finish_reason is not None)
        return (yield from self._logprobs_of.completion(unplaced))


# ------------------------------------------------------------------------------------------------- chat


class ChatWriter(TextWriter):
    """Writes the response of /v1/chat/completions.

    Args:
        body: the client's request.
        model: the name of the model in the response.
        request_id: part of the response's id; None: the body's own id, or a random one.
        response_role: the role of the response, unless the last message is continued.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion.chunk"
    head = '"delta":{"content":'
    middle = '},"logprobs":null,'
    tail = f'{middle}"finish_reason":null}}]}}\n\n'

    def __init__(
        self, body: ChatCompletionRequest, model: str, request_id: str | None = None, *, response_role: str
    ) -> None:
        super().__init__(body, model, request_id, num_top=body.top_logprobs if body.logprobs else None)
        last = body.messages[-1]
        self._role = response_role if body.add_generation_prompt else last.role
        is_continued = body.echo and last.role == self._role
        self._echo: str = last.as_template_input()["content"] if is_continued else ""
        self._has_prompt_logprobs = body.prompt_logprobs is not None

    def whole(self, choices: list[Choice], outputs: list[Delta]) -> Pieces[str]:
        written = []
        for choice, output in zip(choices, outputs, strict=True):
            written.append((yield from self._whole(choice, output)))
            yield
        answer = {**self.envelope("chat.completion"), "usage": self._usage(choices)}
        if self._returns_token_ids:
            answer["prompt_token_ids"] = choices[0].prompt.token_ids
        late = {"choices": f"[{','.join(written)}]"}
        if self._has_prompt_logprobs:
            late["prompt_logprobs"] = yield from prompt_logprobs(outputs[0].prompt_logprobs)
        return with_json(answer, late, is_ascii=False)

    def _whole(self, choice: Choice, output: Delta) -> Pieces[str]:
        data = {
            "index": choice.index,
            "message": {"role": self._role, "content": self._echo + output.text},
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self._returns_token_ids:
            data["token_ids"] = output.token_ids
        return with_json(data, {"logprobs": (yield from self._logprobs(output))}, is_ascii=False)

    def _full_chunk(self, choice: Choice, delta: Delta, *, is_first: bool) -> Pieces[bytes]:
        opening = self._first_events(choice) if is_first else b""
        data: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": delta.text},
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            data["stop_reason"] = delta.stop_reason
        if self._returns_token_ids:
            data["token_ids"] = delta.token_ids
        logprobs = yield from self._logprobs(delta)
        return opening + self._choice_event(choice, data, logprobs=logprobs)

    def _first_events(self, choice: Choice) -> bytes:
        """The events before the first text: one with the role, and one with the echoed text."""
        role = {"role": self._role, "content": ""}
        data = {"index": choice.index, "delta": role, "finish_reason": None}
        prompt = {"prompt_token_ids": choice.prompt.token_ids} if self._returns_token_ids else {}
        opening = self._choice_event(choice, data, prompt, num_tokens=0)
        if self._echo:
            echo = {"index": choice.index, "delta": {"content": self._echo}, "finish_reason": None}
            opening += self._choice_event(choice, echo, num_tokens=0)
        return opening

    def _logprobs(self, new: Delta) -> Pieces[str]:
        if not self._has_logprobs:
            return "null"
        return (yield from self._logprobs_of.chat(new.logprobs or Logprobs()))


# ------------------------------------------------------------------------------------------------- embeddings


class EmbeddingWriter(AnswerWriter):
    """Writes the response of /v1/embeddings."""

    id_prefix = "embd"

    def __init__(self, body: EmbeddingRequest, model: str) -> None:
        super().__init__(body, model)
        self._is_base64 = body.encoding_format == "base64"

    def whole(self, choices: list[Choice], outputs: list[Delta]) -> Pieces[str]:
        data = []
        for choice, output in zip(choices, outputs, strict=True):
            assert output.embedding is not None
            vector = self._encoded(output.embedding)
            data.append(to_json({"object": "embedding", "index": choice.index, "embedding": vector}))
            yield
        return with_json({**self.envelope("list"), "usage": usage(choices)}, {"data": f"[{','.join(data)}]"})

    def _encoded(self, vector: npt.NDArray[np.float32]) -> list[float] | str:
        """A vector as JSON numbers, or as little-endian float32 in base64, which has a quarter of the length."""
        if self._is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers


# ------------------------------------------------------------------------------------------------- JSON


_ASCII = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_UNICODE = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def to_json(value: Any, *, is_ascii: bool = True) -> str:
    """A value as JSON without spaces; `is_ascii`: whether everything outside ASCII is escaped.

    Raises:
        ValueError: a float is infinite or NaN.
    """
    return (_ASCII if is_ascii else _UNICODE).encode(value)


def with_json(fields: Mapping[str, Any], written: Mapping[str, str], *, is_ascii: bool = True) -> str:
    """An object as JSON: its `fields` (at least one), followed by the `written` fields, whose values are JSON
    already."""
    more = ",".join([f'"{name}":{text}' for name, text in written.items()])
    return f"{to_json(fields, is_ascii=is_ascii)[:-1]},{more}}}"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event; its JSON is made from `data`."""
    return written_event(to_json(data))


def written_event(data: str) -> bytes:
    """One server-sent event; `data` is its JSON, in ASCII."""
    return f"data: {data}\n\n".encode("ascii")


def error_event(error: ApiError) -> bytes:
    """The event of an error that occurs after the status was sent."""
    return event(error.body())
