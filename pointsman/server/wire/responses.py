"""Response bodies, for the OpenAPI description.

Responses are written as plain dictionaries and constant text (`answers.py`), not through these models. The models only
describe responses, and tests compare responses with them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int = Field(description="Tokens found in the prefix cache, which were not computed.")


class Usage(BaseModel):
    """Token counts of a request; each prompt counts once, for any number of samples."""

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
    """Response of /v1/completions."""

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
    """Response of /v1/embeddings."""

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
    """UTF-8, possibly of a part of a character; null for a token that the text leaves out."""


class ChatTokenLogprobs(ChatTokenLogprob):
    """A generated token, and the most likely tokens at its position."""

    top_logprobs: list[ChatTokenLogprob]


class ChatLogprobs(BaseModel):
    """One element per token."""

    content: list[ChatTokenLogprobs]


class ChatMessage(BaseModel):
    """The message of the model."""

    role: str
    content: str


class ChatChoice(BaseModel):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None = Field(description="stop, length, abort or deadline")
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ErrorInfo(BaseModel):
    """The error and its remedy."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    """The body of all errors."""

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
    """The response of GET /v1/models: all names of the served model."""

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
    """The new state of the engine."""

    status: Literal["paused", "resumed"]


class PausedResponse(BaseModel):
    """Whether the engine is paused."""

    is_paused: bool


class ResetResponse(BaseModel):
    """Whether the command succeeded."""

    success: bool


class ActiveSeqsResponse(BaseModel):
    """The maximum number of running requests."""

    max_num_active_seqs: int


class PriorityResponse(BaseModel):
    """The requests whose priority was changed."""

    priority: int
    requests: list[str] = Field(description="The ids of the requests.")


class RequestStateEvent(BaseModel):
    """An event of a request."""

    event: str = Field(description="queued, scheduled, preempted, resumed, parked, rolled_back or first_token.")
    at: float = Field(description="Unix time.")
    detail: str = Field(description="For parked: what the request waits for.")


class RequestHolder(BaseModel):
    """A request that holds a part of the resource that another request waits for."""

    id: str
    amount: int = Field(description="Amount of the resource; 0 if it is not counted.")
    what: str = Field(description="For an adapter slot: the name of the adapter.")
    transfer: int | None = Field(description="The KV transfer that holds the blocks; its request may have finished.")


class ReplacedPolicy(BaseModel):
    """A policy of another package that failed and was replaced by the default of its kind."""

    kind: str
    policy: str = Field(description="The name of the policy.")
    by: str = Field(description="The policy that replaces it; empty for a reserve or a limit: none.")
    error: str = Field(description="The last error of the policy.")


class RequestState(BaseModel):
    """The state of a request of the engine, and why it does not advance."""

    id: str = Field(description="The response's id, followed by the choice's index if there are several.")
    engine_id: str = Field(description="The unique id in the engine's log and recordings.")
    engine: int = Field(description="The number of its engine, from 0.")
    state: str = Field(description="waiting, running, preempted, or waiting for something other than capacity.")
    phase: str
    reason: str | None = Field(description="Why it waits; null if it does not, or was not considered in a step yet.")
    blocker: str | None = Field(description="The request it waits for.")
    missing: int = Field(description="The missing amount of the resource.")
    resource: str | None = Field(
        description="The resource it lacks, such as KV blocks or sequence slots; null: none that is counted."
    )
    holders: list[RequestHolder] = Field(
        description="The requests that hold the resource, the largest first; at most 8."
    )
    num_holders: int = Field(description="The number of requests that hold some of the resource.")
    explanation: str = Field(description="A sentence that says all of this.")
    replaced_policies: list[ReplacedPolicy] = Field(description="Policies that failed; shown to operators alone.")
    since: float | None = Field(description="When the current reason began, in Unix time.")
    waiting_for: float | None = Field(description="Seconds since the current reason began.")
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
    ttft_target: float | None = Field(description="Seconds from arrival until its first token should come.")
    retention: float | None = Field(description="Seconds after its end for which its prefix should stay cached.")
    tenant: str = Field(description="The name of a key, or as set by --tenant-from.")
    user: str | None
    age: float = Field(description="Seconds since its arrival.")
    deadline_in: float | None = Field(description="Seconds until its deadline.")
    events: list[RequestStateEvent] = Field(description="Past events; empty unless the server logs them.")


class RequestList(BaseModel):
    """Every unfinished request, in the order of arrival."""

    object: Literal["list"] = "list"
    data: list[RequestState]
