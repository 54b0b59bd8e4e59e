"""Presets named after other schedulers decide as these do: step by step, against their specifications. The long form
compares many more workloads.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    FinishReason,
    Recorder,
    Request,
    RequestRefused,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    StepResult,
    replay,
)
from pointsman.core.policy.registry import make
from pointsman.core.presets import SYSTEMS
from tests.forms import seeds, short_or_long

from .helpers import Host, cached_of, names, next_token, tokens_of
from .specifications.original_caches import OriginalMiniVllm, OriginalNanoVllm, OriginalNanoVllmChunked
from .specifications.sequences import Decision, Sequence, Settings, Specification
from .specifications.textbook import Textbook
from .specifications.two_phases import (
    MiniVllm,
    MiniVllmAsListed,
    MiniVllmNewest,
    NanoVllm,
    NanoVllmChunked,
)
from .specifications.vllm import Vllm, Vllm032

WORKLOADS = seeds(25, 200)
NUM_WITH_ORIGINAL_CACHE = short_or_long(20, 600)
NUM_TOKENS = 5  # size of the vocabulary: so small that unrelated requests share cached prefixes

SPECIFICATIONS: dict[str, type[Specification]] = {
    "nano-vllm": NanoVllm,
    "nano-vllm-chunked": NanoVllmChunked,
    "minivllm": MiniVllm,
    "minivllm, newest": MiniVllmNewest,
    "textbook": Textbook,
    "vllm": Vllm,
    "vllm, priority": Vllm,
    "vllm-0.32": Vllm032,
    "vllm-0.32, priority": Vllm032,
}
ORIGINALS: dict[str, type[Specification]] = {
    "nano-vllm, own cache": OriginalNanoVllm,
    "nano-vllm-chunked, own cache": OriginalNanoVllmChunked,
    "minivllm, own cache": OriginalMiniVllm,
}
"""By name of the preset; after a comma, the original or the original's policy."""


@dataclass
class Tally:
    """Counts of events in the workloads of a preset, to prove that the comparison covers them."""

    steps: int = 0
    preemptions: int = 0
    hits: int = 0
    chunks: int = 0
    steps_without_decode: int = 0
    """Steps for prompts while other requests could have decoded."""
    waiting: int = 0
    other_hits: int = 0
    """Steps in which the original finds more or fewer cached tokens."""


@dataclass
class Workload:
    """A configuration, and requests, each with the step before which it arrives."""

    settings: Settings
    overrides: dict[str, Any]
    arrivals: list[tuple[int, Sequence, dict[str, Any]]] = field(default_factory=list)


def make_workload(name: str, seed: int) -> Workload:
    """Random, with a small pool, small budgets and prompts that share documents (not for "minivllm, newest")."""
    random_ = random.Random(f"{name} {seed}")
    system, by_priority = name.partition(",")[0], name.endswith(", priority")
    size, num_blocks = random_.randint(2, 4), random_.randint(5, 16)
    max_model_len = random_.randint(24, 60)
    overrides: dict[str, Any] = {"num_blocks": num_blocks, "block_size": size, "max_model_len": max_model_len}
    settings = Settings(num_blocks, size, by_priority=by_priority)
    longest = min(max_model_len - 1, num_blocks * size)
    if system == "textbook":
        settings.decode_reserve = overrides["decode_reserve"] = random_.choice((0, 1, 3, 6, 128))
    else:
        settings.max_num_seqs = overrides["max_num_seqs"] = random_.randint(1, 5)
        least = 1 if system == "minivllm" else settings.max_num_seqs
        settings.max_num_batched_tokens = overrides["max_num_batched_tokens"] = least + random_.randint(0, 24)
    if by_priority:
        overrides["order"] = "priority-by-arrival"
    if name == "minivllm, newest":
        overrides["shortage"] = "in-order"
    if system in ("nano-vllm", "minivllm"):
        longest = min(longest, settings.max_num_batched_tokens)
    workload = Workload(settings, overrides)
    documents = [[random_.randrange(NUM_TOKENS) for _ in range(30)] for _ in range(2)]
    for index in range(random_.randint(4, 14)):
        prompt = random_.choice(documents)[: random_.randint(0, 24)]
        prompt = [*prompt, *(random_.randrange(NUM_TOKENS) for _ in range(random_.randint(1, 6)))][:longest]
        if name == "minivllm, newest":
            prompt[0] = NUM_TOKENS + index  # no prefix is shared: there the preset differs from it
        max_tokens, total = random_.randint(1, 20), None
        if system == "minivllm" and random_.random() < 0.5:
            total = len(prompt) + random_.randint(1, 12)
        if name in ORIGINALS and system != "nano-vllm-chunked":
            # No request outgrows the budget: its number of chunks would then depend on the cached blocks.
            total = min(total or max_model_len, settings.max_num_batched_tokens + 1)
        bounds = [len(prompt) + max_tokens, max_model_len, num_blocks * size + 1, *([total] if total else [])]
        priority = random_.randint(0, 2) if by_priority else 0
        sequence = Sequence(f"r{index}", prompt, min(bounds), index, priority)
        fields = {"max_tokens": max_tokens, "max_total_tokens": total, "priority": priority}
        workload.arrivals.append((random_.randint(0, 12), sequence, fields))
    workload.arrivals.sort(key=lambda arrival: arrival[0])
    for index, (_, sequence, _) in enumerate(workload.arrivals):
        sequence.arrival = index
    return workload


