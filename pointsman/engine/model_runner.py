"""ModelRunner: execute one `SchedulerOutput` on the model, one forward pass for all rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pointsman.core.output import SchedulerOutput, StepResult
from pointsman.core.request import Request
from pointsman.engine.attention import AttentionBackend, PagedBatch
from pointsman.engine.kv_pool import KVPool
from pointsman.engine.model_check import run_model
from pointsman.engine.model_loader import LoadedModel
from pointsman.engine.sampler import SamplingRow, derive_seed, sample
from pointsman.engine.torch_attention import TorchAttention

if TYPE_CHECKING:
    from pointsman.core import Scheduler

NOT_FINITE = "the model's logits are not finite (NaN or infinity); check the weights, or use dtype float32"


class ModelRunner:
    """Runs scheduler outputs on one model over one KV pool.

    Args:
        loaded: the model.
        pool: its KV pool, with the block count and size of the scheduler's configuration.
        scheduler: read for block tables and input tokens, never changed.
        seed: requests that give no seed derive theirs from it and their id.
        backend: how attention is computed; None: plain PyTorch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        scheduler: Scheduler,
        *,
        seed: int = 0,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.loaded = loaded
        self.pool = pool
        self.scheduler = scheduler
        self.seed = seed
        self.backend = backend or TorchAttention(loaded.layers, loaded.model.device)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Compute the step: KV of every scheduled token, one sampled token per row with `samples`.

        A row whose logits are not finite is answered with an error, so that only its request ends. An empty output
        is answered without a forward pass.

        Raises:
            Exception: whatever the model raises; nothing is then known about the pool's slots of this step.
        """
        if output.total_num_scheduled_tokens == 0:
            return StepResult(token_ids=np.empty(0, dtype=np.int64))
        started = time.perf_counter()
        batch = self._batch(output)
        sampling = np.nonzero(output.samples)[0]
        logits = self._forward(output, batch, batch.query_starts[sampling + 1] - 1)
        token_ids, errors = self._sample(output, batch, sampling, logits)
        return StepResult(token_ids=token_ids, errors=errors, step_time=time.perf_counter() - started)

    def _batch(self, output: SchedulerOutput) -> PagedBatch:
        return PagedBatch.build(
            output.num_scheduled_tokens,
            output.num_computed_tokens,
            self.scheduler.block_table[output.rows],
            self.pool.block_size,
            self.loaded.model.device,
        )

    def _forward(self, output: SchedulerOutput, batch: PagedBatch, last_tokens: np.ndarray) -> Tensor:
        """Logits [len(last_tokens), vocab_size] at the flat positions `last_tokens`."""
        token_ids = torch.from_numpy(self.scheduler.input_token_ids(output).astype(np.int64))
        context = self.loaded.context
        context.begin(batch, self.pool, self.backend)
        try:
            return run_model(
                self.loaded.model, token_ids, torch.from_numpy(batch.positions), keep=torch.from_numpy(last_tokens)
            )
        finally:
            context.end()

    def _sample(
        self, output: SchedulerOutput, batch: PagedBatch, sampling: np.ndarray, logits: Tensor
    ) -> tuple[np.ndarray, dict[int, str]]:
        if not len(sampling):
            return np.empty(0, dtype=np.int64), {}
        rows = [
            self._sampling_row(output.requests[row], position)
            for row, position in zip(sampling.tolist(), batch.kv_lens[sampling].tolist(), strict=True)
        ]
        with torch.inference_mode():
            tokens, ok = sample(logits, rows)
        token_ids, good = tokens.cpu().numpy(), ok.cpu().numpy()
        return token_ids[good], dict.fromkeys(sampling[~good].tolist(), NOT_FINITE)

    def _sampling_row(self, request: Request, position: int) -> SamplingRow:
        """How to draw the token at `position`; the request's metadata are its SamplingParams."""
        params = request.metadata
        seed = params.seed
        if seed is None and not params.is_greedy:
            seed = derive_seed(self.seed, request.request_id)
        early = position - request.num_prompt_tokens < request.min_tokens
        banned = tuple(request.stop_set) if early else ()
        return SamplingRow(params, seed or 0, position, banned)
