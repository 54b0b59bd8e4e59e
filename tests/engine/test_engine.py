"""The engine's interface: refusals, finish reasons, failures, text, and vLLM's `LLM`."""

from __future__ import annotations

import io
import itertools
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core import DuplicateRequest, Recorder, RequestRefused, Scheduler, SchedulerConfig, replay
from pointsman.core.errors import ConfigError
from pointsman.engine import (
    LLM,
    Engine,
    EngineStepError,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
)
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.runner import NOT_FINITE, ModelRunner
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


@pytest.fixture(params=[1, 2], ids=["synchronous", "two in flight"])
def engine(loaded: LoadedModel, request: pytest.FixtureRequest) -> Engine:
    ticks = itertools.count()
    return Engine(
        loaded, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32,
        max_steps_in_flight=request.param, clock=lambda: float(next(ticks)),
    )  # fmt: skip


def test_each_step_returns_an_output_per_running_request(engine: Engine) -> None:
    engine.add_request("a", "Hello", GREEDY)
    engine.add_request("b", [7, 8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    seen: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    assert [len(output.token_ids) for output in seen["a"]] == list(range(1, 9))
    assert [output.finished for output in seen["b"]] == [False, False, True]
    last = seen["a"][-1]
    assert (last.prompt, last.prompt_token_ids) == ("Hello", engine.tokenize("Hello"))
    assert (last.finish_reason, last.finish_detail, last.stop_reason) == ("length", "max_tokens", None)
    assert last.text == engine.tokenizer.decode(last.token_ids, skip_special_tokens=True)
    assert last.metrics.arrival_time < last.metrics.first_token_time < last.metrics.finished_time
    assert seen["b"][-1].prompt is None
    assert engine.last_output is not None and engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ("", GREEDY, "the prompt is empty"),
        ([5] * 256, GREEDY, "max_model_len is 256"),
        ([5, 199], GREEDY, "token id 199 is outside the model's vocabulary of 199"),
        ([5, -1], GREEDY, "token id -1 is outside"),
        ([5, 2**40], GREEDY, "outside the model's vocabulary"),
        ([5, 1.5], GREEDY, "flat sequence of integers"),
        (5, GREEDY, "the prompt is of type int; give text or token ids"),
        (None, GREEDY, "the prompt is of type NoneType"),
    ],
)
def test_requests_that_can_never_run_are_refused_in_one_line(
    engine: Engine, prompt: Any, params: SamplingParams, message: str
) -> None:
    engine.add_request("good", [3, 4, 5], GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message) as error:
        engine.add_request("bad", prompt, params)
    assert "\n" not in str(error.value)
    assert list(drain(engine)) == ["good"], "the refusal affected another request"


