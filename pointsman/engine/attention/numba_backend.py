"""The fast attention backend for CPUs: a compiled kernel (`kernels/attention.py`) on PyTorch's own threads.

A step is planned once for all layers: rows are cut into tiles, longest first. Each thread computes one tile after the
other, so all threads finish at about the same time. A window changes the keys that a tile reads, but not the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.attention.fused import Heads
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.kernels import attention as kernel
from pointsman.engine.kernels import layers
from pointsman.engine.kernels.attention import attention_kernel
from pointsman.engine.kv.layout import LayerShape

LONG = 300_000
"""Minimum number of multiplications in a layer's attention for which the step's thread does other work beside the
kernel. This many take 50 to 100 us; starting a thread takes 15 us."""

_NO_SCALARS = np.zeros(2, dtype=np.float32)


@dataclass(slots=True)
class NumbaPlan:
    """The plan of one step, with the arguments of the kernels."""

    batch: PagedBatch
    tables: Int64Array
    """[n, width] block tables of the rows, in contiguous memory."""
    slots: Int64Array
    """Addresses of the batch's slot arrays, and the number of tokens, as arguments of `heads_kernel`."""
    scalars: Float32Array
    """[2] scale and softcap of the layer that is being computed."""
    arguments: dict[tuple[int, ...], Int64Array] = field(default_factory=dict)
    """Layer shape -> arguments of `attention_kernel`; each layer changes a few of the arguments."""
    num_pairs: int | None = None
    """Approximate number of pairs of a query and a key to which the query attends; None: not counted yet."""

    def has_time_for_other_work(self, pair_size: int) -> bool:
        """Whether a layer's attention takes long enough (`LONG`) for the step's thread to do other work beside the
        kernel.

        `pair_size`: number of multiplications for one pair of a query and a key, in all heads.
        """
        if self.num_pairs is None:
            self.num_pairs = int(self.batch.query_lens @ self.batch.kv_lens)
        return self.num_pairs * pair_size >= LONG

    def attention_arguments(self, num_heads: int, k_dim: int, values_shape: tuple[int, ...]) -> Int64Array:
        """The arguments of `attention_kernel` for layers of a shape. `values_shape` is [num_blocks, kv_heads, size,
        v_dim]."""
        key = (num_heads, k_dim, *values_shape)
        arguments = self.arguments.get(key)
        if arguments is None:
            num_blocks, num_kv_heads, block_size, v_dim = values_shape
            group = num_heads // num_kv_heads
            tiles = self.batch.of_lengths.get(group)
            if tiles is None:
                tiles = self.batch.of_lengths[group] = cut_tiles(self.batch, max(1, kernel.TILE_ROWS // group))
            arguments = self.arguments[key] = np.zeros(kernel.NUM_ARGUMENTS, dtype=np.int64)
            arguments[kernel.TABLES], arguments[kernel.TILES] = self.tables.ctypes.data, tiles.ctypes.data
            arguments[kernel.SCALARS] = self.scalars.ctypes.data
            arguments[kernel.NUM_TOKENS :] = (
                self.batch.num_tokens,
                num_heads,
                num_kv_heads,
                k_dim,
                v_dim,
                num_blocks,
                block_size,
                *self.tables.shape,
                len(tiles),
                0,
                max(kernel.TILE_ROWS, group),
            )
        return arguments


def cut_tiles(batch: PagedBatch, max_queries: int) -> Int64Array:
    """Cut every row into tiles of at most `max_queries` queries, sorted by decreasing work.

    Returns:
        [m, 4] for each tile: row, flat index of the first token, number of queries, position of the first query.
    """
    counts = batch.query_lens
    first_positions = batch.kv_lens - counts
    if len(counts) == batch.num_tokens:  # decodes only
        rows = np.argsort(-first_positions, kind="stable")
        return np.stack([rows, rows, np.ones_like(rows), first_positions[rows]], axis=1)
    per_row = -(-counts // max_queries)
    rows = np.repeat(np.arange(len(counts)), per_row)
    offset = (np.arange(len(rows)) - (np.cumsum(per_row) - per_row)[rows]) * max_queries
    queries = np.minimum(counts[rows] - offset, max_queries)
    position = first_positions[rows] + offset
    tiles = np.stack([rows, batch.query_starts[rows] + offset, queries, position], axis=1)
    return np.ascontiguousarray(tiles[np.argsort(-(queries * (position + queries)), kind="stable")])


def _make_heads_arguments(heads: Heads, num_features: int) -> tuple[Int64Array, Float32Array]:
    """The arguments of `heads_kernel` that depend only on the layer, and the array of floats to which the argument with
    index SCALARS points."""
    norms, shape = heads.norms, heads.shape
    scalars = np.array([norms.epsilon, norms.offset] if norms else [0, 0], dtype=np.float32)
    arguments = np.zeros(layers.HEADS_ARGUMENTS, dtype=np.int64)
    arguments[layers.SCALARS] = scalars.ctypes.data
    arguments[layers.NUM_HEADS], arguments[layers.NUM_KV_HEADS] = shape.num_heads, shape.num_kv_heads
    arguments[layers.K_DIM], arguments[layers.V_DIM] = shape.k_dim, shape.v_dim
    for place in (layers.QUERY_STRIDE, layers.KEY_STRIDE, layers.VALUE_STRIDE):
        arguments[place] = num_features
    arguments[layers.QUERY_HEAD_STRIDE] = arguments[layers.KEY_HEAD_STRIDE] = shape.k_dim
    arguments[layers.VALUE_HEAD_STRIDE] = shape.v_dim
    return arguments, scalars


class NumbaAttention:
    """The compiled attention backend for CPUs.

    Args:
        layers: shapes of the model's layers.
        device: device of the model, which must be a CPU.
    """

    name = "numba"
    leaves_out_rows = True
    kernels = layers.CompiledLayers()

    def __init__(self, layers: Sequence[LayerShape], device: torch.device | str = "cpu") -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"the numba attention backend runs on a CPU, not on {device}; use torch or triton")
        self.layers = tuple(layers)

    def plan(self, batch: PagedBatch) -> NumbaPlan:
        """Make the step's plan; see `AttentionBackend.plan`. Rows are cut into tiles later, when the first layer
        runs."""
        places = (batch.slot_blocks, batch.slot_offsets, batch.tails)
        slots = np.array([*(one.ctypes.data for one in places), batch.num_tokens], dtype=np.int64)
        scalars = np.zeros(2, dtype=np.float32)
        return NumbaPlan(batch, np.ascontiguousarray(batch.block_tables), slots, scalars)

    def write(self, plan: NumbaPlan, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values to the slots of the batch; see `AttentionBackend.write`."""
        key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (key, value.to(key.dtype)))
        arguments = np.zeros(layers.HEADS_ARGUMENTS, dtype=np.int64)
        arguments[layers.KEY], arguments[layers.VALUE] = key.data_ptr(), value.data_ptr()
        _, arguments[layers.NUM_KV_HEADS], arguments[layers.K_DIM] = key.shape
        arguments[layers.V_DIM] = value.shape[-1]
        arguments[layers.KEY_STRIDE], arguments[layers.KEY_HEAD_STRIDE] = key.stride()[:2]
        arguments[layers.VALUE_STRIDE], arguments[layers.VALUE_HEAD_STRIDE] = value.stride()[:2]
        arguments[layers.SCALARS] = _NO_SCALARS.ctypes.data
        self._write(plan, arguments, key.dtype, keys, values)

    def write_heads(
        self,
        plan: NumbaPlan,
        heads: Heads,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norm and rotate heads, and write keys and values to the pool; see `FusedAttentionBackend.write_heads`."""
        if heads.kept is None:
            heads.kept = _make_heads_arguments(heads, qkv.shape[-1])
        arguments: Int64Array = heads.kept[0]
        query = qkv.new_empty(qkv.shape[0], heads.shape.num_heads, heads.shape.k_dim)
        address, size = qkv.data_ptr(), qkv.element_size()
        arguments[layers.QUERY] = address
        arguments[layers.KEY] = address + size * heads.key_at
        arguments[layers.VALUE] = address + size * heads.value_at
        arguments[layers.QUERY_OUT] = query.data_ptr()
        if heads.norms is not None:
            arguments[layers.QUERY_NORM] = heads.norms.query.data_ptr()
            arguments[layers.KEY_NORM] = heads.norms.key.data_ptr()
        if rotary is not None:
            cos, sin = rotary
            arguments[layers.COS], arguments[layers.SIN] = cos.data_ptr(), sin.data_ptr()
            arguments[layers.ROTARY_DIM] = cos.shape[-1]
        self._write(plan, arguments, qkv.dtype, keys, values)
        return query

    @staticmethod
    def _write(plan: NumbaPlan, arguments: Int64Array, activations: torch.dtype, keys: Tensor, values: Tensor) -> None:
        """Run `heads_kernel`, after the arguments of the step and of the pool have been added to `arguments`."""
        batch = plan.batch
        arguments[layers.KEYS], arguments[layers.VALUES] = keys.data_ptr(), values.data_ptr()
        arguments[layers.NUM_BLOCKS], arguments[layers.BLOCK_SIZE] = keys.shape[0], keys.shape[2]
        arguments[layers.SLOT_BLOCKS : layers.NUM_TOKENS + 1] = plan.slots
        layers.heads_kernel(activations, keys.dtype)(arguments, layers.num_threads_for(batch.num_tokens))

    def attend(
        self,
        plan: NumbaPlan,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute the attention outputs of the batch; see `AttentionBackend.attend`."""
        query = query.contiguous()
        num_tokens, num_heads, k_dim = query.shape
        output = query.new_empty(num_tokens, num_heads, values.shape[-1])
        arguments = plan.attention_arguments(num_heads, k_dim, values.shape)
        arguments[kernel.QUERY], arguments[kernel.OUTPUT] = query.data_ptr(), output.data_ptr()
        arguments[kernel.KEYS], arguments[kernel.VALUES] = keys.data_ptr(), values.data_ptr()
        arguments[kernel.WINDOW] = window or 0
        plan.scalars[:] = scale, softcap or 0.0
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()  # this tensor must exist until the kernel has run
            arguments[kernel.SINKS] = sinks.data_ptr()
        else:
            arguments[kernel.SINKS] = 0
        run, num_threads = attention_kernel(query.dtype, keys.dtype), torch.get_num_threads()
        pair_size = num_heads * (k_dim + values.shape[-1])
        if plan.batch.meanwhile.do_part is None or not plan.has_time_for_other_work(pair_size):
            run(arguments, num_threads)
        else:
            # In every layer, this thread does other work until half of the work items are taken, then computes items.
            few = int(arguments[kernel.NUM_TILES] * arguments[kernel.NUM_KV_HEADS]) // 2
            run.run_beside(lambda: plan.batch.do_meanwhile(lambda: arguments[0] <= few), arguments, num_threads)
        if num_tokens > plan.batch.num_tokens:
            output[plan.batch.num_tokens :].zero_()
        return output
