"""Victim policies: choose the request that is preempted when blocks run out.

`step/running.py` calls the policy whenever a running request lacks blocks. Preemptions for other causes
(`PreemptionCause`) do not call it: priority preemption (`step/priority_preemption.py`), a host that parks a request or
has no token for it, and a reset.

The victim loses its blocks and keeps its tokens. When it is admitted again, it recomputes all tokens that are no longer
in the prefix cache, or loads the tokens that it swapped (`preemption_mode`, `swap.py`).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT


class Latest(Policy):
    """The request admitted last (the choice of nano-vLLM, miniVLLM and, under "fcfs", vLLM)."""

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
        candidates: list[int] = (priority == priority.max()).nonzero()[0].tolist()
        return max(candidates, key=lambda index: (requests[index].arrival_time, requests[index].sequence_number))


class LeastCost(Policy):
    """The request that recomputes the fewest tokens, among those that free enough blocks.

    Without a prefix cache a victim recomputes all its computed tokens, so a freed block costs the same number of tokens
    for every victim. Freed blocks that no row needs are waste: they are idle until the victim resumes, and the victim
    recomputes their tokens, too. So the smallest request that frees enough blocks is preempted.

    With a prefix cache the full blocks of a victim stay cached. Running rows take these blocks one by one, from the
    last one on, until a request finishes and the victim resumes from the front of the queue. The number of blocks
    taken, and so the recompute, does not depend on the victim: no choice is cheaper than the request admitted last.
    Only requests that use the cache, and free enough blocks that no other request shares, are considered.

    Use it without a prefix cache, where a request holds more blocks than all running requests will need until the next
    request finishes (chats). With long outputs every victim loses all its blocks, and "latest" is as good; a reserve
    ("growth") helps more.

    Bound: a request that was preempted `max_preemptions` times, for whatever cause, is exempt while a request runs that
    was preempted less often. If all running requests were preempted that often, the request admitted last is preempted,
    so that the first one runs to its end, as under "latest". This policy does not read priorities.
    """

    kind = "victim"
    name = "least-cost"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("max_preemptions", 16, 1, MAX_INT, tried=(4, 16, 64), doc="after which a request is exempt"),
    )

    def __init__(self, max_preemptions: int = 16) -> None:
        self._max_preemptions = max_preemptions

    def guaranteed_steps(self, num_steps: int) -> int:
        """All `num_steps`, as a victim policy is called only when blocks run out."""
        return num_steps

    def choose(self, view: View, asking: int) -> int:
        candidates = (view.num_preemptions < self._max_preemptions).nonzero()[0]
        if not len(candidates):
            return len(view.rows) - 1
        if view.has_prefix_cache:
            return self._latest_that_frees_enough(view, candidates)
        frees = view.num_blocks[candidates]
        enough = (frees >= min(view.num_missing_blocks, int(frees.max()))).nonzero()[0]
        candidates = candidates[enough][::-1]  # among equals, the request admitted last
        return int(candidates[view.num_computed_tokens[candidates].argmin()])

    def _latest_that_frees_enough(self, view: View, candidates: npt.NDArray[np.int64]) -> int:
        """Index of the last admitted request among the indices `candidates` that frees enough blocks; if none does, of
        the request that frees most blocks. A request that does not use the prefix cache is chosen only if no
        candidate uses it."""
        requests, missing = view.requests, view.num_missing_blocks
        best, most = -1, -1
        for place in range(len(candidates) - 1, -1, -1):  # usually the first candidate suffices
            index = candidates.item(place)
            if not requests[index].reads_prefix_cache:
                continue
            frees = view.own_blocks(index)
            if frees >= missing:
                return index
            if frees > most:
                best, most = index, frees
        return best if best >= 0 else candidates.item(len(candidates) - 1)


VICTIMS: dict[str, type[Latest] | type[LowestPriority] | type[LeastCost]] = {
    victim.name: victim for victim in (Latest, LowestPriority, LeastCost)
}


def default_victim(order_name: str) -> str:
    """Name of the victim policy for an order, where the configuration names no victim policy."""
    return "lowest-priority" if order_name.startswith("priority") else "latest"
