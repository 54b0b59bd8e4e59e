"""Random workloads through vLLM's own scheduler, observed and not: a script for the environment with vLLM.

    python vllm_observed.py FIRST COUNT FOLDER   prints one JSON line: counts of events, and the differences

(with the root of the repository and its benchmarks in PYTHONPATH).

The workloads and the stand-in for the model runner are those of `vllm_decisions.py`. Every decision must be equal,
including blocks, and so must the outputs for clients. Then each recording is compared with the actual events.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from _scheduler_worker import Settings
from _vllm_worker import build_config
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler

from pointsman.core.recording import NUM_ADAPTERS
from pointsman.integrations.vllm import Observer
from pointsman.sim.errors import SimulationError
from pointsman.sim.observed import replayed
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime, StepLoad
from pointsman.sim.workload import OpenLoop
from pointsman.traces import Observed, read_observed
from tests.integrations.vllm_decisions import HASH, Side, Workload, configured, make_workload, own_class, run_both

STEP_TIME = LinearStepTime(per_step=1e-3, per_token=1e-5)


class TruthSide(Side):
    """A side that keeps its actual events."""

    def __init__(self, workload: Workload, config: Any, scheduler_class: type) -> None:
        super().__init__(workload, config, scheduler_class)
        self.prompts: dict[str, list[int]] = {}
        self.adapters: dict[str, int] = {}
        self.loads: list[StepLoad] = []
        self.step_adapters: list[int] = []
        """Number of different adapters in each step."""
        self.drafts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """(verified, accepted) drafts of each decode step of a request, without the first one after an admission."""
        self.num_tokens: Counter[str] = Counter()
        self._decoding: set[str] = set()
        """Requests that got a token in the step before."""
        self._decodes: list[dict[str, tuple[int, int]]] = []
        self.token_steps: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self._indices: list[int | None] = []

    def add(self, request: dict[str, Any]) -> None:
        super().add(request)
        self.prompts[request["id"]] = request["prompt"]
        self.adapters[request["id"]] = request["lora"]

    def schedule(self, throttle_prefills: bool = False) -> dict[str, Any]:
        found = super().schedule(throttle_prefills)
        output, result = self.in_flight[-1]
        cached = output.scheduled_cached_reqs
        found["blocks"] = [[new.req_id, new.block_ids] for new in output.scheduled_new_reqs]
        found["new blocks"] = [[name, ids] for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)]
        if found["tokens"]:
            rows = [(found["starts"][name], count) for name, count in found["tokens"].items()]
            drafts = output.scheduled_spec_decode_tokens
            num_samples = sum(map(bool, result.sampled_token_ids)) + sum(map(len, drafts.values()))
            self.loads.append(StepLoad.of_rows(rows, num_samples))
            self.step_adapters.append(len({self.adapters[name] for name in found["tokens"]} - {0}))
            places, sampled = result.req_id_to_index, result.sampled_token_ids
            decodes = {name: (len(drafts.get(name, ())), len(sampled[places[name]]) - 1) for name in found["tokens"]}
            sampling = {name for name, (_, accepted) in decodes.items() if accepted >= 0}
            self._decodes.append({name: each for name, each in decodes.items() if name in sampling & self._decoding})
            self._decoding = sampling
        else:
            self._decodes.append({})
        self._indices.append(len(self.loads) - 1 if found["tokens"] else None)
        return found

    def update(self) -> dict[str, Any]:
        step, decodes = self._indices.pop(0), self._decodes.pop(0)
        for name, drafts in decodes.items():
            if self.has(name):
                self.drafts[name].append(drafts)
        told = super().update()
        for name, what in told.items():
            if name == "its loggers":
                continue
            if what[0]:
                assert step is not None
                self.token_steps[name].append(step)
                self.num_tokens[name] += len(what[0])
            if what[1] is not None:
                self.ends[name] = what[1]
        return told


def check_recording(observed: Observed, side: TruthSide, workload: Workload, tally: Counter[str]) -> None:
    """Check that a recording agrees with the events."""
    names = list(side.prompts)
    assert [request.request_id for request in observed.requests] == [f"r{number}" for number in range(len(names))]
    steps = observed.steps
    recorded = [StepLoad(*(int(steps[part][at]) for part in StepLoad._fields)) for at in range(len(side.loads))]
    assert recorded == side.loads, next((a, b) for a, b in zip(recorded, side.loads, strict=True) if a != b)
    if workload.max_loras:
        assert steps[NUM_ADAPTERS].tolist() == side.step_adapters
    assert (observed.seconds > 0).all() and len(observed.seconds) == len(side.loads)
    for name, request in zip(names, observed.requests, strict=True):
        assert request.num_prompt_tokens == len(side.prompts[name])
        token_steps = [step for first, last in request.runs for step in range(first, last + 1)]
        assert token_steps == side.token_steps[name], (name, request.runs, side.token_steps[name])
        assert request.num_output_tokens == side.num_tokens[name]
        drafts = [(verified, accepted) for verified, accepted, count in request.drafts for _ in range(count)]
        assert drafts == (side.drafts[name] if workload.num_drafts else []), (name, drafts, side.drafts[name])
        tally["accepted drafts"] += sum(accepted for _, accepted in drafts)
        tally["rejected drafts"] += sum(verified - accepted for verified, accepted in drafts)
        tally["with adapters"] += request.adapter is not None
        assert request.reason is not None
        assert request.reason.value == side.ends.get(name, "abort"), name
        tally["requests"] += 1
        tally["with several runs"] += len(request.runs) > 1
        tally["preempted"] += request.num_preemptions > 0
        tally["cached"] += request.num_cached_tokens > 0
    numbers = {side.adapters[name]: request.adapter for name, request in zip(names, observed.requests, strict=True)}
    assert len(set(numbers.values())) == len(numbers) and numbers.get(0) is None
    assert [side.adapters[name] for name in names] == [
        next(adapter for adapter, number in numbers.items() if number == request.adapter)
        for request in observed.requests
    ]
    if not workload.caches:
        assert all(request.block_hash_ids is None for request in observed.requests)
        return
    content: dict[int, tuple[Any, ...]] = {}
    ids: dict[tuple[Any, ...], int] = {}
    for name, request in zip(names, observed.requests, strict=True):
        prompt, size = side.prompts[name], side.hash_size
        assert request.block_hash_ids is not None and len(request.block_hash_ids) == len(prompt) // size
        for at, number in enumerate(request.block_hash_ids, start=1):
            before = side.adapters[name], tuple(prompt[: at * size])
            assert content.setdefault(number, before) == before, "equal ids, other content"
            assert ids.setdefault(before, number) == number, "equal content, other ids"
            tally["shared blocks"] += 1


def compare(base: Any, workload: Workload, folder: Path, tally: Counter[str]) -> dict[str, Any] | None:
    """The first difference, or None."""
    path = folder / f"{workload.seed}.jsonl"
    config = configured(base, workload)
    seen = copy.copy(config)
    seen.additional_config = {"pointsman": {"record": str(path)}}
    sides = TruthSide(workload, config, own_class(workload)), TruthSide(workload, seen, Observer)
    observed = sides[1].scheduler
    assert isinstance(observed, AsyncScheduler if workload.asynchronous else OwnScheduler)
    try:
        found = run_both(sides, workload, tally)
    finally:
        for side in sides:
            side.scheduler.shutdown()
    if found is None:
        text = path.read_text()
        assert not any(name in text for name in ("lora1", "/nowhere"))
        recorded = read_observed(path)
        check_recording(recorded, sides[1], workload, tally)
        if workload.layout:
            check_groups(recorded, workload)
            tally["with groups"] += 1
        if not recorded.lacking and any(request.runs and request.reason for request in recorded.requests):
            check_simulated(recorded, tally)
    return found


def check_simulated(observed: Observed, tally: Counter[str]) -> None:
    """The recorded requests can be simulated, with the recording's drafts and adapters, to their last tokens."""
    happened = replayed(observed, "recording")
    outcome = simulate(OpenLoop(happened.trace), happened.config, STEP_TIME, features=happened.features)
    assert not outcome.refused, outcome.refused[:1]
    assert outcome.timings.num_output_tokens.sum() == sum(each.num_output_tokens for each in happened.trace)
    tally["simulated"] += 1


