"""The sandbox: actions and undo, other settings for the same requests, situations, and copies."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.core import SchedulerConfig
from pointsman.core.observe.film_format import Op
from pointsman.web.film import Film
from pointsman.web.remake import remake
from pointsman.web.sandbox import MAX_PROMPTS, MAX_REQUESTS, SETTINGS, START, Sandbox, SandboxError, choices
from pointsman.web.scene import MAX_STEPS, Arrival, Scene, play
from pointsman.web.situations import SITUATIONS
from tests.forms import seeds

NAMES = [each.name for each in SITUATIONS]
Figures = dict[str, Any]


def done(*actions: dict[str, Any], sandbox: Sandbox | None = None) -> Sandbox:
    found = sandbox or Sandbox()
    for action in actions:
        found.do(action)
    return found


def situation(name: str) -> Sandbox:
    return done({"do": "situation", "name": name})


def request(sandbox: Sandbox, name: str) -> dict[str, Any]:
    return next(each for each in sandbox.answer()["requests"] if each["id"] == name)


def run_copied(text: str) -> None:
    """Run the function of a copied test."""
    module: dict[str, Any] = {}
    exec(compile(text, "copied", "exec"), module)
    module["test_sandbox"]()


# ---------------------------------------------------------------------- undo


def any_action(draw: random.Random, sandbox: Sandbox) -> dict[str, Any]:
    names = [name for name, cast in sandbox.played.cast.items()]
    kind = draw.choice(["add", "add", "add", "step", "step", "run", "abort", "priority", "settings", "reset"])
    if kind == "add":
        action = {"do": "add", "prompt": draw.randint(1, 200), "output": draw.randint(1, 40)}
        if names and draw.random() < 0.5:
            action |= {"like": draw.choice(names)}
        if draw.random() < 0.3:
            action |= {"at": sandbox.played.now + draw.random()}
        return action | {"priority": draw.randint(0, 2), "tenant": draw.choice("xy")}
    if kind == "step":
        return {"do": "step", "count": draw.randint(1, 20)}
    if kind in ("abort", "priority"):
        name = draw.choice(names or ["none"])
        return {"do": kind, "id": name} | ({"priority": draw.randint(0, 3)} if kind == "priority" else {})
    if kind == "settings":
        settings = {
            "num_blocks": draw.choice([12, 16, 64]),
            "max_num_batched_tokens": draw.choice([8, 64, 256]),
            "order": draw.choice(["fcfs", "priority", "fair", "shortest-prefill:ageing=3"]),
            "enable_prefix_caching": draw.choice([True, False]),
            "reserves": draw.choice([[], ["growth"], ["bypass", "watermark:share=0.1"]]),
        }
        return {"do": "settings", "settings": dict(draw.sample(sorted(settings.items()), 2))}
    return {"do": kind}


@pytest.mark.parametrize("seed", seeds(3, 60))
def test_undo_and_redo_are_exact(seed: int) -> None:
    """Undo and redo of any action give the same bytes of the film and the same requests; the copied test passes."""
    draw, sandbox = random.Random(seed), Sandbox()
    states = [sandbox.answer()]
    for _ in range(40):
        try:
            sandbox.do(any_action(draw, sandbox))
        except SandboxError:
            continue
        sandbox.played.scheduler.check_invariants()
        states.append(sandbox.answer())
    assert len(states) > 15
    for state in (*states[-2::-1], None):
        if state is None:
            with pytest.raises(SandboxError, match="nothing to undo"):
                sandbox.do({"do": "undo"})
        else:
            sandbox.do({"do": "undo"})
            assert without_history(sandbox.answer()) == without_history(state)
    for state in states[1:]:
        sandbox.do({"do": "redo"})
        assert without_history(sandbox.answer()) == without_history(state)
    for state in states[:: len(states) // 5]:
        run_copied(state["test"])


def without_history(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("undo", "redo")}


def test_an_action_after_an_undo_removes_the_possible_redos() -> None:
    sandbox = done(
        {"do": "add", "prompt": 10, "output": 5},
        {"do": "step"},
        {"do": "undo"},
        {"do": "add", "prompt": 9, "output": 2},
    )
    assert (sandbox.answer()["undo"], sandbox.answer()["redo"]) == ("add B", None)
    with pytest.raises(SandboxError, match="nothing to do again"):
        sandbox.do({"do": "redo"})


# ---------------------------------------------------------------------- the scheduler's knowledge, and its times


def test_requests_of_a_scene_generate_their_given_number_of_tokens() -> None:
    sandbox = done({"do": "add", "prompt": 64, "output": 20}, {"do": "run"})
    assert request(sandbox, "A")["why"] == "finished: stop"
    assert (request(sandbox, "A")["generated"], sandbox.played.num_steps) == (20, 20)
    capped = done({"do": "add", "prompt": 64, "output": 20, "max_tokens": 7}, {"do": "run"})
    assert (request(capped, "A")["why"], request(capped, "A")["generated"]) == ("finished: length", 7)


def test_a_step_of_a_scene_takes_the_given_time() -> None:
    """A step takes 10 ms plus 0.1 ms per token: 40 prompt tokens in the first step, one token in each other step."""
    sandbox = done({"do": "add", "prompt": 40, "output": 3}, {"do": "step"})
    assert sandbox.played.now == pytest.approx(0.014)
    sandbox.do({"do": "run"})
    assert sandbox.played.now == pytest.approx(0.014 + 2 * 0.0101)
    assert request(sandbox, "A")["ttft"] == pytest.approx(0.014)
    assert request(sandbox, "A")["longest_gap"] == pytest.approx(0.0101)


@pytest.mark.parametrize("order", ["fcfs", "shortest-prefill", "earliest-ttft"])
def test_no_policy_can_predict_an_output(order: str) -> None:
    """Other lengths of outputs change nothing before the first request ends."""
    films = []
    for seed in (1, 2):
        draw = random.Random(seed)
        config = START.replace(order=order, num_blocks=64, reserves=("growth", "decode"), victim="least-cost")
        arrivals = tuple(Arrival(f"{n}", 30 + 7 * n, draw.randint(26, 200), at=0.01 * n) for n in range(12))
        films.append(play(Scene(config, arrivals, num_steps=25)).film)
    assert films[0] == films[1]


def test_an_idle_scheduler_waits_for_the_next_arrival() -> None:
    sandbox = done({"do": "add", "prompt": 8, "output": 2}, {"do": "add", "prompt": 8, "output": 2, "at": 5.0})
    assert request(sandbox, "B")["why"] == "arrives at 5 s"
    sandbox.do({"do": "run"})
    assert [request(sandbox, name)["ttft"] < 0.02 for name in "AB"] == [True, True]
    assert sandbox.played.now > 5
    run_copied(sandbox.as_test())


def test_shared_prefixes_extend_into_the_output() -> None:
    """A conversation: the second request shares the full blocks of the first one's prompt and output."""
    sandbox = done(
        {"do": "add", "prompt": 40, "output": 30},
        {"do": "run"},
        {"do": "add", "prompt": 100, "output": 5, "like": "A"},
        {"do": "step"},
    )
    played = sandbox.played
    assert request(sandbox, "B")["shared"] == 69
    assert played.figures()["cached_tokens"] == 64
    other = done({"do": "add", "prompt": 100, "output": 5}, {"do": "step"}, sandbox=sandbox)
    assert other.played.figures()["cached_tokens"] == 64  # C shares nothing


