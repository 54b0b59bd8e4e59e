"""Large runs: more rows than the columns start with, outputs longer than the ring, a long queue."""

from __future__ import annotations

from pointsman.core import ParkReason, SchedulerConfig

from .workload import RequestSpec
from .world import World


def config(**overrides: object) -> SchedulerConfig:
    values = {"num_blocks": 400, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return SchedulerConfig(**{**values, **overrides})  # type: ignore[arg-type]


def run(world: World, num_steps: int) -> None:
    """Keep as many steps in flight as allowed."""
    for _ in range(num_steps):
        if len(world.host.in_flight) >= world.config.max_steps_in_flight:
            world.update()
        world.schedule()


def test_batch_arrays_grow_while_steps_are_in_flight() -> None:
    """Columns and block tables grow while steps that name rows are in flight."""
    world = World(config(max_num_seqs=120, max_num_batched_tokens=200, max_steps_in_flight=2))
    first_rows = world.scheduler.block_table.shape[0]
    for index in range(120):
        world.add(RequestSpec(document=index % 3, shared=index % 11, tail=(index % 4,), max_tokens=12))
        if index % 20 == 19:
            run(world, 1)
    run(world, 4)
    assert world.scheduler.stats().num_running > first_rows
    world.fail(0, seen=False)
    world.drain()


def test_outputs_may_be_longer_than_the_ring_of_newest_tokens() -> None:
    """Output tokens outlive the ring that holds the newest ones, through preemptions and with steps in flight."""
    world = World(config(num_blocks=150, block_size=8, max_model_len=900, max_num_seqs=3, max_steps_in_flight=2))
    for index, max_tokens in enumerate((700, 613, 520)):
        world.add(RequestSpec(tail=(index,), max_tokens=max_tokens, arrival=index))
    run(world, 300)
    world.park(world.live[0], ParkReason.GRAMMAR)
    world.ready(world.live[0])
    world.drain()
    assert max(len(tokens) for tokens in world.conversations) == 701
    assert world.tally.num_preemptions > 1  # three of them need 230 blocks in the end


def test_rows_of_finished_requests_are_reused() -> None:
    """The number of rows is bounded by the requests that run at once, plus rows that wait for steps in flight."""
    world = World(config(max_num_seqs=4, max_steps_in_flight=3))
    first_rows = world.scheduler.block_table.shape[0]
    for index in range(300):
        world.add(RequestSpec(tail=(index % 4,), max_tokens=2))
        run(world, 2)
    world.drain()
    assert world.num_admissions >= 300
    assert world.scheduler.block_table.shape[0] == first_rows


def test_removals_from_a_long_queue_keep_its_order() -> None:
    """Requests that leave from the middle of the queue keep the others in order."""
    world = World(config(max_num_seqs=1, order="priority"))
    for index in range(140):
        world.add(RequestSpec(tail=(index % 4,), max_tokens=1, priority=index * 7 % 5, arrival=index * 11 % 13))
    for entry in [entry for entry in world.live if entry.number % 7 != 0]:
        world.abort(entry)
    world.drain()
    assert world.tally.finished["abort"] == 120
