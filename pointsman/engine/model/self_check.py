"""SelfCheck: compares a model's logits on the paged path, step by step, with a plain forward pass.

The plain pass is computed once, when a `SelfCheck` is constructed. The paged path can be checked any number of times,
also after parts of the model have been replaced by faster parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointsman.engine.attention.paged import ATTENTION_NAME, AttentionBackend, AttentionContext, PagedBatch
from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool, blocks_for
from pointsman.engine.model.forward import run_model
from pointsman.engine.model.linear import rounded_up_rows

BLOCK_SIZE = 4

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest allowed error of logits in the self-check, as `relative_error` measures it.

In bfloat16, rounding alone causes an error of 0.01 in two layers and 0.015 to 0.03 in 14 layers. An ignored window or
ignored sinks cause at least 0.17. Some models have larger rounding errors: 0.2 in Gemma 3 270M.
"""
MAX_RATIO_OF_ERRORS = 1.25
"""For a 16-bit model whose error exceeds `TOLERANCE`: maximum ratio of the paged path's error against float32 to the
plain pass's error against float32."""


@dataclass(slots=True)
class FirstStep:
    """The first step of the self-check; the attention context holds the step's plans while this object is used."""

    forward: Callable[[], Tensor]
    """Function that computes the step with the whole model, and returns the logits."""
    context: AttentionContext
    exact_pool: KVPool

    @contextmanager
    def use_exact_pool(self) -> Iterator[None]:
        """Inside the `with` block, layers attend to `exact_pool`, which is in float32, so keys and values are not
        rounded."""
        pool = self.context.pool
        self.context.pool = self.exact_pool
        try:
            yield
        finally:
            self.context.pool = pool