def test_aborts_and_priorities_keep_their_times() -> None:
    """Other settings do not change the times of aborts and priority changes; a reset removes both."""
    sandbox = done(
        *({"do": "add", "prompt": 64, "output": 50} for _ in range(3)),
        {"do": "settings", "settings": {"max_num_seqs": 1, "order": "priority"}},
        {"do": "step", "count": 3},
        {"do": "priority", "id": "C", "priority": -1},
        {"do": "step"},
    )
    assert [each.request_id for each in sandbox.played.scheduler.running] == ["C"]
    sandbox.do({"do": "abort", "id": "C"})
    assert request(sandbox, "C")["why"] == "finished: abort"
    run_copied(sandbox.as_test())
    sandbox.do({"do": "settings", "settings": {"seconds_per_step": 0.02}})
    assert request(sandbox, "C")["why"] == "finished: abort"
    sandbox.do({"do": "reset"})
    assert sandbox.played.num_steps == 0
    sandbox.do({"do": "run"})
    assert [request(sandbox, name)["why"] for name in "ABC"] == ["finished: stop"] * 3


def test_aborting_a_future_request_removes_it() -> None:
    sandbox = done({"do": "add", "prompt": 8, "output": 2}, {"do": "add", "prompt": 8, "output": 2, "at": 5})
    sandbox.do({"do": "add", "prompt": 8, "output": 2, "at": 6, "like": "B"})
    with pytest.raises(SandboxError, match="shares the first tokens of"):
        sandbox.do({"do": "abort", "id": "B"})
    sandbox.do({"do": "abort", "id": "C"})
    sandbox.do({"do": "abort", "id": "B"})
    assert list(sandbox.played.cast) == ["A"]


