"""The attention backend for GPUs: Triton kernels over the pool (`kernels/triton_attention.py`, `triton_layers.py`).

A step is planned once for all layers of a group. The KV of rows with one token (decodes) is cut into parts. Rows with
more tokens are cut into tiles of queries, longest first. The kernels' inputs are copied to the device in one copy,
without waiting for the device.

If Triton interprets its kernels (`TRITON_INTERPRET=1`), the backend runs on a CPU, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pointsman.engine.attention.fused import Heads
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.device import to_device
from pointsman.engine.kernels import triton_attention as kernels
from pointsman.engine.kernels.triton_layers import TritonLayers, heads_kernel, padded_size
from pointsman.engine.kv.layout import LayerShape

MAX_PARTS = 64
"""Maximum number of parts into which a row's KV is cut; with more parts, merging would take longer than they save."""
PROGRAMS_PER_PROCESSOR = 8
"""Number of programs of the decode kernel for each multiprocessor, so that usually at least one program does not wait
for memory."""
MAX_HEAD_DIM = 256
MIN_ROWS, MAX_ROWS = 64, 128
"""Number of rows (queries times heads) of a tile of the prefill kernel, for short and for long chunks. All rows of a
tile share one read of keys and values; see `max_tile_rows`."""


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, for tests."""
    return bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1, unless a program sets it


@dataclass(slots=True)
class TritonPlan:
    """The plan of one step for one group of layers. All tensors are int32 on the device."""

    block_size: int
    slots: Tensor
    """[T] slot of each token's KV in the pool: block * block_size + offset; negative: padding without KV."""
    tails: Tensor
    """[T] number of slots after each token's slot to set to zero, see `PagedBatch.tails`."""
    tables: Tensor
    """[.., width] block tables of the rows, for all groups of layers."""
    table_width: Tensor
    """[1] number of columns of `tables`."""
    first_table: int
    """Index in `tables` of the first block table of this group of layers."""
    decode_rows: Tensor
    """[d] rows with one token in this step."""
    decode_tokens: Tensor
    """[d] flat index of the token of each row in `decode_rows`."""
    decode_lens: Tensor
    """[d] number of tokens to which the token of each row in `decode_rows` attends, itself included; 0: padding."""
    tiles: Mapping[int, Tensor]
    """Number of query heads per KV head -> [m, 4] tiles of the rows with several tokens, see `prefill_kernel`."""
    tile_rows: int
    """Number of rows (queries times heads) of a tile, unless one query has more heads."""
    num_tokens: int