def compare(name: str, seed: int, tally: Tally) -> None:
    """Run one workload in both; every decision must be equal, and so must every finish.

    Against a specification with a cache of its own, the requests of each step are compared, but not their numbers of
    cached tokens.
    """
    workload = make_workload(name, seed)
    scheduler = Scheduler(SchedulerConfig.preset(name.partition(",")[0], **workload.overrides))
    specification = (SPECIFICATIONS | ORIGINALS)[name](workload.settings)
    arrivals = list(workload.arrivals)
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            _, sequence, fields = arrivals.pop(0)
            specification.add(sequence)
            scheduler.add(Request(sequence.name, sequence.prompt, arrival_time=sequence.arrival, **fields), float(step))
        if not scheduler.has_unfinished_requests() and not arrivals:
            break
        decoding = sum(not sequence.is_cut for sequence in specification.running)
        output, expected = scheduler.schedule(float(step)), specification.schedule()
        cached = dict(zip(names(output.admitted), output.num_cached_tokens.tolist(), strict=True))
        decided = Decision(tokens_of(output), names(output.preempted), cached)
        where = f"{name}, workload {seed}, step {step}"
        if name in ORIGINALS:
            assert decided.preempted == expected.preempted, where
            assert list(cached) == list(expected.cached), where
            tally.other_hits += cached != expected.cached
        else:
            assert decided == expected, where
        assert list(decided.tokens) == list(expected.tokens), f"{where}: the order"
        sampled = {s.name: next_token(np.array(s.tokens)) % NUM_TOKENS for s in specification.samples()}
        order = [
            request.request_id for request, samples in zip(output.requests, output.samples, strict=True) if samples
        ]
        assert sorted(order) == sorted(sampled), f"{where}: the samples"
        update = scheduler.update(output, StepResult([sampled[name] for name in order]), float(step))
        assert sorted(names(update.finished)) == sorted(specification.update(sampled)), f"{where}: the finished"
        scheduler.check_invariants()
        tally.steps += 1
        tally.preemptions += len(decided.preempted)
        tally.hits += sum(cached.values()) > 0
        tally.chunks += len(decided.tokens) - len(order)
        tally.steps_without_decode += bool(cached) and decoding > 0 and len(cached) == len(decided.tokens)
        tally.waiting += bool(specification.waiting)
    assert not specification.waiting and not specification.running, f"{name}, workload {seed} does not finish"