# ---------------------------------------------------------------------- other settings


def test_other_settings_play_the_same_requests() -> None:
    sandbox = done({"do": "situation", "name": "preemption"}, {"do": "step", "count": 60})
    before = sandbox.answer()
    sandbox.do({"do": "settings", "settings": {"num_blocks": 48}})
    after = sandbox.answer()
    assert after["before"] == before["figures"]
    assert [each["ttft_before"] for each in after["requests"]] == [each["ttft"] for each in before["requests"]]
    assert (before["figures"]["preemptions"], after["figures"]["preemptions"]) == (3, 0)
    assert after["figures"]["steps"] == 60  # the same number as before
    sandbox.do({"do": "run"})
    sandbox.do({"do": "settings", "settings": {"num_blocks": 24}})
    assert sandbox.played.is_over  # a complete run stays complete
    assert sandbox.scene.inputs == situation("preemption").scene.inputs


def test_settings_are_compared_with_the_first_settings() -> None:
    """Each change of settings is compared with the first settings, for the same requests and steps, until the base is
    changed."""
    sandbox = done({"do": "situation", "name": "preemption"}, {"do": "run"})
    begin = sandbox.answer()
    assert begin["before"] is None and begin["changed"] == []
    for blocks in (40, 48):
        sandbox.do({"do": "settings", "settings": {"num_blocks": blocks}})
        assert sandbox.answer()["before"] == begin["figures"]
    assert sandbox.answer()["changed"] == ["KV blocks in the pool 24 → 48"]
    sandbox.do({"do": "add", "prompt": 64, "output": 300, "at": sandbox.played.now})
    more = sandbox.answer()
    assert more["before"]["steps"] == more["figures"]["steps"] and not more["before_is_over"]
    sandbox.do({"do": "run"})
    after = sandbox.answer()
    assert (after["figures"]["finished"], after["before"]["finished"]) == (7, 7) and after["before_is_over"]
    sandbox.do({"do": "compare_from_here"})
    assert sandbox.answer()["before"] is None
    sandbox.do({"do": "settings", "settings": {"num_blocks": 24}})
    assert sandbox.answer()["before"] == after["figures"]
    for _ in range(2):
        sandbox.do({"do": "undo"})
    assert sandbox.answer()["before"] == after["before"]
    sandbox.do({"do": "clear"})
    assert sandbox.answer()["before"] is None


def test_time_does_not_go_back_after_waiting_for_a_refused_request() -> None:
    sandbox = done({"do": "add", "prompt": 20, "output": 2}, {"do": "add", "prompt": 3000, "output": 2, "at": 9})
    sandbox.do({"do": "run"})
    assert sandbox.played.now == 9 and sandbox.played.cast["B"].refusal
    sandbox.do({"do": "add", "prompt": 20, "output": 2})
    assert sandbox.played.now == 9 and sandbox.scene.arrivals[-1].at == 9
    run_copied(sandbox.as_test())
    sandbox.do({"do": "reset"})
    assert sandbox.played.now == 0


def test_removing_a_request_removes_its_priority_changes() -> None:
    """A priority change of a removed request does not apply to a new request with the same id."""
    sandbox = done(
        {"do": "add", "prompt": 20, "output": 40},
        {"do": "add", "prompt": 20, "output": 40, "at": 0.2},
        {"do": "step", "count": 25},
        {"do": "priority", "id": "B", "priority": 5},
        {"do": "settings", "settings": {"seconds_per_step": 0.001}},
        {"do": "abort", "id": "B"},
        {"do": "add", "prompt": 20, "output": 40, "at": 0.2, "id": "B"},
        {"do": "run"},
    )
    request = sandbox.played.cast["B"].request
    assert request is not None and request.priority == 0


