"""Structured output in an engine: texts conform, independent of other requests, and failures are isolated."""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from pointsman.core import Request, RequestStatus
from pointsman.core.state.reason import Reason
from pointsman.engine import (
    LLM,
    AsyncEngine,
    Engine,
    GrammarError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pointsman.engine.errors import NOTHING_LEFT
from pointsman.engine.grammar.compiler import GrammarCompiler
from pointsman.engine.grammar.matcher import RequestGrammar
from pointsman.engine.grammar.process import CompiledGrammar, GrammarLimits
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model, wrap_model
from pointsman.engine.sampling.logit_edits import EditedRow, LogitEdits
from tests.engine.engine_loop import free_blocks
from tests.engine.hopeless_grammar import HOPELESS, is_alive, wait_until
from tests.engine.json_schemas import random_document, random_schema
from tests.engine.tiny_models import HEAD16, Family, build
from tests.forms import short_or_long

pytestmark = pytest.mark.e2e

NUM_SCHEMAS = short_or_long(24, 200)
PADDED_VOCAB_SIZE = 2100
"""Logits of the random model: more than the tokenizer, that of the demo model, has tokens."""
PROMPT = "The import statement"


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo", "float32")


@pytest.fixture(scope="module")
def tiny(demo: LoadedModel) -> LoadedModel:
    """A model with random weights, which knows no JSON and prefers tokens that do not exist."""
    options = {**HEAD16, "vocab_size": PADDED_VOCAB_SIZE, "eos_token_id": 0, "max_position_embeddings": 4096}
    return wrap_model(build(Family("qwen3", "", options)(), seed=3), tokenizer=demo.tokenizer)


def compiler_for(loaded: LoadedModel, **limits: Any) -> GrammarCompiler:
    return GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids, limits=GrammarLimits(**limits))


@pytest.fixture(scope="module")
def demo_compiler(demo: LoadedModel) -> Iterator[GrammarCompiler]:
    """One process for many engines, because it takes some seconds to start."""
    compiler = compiler_for(demo)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tiny_compiler(tiny: LoadedModel) -> Iterator[GrammarCompiler]:
    compiler = compiler_for(tiny)
    yield compiler
    compiler.close()


@pytest.fixture
def llm(demo: LoadedModel, demo_compiler: GrammarCompiler) -> LLM:
    return llm_with(demo, demo_compiler)


def llm_with(loaded: LoadedModel, compiler: GrammarCompiler, **knobs: Any) -> LLM:
    knobs = {"num_blocks": 512, "block_size": 16, "max_num_seqs": 16, "max_model_len": 2048, **knobs}
    llm = LLM(loaded, log_stats_interval=None, **knobs)
    llm.engine.grammars = compiler
    return llm


def structured(seed: int = 0, temperature: float = 1.0, max_tokens: int = 200, **options: Any) -> SamplingParams:
    own = {name: options.pop(name) for name in list(options) if name in SamplingParams.__dataclass_fields__}
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**options),
        **own,
    )


def generate(llm: LLM, params: SamplingParams | Sequence[SamplingParams], prompt: str = PROMPT) -> list[RequestOutput]:
    many = [params] if isinstance(params, SamplingParams) else list(params)
    return llm.generate([prompt] * len(many), many, use_tqdm=False)


def complete(outputs: list[RequestOutput], least: float = 0.9) -> list[int]:
    """The requests that ended by their grammar; the others reached max_tokens."""
    found = [index for index, output in enumerate(outputs) if output.finish_reason == "stop"]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(found) >= least * len(outputs)
    return found


# ---------------------------------------------------------------------------------------------- what texts look like