def host_of(name: str, **overrides: Any) -> Host:
    """A host under a preset, with a pool of 16 blocks of 4 tokens and `overrides` on top."""
    sizes = {"num_blocks": 16, "block_size": 4, "max_model_len": 64}
    return Host(**SchedulerConfig.preset(name, **{**sizes, **overrides}).to_dict())


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_a_preset_decides_like_its_specification(name: str) -> None:
    tally = Tally()
    workloads = WORKLOADS[::4] if name == "minivllm, newest" else WORKLOADS
    num_workloads = len(workloads)
    for seed in workloads:
        compare(name, seed, tally)
    assert tally.steps > 15 * num_workloads
    assert tally.preemptions > num_workloads // 4 and tally.waiting > num_workloads
    assert tally.hits > (0 if name == "minivllm, newest" else num_workloads)
    assert (tally.chunks > 0) == (name != "textbook")
    assert (tally.steps_without_decode > 0) == (not name.startswith(("textbook", "vllm")))


@pytest.mark.parametrize(
    ("name", "share"),
    [("nano-vllm, own cache", 0.01), ("nano-vllm-chunked, own cache", 0.1), ("minivllm, own cache", 0.01)],
)
def test_the_prefix_cache_of_the_original_engine_changes_few_decisions(name: str, share: float) -> None:
    """In the long form, in 4, 41 and 1 of 600 workloads (docs/reference/presets.md)."""
    tally, num_different = Tally(), 0
    for seed in range(NUM_WITH_ORIGINAL_CACHE):
        try:
            compare(name, seed, tally)
        except AssertionError:
            num_different += 1
    assert num_different <= max(1, share * NUM_WITH_ORIGINAL_CACHE)
    assert tally.preemptions > NUM_WITH_ORIGINAL_CACHE // 10
    assert num_different + tally.other_hits >= NUM_WITH_ORIGINAL_CACHE // 100


def test_every_system_has_a_specification() -> None:
    assert set(SYSTEMS) == {name.partition(",")[0] for name in SPECIFICATIONS}


@pytest.mark.parametrize(
    ("name", "max_num_seqs", "max_num_batched_tokens"),
    [("nano-vllm", 512, 16384), ("nano-vllm-chunked", 512, 16384), ("minivllm", 16, 1024)],
)
def test_a_preset_has_the_step_limits_of_the_original_engine(
    name: str, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    config = SchedulerConfig.preset(name, num_blocks=100, max_model_len=1024)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (max_num_seqs, max_num_batched_tokens)


def test_nano_vllm_main_shares_no_prompt_blocks_within_a_step() -> None:
    steps = {}
    for name in ("nano-vllm", "nano-vllm-chunked"):
        host = host_of(name)
        document = host.prompt(8)
        host.add("a", [*document, 1])
        host.add("b", [*document, 2])
        first = tokens_of(host.step())
        host.add("c", [*document, 3])
        steps[name] = (first, tokens_of(host.step()))
    assert steps == {"nano-vllm": ({"a": 9, "b": 1}, {"c": 1}), "nano-vllm-chunked": ({"a": 9, "b": 9}, {"c": 1})}


def test_a_preset_without_prefix_caching_drops_settings_of_the_cache() -> None:
    config = SchedulerConfig.preset("nano-vllm-chunked", num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    assert config.share_within_step


# ------------------------------------------------------------------ where the originals crash, hang or lose a request


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_prompt_larger_than_the_pool_is_refused(name: str) -> None:
    scheduler = Scheduler(SchedulerConfig.preset(name, num_blocks=4, block_size=4, max_model_len=64))
    with pytest.raises(RequestRefused, match="needs 5 KV blocks"):
        scheduler.add(Request("a", list(range(17)), arrival_time=0.0, max_tokens=4), 0.0)
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_lone_sequence_that_outgrows_the_pool_finishes_by_length(name: str) -> None:
    host = host_of(name, num_blocks=4, max_num_seqs=2, max_num_batched_tokens=16)
    request = host.add("a", 10, max_tokens=50)
    host.run_to_end()
    assert (request.finish_reason, request.finish_detail) == (FinishReason.LENGTH, "kv_capacity")
    assert request.num_tokens == 17


@pytest.mark.parametrize("name", ["nano-vllm", "nano-vllm-chunked", "minivllm"])
def test_a_preempted_sequence_beyond_the_budget_is_chunked(name: str) -> None:
    host = host_of(name, num_blocks=6, max_num_batched_tokens=8, enable_prefix_caching=False)
    first, second = host.add("a", 7, max_tokens=9), host.add("b", 7, max_tokens=9)
    outputs = host.run_to_end()
    assert second.num_preemptions == 1
    resumed = next(step for step in outputs if step.is_resumed.any())
    assert tokens_of(resumed) == {"b": 8} and not resumed.samples.any()
    assert (first.num_output_tokens, second.num_output_tokens) == (9, 9)


@pytest.mark.parametrize("name", ["nano-vllm", "minivllm"])
def test_a_fully_cached_prompt_leaves_a_token_to_compute(name: str) -> None:
    host = host_of(name)
    prompt = host.prompt(8)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.add("b", prompt, max_tokens=1)
    assert tokens_of(host.step()) == {"b": 4}


def test_a_row_beyond_the_token_budget_runs_in_a_later_step() -> None:
    host = host_of("minivllm", max_num_seqs=4, max_num_batched_tokens=2)
    for name in "abc":
        host.add(name, 2, max_tokens=3)
    outputs = host.run_to_end()
    decoding = [tokens_of(step) for step in outputs if not len(step.admitted)]
    assert decoding == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"c": 1}, {"c": 1}]


