"""Pooler: computes embeddings, one vector per prompt, from the model's last hidden states. Nothing is sampled.

    "last"   the hidden state of the prompt's last token (vLLM's default; decoder models are trained for it)
    "mean"   the mean over all tokens of the prompt

The scheduler reports the rows that complete their prompts in a step (`SchedulerOutput.completes`). A prompt may be
computed in chunks, partly by steps that fail, or again after a preemption. So the sums of "mean" are kept by chunk,
with the chunk's start as key. A recomputed chunk replaces all sums from its start on. The mean needs every token's
hidden state, and a cache hit computes none, so requests with "mean" do not use the prefix cache.

The hidden states are read at the input of the model's output layer. So one forward pass computes the rows that sample
and the rows that are pooled. Rows that are only pooled skip the output layer.
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
    """The tokens of one row of a step whose hidden states are pooled."""

    row_index: int
    request: Request
    start: int
    """Prompt position of the row's first token in this step."""
    num_hidden: int
    """Number of hidden states that are pooled: for "mean" one for each token, for "last" 1."""
    completes: bool


@dataclass(slots=True)
class _PoolState:
    params: PoolingParams
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Start of a chunk -> sum of the chunk's hidden states, [hidden_size] float32."""


class Pooler:
    """Pools the hidden states of the prompts of one engine's embedding requests."""

    def __init__(self) -> None:
        self._pooled: dict[Request, _PoolState] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    def add(self, request: Request, params: PoolingParams) -> None:
        """Begin to pool the prompt of a request; pooling ends when a scheduler output reports that the request has
        finished."""
        self._pooled[request] = _PoolState(params)

    def prepare(self, output: SchedulerOutput, query_starts: Int64Array) -> tuple[list[PooledChunk], Int64Array]:
        """The chunks of a step that are pooled, and one array with the flat positions of their hidden states, chunk
        after chunk."""
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

    def add_states(self, chunks: Sequence[PooledChunk], hidden: Tensor) -> dict[int, Float32Array]:
        """Add the hidden states of a step's chunks to the sums, and compute the embeddings of completed prompts.

        Args:
            hidden: [states of all chunks, hidden_size], chunk after chunk.

        Returns:
            Row index of the output -> embedding vector, for the rows that completed their prompts. A vector may contain
            non-finite numbers.
        """
        vectors: dict[int, Float32Array] = {}
        with torch.inference_mode():
            for chunk, states in zip(chunks, torch.split(hidden, [chunk.num_hidden for chunk in chunks]), strict=True):
                pooled = self._pooled.get(chunk.request)
                if pooled is not None:  # the request may have finished while the step was in flight
                    vector = _add_chunk(pooled, chunk, states.float())
                    if vector is not None:
                        vectors[chunk.row_index] = vector.cpu().numpy()
        return vectors


def _add_chunk(pooled: _PoolState, chunk: PooledChunk, states: Tensor) -> Tensor | None:
    """Add a chunk's hidden states [m, hidden_size] float32; returns the embedding [hidden_size] if the chunk is the
    prompt's last chunk, otherwise None."""
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
def capture_hidden_states(model: Any, num_logits: int, trims: bool) -> Iterator[list[Tensor]]:
    """Capture the input of the model's output layer in the forward pass inside the `with` block.

    Yields a list, to which the forward pass appends one tensor [r, hidden_size].

    Args:
        num_logits: number of rows whose logits are needed; these rows are first.
        trims: whether the rows after the first `num_logits` rows skip the output layer.
    """
    captured: list[Tensor] = []

    def capture(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        captured.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
        return (inputs[0][:, :num_logits], *inputs[1:]) if trims else None

    handle = model.get_output_embeddings().register_forward_pre_hook(capture)
    try:
        yield captured
    finally:
        handle.remove()


def check_can_pool(model: Any) -> None:
    """Check that a model can compute embeddings. Raises ValueError: the model has no output layer whose input can be
    read."""
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no output layer, so its hidden states cannot be read")