def test_a_prompt_larger_than_the_pool_is_refused_with_numbers(loaded: LoadedModel) -> None:
    engine = Engine(loaded, num_blocks=2, block_size=4)
    with pytest.raises(RequestRefused, match="needs 3 KV blocks of 4, and the pool has 2"):
        engine.add_request("a", [5] * 9, GREEDY)


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add_request("a", [3], GREEDY)
    with pytest.raises(DuplicateRequest):
        engine.add_request("a", [4], GREEDY)
    assert len(drain(engine)["a"].token_ids) == 8


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        ("", "the request id is empty"),
        (5, "the request id is of type int"),
        (None, "of type NoneType"),
        (["x"], "of type list"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_invalid_request_ids_are_refused(engine: Engine, request_id: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request(request_id, [3], GREEDY)
    engine.add_request("a name with é and spaces", [3], GREEDY)
    assert len(drain(engine)) == 1


def test_each_kind_of_finish_has_its_reason(engine: Engine, loaded: LoadedModel) -> None:
    """Requests finish by a stop token, EOS, the model's maximum length (max_tokens=None) and the pool's capacity."""
    engine.add_request("free", [3, 4, 5], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    tokens = drain(engine)["free"].token_ids
    stop = next(token for i, token in enumerate(tokens) if i >= 4 and token not in tokens[:i])
    upto = tokens[: tokens.index(stop) + 1]
    engine.add_request(
        "stop", [3, 4, 5], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
    )
    engine.add_request("open", [6] * 200, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    done = drain(engine)
    assert (done["stop"].token_ids, done["stop"].finish_reason, done["stop"].stop_reason) == (upto, "stop", stop)
    assert (len(done["open"].token_ids), done["open"].finish_reason) == (56, "length")

    with_eos = LoadedModel(
        **{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "eos_token_ids": (190, stop)}
    )
    engine = Engine(with_eos, num_blocks=6, block_size=4)
    engine.add_request("eos", [3, 4, 5], SamplingParams(temperature=0, max_tokens=20))
    engine.add_request("late", [3, 4, 5], SamplingParams(temperature=0, max_tokens=20, min_tokens=len(upto) + 1))
    engine.add_request("full", [3, 4, 5], SamplingParams(temperature=0, max_tokens=99, ignore_eos=True))
    done = drain(engine)
    assert (done["eos"].token_ids, done["eos"].finish_reason) == (upto, "stop")
    late = done["late"].token_ids
    assert len(late) > len(upto) and late[: len(upto) - 1] == upto[:-1] and stop not in late[: len(upto)]
    assert (done["full"].finish_reason, done["full"].finish_detail) == ("length", "kv_capacity")
    assert len(done["full"].token_ids) == 6 * 4 + 1 - 3


def test_an_abort_frees_every_block_of_the_request(engine: Engine) -> None:
    before = free_blocks(engine)
    for name in "abc":
        engine.add_request(name, [3] * 20, GREEDY)
    engine.step()
    aborted = engine.abort("a")
    assert aborted is not None and aborted.finished and aborted.finish_reason == "abort"
    assert engine.abort("a") is None and engine.abort("nobody") is None
    assert set(drain(engine)) == {"b", "c"}
    assert free_blocks(engine) == before


def test_unseeded_requests_differ_and_an_engine_repeats_itself(loaded: LoadedModel) -> None:
    def outputs(seed: int) -> list[list[int]]:
        engine = Engine(loaded, num_blocks=64, block_size=4, seed=seed)
        for name in "ab":
            engine.add_request(name, [3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
        done = drain(engine)
        return [done["a"].token_ids, done["b"].token_ids]

    first = outputs(0)
    assert first[0] != first[1] and first == outputs(0) and first != outputs(1)


# ------------------------------------------------------------------------------------------------------- failures


def test_a_failed_step_is_rewound_and_can_be_retried(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fail at several points, also in the middle of the layers, with requests that share prefixes in the failing
    step."""
    prompts = [[3 + i % 5] * (4 + 3 * i) for i in range(6)] + [[9] * 30, [9] * 30]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    expected = {key: output.token_ids for key, output in drain(engine).items()}
    engine.step()
    engine.scheduler.reset_prefix_cache(engine.clock())

    second = engine.loaded.model.model.layers[1].mlp
    original, calls = second.forward, itertools.count()

    def breaks_sometimes(*arguments: Any) -> torch.Tensor:
        if next(calls) % 3 == 0:
            raise MemoryError("out of memory, says the test")
        return original(*arguments)

    monkeypatch.setattr(second, "forward", breaks_sometimes)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    done: dict[str, RequestOutput] = {}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            done.update((output.request_id, output) for output in engine.step() if output.finished)
        except EngineStepError as error:
            failures += 1
            assert "MemoryError: out of memory" in str(error)
        engine.scheduler.check_invariants()
    assert failures > 4
    assert {key: output.token_ids for key, output in done.items()} == expected


def test_an_interrupt_leaves_the_engine_usable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("a", [3, 4], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda prepared: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert len(drain(engine)["a"].token_ids) == 8


@pytest.mark.parametrize("where", ["schedule", "begin", "end", "update"])
def test_an_interrupt_between_parts_of_a_step_leaves_the_engine_usable(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Interrupts come after `schedule`, after the model's lock is acquired, before it is released, and before `update`.
    The engine can be stepped again, and an engine of another thread can still use the same model."""
    if where in ("begin", "end") and engine.scheduler.config.max_steps_in_flight > 1:
        pytest.skip("the model runs in a thread of its own, and signals are handled in the main thread")
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()
    context = type(engine.loaded.context)
    place: tuple[Any, str] = {
        "schedule": (Scheduler, "schedule"),
        "begin": (context, "begin"),
        "end": (context, "end"),
        "update": (Scheduler, "update"),
    }[where]
    original, interrupts = getattr(*place), itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if where in ("update", "end") and next(interrupts) == 0:
            raise KeyboardInterrupt
        returned = original(*arguments)
        if where == "begin" and next(interrupts) == 0:
            raise KeyboardInterrupt
        return returned

    def note_time() -> float:
        if where == "schedule" and engine.scheduler.num_steps_in_flight and next(interrupts) == 0:
            raise KeyboardInterrupt
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupted)
        patch.setattr("pointsman.engine.engine.time.perf_counter", note_time)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    done: dict[str, RequestOutput] = {}

    def other_engine() -> None:
        other = Engine(engine.loaded, num_blocks=64, block_size=4)
        other.add_request("other", [3, 4], GREEDY)
        done.update(drain(other))

    thread = threading.Thread(target=other_engine, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the model is still locked"
    done.update(drain(engine))
    assert done["a"].token_ids == done["other"].token_ids and len(done["a"].token_ids) == 8


def test_a_row_with_nan_ends_only_its_own_request(engine: Engine) -> None:
    """A token with a NaN embedding ends its own request only; other and later requests are not affected."""
    embedding = engine.loaded.model.get_input_embeddings().weight
    saved = embedding[77].clone()
    engine.add_request("ref", [5, 6, 7], GREEDY)
    expected = drain(engine)["ref"].token_ids
    assert 77 not in expected
    engine.step()
    embedding[77] = float("nan")
    try:
        engine.add_request("bad", [5, 77, 6], GREEDY)
        engine.add_request("good", [5, 6, 7], GREEDY)
        done = drain(engine)
        assert (done["bad"].finish_reason, done["bad"].finish_detail) == ("error", NOT_FINITE)
        for round_trip in range(20):  # long enough to get every block that held NaN
            engine.add_request(f"next{round_trip}", [5, 6, 7] + [8] * (3 * round_trip), GREEDY)
        later = drain(engine)
    finally:
        embedding[77] = saved
    assert done["good"].token_ids == later["next0"].token_ids == expected
    assert all(output.finish_reason == "length" for output in later.values())


def test_a_step_without_rows_does_not_run_the_model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8))
    pool = KVPool(loaded.layers, num_blocks=4, block_size=16, dtype=torch.float32)
    runner = ModelRunner(loaded, pool, scheduler)
    monkeypatch.setattr(loaded.model, "forward", None)
    output = scheduler.schedule(0.0)
    result = runner.execute(output).result
    assert len(result.token_ids) == 0
    assert len(scheduler.update(output, result, 0.0).token_ids) == 0


# ---------------------------------------------------------------------------------------------------------- knobs


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens is 4, less than max_num_seqs 64"),
        ({"max_model_len": 1000}, "max_model_len is 1000, but the model allows at most 256 tokens"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"kv_cache_bytes": 10}, "less than one block"),
        ({"num_blocks": 4, "kv_cache_bytes": 10**6}, "both given"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"watermark": 1.5}, "watermark is 1.5"),
        ({"order": "alphabetic"}, "alphabetic"),
    ],
)
def test_invalid_engine_knobs_are_refused(loaded: LoadedModel, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(loaded, **knobs)


def test_repetition_detection_ends_a_repeating_output(engine: Engine) -> None:
    params = SamplingParams(
        allowed_token_ids=[9],
        ignore_eos=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=5),
    )
    engine.add_request("a", "Hello", params)
    output = drain(engine)["a"]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        [9] * 5,
        "repetition",
        "repetition_detected",
    )
    assert output.text == engine.tokenizer.decode([9] * 5), "the repetition is part of the text"


