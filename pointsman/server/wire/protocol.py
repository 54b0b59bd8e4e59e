"""Request bodies: the fields of OpenAI's API and of vLLM's, with their names, defaults and ranges.

Unknown fields are ignored, as vLLM does. Known fields that this server does not support are refused with the reason,
unless their value is neutral (`_Refusing`): a client must not believe that its images were used. A number in quotes is
read as a number, again as vLLM does, except in lists of token ids. true and false are not numbers. NaN and infinities
are refused everywhere. Optional fields may be null (`ProtocolModel`).

Validation runs in the event loop, and blocks all streams. So the length of a list or an object is checked before its
elements (`AtMost`), and validation of a list ends at its first wrong element.

The ranges here hold for every server. Values that depend on the model or on the operator's settings (a served name, the
maximum `n`) are checked later. Values that depend on several fields are checked by `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from pointsman.engine.params.structured_outputs import MAX_CHOICES

MAX_INT = 2**31 - 1
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1000
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 100
MAX_LISTED_TOKENS = 1024
"""Maximum number of entries of stop_token_ids, and of logit_bias."""
MAX_TOKEN_LIST = 131_072
"""Maximum number of tokens of allowed_token_ids, which may be a whole vocabulary, and of /detokenize."""
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Maximum number of content parts of all messages of a conversation together."""
MAX_TOOLS = 128
"""Maximum number of tools, of tool calls of a message, and of documents."""
MAX_DOCUMENT_FIELDS = 64
MAX_MODALITIES = 16
MAX_PROMPTS = 1024
"""Maximum number of prompts in one request."""
MAX_USER_CHARACTERS = 1024
"""Maximum number of characters of `user`, and of a header that names the tenant."""
MAX_NAME = 256
"""Maximum number of characters of ids, roles and names."""
REQUEST_ID = rf"^[!-~]{{1,{MAX_NAME}}}$"
"""Pattern of a request id, which becomes a header of the response: printable ASCII without spaces."""
USER = "Shown by /v1/requests; also the tenant, if the server was started with --tenant-from user."
TTFT_TARGET = (
    "Seconds from arrival until the first token should come; only if the server's order reads it. The request "
    "continues after that time. Also the header X-Request-TTFT-Target."
)

RETENTION = (
    "Seconds after its end for which its prefix should stay cached, as between two calls of an agent; only if the "
    "server's eviction policy reads it."
)


@dataclass(frozen=True)
class AtMost:
    """Validates the elements of a list or an object only if there are at most `count`. Validation of a list ends at the
    first wrong element: otherwise a list of a million elements could cause a million errors.
    """

    count: int
    remedy: str = "send fewer"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: dict[str, Any] = {**handler(source), "max_length": self.count}  # for the description at /openapi.json
        if schema["type"] == "list":
            schema["fail_fast"] = True
        return no_info_before_validator_function(self._check, cast(CoreSchema, schema))

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > self.count:
            kind = "a list" if isinstance(value, list) else "an object"
            why = f"{kind} of {len(value)} elements, and at most {self.count} are allowed; {self.remedy}"
            raise PydanticCustomError("bounded", "{why}", {"why": why})
        return value


def _no_bool(value: Any) -> Any:
    """Refuse true and false as numbers; Python would accept both."""
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "true and false are no numbers; send a number")
    return value


NUMBER = BeforeValidator(_no_bool)

TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
FewTokenIds: TypeAlias = Annotated[list[TokenId], AtMost(MAX_LISTED_TOKENS)]
ManyTokenIds: TypeAlias = Annotated[list[TokenId], AtMost(MAX_TOKEN_LIST)]
StopString: TypeAlias = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], AtMost(MAX_STOP_STRINGS)]
BadWord: TypeAlias = Annotated[str, Field(max_length=MAX_BAD_WORD_CHARACTERS)]
Number: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT), NUMBER]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2), NUMBER]
Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), NUMBER]
Seconds: TypeAlias = Annotated[float, Field(gt=0), NUMBER]
User: TypeAlias = Annotated[str, Field(max_length=MAX_USER_CHARACTERS)]


def _kind_of_prompt(value: Any) -> str:
    """The form of `PromptField` that a prompt's value has or resembles; only this form is validated."""
    if isinstance(value, str):
        return "text"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, (str, list)):
        return "texts" if isinstance(first, str) else "lists"
    return "tokens"


def _check_prompt(value: Any) -> Any:
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("no_prompt", "give text, token ids, or a list of either")
    return value