# ------------------------------------------------------------------------------- where miniVLLM and nano-vLLM differ


def test_the_specification_minivllm_as_listed_preempts_needlessly() -> None:
    """Both rows fill their block with the token sampled last, and no block is free."""
    steps = {}
    for kind in (MiniVllm, MiniVllmAsListed):
        specification = kind(Settings(num_blocks=2, block_size=4, max_num_seqs=4, max_num_batched_tokens=16))
        for index, name in enumerate("ab"):
            specification.add(Sequence(name, [10 * index, 1, 2], limit=6, arrival=index))
        steps[kind.__name__] = [(list(step.tokens), step.preempted) for step in run(specification, 2)]
    host = host_of("minivllm", num_blocks=2, enable_prefix_caching=False)
    for name in "ab":
        host.add(name, 3, max_tokens=3)
    steps["preset"] = [(list(tokens_of(step)), names(step.preempted)) for step in (host.step(), host.step())]
    both = (["a", "b"], [])
    assert steps == {"MiniVllm": [both, both], "MiniVllmAsListed": [both, (["a"], ["b"])], "preset": [both, both]}


def test_the_specification_minivllm_as_listed_fails_without_free_blocks() -> None:
    """Both rows need a second block, and no block is free."""
    specification = MiniVllmAsListed(Settings(num_blocks=2, block_size=4, max_num_seqs=4, max_num_batched_tokens=16))
    host = host_of("minivllm", num_blocks=2, enable_prefix_caching=False)
    for index, name in enumerate("ab"):
        specification.add(Sequence(name, [10 * index, 1, 2, 3], limit=7, arrival=index))
        host.add(name, 4, max_tokens=3)
    with pytest.raises(IndexError):
        run(specification, 2)
    host.step()
    assert names(host.step().preempted) == ["b"]


