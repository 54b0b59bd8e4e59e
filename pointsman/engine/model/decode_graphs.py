"""Decode steps as CUDA graphs: all that a step launches, recorded once for each number of rows and replayed.

A step of one token a row launches some hundred kernels, each of which takes the host longer than a GPU needs for it
where there are few rows. A graph of them is one launch. It reads and writes the same memory each time:

    inputs    one piece of memory, filled by one copy: tokens, positions, places in the pool, block tables, parameters
    forward   input tokens, of which some are taken from where earlier steps left them; the model; logits
    sample    logits; tokens, left for later steps and copied to the host

Two graphs, because a row with penalties, a grammar or log probabilities is sampled otherwise, from the same logits.
Numbers of rows are rounded up to those of `bucket_sizes`. The rows beyond are padding: they attend to nothing, their KV
is not kept, and their tokens go to a place that nothing reads.
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
"""Rows of the largest graph."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that have graphs: 1, 2, 4, 8, then each 8 to 64, each 16 to 512, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, LARGEST + 1, 16)]
    most = min(max_num_seqs, LARGEST)
    return [*(size for size in sizes if size < most), most]


class DeviceTokens:
    """The tokens that steps in flight have sampled, on the device: later steps take them from there.

    Args:
        num_places: see `SampledTokens` (`runner.py`); one more is for the tokens of padding.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_places + 1, dtype=torch.int64, device=device)

    @property
    def unread(self) -> int:
        """The place that nothing reads."""
        return len(self.tokens) - 1

    def has(self, places: Int64Array) -> bool:
        """Whether there are such places."""
        return int(places.max(initial=-1)) < self.unread

    def grow(self, num_places: int) -> None:
        """Have at least so many places. Graphs that read the old memory must be recorded anew."""
        grown = self.tokens.new_zeros(max(num_places, 2 * len(self.tokens)) + 1)
        grown[: self.unread] = self.tokens[:-1]
        self.tokens = grown


class Recorder(Protocol):
    """Makes a call of what was recorded, which does all again that `run` launched, over the same memory."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it, and record it."""


