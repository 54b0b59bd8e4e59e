"""An exception in the sampling, grammar or text of one request finishes that request with an error; other requests get
the same tokens as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pointsman.core import FinishReason, Request
from pointsman.engine import (
    Engine,
    EngineStepError,
    GrammarError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.outputs.processor import OutputProcessor
from pointsman.engine.sampling import logit_edits, sampler
from pointsman.engine.sampling.batch import SamplingBatch, SamplingColumns
from pointsman.engine.sampling.logit_edits import EditedRow
from pointsman.engine.text.detokenizer import Detokenizer
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build

MARK = 0.123
"""A temperature that marks the bad request, because no other request has it."""
GOOD = {
    "random": SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    "edited": SamplingParams(
        temperature=0.8, seed=2, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=2
    ),
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.5),
    "stop": SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, stop="no such text"),
}
BAD = SamplingParams(temperature=MARK, max_tokens=12, ignore_eos=True, presence_penalty=0.25, logprobs=3)
Inject = Callable[[pytest.MonkeyPatch], object]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


def engine_of(loaded: LoadedModel, max_steps_in_flight: int = 1) -> Engine:
    return Engine(
        loaded, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32,
        max_steps_in_flight=max_steps_in_flight,
    )  # fmt: skip


def run(engine: Engine, bad: SamplingParams | None) -> dict[str, RequestOutput]:
    """Run the requests that must succeed, and among them a request with the parameters `bad`; None: without it."""
    for name, params in GOOD.items():
        engine.add_request(name, [4, 5, 6, *name.encode()[:3]], params)
        if bad is not None and name == "edited":
            engine.add_request("bad", [9, 8, 7], bad)
    done = drain(engine)
    engine.step()
    assert free_blocks(engine) == engine.scheduler.stats().num_blocks
    return done


def is_bad(request: Request) -> bool:
    return request.request_id == "bad"


def fails_if(owner: Any, name: str, condition: Callable[..., bool]) -> Inject:
    """Make a function raise if the condition holds for its arguments."""
    original = getattr(owner, name)

    def maybe(*arguments: Any, **options: Any) -> Any:
        if condition(*arguments):
            raise TypeError("this row is broken")
        return original(*arguments, **options)

    return lambda monkeypatch: monkeypatch.setattr(owner, name, maybe)


def has_mark(logits: Any, batch: SamplingBatch, *_: Any) -> bool:
    return any(abs(float(temperature) - MARK) < 1e-6 for temperature in batch.temperature)


INJECTIONS: dict[str, Inject] = {
    "edits": fails_if(EditedRow, "edit", lambda row, *_: is_bad(row._request)),
    "edits after some tokens": fails_if(
        EditedRow, "edit", lambda row, *_: is_bad(row._request) and row._request.num_output_tokens > 3
    ),
    "penalties": fails_if(logit_edits, "_penalize", lambda row, params, *_: params.temperature == MARK),
    "columns": fails_if(SamplingColumns, "_write", lambda columns, *arguments: is_bad(arguments[-1])),
    "kernel": fails_if(sampler, "choose_on_cpu", has_mark),
    "log probabilities": fails_if(sampler, "token_logprobs", lambda logits, token_ids, k: k == 3),
    "biases": fails_if(logit_edits.LogitEdits, "apply", lambda edits, logits: _biases(edits, 77)),
}


def _biases(edits: logit_edits.LogitEdits, token_id: int) -> bool:
    return any(token_id in ids.tolist() for ids in edits._biases._token_ids)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("where", INJECTIONS)
def test_a_sampling_exception_ends_only_its_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str, max_steps_in_flight: int
) -> None:
    expected = run(engine_of(loaded, max_steps_in_flight), None)
    INJECTIONS[where](monkeypatch)
    done = run(engine_of(loaded, max_steps_in_flight), replace(BAD, logit_bias={77: 1.0}))
    bad = done.pop("bad")
    assert bad.finish_reason == "error"
    assert bad.finish_detail == "its sampling failed: TypeError: this row is broken"
    num_tokens = len(bad.token_ids)
    assert (num_tokens in (4, 3 + max_steps_in_flight)) if "after" in where else num_tokens == 0
    for name, output in expected.items():
        assert (done[name].token_ids, done[name].finish_reason) == (output.token_ids, "length"), name
    assert done["edited"].outputs[0].logprobs == expected["edited"].outputs[0].logprobs


def test_a_single_request_fails_and_the_engine_continues(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(loaded)
    INJECTIONS["kernel"](monkeypatch)
    engine.add_request("bad", [9, 8, 7], BAD)
    assert drain(engine)["bad"].finish_reason == "error"
    engine.add_request("good", [9, 8, 7], GOOD["random"])
    assert drain(engine)["good"].finish_reason == "length"


def test_a_failure_of_every_row_fails_the_step(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine_of(loaded), None)
    engine = engine_of(loaded)
    for name, params in GOOD.items():
        engine.add_request(name, [4, 5, 6, *name.encode()[:3]], params)
    with monkeypatch.context() as broken:
        fails_if(sampler, "choose_on_cpu", lambda *_: True)(broken)
        with pytest.raises(EngineStepError, match="this row is broken"):
            engine.step()
    done = drain(engine)
    assert {name: output.token_ids for name, output in done.items()} == {
        name: output.token_ids for name, output in expected.items()
    }


@pytest.mark.parametrize("stop", [None, "zz"])
@pytest.mark.parametrize("name", ["feed", "finish"])
def test_a_text_exception_ends_only_its_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, stop: str | None, name: str
) -> None:
    expected = run(engine_of(loaded), None)
    engine = engine_of(loaded)
    original = OutputProcessor.add

    def fail(*_: Any) -> str:
        raise TypeError("this row is broken")

    def add(self: OutputProcessor, request: Request, *arguments: Any, **options: Any) -> None:
        options["eager_text"] = True  # as for a server
        original(self, request, *arguments, **options)
        if is_bad(request):
            detokenizer = self._live[request].detokenizer
            assert detokenizer is not None
            if name == "feed":
                detokenizer.feed = fail
            else:
                broken.append(detokenizer)

    broken: list[Detokenizer] = []
    fails_if(Detokenizer, "finish", lambda self: self in broken)(monkeypatch)
    monkeypatch.setattr(OutputProcessor, "add", add)
    done = run(engine, replace(BAD, stop=stop))
    bad = done.pop("bad")
    assert (bad.finish_reason, "this row is broken" in bad.finish_detail) == ("error", True)
    assert {name: output.token_ids for name, output in done.items()} == {
        name: output.token_ids for name, output in expected.items()
    }


def test_a_request_that_the_output_processor_refuses_is_not_kept(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(loaded)
    engine.add_request("good", [4, 5, 6], GOOD["random"])
    with monkeypatch.context() as broken:
        fails_if(OutputProcessor, "add", lambda self, request, *_: is_bad(request))(broken)
        with pytest.raises(TypeError, match="this row is broken"):
            engine.add_request("bad", [9, 8, 7], BAD)
    done = drain(engine)
    assert set(done) == {"good"} and done["good"].finish_reason == "length"
    assert engine.scheduler.stats().finished[FinishReason.ERROR.value] == 1


# ------------------------------------------------------------------------------------------------------- grammars

CHOICE = StructuredOutputsParams(choice=["abab", "baba"])


class Breaking(sampler.RequestGrammar):
    """A grammar that raises for the bad request, in the method that `where` names."""

    where = ""
    __slots__ = ("_is_bad",)

    def __init__(self, request: Request, grammar: Any) -> None:
        self._is_bad = is_bad(request)
        if self._is_bad and self.where == "__init__":
            raise RuntimeError("this grammar is broken")
        super().__init__(request, grammar)

    def mask(self, *arguments: Any) -> bool:
        if self._is_bad and self.where == "mask" and self.num_accepted > 0:
            raise TypeError("this grammar is broken")
        return super().mask(*arguments)


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["__init__", "mask"])
def test_a_grammar_exception_ends_only_its_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Breaking, "where", where)
    monkeypatch.setattr(sampler, "RequestGrammar", Breaking)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12, structured_outputs=CHOICE)
    alone = engine_of(loaded)
    alone.add_request("good", [4, 5, 6], params)
    expected = drain(alone)["good"]
    engine = engine_of(loaded)
    for name in ("bad", "good"):
        engine.add_request(name, [4, 5, 6], params)
    engine.add_request("plain", [4, 5, 6], GOOD["greedy"])
    done = drain(engine)
    assert done["bad"].finish_reason == "error" and "this grammar is broken" in done["bad"].finish_detail
    assert (done["good"].text, done["good"].finish_reason) == (expected.text, "stop")
    assert (len(done["plain"].token_ids), done["plain"].finish_reason) == (12, "length")
    if where == "__init__":  # it is compiled by now
        with pytest.raises(GrammarError, match="this grammar is broken"):
            engine.add_request("bad", [4, 5, 6], params)
        assert not engine.has_unfinished_requests()
    engine.step()
    assert free_blocks(engine) == engine.scheduler.stats().num_blocks