def test_a_chain_of_shared_prefixes_is_played_quickly() -> None:
    """Each of 500 prompts is the prompt of the previous request and one more token."""
    arrivals = [Arrival("r0", 4, 1)]
    arrivals += [Arrival(f"r{n}", 4 + n, 1, starts_like=f"r{n - 1}", num_shared_tokens=3 + n) for n in range(1, 500)]
    scene = Scene(START, tuple(arrivals))
    prompts = [scene.prompt(each).tolist() for each in arrivals]
    for sooner, later in itertools.pairwise(prompts):
        assert later[:-1] == sooner and later[-1] != sooner[-1]
    assert len({tuple(each) for each in prompts}) == 500


def test_every_setting_accepts_its_listed_values_and_its_bounds() -> None:
    """A value is accepted, or refused with a remedy because it contradicts another setting."""
    sandbox = done({"do": "add", "prompt": 30, "output": 3}, {"do": "run"})
    now = sandbox.answer()["settings"]
    assert set(now) == {each.name for each in SETTINGS}
    json.dumps(choices(), allow_nan=False)
    policies = choices()["policies"]
    for setting in SETTINGS:
        values = [setting.low, setting.high, *setting.choices]
        values += [True, False] if setting.kind == "flag" else []
        names = [each["name"] for each in policies.get(setting.policy, [])]
        values += names if setting.kind == "policy" else [[name] for name in names]
        for value in values:
            if value is None or value == now[setting.name]:
                continue
            try:
                sandbox.do({"do": "settings", "settings": {setting.name: value}})
            except SandboxError as error:
                assert "; " in str(error), f"{setting.name} {value}: {error}"  # the remedy
                continue
            assert sandbox.answer()["settings"][setting.name] == value
            sandbox.do({"do": "undo"})
    assert sandbox.answer()["settings"] == now


A = {"do": "add", "prompt": 64, "output": 20}
OUT_OF_RANGE: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([], {"do": "fly"}, "do is 'fly'; choose one of add, abort"),
    ([], {}, "do is None; choose"),
    ([], {"do": "add", "prompt": 64}, "the action add needs the field output; give it"),
    ([], {**A, "colour": 1}, "the action add has no field colour; its fields: prompt, output"),
    ([], {**A, "prompt": 0}, "prompt is 0; it must be between 1 and 100000"),
    ([], {**A, "prompt": "many"}, "prompt is 'many'; it must be an integer between 1 and 100000"),
    ([], {**A, "output": 1.5}, "output is 1.5; it must be an integer"),
    ([], {**A, "at": math.nan}, "at is nan; it must be a number between 0 and 3600"),
    ([], {**A, "at": 10**400}, "at is 1000.*it must be a number between 0 and 3600"),
    ([], {**A, "at": -1}, "at is -1; it must be between 0 and 3600"),
    (
        [A, {"do": "step"}],
        {**A, "at": 0.001},
        "at is 0.001 s, but the time is 0.0164 s already; give at least 0.0164, or reset first",
    ),
    ([A], {**A, "id": "A"}, "id is 'A', but another request has this id; choose another"),
    ([], {**A, "id": "x" * 61}, "it must be 1 to 60 printable characters"),
    ([A], {**A, "like": "B"}, "like is 'B', but no request has this id; choose one of A"),
    ([A], {**A, "like": "A", "shared": 65}, "shared is 65; it must be between 1 and 64"),
    ([A], {**A, "shared": 5}, "shared is 5, but has no effect without like; give the id of a request"),
    ([], {**A, "priority": 2**31}, "priority is 2147483648; it must be between"),
    ([], {"do": "step"}, "there is no unfinished request; add a request, or reset"),
    ([A], {"do": "step", "count": MAX_STEPS + 1}, f"count is {MAX_STEPS + 1}; it must be between 1 and {MAX_STEPS}"),
    ([A, {"do": "step"}], {"do": "step", "count": MAX_STEPS}, f"give at most {MAX_STEPS - 1}, or reset"),
    ([A, {"do": "run"}], {"do": "run"}, "there is no unfinished request"),
    ([A, {"do": "run"}], {"do": "abort", "id": "A"}, "A has finished; undo steps to restore it"),
    ([A], {"do": "abort", "id": "B"}, "no request is called 'B'; choose one of A"),
    ([A], {"do": "priority", "id": "A", "priority": "high"}, "priority is 'high'; it must be an integer"),
    ([], {"do": "situation", "name": "peace"}, "no situation is called 'peace'; choose one of static"),
    ([], {"do": "compare_from_here"}, "already uses these settings; change one first"),
    ([], {"do": "what_if"}, "what_if needs a situation, whose change it applies; choose a situation first"),
    ([], {"do": "settings", "settings": {}}, "the current settings already have these values; change one"),
    ([], {"do": "settings", "settings": 3}, "settings is 3; give an object"),
    ([], {"do": "settings", "settings": {"num_blocks": 0}}, "num_blocks is 0; it must be between 1 and 65536"),
    ([], {"do": "settings", "settings": {"num_blocks": "8"}}, "num_blocks is '8'; it must be an integer between"),
    ([], {"do": "settings", "settings": {"watermark": 1.5}}, "watermark is 1.5; it must be between 0 and 0.99"),
    ([], {"do": "settings", "settings": {"max_num_batched_tokens": 4}}, "less than max_num_seqs 8.*raise max_num"),
    ([], {"do": "settings", "settings": {"num_gpus": 4}}, "no setting is called 'num_gpus'; choose from num_blocks"),
    ([], {"do": "settings", "settings": {"batching": ["x"]}}, r"batching is \['x'\]; choose one of mixed, static"),
    ([], {"do": "settings", "settings": {"order": "random"}}, "no order policy is called 'random'; choose one of fcfs"),
    ([], {"do": "settings", "settings": {"order": "fair:input_weight=0"}}, "it must be between 0.001 and 1000"),
    ([], {"do": "settings", "settings": {"order": 7}}, "order is 7; give a policy, as name"),
    ([], {"do": "settings", "settings": {"reserves": ["growth:scale=9"]}}, "it must be between 0 and 8"),
    ([], {"do": "settings", "settings": {"reserves": "growth"}}, "reserves is 'growth'; give a list"),
    ([], {"do": "settings", "settings": {"enable_chunked_prefill": 1}}, "is 1; it must be true or false"),
]


