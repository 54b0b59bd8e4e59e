"""Several steps in flight: equal outputs, also with aborts, stops and failures, and no leaks."""

from __future__ import annotations

import gc
import io
import random
import weakref
from typing import Any

import pytest

from pointsman.core import Recorder, Scheduler, replay
from pointsman.engine import LLM, Engine, EngineStepError, RequestOutput, SamplingParams, StructuredOutputsParams
from pointsman.engine.attention.paged import PagedBatch
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.prepared import PreparedStep
from pointsman.engine.model.runner import StepExecution
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.plain_requests import FEATURES
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build

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
    """Add requests with every feature of sampling, text and structured output. Structured output needs the process that
    compiles grammars."""
    for i, feature in enumerate([*FEATURES, *TEXTS]):
        if not structured and "structured_outputs" in feature:
            continue
        prompt = [3 + (7 * i + 3 * j) % 150 for j in range(4 + 5 * i % 23)]
        params = {"max_tokens": 4 + 5 * i % 22, "ignore_eos": True, "seed": i, **feature}
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        engine.add_request(f"r{i}", prompt, SamplingParams(**params))


def story(output: RequestOutput) -> tuple[Any, ...]:
    """The fields of a request's last output that its caller reads."""
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
def test_outputs_equal_those_with_one_step_in_flight(
    loaded: LoadedModel, expected: dict[str, tuple[Any, ...]], steps: int, num_blocks: int
) -> None:
    """The requests are greedy, sampled, with edited logits, stop strings, stop tokens, structured output or log
    probabilities; some are preempted."""
    engine = make(loaded, steps, num_blocks=num_blocks, full_sequence_must_fit=False)
    add_mixture(engine)
    done = drain(engine)
    assert {name: story(output) for name, output in done.items()} == expected
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 3) == (num_blocks < 100)
    assert len(engine.outputs) == 0 == engine.scheduler.num_steps_in_flight


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_time_do_not_affect_other_requests(
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
            assert output.token_ids == expected[name][1][: len(output.token_ids)], "its tokens so far are right"
            live.discard(name)
        engine.scheduler.check_invariants()
    assert 5 < len(done) < len(expected) - 2
    assert all(story(output) == expected[name] for name, output in done.items())
    assert free_blocks(engine) == 30


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_step_voids_all_later_steps(
    loaded: LoadedModel, expected: dict[str, tuple[Any, ...]], when: str
) -> None:
    """A step fails before the previous step was updated, or after that update, when later steps were scheduled."""
    engine = make(loaded, 3)
    add_mixture(engine, structured=False)
    calls, run, outputs = iter(range(10**6)), engine.runner.run, {}

    def breaks_sometimes(prepared: PreparedStep) -> StepExecution:
        fails = next(calls) % 5 == 4
        execution = run(prepared) if when == "after" or not fails else None
        if fails:
            raise MemoryError("says the test")
        assert execution is not None
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


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the beginning and the end of the engine's `schedule`, `prepare`, `run` and `update` calls, in order."""
    events: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            events.append(f"{name} begins")
            answer = function(*arguments)
            events.append(f"{name} ends")
            return answer

        monkeypatch.setattr(owner, name, watched)

    for owner, names in ((Scheduler, ("schedule", "update")), (engine.runner, ("prepare", "run"))):
        for name in names:
            wrap(owner, name)
    return events


def test_update_and_schedule_run_while_the_model_computes(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(loaded)
    events = watch(engine, monkeypatch)
    engine.add_request("a", [3, 4, 5], GREEDY)
    for number in range(8):
        events.clear()
        engine.step()
        begun = [event.removesuffix(" begins") for event in events if event.endswith("begins")]
        first, last = number == 0, number == 7
        assert begun == (
            (["schedule", "prepare"] if first else [])
            + ["run"]
            + ([] if first else ["update"])
            + (["update"] if last else ["schedule", "prepare"])
        )
        end = events.index("run ends")
        assert end == len(events) - 1 - 2 * last, "only the last step is updated after its end"
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("seed", range(3))
def test_postponing_any_part_of_a_step_changes_no_outputs(
    loaded: LoadedModel, expected: dict[str, tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Attention takes long enough for some parts of other steps, or for no part."""
    choose, do_meanwhile = random.Random(seed), PagedBatch.do_meanwhile

    def some(batch: PagedBatch, _: Any) -> None:
        parts = iter(range(choose.randrange(3)))
        do_meanwhile(batch, lambda: next(parts, None) is not None)

    monkeypatch.setattr(PagedBatch, "do_meanwhile", some)
    engine = make(loaded, 2 + seed % 2, num_blocks=22, full_sequence_must_fit=False)
    add_mixture(engine)
    assert {name: story(output) for name, output in drain(engine).items()} == expected
    assert free_blocks(engine) == 22


def test_a_step_that_never_waits_schedules_no_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no part of another step fits into the model's computation, all parts run in order, as with one step in
    flight."""
    engine = make(wrap_model(build(FAMILIES["qwen3"](), seed=1), fuse=False), attention="torch")
    events = watch(engine, monkeypatch)
    engine.add_request("a", [3, 4, 5], GREEDY)
    drain(engine)
    one = [f"{name} {what}" for name in ("schedule", "prepare", "run", "update") for what in ("begins", "ends")]
    assert events == one * 8


def test_outputs_are_delivered_before_the_current_step_ends(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener gets a token while the model computes the next token."""
    engine = make(loaded)
    events, seen = watch(engine, monkeypatch), []
    engine.on_output = lambda output: seen.append((len(output.token_ids), events[-1]))
    engine.add_request("a", [3, 4, 5], GREEDY)
    assert [engine.step() for _ in range(8)] == [[]] * 8, "they were delivered before"
    assert [count for count, _ in seen] == list(range(1, 9))
    assert {event for _, event in seen} == {"update ends"}


def test_no_step_is_scheduled_that_cannot_sample_a_token(loaded: LoadedModel) -> None:
    """No step is scheduled after the last token of the last request, or before a grammar has accepted the previous
    token."""
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


def test_tokens_in_flight_after_a_stop_string_are_dropped_and_not_billed(loaded: LoadedModel) -> None:
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


@pytest.mark.parametrize("where", ["run", "prepare", "schedule", "update"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_any_part_of_a_step_leaves_engines_usable(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    engine = make(loaded, num_threads=2)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    raised: Any = EngineStepError if error is RuntimeError and where in ("run", "prepare") else error
    for _ in range(2):
        with monkeypatch.context() as patch:
            owner: Any = Scheduler if where in ("schedule", "update") else engine.runner

            def broken(*arguments: Any) -> None:
                raise error

            patch.setattr(owner, where, broken)
            with pytest.raises(raised):
                engine.step()
        assert engine.scheduler.num_steps_in_flight == 0
        engine.scheduler.check_invariants()
        engine.step()
    assert drain(engine)["a"].token_ids == tokens


def test_a_last_output_is_returned_although_the_next_step_failed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(loaded)
    free = drain_one(engine, [3, 4, 5], GREEDY)
    stop = [free.token_ids[3]]
    assert stop[0] not in free.token_ids[:3]
    engine.add_request(
        "a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=stop, ignore_eos=True)
    )
    for _ in range(4):
        assert not any(output.finished for output in engine.step())
    run = engine.runner.run

    def breaks(prepared: PreparedStep) -> StepExecution:
        run(prepared)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", breaks)
        with pytest.raises(EngineStepError):
            engine.step()
    assert engine.has_unfinished_requests(), "there is an output to return"
    (output,) = engine.step()
    assert output.finish_reason == "stop" and output.token_ids == free.token_ids[:4]
    assert not engine.has_unfinished_requests()


def drain_one(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("one", prompt, params)
    return drain(engine)["one"]


def test_a_step_is_voided_if_an_interrupt_follows_its_scheduling(loaded: LoadedModel) -> None:
    """An interrupt arrives after `schedule` decided a step and before the step loop recorded it, while another
    interrupt is handled."""
    engine = make(loaded, 3)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    engine.steps.void()
    engine.steps.schedule()
    assert drain(engine)["a"].token_ids == tokens


def test_an_interrupted_llm_leaves_no_step_in_flight(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(loaded, num_blocks=64, block_size=4, max_steps_in_flight=2)
    expected = llm.generate([{"prompt_token_ids": [3, 4]}], GREEDY, use_tqdm=False)[0].token_ids
    update, countdown = Scheduler.update, iter([0, 0, 1])

    def interrupted(*arguments: Any) -> Any:
        if next(countdown, 0):
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(Scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [3, 4]}, {"prompt_token_ids": [5]}], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.num_steps_in_flight == 0
    assert llm.generate([{"prompt_token_ids": [3, 4]}], GREEDY, use_tqdm=False)[0].token_ids == expected


def test_a_deleted_or_closed_engine_leaves_no_step_in_flight(loaded: LoadedModel) -> None:
    engine = make(loaded)
    for name in "ab":
        engine.add_request(name, [3, 4], GREEDY)
        engine.step()
        assert engine.scheduler.num_steps_in_flight == 2
        engine.close()
        assert engine.scheduler.num_steps_in_flight == 0
    assert len(drain(engine)) == 2
    engine.add_request("c", [3, 4], GREEDY)
    engine.step()
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    assert len(drain_one(make(loaded), [3, 4], GREEDY).token_ids) == 8


def test_a_pause_completes_with_the_steps_in_flight(loaded: LoadedModel) -> None:
    engine = make(loaded)
    engine.add_request("ref", [3, 4], GREEDY)
    tokens = drain(engine)["ref"].token_ids
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    paused = engine.pause("keep")
    assert not paused.done() and engine.has_runnable_requests(), "one step is in flight"
    assert [output.token_ids for output in engine.step()] == [tokens[:1], tokens[:2]], "its token is kept"
    assert paused.done() and not engine.has_runnable_requests()
    engine.resume()
    assert drain(engine)["a"].token_ids == tokens


def test_a_recording_with_steps_in_flight_replays(loaded: LoadedModel) -> None:
    file = io.StringIO()
    engine = make(loaded, 3, num_blocks=26, full_sequence_must_fit=False, recorder=Recorder(file))
    add_mixture(engine, structured=False)
    drain(engine)
    report = replay(iter(file.getvalue().splitlines()))
    assert report.num_steps == engine.counters.num_steps and report.num_preemptions > 0


def test_the_token_of_a_failed_row_affects_no_other_request(loaded: LoadedModel) -> None:
    """When the row fails, its next step is already in flight with an input that is not a real token."""
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


def test_deadlines_end_requests_with_steps_in_flight(loaded: LoadedModel) -> None:
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
