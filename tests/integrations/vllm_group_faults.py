"""KV in one group or in several under faults: a script for the environment with vLLM.

    python vllm_group_faults.py FIRST COUNT   prints one JSON line: counts of events

Our scheduler alone, on random workloads and layouts: a policy raises in the middle of a step, the prefix cache is reset
while requests run, requests are aborted. After each call all invariants are checked, and in each step that every row
reads its own KV. In the end no block is held.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

from vllm.v1.core.kv_cache_utils import init_none_hash

from pointsman.core.policy.gate import Limit
from pointsman.integrations.vllm import Scheduler
from tests.integrations.vllm_decisions import HASH, MAX_STEPS, Settings, Side, build_config, configured, make_workload


class Faulty(Limit):
    """A policy that raises at random: when a request is about to be admitted, and when rows advance."""

    name = "faulty"
    parameters = ()

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_raised = 0

    def _may_raise(self, share: float) -> None:
        if self._rng.random() < share:
            self.num_raised += 1
            raise ValueError("by chance")

    def clip(self, batch: Any, rows: Any, want: Any) -> None:
        self._may_raise(0.03)

    def check(self, request: Any, start: int, want: int, view: Any) -> int:
        self._may_raise(0.06)
        return want


def drive(base: Any, seed: int, tally: Counter[str]) -> None:
    workload, rng = make_workload(seed, "groups" if seed % 3 > 0 else ""), random.Random(seed)
    faulty = Faulty(rng)
    config = configured(base, workload)
    limits: list[Any] = [faulty]
    if workload.scheduler["enable_chunked_prefill"] and rng.random() < 0.4:  # fewer tokens than a block has
        limits.append(f"prefill-threshold:tokens={rng.randrange(1, workload.block_size + 1)}")
    config.additional_config = {"pointsman": {"token_limits": limits, "max_policy_failures": 1000}}
    side = Side(workload, config, Scheduler)
    side.runner.block_size = 0  # rows keep their blocks of a failed step, so some have more than they need
    arrivals = dict(workload.arrivals)
    for step in range(MAX_STEPS):
        for request in arrivals.pop(step, ()):
            side.add(request)
        if not arrivals and not side.scheduler.has_requests():
            break
        if rng.random() < 0.05:
            tally["resets"] += 1
            side.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.3)
            side.scheduler.core.check_invariants()
        if rng.random() < 0.02 and side.scheduler.requests:
            tally["aborts"] += 1
            side.abort([rng.choice(list(side.scheduler.requests))])
        decided = side.schedule()
        tally["preemptions"] += len(decided["preempted"])
        tally["hits"] += sum(start > 0 for name, start in decided["starts"].items() if name in decided["new"])
        if len(side.in_flight) > workload.asynchronous or not decided["tokens"]:
            side.update()
            side.scheduler.core.check_invariants()
    else:
        raise AssertionError(f"seed {seed} does not end")
    tally["steps"] += step
    tally["raised"] += faulty.num_raised
    assert side.scheduler.get_kv_cache_usage() == 0, "blocks are held, and nothing runs"
    side.close()


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    init_none_hash(HASH)
    base = build_config(Settings(num_blocks=100, max_model_len=1 << 12, max_num_seqs=8, max_num_batched_tokens=1 << 12))
    tally: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            drive(base, seed, tally)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, {make_workload(seed, 'groups' if seed % 3 > 0 else '').layout}"
            ) from error
    print(json.dumps(tally))


if __name__ == "__main__":
    main()
