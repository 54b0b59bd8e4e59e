"""LLM: many prompts in, all outputs back, as vLLM's users know it.

llm = LLM("demo")
for output in llm.generate(["The import statement", "A class is"], SamplingParams(max_tokens=32)):
    print(output.prompt, output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm  # type: ignore[import-untyped]

from pointsman.engine.engine import Engine
from pointsman.engine.model_loader import LoadedModel
from pointsman.engine.output import RequestOutput
from pointsman.engine.sampling_params import SamplingParams

Prompt: TypeAlias = str | Mapping[str, Any]
"""Text, or {"prompt": text}, or {"prompt_token_ids": [...]}; a mapping may also have a "cache_salt"."""


class LLM:
    """Offline inference.

    Args:
        model: a directory, "demo" for the packaged model, or a model that is loaded already.
        **knobs: as for `Engine`.

    Raises:
        ModelLoadError, ConfigError, ValueError: see `Engine`.
    """

    def __init__(self, model: str | Path | LoadedModel | None = "demo", **knobs: Any) -> None:
        self.engine = Engine(model, **knobs)
        self._ids = count()

    def get_tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts.

        Args:
            prompts: one or many.
            sampling_params: one for all, or one per prompt; None: the defaults.
            use_tqdm: whether to show progress on stderr.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt can never run, or the numbers of prompts and parameters differ; nothing has run then.
            EngineStepError: the model failed; nothing is left in the engine.
        """
        many: Sequence[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        each = _params_per_prompt(sampling_params, len(many))
        ids = self._add_all(many, each)
        finished: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        if output.finished:
                            finished[output.request_id] = output
                            bar.update()
        except BaseException:
            self._abort_all(ids)
            raise
        return [finished[request_id] for request_id in ids]

    def _add_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Add every prompt, or none."""
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                content, cache_salt = _content(prompt)
                request_id = str(next(self._ids))
                self.engine.add_request(request_id, content, one, cache_salt=cache_salt)
                ids.append(request_id)
        except ValueError as error:
            self._abort_all(ids)
            raise ValueError(f"prompt {len(ids)}: {error}") from error
        return ids

    def _abort_all(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"{len(params)} sampling parameters for {num_prompts} prompts; give one for all, or one for each"
        )
    return params


def _content(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """What to run, and the cache salt."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        raise ValueError(f'a prompt is {type(prompt).__name__}; give text or {{"prompt_token_ids": [...]}}')
    content = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if content is None:
        raise ValueError(f'a prompt has the keys {sorted(prompt)}; give "prompt" or "prompt_token_ids"')
    return content, prompt.get("cache_salt")