_SEVERAL = AtMost(MAX_PROMPTS, "send several requests")
PromptField: TypeAlias = Annotated[
    Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], _SEVERAL, Tag("lists")]
    | Annotated[str, Tag("text")]
    | Annotated[list[str], _SEVERAL, Tag("texts")],
    Discriminator(_kind_of_prompt),
    BeforeValidator(_check_prompt),
]


class _DefaultForNull:
    """Replaces null by the default, for a field whose own type has no null.

    Args:
        default: returns the field's default.
        kind: the field's own type.
    """

    def __init__(self, default: Callable[[], Any], kind: Any) -> None:
        self._default = default
        self._kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        described = handler.generate_schema(self._kind | None)
        return no_info_before_validator_function(self._replace, handler(source), json_schema_input_schema=described)

    def _replace(self, value: Any) -> Any:
        return self._default() if value is None else value


class ProtocolModel(BaseModel):
    """A part of a client's request. null means the same as left out: some clients write every field that they know."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Let every field with a default accept null, at no cost for bodies without null."""
        super().__pydantic_init_subclass__(**kwargs)
        strict = [
            field
            for field in cls.model_fields.values()
            if not field.is_required() and type(None) not in get_args(field.annotation)
        ]
        for field in strict:
            if not any(isinstance(one, _DefaultForNull) for one in field.metadata):  # inherited fields have one
                kind = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
                default = partial(field.get_default, call_default_factory=True)
                field.metadata = [*field.metadata, _DefaultForNull(default, kind)]
        if strict:
            cls.model_rebuild(force=True)


def refusal(param: str, why: str) -> PydanticCustomError:
    """The error that a validator raises for an invalid value of the field `param`."""
    return PydanticCustomError("unsupported", "{why}", {"param": param, "why": why})


class _Refusing(ProtocolModel):
    """A request with unsupported fields, which are refused unless their value is neutral."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "use_beam_search": ((None, False), "beam search is not supported; leave it out and use n"),
        "truncate_prompt_tokens": ((None,), "prompts are not truncated here; shorten the prompt"),
        "logprob_token_ids": ((None, []), "log probabilities of chosen tokens are not supported; use top logprobs"),
        "kv_transfer_params": ((None, {}), "there is no KV transfer here; leave it out"),
        "ec_transfer_params": ((None, {}), "there is no encoder cache transfer here; leave it out"),
        "thinking_token_budget": ((None, -1), "thinking is not limited here; use max_tokens"),
        "watermarking": ((None, False), "watermarks are not supported; leave it out"),
    }
    """For each unsupported field: the neutral values, and the remedy for other values."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, (neutral, why) in cls.unsupported.items():
                if name in data and data[name] not in neutral:
                    raise refusal(name, f"{name}: {why}")
        return data


# ------------------------------------------------------------------------------------------------- parts


class StreamOptions(ProtocolModel):
    """Additions to the text of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(False, description="Usage in every chunk; only with include_usage.")


class JsonSchemaFormat(ProtocolModel):
    """A JSON schema in OpenAI's envelope."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ProtocolModel):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise refusal(
                "response_format",
                "response_format: type json_schema needs json_schema.schema; give it, or use type json_object",
            )
        return self