@pytest.mark.parametrize("which", ["demo", "tiny"])
def test_json_conforms_to_its_schema(which: str, request: pytest.FixtureRequest) -> None:
    loaded, compiler = request.getfixturevalue(which), request.getfixturevalue(f"{which}_compiler")
    llm = llm_with(loaded, compiler, num_blocks=2048)
    rng = random.Random(which)
    schemas = [random_document(rng) if i % 2 else random_schema(rng) for i in range(NUM_SCHEMAS)]
    params = [
        structured(i, (0.0, 0.8, 1.5)[i % 3], 1200, json=schema, disable_any_whitespace=i % 4 == 3)
        for i, schema in enumerate(schemas)
    ]
    outputs = generate(llm, params)
    for index in complete(outputs):
        value = json.loads(outputs[index].text)
        jsonschema.Draft202012Validator(schemas[index]).validate(value)
        if index % 4 == 3:
            assert "\n" not in outputs[index].text
    assert free_blocks(llm.engine) == llm.engine.scheduler.stats().num_blocks


def test_json_object_outputs_are_json_objects(llm: LLM) -> None:
    outputs = generate(llm, [structured(i, 0.9, 400, json_object=True) for i in range(12)])
    for index in complete(outputs, 0.3):
        assert isinstance(json.loads(outputs[index].text), dict)


def test_whitespace_in_json_is_limited(tiny: LoadedModel, tiny_compiler: GrammarCompiler) -> None:
    """A random model generates whitespace wherever it is allowed."""
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    outputs = generate(llm_with(tiny, tiny_compiler), [structured(i, json=schema, max_tokens=100) for i in range(20)])
    assert [json.loads(output.text) for output in outputs] == [{"a": None}] * 20
    longest = max(len(run) for output in outputs for run in re.findall(r"\s+", output.text))
    assert 1 < longest <= 16


PATTERNS = (
    r"[a-z]{3,12}",
    r"(yes|no|maybe) ?[0-9]{2,4}",
    r"\d{3}-\d{4}",
    r"[^a-z\s]{5}",
    r"(ab+c?){2,5}",
    r"^\w+@\w{2,5}\.(com|org)$",
    r"[\u00e0-\u00ff]{1,4}",
    r"(日本|東京){1,3}",
    r".{1,10}",
    r"\"[^\"\\]{0,8}\"",
    r"x*?y",
    r"(?:a|b){4}",
    r"[\t -]{2,6}end",
)


