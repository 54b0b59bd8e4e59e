"""transformers' side of `engine_throughput.py`: `generate` on static batches, or its own continuous batching.

`options["mode"]` is "static" or "continuous". A static batch is padded on the left to its longest prompt and runs
until its longest output is there, as `generate` works; tokens beyond what a request asked for are thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from _engine_worker import Session, Settings, serve
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

    def about(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[list[int]]:
        if self.settings.options["mode"] == "continuous":
            return self._continuous(prompts, outputs)
        size = self.settings.options["batch_size"]
        tokens: list[list[int]] = []
        for start in range(0, len(prompts), size):
            tokens += self._static_batch(prompts[start : start + size], outputs[start : start + size])
        return tokens

    def _static_batch(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[list[int]]:
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
            )
        return [row[width : width + length].tolist() for row, length in zip(whole, outputs, strict=True)]

    def _continuous(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[list[int]]:
        """Its manager rather than `generate_batch`, which has one length for all requests."""
        settings = self.settings
        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings.max_num_seqs * -(-settings.max_model_len // PAGE_SIZE),
            max_batch_tokens=settings.max_num_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PADDING, max_new_tokens=1)
        tokens: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            for i, (prompt, length) in enumerate(zip(prompts, outputs, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=length)
            while len(tokens) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"request {result.request_id} failed: {result.error}")
                    tokens[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended before all requests had")
        return [tokens[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    serve(TransformersSession)
