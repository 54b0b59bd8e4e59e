"""Several steps in flight: the same answers, whatever becomes of requests meanwhile, and nothing left behind."""

from __future__ import annotations

import gc
import io
import random
import threading
import time
import weakref
from typing import Any

import pytest
from test_engine import byte_tokenizer, drain, free_blocks
from test_sampling_batch import FEATURES
from tiny_models import FAMILIES, build

from pointsman.core.recording import Recorder, replay
from pointsman.engine import LLM, Engine, EngineStepError, RequestOutput, SamplingParams, StructuredOutputsParams
from pointsman.engine.model_loader import LoadedModel, wrap_model
from pointsman.engine.model_runner import PreparedStep, StepExecution

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXTS: list[dict[str, Any]] = [
    {"stop": ["e"]},
    {"stop": ["ab", "!", "#"], "include_stop_str_in_output": True},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,9}"), "ignore_eos": False},
    {"structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps"]), "ignore_eos": False},
    {"detokenize": False, "stop_token_ids": list(range(40, 80))},
    {"ignore_eos": False, "logit_bias": {2: 3.0}},
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


def make(loaded: LoadedModel, steps: int = 2, **knobs: Any) -> Engine:
    knobs = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **knobs}
    return Engine(loaded, max_steps_in_flight=steps, **knobs)


def add_mixture(engine: Engine, *, structured: bool = True) -> None:
    """Requests with every feature of sampling, text and structure (whose grammars take a process of their own)."""
    for i, feature in enumerate([*FEATURES, *TEXTS]):
        if not structured and "structured_outputs" in feature:
            continue
        prompt = [3 + (7 * i + 3 * j) % 150 for j in range(4 + 5 * i % 23)]
        params = {"max_tokens": 4 + 5 * i % 22, "ignore_eos": True, "seed": i, **feature}
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        engine.add_request(f"r{i}", prompt, SamplingParams(**params))


def story(output: RequestOutput) -> tuple[Any, ...]:
    """All that a caller sees of a request's end."""
    completion = output.outputs[0]
    logprobs = [
        {token: (round(entry.logprob, 3), entry.decoded_token) for token, entry in place.items()}
        for place in completion.logprobs or ()
    ]
    return completion.text, output.token_ids, output.finish_reason, output.stop_reason, output.finish_detail, logprobs


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> dict[str, tuple[Any, ...]]:
    engine = make(loaded, steps=1, num_blocks=400)
    add_mixture(engine)
    return {name: story(output) for name, output in drain(engine).items()}


@pytest.mark.parametrize(("steps", "num_blocks"), [(2, 400), (2, 22), (3, 22)])
def test_answers_are_those_of_one_step_at_a_time(
    loaded: LoadedModel, expected: dict[str, tuple[Any, ...]], steps: int, num_blocks: int
) -> None:
    """Sampled and greedy, edited, stopped by text and tokens, structured, with log probabilities; with preemptions."""
    engine = make(loaded, steps, num_blocks=num_blocks, full_sequence_must_fit=False)
    add_mixture(engine)
    done = drain(engine)
    assert {name: story(output) for name, output in done.items()} == expected
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 3) == (num_blocks < 100)
    assert len(engine.outputs) == 0 == engine.scheduler.num_steps_in_flight


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_disturb_nobody_else(
    loaded: LoadedModel, expected: dict[str, tuple[Any, ...]], seed: int
) -> None:
    choose = random.Random(seed)
    engine = make(loaded, 3, num_blocks=30, full_sequence_must_fit=False)
    add_mixture(engine, structured=False)
    live, done = {request.request_id for request in engine.outputs.requests}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
                live.discard(output.request_id)
        if live and choose.random() < 0.15:
            name = choose.choice(sorted(live))
            output = engine.abort(name)
            assert output is not None and output.finish_reason == "abort"
            assert output.token_ids == expected[name][1][: len(output.token_ids)], "what it had is right"
            live.discard(name)
        engine.scheduler.check_invariants()
    assert 5 < len(done) < len(expected) - 2
    assert all(story(output) == expected[name] for name, output in done.items())
    assert free_blocks(engine) == 30


