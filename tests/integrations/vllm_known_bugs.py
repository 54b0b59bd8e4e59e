"""Failures of vLLM's scheduler that were reported in public, each by its issue's number: none happens here.

python vllm_known_bugs.py   prints one JSON line: of each case, what went wrong, or null
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from _scheduler_worker import Settings
from _vllm_worker import build_config
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler
from vllm.v1.request import Request, RequestStatus

from pointsman.integrations.vllm import Scheduler
from tests.integrations.vllm_cases import print_failures
from tests.integrations.vllm_decisions import HASH, Side, Workload, configured

FULL, WINDOW = ("full", 4, 0), ("window", 4, 8)


def side(
    *,
    num_blocks: int,
    layout: tuple[tuple[str, int, int], ...] = (),
    kind: type = Scheduler,
    num_drafts: int = 0,
    **scheduler: Any,
) -> Side:
    """A scheduler with its runner: blocks of 4 tokens, 40 tokens a request, a step of 16."""
    knobs = {"max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16, "enable_chunked_prefill": True}
    knobs |= {"policy": "fcfs", "scheduler_reserve_full_isl": True, "watermark": 0.0, **scheduler}
    workload = Workload(1, knobs, num_blocks, 4, False, False, 0, num_drafts, layout)
    config = configured(BASE, workload)
    config.additional_config = {"pointsman": {"socket": ""}}
    return Side(workload, config, kind)


def add(each: Side, name: str, length: int, *, max_tokens: int = 2, priority: int = 0, arrival: float = 0.0) -> Request:
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    prompt = [number % 90 for number in range(length)]
    each.add({"id": name, "prompt": prompt, "params": params, "priority": priority, "lora": 0, "arrival": arrival})
    return each.added[name]


def steps(each: Side, most: int = 60) -> list[dict[str, Any]]:
    """Run all steps, or a number of them; each with the tokens of its rows, and the clients' outputs."""
    found = []
    for _ in range(most):
        if not each.scheduler.has_requests():
            break
        decided = each.schedule()
        found.append({"tokens": decided["tokens"], "preempted": decided["preempted"], "told": each.update()})
    return found


def ended(found: list[dict[str, Any]]) -> dict[str, str]:
    """The finish reason of each request that ended."""
    return {
        name: told[1]
        for step in found
        for name, told in step["told"].items()
        if name != "its loggers" and told[1] is not None
    }


def a_prompt_that_never_fits_ends_and_blocks_no_request() -> None:
    """35541, 39734, 50169: vLLM's own scheduler keeps it at the head of the queue, and nothing behind it runs."""
    for layout in ((), (FULL, WINDOW)):
        ours = side(num_blocks=1 + 6, layout=layout)
        add(ours, "too long", 30)
        add(ours, "short", 5)
        reasons = ended(steps(ours))
        assert reasons == {"too long": "error", "short": "length"}, (layout, reasons)
    theirs = side(num_blocks=1 + 6, kind=OwnScheduler)
    add(theirs, "too long", 30)
    add(theirs, "short", 5)
    assert not ended(steps(theirs)), "vLLM's own has been repaired: this case can go"


def an_output_that_outgrows_the_pool_ends() -> None:
    """A request that runs alone and can get no further block ends with the reason "length"."""
    ours = side(num_blocks=1 + 3)
    add(ours, "grows", 6, max_tokens=30)
    add(ours, "short", 5)
    assert ended(steps(ours)) == {"grows": "length", "short": "length"}


def a_long_prompt_is_admitted_into_what_its_windows_need() -> None:
    """39734: with blocks for the whole sequence in one group and for the window in the others, it runs."""
    ours = side(num_blocks=1 + 10 + 2 * 7, layout=(FULL, WINDOW, WINDOW))
    add(ours, "long", 36)
    found = steps(ours)
    assert ended(found) == {"long": "length"} and found[0]["tokens"] == {"long": 16}


