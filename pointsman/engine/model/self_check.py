"""The last check of a model: its logits on the paged path, step by step, against a plain forward pass.

The plain pass is computed once, when a `SelfCheck` is made; the paged path may be checked any number of times, also
after parts of the model have been replaced by faster ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pointsman.engine.attention.paged import ATTENTION_NAME, AttentionBackend, AttentionContext, PagedBatch
from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool, blocks_for
from pointsman.engine.model.forward import run_model
from pointsman.engine.model.linear import whole_rows

BLOCK_SIZE = 4

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest allowed error of logits in the self-check, as `relative_error` measures it.

In bfloat16 rounding alone makes 0.01 in two layers and 0.015 to 0.03 in 14; a lost window or lost sinks make 0.17 and
more. Some trained models amplify rounding: random tokens, which make no text, make 0.06 in SmolLM2 135M, and 0.2 in
Gemma 3 270M. In a narrow type a model is therefore allowed half as much again as the error that its own layers make
when its embeddings are rounded otherwise (`SelfCheck.tolerance`), if that is more.
"""
OTHER_ROUNDINGS = 1.5
"""Times that error: fused layers round in more places."""
LARGEST_TOLERANCE = 0.5
"""Where rounding alone makes a larger error, the check could tell nothing."""


@dataclass(slots=True)
class FirstStep:
    """A step that is under way: the attention context says what its layers attend to."""

    forward: Callable[[], Tensor]
    """Computes the whole model."""
    context: AttentionContext
    exact_pool: KVPool

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Meanwhile layers attend to a pool in float32, so that keys and values are not rounded."""
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
        model: with its handlers attached to `context`, and its own layers still in place.
        layers: its layers' shapes, as probed.
        context: through which its attention is computed.
        backend: the attention that will run.
    """

    def __init__(
        self, model: Any, layers: Sequence[LayerShape], context: AttentionContext, backend: AttentionBackend
    ) -> None:
        self.model = model
        self.layers = layers
        self.context = context
        self.backend = backend
        self.sequences, self.steps = _plan(model)
        with plain_attention(model):
            self.plain = self._run_plain()
            self.tolerance = TOLERANCE[model.dtype]
            """Largest allowed error of this model."""
            if model.dtype != torch.float32:
                with _rounded_otherwise(model.get_input_embeddings()):
                    own = self._error(self._run_plain())
                self.tolerance = min(max(self.tolerance, OTHER_ROUNDINGS * own), LARGEST_TOLERANCE)
        most = blocks_for(max(len(sequence) for sequence in self.sequences), BLOCK_SIZE)
        # Shuffled by a stride that has no factor in common with the count, so that a row's blocks lie apart.
        self.tables = (np.arange(3 * most) * (3 * most - 1) % (3 * most)).reshape(most, 3).T

    def run(self) -> None:
        """Compare every logit.

        Raises:
            UnsupportedModel: they differ by more than rounding.
        """
        error = self._error(self._paged())
        if not error <= self.tolerance:
            raise UnsupportedModel(
                f"{self.model.config.model_type}: logits of the paged path differ from transformers' own by "
                f"{error:.2g} of their spread (at most {self.tolerance:.2g} is rounding); some part of this model is "
                "not computed per token"
            )

    def _error(self, logits: list[Tensor]) -> float:
        """That of logits of all sequences."""
        errors = torch.cat([relative_error(got, want) for got, want in zip(logits, self.plain, strict=True)])
        # In float32 every position must agree. In a narrow type rounding may tip an expert's choice here and there;
        # three quarters must agree, so that a fault of long sequences only, such as a lost window, still shows.
        return float(errors.max() if self.model.dtype == torch.float32 else errors.quantile(0.75))

    def _run_plain(self) -> list[Tensor]:
        return [run_model(self.model, one, torch.arange(len(one)), keep=None) for one in self.sequences]

    @contextmanager
    def first_step(self) -> Iterator[FirstStep]:
        """The first step, with two chunks, to be computed any number of times while this is open."""
        counts = np.array(self.steps[0])
        with self._step(self._pool(), counts, np.zeros_like(counts)) as forward:
            yield FirstStep(forward, self.context, self._pool(torch.float32))

    def _pool(self, dtype: torch.dtype | None = None) -> KVPool:
        return KVPool(
            self.layers,
            num_blocks=self.tables.size,
            block_size=BLOCK_SIZE,
            dtype=dtype or self.model.dtype,
            device=self.model.device,
        )

    @contextmanager
    def _step(
        self, pool: KVPool, counts: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]
    ) -> Iterator[Callable[[], Tensor]]:
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], computed[rows], self.tables[rows], BLOCK_SIZE)
        token_ids = torch.cat([self.sequences[row][computed[row] : computed[row] + counts[row]] for row in rows])
        self.context.begin([batch], pool, self.backend)
        try:
            num_rows = whole_rows(batch.num_tokens) if self.backend.leaves_out_rows else None
            yield lambda: run_model(self.model, token_ids, torch.from_numpy(batch.positions), None, num_rows)
        finally:
            self.context.end()

    def _paged(self) -> list[Tensor]:
        """Logits of every position of every sequence, computed step by step."""
        pool = self._pool()
        computed = np.zeros(3, dtype=np.int64)
        collected: list[list[Tensor]] = [[], [], []]
        for step in self.steps:
            counts = np.array(step)
            with self._step(pool, counts, computed) as forward:
                logits = forward()
            rows = np.nonzero(counts)[0]
            for row, part in zip(rows.tolist(), torch.split(logits, counts[rows].tolist()), strict=True):
                collected[row].append(part)
            computed = computed + counts
        return [torch.cat(parts) for parts in collected]


def relative_error(got: Tensor, want: Tensor) -> Tensor:
    """[t] root mean square of each row's error, logits [t, vocab_size], relative to the row's standard deviation.

    The largest error of a row would grow with the vocabulary, from the same rounding.
    """
    difference = (got.float() - want.float()).square().mean(dim=-1).sqrt()
    return difference / want.float().std(dim=-1).clamp(min=1e-6)


def _plan(model: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Token sequences, and per step how many tokens of each are computed."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 64
    steps: list[tuple[int, ...]] = [(13, 21, 0), (19, 1, 6), (1, 1, 3), (4, 1, 1)]
    if longest < sum(step[0] for step in steps):
        steps = [(2, 1, 0), (1, 1, 1), (1, 1, 1)]
    lengths = [sum(step[row] for step in steps) for row in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths], steps


@contextmanager
def _rounded_otherwise(embeddings: nn.Module) -> Iterator[None]:
    """Meanwhile some elements of what a model computes with are the next number of its type."""
    generator = torch.Generator().manual_seed(0)

    def round_otherwise(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).to(output.device) - 0.5
        rounded: Tensor = output * (1 + torch.finfo(output.dtype).eps * noise)  # in float32
        return rounded.to(output.dtype)

    hook = embeddings.register_forward_hook(round_otherwise)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Run the model with transformers' own eager attention meanwhile."""
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = ATTENTION_NAME