class SelfCheck:
    """Compares the paged path of a model with a plain forward pass of transformers.

    Three sequences share four steps over a pool of shuffled blocks, so that steps mix first chunks, later chunks and
    single tokens.

    Args:
        model: the model. Its handlers are attached to `context`, and its own layers are not yet replaced.
        layers: shapes of the model's layers, from `probe_layers`.
        context: the context through which the model's attention is computed.
        backend: the attention backend to check.
    """

    def __init__(
        self, model: Any, layers: Sequence[LayerShape], context: AttentionContext, backend: AttentionBackend
    ) -> None:
        self.model = model
        self.layers = layers
        self.context = context
        self.backend = backend
        self.sequences, self.steps = _plan_steps(model)
        self.plain = self._plain_logits()
        self._in_float32: list[Tensor] = []
        """Logits [t, vocab_size] of each sequence by a plain pass in float32; empty until they are needed."""
        most = blocks_for(max(len(sequence) for sequence in self.sequences), BLOCK_SIZE)
        # Shuffled by a stride that is coprime to the count, so that a row's blocks are far apart.
        self.tables = (np.arange(3 * most) * (3 * most - 1) % (3 * most)).reshape(most, 3).T

    def run(self, *, fused: bool = False) -> None:
        """Compare every logit of the paged path with the plain pass. If the error in a 16-bit type is too large,
        compare both with a plain pass in float32.

        Args:
            fused: whether parts of the model have been replaced; replaced parts compute only in the model's type.

        Raises:
            UnsupportedModel: the logits differ by more than rounding.
        """
        dtype, paged = self.model.dtype, self._paged_logits()
        error = self._logit_error(paged, self.plain)
        if error <= TOLERANCE[dtype]:
            return
        text = f"rounding causes at most {TOLERANCE[dtype]}"
        if dtype != torch.float32 and not fused:
            with in_float32(self.model):
                self._in_float32 = self._plain_logits()
        if self._in_float32:
            own = self._logit_error(self.plain, self._in_float32)
            error = self._logit_error(paged, self._in_float32)
            if error <= MAX_RATIO_OF_ERRORS * own:
                return
            text = f"measured against float32; rounding alone causes {own:.2g}"
        raise UnsupportedModel(
            f"{self.model.config.model_type}: logits of paged attention differ from transformers' "
            f"logits by {error:.2g} of their standard deviation ({text}); this model "
            "has an operation that does not work in mixed batches"
        )

    def _plain_logits(self) -> list[Tensor]:
        """Logits of every position of every sequence, computed with transformers' own attention."""
        with plain_attention(self.model):
            return [run_model(self.model, one, torch.arange(len(one)), keep=None) for one in self.sequences]

    def _logit_error(self, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        """The error of the logits `actual`: in float32 the largest error of all positions, in a 16-bit type the upper
        quartile.

        In a 16-bit type, rounding may change the choice of an expert at a few positions. The quartile still detects an
        error that only long sequences have, such as a lost window.
        """
        errors = torch.cat([relative_error(one, other) for one, other in zip(actual, expected, strict=True)])
        return float(errors.max() if self.model.dtype == torch.float32 else errors.quantile(0.75))

    @contextmanager
    def first_step(self) -> Iterator[FirstStep]:
        """The check's first step, which has two chunks. Inside the `with` block the step can be computed any number of
        times."""
        counts = np.array(self.steps[0])
        with self._run_step(self._make_pool(), counts, np.zeros_like(counts)) as forward:
            yield FirstStep(forward, self.context, self._make_pool(torch.float32))

    def _make_pool(self, dtype: torch.dtype | None = None) -> KVPool:
        return KVPool(
            self.layers,
            num_blocks=self.tables.size,
            block_size=BLOCK_SIZE,
            dtype=dtype or self.model.dtype,
            device=self.model.device,
        )

    @contextmanager
    def _run_step(
        self, pool: KVPool, counts: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]
    ) -> Iterator[Callable[[], Tensor]]:
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], computed[rows], self.tables[rows], BLOCK_SIZE)
        token_ids = torch.cat([self.sequences[row][computed[row] : computed[row] + counts[row]] for row in rows])
        self.context.begin([self.backend.plan(batch)], pool, self.backend)
        try:
            num_rows = rounded_up_rows(batch.num_tokens) if self.backend.leaves_out_rows else None
            yield lambda: run_model(self.model, token_ids, torch.from_numpy(batch.positions), None, num_rows)
        finally:
            self.context.end()

    def _paged_logits(self) -> list[Tensor]:
        """Logits of every position of every sequence, computed step by step on the paged path."""
        pool = self._make_pool()
        computed = np.zeros(3, dtype=np.int64)
        collected: list[list[Tensor]] = [[], [], []]
        for step in self.steps:
            counts = np.array(step)
            with self._run_step(pool, counts, computed) as forward:
                logits = forward()
            rows = np.nonzero(counts)[0]
            for row, part in zip(rows.tolist(), torch.split(logits, counts[rows].tolist()), strict=True):
                collected[row].append(part)
            computed = computed + counts
        return [torch.cat(parts) for parts in collected]


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """[t] error of each row of the logits [t, vocab_size]: the root mean square of the differences, relative to the
    standard deviation of the row.

    The largest error of a row is not used, because with equal rounding it grows with the size of the vocabulary.
    """
    difference = (actual.float() - expected.float()).square().mean(dim=-1).sqrt()
    return difference / expected.float().std(dim=-1).clamp(min=1e-6)


def _plan_steps(model: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Token sequences, and for each step the number of tokens of each sequence that the step computes."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 64
    steps: list[tuple[int, ...]] = [(13, 21, 0), (19, 1, 6), (1, 1, 3), (4, 1, 1)]
    if longest < sum(step[0] for step in steps):
        steps = [(2, 1, 0), (1, 1, 1), (1, 1, 1)]
    lengths = [sum(step[row] for step in steps) for row in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths], steps


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Convert a model to float32 inside the `with` block. A 16-bit model then takes twice the memory. Its weights are
    the same afterwards."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    dtypes = [one.dtype for one in tensors]
    try:
        for one in tensors:
            one.data = one.data.float()
        yield
    finally:
        for one, dtype in zip(tensors, dtypes, strict=True):
            one.data = one.data.to(dtype)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let the model use transformers' own eager attention inside the `with` block."""
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = ATTENTION_NAME