def windows_of_other_requests_are_not_reserved_again() -> None:
    """54703: a group with a tiny window reserves the tokens of a whole step. Requests that decode hold their window
    alone, so the next one needs this reserve once and not for each of them."""
    tiny = ("window", 4, 4)
    in_step = 6  # blocks for 4 - 1 + 16 tokens, and one more
    held = 4 * (10 + 2)  # of four requests at their end
    ours = side(num_blocks=1 + held + in_step, layout=(FULL, tiny))
    for name in "abcd":
        add(ours, name, 32, max_tokens=8)
    found = steps(ours)
    assert max(len(step["tokens"]) for step in found) == 4, "all run at once"
    assert not any(step["preempted"] for step in found)


def what_waits_for_a_grammar_takes_no_slot_and_is_not_kept_behind_a_blocked_head() -> None:
    """53130: deferred requests count as running, and once they fill max_num_seqs nothing is admitted any more."""
    ours = side(num_blocks=1 + 8, max_num_seqs=2)
    add(ours, "runs", 20, max_tokens=6)
    add(ours, "head", 24, max_tokens=2)  # needs 6 blocks; 3 are free
    grammars = []
    for number in range(3):
        params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
        grammars.append(Request(f"g{number}", [1, 2, 3], params, None))
        ours.allowed[f"g{number}"], ours.limits[f"g{number}"] = (0, set()), 40
        ours.scheduler.add_request(grammars[-1])
    assert list(ours.schedule()["tokens"]) == ["runs"]
    ours.update()
    for each in grammars:
        each.structured_output_request.grammar = SimpleNamespace()
    assert list(ours.schedule()["tokens"]) == ["runs"]
    assert {each.status for each in grammars} == {RequestStatus.WAITING}, "they are queued, behind a blocked head"
    ours.update()
    ours.scheduler._grammars = SimpleNamespace(
        grammar_bitmask=lambda *_: None, accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens
    )
    assert len(ended(steps(ours))) == 5


def an_urgent_request_does_not_wait_for_a_slot() -> None:
    """40004: with max_num_seqs requests running, vLLM's own preempts none of them for a more urgent one."""
    for kind, runs in ((Scheduler, True), (OwnScheduler, False)):
        one = side(num_blocks=100, policy="priority", max_num_seqs=2, kind=kind)
        for name in "ab":
            add(one, name, 4, max_tokens=20, priority=5)
        one.schedule()
        one.update()
        add(one, "urgent", 4, priority=0, arrival=1.0)
        assert ("urgent" in one.schedule()["tokens"]) == runs, kind
        one.update()
    one = side(num_blocks=100, policy="priority", max_num_seqs=2)
    for name in "ab":
        add(one, name, 4, max_tokens=20, priority=5)
    one.schedule()
    one.update()
    add(one, "as urgent", 4, priority=5, arrival=1.0)
    assert not one.schedule()["preempted"], "only for a more urgent one"
    one.update()


def a_preempted_request_keeps_its_place_under_priority() -> None:
    """41951: vLLM's own lets a request that never ran go first, if it arrived earlier."""
    for kind, first in ((Scheduler, "a"), (OwnScheduler, "b")):
        one = side(num_blocks=100, policy="priority", max_num_seqs=1, kind=kind)
        add(one, "a", 8, max_tokens=9, arrival=5.0)
        one.schedule()
        one.update()
        add(one, "b", 8, max_tokens=9, arrival=1.0)
        one.scheduler.reset_prefix_cache(True)
        assert list(one.schedule()["tokens"]) == [first], kind
        one.update()


CASES = [
    a_prompt_that_never_fits_ends_and_blocks_no_request,
    an_output_that_outgrows_the_pool_ends,
    a_long_prompt_is_admitted_into_what_its_windows_need,
    windows_of_other_requests_are_not_reserved_again,
    what_waits_for_a_grammar_takes_no_slot_and_is_not_kept_behind_a_blocked_head,
    an_urgent_request_does_not_wait_for_a_slot,
    a_preempted_request_keeps_its_place_under_priority,
]
BASE: Any = None


def main() -> None:
    global BASE
    init_none_hash(HASH)
    BASE = build_config(Settings(num_blocks=100, max_model_len=1 << 12, max_num_seqs=8, max_num_batched_tokens=1 << 12))
    print_failures(CASES)


if __name__ == "__main__":
    main()
