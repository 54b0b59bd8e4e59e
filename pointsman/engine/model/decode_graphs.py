"""Runs decode steps as CUDA graphs: the kernels of a step are recorded once for each number of rows, and replayed.

A step of one token a row launches some hundred kernels. With few rows, launching a kernel takes the host longer than
running the kernel takes the GPU. A graph of all kernels is one launch. A graph reads and writes the same memory each
time:

    inputs    one piece of memory, filled by one copy: tokens, positions, places in the pool, block tables, parameters
    forward   input tokens, some of them from the places where earlier steps stored them; the model; logits
    sample    logits; tokens, stored for later steps and copied to the host

Each number of rows has these two graphs, because a row with penalties, a grammar or log probabilities is sampled in
another way, from the same logits. The number of rows is rounded up to one of `bucket_sizes`. The additional rows are
padding: they attend to no token, their KV is not stored, and their sampled tokens are stored at a place that no step
reads.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.engine.arrays import Int64Array
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.attention.triton_backend import MIN_ROWS, TritonAttention, TritonPlan
from pointsman.engine.device import size_on_device, to_device
from pointsman.engine.errors import first_line
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.forward import run_paged
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.sampling.batch import SamplingBatch
from pointsman.engine.sampling.race_triton import DeviceParameters, DeviceRace

logger = logging.getLogger(__name__)

LARGEST = 512
"""Number of rows of the largest graph."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that have graphs: 1, 2, 4, 8, then multiples of 8 to 64 and of 16 to 512, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, LARGEST + 1, 16)]
    most = min(max_num_seqs, LARGEST)
    return [*(size for size in sizes if size < most), most]


class DeviceTokens:
    """The tokens that steps in flight have sampled, on the device, where later steps read them.

    Args:
        num_places: number of places, each for one token, see `SampledTokens` (`runner.py`); one more place is added for
            the tokens of padding rows.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_places + 1, dtype=torch.int64, device=device)

    @property
    def padding_place(self) -> int:
        """Index of the place to which padding rows write their tokens; no step reads this place."""
        return len(self.tokens) - 1

    def has_places(self, places: Int64Array) -> bool:
        """Whether all `places` are within the current memory."""
        return int(places.max(initial=-1)) < self.padding_place

    def grow(self, num_places: int) -> None:
        """Grow to at least `num_places` places. Graphs that read the previous memory must be recorded again."""
        grown = self.tokens.new_zeros(max(num_places, 2 * len(self.tokens)) + 1)
        grown[: self.padding_place] = self.tokens[:-1]
        self.tokens = grown


class Recorder(Protocol):
    """Records the kernels that a function launches, so that they can be launched again over the same memory."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, record the kernels that it launches, and return a function that launches them again."""


class CudaRecorder:
    """Records CUDA graphs. The graphs share one memory pool, because no two graphs run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record a CUDA graph of the kernels that `run` launches, and return a function that replays the graph."""
        run()  # compiles kernels, and lets libraries choose their kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # `torch.cuda.graph` would also empty PyTorch's caches
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay


@dataclass(slots=True)
class DecodeRows:
    """The inputs of a step with one token per row, in host memory. n is the number of rows."""

    batches: Sequence[PagedBatch]
    """The step's batch for each group of layers."""
    token_ids: Int64Array
    """[n] input token of each row."""
    sources: Int64Array
    """[n] places from which input tokens that earlier steps sample are read; -1: the token is in `token_ids`."""
    places: Int64Array | None
    """[n] places to which the sampled tokens are stored; None: the tokens are not stored."""


@dataclass(slots=True)
class _Recorded:
    forward: Callable[[], None]
    sample: Callable[[], None]


