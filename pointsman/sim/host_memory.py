"""Host memory of a simulated replica: tracks the blocks in it, and computes how long copies take.

`HostMemory` describes the memory's size and bandwidth. `HostTier` is the host memory of one replica, and the connector
of its scheduler. `HostTier` uses the engine's table of host slots (`core/kv/slots.py`), so it copies the same blocks as
the engine. Copies are synchronous, as in the engine: a step begins with its copies, and they add to the step's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import Copies, Load, Request, SchedulerConfig, SchedulerOutput
from pointsman.core.kv.digests import block_keys, block_name
from pointsman.core.kv.slots import SlotDirectory, SlotLoad
from pointsman.core.state.layout import FULL, AttendedBlocks
from pointsman.sim.devices import Device
from pointsman.sim.errors import SimulationError
from pointsman.sim.model import ModelShape
from pointsman.sim.step_time import Efficiencies


class HostMemory(NamedTuple):
    """Host memory behind the KV pool of a replica, for all devices of the replica together."""

    num_bytes: int
    bytes_per_token: float
    """Bytes of KV of one token in a block: in all layers, or with `kv_groups` in the layers of one group."""
    bandwidth: float
    """Bandwidth that copies reach, in bytes a second in one direction."""

    @classmethod
    def of(
        cls,
        num_bytes: int,
        shape: ModelShape,
        device: Device,
        tensor_parallel: int = 1,
        *,
        kv_dtype_bytes: float = 2,
        efficiencies: Efficiencies | None = None,
        layers_per_block: int | None = None,
    ) -> HostMemory:
        """The host memory of a model on `tensor_parallel` equal devices, each with its own link.

        Args:
            efficiencies: shares of the peak bandwidths that copies reach; None: the defaults of `Efficiencies`.
            layers_per_block: number of layers whose KV a block holds (`memory.layer_groups`); None: all layers.
        """
        share = (efficiencies or Efficiencies()).host_link
        layers = shape.num_layers if layers_per_block is None else layers_per_block
        bytes_per_token = tensor_parallel * layers * shape.kv_bytes_per_layer(kv_dtype_bytes, tensor_parallel)
        return cls(num_bytes, bytes_per_token, tensor_parallel * share * device.host_bandwidth)


@dataclass(frozen=True, slots=True)
class CopyTotals:
    """Copies of a replica so far, in blocks and seconds."""

    num_offloaded: int = 0
    """Number of blocks copied to host memory."""
    num_restored: int = 0
    """Number of blocks copied back to the pool."""
    seconds: float = 0.0


def check_host_memory(memory: HostMemory | None, config: SchedulerConfig) -> None:
    """Check that the host memory fits the scheduler's configuration.

    Raises:
        SimulationError: less than one block fits, the bandwidth is not above 0, host memory would have no effect, or
            the configuration needs host memory and `memory` is None.
    """
    if memory is None:
        if config.preemption_mode != "recompute":
            raise SimulationError(
                f'preemption_mode is "{config.preemption_mode}" and there is no host memory to swap to; give '
                'kv_offload_bytes, or set preemption_mode to "recompute"'
            )
        return
    if not config.enable_prefix_caching:
        raise SimulationError(
            f"kv_offload_bytes is {memory.num_bytes} and would have no effect, because enable_prefix_caching is off; "
            "turn enable_prefix_caching on, or remove kv_offload_bytes"
        )
    block_bytes = config.block_size * memory.bytes_per_token
    if memory.num_bytes < block_bytes:
        raise SimulationError(
            f"kv_offload_bytes is {memory.num_bytes}, less than one block of {block_bytes:.0f} bytes; give at "
            "least one block, or remove kv_offload_bytes"
        )
    if not memory.bandwidth > 0:
        raise SimulationError(f"the bandwidth of host memory is {memory.bandwidth}; it must be above 0 bytes/s")


class HostTier:
    """The host memory of one replica: a `pointsman.core.KVConnector`, and the copies that a host would make for it. The
    memory must have passed `check_host_memory`."""

    def __init__(self, memory: HostMemory, config: SchedulerConfig) -> None:
        block_bytes = config.block_size * memory.bytes_per_token
        self._directory = SlotDirectory(int(memory.num_bytes // block_bytes))
        self._block_seconds = block_bytes / memory.bandwidth
        self._block_size = config.block_size
        self._num_groups = max(1, len(config.kv_groups))
        self._attended = attended_blocks(config)
        self._is_for_swap = config.preemption_mode != "recompute"
        self.saves_evicted = not self._is_for_swap
        self.totals = CopyTotals()

    # ------------------------------------------------------------------ the scheduler's side

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        size = self._block_size
        if not len(self._directory):
            return 0, False
        keys = block_keys(request, size)[num_local_tokens // size : (request.num_tokens - 1) // size]
        return self._directory.num_found(keys) * size, False

    def num_tokens_in_groups(
        self, request: Request, num_local_tokens: int, has: npt.NDArray[np.bool_]
    ) -> tuple[int | None, bool]:
        if not len(self._directory):
            return 0, False
        size, found = self._block_size, has.copy()
        groups, places = (~has).nonzero()
        names = block_names(request, size, self._num_groups, groups, places)
        found[groups, places] = [self._directory.has_content(name) for name in names]
        return max(0, self._attended.num_reusable(found) * size - num_local_tokens), False

    def request_ended(
        self, request: Request, block_ids: npt.NDArray[np.int64], num_tokens: int, transfer_id: int
    ) -> bool:
        return False

    def reset(self) -> None:
        self._directory.clear()

    # ------------------------------------------------------------------ the host's side

    def copy_blocks(self, output: SchedulerOutput) -> Copies | None:
        """Copy the blocks of a newly scheduled step, before it computes. Returns the copies; None: the step has
        none."""
        copies = self._copy(output) if output.loads or output.saves else None
        if self._is_for_swap:
            for request in output.finished:
                if request.num_preemptions:  # no request resumes with these blocks
                    keys = block_keys(request, self._block_size)
                    for group in range(self._num_groups):
                        names = [block_name(key, group, self._num_groups) for key in keys]
                        self._directory.discard_contents(names)
        return copies

    def _copy(self, output: SchedulerOutput) -> Copies | None:
        loads = [SlotLoad(self._loaded_names(load), load.block_ids.tolist()) for load in output.loads]
        plan = self._directory.assign_slots([(save.block_id, save.key) for save in output.saves], loads)
        if not plan.num_blocks:
            return None
        seconds = plan.num_blocks * self._block_seconds
        was = self.totals
        self.totals = CopyTotals(
            was.num_offloaded + len(plan.saves), was.num_restored + len(plan.loaded_slots), was.seconds + seconds
        )
        return Copies(plan.num_blocks, seconds)

    def _loaded_names(self, load: Load) -> Sequence[bytes]:
        """The names of the blocks that a load fills, in its order."""
        if not len(load.block_places):  # one group of full attention
            first = load.first_token // self._block_size
            return block_keys(load.request, self._block_size)[first : first + len(load.block_ids)]
        return block_names(load.request, self._block_size, self._num_groups, load.block_groups, load.block_places)


def attended_blocks(config: SchedulerConfig) -> AttendedBlocks:
    """The blocks that a sequence's next token attends to, by group."""
    return AttendedBlocks(config.kv_groups or (FULL,), config.block_size, -(-config.max_model_len // config.block_size))


def block_names(
    request: Request,
    block_size: int,
    num_groups: int,
    groups: npt.NDArray[np.integer],
    places: npt.NDArray[np.integer],
) -> list[bytes]:
    """The names of a request's blocks, each given by its group and its place in the group's table."""
    keys = block_keys(request, block_size)
    at = zip(groups.tolist(), places.tolist(), strict=True)
    return [block_name(keys[place], group, num_groups) for group, place in at]
