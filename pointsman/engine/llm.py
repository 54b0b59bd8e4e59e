"""LLM: completes a list of prompts and returns all outputs, with the interface of vLLM's `LLM`.

llm = LLM("demo")
for output in llm.generate(["The import statement", "A class is"], SamplingParams(max_tokens=32)):
    print(output.prompt, output.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm  # type: ignore[import-untyped]

from pointsman.engine.engine import Engine
from pointsman.engine.errors import EngineStepError
from pointsman.engine.interruption import Interruption, delayed_interrupts
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.outputs.embedding import EmbeddingRequestOutput
from pointsman.engine.outputs.request_output import RequestOutput
from pointsman.engine.params.pooling import Pooling, PoolingParams
from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams
from pointsman.engine.stats import DEFAULT_INTERVAL, StatsLogger
from pointsman.engine.text.tokenizer import render_chat

Prompt: TypeAlias = str | Mapping[str, Any]
"""A prompt: text, or {"prompt": text}, or {"prompt_token_ids": [...]}. With both keys, the tokens are computed and the
text is only shown. A mapping may also have a "cache_salt"."""

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""The messages of one conversation, in order. Each is a mapping with "role", "content" and any other keys that the chat
template reads."""


class LLM:
    """Completes lists of prompts offline, in the caller's thread.

    Args:
        model: a directory in the Hugging Face format, a GGUF file, the name of a small model ("demo", "smollm2"),
            OWNER/NAME on a hub, or a model that is loaded already.
        log_stats_interval: seconds between two log lines with statistics (`stats.py`) while no progress bar is shown;
            None: no such lines.
        **knobs: arguments of `Engine`.

    Raises:
        ModelLoadError, ConfigError, ValueError: see `Engine`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = "demo",
        *,
        log_stats_interval: float | None = DEFAULT_INTERVAL,
        **knobs: Any,
    ) -> None:
        self.engine = Engine(model, **knobs)
        self._log_stats_interval = log_stats_interval
        self._ids = count()

    def get_tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that `generate` and `chat` use by default, from the model's
        generation_config.json."""
        return self.engine.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts.

        Args:
            prompts: one prompt, or a list of prompts.
            sampling_params: parameters for all prompts, or a list with one entry per prompt; None:
                `get_default_sampling_params`. Their `output_kind` is ignored.
            use_tqdm: whether to show progress on stderr.

        Returns:
            One finished output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt can never run, or the numbers of prompts and parameters differ; nothing has run.
            EngineStepError: the model failed; no request remains in the engine.
            RuntimeError: the engine is paused.
            KeyboardInterrupt: Ctrl-C was pressed; raised after the step in progress. No request remains in the engine.
        """
        try:
            many: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        except TypeError:
            raise ValueError(f"prompts is of type {type(prompts).__name__}; give a prompt, or a list of them") from None
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = _params_per_prompt(sampling_params, len(many))
        if self.engine.is_paused:
            raise RuntimeError("the engine is paused, so nothing would ever be generated; call engine.resume() first")
        with delayed_interrupts() as interruption:
            ids = self._add_all(many, each, interruption)
            try:
                finished = self._run(len(ids), use_tqdm, interruption)
            except BaseException:
                self._abort_all(ids)
                raise
        interruption.call_delayed_handler()  # Ctrl-C after the last step
        return [finished[request_id] for request_id in ids]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        use_tqdm: bool = True,
        *,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per prompt, made from the model's last hidden states.

        Args:
            prompts: one prompt, or a list of prompts.
            pooling: "last": the vector is the hidden state of the prompt's last token; "mean": the mean of the hidden
                states of all its tokens.
            use_tqdm: whether to show progress on stderr.
            normalize: whether vectors are scaled to length 1.

        Returns:
            One output per prompt, in the order of the prompts; the vector is `output.outputs.embedding`.

        Raises:
            RuntimeError: the model returns a vector that is not finite. Other exceptions as for `generate`.
        """
        params: Any = PoolingParams(pooling, normalize)
        return [EmbeddingRequestOutput.of(output) for output in self.generate(prompts, params, use_tqdm)]

    def _run(self, num_requests: int, use_tqdm: bool, interruption: Interruption) -> dict[str, RequestOutput]:
        """Step until every request has finished; return request id -> last output of the request."""
        interval = None if use_tqdm else self._log_stats_interval  # a log line would break the progress bar
        statistics = StatsLogger(self.engine, interval) if interval is not None else None
        finished: dict[str, RequestOutput] = {}
        with tqdm(total=num_requests, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        bar.update()
                if statistics is not None:
                    statistics.tick()
                interruption.call_delayed_handler()
        if statistics is not None:
            statistics.finish()
        return finished

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete conversations: the chat template turns each into a prompt, and `generate` completes it.

        Args:
            messages: one conversation, or a list of conversations.
            sampling_params: parameters as for `generate`.
            use_tqdm: whether to show progress on stderr.
            chat_template: a Jinja template that replaces the tokenizer's chat template; None: the tokenizer's.
            add_generation_prompt: whether the prompt ends with the header of the assistant's next message.
            continue_final_message: whether the last message stays open, so that the model continues it; then the prompt
                has no header of a next message.
            tools: descriptions of functions, for templates that show them to the model.
            chat_template_kwargs: further variables for the template.

        Returns:
            One finished output per conversation; its `prompt` is the text that the template made.

        Raises:
            ValueError: there is no tokenizer or no template, or the template refuses a conversation; nothing has run.
            EngineStepError: the model failed; no request remains in the engine.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = [self._chat_prompt(place, one, options) for place, one in enumerate(many)]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _chat_prompt(self, place: int, conversation: Any, options: dict[str, Any]) -> Prompt:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("the model has no tokenizer, so no chat template; use generate with prompt_token_ids")
        try:
            text = render_chat(tokenizer, conversation, options)
        except ValueError as error:
            raise ValueError(f"conversation {place}: {error}") from error
        # The template has already written special tokens such as BOS.
        return {"prompt": text, "prompt_token_ids": self.engine.tokenize(text, add_special_tokens=False)}

    def _add_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | PoolingParams], interruption: Interruption
    ) -> list[str]:
        """Add a request for every prompt; if one is refused, abort the requests added before. Returns the request
        ids."""
        ids: list[str] = []
        kind = RequestOutputKind.FINAL_ONLY
        distinct = {id(one): one for one in params}
        final = {
            key: one if isinstance(one, PoolingParams) else dataclasses.replace(one, output_kind=kind)
            for key, one in distinct.items()
        }
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(str(next(self._ids)))
                content, text, cache_salt = _parse_prompt(prompt)
                self.engine.add_request(ids[-1], content, final[id(one)], cache_salt=cache_salt, prompt_text=text)
                interruption.call_delayed_handler()
        except BaseException as error:
            self._abort_all(ids)
            if isinstance(error, ValueError):
                raise ValueError(f"prompt {len(ids) - 1}: {error}") from error
            raise
        return ids

    def _abort_all(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
        with suppress(EngineStepError):  # the outputs are discarded
            self.engine.finish_steps()


def _params_per_prompt(
    params: SamplingParams | PoolingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams | PoolingParams]:
    if isinstance(params, (SamplingParams, PoolingParams)):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} sampling parameters for {num_prompts} prompts; give one for all, or one for each"
        )
    return params


def _parse_prompt(prompt: Prompt) -> tuple[str | Sequence[int], str | None, str | None]:
    """Return three values of a prompt: its text or token ids to compute, its text to show (None: not given), and its
    cache salt."""
    if isinstance(prompt, str):
        return prompt, prompt, None
    if not isinstance(prompt, Mapping):
        raise ValueError(f'a prompt is {type(prompt).__name__}; give text or {{"prompt_token_ids": [...]}}')
    content = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if content is None:
        raise ValueError(f'a prompt has the keys {sorted(prompt)}; give "prompt" or "prompt_token_ids"')
    return content, prompt.get("prompt"), prompt.get("cache_salt")
