"""POST /v1/chat/completions: a conversation goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pointsman.server.generation import Result, Sample
from pointsman.server.logprobs import LogprobWriter, prompt_logprobs
from pointsman.server.prompts import Prompt
from pointsman.server.protocol import ChatCompletionRequest
from pointsman.server.sampling import check_limits, choose_max_tokens, sampling_params
from pointsman.server.service import Job, Service

if TYPE_CHECKING:
    from pointsman.engine.params.sampling import SamplingParams
    from pointsman.server.wire import Delta


class ChatJob(Job):
    """One chat completion request."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion.chunk"
    plain_head = '"delta":{"content":'
    plain_tail = '},"logprobs":null,"finish_reason":null}]}\n\n'
    body: ChatCompletionRequest

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(service, body, request_id, deadline)
        last = body.messages[-1]
        self._role = service.config.response_role if body.add_generation_prompt else last.role
        is_continued = body.echo and last.role == self._role
        self._echo: str = last.as_template_input()["content"] if is_continued else ""
        self._writer = LogprobWriter(body.top_logprobs, as_token_ids=bool(body.return_tokens_as_token_ids))

    # ------------------------------------------------------------------ what is asked for

    @property
    def num_samples_per_prompt(self) -> int:
        return self.body.n

    @property
    def num_logprobs(self) -> int | None:
        return self.body.top_logprobs if self.body.logprobs else None

    def count_samples(self) -> int:
        check_limits(self.body, self.body.n, self.num_logprobs, self.service.config)
        return self.body.n

    async def read_prompts(self) -> list[Prompt]:
        return [await self.service.prompts.of_chat(self.body, reasoning_effort=self.body.reasoning_effort)]

    def max_tokens(self, prompt: Prompt) -> int:
        asked, name = self.body.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, name = self.body.max_tokens, "max_tokens"
        service = self.service
        return choose_max_tokens(asked, len(prompt.token_ids), None, name, service.client.info, service.config)

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        return sampling_params(
            self.body,
            max_tokens=max_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.body.prompt_logprobs,
            defaults=self.service.client.info.generation_defaults,
        )

    # ------------------------------------------------------------------ what is answered

    async def whole(self, results: list[Result]) -> dict[str, Any]:
        choices = []
        for result in results:
            choice = {
                "index": result.sample.index,
                "message": {"role": self._role, "content": self._echo + result.text},
                "logprobs": self._logprobs(result),
                "finish_reason": result.finish_reason,
                "stop_reason": result.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = result.token_ids
            choices.append(choice)
        samples = [result.sample for result in results]
        answer = {**self.envelope("chat.completion"), "choices": choices, "usage": self.usage(samples)}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = samples[0].prompt.token_ids
        return answer

    def full_chunk(self, sample: Sample, delta: Delta) -> bytes:
        opening = b"" if sample.extra.has_begun else self._opening(sample)
        choice: dict[str, Any] = {
            "index": sample.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return opening + self.choice_event(choice, sample)

    def _opening(self, sample: Sample) -> bytes:
        """Who speaks, before the first text; and the text that is echoed."""
        role = {"role": self._role, "content": ""}
        choice = {"index": sample.index, "delta": role, "logprobs": None, "finish_reason": None}
        prompt = {"prompt_token_ids": sample.prompt.token_ids} if self.body.return_token_ids else {}
        opening = self.choice_event(choice, sample, prompt, num_tokens=0)
        if self._echo:
            echo = {"index": sample.index, "delta": {"content": self._echo}, "logprobs": None, "finish_reason": None}
            opening += self.choice_event(echo, sample, num_tokens=0)
        return opening

    def _logprobs(self, new: Delta | Result) -> dict[str, Any] | None:
        return self._writer.chat(new.token_ids, new.logprobs or []) if self.body.logprobs else None
