"""Pooler: embeddings, one vector per prompt, made of the model's last hidden states; nothing is sampled.

    "last"   the hidden state of the prompt's last token (what decoder models are trained for, vLLM's default)
    "mean"   the mean over all of its tokens

The scheduler says which rows complete their prompts in a step (`SchedulerOutput.completes`). A prompt may be computed
in chunks, in part by steps that fail, or again after a preemption. So the sums of "mean" are kept chunk by chunk, by
where they begin: a chunk that is computed again takes the place of what was kept from there on. Since the mean needs
every token's hidden state, and a cached prefix computes none, such a request looks up no prefixes.

The hidden states are read where they enter the model's output layer, so that they are those of the very pass that
serves the rows that sample. Rows that are only pooled do not go through that layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.params.pooling import PoolingParams

if TYPE_CHECKING:
    from pointsman.core import Request, SchedulerOutput


class PooledChunk(NamedTuple):
    """A row of a step whose hidden states are wanted."""

    row_index: int
    request: Request
    start: int
    """Position in the prompt of its first token in this step."""
    num_hidden: int
    """Hidden states that are wanted: of all its tokens, or of the last."""
    completes: bool


@dataclass(slots=True)
class _Pooled:
    params: PoolingParams
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Where a chunk begins -> the sum of its hidden states, [hidden_size] float32."""


class Pooler:
    """The requests of one engine that are pooled."""

    def __init__(self) -> None:
        self._pooled: dict[Request, _Pooled] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    def add(self, request: Request, params: PoolingParams) -> None:
        """Pool the prompt of a request, until an output reports that it finished."""
        self._pooled[request] = _Pooled(params)

    def prepare(self, output: SchedulerOutput, query_starts: Int64Array) -> tuple[list[PooledChunk], Int64Array]:
        """Which rows are pooled in a step, and the flat positions of the hidden states that they need."""
        for request in output.finished:
            self._pooled.pop(request, None)
        completes = set(output.completes.tolist())
        chunks: list[PooledChunk] = []
        positions = [np.zeros(0, dtype=np.int64)]
        for index, request in enumerate(output.requests):
            pooled = self._pooled.get(request)
            if pooled is None or (pooled.params.pooling == "last" and index not in completes):
                continue
            first, end = int(query_starts[index]), int(query_starts[index + 1])
            first = end - 1 if pooled.params.pooling == "last" else first
            start = int(output.num_computed_tokens[index])
            chunks.append(PooledChunk(index, request, start, end - first, index in completes))
            positions.append(np.arange(first, end))
        return chunks, np.concatenate(positions)

    def take(self, chunks: Sequence[PooledChunk], hidden: Tensor) -> dict[int, Float32Array]:
        """Add the hidden states of a step.

        Args:
            hidden: [states of all chunks, hidden_size], chunk after chunk.

        Returns:
            Row index of the output -> the vector, for the rows that completed; it may be not finite.
        """
        vectors: dict[int, Float32Array] = {}
        with torch.inference_mode():
            for chunk, states in zip(chunks, torch.split(hidden, [chunk.num_hidden for chunk in chunks]), strict=True):
                pooled = self._pooled.get(chunk.request)
                if pooled is not None:  # it may have finished while the step was in flight
                    vector = _advance(pooled, chunk, states.float())
                    if vector is not None:
                        vectors[chunk.row_index] = vector.cpu().numpy()
        return vectors


def _advance(pooled: _Pooled, chunk: PooledChunk, states: Tensor) -> Tensor | None:
    """The vector [hidden_size], if the chunk is the last; states: [m, hidden_size] float32."""
    vector = states[-1]
    if pooled.params.pooling == "mean":
        pooled.sums = {start: total for start, total in pooled.sums.items() if start < chunk.start}
        pooled.sums[chunk.start] = states.sum(dim=0)
        if chunk.completes:
            vector = torch.stack(list(pooled.sums.values())).sum(dim=0) / chunk.request.num_prompt_tokens
    if not chunk.completes:
        return None
    return torch.nn.functional.normalize(vector, dim=0) if pooled.params.normalize else vector


@contextmanager
def hidden_states(model: Any, num_logits: int, trims: bool) -> Iterator[list[Tensor]]:
    """What enters the model's output layer in the forward pass within: a list that gets one tensor [r, hidden_size].

    Args:
        num_logits: of these rows, how many logits are wanted; the first ones.
        trims: whether the other rows may be kept from the layer, so that its output has only those.
    """
    heard: list[Tensor] = []

    def listen(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        heard.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
        return (inputs[0][:, :num_logits], *inputs[1:]) if trims else None

    handle = model.get_output_embeddings().register_forward_pre_hook(listen)
    try:
        yield heard
    finally:
        handle.remove()


def check_can_pool(model: Any) -> None:
    """Raises ValueError: the model has no output layer whose input could be read."""
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no output layer, so its hidden states cannot be read")
