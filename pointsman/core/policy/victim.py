"""Which request is preempted when blocks run out?

The other causes (`PreemptionCause`) do not ask here: a more urgent waiting request displaces less urgent ones
(`step/displacement.py`), a host parks the one that it names, and a reset preempts all.

Preemption is by recompute: the request loses its blocks, keeps its tokens, and recomputes them when it is admitted
again, except those that the prefix cache still holds.
"""

from __future__ import annotations

from pointsman.core.policy.policy import Policy
from pointsman.core.state.interfaces import View


class Latest(Policy):
    """The request admitted last (nano-vLLM's, miniVLLM's and, under "fcfs", vLLM's choice): it has the least
    seniority."""

    kind = "victim"
    name = "latest"

    def choose(self, view: View, asking: int) -> int:
        return len(view.rows) - 1


class LowestPriority(Policy):
    """The least urgent request; among equals the one that arrived last (vLLM's choice under "priority")."""

    kind = "victim"
    name = "lowest-priority"
    reads = frozenset({"priority"})

    def choose(self, view: View, asking: int) -> int:
        priority, requests = view.priority, view.requests
        least_urgent: list[int] = (priority == priority.max()).nonzero()[0].tolist()
        return max(least_urgent, key=lambda index: (requests[index].arrival_time, requests[index].sequence_number))


VICTIMS: dict[str, type[Latest] | type[LowestPriority]] = {victim.name: victim for victim in (Latest, LowestPriority)}


def default_victim(order_name: str) -> str:
    """The victim policy where the configuration names none."""
    return "lowest-priority" if order_name.startswith("priority") else "latest"