class DecodeGraphs:
    """The graphs of one engine.

    Args:
        loaded: the model.
        pool: the model's KV pool.
        backend: the attention backend.
        race: the kernels that sample tokens.
        tokens: the sampled tokens of steps in flight.
        max_num_seqs: maximum number of rows of a step.
        max_model_len: maximum number of tokens of a sequence.
        recorder: recorder of the graphs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        backend: TritonAttention,
        race: DeviceRace,
        tokens: DeviceTokens,
        *,
        max_num_seqs: int,
        max_model_len: int,
        recorder: Recorder,
    ) -> None:
        self._loaded = loaded
        self._pool = pool
        self._backend = backend
        self._race = race
        self._tokens = tokens
        self._recorder = recorder
        self._device = pool.device
        self._num_groups = 1 + max(pool.group_of)
        self.sizes = bucket_sizes(max_num_seqs)
        """Numbers of rows of the graphs, in ascending order."""
        self._recorded: dict[int, _Recorded] = {}
        largest, width = self.sizes[-1], -(-max_model_len // pool.block_size)
        size = size_on_device(self._inputs(largest, _padding(width, self._num_groups)))
        self._memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self.logits = torch.zeros(largest, loaded.vocab_size, dtype=loaded.dtype, device=self._device)
        """Logits of the last step that `forward` computed, by row."""
        self.sampled = torch.zeros(largest, dtype=torch.int64, device=self._device)
        """Tokens of the last step that `sample` sampled, by row."""
        self.ok = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        """1 for each row of `sampled` whose logits had a finite maximum, otherwise 0."""

    def record_all(self, max_bytes: int, allocated_bytes: Callable[[], int]) -> None:
        """Record the graphs, the largest first, until their memory exceeds `max_bytes`.

        Args:
            max_bytes: maximum memory of all graphs together, checked before each graph.
            allocated_bytes: function that returns the bytes that this process has allocated on the device.
        """
        started, before = time.perf_counter(), allocated_bytes()
        for size in reversed(self.sizes):
            if allocated_bytes() - before > max_bytes:
                logger.warning(
                    "no CUDA graphs of %d rows or fewer are recorded: larger graphs have used all memory for graphs",
                    size,
                )
                break
            try:
                self._recorded[size] = self._record(size)
            except Exception as error:  # the model's code may contain operations that cannot be recorded
                logger.warning("decode steps run without CUDA graphs; recording them failed: %s", first_line(error))
                self.delete_graphs()
                return
        self.sizes = sorted(self._recorded)
        logger.info(
            "recorded %d CUDA graphs of up to %d rows in %.1f s; they take %.1f MiB",
            len(self.sizes),
            max(self.sizes, default=0),
            time.perf_counter() - started,
            (allocated_bytes() - before) / 2**20,
        )

    def record_again(self) -> None:
        """Record all graphs again, after `DeviceTokens.grow` has moved the tokens to other memory."""
        for size in self.sizes:
            self._recorded[size] = self._record(size)

    def delete_graphs(self) -> None:
        """Delete all graphs; later steps run without graphs."""
        self._recorded.clear()
        self.sizes = []

    def size_for(self, num_rows: int) -> int | None:
        """Number of rows of the smallest graph that can compute `num_rows` rows; None: no graph is large enough."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if num_rows > 0 and at < len(self.sizes) else None

    def forward(self, rows: DecodeRows, parameters: Mapping[str, npt.NDArray[Any]] | None, size: int) -> Tensor:
        """Launch the forward pass of the step, without waiting for it.

        Args:
            parameters: sampling parameters of `size` rows, from `DeviceParameters.columns`; None: `sample` will not be
                called.
            size: number of rows of the graph, from `size_for`.

        Returns:
            [n, vocab_size] logits; the next call overwrites this tensor.
        """
        recorded = self._recorded[size]
        to_device(self._inputs(size, rows, parameters), self._device, buffer=self._memory)
        recorded.forward()
        return self.logits[: len(rows.token_ids)]

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Launch sampling from the logits of `forward`, without waiting for it.

        Returns:
            Two tensors with one element per row: the sampled token, and whether the token is valid. The next call
            overwrites both tensors.
        """
        self._recorded[size].sample()
        return self.sampled[:size], self.ok[:size]

    # ------------------------------------------------------------------------------------------------------ recording

    def _inputs(
        self, size: int, rows: DecodeRows, parameters: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """The input arrays of a graph of `size` rows, by name. Only the block tables, the last array, vary in size
        between steps."""
        num_rows, batch = len(rows.token_ids), rows.batches[0]
        padding_place, width = self._tokens.padding_place, batch.block_tables.shape[1]

        def column(values: npt.NDArray[Any], dtype: npt.DTypeLike, padding: int = 0) -> npt.NDArray[Any]:
            found = np.full(size, padding, dtype=dtype)
            found[:num_rows] = values
            return found

        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": column(rows.token_ids, np.int64),
            "sources": column(rows.sources, np.int64, -1),
            "places": column(
                np.full(num_rows, padding_place) if rows.places is None else rows.places, np.int64, padding_place
            ),
            "positions": column(batch.positions, np.int64),
            "tails": column(batch.tails, np.int32),
            "lens": column(batch.kv_lens, np.int32),
            "table_width": np.array([width], dtype=np.int32),
            **(parameters if parameters is not None else DeviceParameters.columns(_empty_batch(), size)),
        }
        tables = np.zeros((self._num_groups, size, width), dtype=np.int32)
        for group, of_group in enumerate(rows.batches):
            slots = of_group.slot_blocks * of_group.block_size + of_group.slot_offsets
            arrays[f"slots {group}"] = column(slots, np.int32, -1)
            tables[group, :num_rows] = of_group.block_tables
        return {**arrays, "tables": tables.reshape(-1)}

    def _record(self, size: int) -> _Recorded:
        padding = _padding(1, self._num_groups)
        inputs = to_device(self._inputs(size, padding), self._device, buffer=self._memory)
        tables_at = inputs["tables"].data_ptr() - self._memory.data_ptr()
        tables = self._memory[tables_at:].view(torch.int32)
        numbers = torch.arange(size, dtype=torch.int32, device=self._device)
        plans = [
            TritonPlan(
                block_size=self._pool.block_size,
                slots=inputs[f"slots {group}"],
                tails=inputs["tails"],
                tables=tables,
                table_width=inputs["table_width"],
                first_table=group * size,
                decode_rows=numbers,
                decode_tokens=numbers,
                decode_lens=inputs["lens"],
                tiles={},
                tile_rows=MIN_ROWS,
                num_tokens=size,
            )
            for group in range(self._num_groups)
        ]
        parameters = DeviceParameters(*(inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "keys")))
        tokens = self._tokens.tokens

        def forward() -> None:
            sources = inputs["sources"]
            token_ids = torch.where(sources < 0, inputs["token_ids"], tokens[sources.clamp(min=0)])
            logits = run_paged(self._loaded, self._pool, self._backend, plans, token_ids, inputs["positions"], None)
            self.logits[:size].copy_(logits)

        def sample() -> None:
            self._race.choose(self.logits[:size], parameters, self.sampled[:size], self.ok[:size])
            tokens.index_copy_(0, inputs["places"], self.sampled[:size])

        with torch.inference_mode():
            return _Recorded(self._recorder.record(forward), self._recorder.record(sample))


def _empty_batch() -> SamplingBatch:
    """The sampling parameters of a step without rows."""
    ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float64)
    return SamplingBatch(0, ints, floats.astype(np.float32), ints, floats, floats, ints.astype(np.uint64))


def _padding(width: int, num_groups: int) -> DecodeRows:
    """A step without rows, whose block tables have `width` columns, for a graph in which all rows are padding."""
    nothing = np.zeros(0, dtype=np.int64)
    batch = PagedBatch.build(nothing, nothing, np.zeros((0, width), dtype=np.int64), 1)
    batch.block_tables = np.zeros((0, width), dtype=np.int64)
    return DecodeRows([batch] * num_groups, nothing, nothing, None)
