"""Why does a request wait? The reasons for a deferral, kept per request and counted per step for the head.

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

    The first six are the rungs of the graded response to memory pressure: the one counted is the rung whose removal
    alone would have admitted the request.
    """

    WATERMARK = "watermark"
    FULL_SEQUENCE = "full_sequence"
    DECODE_RESERVE = "decode_reserve"
    RESERVE = "reserve"
    """A reserve that is a policy of its own keeps these blocks free."""
    BYPASS = "bypass"
    """These blocks are kept for a request before it, which it may only pass into others."""
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
    """The step is for prompts, and the request, which runs, decodes."""
    PARTIAL_PREFILLS = "partial_prefills"
    """The maximum number of prefills is partial, and its own would be another."""
    ENCODER_BUDGET = "encoder_budget"
    """The step's encoder budget does not hold the embeddings that the request needs for its next token."""
    ENCODER_CACHE = "encoder_cache"
    """The embeddings that the request needs for its next token do not fit beside those that others hold."""
    ADAPTER_SLOTS = "adapter_slots"
    """`max_loras` other adapters run, or a request that waited longer has claimed the slot of this one."""
    STEP_TIME = "step_time"
    """A limit holds the step within a time, and the request would make it longer."""
    PAUSED = "paused"
    """The operator has paused the scheduler, or its admissions."""
    IN_FLIGHT = "in_flight"
    """Its own samples from before its preemption are still in flight."""
    KV_CONNECTOR = "kv_connector"
    """The connector does not know yet what it can load."""
    KV_ROOM = "kv_room"
    """Other transfers own the maximum number of blocks; it is next."""
    KV_LOAD = "kv_load"
    """Its KV is being loaded."""
    BEHIND = "behind"
    """It is not the head of the queue."""
    PARKED = "parked"
    """It waits for something other than capacity."""
    STATE = "state"
    """The state behind its cached prefix is computed in this step, and it can read it in the next one."""

    def __init__(self, _: str) -> None:
        self._position = len(self.__class__.__members__)

    @property
    def position(self) -> int:
        """Index into an array of counters."""
        return self._position


class Recovery(NamedTuple):
    """How a preempted request gets back the KV that the pool evicts before it resumes: see `preemption_mode`."""

    swaps: bool
    """Whether it is copied to host memory, and back; otherwise it is computed again."""
    num_cached_tokens: int
    """Tokens that were cached when it was preempted: the most that this is about."""
    recompute_seconds: float | None
    """What computing them again would take; None: not known, or not asked."""
    swap_seconds: float | None
    """What copying them out and back would take."""


class Deferral(NamedTuple):
    """Why a request waits: the answer of a gate that does not admit it in this step."""

    reason: Reason
    missing: int
    """Sequence slots, tokens, blocks, adapter slots, places or embeddings that it lacks, by the reason; 0 where nothing
    is counted."""
    blocks_queue: bool = True
    """Whether no request behind it is admitted in the same step. If not, it is skipped.

    A gate that lets requests be skipped must bound `num_bypassed`: by `max_overtakes`, say."""


class Holder(NamedTuple):
    """A request that holds some of what another one waits for."""

    request_id: str
    amount: int
    """How much of the resource, in its unit; 0 where nothing is counted."""
    what: str = ""
    """Of an adapter slot: the name of the adapter."""
    transfer: int | None = None
    """Of blocks that are held for a transfer, or since it finished: which one. Its request may have finished."""