class CudaRecorder:
    """Records CUDA graphs, which take their memory from one pool, as no two run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
        run()  # compiles kernels, and lets libraries choose theirs
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # `torch.cuda.graph` would also empty caches, once a graph
            graph.capture_begin(pool=self._pool)
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay


@dataclass(slots=True)
class DecodeRows:
    """A step of one token a row: n rows, in host memory."""

    batches: Sequence[PagedBatch]
    """By group of layers."""
    token_ids: Int64Array
    """[n] input tokens,"""
    sources: Int64Array
    """[n] and the places of those that steps before this one sample; -1: the token is known."""
    places: Int64Array | None
    """[n] where its own tokens are left; None: nowhere."""


@dataclass(slots=True)
class _Recorded:
    forward: Callable[[], None]
    sample: Callable[[], None]


class DecodeGraphs:
    """The graphs of one engine.

    Args:
        loaded: the model.
        pool: its KV.
        backend: plans are made for it.
        race: samples.
        tokens: of steps in flight.
        max_num_seqs: rows of a step, at most.
        max_model_len: tokens of a sequence, at most.
        recorder: makes the graphs.
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
        """Numbers of rows, in ascending order."""
        self._recorded: dict[int, _Recorded] = {}
        largest, width = self.sizes[-1], -(-max_model_len // pool.block_size)
        size = size_on_device(self._inputs(largest, _padding(width, self._num_groups)))
        self._memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self.logits = torch.zeros(largest, loaded.vocab_size, dtype=loaded.dtype, device=self._device)
        """Of the last step, by row."""
        self.sampled = torch.zeros(largest, dtype=torch.int64, device=self._device)
        """Tokens of the last step that was sampled here, by row,"""
        self.ok = torch.zeros(largest, dtype=torch.uint8, device=self._device)
        """and whether each has a finite maximum."""

    def record_all(self, max_bytes: int, taken: Callable[[], int]) -> None:
        """Record the graphs, the largest first, until they have taken so much memory.

        Args:
            max_bytes: of all.
            taken: bytes that this process has of the device.
        """
        started, before = time.perf_counter(), taken()
        for size in reversed(self.sizes):
            if taken() - before > max_bytes:
                logger.warning("there are no CUDA graphs of %d rows and fewer: the others took their memory", size)
                break
            try:
                self._recorded[size] = self._record(size)
            except Exception as error:  # the model's own code may do what cannot be recorded
                logger.warning("decode steps run without CUDA graphs, which cannot be made: %s", first_line(error))
                self.forget()
                return
        self.sizes = sorted(self._recorded)
        logger.info(
            "%d CUDA graphs of up to %d rows: %.1f s, %.1f MiB",
            len(self.sizes),
            max(self.sizes, default=0),
            time.perf_counter() - started,
            (taken() - before) / 2**20,
        )

    def record_again(self) -> None:
        """Make the graphs anew, after the memory of the tokens has changed."""
        for size in self.sizes:
            self._recorded[size] = self._record(size)

    def forget(self) -> None:
        """Drop all graphs: steps then run without."""
        self._recorded.clear()
        self.sizes = []

    def size_for(self, num_rows: int) -> int | None:
        """The rows of the graph for so many; None: there is none."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if num_rows > 0 and at < len(self.sizes) else None

    def forward(self, rows: DecodeRows, parameters: Mapping[str, npt.NDArray[Any]] | None, size: int) -> Tensor:
        """Compute the step; does not wait for it.

        Args:
            parameters: `DeviceParameters.columns` for `size` rows; None: `sample` will not be called.
            size: see `size_for`.

        Returns:
            [n, vocab_size] logits, until the next call.
        """
        recorded = self._recorded[size]
        to_device(self._inputs(size, rows, parameters), self._device, into=self._memory)
        recorded.forward()
        return self.logits[: len(rows.token_ids)]

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Sample what `forward` computed: tokens and `ok` of each row, until the next call; does not wait."""
        self._recorded[size].sample()
        return self.sampled[:size], self.ok[:size]

    # ------------------------------------------------------------------------------------------------------ recording

    def _inputs(
        self, size: int, rows: DecodeRows, parameters: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """What a graph of `size` rows reads. Only the tables at the end differ in size from step to step."""
        num_rows, batch = len(rows.token_ids), rows.batches[0]
        unread, width = self._tokens.unread, batch.block_tables.shape[1]

        def column(values: npt.NDArray[Any], dtype: npt.DTypeLike, padding: int = 0) -> npt.NDArray[Any]:
            found = np.full(size, padding, dtype=dtype)
            found[:num_rows] = values
            return found

        arrays: dict[str, npt.NDArray[Any]] = {
            "token_ids": column(rows.token_ids, np.int64),
            "sources": column(rows.sources, np.int64, -1),
            "places": column(np.full(num_rows, unread) if rows.places is None else rows.places, np.int64, unread),
            "positions": column(batch.positions, np.int64),
            "tails": column(batch.tails, np.int32),
            "lens": column(batch.kv_lens, np.int32),
            "table_width": np.array([width], dtype=np.int32),
            **(parameters if parameters is not None else DeviceParameters.columns(_no_rows(), size)),
        }
        tables = np.zeros((self._num_groups, size, width), dtype=np.int32)
        for group, of_group in enumerate(rows.batches):
            slots = of_group.slot_blocks * of_group.block_size + of_group.slot_offsets
            arrays[f"slots {group}"] = column(slots, np.int32, -1)
            tables[group, :num_rows] = of_group.block_tables
        return {**arrays, "tables": tables.reshape(-1)}

    def _record(self, size: int) -> _Recorded:
        padding = _padding(1, self._num_groups)
        inputs = to_device(self._inputs(size, padding), self._device, into=self._memory)
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


def _no_rows() -> SamplingBatch:
    """Parameters of no rows."""
    ints, floats = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float64)
    return SamplingBatch(0, ints, floats.astype(np.float32), ints, floats, floats, ints.astype(np.uint64))


def _padding(width: int, num_groups: int) -> DecodeRows:
    """A step without rows, whose tables have this width."""
    nothing = np.zeros(0, dtype=np.int64)
    batch = PagedBatch.build(nothing, nothing, np.zeros((0, width), dtype=np.int64), 1)
    batch.block_tables = np.zeros((0, width), dtype=np.int64)
    return DecodeRows([batch] * num_groups, nothing, nothing, None)
