"""Checks the caps on partial prefills from the ledger: which prompts are partial, and which requests must wait for
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.core import Reason, SchedulerConfig

from .ledger import Entry, Place
from .policies import parameter
from .shadow import require

if TYPE_CHECKING:
    from .world import World

LACKS_EMBEDDINGS = (Reason.ENCODER_BUDGET, Reason.ENCODER_CACHE)
PASSING = {
    Reason.ADAPTER_SLOTS,
    Reason.PARTIAL_PREFILLS,
    Reason.KV_CONNECTOR,
    Reason.KV_ROOM,
    *LACKS_EMBEDDINGS,
}
"""Reasons for which a request is skipped."""
LACKS_BLOCKS = {
    Reason.BLOCKS,
    Reason.FULL_SEQUENCE,
    Reason.WATERMARK,
    Reason.DECODE_RESERVE,
    Reason.RESERVE,
    Reason.BYPASS,
}


def bypass_bound(config: SchedulerConfig) -> int:
    """Maximum number of requests that may bypass a request that waits for blocks; 0: none."""
    return int(next(iter(parameter(config, "reserve", "bypass", "bound")), 0))


def passing(config: SchedulerConfig) -> set[Reason]:
    """Reasons for which a request is skipped under this configuration."""
    return PASSING | LACKS_BLOCKS if bypass_bound(config) else PASSING


def partial(entries: list[Entry]) -> list[Entry]:
    """Running requests that have not computed all tokens that were known at their admission."""
    running = [entry for entry in entries if entry.place is Place.RUNNING]
    return [entry for entry in running if entry.num_computed < entry.request.num_admitted_tokens]


def check_caps(world: World) -> None:
    """Check that no more prompts than the caps allow are partial."""
    config, begun = world.config, partial(world.live)
    most, max_long = config.max_num_partial_prefills, config.max_long_partial_prefills
    require(most is None or len(begun) <= most, f"{begun} are half done, of at most {most}")
    long = _long(config, begun)
    require(max_long is None or len(long) <= max_long, f"{long} are half done and long, of at most {max_long}")


def must_wait(world: World, entry: Entry) -> bool:
    """Whether the caps on partial prefills leave no place for a further request like this one."""
    config, begun = world.config, partial(world.live)
    most, max_long = config.max_num_partial_prefills, config.max_long_partial_prefills
    is_full = most is not None and len(begun) >= most
    is_long = bool(_long(config, [entry]))
    return is_full or (is_long and max_long is not None and len(_long(config, begun)) >= max_long)


def may_lack_place(config: SchedulerConfig) -> bool:
    """Whether a request may lack a place; no request is preempted for that."""
    return config.max_num_partial_prefills is not None or config.max_long_partial_prefills is not None


def blocks_queue(world: World, entry: Entry) -> bool:
    """Whether a request has reached the bound of bypasses, so that it blocks the queue while it lacks a place,
    embeddings or blocks."""
    deferral = entry.request._state.deferral
    if deferral is not None and deferral.reason in LACKS_BLOCKS:
        return entry.num_bypassed >= bypass_bound(world.config)
    if deferral is not None and deferral.reason in LACKS_EMBEDDINGS and world.config.encoder_blocks_queue:
        return True
    waits = deferral is not None and deferral.reason in (Reason.PARTIAL_PREFILLS, *LACKS_EMBEDDINGS)
    return waits and entry.num_bypassed >= world.config.max_overtakes


def lacks_blocks(entry: Entry) -> bool:
    """Whether the stated reason of a waiting request is missing blocks."""
    deferral = entry.request._state.deferral
    return deferral is not None and deferral.reason in LACKS_BLOCKS


def says_so(entry: Entry) -> bool:
    """Whether the stated reason of a waiting request is a missing place; the reason is verified after the ledger has
    recorded the step."""
    deferral = entry.request._state.deferral
    return deferral is not None and deferral.reason is Reason.PARTIAL_PREFILLS


def _long(config: SchedulerConfig, entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.num_tokens > config.prefill_threshold]