@pytest.mark.parametrize(("before", "action", "why"), OUT_OF_RANGE)
def test_impossible_actions_are_refused_with_a_reason(before: list[Any], action: dict[str, Any], why: str) -> None:
    """The error has value, limit and remedy; nothing changes."""
    sandbox = done(*before)
    answer = sandbox.answer()
    with pytest.raises(SandboxError, match=why):
        sandbox.do(action)
    assert sandbox.answer() == answer


def test_the_size_of_a_sandbox_is_bounded() -> None:
    many = tuple(Arrival(f"{n}", 1, 1) for n in range(MAX_REQUESTS))
    sandbox = Sandbox(Scene(START, many))
    with pytest.raises(SandboxError, match=r"the scene has 501 requests, and the maximum is 500; remove some"):
        sandbox.do(A)
    endless = Sandbox(Scene(START, tuple(Arrival(f"{n}", 1, 9_000) for n in range(4)), num_steps=MAX_STEPS + 5))
    assert endless.played.num_steps <= MAX_STEPS
    long = tuple(Arrival(f"{n}", 100_000, 1) for n in range(21))
    with pytest.raises(SandboxError, match="2,100,000 tokens of prompts, and the maximum is 2,000,000"):
        Sandbox(Scene(START, long))


# ---------------------------------------------------------------------- situations


def waited(answer: dict[str, Any], name: str) -> float:
    return float(next(each["ttft"] for each in answer["requests"] if each["id"] == name))


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["figures"]["cached_tokens"])


