"""Prefill and decode apart: some engines compute prompts, others receive the KV and generate the output.

    1. A request goes to a prefill engine with an output of one token. Its KV stays in the engine's pool.
    2. The request goes to a decode engine, whose scheduler asks its connector for the KV of the prompt, allocates
       blocks, and lets the request wait for the load.
    3. The KV is transferred. Then the prefill engine frees its blocks, and the decode engine continues after the
       loaded tokens. Its first step computes the rest of the prompt's last block, at least one token, and samples
       the first token of the output.

So do vLLM's NIXL connector and the proxies in front of it (`toy_proxy_server.py`, llm-d): the token of the prefill
engine is dropped, and the client's first token comes from the decode engine. TTFT therefore includes prefill, transfer
and the first step of the decode engine. Both schedulers decide as with a real connector (`core/kv/connector.py`):
prefix caches of both sides are used, transfers hold blocks, and a decode engine that cannot load computes the prompt.

A link carries one transfer at a time. A transfer begins when the links of both engines are free, in the order in which
the decode engines asked. A request that is preempted on a decode engine computes its prompt there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import Request, SchedulerConfig, SchedulerOutput
from pointsman.sim.devices import Device
from pointsman.sim.endpoint import Endpoint, Router, Several
from pointsman.sim.errors import SimulationError
from pointsman.sim.fleet import Routing
from pointsman.sim.host_memory import attended_blocks
from pointsman.sim.model import ModelShape
from pointsman.sim.outcome import Timings
from pointsman.sim.replica import FloatArray, Int64Array, Replica
from pointsman.sim.request import SimRequest
from pointsman.sim.step_time import Efficiencies


class KvTransfer(NamedTuple):
    """Links between prefill and decode engines; each engine has one."""

    bytes_per_token: float
    """Bytes of KV of one token in a block: in all layers, or with `kv_groups` in the layers of one group."""
    bandwidth: float
    """Bytes/s that a transfer reaches."""
    latency: float = 0.0
    """Seconds of a transfer without any bytes: the messages before and after it."""

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        device: Device,
        tensor_parallel: int = 1,
        *,
        bandwidth: float | None = None,
        latency: float = 0.0,
        kv_dtype_bytes: float = 2,
        layers_per_block: int | None = None,
    ) -> KvTransfer:
        """The links of a model on `tensor_parallel` equal devices.

        Args:
            bandwidth: bytes/s of an engine's link; None: the share `Efficiencies.host_link` of the bandwidth between
                its devices and their host, because network adapters are attached to the same bus.
            latency: seconds of a transfer without any bytes.
            layers_per_block: number of layers whose KV a block holds (`memory.layer_groups`); None: all layers.
        """
        layers = shape.num_layers if layers_per_block is None else layers_per_block
        bytes_per_token = tensor_parallel * layers * shape.kv_bytes_per_layer(kv_dtype_bytes, tensor_parallel)
        if bandwidth is None:
            bandwidth = tensor_parallel * Efficiencies().host_link * device.host_bandwidth
        return cls(bytes_per_token, bandwidth, latency)

    def check(self, config: SchedulerConfig) -> None:
        """Check that the values make sense, and that the scheduler's configuration allows transfers.

        Raises:
            SimulationError: a value is out of range, or the configuration has no prefix cache or swaps to host memory.
        """
        if not 0 < self.bandwidth < math.inf:
            raise SimulationError(f"kv_transfer_bandwidth is {self.bandwidth}; it must be above 0 bytes/s, and finite")
        if not 0 <= self.latency < math.inf:
            raise SimulationError(f"kv_transfer_latency is {self.latency}; it must be at least 0 s, and finite")
        if not config.enable_prefix_caching:
            raise SimulationError(
                "enable_prefix_caching is off, but decode engines find transferred KV by their prefix cache; turn "
                "enable_prefix_caching on"
            )
        if config.preemption_mode != "recompute":
            raise SimulationError(
                f'preemption_mode is "{config.preemption_mode}", but engines that transfer KV have no host memory to '
                'swap to; set preemption_mode to "recompute"'
            )


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Transfers from prefill to decode engines so far."""

    num_transfers: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    """Seconds of all transfers together, without the wait for a link."""
    waiting: float = 0.0
    """Seconds that transfers waited for a link, together."""
    num_untransferred: int = 0
    """Requests whose prompt a decode engine computed, because too many blocks were held for transfers."""


@dataclass(slots=True)
class _Held:
    """KV of a prompt that a prefill engine holds until it is transferred."""

    engine: Replica
    transfer_id: int
    """Id of the send, at the prefill engine's scheduler."""
    num_tokens: int
    has_block: npt.NDArray[np.bool_]
    """[groups, blocks] whether the engine holds each block of the prompt."""


