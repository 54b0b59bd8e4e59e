"""Which request is preempted when blocks run out? Asked by `step/running.py`, whenever a running request lacks some.

The other causes (`PreemptionCause`) do not ask here: a more urgent waiting request displaces less urgent ones
(`step/priority_preemption.py`), a host parks the one that it names or has no token for it, and a reset preempts all.

The request loses its blocks and keeps its tokens. When it is admitted again it recomputes them, except those that the
prefix cache still holds, or, with `preemption_mode`, loads what it has swapped (`swap.py`).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT


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


class LeastCost(Policy):
    """The request that recomputes the fewest tokens among those whose blocks suffice for the rows that lack some.

    Without a prefix cache a victim recomputes all its computed tokens, 16 of them for each of its blocks of 16, so that
    blocks cost the same from whomever they come. Waste is what a victim frees and no row needs: its own blocks lie idle
    until it resumes, and it pays for all of them. So the smallest one that frees what is missing gives way.

    With a prefix cache its full blocks stay cached, and running rows take them one by one, from its end, until a
    request finishes and it resumes from the front of the queue. What they take until then does not depend on the
    victim, so neither does what is recomputed: no choice is cheaper than the request admitted last, among those that
    free what is missing by blocks that nobody shares and that do not opt out of the cache.

    Of use without a prefix cache where a request holds more than all grow by until the next one finishes (chats). Where
    outputs are long, a request is used up either way and "latest" is as good; a reserve ("growth") helps more.

    Bound: a request that was preempted `max_preemptions` times, for whatever cause, is exempt while another one runs
    that was not. If all were, the one admitted last gives way, so that the first one runs to its end, as under
    "latest". It does not read priorities.
    """

    kind = "victim"
    name = "least-cost"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("max_preemptions", 16, 1, MAX_INT, tried=(4, 16, 64), doc="after which a request is exempt"),
    )

    def __init__(self, max_preemptions: int = 16) -> None:
        self._max_preemptions = max_preemptions

    def guaranteed_steps(self, num_steps: int) -> int:
        """It is asked only where blocks run out."""
        return num_steps

    def choose(self, view: View, asking: int) -> int:
        may = (view.num_preemptions < self._max_preemptions).nonzero()[0]
        if not len(may):
            return len(view.rows) - 1
        if view.has_prefix_cache:
            return self._latest_that_suffices(view, may)
        frees = view.num_blocks[may]
        enough = (frees >= min(view.num_missing_blocks, int(frees.max()))).nonzero()[0]
        may = may[enough][::-1]  # of equals the one admitted last
        return int(may[view.num_computed_tokens[may].argmin()])

    def _latest_that_suffices(self, view: View, may: npt.NDArray[np.int64]) -> int:
        """Or else the one that frees most; those that will not find their blocks again only if there is no other."""
        requests, missing = view.requests, view.num_missing_blocks
        best, most = -1, -1
        for place in range(len(may) - 1, -1, -1):  # most often the first one suffices
            index = may.item(place)
            if not requests[index].reads_prefix_cache:
                continue
            frees = view.own_blocks(index)
            if frees >= missing:
                return index
            if frees > most:
                best, most = index, frees
        return best if best >= 0 else may.item(len(may) - 1)


VICTIMS: dict[str, type[Latest] | type[LowestPriority] | type[LeastCost]] = {
    victim.name: victim for victim in (Latest, LowestPriority, LeastCost)
}


def default_victim(order_name: str) -> str:
    """The victim policy where the configuration names none."""
    return "lowest-priority" if order_name.startswith("priority") else "latest"
