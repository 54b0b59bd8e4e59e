"""EngineConnector: finds KV outside the pool for the scheduler, and moves it.

    scheduler.schedule     calls `num_external_tokens`: tokens in host memory or in the store
    connector.prepare      plans the step's copies and file reads from the output's saves and loads
    transfers.run          moves the KV with the step, before it computes
    connector.report_finished       reports finished loads and finished writes to the scheduler
    connector.void_transfers         reports the loads of voided steps as empty

Host memory (`offload.py`) is read before the step computes: a request whose blocks are in host memory is admitted
without waiting. A thread reads the store (`store.py`), while the request waits as WAITING_FOR_REMOTE_KVS and other
requests run. If host memory and the store both have blocks of a request, the one with more of them is used. A second
thread writes the KV of finished requests to the store; the blocks are not reused until it has written them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pointsman.core.kv.digests import block_keys, block_name
from pointsman.core.kv.slots import SlotLoad
from pointsman.core.state.layout import FULL, AttendedBlocks
from pointsman.core.state.output import Copies
from pointsman.engine.kv.offload import HostCopies, HostTier
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.kv.store import BadBlock, BlockFolder, KVStore
from pointsman.engine.kv.worker import Worker
from pointsman.engine.params.engine_args import KVKnobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pointsman.core import Load, Request, Scheduler, SchedulerConfig, SchedulerOutput
    from pointsman.engine.counters import EngineCounters

logger = logging.getLogger(__name__)


class FileLoad:
    """A load from the store. Whichever thread claims the load first reports its result: the thread that reads the
    files, or the engine's thread, if it voids the step before the reading has begun."""

    def __init__(self, load: Load, start: Callable[[FileLoad], object]) -> None:
        self.load = load
        self._start = start
        self._claims = [True]

    def start(self) -> None:
        self._start(self)

    def claim(self) -> bool:
        """Claim the load; return whether no thread had claimed it before."""
        try:
            return self._claims.pop()  # only one thread succeeds
        except IndexError:
            return False


@dataclass(slots=True, eq=False)
class StepTransfers:
    """The transfers of one step: copies to and from host memory, and loads from the store."""

    copies: HostCopies | None
    loads: list[FileLoad]

    def report(self) -> Copies | None:
        """Return the number of copied blocks and the seconds that copying took; None: nothing was copied. Call this
        after the step has computed."""
        return None if self.copies is None else self.copies.report()

    def run(self) -> None:
        """Copy KV to and from host memory, and start the loads. Steps call this in order, before they compute, so no
        earlier computation writes to the moved blocks."""
        if self.copies is not None:
            self.copies.run()
        for load in self.loads:
            load.start()


class Waiting(NamedTuple):
    """A request that waits for a load from the store, and since when, in seconds on the engine's clock."""

    request: Request
    since: float