def test_log_request_events_puts_events_into_outputs(loaded: LoadedModel) -> None:
    engine = Engine(loaded, num_blocks=64, log_request_events=True)
    engine.add_request("a", "Hello", GREEDY)
    output = drain(engine)["a"]
    assert [event.type.name for event in output.metrics.events] == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
    assert output.metrics.events[1].timestamp == output.metrics.first_scheduled_time


def test_scheduler_knobs_of_an_engine_reach_the_scheduler(loaded: LoadedModel) -> None:
    config = Engine(
        loaded, kv_cache_bytes=200_000, block_size=8, max_model_len=100, order="priority", watermark=0.1,
        displace=False, victim="latest", long_prefill_token_threshold=9, full_sequence_must_fit=False,
        decode_reserve="mean",
    ).scheduler.config  # fmt: skip
    per_block = 2 * 2 * (16 + 16) * 4 * 8
    assert (config.num_blocks, config.block_size, config.max_model_len) == (200_000 // per_block, 8, 100)
    assert (config.order, config.victim, config.displace, config.watermark) == ("priority", "latest", False, 0.1)
    assert (config.long_prefill_token_threshold, config.full_sequence_must_fit) == (9, False)
    assert config.decode_reserve == "mean"
    with pytest.raises(ConfigError):
        Engine(loaded, displace=True)


def test_a_recording_of_the_engine_replays(loaded: LoadedModel) -> None:
    file = io.StringIO()
    engine = Engine(
        loaded,
        num_blocks=12,
        block_size=4,
        max_num_batched_tokens=64,
        full_sequence_must_fit=False,
        recorder=Recorder(file),
    )
    for index in range(8):
        engine.add_request(str(index), [3 + index] * (3 + 2 * index), SamplingParams(max_tokens=20, seed=index))
    drain(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    file.seek(0)
    replay(file)


# ----------------------------------------------------------------------------------------------------------- text


def test_invalid_unicode_in_prompts_is_refused() -> None:
    engine = Engine("demo", num_blocks=8, max_model_len=64)
    with pytest.raises(ValueError, match="not valid Unicode text"):
        engine.add_request("r", "a lone surrogate: \ud800")
    assert not engine.has_unfinished_requests()


def test_an_engine_without_a_tokenizer_accepts_token_ids_only(loaded: LoadedModel) -> None:
    bare = LoadedModel(**{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "tokenizer": None})
    engine = Engine(bare, num_blocks=16)
    with pytest.raises(ValueError, match="no tokenizer; give the prompt as token ids"):
        engine.add_request("a", "text", GREEDY)
    engine.add_request("a", [4], GREEDY)
    assert drain(engine)["a"].text == ""


# ------------------------------------------------------------------------------------------------------------ LLM


def test_llm_returns_outputs_in_the_order_of_the_prompts(
    loaded: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(loaded, num_blocks=64, block_size=4)
    prompts = ["short", {"prompt_token_ids": [9] * 40}, {"prompt": "third", "cache_salt": "x"}]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    outputs = llm.generate(prompts, params)
    assert "3/3" in capfd.readouterr().err
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]
    assert [output.prompt for output in outputs] == ["short", None, "third"]
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    one = llm.generate("short", params[0], use_tqdm=False)
    assert len(one) == 1 and one[0].outputs[0].text == outputs[0].outputs[0].text
    assert len(llm.generate([{"prompt_token_ids": np.array([4, 5])}], use_tqdm=False)[0].token_ids) <= 16
    assert llm.generate([], use_tqdm=False) == []


def test_llm_runs_nothing_if_a_prompt_is_invalid(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=16)
    for bad in ([[5] * 999, 3], [{"text": "x"}], [{"prompt_token_ids": [5] * 400}], [{"prompt_token_ids": []}]):
        with pytest.raises(ValueError, match=r"^prompt 1: "):
            llm.generate(["good", *bad], GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
    for odd in ({"prompt_token_ids": 5}, {"prompt": 7}, 5, None):
        with pytest.raises(ValueError, match=r"^prompt 1: .* (int|NoneType)"):
            llm.generate(["good", odd], GREEDY, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="prompts is of type int; give a prompt, or a list of them"):
        llm.generate(5, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY], use_tqdm=False)
    assert len(llm.generate("still works", GREEDY, use_tqdm=False)[0].token_ids) == 8


def test_llm_runs_nothing_if_interrupted_while_adding(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(loaded, num_blocks=16)
    original = llm.engine.outputs.add

    def interrupted(*arguments: Any, **options: Any) -> None:
        if len(llm.engine.outputs) == 2:
            raise KeyboardInterrupt
        original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.outputs, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests() and len(llm.engine.outputs) == 0
    assert len(llm.generate("still works", GREEDY, use_tqdm=False)[0].token_ids) == 8


class Presses:
    """Sends SIGINT, as Ctrl-C does, a number of times during a model's next forward pass, and records whether the pass
    completed."""

    def __init__(self, model: Any, times: int = 1) -> None:
        self.times = times
        self.forward_ended = False
        self._handles = [
            model.model.layers[1].register_forward_pre_hook(self._press),
            model.register_forward_hook(self._note_end),
        ]

    def _press(self, *_: Any) -> None:
        while self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)

    def _note_end(self, *_: Any) -> None:
        self.forward_ended = True

    def __enter__(self) -> Presses:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_llm_after_the_step_and_a_second_ctrl_c_now(loaded: LoadedModel, times: int) -> None:
    llm = LLM(loaded, num_blocks=64, block_size=4)
    handler = signal.getsignal(signal.SIGINT)
    with Presses(loaded.model, times) as presses, pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert presses.forward_ended == (times == 1)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.engine.has_unfinished_requests() and len(llm.engine.outputs) == 0
    assert len(llm.generate("still works", GREEDY, use_tqdm=False)[0].token_ids) == 8


def test_a_custom_ctrl_c_handler_is_called_after_the_step(loaded: LoadedModel) -> None:
    llm = LLM(loaded, num_blocks=64, block_size=4)
    calls: list[bool] = []
    with Presses(loaded.model) as presses:
        previous = signal.signal(signal.SIGINT, lambda *_: calls.append(presses.forward_ended))
        try:
            outputs = llm.generate("one", GREEDY, use_tqdm=False)
        finally:
            signal.signal(signal.SIGINT, previous)
    assert calls == [True] and len(outputs[0].token_ids) == 8


def test_llm_runs_in_any_thread(loaded: LoadedModel) -> None:
    outputs: list[RequestOutput] = []
    llm = LLM(loaded, num_blocks=64, block_size=4)
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate("one", GREEDY, use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(outputs[0].token_ids) == 8


def test_importing_the_engine_package_loads_no_pytorch() -> None:
    code = "import sys, pointsman.engine; assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_pool_larger_than_memory_raises_value_error() -> None:
    with pytest.raises(
        ValueError, match=r"a KV pool of \d+ blocks needs [\d,.]+ GiB, which is not available; lower num_b"
    ):
        Engine("demo", num_blocks=2**26)
