"""Connects transformers' attention interface to paged attention over the KV pool.

One function, `paged_attention_forward`, is registered with transformers under the name `ATTENTION_NAME`. A model loaded
with that name calls it once per layer, with the layer's module as first argument. This is the only connection between a
model and the paged KV pool, so no model needs code of its own.

A step's tokens are one flat row, `input_ids [1, T]`: the scheduled tokens of all requests, request after request. A
`PagedBatch` maps tokens to requests. It is built once per step and shared by all layers, or, if groups of layers have
their own block tables, by all layers of a group. In each layer the keys and values of ALL rows are written to the pool
before any row attends, so requests of one step may share blocks.

    model(input_ids [1, T]) -> layer i -> paged_attention_forward(module, q, k, v)
                                             -> handler of that module: PagedLayer
                                                  -> backend.write(plan, k, v) into pool.keys[i], pool.values[i]
                                                  -> backend.attend(plan, q, ...)

A backend is an object with `plan` (once per step and group, on the host), `write` and `attend` (once per layer each).
The plain backend is in `torch_backend.py`, the fast ones for CPUs and GPUs in `numba_backend.py` and
`triton_backend.py`. A backend for another device implements the same three methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from transformers import AttentionInterface

from pointsman.engine.arrays import Int64Array
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.pulse import beat

ATTENTION_NAME = "pointsman_paged"
_HANDLER = "pointsman_attention"  # key of the handler in a module's __dict__


@dataclass(slots=True)
class Meanwhile:
    """Work that the step's thread does while other threads or a device compute. The batches of all groups of layers
    share one `Meanwhile`."""

    do_part: Callable[[], bool] | None = None
    """Function that does one part of the work, and returns whether there is another part; None: there is no work."""


@dataclass(slots=True)
class PagedBatch:
    """Maps the T tokens of one step to the step's n rows (requests) and to slots of the pool.

    A backend makes its plan from these arrays, on the host.
    """

    block_size: int
    positions: Int64Array
    """[T] position of each token within its sequence."""
    query_starts: Int64Array
    """[n + 1] index of each row's first token in the flat batch, then T: the tokens of row i have the indices
    [query_starts[i], query_starts[i + 1])."""
    query_lens: Int64Array
    """[n] number of tokens of each row in this step."""
    kv_lens: Int64Array
    """[n] number of tokens of each row whose KV is in the pool after this step, the tokens of this step included."""
    block_tables: Int64Array
    """[n, width] block table of each row; entries past ceil(kv_lens / block_size) are undefined."""
    slot_blocks: Int64Array
    """[T] block to which each token's KV is written."""
    slot_offsets: Int64Array
    """[T] index of each token's slot within its block."""
    tails: Int64Array
    """[T] number of slots after each token's slot that are set to zero. For a row's last token: the rest of its block,
    if the row begins the block in this step. Otherwise 0."""
    meanwhile: Meanwhile = field(default_factory=Meanwhile)
    """Work that the step's thread does while other threads or a device compute the step."""
    of_lengths: dict[Any, Any] = field(default_factory=dict)
    """Cache for a backend: values that depend only on the rows' numbers of tokens, under keys that the backend
    chooses."""

    @classmethod
    def build(
        cls,
        query_lens: npt.NDArray[np.integer],
        num_computed_tokens: npt.NDArray[np.integer],
        block_tables: npt.NDArray[np.integer],
        block_size: int,
    ) -> PagedBatch:
        """Build a batch from each row's number of tokens in this step [n], number of tokens computed before this step
        [n], and block table [n, width]."""
        counts: Int64Array = query_lens.astype(np.int64)
        computed: Int64Array = num_computed_tokens.astype(np.int64)
        query_starts = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_starts[1:])
        kv_lens = computed + counts
        width = -(-int(kv_lens.max(initial=0)) // block_size)
        tables = block_tables[:, :width].astype(np.int64)

        if len(counts) == query_starts[-1]:  # decodes only: one token a row
            positions = computed
            blocks, slot_offsets = np.divmod(positions, block_size)
            slot_blocks = tables[query_starts[:-1], blocks]
            tails = (slot_offsets == 0) * np.int64(block_size - 1)
        else:
            row_of_token = np.repeat(np.arange(len(counts)), counts)
            positions = np.arange(query_starts[-1]) + (computed - query_starts[:-1])[row_of_token]
            blocks, slot_offsets = np.divmod(positions, block_size)
            slot_blocks = tables[row_of_token, blocks]
            last_block_start = (kv_lens - 1) // block_size * block_size
            tails = np.zeros_like(positions)
            tails[query_starts[1:] - 1] = np.where(last_block_start >= computed, -kv_lens % block_size, 0)
        return cls(
            block_size=block_size,
            positions=positions,
            query_starts=query_starts,
            query_lens=counts,
            kv_lens=kv_lens,
            block_tables=tables,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            tails=tails,
        )

    def batches_of_groups(self, block_tables: npt.NDArray[np.integer]) -> list[PagedBatch]:
        """One batch for each group of layers: the tokens of this batch, with the group's tables in `block_tables` [n,
        groups, width or more].

        Table entries before a window, for blocks that no token of the batch attends to, are undefined.
        """
        width = self.block_tables.shape[1]
        rows, places = np.arange(len(self.query_lens)).repeat(self.query_lens), self.positions // self.block_size
        batches = []
        for group in range(block_tables.shape[1]):
            table = block_tables[:, group, :width].astype(np.int64)
            batches.append(replace(self, block_tables=table, slot_blocks=table[rows, places]))
        return batches

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the batch, T."""
        return len(self.positions)

    def do_meanwhile(self, is_computing: Callable[[], bool]) -> None:
        """Do the work of `meanwhile`, part by part, while `is_computing` returns true."""
        meanwhile = self.meanwhile
        while meanwhile.do_part is not None and is_computing():
            if not meanwhile.do_part():
                meanwhile.do_part = None


class AttentionBackend(Protocol):
    """Computes attention of a `PagedBatch` over the pool.

    In layers with a window a backend must not read KV of tokens before the window: if layers are in groups, the blocks
    of these tokens may belong to other requests and other layers.
    """

    name: str
    leaves_out_rows: bool
    """Whether queries, keys and values may have more rows than the batch has tokens. The backend skips the additional
    rows and returns zeros for them."""

    def plan(self, batch: PagedBatch) -> Any:
        """Make the plan that all layers of a group share. Called once per step and group of layers."""

    def write(self, plan: Any, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write `key` [T, kv_heads, k_dim] and `value` [T, kv_heads, v_dim] to the slots of the batch.

        If the step begins the block of a row's last token, the slots after this token in the block are set to zero.
        Attention masks these slots by a weight of 0, but 0 * NaN is NaN: without zeros, values of an earlier request
        could affect this request.
        """

    def attend(
        self,
        plan: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[T, num_heads, k_dim] queries -> [T, num_heads, v_dim] outputs.

        A token at position p attends to positions j <= p, and with a `window` only to j > p - window. `softcap` bounds
        scores to softcap * tanh(score / softcap). `sinks` [num_heads] has one additional score per head, which has no
        value.

        While other threads or a device compute, the backend should call the batch's `do_meanwhile`. If it does not,
        scheduling waits for the end of the step.
        """


class AttentionContext:
    """Holds the plans, the pool and the backend of the current step, for all layers of a model; set before each forward
    pass.

    Engines may share a loaded model, also from several threads. A step holds the context's lock from `begin` to `end`.

    An exception from a signal handler can interrupt a step at any point, also between `begin` and the caller's `try`,
    or within `end`. So the lock is reentrant, and `end` releases it as often as it was acquired. The next `end` of the
    same thread ends an interrupted step.
    """

    __slots__ = ("_busy", "backend", "keep", "plans", "pool")

    def __init__(self) -> None:
        self._busy = RLock()
        self.backend: AttentionBackend | None = None
        self.keep: Tensor | None = None
        """[r] int64: indices of the tokens whose outputs the model's last layer computes, if it can skip tokens; None:
        all."""
        self.plans: Sequence[Any] = ()
        """The step's plan for each group of layers; empty: no step is running."""
        self.pool: KVPool | None = None

    def begin(self, plans: Sequence[Any], pool: KVPool, backend: AttentionBackend, keep: Tensor | None = None) -> None:
        """Set the plans, pool and backend for the next forward pass. Waits until no other thread runs a step.

        Args:
            plans: the backend's plan of the step's tokens for each group of layers.
            keep: [r] indices of the tokens whose logits are needed; None: all tokens.
        """
        self._busy.acquire()
        self.plans, self.pool, self.backend, self.keep = plans, pool, backend, keep

    def end(self) -> None:
        """End this thread's step, so that a forward pass without `begin` fails instead of writing to stale slots.

        `end` may be called repeatedly, and does nothing while another thread runs a step.
        """
        if not self._busy.acquire(blocking=False):
            return
        self.plans, self.keep = (), None
        while True:
            try:
                self._busy.release()
            except RuntimeError:  # the lock was released as often as it was acquired
                return


class PagedLayer:
    """The handler of one attention module: writes the step's KV to the pool, then computes attention."""

    __slots__ = ("context", "index", "shape")

    def __init__(self, context: AttentionContext, index: int, shape: LayerShape) -> None:
        self.context = context
        self.index = index
        self.shape = shape

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Queries, keys and values, [1, heads, T, dim] each -> outputs [1, T, num_heads, v_dim]."""
        backend, plan, keys, values = self.step()
        backend.write(plan, key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values)
        query = query[0].transpose(0, 1)
        return backend.attend(plan, query, keys, values, **attention_options(query.shape[-1], options))[None]

    def step(self) -> tuple[AttentionBackend, Any, Tensor, Tensor]:
        """The backend, its plan of the current step, and the keys and values of this layer in the pool.

        Raises:
            RuntimeError: no step is running.
        """
        beat()
        context, index = self.context, self.index
        if not context.plans or context.pool is None or context.backend is None:
            raise RuntimeError(
                "an engine's model was called outside a step of the engine; load another copy of the model"
            )
        pool = context.pool
        return context.backend, context.plans[pool.group_of[index]], pool.keys[index], pool.values[index]


def attention_options(k_dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for `AttentionBackend.attend`, from the keywords with which transformers calls an attention function."""
    scale = options.get("scaling")
    return {
        "scale": k_dim**-0.5 if scale is None else scale,
        "window": options.get("sliding_window"),
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
    }


def paged_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer.

    Args:
        module: the attention module, whose handler computes the result.
        query, key, value: tensors [1, heads, T, dim].
        attention_mask: always None, because no mask function is registered for this implementation.
        options: keyword `scaling`, and, if the model has them, `sliding_window`, `softcap`, `s_aux` (sinks).
    """
    handler = get_handler(module)
    if handler is None:
        raise RuntimeError(
            f"the attention module {type(module).__name__} was not called in the model's trial run, so it has no KV in "
            "the pool; use another model"
        )
    if attention_mask is not None:
        options["attention_mask"] = attention_mask
    return handler(module, query, key, value, options), None


def get_handler(module: nn.Module) -> Any:
    """The handler of the module's attention calls; None: the module has no handler."""
    return module.__dict__.get(_HANDLER)


def set_handler(module: nn.Module, handler: Any) -> None:
    """Let `handler(module, query, key, value, options)` compute the module's attention calls; None: remove it."""
    module.__dict__[_HANDLER] = handler  # not through nn.Module.__setattr__, as a handler is no submodule


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