class EngineConnector:
    """The `pointsman.core.KVConnector` of one engine: both the scheduler's side and the side that moves KV.

    Only the thread that owns the engine calls it, except `StepTransfers.run`, which the executor of the steps calls.

    Args:
        pool: the engine's KV pool.
        tier: KV blocks in host memory; None: no host memory is used.
        store: KV blocks in a directory; None: there is no KV store.
        role: role of the engine at the store, see `STORE_ROLES`.
        counters: the engine's counters; the connector counts moved KV in them.
        clock: the engine's clock, in seconds.
        config: the scheduler's configuration.
    """

    def __init__(
        self,
        pool: KVPool,
        tier: HostTier | None,
        store: KVStore | None,
        role: str,
        counters: EngineCounters,
        clock: Callable[[], float],
        config: SchedulerConfig,
    ) -> None:
        self._timeout = config.kv_load_timeout
        self._num_groups = max(1, len(config.kv_groups))
        max_blocks = -(-config.max_model_len // config.block_size)
        self._attended = AttendedBlocks(config.kv_groups or (FULL,), config.block_size, max_blocks)
        self._pool = pool
        self._block_bytes = pool.num_bytes // pool.num_blocks
        self.tier = tier
        self.store = store
        self._reads = store if role != "producer" else None
        self._writes = store if role != "consumer" else None
        self._counters = counters
        self._clock = clock
        self._is_for_swap = config.preemption_mode != "recompute"
        self.saves_evicted = tier is not None and not self._is_for_swap
        self._max_in_flight = config.max_steps_in_flight
        self._steps: dict[int, StepTransfers] = {}  # step id -> transfers of a step that may be in flight
        self._loading: dict[int, Waiting] = {}
        self._num_resets = 0
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._taken: list[tuple[int, int]] = []
        self._reader = Worker("pointsman-kv-load")
        self._writer = Worker("pointsman-kv-store")
        self.notify: Callable[[], None] | None = None
        """Listener that is called, in a thread of the store, when `report_finished` has something to report."""

    # ------------------------------------------------------------------ called by the scheduler

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens after the first `num_local_tokens` whose KV can be loaded from outside the pool, and whether
        the request must wait for the load."""
        size = self._pool.block_size
        keys = block_keys(request, size)[num_local_tokens // size : (request.num_tokens - 1) // size]
        num_here = 0 if self.tier is None else self.tier.num_found(keys)
        num_stored = 0 if self._reads is None or num_here == len(keys) else self._reads.folder.num_found(keys)
        return max(num_here, num_stored) * size, num_stored > num_here

    def num_tokens_in_groups(
        self, request: Request, num_local_tokens: int, has: npt.NDArray[np.bool_]
    ) -> tuple[int | None, bool]:
        """`num_external_tokens` for KV in groups of layers. `has` [groups, blocks]: whether the pool has each block of
        the request."""
        size, start = self._pool.block_size, num_local_tokens // self._pool.block_size
        num_here = 0 if self.tier is None else self._num_reusable_blocks(request, has, self.tier.has_content) - start
        num_stored = 0
        if self._reads is not None and start + num_here < has.shape[1]:
            num_stored = self._num_reusable_blocks(request, has, self._reads.folder.has) - start
        return max(num_here, num_stored, 0) * size, num_stored > max(num_here, 0)

    def _num_reusable_blocks(
        self, request: Request, in_pool: npt.NDArray[np.bool_], is_outside: Callable[[bytes], bool]
    ) -> int:
        """Maximum number of leading blocks that a request need not compute, because each needed block is in the pool
        (`in_pool` [groups, blocks]) or outside it (`is_outside` of the block's name)."""
        found = in_pool.copy()
        for group, place in zip(*(where.tolist() for where in (~in_pool).nonzero()), strict=True):
            found[group, place] = is_outside(self._block_name(request, group, place))
        return self._attended.num_reusable(found)

    def _block_name(self, request: Request, group: int, place: int) -> bytes:
        return block_name(block_keys(request, self._pool.block_size)[place], group, self._num_groups)

    def request_ended(
        self, request: Request, block_ids: npt.NDArray[np.int64], num_tokens: int, transfer_id: int
    ) -> bool:
        """Start writing a finished request's blocks that the store lacks; return whether there are any."""
        if self._writes is None or request.prefix_epoch != self._num_resets:  # its KV was computed before a reset
            return False
        folder, size = self._writes.folder, self._pool.block_size
        table = block_ids if block_ids.ndim == 2 else block_ids[None]
        places, groups = (table[:, : num_tokens // size] >= 0).T.nonzero()
        chain = [self._block_name(request, *at) for at in zip(groups.tolist(), places.tolist(), strict=True)]
        blocks = zip(chain, table[groups, places].tolist(), strict=True)
        new = [(name, block) for name, block in blocks if not folder.has_seen(name)]
        if not new:
            return False
        self._writer.submit(partial(self._write_files, folder, chain, new, transfer_id))
        return True

    def reset(self) -> None:
        """Drop all KV that is kept outside the pool."""
        self._num_resets += 1
        if self.tier is not None:
            self.tier.clear()
        if self.store is not None:
            self.store.reset()

    # ------------------------------------------------------------------ for a scheduler's output

    def prepare(self, output: SchedulerOutput) -> StepTransfers | None:
        """Plan the transfers of the step that was scheduled last; None: it has no transfers."""
        self._count_hits(output)
        transfers = self._plan_transfers(output) if output.loads or output.saves else None
        if self._is_for_swap and self.tier is not None:
            for request in output.finished:
                if request.num_preemptions:  # the request's swapped blocks are no longer needed
                    for group in range(self._num_groups):
                        keys = block_keys(request, self._pool.block_size)
                        self.tier.discard_contents(block_name(key, group, self._num_groups) for key in keys)
        return transfers

    def _plan_transfers(self, output: SchedulerOutput) -> StepTransfers:
        copies, starts = None, list[FileLoad]()
        if self.tier is not None:
            loads = [
                SlotLoad(self._loaded_names(one), one.block_ids.tolist()) for one in output.loads if not one.is_async
            ]
            copies = self.tier.plan([(save.block_id, save.key) for save in output.saves], loads)
            num_saved, num_loaded = len(copies.plan.saves), len(copies.plan.loaded_slots)
            self._count_moved("offloaded", num_saved, num_saved * self._block_bytes)
            self._count_moved("restored", num_loaded, num_loaded * self._block_bytes)
        for load in output.loads:
            if load.is_async:
                self._loading[load.transfer_id] = Waiting(load.request, self._clock())
                starts.append(self._make_file_load(load))
        oldest = output.step_id - self._max_in_flight
        self._steps = {step_id: one for step_id, one in self._steps.items() if step_id > oldest}
        self._steps[output.step_id] = transfers = StepTransfers(copies, starts)
        return transfers

    def void_transfers(self, outputs: Sequence[SchedulerOutput]) -> None:
        """Void the transfers of the steps in flight, whose `outputs` will not be executed."""
        if self.tier is not None:
            self.tier.drop_plans()
        for output in outputs:
            transfers = self._steps.pop(output.step_id, None)
            loads = [load for load in output.loads if load.is_async]
            if transfers is not None:  # otherwise the step was never prepared
                loads = [one.load for one in transfers.loads if one.claim()]
            for load in loads:
                self._ended.put((load.transfer_id, 0))

    def _count_hits(self, output: SchedulerOutput) -> None:
        if output.num_continued == output.num_rows:
            return
        for request, cached, external, is_resumed in zip(
            output.admitted,
            output.num_cached_tokens.tolist(),
            output.num_external_tokens.tolist(),
            output.is_resumed.tolist(),
            strict=True,
        ):
            if not is_resumed:
                self._counters.num_external_queries += request.num_tokens - (cached - external)
                self._counters.num_external_hits += external

    def _count_moved(
        self, way: Literal["offloaded", "restored", "stored", "loaded"], blocks: int, num_bytes: int
    ) -> None:
        """Add blocks and bytes to the engine's counters for transfers of the kind `way`; only one thread changes each
        counter."""
        counters = self._counters
        setattr(counters, f"num_{way}_blocks", getattr(counters, f"num_{way}_blocks") + blocks)
        setattr(counters, f"num_{way}_bytes", getattr(counters, f"num_{way}_bytes") + num_bytes)

    def _make_file_load(self, load: Load) -> FileLoad:
        assert self._reads is not None
        folder, chain = self._reads.folder, self._names_to_mark_used(load)

        def start(file_load: FileLoad) -> None:
            self._reader.submit(partial(self._read_files, folder, chain, file_load))

        return FileLoad(load, start)

    def _names_to_mark_used(self, load: Load) -> tuple[bytes, ...]:
        """The names of the blocks that a load marks as used now. With one group of full attention: the request's blocks
        from the first to the last loaded block; otherwise the loaded blocks."""
        size = self._pool.block_size
        if not len(load.block_places):
            return block_keys(load.request, size)[: load.first_token // size + len(load.block_ids)]
        return self._loaded_names(load)

    def _loaded_names(self, load: Load) -> tuple[bytes, ...]:
        """The names of the blocks that a load reads."""
        if not len(load.block_places):
            return self._names_to_mark_used(load)[-len(load.block_ids) :]
        at = zip(load.block_groups.tolist(), load.block_places.tolist(), strict=True)
        return tuple([self._block_name(load.request, group, place) for group, place in at])

    # ------------------------------------------------------------------ finished transfers

    def report_finished(self, scheduler: Scheduler) -> list[Request]:
        """Report finished transfers to the scheduler; return the requests that the scheduler finishes because of
        them."""
        ended, self._taken = self._taken, []
        while not self._ended.empty():
            ended.append(self._ended.get())
        requests: list[Request] = []
        for transfer_id, num_tokens in ended:
            self._loading.pop(transfer_id, None)
            request = scheduler.transfer_done(transfer_id, self._clock(), num_loaded_tokens=num_tokens)
            if request is not None:
                requests.append(request)
        return requests

    def wait(self, timeout: float) -> None:
        """Wait until a transfer has ended, at most `timeout` seconds; without requests that wait for loads, return
        immediately."""
        if self._loading and not self._taken:
            try:
                self._taken.append(self._ended.get(timeout=timeout))
            except Empty:
                return

    @property
    def deadline(self) -> float | None:
        """Time on the engine's clock at which the next load times out, so that a step is due; None: never."""
        if self._timeout is None or not self._loading:
            return None
        waiting = [one.since for one in self._loading.values() if one.request.status.is_parked]
        return min(waiting) + self._timeout if waiting else None

    def close(self) -> None:
        """Complete the submitted transfers, within `EXIT_PATIENCE` seconds, and end the threads; a later transfer
        starts new threads."""
        self._reader.close()
        self._writer.close()

    # ------------------------------------------------------------------ threads of the store

    def _read_files(self, folder: BlockFolder, chain: Sequence[bytes], file_load: FileLoad) -> None:
        if not file_load.claim():
            return
        load, num_loaded = file_load.load, 0
        keys = chain[-len(load.block_ids) :]
        try:
            for key, block in zip(keys, load.block_ids.tolist(), strict=True):
                if load.request.is_finished:  # the load is no longer needed
                    break
                fill_block(self._pool, block, folder.read(key))
                num_loaded += 1
        except FileNotFoundError:
            pass  # another process has removed the file
        except BadBlock as error:
            logger.warning(
                "the file %s of the KV store is damaged and not used: %s", folder.path_of(keys[num_loaded]), error
            )
            folder.mark_damaged(keys[num_loaded:])  # recomputed blocks will replace them
        except Exception:
            logger.exception("KV could not be loaded from %s", folder.path)
        folder.mark_used(chain[: len(chain) - len(keys) + num_loaded])
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)
        self._count_moved("loaded", num_loaded, num_loaded * self._block_bytes)
        self._counters.num_unloaded_blocks += len(keys) - num_loaded
        self._note_end(load.transfer_id, self._num_loaded_tokens(load, num_loaded))

    def _num_loaded_tokens(self, load: Load, num_loaded: int) -> int:
        """Number of leading tokens of a load whose blocks, in every group, are among the first `num_loaded` blocks of
        the load."""
        if num_loaded == len(load.block_ids):
            return load.num_tokens
        size = self._pool.block_size
        has_places = len(load.block_places) > 0
        place = load.block_places.item(num_loaded) - load.first_token // size if has_places else num_loaded
        return max(0, place) * size

    def _write_files(
        self, folder: BlockFolder, chain: Sequence[bytes], blocks: Sequence[tuple[bytes, int]], transfer_id: int
    ) -> None:
        assert self._writes is not None
        num_written = num_done = num_bytes = 0
        try:
            for key, block in blocks:
                size = folder.write(key, self._pool.block(block))
                num_bytes += size
                num_written += size > 0
                num_done += 1
            folder.mark_used(chain)
            self._writes.count_written(num_bytes)
        except OSError as error:
            logger.warning("KV could not be written to the store: %s", error)
        except Exception:
            logger.exception("KV could not be written to %s", folder.path)
        self._count_moved("stored", num_written, num_bytes)
        self._counters.num_unstored_blocks += len(blocks) - num_done
        self._note_end(transfer_id, 0)

    def _note_end(self, transfer_id: int, num_tokens: int) -> None:
        self._ended.put((transfer_id, num_tokens))
        if self.notify is not None:
            self.notify()


def fill_block(pool: KVPool, block_id: int, parts: dict[str, Any]) -> None:
    """Copy the keys and values of a block into the pool. `parts`: tensors, named as by `KVPool.block`. Any thread may
    call this. On a CPU NumPy copies, because PyTorch's operators would start helper threads for the calling thread."""
    for name, target in pool.block(block_id).items():
        if target.device.type == "cpu":
            target.view(torch.uint8).numpy()[...] = parts[name].view(torch.uint8).numpy()
        else:
            target.copy_(parts[name])


def make_kv_connector(
    knobs: KVKnobs,
    config: SchedulerConfig,
    fingerprint: Callable[[], bytes],
    pool: KVPool,
    counters: EngineCounters,
    clock: Callable[[], float],
) -> EngineConnector | None:
    """Make the connector of an engine; None: the engine keeps no KV outside the pool.

    Raises:
        ConfigError: a knob is out of range, or would have no effect.
        ValueError: there is not enough memory.
    """
    knobs.check(config)
    if not knobs.is_on:
        return None
    tier = None if knobs.kv_offload_bytes is None else HostTier(pool, knobs.kv_offload_bytes)
    store = (
        None if knobs.kv_store is None else KVStore(knobs.kv_store, fingerprint, pool, max_bytes=knobs.kv_store_bytes)
    )
    if tier is not None:
        logger.info("KV offload: host memory can hold %d blocks", tier.num_slots)
    if store is not None:
        logger.info("KV store: %s, role %s", store.folder.path, knobs.kv_store_role)
    return EngineConnector(pool, tier, store, knobs.kv_store_role, counters, clock, config)
