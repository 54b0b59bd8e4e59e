"""The random operations with random arguments, and a seeded driver. `OPERATIONS` lists them all: the state machine
makes a rule of each, the driver picks by weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

from pointsman.core import FinishReason, ParkReason, PauseMode, Request

from . import transfer_operations as transfers
from .ledger import Entry
from .policies import draw_policies, needed_by
from .workload import (
    MAX_LIVE,
    Chooser,
    SeededChooser,
    make_config,
    make_connector_seed,
    make_images,
    make_request_spec,
    place_images,
)
from .world import World

EXECUTED: Counter[str] = Counter()
"""Number of rules executed in this process, by name; reports give the sum."""


class Operation(NamedTuple):
    """One operation; `weight` is its relative frequency."""

    name: str
    weight: int
    run: Callable[[World, Chooser], object]


def _pick(world: World, choose: Chooser) -> Entry | None:
    return world.live[choose.integer(0, len(world.live) - 1)] if world.live else None


def _on_request(act: Callable[[World, Entry, Chooser], object]) -> Callable[[World, Chooser], object]:
    """Apply an operation to a random live request, if there is one."""

    def run(world: World, choose: Chooser) -> object:
        entry = _pick(world, choose)
        return act(world, entry, choose) if entry is not None else None

    return run


def _add(world: World, choose: Chooser) -> None:
    spec = make_request_spec(choose, world.config)
    if len(world.live) < MAX_LIVE:
        world.add(spec)


def _step(world: World, choose: Chooser) -> None:
    """Schedule, after an update if too many steps are in flight, and with drafts if possible."""
    if len(world.host.in_flight) >= world.config.max_steps_in_flight:
        _update(world, choose)
    if world.config.num_draft_tokens and choose.chance(70):
        while world.host.in_flight:  # a row with samples in flight gets no drafts
            _update(world, choose)
        _propose(world, choose)
    world.schedule()


def _update(world: World, choose: Chooser) -> None:
    rows = [choose.integer(0, 9) for _ in range(choose.integer(1, 3))] if choose.chance(10) else []
    errors, unsampled = [row for row in rows if row < 5], [row - 5 for row in rows if row >= 5]
    world.update(errors, unsampled, explicit_counts=choose.chance(30))


def _propose(world: World, choose: Chooser) -> None:
    """Propose drafts for some rows of the last update: correct ones up to a point, and wrong ones after it."""
    output, most = world.last_update, world.config.num_draft_tokens
    if output is None or not most:
        return
    drafts: dict[Request, list[int]] = {}
    for request in output.requests:
        if choose.chance(15) or request not in world.host.sequences:
            continue
        length = choose.integer(0, most)
        right = world.host.continuation(request, choose.integer(0, length))
        drafts[request] = right + [choose.integer(0, 5) for _ in range(length - len(right))]
    world.propose(drafts, stale=choose.chance(20))


def _finish(world: World, entry: Entry, choose: Chooser) -> None:
    reason = choose.choice((FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR, FinishReason.DEADLINE))
    world.finish(entry, reason, choose.integer(0, entry.num_output + 1) if choose.chance(60) else None)


def _extend(world: World, choose: Chooser) -> None:
    """Add a part, usually to a request that expects one."""
    expecting = [entry for entry in world.live if entry.more_input]
    entry = choose.choice(expecting) if expecting and not choose.chance(5) else _pick(world, choose)
    if entry is not None:
        more = choose.chance(60)
        tokens = [choose.integer(0, 3) for _ in range(choose.integer(0, 5))]
        inputs = place_images(make_images(choose, world.config), tokens)
        world.extend(entry, tokens, inputs, more=more, max_tokens=choose.choice((0, 0, 1, 3, 6)))


def _start_recording(world: World, choose: Chooser) -> None:
    """Start a recording without requests, if few must be aborted for that; otherwise it is refused."""
    if len(world.live) <= 2 and choose.chance(80):
        mode = world.pause
        world.drain()
        world.set_pause(mode if choose.chance(50) else None)
    world.start_recording()


def _duplicate(world: World, choose: Chooser) -> None:
    requests = [entry.request for entry in world.live] + [r for r in world.unreported if r not in world.repeated]
    in_use = [request.request_id for request in requests]
    if in_use:
        world.add_duplicate(choose.choice(in_use))


def _gone(world: World, choose: Chooser) -> str:
    """An id that was never added, or whose request has ended."""
    live = {entry.request.request_id for entry in world.live}
    ended = [request.request_id for request in world.entries if request.request_id not in live]
    return choose.choice(["nobody", *ended[-6:]])


def _end_transfer(world: World, choose: Chooser) -> None:
    num_missing = choose.integer(1, 4) if choose.chance(35) else 0
    transfers.end(world, choose.integer(0, 5), num_missing=num_missing, by_blocks=choose.chance(50))


OPERATIONS: tuple[Operation, ...] = (
    Operation("step", 44, _step),
    Operation("update", 14, _update),
    Operation("propose", 5, _propose),
    Operation("add", 17, _add),
    Operation("schedule", 6, lambda world, choose: world.schedule()),
    Operation("abort", 4, _on_request(lambda world, entry, choose: world.abort(entry))),
    Operation("finish", 3, _on_request(_finish)),
    Operation("park", 4, _on_request(lambda w, entry, choose: w.park(entry, choose.choice(tuple(ParkReason))))),
    Operation("ready", 5, _on_request(lambda world, entry, choose: world.ready(entry))),
    Operation("set_priority", 4, _on_request(lambda w, entry, choose: w.set_priority(entry, choose.integer(-2, 3)))),
    Operation("fail", 5, lambda world, choose: world.fail(choose.integer(0, 2), seen=choose.chance(50))),
    Operation("reset_encoder_cache", 1, lambda world, choose: world.reset_encoder_cache()),
    Operation("reset_prefix_cache", 3, lambda w, choose: w.reset_prefix_cache(preempt_running=choose.chance(33))),
    Operation("set_max_num_active_seqs", 2, lambda world, choose: world.set_max_num_active_seqs(choose.integer(0, 6))),
    Operation("pause", 1, lambda world, choose: world.set_pause(choose.choice(tuple(PauseMode)))),
    Operation("resume", 8, lambda world, choose: world.set_pause(None)),
    Operation("stalled", 4, lambda world, choose: world.look_for_stalls(choose.choice((0.25, 1.0, 4.0)))),
    Operation("start_recording", 1, _start_recording),
    Operation("extend", 5, _extend),
    Operation("write_blocks", 4, lambda w, c: transfers.write(w, c.integer(0, 5), c.integer(1, 3))),
    Operation("end_transfer", 7, _end_transfer),
    Operation("misuse_transfer", 1, lambda world, choose: transfers.misuse(world, choose.integer(0, 5))),
    Operation("misuse", 1, _on_request(lambda world, entry, choose: world.misuse(entry))),
    Operation("add_duplicate", 2, _duplicate),
    Operation("abort_unknown", 1, lambda world, choose: world.abort_unknown(_gone(world, choose))),
    Operation("call_unknown", 1, lambda world, choose: world.call_unknown(_gone(world, choose))),
    Operation("update_out_of_order", 2, lambda world, choose: world.update_out_of_order()),
    Operation("update_malformed", 3, lambda world, choose: world.update_malformed(choose.integer(0, 13))),
)


def run_operation(operation: Operation, world: World, choose: Chooser) -> None:
    """Run one operation and count it as an executed rule."""
    EXECUTED[operation.name] += 1
    operation.run(world, choose)


def make_world(choose: Chooser, overrides: dict[str, Any], **options: Any) -> World:
    """A random configuration (with `overrides`), maybe with a connector."""
    knobs = dict(overrides)
    connector_seed = make_connector_seed(choose, knobs)
    knobs = {**draw_policies(choose, knobs, has_connector=connector_seed is not None), **knobs}
    knobs = {**needed_by(knobs), **knobs}
    return World(make_config(choose, **knobs), connector_seed=connector_seed, **options)


def drive(
    seed: int, num_operations: int, *, recording: TextIO | None = None, shadow_only: bool = False, **overrides: Any
) -> World:
    """Run random operations on a random configuration (with `overrides`) and drain; the same for a seed in every run.

    Raises:
        AssertionError: a promise is broken (`ShadowFault` and `InvariantError` are kinds of it).
    """
    choose = SeededChooser(seed)
    world = make_world(choose, overrides, recording=recording, shadow_only=shadow_only)
    wheel = [operation for operation in OPERATIONS for _ in range(operation.weight)]
    for _ in range(num_operations):
        run_operation(choose.choice(wheel), world, choose)
    world.drain()
    return world