def cut_tiles(batch: PagedBatch, max_queries: int) -> npt.NDArray[np.int32]:
    """Cut rows with more than one token into tiles of at most `max_queries` queries, sorted by decreasing work.

    Returns:
        [m, 4] for each tile: row, flat index of the first token, number of queries, position of the first query.
    """
    rows = np.nonzero(batch.query_lens > 1)[0]
    counts = batch.query_lens[rows]
    per_row = -(-counts // max_queries)
    which = np.repeat(np.arange(len(rows)), per_row)
    offset = (np.arange(len(which)) - (np.cumsum(per_row) - per_row)[which]) * max_queries
    queries = np.minimum(counts[which] - offset, max_queries)
    position = (batch.kv_lens[rows] - counts)[which] + offset
    tiles = np.stack([rows[which], batch.query_starts[rows][which] + offset, queries, position], axis=1)
    return tiles[np.argsort(-(position + queries), kind="stable")].astype(np.int32)


class TritonAttention:
    """The attention backend for GPUs.

    Args:
        layers: shapes of the model's layers.
        device: device of the model: a GPU, or a CPU if Triton interprets its kernels.
        dtype: type of the model, which determines the size of the tiles.

    Raises:
        ValueError: the backend cannot run on this device, or a layer has heads that are too large.
    """

    name = "triton"
    leaves_out_rows = False
    kernels = TritonLayers()

    def __init__(
        self,
        layers: Sequence[LayerShape],
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" and not is_interpreted():
            raise ValueError(f"the Triton attention backend runs on a GPU, not on {device}; use numba or torch")
        largest = max(max(shape.k_dim, shape.v_dim) for shape in layers)
        if largest > MAX_HEAD_DIM:
            raise ValueError(
                f"a head has {largest} elements; Triton attention supports at most {MAX_HEAD_DIM}; use torch"
            )
        self.layers = tuple(layers)
        self._max_tile_rows = max_tile_rows(largest * dtype.itemsize)
        self._groups = sorted({shape.num_heads // shape.num_kv_heads for shape in layers})

    def plan(self, batch: PagedBatch) -> TritonPlan:
        """Make the step's plan, and copy it to the device without waiting for the copy; see `AttentionBackend.plan`."""
        decodes = np.nonzero(batch.query_lens == 1)[0]
        longest = int(batch.query_lens.max(initial=1)) * self._groups[-1]
        tile_rows = self._max_tile_rows if longest > MIN_ROWS else MIN_ROWS
        arrays = {
            "slots": (batch.slot_blocks * batch.block_size + batch.slot_offsets).astype(np.int32),
            "tails": batch.tails.astype(np.int32),
            "decode_rows": decodes.astype(np.int32),
            "decode_tokens": batch.query_starts[decodes].astype(np.int32),
            "decode_lens": batch.kv_lens[decodes].astype(np.int32),
            "table_width": np.array([batch.block_tables.shape[1]], dtype=np.int32),
            "tables": batch.block_tables.astype(np.int32),
        }
        if len(decodes) < len(batch.query_lens):
            for group in self._groups:
                arrays[f"tiles of {group}"] = cut_tiles(batch, max(tile_rows, padded_size(group)) // group)
        tensors = to_device(arrays, self.device)
        return TritonPlan(
            block_size=batch.block_size,
            slots=tensors["slots"],
            tails=tensors["tails"],
            tables=tensors["tables"],
            table_width=tensors["table_width"],
            first_table=0,
            decode_rows=tensors["decode_rows"],
            decode_tokens=tensors["decode_tokens"],
            decode_lens=tensors["decode_lens"],
            tiles={group: tensors[f"tiles of {group}"] for group in self._groups if f"tiles of {group}" in tensors},
            tile_rows=tile_rows,
            num_tokens=batch.num_tokens,
        )

    def write(self, plan: TritonPlan, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values to the slots of the batch; see `AttentionBackend.write`."""
        key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (key, value))
        shape = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.shape[1])
        _run_heads_kernel(plan, shape, None, None, key, value, None, None, keys, values)

    def write_heads(
        self,
        plan: TritonPlan,
        heads: Heads,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Norm and rotate heads, and write keys and values to the pool; see `FusedAttentionBackend.write_heads`."""
        shape = heads.shape
        query = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.k_dim)
        key = qkv[:, heads.key_at : heads.value_at].view(-1, shape.num_kv_heads, shape.k_dim)
        value = qkv[:, heads.value_at :].view(-1, shape.num_kv_heads, shape.v_dim)
        _run_heads_kernel(plan, shape, heads, qkv, key, value, rotary, query, keys, values)
        return query

    def attend(
        self,
        plan: TritonPlan,
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
        num_tokens, num_heads, k_dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != k_dim:
            query = query.contiguous()
        num_kv_heads, v_dim = keys.shape[1], values.shape[-1]
        group = num_heads // num_kv_heads
        output = query.new_empty(num_tokens, num_heads, v_dim)
        shared: dict[str, Any] = {
            "query_stride": query.stride(0),
            "first_table": plan.first_table,
            "scale": scale,
            "softcap": softcap or 0.0,
            "window": window or 0,
            "has_sinks": sinks is not None,
            "num_kv_heads": num_kv_heads,
            "group": group,
            "k_dim": k_dim,
            "v_dim": v_dim,
            "block_size": plan.block_size,
            "padded_k": padded_size(k_dim),
            "padded_v": padded_size(v_dim),
        }
        head_bytes = max(k_dim, v_dim) * query.element_size()
        if len(plan.decode_rows):
            self._decode(plan, query, keys, values, sinks, output, shared, decode_options(head_bytes))
        tiles = plan.tiles.get(group)
        if tiles is not None and len(tiles):
            tile_rows = max(plan.tile_rows, padded_size(group))
            kernels.prefill_kernel[(len(tiles), num_kv_heads)](
                query,
                keys,
                values,
                output,
                plan.tables,
                plan.table_width,
                tiles,
                sinks,
                **shared,
                tile_rows=tile_rows,
                **prefill_options(head_bytes, query.element_size(), tile_rows),
            )
        return output

    def _decode(
        self,
        plan: TritonPlan,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        output: Tensor,
        shared: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        num_rows, num_heads, v_dim = len(plan.decode_rows), query.shape[1], shared["v_dim"]
        num_kv_heads, group = shared["num_kv_heads"], shared["group"]
        num_parts = choose_num_parts(num_rows * num_kv_heads, num_processors(self.device))
        sums = outputs = output
        if num_parts > 1:
            sums = torch.empty(num_rows, num_heads, num_parts, 2, dtype=torch.float32, device=query.device)
            outputs = torch.empty(num_rows, num_heads, num_parts, v_dim, dtype=torch.float32, device=query.device)
        kernels.decode_kernel[(num_rows, num_kv_heads, num_parts)](
            query,
            keys,
            values,
            output,
            sums,
            outputs,
            plan.tables,
            plan.table_width,
            plan.decode_lens,
            plan.decode_rows,
            plan.decode_tokens,
            sinks,
            **shared,
            num_parts=num_parts,
            padded_group=padded_size(group),
            **options,
        )
        if num_parts > 1:
            kernels.merge_kernel[(num_rows, num_heads)](
                sums,
                outputs,
                output,
                plan.decode_tokens,
                sinks,
                has_sinks=sinks is not None,
                num_heads=num_heads,
                v_dim=v_dim,
                num_parts=num_parts,
                padded_parts=padded_size(num_parts, 2),
                padded_v=padded_size(v_dim),
                num_warps=4,
            )


def _run_heads_kernel(
    plan: TritonPlan,
    shape: LayerShape,
    heads: Heads | None,
    qkv: Tensor | None,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    query_out: Tensor | None,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Run `heads_kernel`. Without `heads` there are no queries, and keys are written unchanged."""
    norms = None if heads is None else heads.norms
    cos, sin = (None, None) if rotary is None else rotary
    heads_kernel[(plan.num_tokens, shape.num_kv_heads)](
        qkv,
        key,
        value,
        query_out,
        keys,
        values,
        cos,
        sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        plan.slots,
        plan.tails,
        0 if qkv is None else qkv.stride(0),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        epsilon=0.0 if norms is None else norms.epsilon,
        offset=0.0 if norms is None else norms.offset,
        has_query=qkv is not None,
        has_norms=norms is not None,
        num_kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        k_dim=shape.k_dim,
        v_dim=shape.v_dim,
        rotary_dim=0 if cos is None else cos.shape[-1],
        block_size=plan.block_size,
        padded_group=padded_size(shape.num_heads // shape.num_kv_heads, 1),
        padded_k=padded_size(shape.k_dim),
        padded_v=padded_size(shape.v_dim),
        num_warps=1 if shape.num_heads // shape.num_kv_heads * shape.k_dim <= 512 else 4,
    )


def max_tile_rows(head_bytes: int) -> int:
    """Number of rows of a long chunk's tiles. If a head's key has over 256 bytes, registers do not suffice for
    `MAX_ROWS`."""
    return MAX_ROWS if head_bytes <= 256 else MIN_ROWS


def decode_options(head_bytes: int) -> dict[str, int]:
    """Launch options of the decode kernel, and its number of keys per tile, if a head's key has `head_bytes` bytes."""
    return {"tile": 32 if head_bytes > 256 else 64, "num_warps": 4, "num_stages": 3}


def prefill_options(head_bytes: int, element_size: int, tile_rows: int) -> dict[str, int]:
    """Launch options of the prefill kernel, and its number of keys per tile. Products in float32 do not use matrix
    units, and need more registers."""
    num_warps = 8 if tile_rows >= 128 or element_size > 2 else 4
    return {"tile": 32 if head_bytes > 256 else 64, "num_warps": num_warps, "num_stages": 2 if head_bytes > 256 else 3}


def choose_num_parts(num_programs: int, num_processors: int) -> int:
    """Number of parts into which the decode kernel cuts each row's KV, a power of two.

    Args:
        num_programs: number of programs of the decode kernel if the KV is not cut.
        num_processors: number of the GPU's multiprocessors.
    """
    wanted = max(1, -(-num_processors * PROGRAMS_PER_PROCESSOR // num_programs))
    return min(MAX_PARTS, int(triton.next_power_of_2(wanted)))


@cache
def num_processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 2  # Triton interprets the kernels
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