@pytest.mark.parametrize("which", ["demo", "tiny"])
def test_outputs_match_their_regular_expression(which: str, request: pytest.FixtureRequest) -> None:
    llm = llm_with(request.getfixturevalue(which), request.getfixturevalue(f"{which}_compiler"))
    params = [structured(i, 1.0, 120, regex=pattern) for pattern in PATTERNS for i in range(4)]
    outputs = generate(llm, params)
    for index in complete(outputs, 0.8):
        pattern = PATTERNS[index // 4]
        assert re.fullmatch(pattern, outputs[index].text), (pattern, outputs[index].text)


def test_the_output_is_one_of_the_choices(llm: LLM) -> None:
    choices = ["a", "ab", "abc", "日本", 'q"u\\o', " spaced ", "line\nbreak", "\U0001f40d!", "a" * 80]
    outputs = generate(llm, [structured(i, 100.0, choice=choices) for i in range(60)])
    texts = {output.text for output in outputs}
    assert texts <= set(choices) and len(texts) >= 4
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_the_output_conforms_to_the_grammar(llm: LLM) -> None:
    arithmetic = """
    root ::= sum
    sum ::= product (" + " product){0,3}
    product ::= factor ("*" factor){0,2}
    factor ::= [1-9] [0-9]{0,2} | "(" sum ")"
    """
    outputs = generate(llm, [structured(i, 1.0, 300, grammar=arithmetic) for i in range(20)])
    for index in complete(outputs, 0.5):
        text = outputs[index].text
        ast.parse(text, mode="eval")
        assert re.fullmatch(r"[0-9+*() ]+", text)


# ------------------------------------------------------------------------- equal tokens beside any other requests

MIX: tuple[dict[str, Any], ...] = (
    {"json": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "maxItems": 12}},
    {"regex": "[a-z ]{40,60}"},
    {"choice": ["alpha beta gamma delta", "alpha beta gamma epsilon", "omega"]},
    {"json": {"type": "object", "properties": {"x": {"type": "string", "maxLength": 30}}, "required": ["x"]}},
    {"regex": "([0-9]{4}-){6}end", "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "min_tokens": 4},
)


def mixed_params(count: int) -> list[SamplingParams]:
    """Structured and free requests, greedy and random."""
    params = [structured(i, (0.0, 1.0)[i % 2], 64, **MIX[i % len(MIX)]) for i in range(count)]
    params[3::4] = [replace(one, structured_outputs=None) for one in params[3::4]]
    return params


def test_structured_outputs_are_equal_alone_in_batches_and_preempted(
    demo: LoadedModel, demo_compiler: GrammarCompiler
) -> None:
    prompts = [f"{PROMPT} number {'and again ' * (3 * i)}" for i in range(16)]
    params = mixed_params(16)
    roomy = llm_with(demo, demo_compiler)
    expected = [roomy.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert "stop" in {output.finish_reason for output in expected}
    for knobs in (
        {},
        {"num_blocks": 20, "full_sequence_must_fit": False, "max_model_len": 256},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_blocks": 20, "full_sequence_must_fit": False, "max_model_len": 256, "max_num_batched_tokens": 24},
    ):
        llm = llm_with(demo, demo_compiler, **knobs)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if "num_blocks" in knobs:
            assert llm.engine.scheduler.stats().num_preemptions > 0
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected], knobs
        assert [output.text for output in outputs] == [output.text for output in expected]


def test_structured_outputs_are_equal_after_a_failed_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = mixed_params(8)
    expected = [output.token_ids for output in generate(llm, params)]
    engine, run, failures = llm.engine, llm.engine.runner.run, []

    def run_or_fail(prepared: Any) -> Any:
        if len(failures) < 5 and random.random() < 0.3:
            failures.append(prepared)
            raise RuntimeError("out of luck")
        return run(prepared)

    monkeypatch.setattr(engine.runner, "run", run_or_fail)
    for index, one in enumerate(params):
        engine.add_request(f"again {index}", PROMPT, one)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        try:
            found.update((output.request_id, output.token_ids) for output in engine.step() if output.finished)
        except RuntimeError:
            engine.scheduler.check_invariants()
    assert failures
    assert [found[f"again {index}"] for index in range(8)] == expected


def test_bfloat16_output_conforms_to_the_grammar(demo_compiler: GrammarCompiler) -> None:
    llm = llm_with(load_model("demo", "bfloat16"), demo_compiler)
    outputs = generate(llm, [structured(i, regex=r"\d{5}") for i in range(8)])
    assert all(re.fullmatch(r"\d{5}", output.text) for output in outputs)


# -------------------------------------------------------------------------------------- beside the other parameters


def test_the_end_of_a_grammar_ends_the_request(llm: LLM) -> None:
    """Also before `min_tokens`, with `ignore_eos`, and if EOS is not among the allowed tokens."""
    (letter,) = llm.engine.tokenize("a")
    for own in ({"min_tokens": 20}, {"ignore_eos": True}, {"allowed_token_ids": [letter]}, {"logit_bias": {0: -100}}):
        (output,) = generate(llm, structured(choice=["a"], max_tokens=50, **own))
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", None), own


def test_eos_is_found_among_padded_logits(tiny: LoadedModel, tiny_compiler: GrammarCompiler) -> None:
    outputs = generate(llm_with(tiny, tiny_compiler), [structured(i, choice=["a"], min_tokens=9) for i in range(4)])
    assert {(output.text, output.finish_reason) for output in outputs} == {("a", "stop")}


def test_token_masks_depend_only_on_the_output_tokens(demo: LoadedModel, demo_compiler: GrammarCompiler) -> None:
    """Rewound to an earlier position, a grammar gives the same mask again."""
    params = structured(regex="ab(cd|ef){2}", max_tokens=30)
    output_ids = [token_id for text in ("a", "b", "c", "d", "e", "f") for token_id in demo.tokenizer(text)["input_ids"]]
    request = Request("r", [5, 6], arrival_time=0.0, max_tokens=30, eos_token_ids=(0,), metadata=params)
    demo_compiler.add(request)
    demo_compiler.wait(60.0)
    ((_, grammar),) = demo_compiler.take_finished()
    assert isinstance(grammar, CompiledGrammar)
    request._state.append_output(output_ids)
    row = EditedRow(request, 1, demo.vocab_size, (), RequestGrammar(request, grammar))

    def allowed(num_output: int) -> list[int]:
        edits = LogitEdits()
        row.edit(0, 2 + num_output, edits)
        found: list[int] = edits.apply(torch.zeros(1, demo.vocab_size))[0].isfinite().nonzero().flatten().tolist()
        return found

    first = [allowed(count) for count in range(len(output_ids) + 1)]
    assert all(token_id in allowed for token_id, allowed in zip(output_ids, first, strict=False))
    assert first[-1] == [0]  # complete: only EOS
    for count in (3, 5, 0, 6, 1):
        assert allowed(count) == first[count]


def test_min_tokens_and_ignore_eos_apply_while_the_grammar_continues(llm: LLM) -> None:
    short = generate(llm, [structured(i, 1.0, 30, regex="[a-z]{1,200}") for i in range(10)])
    assert min(len(output.token_ids) for output in short) < 12
    for own in ({"min_tokens": 12}, {"ignore_eos": True}):
        outputs = generate(llm, [structured(i, 1.0, 30, regex="[a-z]{1,200}", **own) for i in range(10)])
        assert all(len(output.token_ids) >= (12 if "min_tokens" in own else 30) for output in outputs)


def test_other_logit_edits_choose_among_allowed_tokens(llm: LLM) -> None:
    (yes,), (no,) = llm.engine.tokenize("y"), llm.engine.tokenize("n")
    for bias, text in (({yes: 100.0}, "y"), ({no: 100.0}, "n")):
        outputs = generate(llm, [structured(i, choice=["y", "n"], logit_bias=bias) for i in range(5)])
        assert {output.text for output in outputs} == {text}
    outputs = generate(llm, [structured(i, choice=["y", "n"], bad_words=["n"]) for i in range(5)])
    assert {output.text for output in outputs} == {"y"}


def test_a_request_without_any_allowed_token_does_not_end_others(llm: LLM) -> None:
    (letter,) = llm.engine.tokenize("z")
    bad, good = generate(llm, [structured(choice=["y"], allowed_token_ids=[letter]), structured(choice=["y"])])
    assert (bad.finish_reason, bad.finish_detail) == ("error", NOTHING_LEFT)
    assert (good.finish_reason, good.text) == ("stop", "y")


def test_stop_strings_and_stop_tokens_end_a_text_early(llm: LLM) -> None:
    (output,) = generate(llm, structured(regex="abc(def){30}", stop=["fd"], max_tokens=100))
    assert (output.text, output.finish_reason, output.stop_reason) == ("abcde", "stop", "fd")
    (letter,) = llm.engine.tokenize("x")
    (output,) = generate(llm, structured(regex="1x2", stop_token_ids=[letter]))
    assert (output.text, output.stop_reason) == ("1", letter)


def test_logprobs_are_computed_before_masking(llm: LLM) -> None:
    """Log probabilities are taken before masking."""
    (output,) = generate(llm, structured(temperature=0.0, choice=["\u00e9\u00e9"], logprobs=1))
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert any(entry.rank != 1 for entry in (next(iter(choices.values())) for choices in entries))


# ------------------------------------------------------------------------------------------------ parking, failures


def test_parked_requests_hold_no_blocks_and_keep_their_queue_places(demo: LoadedModel) -> None:
    engine = Engine(demo, num_blocks=64, max_num_seqs=1, max_model_len=256)
    engine.grammars.warm_up()
    wait_until(lambda: engine.grammars.pid is not None)
    pid = engine.grammars.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that the grammar is not ready before it is needed
    free = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add_request("structured", PROMPT, structured(choice=["a"]), arrival_time=1.0)
    engine.add_request("first", PROMPT, free, arrival_time=2.0)
    engine.add_request("second", PROMPT, free, arrival_time=3.0)
    engine.step()
    waiting = engine.scheduler.explain("structured")
    assert (waiting.status, waiting.reason) == (RequestStatus.WAITING_FOR_GRAMMAR, Reason.PARKED)
    assert waiting.num_blocks == 0
    assert engine.scheduler.explain("first").status is RequestStatus.RUNNING
    engine.scheduler.check_invariants()
    os.kill(pid, signal.SIGCONT)
    ended: list[str] = []
    while engine.has_unfinished_requests():
        if not ended and engine.grammars.num_waiting:
            engine.grammars.wait(1.0)
        ended += [output.request_id for output in engine.step() if output.finished]
        engine.scheduler.check_invariants()
    assert ended == ["first", "structured", "second"]


def test_a_step_without_runnable_requests_waits_for_grammars(demo: LoadedModel) -> None:
    """An engine whose only request is parked does not spin while the process starts, which takes seconds."""
    engine = Engine(demo, num_blocks=64, max_model_len=256)
    engine.add_request("a", PROMPT, structured(choice=["a"]))
    started, cpu_started = time.monotonic(), time.thread_time()
    while engine.counters.num_generated_tokens == 0:
        engine.step()
    assert engine.counters.num_steps <= 4 + 11 * (time.monotonic() - started)
    assert time.thread_time() - cpu_started < 0.5 * (time.monotonic() - started)


def test_a_grammar_failure_ends_one_request_only(demo: LoadedModel) -> None:
    llm = LLM(demo, num_blocks=128, max_model_len=512, grammar_timeout=1.0, log_stats_interval=None)
    params = [
        structured(regex="("),
        structured(choice=["fine"]),
        structured(grammar=HOPELESS),
        SamplingParams(max_tokens=5, ignore_eos=True),
        structured(json={"type": "boolean"}),
    ]
    outputs = generate(llm, params)
    assert [output.finish_reason for output in outputs] == ["error", "stop", "error", "length", "stop"]
    assert "the regular expression '(' cannot be used" in outputs[0].finish_detail
    assert "takes more than 1 s of processor time" in outputs[2].finish_detail or "GiB" in outputs[2].finish_detail
    assert (outputs[1].text, len(outputs[3].token_ids)) == ("fine", 5)
    assert json.loads(outputs[4].text) in (True, False)
    assert free_blocks(llm.engine) == llm.engine.scheduler.stats().num_blocks


def test_a_grammar_that_becomes_slow_ends_its_request(llm: LLM) -> None:
    """Its texts become more ambiguous with every token, which a short trial does not show."""
    params = [
        structured(grammar='root ::= root root | "a"', min_tokens=600, max_tokens=600),
        SamplingParams(max_tokens=600, ignore_eos=True),
    ]
    slow, free = generate(llm, params)
    assert slow.finish_reason == "error"
    assert re.search(r"took \d\.\d\d s of processor time for \d+ tokens, and the limit is", slow.finish_detail)
    assert set(slow.text) == {"a"}
    assert (free.finish_reason, len(free.token_ids)) == ("length", 600)


def test_a_parked_request_that_ends_cancels_its_grammar(demo: LoadedModel) -> None:
    engine = Engine(demo, num_blocks=64, max_model_len=256, clock=time.monotonic)
    engine.add_request("a", PROMPT, structured(grammar=HOPELESS))
    engine.add_request("b", PROMPT, structured(grammar=HOPELESS + '"b"'), deadline=time.monotonic() + 0.2)
    output = engine.abort("a")
    assert output is not None and output.finish_reason == "abort"
    ended: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert [(one.request_id, one.finish_reason) for one in ended] == [("b", "deadline")]
    assert engine.grammars.num_waiting == 0
    engine.add_request("a", PROMPT, structured(choice=["again"]))
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert (ended[-1].request_id, ended[-1].text) == ("a", "again")


def test_a_model_without_a_tokenizer_refuses_structured_output(demo: LoadedModel) -> None:
    bare = replace(demo, tokenizer=None)
    engine = Engine(bare, num_blocks=64, max_model_len=256)
    with pytest.raises(GrammarError, match="needs a tokenizer"):
        engine.add_request("a", [5, 6], structured(choice=["a"], detokenize=False))
    assert not engine.has_unfinished_requests()


# --------------------------------------------------------------------------------------------------------- asyncio


def test_async_engine_waits_for_grammars_and_reports_failures(demo: LoadedModel) -> None:
    async def work() -> None:
        knobs: dict[str, Any] = {"num_blocks": 128, "max_model_len": 512, "log_stats_interval": None}
        async with AsyncEngine(demo, grammar_timeout=1.5, **knobs) as engine:
            hopeless = engine.generate(PROMPT, structured(grammar=HOPELESS), "hopeless")
            malformed = engine.generate(PROMPT, structured(regex="("), "malformed")
            fine = engine.generate(PROMPT, structured(choice=["fine"]), "fine")
            free = engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
            failures = asyncio.gather(hopeless.start(), malformed.start(), return_exceptions=True)
            await fine.start()
            assert [output async for output in fine][-1].text == "fine"
            assert len([output async for output in free][-1].token_ids) == 8
            slow, wrong = await failures
            assert isinstance(slow, GrammarError) and isinstance(wrong, GrammarError)
            assert "cannot be used" in str(wrong)
            with pytest.raises(GrammarError):  # for the task that reads it
                async for _ in engine.generate(PROMPT, structured(regex="(")):
                    pass
            await check_letting_go(engine)
            pid = await engine.call(lambda inner: inner.grammars.pid)
            assert pid is not None
        wait_until(lambda: not is_alive(pid))

    async def check_letting_go(engine: AsyncEngine) -> None:
        """An abort, a cancelled reader and a deadline, each while the grammar is compiled."""
        aborted = engine.generate(PROMPT, structured(grammar=HOPELESS + '"x"'), "aborted")
        task = asyncio.ensure_future(aborted.start())
        await asyncio.sleep(0.1)
        assert await engine.abort("aborted")
        await task
        assert [output.finish_reason async for output in aborted] == ["abort"]
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.generate(PROMPT, structured(grammar=HOPELESS + '"y"')).start()
        while await engine.call(Engine.has_unfinished_requests):
            await asyncio.sleep(0.01)
        assert await engine.call(lambda inner: inner.grammars.num_waiting) == 0

    asyncio.run(asyncio.wait_for(work(), 90))
    gc.collect()


def test_an_idle_engine_wakes_for_a_grammar_and_for_a_deadline(demo: LoadedModel) -> None:
    """Nothing else is in the engine, so its thread sleeps."""

    async def work() -> None:
        engine = AsyncEngine(demo, num_blocks=128, max_model_len=512, log_stats_interval=None)
        async with engine:
            outputs = [output async for output in engine.generate(PROMPT, structured(choice=["woken"]))]
            assert outputs[-1].text == "woken"
            steps = (await engine.stats()).counters.num_steps
            task = asyncio.ensure_future(engine.generate(PROMPT, structured(grammar=HOPELESS)).start())
            await asyncio.sleep(0.5)
            assert (await engine.stats()).counters.num_steps <= steps + 2  # it did not spin
            task.cancel()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_draining_waits_for_a_grammar(demo: LoadedModel) -> None:
    async def work() -> None:
        engine = AsyncEngine(demo, num_blocks=128, max_model_len=512, log_stats_interval=None)
        stream = engine.generate(PROMPT, structured(choice=["drained"]))
        task = asyncio.ensure_future(stream.start())
        await asyncio.sleep(0.2)
        await asyncio.gather(engine.shutdown(drain=True), task)
        assert [output async for output in stream][-1].text == "drained"

    asyncio.run(asyncio.wait_for(work(), 60))
