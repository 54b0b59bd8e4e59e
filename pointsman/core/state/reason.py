"""Reasons why a request waits, kept per request, and counted per step for the head of the queue.

A waiting request gets its reason where it is checked: in `step/admission.py`, which calls the gates (`core/policy`) and
the KV cache; in `step/loading.py` and `kv/transfers.py` while its KV is loaded; in `step/request_table.py` while it is
parked. `observe/explain.py` puts the reason in words. It reports which requests only wait behind another request, or
for the operator.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(enum.Enum):
    """Why a request was not admitted in a step; or why a step has no row for a running request (`why_left_out` in
    `observe/explain.py`).

    The first six reasons are the levels of the graded response to memory pressure: the recorded reason is the level
    whose removal alone would have admitted the request.
    """

    WATERMARK = "watermark"
    FULL_SEQUENCE = "full_sequence"
    DECODE_RESERVE = "decode_reserve"
    RESERVE = "reserve"
    """A custom reserve policy keeps the blocks free that the request needs."""
    BYPASS = "bypass"
    """The blocks are kept for an earlier request, which this request may bypass only with other blocks."""
    BLOCKS = "blocks"
    SEQUENCE_LIMIT = "sequence_limit"
    BUDGET = "budget"
    PREEMPTION = "preemption"
    """Running requests lacked blocks, and the step preempted one of them, so no request is admitted."""
    DISPLACEMENT = "displacement"
    """A more urgent request takes the blocks that a priority preemption freed for it in this step."""
    STATIC_BATCH = "static_batch"
    """A static batch is running, and admits no further request."""
    PREFILL_FIRST = "prefill_first"
    """The step is for prompts, and this running request decodes."""
    PARTIAL_PREFILLS = "partial_prefills"
    """As many partial prefills as allowed are already running, and this request would add one."""
    ENCODER_BUDGET = "encoder_budget"
    """The embeddings that the request needs for its next token exceed the step's encoder budget."""
    ENCODER_CACHE = "encoder_cache"
    """The embeddings that the request needs for its next token do not fit in the encoder cache beside those of other
    requests."""
    ADAPTER_SLOTS = "adapter_slots"
    """`max_loras` other adapters run, or a request that waited longer has claimed the adapter slot."""
    STEP_TIME = "step_time"
    """A limit bounds the time of the step, and the request would exceed it."""
    PAUSED = "paused"
    """The operator has paused the scheduler, or its admissions."""
    IN_FLIGHT = "in_flight"
    """Samples of the request from before its preemption are still in flight."""
    KV_CONNECTOR = "kv_connector"
    """The connector has not yet reported how many tokens it can load."""
    KV_ROOM = "kv_room"
    """Other transfers hold the maximum number of blocks; the request's load is next."""
    KV_LOAD = "kv_load"
    """The request's KV is being loaded."""
    BEHIND = "behind"
    """The request is not the head of the queue."""
    PARKED = "parked"
    """The request waits for something other than capacity."""
    STATE = "state"
    """The layer state at the end of the request's cached prefix is computed in this step, and readable in the next
    step."""
    PREFILL_INTERVAL = "prefill_interval"
    """`prefill_interval` holds prompts back in this step, in which other requests decode."""

    def __init__(self, _: str) -> None:
        self._position = len(self.__class__.__members__)

    @property
    def position(self) -> int:
        """Index of the reason in an array of counters, one for each reason."""
        return self._position


class Recovery(NamedTuple):
    """How a preempted request gets back the KV that the pool evicts before the request resumes: the KV is recomputed,
    or copied back from host memory (`preemption_mode`)."""

    swaps: bool
    """Whether the KV is copied to host memory and back; otherwise it is recomputed."""
    num_cached_tokens: int
    """Number of the request's tokens that were cached when it was preempted. At most this many tokens are evicted
    before it resumes, and must then be recomputed or copied back."""
    recompute_seconds: float | None
    """Estimated time to recompute these tokens, in seconds; None: not known, or not estimated."""
    swap_seconds: float | None
    """Estimated time to copy the KV of these tokens out and back, in seconds; None: not known, or not estimated."""


class Deferral(NamedTuple):
    """Why a request waits: the result of a gate that does not admit it in this step."""

    reason: Reason
    missing: int
    """Number of sequence slots, tokens, blocks, adapter slots, partial prefills or embeddings that the request lacks,
    depending on the reason; 0 if the reason is no shortage."""
    blocks_queue: bool = True
    """Whether no request behind this one is admitted in the same step. If False, this request is skipped.

    A gate that lets requests be skipped must bound `num_bypassed`, for example by `max_overtakes`."""


class Holder(NamedTuple):
    """A request that holds some of the resource for which another request waits."""

    request_id: str
    amount: int
    """Amount of the resource that the request holds, in the unit of the resource; 0 if the resource is not counted."""
    what: str = ""
    """Name of the adapter, if the resource is an adapter slot."""
    transfer: int | None = None
    """Id of the transfer, if the blocks are held during or after a transfer. The request of the transfer may have
    finished."""
