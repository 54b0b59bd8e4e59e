"""Pointsman's side of `engine_throughput.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _engine_worker import Answer, Session, Settings, serve

import pointsman
from pointsman.engine import LLM, SamplingParams


class PointsmanSession(Session):
    """`LLM`, as for a user of offline inference; other knobs keep their defaults."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        torch.set_num_threads(settings.threads)
        self.llm = LLM(
            settings.model,
            dtype=settings.dtype,
            kv_cache_bytes=settings.kv_cache_bytes,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            **settings.options,
        )

    def about(self) -> dict[str, Any]:
        return {"version": pointsman.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        answers = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in outputs],
            use_tqdm=False,
        )
        return [
            Answer(list(answer.outputs[0].token_ids), answer.metrics.first_token_time - answer.metrics.arrival_time)
            for answer in answers
        ]


if __name__ == "__main__":
    serve(PointsmanSession)
