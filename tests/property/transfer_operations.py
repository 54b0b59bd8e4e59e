"""Transfers between steps: the device writes, a transfer ends or exceeds its timeout; with the expected results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pointsman.core import Request, RequestStatus, SchedulerOutput, UnknownTransfer

from .group_transfers import GroupDevice, GroupTransfer
from .ledger import Entry, Place
from .shadow import require
from .transfers import Transfer

if TYPE_CHECKING:
    from .world import World


def _pick(world: World, index: int) -> Transfer | None:
    device = world.host.device
    if device is None or not device.transfers:
        return None
    transfers = list(device.transfers.values())
    return transfers[index % len(transfers)]


def write(world: World, index: int, count: int) -> None:
    """The device writes up to `count` blocks of some load."""
    world._tick("write_blocks")
    transfer = _pick(world, index)
    if transfer is not None and world.host.device is not None:
        world.host.device.write(transfer, count)
    world.check()


def end(world: World, index: int, *, num_missing: int, by_blocks: bool) -> None:
    """End a random transfer; `num_missing` blocks of a load are missing, reported by number or by name."""
    world._tick("transfer_done")
    transfer = _pick(world, index)
    if transfer is not None:
        end_transfer(world, transfer, num_missing=num_missing, by_blocks=by_blocks)
    world.check()


def end_transfer(world: World, transfer: Transfer, *, num_missing: int = 0, by_blocks: bool = False) -> None:
    device, size, scheduler = world.host.device, world.config.block_size, world.scheduler
    assert device is not None
    number, now = transfer.transfer_id, world.now
    if transfer.is_send:
        require(scheduler.transfer_done(number, now) is None, "a send ended a request")
        if isinstance(transfer, GroupTransfer) and isinstance(device, GroupDevice):
            device.end_in_groups(transfer, set())
        else:
            device.end(transfer, 0)
        return
    if isinstance(transfer, GroupTransfer):
        _end_in_groups(world, transfer, num_missing, by_blocks=by_blocks)
        return
    count = len(transfer.blocks)
    num_loaded = max(0, count - num_missing)
    device.write(transfer, num_loaded)
    if num_loaded == count:
        ended = scheduler.transfer_done(number, now)
    elif by_blocks:
        ended = scheduler.transfer_done(number, now, failed_blocks=transfer.blocks[num_loaded:][::-2])
        num_loaded = min(transfer.blocks.index(block) for block in transfer.blocks[num_loaded:][::-2])
        device.write(transfer, num_loaded)
    else:
        ended = scheduler.transfer_done(number, now, num_loaded_tokens=num_loaded * size + size - 1)
    device.end(transfer, num_loaded)
    _ended(world, transfer, ended, num_loaded, count)


def _end_in_groups(world: World, transfer: GroupTransfer, num_missing: int, *, by_blocks: bool) -> None:
    """End a load without its last blocks, or without some of them."""
    device, size = world.host.device, world.config.block_size
    assert isinstance(device, GroupDevice)
    done, number = world.scheduler.transfer_done, transfer.transfer_id
    count = len(transfer.blocks)
    num_loaded = max(0, count - num_missing)
    device.write(transfer, count)
    lost: list[int] = []
    if num_loaded == count:
        ended = done(number, world.now)
    elif by_blocks:
        lost = transfer.blocks[num_loaded:][::-2]
        ended = done(number, world.now, failed_blocks=lost)
    else:
        num_places = max(0, transfer.spots[num_loaded][1] - transfer.first_place)
        num_tokens = num_places * size
        spots = zip(transfer.spots, transfer.blocks, strict=True)
        lost = [block for (_, place), block in spots if place >= transfer.first_place + num_places]
        ended = done(number, world.now, num_loaded_tokens=num_tokens)
    usable = device.end_in_groups(transfer, set(lost))
    num_places = transfer.num_places - transfer.first_place
    _ended(world, transfer, ended, max(0, usable - transfer.first_place), num_places)


def _ended(world: World, transfer: Transfer, ended: Request | None, num_loaded: int, count: int) -> None:
    """A load has ended with `num_loaded` of `count` blocks of a table."""
    request, size = transfer.request, world.config.block_size
    if request is None:
        require(ended is None, f"{ended} ended by a transfer that no request waits for")
        return
    entry = world.entries[request]
    entry.load = None
    world.tally.num_loaded_tokens += num_loaded * size
    world.tally.num_failed_loads += num_loaded < count
    if num_loaded < count and world.config.kv_load_failure_policy == "fail":
        require(ended is request, f"{request.request_id} continues, and {num_loaded} of {count} blocks were loaded")
        world._end(entry, RequestStatus.FINISHED_ERROR)
    else:
        require(ended is None, f"{ended} ended by a load of {num_loaded} of {count} blocks")
        _return(world, entry)


def misuse(world: World, index: int) -> None:
    """An unknown transfer, or values that do not fit: an error, and nothing happens."""
    world._tick("misuse_transfer")
    before, done = world._snapshot(), world.scheduler.transfer_done
    device = world.host.device
    ended = [] if device is None else [n for n in range(device.num_loads) if n not in device.transfers]
    for number in [*ended[-2:], 10**6]:
        world._expect(UnknownTransfer, partial(done, number, world.now))
    transfer = _pick(world, index)
    if transfer is not None and not transfer.is_send:
        in_groups = isinstance(transfer, GroupTransfer)
        num_places = transfer.num_places - transfer.first_place if in_groups else len(transfer.blocks)
        too_many = num_places * world.config.block_size + 1
        world._expect(ValueError, partial(done, transfer.transfer_id, world.now, num_loaded_tokens=too_many))
        strange = [next(block for block in range(10**6) if block not in transfer.blocks)]
        world._expect(ValueError, partial(done, transfer.transfer_id, world.now, failed_blocks=strange))
    require(before == world._snapshot(), "an end of a transfer that makes no sense changed the scheduler")
    world.check()


def overdue(world: World) -> list[Entry]:
    """Release, in the ledger, requests whose loads exceed the timeout in the next step. Returns those that finish."""
    timeout, device = world.config.kv_load_timeout, world.host.device
    late = [e for e in world.live if e.load is not None and timeout is not None and world.now - e.load_since >= timeout]
    for entry in late:
        assert device is not None
        device.let_go(entry.request)
        entry.load = None
        world.tally.num_failed_loads += 1
        if world.config.kv_load_failure_policy == "recompute":
            _return(world, entry)
    return [entry for entry in late if entry.place is Place.PARKED]


def take_over(world: World, output: SchedulerOutput) -> None:
    """Park requests that an output loads for, except the admitted ones."""
    for load in output.loads:
        world.tally.num_loads += 1
        if load.is_async:
            entry = world.entries[load.request]
            assert world.host.device is not None
            entry.place, entry.parked_for = Place.PARKED, "waiting_for_remote_kvs"
            entry.events.append(("PARKED", world.now, "waiting_for_remote_kvs"))
            entry.load, entry.load_since = world.host.device.transfers[load.transfer_id], world.now
            entry.held_for = load.transfer_id
        else:
            world.tally.num_loaded_tokens += load.num_tokens


def roll_back(world: World, voided: list[SchedulerOutput]) -> None:
    """Undo loads of void steps: their requests return to the queue, and release the loaded blocks."""
    device = world.host.device
    for load in [load for output in voided for load in output.loads if load.is_async]:
        entry = world.entries[load.request]
        if entry.place is not Place.ENDED and entry.held_for == load.transfer_id and device is not None:
            give_up(world, entry)


def give_up(world: World, entry: Entry, *, parks: bool = False) -> None:
    """Release a request's blocks and its load; `parks`: it then waits for something else."""
    device = world.host.device
    if device is not None and entry.request in device.holders:
        device.let_go(entry.request)
    if entry.load is not None:
        entry.load = None
        if not parks:
            _return(world, entry)


def _return(world: World, entry: Entry) -> None:
    entry.place = Place.QUEUED
    entry.events.append(("QUEUED", world.now, ""))


def passed_over(world: World, output: SchedulerOutput, queue: list[Entry], num_held: int) -> list[Entry]:
    """Requests that may be skipped: no answer from the connector, or no blocks for the load. `num_held` blocks were
    held outside the batch before the step. Behind a request that lacks blocks, no request starts a load.
    """
    device = world.host.device
    if device is None:
        return []
    num_held += sum(len(load.local_blocks) + len(load.block_ids) for load in output.loads if load.is_async)
    started = {load.request for load in output.loads}.union(output.requests)
    passed: list[Entry] = []
    is_claimed = False
    for entry in queue:
        offered = device.offered.get(entry.request)
        if entry.request in started:
            continue
        if entry.request in device.undecided:
            passed.append(entry)
        elif offered is not None:
            is_claimed |= num_held + offered > device.max_held_blocks
            if is_claimed:
                passed.append(entry)
    return passed
