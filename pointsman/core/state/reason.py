"""Reasons why a request waits, kept per request, and counted per step for the head of the queue.

A waiting request gets its reason where it is checked: in `step/admission.py`, which asks the gates (`core/policy`) and
the KV cache; while KV is loaded in `step/loading.py` and `kv/transfers.py`; parked in `step/request_table.py`.
`observe/explain.py` puts it in words, and says which requests only wait behind another one, or for the operator.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(enum.Enum):
    """Why a request was not admitted in a step; or why a running one was left out (`why_left_out` in
    `observe/explain.py`).

    The first six are the levels of the graded response to memory pressure: the level is counted whose removal alone
    would have admitted the request.
    """

    WATERMARK = "watermark"
    FULL_SEQUENCE = "full_sequence"
    DECODE_RESERVE = "decode_reserve"
    RESERVE = "reserve"
    """A custom reserve policy keeps these blocks free."""
    BYPASS = "bypass"
    """These blocks are kept for an earlier request, which it may bypass only with other blocks."""
    BLOCKS = "blocks"
    SEQUENCE_LIMIT = "sequence_limit"
    BUDGET = "budget"
    PREEMPTION = "preemption"
    """The running part of the step preempted for memory, so no request is admitted."""
    DISPLACEMENT = "displacement"
    """A more urgent request takes the blocks that were freed for it in this step."""
    STATIC_BATCH = "static_batch"
    """The static batch still runs."""
    PREFILL_FIRST = "prefill_first"
    """The step is for prompts, and this running request decodes."""
    PARTIAL_PREFILLS = "partial_prefills"
    """The maximum number of partial prefills runs, and its prefill would be another one."""
    ENCODER_BUDGET = "encoder_budget"
    """The embeddings that the request needs for its next token exceed the step's encoder budget."""
    ENCODER_CACHE = "encoder_cache"
    """The embeddings that the request needs for its next token do not fit beside those of other requests."""
    ADAPTER_SLOTS = "adapter_slots"
    """`max_loras` other adapters run, or a request that waited longer has claimed the slot of this one."""
    STEP_TIME = "step_time"
    """A limit bounds the time of the step, and the request would exceed it."""
    PAUSED = "paused"
    """The operator has paused the scheduler, or its admissions."""
    IN_FLIGHT = "in_flight"
    """Its own samples from before its preemption are still in flight."""
    KV_CONNECTOR = "kv_connector"
    """The connector does not know yet what it can load."""
    KV_ROOM = "kv_room"
    """Other transfers hold the maximum number of blocks; it is next."""
    KV_LOAD = "kv_load"
    """Its KV is being loaded."""
    BEHIND = "behind"
    """It is not the head of the queue."""
    PARKED = "parked"
    """It waits for something other than capacity."""
    STATE = "state"
    """The layer state at the end of its cached prefix is computed in this step, and readable in the next one."""

    def __init__(self, _: str) -> None:
        self._position = len(self.__class__.__members__)

    @property
    def position(self) -> int:
        """Index into an array of counters."""
        return self._position


class Recovery(NamedTuple):
    """How a preempted request gets back the KV that the pool evicts before it resumes: see `preemption_mode`."""

    swaps: bool
    """Whether it is copied to host memory, and back; otherwise it is recomputed."""
    num_cached_tokens: int
    """Tokens that were cached when it was preempted: the maximum to get back."""
    recompute_seconds: float | None
    """Estimated time to recompute them; None: not known, or not estimated."""
    swap_seconds: float | None
    """Estimated time to copy them out and back; None: as above."""


class Deferral(NamedTuple):
    """Why a request waits: the result of a gate that does not admit it in this step."""

    reason: Reason
    missing: int
    """Sequence slots, tokens, blocks, adapter slots, places or embeddings that it lacks, by the reason; 0 where nothing
    is counted."""
    blocks_queue: bool = True
    """Whether no request behind it is admitted in the same step. If not, it is skipped.

    A gate that lets requests be skipped must bound `num_bypassed`, for example by `max_overtakes`."""


class Holder(NamedTuple):
    """A request that holds some of the resource for which another one waits."""

    request_id: str
    amount: int
    """How much of the resource, in its unit; 0 where nothing is counted."""
    what: str = ""
    """For an adapter slot: the name of the adapter."""
    transfer: int | None = None
    """For blocks held during or after a transfer: its id. Its request may have finished."""
