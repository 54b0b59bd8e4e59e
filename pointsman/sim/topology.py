"""Topology: the engines of a replica, and how they serve a request together.

one engine           the default
data parallel        several engines (ranks). They step together if the model is a mixture of experts.
prefill and decode   engines that compute prompts, and engines that decode; each may consist of data parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.core import SchedulerConfig
from pointsman.sim.disaggregation import Connectors, KvTransfer, PrefillDecode, PrefillTimings
from pointsman.sim.endpoint import Endpoint, Pool
from pointsman.sim.errors import SimulationError
from pointsman.sim.features import Features
from pointsman.sim.fleet import RoundRobin, Routing, VllmRouting
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.lockstep import Lockstep
from pointsman.sim.outcome import Timings
from pointsman.sim.replica import Replica, TransferConnector
from pointsman.sim.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The engines of a replica.

    Raises:
        SimulationError: a number is out of range, or only one of prefill and decode engines is given.
    """

    data_parallel_size: int = 1
    """Number of ranks behind one API server, each with its own scheduler and pool. Ranks get requests by vLLM's rule
    (`VllmRouting`)."""
    is_lockstep: bool = False
    """Whether the ranks step together, as those of a mixture of experts."""
    prefill_replicas: int = 0
    """Number of engines, or groups of ranks, that compute prompts alone; 0: every engine does both."""
    decode_replicas: int = 0
    transfer: KvTransfer | None = None
    """The links from prefill to decode engines."""
    role_routing: Callable[[], Routing] = RoundRobin
    """Makes the rules that choose a prefill and a decode engine; vLLM's proxies take each in turn."""

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise SimulationError(f"data_parallel_size is {self.data_parallel_size}; it must be at least 1")
        numbers = self.prefill_replicas, self.decode_replicas
        if min(numbers) < 0 or (max(numbers) > 0) != (min(numbers) > 0):
            raise SimulationError(
                f"prefill_replicas is {self.prefill_replicas} and decode_replicas is {self.decode_replicas}; give "
                "both, each at least 1, or neither"
            )
        if self.is_disaggregated != (self.transfer is not None):
            raise SimulationError(
                f"prefill_replicas is {self.prefill_replicas}, and transfer is {self.transfer}; give both or neither"
            )

    def check(self, config: SchedulerConfig, host_memory: HostMemory | None) -> None:
        """Check that engines with this configuration and host memory can transfer KV, if they are to.

        Raises:
            SimulationError: they cannot.
        """
        if self.transfer is None:
            return
        self.transfer.check(config)
        if host_memory is not None:
            raise SimulationError(
                f"kv_offload_bytes is {host_memory.num_bytes}, and prefill_replicas is {self.prefill_replicas}; "
                "engines that transfer KV are simulated without host memory: remove one of them"
            )

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed on other engines than outputs."""
        return self.prefill_replicas > 0

    @property
    def num_engines(self) -> int:
        """Number of schedulers of a replica."""
        return self.data_parallel_size * (self.prefill_replicas + self.decode_replicas or 1)


ONE_ENGINE = Topology()


class EndpointMaker:
    """Makes the replicas of a simulation.

    Args:
        topology: the engines of a replica.
        config: configuration of each engine's scheduler.
        step_time: step times of each engine.
        timings: receives the times of requests.
        is_stepping: schedule every step separately.
        seed: seed of the prompts' tokens.
        host_memory: host memory behind each engine's pool.
        features: drafts of each engine, and the cost of its adapters.
        num_replicas: number of replicas that will be made; determines the engines' names.

    Raises:
        SimulationError: see `Topology.check`.
    """

    def __init__(
        self,
        topology: Topology,
        config: SchedulerConfig,
        step_time: StepTime,
        timings: Timings,
        *,
        is_stepping: bool,
        seed: int,
        host_memory: HostMemory | None,
        features: Features,
        num_replicas: int,
    ) -> None:
        topology.check(config, host_memory)
        self._topology, self._config, self._step_time, self._timings = topology, config, step_time, timings
        self._is_stepping, self._seed, self._host_memory = is_stepping, seed, host_memory
        self._features = features
        self.names: list[str] = []
        """Name of each engine so far; empty if each replica is one engine."""
        self.transfers: list[PrefillDecode] = []
        """The replicas so far with prefill and decode engines."""
        self._has_names = topology.num_engines > 1
        self._places = [""] if num_replicas == 1 else [f"replica {index}, " for index in range(num_replicas)]
        self._num_engines = 0

    def make(self) -> Endpoint:
        """Make a replica."""
        topology, place = self._topology, self._places.pop(0)
        if topology.transfer is None:
            return self._make_ranks(place, self._timings, None)
        connectors = Connectors(topology.transfer, self._config)
        prefill = [
            self._make_ranks(f"{place}prefill {index}, ", PrefillTimings(self._timings), connectors.sender)
            for index in range(topology.prefill_replicas)
        ]
        decode = [
            self._make_ranks(f"{place}decode {index}, ", self._timings, connectors.receiver)
            for index in range(topology.decode_replicas)
        ]
        made = PrefillDecode(prefill, decode, connectors, (topology.role_routing(), topology.role_routing()))
        self.transfers.append(made)
        return made

    def _make_ranks(
        self, place: str, timings: Timings | PrefillTimings, connector: Callable[[], TransferConnector] | None
    ) -> Endpoint:
        """Make one engine, or the ranks that stand for one. `place`: the begin of their names."""
        number = self._topology.data_parallel_size
        ranks = [self._make_engine(timings, connector) for _ in range(number)]
        if number == 1:
            if self._has_names:
                self.names.append(place.removesuffix(", "))
            return ranks[0]
        self.names += [f"{place}rank {index}" for index in range(number)]
        if self._topology.is_lockstep:
            return Lockstep(ranks, self._step_time, VllmRouting(), is_stepping=self._is_stepping)
        return Pool(ranks, VllmRouting())

    def _make_engine(
        self, timings: Timings | PrefillTimings, connector: Callable[[], TransferConnector] | None
    ) -> Replica:
        transfers = None if connector is None else connector()
        engine = Replica(
            self._config,
            self._step_time,
            timings,
            index=self._num_engines,
            is_stepping=self._is_stepping,
            seed=self._seed,
            host_memory=self._host_memory,
            features=self._features,
            transfers=transfers,
        )
        if transfers is not None:
            transfers.engine = engine
        self._num_engines += 1
        return engine