def check_groups(observed: Observed, workload: Workload) -> None:
    """The recording has the groups of this layout, or names it as lacking in the simulator."""
    groups = observed.config.get("kv_groups")
    if groups and len(groups) == len(workload.layout):
        assert [kind for kind, _ in groups] == [kind for kind, _, _ in workload.layout]
        assert not observed.lacking
        return
    kinds = {
        "full": "FullAttentionSpec",
        "window": "SlidingWindowSpec",
        "chunk": "ChunkedLocalAttentionSpec",
        "prompt and window": "RSWASpec",
        "ring": "CircularBufferSpec",
    }
    names = [kinds.get(kind, "MambaSpec") for kind, _, _ in workload.layout]
    lacks = f"{len(names)} KV groups ({', '.join(names)})" if len(names) > 1 else f"KV of the kind {names[0]}"
    assert any(each.startswith(lacks) for each in observed.lacking), observed.lacking
    try:
        replayed(observed, "recording")
    except SimulationError as error:
        assert lacks in str(error) and "which the simulator does not support" in str(error)
    else:
        raise AssertionError("the simulator takes a layout that it lacks")


def main() -> None:
    first, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    init_none_hash(HASH)
    base = build_config(Settings(num_blocks=100, max_model_len=1 << 12, max_num_seqs=8, max_num_batched_tokens=1 << 12))
    tally: Counter[str] = Counter()
    differences = []
    for seed in range(first, first + count):
        workload = make_workload(seed, "groups" if seed % 3 == 2 else "")
        try:
            found = compare(base, workload, folder, tally)
        except Exception as error:
            found = {"what": [f"{type(error).__name__}: {error}"]}
            if count == 1:
                raise
        tally["asynchronous"] += workload.asynchronous
        if found is not None:
            differences.append({"seed": seed, **found})
    print(json.dumps({"tally": tally, "differences": differences}))


if __name__ == "__main__":
    main()
