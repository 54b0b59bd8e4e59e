"""transformers' side of `engine_throughput.py`: `generate` on static batches, or its own continuous batching.

`options["mode"]` is "static" or "continuous". A static batch is padded on the left to its longest prompt and runs until
its longest output is complete, as `generate` works; tokens beyond the end of a request are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers
from _engine_worker import Answer, Session, Settings, serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PADDING = 0
PAGE_SIZE = 256  # its default


class TransformersSession(Session):
    """A model with scaled-dot-product attention, the fastest that transformers has on a CPU."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        torch.set_num_threads(settings.threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        # A request ends at its length: the model's generation settings must not have an end-of-text token.
        self.model.generation_config = GenerationConfig()

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        if self.settings.options["mode"] == "continuous":
            return self._continuous(prompts, outputs)
        size = self.settings.options["batch_size"]
        answers: list[Answer] = []
        arrival = perf_counter()
        for start in range(0, len(prompts), size):
            answers += self._static_batch(prompts[start : start + size], outputs[start : start + size], arrival)
        return answers

    def _static_batch(self, prompts: Sequence[list[int]], outputs: Sequence[int], arrival: float) -> list[Answer]:
        steps: list[float] = []

        def note_step(input_ids: torch.Tensor, _: Any) -> torch.Tensor:
            steps.append(perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), PADDING)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            whole = self.model.generate(
                input_ids,
                attention_mask=mask,
                max_new_tokens=max(outputs),
                do_sample=False,
                pad_token_id=PADDING,
                stopping_criteria=[note_step],
            )
        first_token = steps[0] - arrival
        return [
            Answer(row[width : width + length].tolist(), first_token)
            for row, length in zip(whole, outputs, strict=True)
        ]

    def _continuous(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        """Use its manager rather than `generate_batch`, which has one length for all requests."""
        settings = self.settings
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings.max_num_seqs * -(-settings.max_model_len // PAGE_SIZE),
            max_batch_tokens=settings.max_num_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PADDING, max_new_tokens=1)
        answers: dict[str, Answer] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=length, record_timestamps=True)
            while len(answers) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"request {result.request_id} failed: {result.error}")
                    first_token = result.timestamps[0] - result.created_time
                    answers[result.request_id] = Answer(result.generated_tokens, first_token)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended before all requests had")
        return [answers[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    serve(TransformersSession)