class StructuredOutputs(_Refusing):
    """A constraint on the text: exactly one of the first five fields."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "structural_tag": ((None,), "structural tags are not supported; use json, regex or grammar"),
        "whitespace_pattern": ((None,), "whitespace has no pattern here; use disable_any_whitespace"),
    }

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or one as text.")
    regex: str | None = None
    choice: Annotated[list[str], AtMost(MAX_CHOICES)] | None = None
    grammar: str | None = Field(None, description="A grammar in EBNF.")
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class RepetitionDetection(ProtocolModel):
    """The repetitions at the end of an output that finish it, with `finish_reason` repetition."""

    max_pattern_size: Number = Field(0, description="Tokens of the longest pattern; 0: no detection.")
    min_pattern_size: Number = Field(0, description="Tokens of the shortest pattern; 0 means 1.")
    min_count: Number = Field(0, description="Number of consecutive patterns at the end; at least 2.")


class SamplingFields(_Refusing):
    """The fields that /v1/completions and /v1/chat/completions have in common."""

    model: str | None = Field(None, description="A name that /v1/models lists; left out: the model that is served.")
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, NUMBER]], AtMost(MAX_LISTED_TOKENS)] | None = Field(
        None, description="Token id -> -100 to 100."
    )
    presence_penalty: Penalty | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0), NUMBER] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    user: User | None = Field(None, description=USER)

    top_k: Annotated[int, Field(ge=-1, le=MAX_INT), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = None
    stop_token_ids: FewTokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Number = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: ManyTokenIds | None = None
    prompt_logprobs: Number | None = None
    bad_words: Annotated[list[BadWord], AtMost(MAX_BAD_WORDS)] = Field(default_factory=list)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    priority: Int64 = Field(0, description="Smaller is more urgent; only where the server schedules by priority.")
    ttft_target: Seconds | None = Field(None, description=TTFT_TARGET)
    retention: Annotated[float, Field(ge=0), NUMBER] | None = Field(None, description=RETENTION)
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = Field(
        None, description="Part of the response's id; the header X-Request-Id has priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Only requests with an equal salt share cached prefixes."
    )
    deadline: Seconds | None = Field(
        None, description="Seconds from arrival after which the request is ended; also the header X-Request-Deadline."
    )
    return_tokens_as_token_ids: bool | None = Field(None, description='Write tokens of logprobs as "token_id:17".')
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refusal(
                "stream_options", "stream_options: requires stream true; set stream to true, or leave them out"
            )
        if self.stream and self.prompt_logprobs:
            raise refusal("prompt_logprobs", "prompt_logprobs: not supported in streams; set stream to false")
        return self


# ------------------------------------------------------------------------------------------------- embeddings


class EmbeddingRequest(_Refusing):
    """POST /v1/embeddings."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "dimensions": ((None,), "vectors are not shortened, which only few models are trained for; leave it out"),
        "truncate_prompt_tokens": ((None,), "inputs are not truncated here; shorten the input"),
        "messages": ((None,), "conversations are not embedded here; send their text as input"),
    }

    model: str | None = Field(None, description="A name that /v1/models lists; left out: the model that is served.")
    input: PromptField = Field(description="Text, token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] = "float"
    user: User | None = Field(None, description=USER)

    pooling: Literal["last", "mean"] = Field(
        "last", description="The vector's source: the last token's hidden state, or the mean over all tokens."
    )
    use_activation: bool | None = Field(None, description="false: vectors are not scaled to length 1.")
    add_special_tokens: bool = True
    priority: Int64 = Field(0, description="Smaller is more urgent; only where the server schedules by priority.")
    ttft_target: Seconds | None = Field(None, description=TTFT_TARGET)
    retention: Annotated[float, Field(ge=0), NUMBER] | None = Field(None, description=RETENTION)
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = Field(None, description="Part of the response's id.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Only requests with an equal salt share cached prefixes."
    )
    deadline: Seconds | None = Field(None, description="Seconds from arrival after which the request is ended.")

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingRequest:
        if not self.input:
            raise refusal("input", "input: it is empty; give text of one character or more, or token ids")
        return self


# ------------------------------------------------------------------------------------------------- completions


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_Refusing.unsupported,
        "suffix": ((None, ""), "text is not inserted before a suffix here; leave it out"),
        "prompt_embeds": ((None, []), "prompts are text or token ids here; send one of these"),
    }

    prompt: PromptField = Field(description="Text, token ids, or a list of either.")
    best_of: Count | None = Field(None, description="At most n: no sample is generated and dropped.")
    echo: bool | None = Field(False, description="Put the prompt in front of the text.")
    logprobs: Number | None = None
    max_tokens: Number | None = Field(16, description="0 only with echo; null means the default.")
    n: Count = 1
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if not self.prompt:
            raise refusal("prompt", "prompt: it is empty; give text of one character or more, or token ids")
        if self.best_of is not None and self.best_of > self.n:
            raise refusal("best_of", f"best_of: {self.best_of} is more than n, which is {self.n}; leave best_of out")
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens", "max_tokens: 0 requests no token; give 1 or more, or set echo to true")
        return self


# ------------------------------------------------------------------------------------------------- chat


class ContentPart(ProtocolModel):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(ProtocolModel):
    """One message of a conversation."""

    role: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    content: str | Annotated[list[ContentPart | str], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], AtMost(MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, data: Any) -> Any:
        """Refuse parts that are not text, with a short message, as pydantic's error for a union is hard to read."""
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind != "text":
                what = f"a content part of type {str(kind)[:MAX_NAME]!a}"
                raise refusal("messages", f"messages: {what}; this server reads text only, so send parts of type text")
        return data

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise refusal("messages", f"messages: a message of role {self.role} has no content; give it text")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates read it: parts of text are joined by line breaks."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part if isinstance(part, str) else part.text for part in content)
        optional = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content or ""} | {
            name: value for name, value in optional.items() if value is not None
        }