def test_a_failed_step_voids_those_behind_it(loaded: LoadedModel, expected: dict[str, tuple[Any, ...]]) -> None:
    engine = make(loaded, 3)
    add_mixture(engine, structured=False)
    calls, run, outputs = iter(range(10**6)), engine.runner.run, {}

    def breaks_sometimes(prepared: PreparedStep) -> StepExecution:
        execution = run(prepared)
        if next(calls) % 5 == 4:
            raise MemoryError("says the test")
        return execution

    engine.runner.run = breaks_sometimes  # type: ignore[method-assign]
    failures = 0
    while engine.has_unfinished_requests():
        try:
            outputs.update((output.request_id, output) for output in engine.step() if output.finished)
        except EngineStepError as error:
            failures += 1
            assert "MemoryError: says the test" in str(error)
            assert engine.scheduler.num_steps_in_flight == 0
        engine.scheduler.check_invariants()
    assert failures > 5 and engine.scheduler.stats().num_failed_steps > failures
    assert len(outputs) == len(expected) - 2
    assert all(story(output) == expected[name] for name, output in outputs.items())


# ------------------------------------------------------------------------------------------------------- the overlap


def test_the_next_step_is_scheduled_and_the_last_one_is_taken_in_while_the_model_runs(loaded: LoadedModel) -> None:
    """In a thread of its own, which holds each step here until the other thread has done both."""
    engine = make(loaded)
    run, seen = engine.runner.run, []

    def watched(prepared: PreparedStep) -> StepExecution:
        deadline = time.monotonic() + 10
        while engine.scheduler.num_steps_in_flight < 2 and len(seen) < 7 and time.monotonic() < deadline:
            time.sleep(0.0005)  # until the other thread has taken in the last step and scheduled one more
        seen.append((threading.current_thread().name, engine.scheduler.num_steps_in_flight))
        return run(prepared)

    engine.runner.run = watched  # type: ignore[method-assign]
    engine.add_request("a", [3, 4, 5], GREEDY)
    assert len(drain(engine)["a"].token_ids) == 8
    assert [name for name, _ in seen] == ["pointsman-steps"] * 8
    assert [count for _, count in seen[:7]] == [2] * 7, "all but the last, behind which there is nothing to do"


def test_no_step_is_scheduled_for_nothing(loaded: LoadedModel) -> None:
    """Behind the last token of the last request, and behind a token that a grammar has yet to see."""
    for params in (GREEDY, SamplingParams(**TEXTS[3], max_tokens=12)):
        counts = []
        for steps in (1, 3):
            engine = make(loaded, steps)
            engine.add_request("a", [3, 4, 5], params)
            if engine.grammars.num_waiting:
                engine.grammars.wait(10)
            drain(engine)
            counts.append(engine.counters.num_steps)
        assert counts[0] == counts[1]


def test_a_stop_string_hides_and_bills_nothing_that_is_in_flight(loaded: LoadedModel) -> None:
    counted = []
    for steps in (1, 2):
        engine = make(loaded, steps)
        engine.add_request("free", [3, 4, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        free = drain(engine)["free"]
        stop = free.outputs[0].text[6]
        engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop]))
        before = engine.counters.num_generated_tokens
        output = drain(engine)["a"]
        assert output.stop_reason == stop and output.outputs[0].text == free.outputs[0].text.split(stop)[0]
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        counted.append((len(output.token_ids), engine.counters.num_generated_tokens - before))
    assert counted[0] == counted[1] and counted[0][0] == counted[0][1]


# --------------------------------------------------------------------------------------------------------------- ends