PROMISES: dict[str, Callable[[dict[str, Any], dict[str, Any], Figures, Figures], bool]] = {
    # Before and after the change: the whole answers, then the figures alone.
    "static": lambda b, a, before, after: after["steps"] * 2 < before["steps"] == 300,
    "chunks": lambda b, a, before, after: after["longest_gap"] < 0.03 and before["longest_gap"] > 0.15,
    "preemption": lambda b, a, before, after: before["preemptions"] > 0 == after["preemptions"],
    "thrash": lambda b, a, before, after: (
        after["recomputed_tokens"] * 5 < before["recomputed_tokens"] and after["seconds"] < 0.9 * before["seconds"]
    ),
    "prefixes": lambda b, a, before, after: cached_of(b) == 0 and cached_of(a) == 7 * 320 + 16,
    "priority": lambda b, a, before, after: (
        waited(b, "urgent") > 1 and waited(a, "urgent") < 0.05 and after["preemptions"] > 0
    ),
    "fairness": lambda b, a, before, after: all(
        waited(a, f"light-{n}") * 3 < waited(b, f"light-{n}") for n in range(3)
    ),
    "never": lambda b, a, before, after: (before["finished"], after["finished"]) == (2, 3),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_situation_shows_its_stated_effect(name: str) -> None:
    sandbox = done({"do": "run"}, sandbox=situation(name))
    before = sandbox.answer()
    sandbox.do({"do": "what_if"})
    after = sandbox.answer()
    for answer in (before, after):
        assert answer["is_over"] and answer["problem"] is None
        run_copied(answer["test"])
    assert after["situation"] == name
    assert PROMISES[name](before, after, before["figures"], after["figures"])


def test_a_request_that_never_fits_is_refused() -> None:
    sandbox = done({"do": "run"}, sandbox=situation("never"))
    assert request(sandbox, "too-long")["state"] == "refused"
    assert "needs 19 KV blocks of 16, and the pool has 16" in request(sandbox, "too-long")["why"]
    ops = [event.op for event in Film(io.BytesIO(sandbox.played.film)).events(0, None)]
    assert Op.REFUSED in ops
    assert "pytest.raises(RequestRefused)" in sandbox.as_test()


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("name", NAMES)
def test_the_copied_test_of_an_unfinished_scene_detects_other_steps(name: str) -> None:
    sandbox = done({"do": "step", "count": 23}, sandbox=situation(name))
    text = sandbox.as_test()
    run_copied(text)
    # After other steps the state is another one.
    other = re.sub(r"^    step\((\d+)\)$", r"    step(1 + \1)", text, flags=re.MULTILINE)
    assert other != text
    with pytest.raises(AssertionError):
        run_copied(other)


def test_the_copied_test_keeps_ids() -> None:
    name = 'it\'s "so" {x} \\ </script>'
    sandbox = done({**A, "id": name, "tenant": "t'"}, {**A, "like": name, "shared": 40}, {"do": "step", "count": 2})
    run_copied(sandbox.as_test())


# ---------------------------------------------------------------------- from a film


@pytest.mark.parametrize("name", ["static", "chunks", "thrash", "priority", "fairness"])
def test_the_scene_made_from_a_film_gives_the_same_decisions(name: str) -> None:
    """The step times are also equal: in the film a step takes a constant plus a time for each token, which the fit
    finds."""
    played = done({"do": "run"}, sandbox=situation(name)).played
    remade = remake(Film(io.BytesIO(played.film)), MAX_REQUESTS, MAX_PROMPTS)
    assert remade.num_left_out == 0
    assert remade.scene.seconds_per_step == pytest.approx(0.01, rel=0.02)
    assert remade.scene.config.to_dict() == played.scene.config.to_dict()
    sandbox = done({"do": "run"}, sandbox=Sandbox(remade.scene))
    names = ("steps", "finished", "preemptions", "recomputed_tokens")
    assert [sandbox.played.figures()[each] for each in names] == [played.figures()[each] for each in names]


def test_the_scene_made_from_a_long_film_has_its_first_requests() -> None:
    played = done({"do": "run"}, sandbox=situation("static")).played
    remade = remake(Film(io.BytesIO(played.film)), 5, 10_000)
    assert (len(remade.scene.arrivals), remade.num_left_out) == (5, 19)
    assert len(remake(Film(io.BytesIO(played.film)), 500, 50).scene.arrivals) == 3


def test_the_scene_made_from_a_film_has_its_aborts() -> None:
    sandbox = done(A, A, {"do": "step", "count": 5}, {"do": "abort", "id": "A"}, {"do": "run"})
    remade = remake(Film(io.BytesIO(sandbox.played.film)), MAX_REQUESTS, MAX_PROMPTS)
    again = done({"do": "run"}, sandbox=Sandbox(remade.scene))
    assert [request(again, name)["why"] for name in "AB"] == ["finished: abort", "finished: stop"]
    assert request(again, "A")["generated"] in (4, 5)  # its time is rounded to a microsecond


def test_the_scene_made_from_a_film_drops_unsupported_settings() -> None:
    config = SchedulerConfig(num_blocks=32, max_model_len=256, max_steps_in_flight=2, num_draft_tokens=2)
    played = play(Scene(config.replace(max_steps_in_flight=1), (Arrival("A", 20, 5),), to_the_end=True))
    scene = remake(Film(io.BytesIO(played.film)), MAX_REQUESTS, MAX_PROMPTS).scene
    assert (scene.config.num_draft_tokens, scene.config.num_blocks) == (0, 32)