class ChatFields(_Refusing):
    """The fields of a conversation, for chat completions and /tokenize."""

    unsupported: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **_Refusing.unsupported,
        "chat_template": ((None, ""), "templates of requests are not run; the server's operator chooses one"),
        "mm_processor_kwargs": ((None, {}), "there are no images or audio here; leave it out"),
        "media_io_kwargs": ((None, {}), "there are no images or audio here; leave it out"),
        "audio": ((None,), "answers are text only; leave it out"),
        "functions": ((None, []), "functions are not called here; leave them out"),
        "function_call": ((None, "none"), "functions are not called here; leave it out"),
    }

    messages: Annotated[list[Message], AtMost(MAX_MESSAGES)] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(
        False, description="Leave the last message open and continue it; add_generation_prompt must be false then."
    )
    add_special_tokens: bool = Field(False, description="The chat template writes special tokens itself; only false.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    documents: (
        Annotated[
            list[Annotated[dict[str, str], AtMost(MAX_DOCUMENT_FIELDS)]],
            AtMost(MAX_TOOLS),
        ]
        | None
    ) = None
    tools: Annotated[list[dict[str, Any]], Field(min_length=1), AtMost(MAX_TOOLS)] | None = Field(
        None, description="Shown to the model by the chat template; only with tool_choice none."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, data: Any) -> Any:
        """Count the content parts of all messages before any of them is validated."""
        messages = data.get("messages") if isinstance(data, dict) else None
        if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
            contents = (message.get("content") for message in messages if isinstance(message, dict))
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > MAX_PARTS:
                why = f"messages: {count} content parts, and at most {MAX_PARTS} are allowed; join their texts"
                raise refusal("messages", why)
        return data

    @model_validator(mode="before")
    @classmethod
    def _check_generation_prompt(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("continue_final_message"):
            if data.get("add_generation_prompt"):
                raise refusal(
                    "continue_final_message",
                    "continue_final_message: cannot be combined with add_generation_prompt; set one of them to false",
                )
            return {**data, "add_generation_prompt": False}
        return data

    @model_validator(mode="after")
    def _check_special_tokens(self) -> ChatFields:
        if self.add_special_tokens:
            raise refusal(
                "add_special_tokens", "add_special_tokens: the chat template adds the special tokens; leave it false"
            )
        return self


class ChatCompletionRequest(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = False
    top_logprobs: Number = 0
    max_tokens: Count | None = Field(None, description="Default: max_completion_tokens, else the maximum that fits.")
    max_completion_tokens: Count | None = Field(None, description="Has priority over max_tokens.")
    n: Count = 1
    echo: bool = Field(False, description="Put the last message in front of the text if its role is the response's.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    modalities: Annotated[list[str], AtMost(MAX_MODALITIES)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs: requires logprobs true; set logprobs to true, or leave it out")
        if self.modalities is not None and set(self.modalities) - {"text"}:
            raise refusal("modalities", 'modalities: responses are text only; send ["text"], or leave it out')
        if self.tool_choice not in (None, "none") or (self.tools and self.tool_choice is None):
            choice = self.tool_choice if isinstance(self.tool_choice, str) else "a function or auto"
            raise refusal(
                "tool_choice",
                f'tool_choice: {choice} requires tool calls to be parsed, which this server cannot; send "none" to '
                "show the tools to the model and get its text, or leave the tools out",
            )
        return self


# ------------------------------------------------------------------------------------------------- tokens


class TokenizeCompletionRequest(ProtocolModel):
    """POST /tokenize, of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields):
    """POST /tokenize, of a conversation."""

    model: str | None = None
    return_token_strs: bool | None = False


def _form_of(data: Any) -> str:
    messages = data.get("messages") if isinstance(data, dict) else getattr(data, "messages", None)
    return "Text" if messages is None else "Chat"


TokenizeRequest: TypeAlias = Annotated[
    Annotated[TokenizeCompletionRequest, Tag("Text")] | Annotated[TokenizeChatRequest, Tag("Chat")],
    Discriminator(_form_of),
]
"""Body of /tokenize: a conversation if it has `messages`, otherwise a text. So errors are those of one form only."""


class DetokenizeRequest(ProtocolModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: ManyTokenIds