class _Sender:
    """The connector of a prefill engine: keeps the blocks of prompts that a decode engine will load."""

    saves_evicted = False

    def __init__(self, held: dict[str, _Held]) -> None:
        self.engine: Replica | None = None
        self._held = held

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def num_tokens_in_groups(
        self, request: Request, num_local_tokens: int, has: npt.NDArray[np.bool_]
    ) -> tuple[int | None, bool]:
        return 0, False

    def request_ended(self, request: Request, block_ids: Int64Array, num_tokens: int, transfer_id: int) -> bool:
        assert self.engine is not None
        table = block_ids if block_ids.ndim == 2 else block_ids[None]
        self._held[request.request_id] = _Held(self.engine, transfer_id, num_tokens, table >= 0)
        return True

    def reset(self) -> None:
        pass

    def begin_loads(self, output: SchedulerOutput, begin: float) -> None:
        pass

    def note_admission(self, request: Request, now: float) -> None:
        pass


class _Receiver:
    """The connector of a decode engine: loads the KV that a prefill engine holds for a request."""

    saves_evicted = False

    def __init__(self, held: dict[str, _Held], links: _Links, config: SchedulerConfig) -> None:
        self.engine: Replica | None = None
        self._held, self._links = held, links
        self._size = config.block_size
        self._attended = attended_blocks(config)

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        held = self._held.get(request.request_id)
        return (0, False) if held is None else (max(0, held.num_tokens - num_local_tokens), True)

    def num_tokens_in_groups(
        self, request: Request, num_local_tokens: int, has: npt.NDArray[np.bool_]
    ) -> tuple[int | None, bool]:
        held = self._held.get(request.request_id)
        if held is None:
            return 0, False
        found = has.copy()
        num_full = min(held.num_tokens // self._size, has.shape[1])
        found[:, :num_full] |= held.has_block[:, :num_full]
        return max(0, self._attended.num_reusable(found) * self._size - num_local_tokens), True

    def request_ended(self, request: Request, block_ids: Int64Array, num_tokens: int, transfer_id: int) -> bool:
        return False

    def reset(self) -> None:
        pass

    def begin_loads(self, output: SchedulerOutput, begin: float) -> None:
        assert self.engine is not None
        for load in output.loads:
            held = self._held.pop(load.request_id)
            self._links.begin(held, self.engine, load.transfer_id, len(load.block_ids), begin)

    def note_admission(self, request: Request, now: float) -> None:
        if (held := self._held.pop(request.request_id, None)) is not None:  # the decode engine has the prompt's KV
            self._links.release(held, now)


class _Ended(NamedTuple):
    """The end of a transfer, in the order of events."""

    end: float
    number: int
    held: _Held
    receiver: Replica | None
    """None: the blocks are freed without a transfer."""
    transfer_id: int
    """Id of the load, at the receiver's scheduler."""


class _Links:
    """The links of the engines, and the transfers under way."""

    def __init__(self, transfer: KvTransfer, block_size: int) -> None:
        self._block_seconds = block_size * transfer.bytes_per_token / transfer.bandwidth
        self._latency = transfer.latency
        self._free_at: dict[Replica, float] = {}  # when the link of an engine is free
        self._ends: list[_Ended] = []  # a heap
        self._num_begun = 0
        self.totals = TransferTotals()

    def begin(self, held: _Held, receiver: Replica, transfer_id: int, num_blocks: int, now: float) -> None:
        """Begin a transfer of `num_blocks` blocks, at `now` (seconds) or when the links of both engines are free."""
        begin = max(now, self._free_at.get(held.engine, 0.0), self._free_at.get(receiver, 0.0))
        seconds = num_blocks * self._block_seconds
        self._free_at[held.engine] = self._free_at[receiver] = begin + seconds
        was = self.totals
        self.totals = replace(
            was,
            num_transfers=was.num_transfers + 1,
            num_blocks=was.num_blocks + num_blocks,
            seconds=was.seconds + seconds + self._latency,
            waiting=was.waiting + begin - now,
        )
        self._push(_Ended(begin + seconds + self._latency, self._num_begun, held, receiver, transfer_id))

    def release(self, held: _Held, now: float) -> None:
        """Free blocks that need not be transferred, at `now` (seconds)."""
        self._push(_Ended(now, self._num_begun, held, None, 0))

    def note_untransferred(self) -> None:
        self.totals = replace(self.totals, num_untransferred=self.totals.num_untransferred + 1)

    @property
    def next_end(self) -> float:
        """Time of the next end of a transfer; infinity: none is under way."""
        return self._ends[0].end if self._ends else math.inf

    def end_next(self) -> None:
        """End the transfer that ends next: its engines get the news."""
        ended = heapq.heappop(self._ends)
        if ended.receiver is not None:
            ended.receiver.end_transfer(ended.transfer_id, ended.end)
        ended.held.engine.end_transfer(ended.held.transfer_id, ended.end)

    def _push(self, ended: _Ended) -> None:
        self._num_begun += 1
        heapq.heappush(self._ends, ended)


class PrefillTimings:
    """The records of prefill engines: of a request, only its first admission and preemptions. Its token and its end
    there are not the client's."""

    has_tokens = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def record_engine(self, number: int, engine: int) -> None:
        self._timings.record_engine(number, engine)

    def record_admission(self, number: int, now: float, num_cached_tokens: int) -> None:
        self._timings.record_admission(number, now, num_cached_tokens)

    def record_token(self, numbers: Int64Array, now: float) -> None:
        pass

    def record_tokens(self, numbers: Int64Array, times: FloatArray) -> None:
        pass

    def record_finish(self, number: int, request: Request) -> None:
        pass


class Connectors:
    """Makes the connectors of the engines of one replica."""

    def __init__(self, transfer: KvTransfer, config: SchedulerConfig) -> None:
        self.held: dict[str, _Held] = {}
        self.links = _Links(transfer, config.block_size)
        self._config = config

    def sender(self) -> _Sender:
        """The connector of a prefill engine; set its `engine`."""
        return _Sender(self.held)

    def receiver(self) -> _Receiver:
        """The connector of a decode engine; set its `engine`."""
        return _Receiver(self.held, self.links, self._config)


class PrefillDecode(Several):
    """Prefill engines, decode engines, and the router in front of both.

    Args:
        prefill, decode: endpoints whose engines have the connectors of `connectors`. Prefill engines record in
            `PrefillTimings`.
        routings: the rules that choose a prefill and a decode endpoint.
    """

    def __init__(
        self,
        prefill: Sequence[Endpoint],
        decode: Sequence[Endpoint],
        connectors: Connectors,
        routings: tuple[Routing, Routing],
    ) -> None:
        super().__init__([*prefill, *decode])
        self.now = 0.0
        self._prefill_router, self._decode_router = (
            Router(members, routing) for members, routing in zip((prefill, decode), routings, strict=True)
        )
        self._num_prefill = len(prefill)
        self._held, self._links = connectors.held, connectors.links
        self._in_prefill: dict[int, SimRequest] = {}  # by number: requests that a prefill engine has
        self._ids: dict[int, str] = {}  # by number: requests that a decode engine has
        self._first: int | None = None  # the member whose event ends first; None: a transfer ends first

    @property
    def totals(self) -> TransferTotals:
        """The transfers so far."""
        return self._links.totals

    @property
    def is_between_events(self) -> bool:
        return all(member.is_between_events for member in self.members)

    def add(self, number: int, request: SimRequest, now: float) -> None:
        self._in_prefill[number] = request
        self._prefill_router.add(number, replace(request, num_output_tokens=1, max_tokens=1), now)
        self._note_refused()

    def plan_event(self, until: float = math.inf) -> float | None:
        self._first, first = None, math.inf
        for index, member in enumerate(self.members):
            end = member.plan_event()
            if end is not None and end < first:
                self._first, first = index, end
        if self._links.next_end <= first:  # planning a step may have begun transfers
            self._first, first = None, self._links.next_end
        return first if first < math.inf else None

    def commit_event(self) -> list[int]:
        if self._first is None:
            self.now = self._links.next_end
            self._links.end_next()
            return []
        index = self._first
        member = self.members[index]
        finished = member.commit_event()
        self.now = member.now
        if index >= self._num_prefill:
            self._decode_router.observe(member)
            for number in finished:
                del self._ids[number]
        else:
            self._prefill_router.observe(member)
            for number in finished:
                self._hand_over(number, self.now)
            finished = []
        self._note_refused()
        return finished

    def _hand_over(self, number: int, now: float) -> None:
        """Send a request whose prompt is computed to a decode engine."""
        request = self._in_prefill.pop(number)
        if request.request_id not in self._held:
            self._links.note_untransferred()
        self._ids[number] = request.request_id
        self._decode_router.add(number, request, now)

    def _note_refused(self) -> None:
        """Forget requests that an engine has refused."""
        for number, _ in self.refused:
            self._in_prefill.pop(number, None)
            name = self._ids.pop(number, None)
            if name is not None and (held := self._held.pop(name, None)) is not None:
                self._links.release(held, self.now)