def test_an_interrupt_while_it_waits_leaves_the_engine_usable(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(loaded)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    step = engine.steps._steps[0]
    with monkeypatch.context() as patch:
        patch.setattr(type(step.execution), "result", lambda future: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.scheduler.num_steps_in_flight == 0
    assert drain(engine)["a"].token_ids == tokens


def test_a_call_that_was_broken_off_between_two_steps_is_made_good(loaded: LoadedModel) -> None:
    """As by an interrupt between the decision and its submission, during the handling of another one."""
    engine = make(loaded)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    engine.schedule()
    assert drain(engine)["a"].token_ids == tokens


def test_llm_leaves_no_step_behind_when_it_is_interrupted(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=64, block_size=4, max_steps_in_flight=2)
    expected = llm.generate([{"prompt_token_ids": [3, 4]}], GREEDY, use_tqdm=False)[0].token_ids
    update, countdown = llm.engine.update, iter([0, 0, 1])

    def interrupted(*arguments: Any) -> list[RequestOutput]:
        if next(countdown, 0):
            raise KeyboardInterrupt
        return update(*arguments)

    llm.engine.update = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [5]}], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.num_steps_in_flight == 0
    assert llm.generate([{"prompt_token_ids": [3, 4]}], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_the_worker_ends_with_its_engine_and_can_be_closed_before(loaded: LoadedModel) -> None:
    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "pointsman-steps"]

    gc.collect()
    others = set(workers())
    engine = make(loaded)
    assert set(workers()) <= others, "it is started by the first step"
    for name in "ab":
        engine.add_request(name, [3, 4], GREEDY)
        engine.step()
        (mine,) = set(workers()) - others
        engine.close()
        assert not mine.is_alive() and engine.scheduler.num_steps_in_flight == 0
    assert len(drain(engine)) == 2
    (mine,) = set(workers()) - others
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    mine.join(10)
    assert not mine.is_alive()


def test_a_pause_is_complete_when_the_steps_in_flight_are(loaded: LoadedModel) -> None:
    engine = make(loaded)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    paused = engine.pause("keep")
    assert not paused.done() and engine.has_runnable_requests(), "one step is under way"
    (output,) = engine.step()
    assert output.token_ids == tokens[:2], "its token is kept"
    assert paused.done() and not engine.has_runnable_requests()
    engine.resume()
    assert drain(engine)["a"].token_ids == tokens


def test_a_recording_replays(loaded: LoadedModel) -> None:
    file = io.StringIO()
    engine = make(loaded, 3, num_blocks=26, full_sequence_must_fit=False, recorder=Recorder(file))
    add_mixture(engine, structured=False)
    drain(engine)
    report = replay(iter(file.getvalue().splitlines()))
    assert report.num_steps == engine.counters.num_steps and report.num_preemptions > 0


def test_the_token_of_a_row_that_failed_on_its_own_harms_nobody(loaded: LoadedModel) -> None:
    """It has a step in flight behind the one in which it failed, whose input is no real token."""
    embedding = loaded.model.get_input_embeddings().weight
    saved = embedding[77].clone()
    engine = make(loaded)
    engine.add_request("ref", [5, 6, 7], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    embedding.data[77] = float("nan")
    try:
        engine.add_request("bad", [5, 77, 6], GREEDY)
        engine.add_request("good", [5, 6, 7], GREEDY)
        done = drain(engine)
    finally:
        embedding.data[77] = saved
    assert done["bad"].finish_reason == "error" and done["bad"].token_ids == []
    assert done["good"].token_ids == tokens


def test_deadlines_hold_with_steps_in_flight(loaded: LoadedModel) -> None:
    now = [0.0]
    engine = make(loaded, 3, clock=lambda: now[0])
    engine.add_request("late", [3, 4], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), deadline=5.0)
    engine.add_request("other", [5, 6], GREEDY)
    done: dict[str, RequestOutput] = {}
    history: list[int] = []
    while engine.has_unfinished_requests():
        now[0] += 1
        for output in engine.step():
            if output.request_id == "late":
                history.append(len(output.token_ids))
            if output.finished:
                done[output.request_id] = output
    assert done["late"].finish_reason == "deadline" and done["other"].finish_reason == "length"
    assert history[-1] == len(done["late"].token_ids) < 6, "nothing came after the end"