def test_the_preset_minivllm_counts_cached_blocks_of_running_requests() -> None:
    admitted = {}
    settings = Settings(num_blocks=5, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    for kind in (MiniVllm, MiniVllmNewest):
        specification = kind(settings)
        for index, name in enumerate("ab"):
            specification.add(Sequence(name, [*range(8), 10 + index], limit=12, arrival=index))
        admitted[kind.__name__] = [list(step.cached) for step in run(specification, 2)]
    host = host_of("minivllm", num_blocks=5, max_num_batched_tokens=16)
    document = host.prompt(8)
    for index, name in enumerate("ab"):
        host.add(name, [*document, 10 + index], max_tokens=3)
    admitted["preset"] = [names(host.step().admitted) for _ in range(2)]
    assert admitted == {"MiniVllm": [["a"], []], "MiniVllmNewest": [["a"], ["b"]], "preset": [["a"], []]}


def test_a_request_without_tokens_to_generate_samples_none() -> None:
    """miniVLLM samples one token and finishes; nano-vLLM generates until an end-of-sequence token."""
    host = host_of("minivllm")
    request = host.add("a", 5, max_tokens=0)
    output = host.step()
    assert tokens_of(output) == {"a": 5}
    assert request.status.is_finished and request.num_output_tokens == 0


def test_a_prompt_of_exactly_the_maximum_length_is_refused() -> None:
    """miniVLLM samples one token beyond it."""
    host = host_of("minivllm")
    with pytest.raises(RequestRefused, match="max_total_tokens is 5, which leaves no room for a generated token"):
        host.add("a", 5, max_total_tokens=5)
    with pytest.raises(RequestRefused, match="max_model_len is 64, which leaves no room for a generated token"):
        host.add("b", 64)


def test_every_duplicate_of_a_cached_block_is_a_cache_hit() -> None:
    """nano-vLLM knows only the duplicate that was written last, b's, and c overwrites it."""
    host = host_of("nano-vllm-chunked", num_blocks=4)
    prompt = host.prompt(5)
    host.add("a", prompt)
    host.add("b", prompt, max_tokens=1)
    assert tokens_of(host.step()) == {"a": 5, "b": 5}
    host.add("c", 8, max_tokens=1)
    assert tokens_of(host.step()) == {"c": 8}
    host.add("d", [*prompt[:4], 1], max_tokens=1)
    assert cached_of(host.step()) == {"d": 4}


def run(specification: Specification, num_steps: int) -> list[Decision]:
    """The decisions of the first steps; every sample is token 99."""
    decisions = []
    for _ in range(num_steps):
        decisions.append(specification.schedule())
        specification.update({sequence.name: 99 for sequence in specification.samples()})
    return decisions


# ------------------------------------------------------------------------------- what the settings of the presets do


def test_under_prefill_first_more_requests_run_than_fit_a_step() -> None:
    host = host_of("nano-vllm", max_num_seqs=2, max_num_batched_tokens=16)
    for name in "abc":
        host.add(name, 3, max_tokens=3)
    assert [tokens_of(host.step()) for _ in range(3)] == [{"a": 3, "b": 3}, {"c": 3}, {"a": 1, "b": 1}]
    assert host.stats().num_running == 3


def test_max_num_active_seqs_limits_running_requests_of_a_preset() -> None:
    overrides = {"max_num_seqs": 2, "max_num_active_seqs": 2, "max_num_batched_tokens": 16}
    host = host_of("nano-vllm", **overrides)
    for name in "abc":
        host.add(name, 3, max_tokens=3)
    host.step()
    assert tokens_of(host.step()) == {"a": 1, "b": 1}
    assert host.stats().deferrals["sequence_limit"] == 2


def test_admission_charge_decides_how_many_requests_fit_a_step() -> None:
    admitted = {}
    for name in ("nano-vllm", "nano-vllm-chunked", "minivllm"):
        host = host_of(name, max_num_seqs=4, max_num_batched_tokens=20)
        document = host.prompt(8)
        host.add("first", [*document, 1], max_tokens=1)
        host.run_to_end()
        for index in range(4):
            host.add(f"r{index}", [*document, 50 + index, 60 + index], max_tokens=1)
        admitted[name] = len(host.step().admitted)
    # Each has 10 tokens, 8 of them cached. "whole": 10 + 10. "whole-fits": until 2 x n + 10 > 20.
    assert admitted == {"nano-vllm": 4, "nano-vllm-chunked": 4, "minivllm": 2}


def test_the_preset_vllm_preempts_nothing_for_a_waiting_request() -> None:
    for order, expected in (("priority", {"b": 4}), ("priority-by-arrival", {"a": 1})):
        host = host_of("vllm", order=order, max_num_seqs=1, displace=None)
        host.add("a", 4, priority=1)
        host.step()
        host.add("b", 4, priority=0)
        assert tokens_of(host.step()) == expected


def test_own_preemption_ends_step_excludes_the_rows_behind() -> None:
    """Under priority: the least urgent row asks first, and is preempted."""
    steps = {}
    for name, knobs in {
        "replan": {"shortage": "replan"},
        "ends": {"shortage": "in-order"},
        "goes on": {"shortage": "in-order", "own_preemption_ends_step": False},
    }.items():
        host = Host(order="priority", displace=False, num_blocks=2, enable_prefix_caching=False, **knobs)
        host.add("low", 3, priority=5)
        host.step()
        host.add("high", 4, priority=0)
        assert tokens_of(host.step()) == {"low": 1, "high": 4}
        steps[name] = [tokens_of(host.step()) for _ in range(2)]
    both = [{"high": 1}, {"high": 1}]
    assert steps == {"replan": both, "ends": [{}, {"high": 1}], "goes on": both}


def test_the_request_preempted_last_is_the_head_under_fcfs_front() -> None:
    """Queued are x, preempted in its first run, and y, preempted in its second: its admission is the later one."""
    heads = {}
    for name in ("fcfs", "fcfs-front"):
        order = make("order", name)
        for request_id, serial in (("x", 1), ("y", 2)):
            request = Request(request_id, [1], arrival_time=serial, max_tokens=1)
            state = request._state
            state.status, state.serial, state.loss_number = RequestStatus.PREEMPTED, serial, serial
            order.push(request)
        order.push(Request("new", [1], arrival_time=0.0, max_tokens=1))
        heads[name] = [order.pop().request_id for _ in range(3)]
    assert heads == {"fcfs": ["x", "y", "new"], "fcfs-front": ["y", "x", "new"]}


def test_look_ahead_shortage_also_preempts_for_the_first_row_left_out() -> None:
    preempted = {}
    for shortage in ("in-order", "look-ahead"):
        overrides = {"max_num_seqs": 1, "num_blocks": 3, "shortage": shortage, "enable_prefix_caching": False}
        host = host_of("minivllm", **overrides)
        for name in "abc":
            host.add(name, 4, max_tokens=2)
        steps = [host.step() for _ in range(4)]
        preempted[shortage] = names(steps[3].preempted)
    assert preempted == {"in-order": ["c"], "look-ahead": ["c", "b"]}


def test_a_victim_may_be_admitted_in_the_step_that_preempted_it() -> None:
    """The only full block of b equals a's first block, and is a cache hit once b has a token beyond that block."""
    steps = {}
    for again in (False, True):
        host = Host(admit_after_preemption=again, num_blocks=5, max_num_batched_tokens=24)
        prompt = host.prompt(12)
        host.add("a", prompt, max_tokens=3)
        host.add("b", prompt[:4], max_tokens=3)
        host.add("c", 3, max_tokens=3)
        host.step()
        output = host.step()
        steps[again] = (names(output.preempted), tokens_of(output), cached_of(output))
        host.run_to_end()
    assert steps == {False: (["c", "b"], {"a": 1}, {}), True: (["c", "b"], {"a": 1, "b": 1}, {"b": 4})}


def test_a_decode_reserve_keeps_blocks_free_for_the_expected_output() -> None:
    host = Host(decode_reserve=8, num_blocks=5)
    host.add("a", 8, max_tokens=8)
    host.add("b", 7, max_tokens=8)
    assert tokens_of(host.step()) == {"a": 8}
    waiting = host.explain("b")
    assert waiting.reason is not None and waiting.reason.value == "decode_reserve"
    assert (waiting.missing, waiting.blocker) == (1, "a")


def test_a_decode_reserve_is_at_most_the_possible_output_of_a_request() -> None:
    host = Host(decode_reserve=1000, num_blocks=5)
    host.add("a", 8, max_tokens=8)
    host.add("b", 7, max_tokens=4)
    assert tokens_of(host.step()) == {"a": 8, "b": 7}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recording_of_a_reproduced_system_replays(name: str) -> None:
    config = SchedulerConfig.preset(name, num_blocks=12, max_model_len=40, block_size=2)
    assert SchedulerConfig(**config.to_dict()) == config
    recording = io.StringIO()
    host = Host(recorder=Recorder(recording), **{**config.to_dict(), "max_num_seqs": 3, "max_num_batched_tokens": 14})
    document = host.prompt(6)
    for index in range(5):
        host.add(f"r{index}", [*document, index], max_tokens=9)
    host.run_to_end()
    assert replay(recording.getvalue().splitlines()).num_preemptions == host.stats().num_preemptions > 0
