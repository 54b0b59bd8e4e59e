"""POST /v1/completions: text, or tokens, go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pointsman.server.generation import Result, Sample, usage
from pointsman.server.logprobs import LogprobWriter, prompt_logprobs
from pointsman.server.prompts import Prompt, count_prompts
from pointsman.server.protocol import CompletionRequest
from pointsman.server.sampling import check_limits, choose_max_tokens, sampling_params
from pointsman.server.service import Job, Progress, Service

if TYPE_CHECKING:
    from pointsman.engine.params.sampling import SamplingParams
    from pointsman.server.wire import Delta

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Progress(Progress):
    """What a stream has told of a choice, and what it tells with the first chunk."""

    echo: str = ""
    """The prompt's text, to be told with the first delta."""
    first_token: str = ""
    """The text of the prompt's first token, which has no log probability."""
    num_characters: int = 0
    """Of the tokens whose log probabilities have been told: text may be behind them, held back for a stop string."""


class CompletionJob(Job):
    """One completion request."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    plain_head = '"text":'
    plain_tail = ',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    body: CompletionRequest

    def __init__(
        self, service: Service, body: CompletionRequest, request_id: str | None = None, deadline: float | None = None
    ) -> None:
        super().__init__(service, body, request_id, deadline)
        self._writer = LogprobWriter(body.logprobs or 0, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._is_echo_alone = body.max_tokens == 0

    # ------------------------------------------------------------------ what is asked for

    @property
    def num_samples_per_prompt(self) -> int:
        return self.body.n

    @property
    def num_logprobs(self) -> int | None:
        return self.body.logprobs

    def count_samples(self) -> int:
        check_limits(self.body, self.body.n, self.num_logprobs, self.service.config)
        return count_prompts(self.body.prompt) * self.body.n

    async def read_prompts(self) -> list[Prompt]:
        return await self.service.prompts.of_completion(self.body)

    def max_tokens(self, prompt: Prompt) -> int:
        asked = self.body.max_tokens if "max_tokens" in self.body.model_fields_set else None
        return choose_max_tokens(
            1 if asked == 0 else asked,  # without a step, the prompt has no log probabilities
            len(prompt.token_ids),
            DEFAULT_MAX_TOKENS,
            "max_tokens",
            self.service.client.info,
            self.service.config,
        )

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        body = self.body
        of_prompt = body.prompt_logprobs
        if of_prompt is None and body.echo:
            of_prompt = body.logprobs
        return sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=of_prompt,
            defaults=self.service.client.info.generation_defaults,
        )

    # ------------------------------------------------------------------ what is answered

    async def whole(self, results: list[Result]) -> dict[str, Any]:
        choices = []
        for result in results:
            progress: _Progress = result.sample.extra
            choice = {
                "index": result.sample.index,
                "text": progress.echo + ("" if self._is_echo_alone else result.text),
                "logprobs": self._logprobs(result.sample, progress, result),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
                "prompt_logprobs": None,
            }
            if self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = result.sample.prompt.token_ids
                choice["token_ids"] = [] if self._is_echo_alone else result.token_ids
            choices.append(choice)
        samples = [result.sample for result in results]
        return {**self.envelope(self.object_name), "choices": choices, "usage": self.usage(samples)}

    def full_chunk(self, sample: Sample, delta: Delta) -> bytes:
        progress: _Progress = sample.extra
        echo = "" if progress.has_begun else progress.echo
        text = echo + ("" if self._is_echo_alone else delta.text)
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": text,
            "logprobs": self._logprobs(sample, progress, delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self._is_echo_alone else delta.token_ids
            if not progress.has_begun:
                choice["prompt_token_ids"] = sample.prompt.token_ids
        return self.choice_event(choice, sample)

    def usage(self, samples: list[Sample], num_tokens: int | None = None) -> dict[str, Any]:
        return usage(samples, 0 if self._is_echo_alone else num_tokens)

    async def begin(self, sample: Sample, head: str, tail: str) -> _Progress:
        progress = _Progress(head, tail)
        if self.body.echo:
            progress.echo = await self.service.prompts.text_of(sample.prompt)
            if self.body.logprobs is not None:
                progress.first_token = await self.service.client.decode(sample.prompt.token_ids[:1])
        return progress

    def _logprobs(self, sample: Sample, progress: _Progress, new: Delta | Result) -> dict[str, Any] | None:
        """Those of new tokens, behind those of an echoed prompt if they are the first."""
        if self.body.logprobs is None:
            return None
        token_ids = [] if self._is_echo_alone else new.token_ids
        entries: list[Any] = [] if self._is_echo_alone else list(new.logprobs or [])
        of_prompt = new.prompt_logprobs or []
        is_complete = len(of_prompt) == len(sample.prompt.token_ids)  # or it ended before its first token
        if self.body.echo and not progress.has_begun and is_complete:
            token_ids = [*sample.prompt.token_ids, *token_ids]
            entries = [*of_prompt, *entries]
        told = self._writer.completion(
            token_ids, entries, offset=progress.num_characters, first_text=progress.first_token
        )
        progress.num_characters += sum(map(len, told["tokens"]))
        return told
