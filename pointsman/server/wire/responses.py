"""What clients get, for the OpenAPI description.

Answers are written as plain dictionaries and constant text (`answers.py`), not through these models: the models
describe an answer, and the tests compare the answers with them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """More about the prompt tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache, so not computed.")


class Usage(BaseModel):
    """Tokens of a request; each prompt counts once, however many samples there are of it."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Four lists with one element per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(BaseModel):
    """A token that was likely in some place."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionChoice(BaseModel):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None = Field(description="stop, length, abort or deadline")
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers; or base64 of little-endian float32.")


class EmbeddingResponse(BaseModel):
    """Answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class ChatTokenLogprob(BaseModel):
    """A token that was likely in some place."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8, of part of a character perhaps; null for a token that the text leaves out."""


class ChatTokenLogprobs(ChatTokenLogprob):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(BaseModel):
    """One element per token."""

    content: list[ChatTokenLogprobs]


class ChatMessage(BaseModel):
    """The message of the model."""

    role: str
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None = Field(description="stop, length, abort or deadline")
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ErrorInfo(BaseModel):
    """What is wrong, and how to avoid it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    """Every error."""

    error: ErrorInfo


class ModelCard(BaseModel):
    """A name of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pointsman"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[dict[str, Any]] = Field(default_factory=list)


class ModelList(BaseModel):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Text of tokens."""

    prompt: str


class VersionResponse(BaseModel):
    """The server's version."""

    version: str


class StatusResponse(BaseModel):
    """What the engine is now."""

    status: Literal["paused", "resumed"]


class PausedResponse(BaseModel):
    """Whether the engine is paused."""

    is_paused: bool


class ResetResponse(BaseModel):
    """Whether it was done."""

    success: bool


class ActiveSeqsResponse(BaseModel):
    """How many requests may run at once."""

    max_num_active_seqs: int


class PriorityResponse(BaseModel):
    """The requests whose priority was changed."""

    priority: int
    requests: list[str] = Field(description="Their ids.")


class RequestStateEvent(BaseModel):
    """What happened to a request."""

    event: str = Field(description="queued, scheduled, preempted, resumed, parked, rolled_back or first_token.")
    at: float = Field(description="When, in Unix time.")
    detail: str = Field(description="Of parked: what it waits for.")


class RequestHolder(BaseModel):
    """A request that holds some of what another one waits for."""

    id: str
    amount: int = Field(description="How much of the resource; 0 where nothing is counted.")
    what: str = Field(description="Of an adapter slot: the name of the adapter.")
    transfer: int | None = Field(description="Of blocks held for a KV transfer: which; its request may have finished.")


class ReplacedPolicy(BaseModel):
    """A policy of another package that failed, so that the default of its kind decides."""

    kind: str
    policy: str = Field(description="As it was named.")
    by: str = Field(description="What decides in its place; empty: nothing, for a reserve or a limit.")
    error: str = Field(description="What it failed with last.")


class RequestState(BaseModel):
    """The state of a request of the engine, and why it does not advance."""

    id: str = Field(description="As the answer's id, with the choice's index behind it where there are several.")
    engine_id: str = Field(description="As the engine's log and recordings call it; no two have the same.")
    engine: int = Field(description="The number of the engine that has it, from 0.")
    state: str = Field(description="waiting, running, preempted, or what it waits for other than capacity.")
    phase: str
    reason: str | None = Field(description="Why it waits; null if it does not, or was not considered in a step yet.")
    blocker: str | None = Field(description="The request it waits for.")
    missing: int = Field(description="How much of the resource it lacks.")
    resource: str | None = Field(
        description="What it lacks, such as KV blocks or sequence slots; null: nothing that is counted."
    )
    holders: list[RequestHolder] = Field(description="The requests that hold it, the largest first; at most 8.")
    num_holders: int = Field(description="The number of requests that hold some of it.")
    explanation: str = Field(description="All of it in a sentence.")
    replaced_policies: list[ReplacedPolicy] = Field(description="Policies that failed; shown to operators alone.")
    since: float | None = Field(description="When this reason began, in Unix time.")
    waiting_for: float | None = Field(description="Seconds since then.")
    transfer: int | None = Field(description="The KV transfer it waits for.")
    position: int | None = Field(description="The number of requests before it in the queue.")
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int
    priority: int
    ttft_target: float | None = Field(description="Seconds from its arrival within which its first token is wanted.")
    retention: float | None = Field(description="Seconds after its end for which its prefix is worth keeping cached.")
    tenant: str = Field(description="Whose request it is: the name of a key, or as the operator has chosen.")
    user: str | None
    age: float = Field(description="Seconds since its arrival.")
    deadline_in: float | None = Field(description="Seconds until its deadline.")
    events: list[RequestStateEvent] = Field(description="What happened so far; empty unless the server logs it.")


class RequestList(BaseModel):
    """Every unfinished request, in the order of arrival."""

    object: Literal["list"] = "list"
    data: list[RequestState]
