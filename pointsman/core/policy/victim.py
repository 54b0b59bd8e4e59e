"""Which request is preempted when blocks run out?

The other causes (`PreemptionCause`) do not ask here: a more urgent waiting request displaces less urgent ones
(`step/displacement.py`), a host parks the one that it names, and a reset preempts all.

Preemption is by recompute: the request loses its blocks, keeps its tokens, and recomputes them when it is admitted
again, except those that the prefix cache still holds.
"""

from __future__ import annotations

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Victim


class Latest:
    """The request admitted last (nano-vLLM's, miniVLLM's and, under "fcfs", vLLM's choice): it has the least
    seniority."""

    name = "latest"

    def choose(self, batch: Batch, asking_row: int) -> int:
        return int(batch.members.rows[-1])


class LowestPriority:
    """The least urgent request; among equals the one that arrived last (vLLM's choice under "priority")."""

    name = "lowest-priority"

    def choose(self, batch: Batch, asking_row: int) -> int:
        members = batch.members
        priority = batch.priority[members.rows]
        least_urgent = (priority == priority.max()).nonzero()[0].tolist()
        last = max(
            least_urgent,
            key=lambda index: (members.requests[index].arrival_time, members.requests[index].sequence_number),
        )
        return int(members.rows[last])


VICTIMS: dict[str, type[Latest] | type[LowestPriority]] = {victim.name: victim for victim in (Latest, LowestPriority)}


def make_victim(config: SchedulerConfig, order_name: str) -> Victim:
    """The victim policy that the configuration names, or its default under an order.

    Raises:
        ConfigError: no policy has that name.
    """
    victim = config.victim
    if victim is None:
        victim = "lowest-priority" if order_name.startswith("priority") else "latest"
    if not isinstance(victim, str):
        if not hasattr(victim, "choose"):
            raise ConfigError(f"victim is {victim!r}, neither a name nor an object with the Victim protocol")
        return victim
    if victim not in VICTIMS:
        raise ConfigError(
            f"no victim policy is called {victim!r}; choose one of {', '.join(VICTIMS)}, or pass an object"
        )
    return VICTIMS[victim]()
