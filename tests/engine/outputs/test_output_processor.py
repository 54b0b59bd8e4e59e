"""Outputs as callers see them: snapshots, deltas, stop strings, log probabilities; the engine underneath is real."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

from pointsman.core import FinishReason, ParkReason, Request
from pointsman.engine import Engine, RequestOutput, RequestOutputKind, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.outputs.request_output import Transcript
from pointsman.engine.sampling.logprobs import TokenLogprobs
from pointsman.engine.text.detokenizer import Detokenizer, TextDecoder
from tests.engine.text_tokenizers import KINDS, PickyTokenizer, byte_level, random_tokens
from tests.engine.tiny_models import FAMILIES, build

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = [70, 71, 72]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_level())


@pytest.fixture
def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


def run(engine: Engine, params: SamplingParams, *, prompt: Any = None, eager: bool = False) -> list[RequestOutput]:
    engine.add_request("a", prompt or PROMPT, params, eager_text=eager)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.scheduler.check_invariants()
    engine.step()  # reports the end, and frees the id
    assert len(engine.outputs) == 0
    return outputs


# ---------------------------------------------------------------------------------------------------- transcripts


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("is_eager", [False, True])
def test_each_output_extends_the_text_of_earlier_outputs(kind: str, is_eager: bool) -> None:
    """Outputs after groups of tokens, read late or never: each output's text extends that of the previous output, and
    the last text is complete."""
    tokenizer, rng = KINDS[kind](), random.Random(kind)
    decoder = TextDecoder(tokenizer)
    for _ in range(150):
        token_ids = random_tokens(kind, tokenizer, rng)
        transcript = Transcript(
            Request("r", tokenizer.all_special_ids[:1], arrival_time=0.0, max_tokens=99), decoder=decoder,
            detokenizer=Detokenizer(decoder.stream()), is_eager=is_eager,
        )  # fmt: skip
        snapshots = [RequestOutput(transcript, 0, 0)]
        while (done := len(transcript.token_ids)) < len(token_ids):
            transcript.token_ids += token_ids[done : done + rng.randrange(1, 5)]
            if is_eager:
                transcript.make_text(len(transcript.token_ids))
            snapshots.append(RequestOutput(transcript, 0, len(transcript.token_ids)))
            if rng.random() < 0.3:
                assert isinstance(snapshots[-1].text, str)  # read at once
        if is_eager:
            transcript.make_remaining_text()
        transcript.finish("stop", "", None)
        last = RequestOutput(transcript, 0, len(token_ids), finished=True)
        texts = [snapshot.text for snapshot in rng.sample(snapshots, len(snapshots))]
        assert last.text == tokenizer.decode(token_ids, skip_special_tokens=True)
        texts = [*sorted(texts, key=len), last.text]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
        picked = [
            None,
            *sorted(rng.sample(snapshots, min(3, len(snapshots))), key=lambda one: len(one.token_ids)),
            last,
        ]
        parts = [after.since(before) for before, after in itertools.pairwise(picked)]  # type: ignore[union-attr]
        assert "".join(part.text for part in parts) == last.text
        assert [token_id for part in parts for token_id in part.token_ids] == token_ids


def test_since_refuses_newer_outputs_and_other_requests(engine: Engine) -> None:
    first, *_, last = run(engine, GREEDY)
    with pytest.raises(ValueError, match="has 24 tokens, but this output has only 1; call since"):
        first.since(last)
    with pytest.raises(ValueError, match="give one of request 'a'"):
        last.since(run(engine, GREEDY)[0])


# -------------------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("eager", [False, True])
def test_each_output_kind_has_its_tokens_and_text(engine: Engine, eager: bool) -> None:
    cumulative = run(engine, GREEDY, eager=eager)
    deltas = run(engine, dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA), eager=eager)
    final = run(engine, dataclasses.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY), eager=eager)
    assert [len(one.token_ids) for one in cumulative] == list(range(1, 25))
    assert [len(one.token_ids) for one in deltas] == [1] * 24
    assert "".join(one.text for one in deltas) == cumulative[-1].text == final[-1].text
    assert [one.token_ids[0] for one in deltas] == cumulative[-1].token_ids == final[-1].token_ids
    assert [one.finished for one in deltas] == [False] * 23 + [True] and len(final) == 1
    assert deltas[5].since(None).text == cumulative[5].text, "a part knows the whole"
    assert [one.finish_reason for one in cumulative[-2:]] == [None, "length"]


def test_an_abort_reports_the_remaining_text(engine: Engine) -> None:
    whole = run(engine, GREEDY)[-1]
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        engine.add_request("a", PROMPT, dataclasses.replace(GREEDY, output_kind=kind), eager_text=True)
        seen = [output for _ in range(6) for output in engine.step()]
        last = engine.abort("a")
        assert last is not None and (last.finish_reason, last.num_output_tokens) == ("abort", 6)
        expected = engine.tokenizer.decode(whole.token_ids[:6], skip_special_tokens=True)
        text = "".join(one.text for one in [*seen, last]) if kind is RequestOutputKind.DELTA else last.text
        assert text == expected
        engine.step()


def test_eager_text_is_made_although_no_output_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads read outputs with eager text, so reading such an output must not change the detokenizer's state."""
    expected = run(engine, GREEDY)
    outputs = run(engine, GREEDY, eager=True)
    for output in outputs:
        monkeypatch.setattr(output._transcript.detokenizer, "feed", None)
    monkeypatch.setattr(Detokenizer, "finish", None)
    monkeypatch.setattr(TextDecoder, "decode", None)
    texts = [one.text for one in outputs]
    monkeypatch.undo()
    assert texts == [one.text for one in expected]


def test_without_detokenize_there_is_no_text(engine: Engine) -> None:
    output = run(engine, dataclasses.replace(GREEDY, detokenize=False, logprobs=1), eager=True)[-1]
    assert (output.text, len(output.token_ids)) == ("", 24)
    assert output.outputs[0].logprobs is not None
    assert {one.decoded_token for entry in output.outputs[0].logprobs for one in entry.values()} == {None}


def test_special_tokens_are_in_the_text_unless_skipped(loaded: LoadedModel, engine: Engine) -> None:
    """A token that the model often generates is made a special token of the tokenizer."""
    token_id = run(engine, GREEDY)[-1].token_ids[3]
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(token_id)]})
    special = LoadedModel(**{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "tokenizer": tokenizer})
    for skip in (True, False):
        engine = Engine(special, num_blocks=64, block_size=4)
        output = run(engine, dataclasses.replace(GREEDY, skip_special_tokens=skip))[-1]
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=skip)


# --------------------------------------------------------------------------------------------------- stop strings


def text_after(engine: Engine, token_ids: list[int]) -> str:
    return "".join(map(TextDecoder(engine.tokenizer).stream().feed, token_ids))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_a_request(engine: Engine, include: bool, kind: RequestOutputKind) -> None:
    free = run(engine, GREEDY)[-1]
    before = engine.scheduler.stats()
    # Two characters in the middle of the text: the end of one token's text and the beginning of the next one's.
    whole = text_after(engine, free.token_ids)
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if whole.index(whole[i : i + 2]) == i)
    params = dataclasses.replace(GREEDY, stop=[stop, "never"], include_stop_str_in_output=include, output_kind=kind)
    outputs = run(engine, params)
    last = outputs[-1].since(None)
    assert (last.finish_reason, last.stop_reason, last.finish_detail) == ("stop", stop, "")
    end = whole.index(stop) + (2 if include else 0)
    assert last.text == whole[:end]
    count = len(last.token_ids)
    assert free.token_ids[:count] == last.token_ids
    assert stop in text_after(engine, last.token_ids) and stop not in text_after(engine, last.token_ids[:-1])
    after = engine.scheduler.stats()
    assert after.num_free_blocks == before.num_free_blocks
    if kind is RequestOutputKind.DELTA:
        assert "".join(one.text for one in outputs) == last.text


def test_a_stop_string_has_priority_over_length_and_eos(loaded: LoadedModel, engine: Engine) -> None:
    """The token that completes the stop string is also the last token that `max_tokens` allows, or EOS."""
    free = run(engine, GREEDY)[-1]
    whole = text_after(engine, free.token_ids)
    place = next(i for i in range(4, len(whole)) if whole.index(whole[i]) == i)
    stop = whole[place]
    num_tokens = len(run(engine, dataclasses.replace(GREEDY, stop=stop))[-1].token_ids)
    by_length = run(engine, dataclasses.replace(GREEDY, stop=stop, max_tokens=num_tokens))[-1]
    assert (by_length.text, by_length.finish_reason, by_length.stop_reason) == (whole[:place], "stop", stop)

    last = free.token_ids[num_tokens - 1]
    if last not in free.token_ids[: num_tokens - 1]:
        with_eos = LoadedModel(
            **{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "eos_token_ids": (last,)}
        )
        params = dataclasses.replace(GREEDY, ignore_eos=False, stop=stop, include_stop_str_in_output=True)
        by_eos = run(Engine(with_eos, num_blocks=64, block_size=4), params)[-1]
        assert (by_eos.text, by_eos.finish_reason, by_eos.stop_reason) == (whole[: place + 1], "stop", stop)


def test_a_stop_token_is_not_part_of_the_text(engine: Engine) -> None:
    free = run(engine, GREEDY)[-1]
    place = next(i for i in range(4, 24) if free.token_ids[i] not in free.token_ids[:i])
    token_id = free.token_ids[place]
    for include in (False, True):
        for eager in (False, True):
            params = dataclasses.replace(GREEDY, stop_token_ids=[token_id], include_stop_str_in_output=include)
            output = run(engine, params, eager=eager)[-1]
            assert (output.token_ids, output.stop_reason) == (free.token_ids[: place + 1], token_id)
            shown = output.token_ids if include else output.token_ids[:-1]
            assert output.text == engine.tokenizer.decode(shown, skip_special_tokens=True)


def test_a_stop_string_finishes_the_request_in_the_scheduler(engine: Engine) -> None:
    whole = text_after(engine, run(engine, GREEDY)[-1].token_ids)
    request = engine.add_request("a", PROMPT, dataclasses.replace(GREEDY, stop=whole[6]))
    while engine.has_unfinished_requests():
        last = engine.step()[-1]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, whole[6])
    assert request.output_token_ids.tolist() == last.token_ids


def test_stop_strings_need_a_tokenizer(loaded: LoadedModel) -> None:
    bare = LoadedModel(**{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "tokenizer": None})
    with pytest.raises(ValueError, match="stop is 'x' and the model has no tokenizer"):
        Engine(bare, num_blocks=16).add_request("a", [4], SamplingParams(stop="x"))


# ------------------------------------------------------------------------------------- a tokenizer that raises


def picky_engine(loaded: LoadedModel, clash: tuple[int, int]) -> Engine:
    tokenizer = PickyTokenizer(KINDS["python-replacing"](), frozenset(), clash)
    picky = LoadedModel(**{**{name: getattr(loaded, name) for name in LoadedModel.__slots__}, "tokenizer": tokenizer})
    return Engine(picky, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)


def only(token_id: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, allowed_token_ids=[token_id], max_tokens=6, ignore_eos=True, **more)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_tokenizer_failure_ends_only_its_request(loaded: LoadedModel, kind: RequestOutputKind) -> None:
    engine = picky_engine(loaded, (70, 70))
    bad = engine.add_request("bad", PROMPT[-1:], only(70, stop="zz", output_kind=kind))
    engine.add_request("good", PROMPT, only(71, stop="zz"))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.scheduler.check_invariants()
    last = {output.request_id: output for output in outputs}
    assert (last["good"].finish_reason, last["good"].text) == ("length", "D" * 6)
    failed = last["bad"].since(None)
    detail = "the tokenizer failed: TypeError: can only join strings"
    assert (failed.finish_reason, failed.finish_detail, failed.stop_reason) == ("error", detail, None)
    assert (failed.token_ids, failed.text) == ([70, 70], "C"), "what there was of it"
    assert (bad.finish_reason, bad.finish_detail) == (FinishReason.ERROR, detail)
    assert bad.output_token_ids.tolist() == [70, 70]
    engine.step()
    assert engine.scheduler.stats().num_free_blocks == engine.scheduler.config.num_blocks


def test_a_tokenizer_failure_at_the_last_token_fails_its_request(loaded: LoadedModel) -> None:
    engine = picky_engine(loaded, (70, 70))
    engine.add_request("bad", PROMPT, dataclasses.replace(only(70, stop="zz"), max_tokens=2))
    engine.add_request("good", PROMPT, dataclasses.replace(only(71, stop="zz"), max_tokens=2))
    last = [output for _ in range(2) for output in engine.step() if output.finished]
    assert [(one.request_id, one.finish_reason, one.text) for one in last] == [
        ("bad", "error", "C"),
        ("good", "length", "DD"),
    ]
    assert len(engine.outputs) == 0 and not engine.has_unfinished_requests()


# ------------------------------------------------------------------------------------------------------- logprobs


def test_the_cumulative_logprob_is_read_in_constant_time() -> None:
    """The sum is read after each of many tokens; if each read added all log probabilities, this would take 50 million
    additions."""
    request = Request("r", [1], arrival_time=0.0, max_tokens=20_000)
    transcript = Transcript(request, keeps_logprobs=True)
    entry = TokenLogprobs(np.array([5]), np.array([-0.5], dtype=np.float32), 1)
    started = time.process_time()
    for count in range(1, 10_001):
        transcript.token_ids.append(5)
        transcript.add_logprobs(entry)
        found = RequestOutput(transcript, 0, count).outputs[0].cumulative_logprob
        assert found == -0.5 * count
    assert time.process_time() - started < 1
    assert RequestOutput(transcript, 0, 0).outputs[0].cumulative_logprob == 0
    assert RequestOutput(transcript, 10, 20).outputs[0].cumulative_logprob == -10, "of everything so far"


def test_logprobs_are_those_of_the_most_likely_tokens(engine: Engine) -> None:
    outputs = run(engine, dataclasses.replace(GREEDY, logprobs=3, max_tokens=6))
    sample = outputs[-1].outputs[0]
    assert sample.logprobs is not None and sample.cumulative_logprob is not None
    assert len(sample.logprobs) == 6
    total = 0.0
    for index, (token_id, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        assert len(entry) == 3 and next(iter(entry)) == token_id, "greedy: the token is the most likely one"
        assert sorted(one.rank or 0 for one in entry.values()) == [1, 2, 3] and entry[token_id].rank == 1
        decoder = TextDecoder(engine.tokenizer)
        before = [*PROMPT, *sample.token_ids[:index]]
        assert all(one.decoded_token == decoder.added_text(token, before) for token, one in entry.items())
        total += entry[token_id].logprob
    assert sample.cumulative_logprob == pytest.approx(total) and total < 0
    assert outputs[2].outputs[0].logprobs == sample.logprobs[:3]
    part = outputs[4].since(outputs[1]).outputs[0]
    assert part.logprobs == sample.logprobs[2:5]
    assert run(engine, GREEDY)[-1].outputs[0].logprobs is None


def test_prompt_logprobs_equal_those_of_generated_tokens(engine: Engine) -> None:
    """A long prompt is computed in chunks although its prefix is cached; its log probabilities equal those of the same
    tokens when they are generated."""
    prompt = [70 + i % 7 for i in range(50)]
    run(engine, GREEDY, prompt=prompt)
    output = run(engine, dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=0), prompt=prompt)[0]
    entries = output.prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == 50
    assert output.num_cached_tokens == 0
    for token_id, entry in zip(prompt[1:], entries[1:], strict=True):
        assert entry is not None and next(iter(entry)) == token_id and len(entry) in (2, 3)
    generated = run(engine, dataclasses.replace(GREEDY, max_tokens=5, logprobs=0), prompt=prompt)[-1]
    again = run(engine, dataclasses.replace(GREEDY, prompt_logprobs=0), prompt=prompt + generated.token_ids)[0]
    assert again.prompt_logprobs is not None and generated.outputs[0].logprobs is not None
    for expected, found in zip(generated.outputs[0].logprobs, again.prompt_logprobs[50:], strict=True):
        assert found is not None and list(found) == list(expected)
        assert [one.logprob for one in found.values()] == pytest.approx(
            [one.logprob for one in expected.values()], abs=1e-4
        )


def test_recomputed_prompt_logprobs_are_equal(engine: Engine) -> None:
    """A request is preempted when half of its prompt is computed, so the first positions are computed twice."""
    prompt = [70 + i % 7 for i in range(80)]
    params = dataclasses.replace(GREEDY, max_tokens=2, prompt_logprobs=1)
    expected = run(engine, params, prompt=prompt)[0].prompt_logprobs
    engine.add_request("a", prompt, params)
    engine.step()
    engine.step()
    engine.scheduler.park("a", ParkReason.GRAMMAR, engine.clock())
    engine.scheduler.ready("a", engine.clock())
    outputs = [output for _ in range(6) for output in engine.step()]
    found = outputs[0].prompt_logprobs
    assert found is not None and expected is not None and len(found) == len(expected) == 80
    assert [list(one or {}) for one in found] == [list(one or {}) for one in expected]


# ------------------------------------------------------------------------------------------------------- counters


def test_counters_count_prompt_cached_and_generated_tokens(engine: Engine) -> None:
    prompt = [70 + i % 7 for i in range(50)]
    first, second = run(engine, GREEDY, prompt=prompt)[-1], run(engine, GREEDY, prompt=prompt)[-1]
    counters = engine.counters
    assert (counters.num_prompt_tokens, counters.num_generated_tokens) == (100, 48)
    assert counters.num_cached_tokens == first.num_cached_tokens + second.num_cached_tokens > 0
    assert counters.num_steps >= 2 * 25 and counters.scheduler_time > 0 and counters.execute_time > 0


# ------------------------------------------------------------------------------------------------ stream interval


def lengths(outputs: list[RequestOutput]) -> list[int]:
    return [len(output.token_ids) for output in outputs]


@pytest.mark.parametrize("eager", [False, True])
def test_a_stream_interval_delays_all_outputs_but_first_and_last(loaded: LoadedModel, eager: bool) -> None:
    plain = Engine(loaded, num_blocks=64, block_size=4)
    spaced = Engine(loaded, num_blocks=64, block_size=4, stream_interval=5)
    whole = run(plain, GREEDY)[-1]
    snapshots = run(spaced, GREEDY, eager=eager)
    assert lengths(snapshots) == [1, 6, 11, 16, 21, 24]
    deltas = run(spaced, dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA, logprobs=0), eager=eager)
    assert lengths(deltas) == [1, 5, 5, 5, 5, 3] == [len(delta.outputs[0].logprobs or ()) for delta in deltas]
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids == snapshots[-1].token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [output.finished for output in deltas] == [False] * 5 + [True]
    final = run(spaced, dataclasses.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY), eager=eager)
    assert lengths(final) == [24]


def test_a_request_can_lengthen_but_not_shorten_the_stream_interval(loaded: LoadedModel) -> None:
    engine = Engine(loaded, num_blocks=64, block_size=4, stream_interval=4)
    assert lengths(run(engine, dataclasses.replace(GREEDY, stream_interval=10))) == [1, 11, 21, 24]
    assert lengths(run(engine, dataclasses.replace(GREEDY, stream_interval=2))) == [1, 5, 9, 13, 17, 21, 24]


def test_stop_strings_and_aborts_ignore_the_stream_interval(loaded: LoadedModel) -> None:
    engine = Engine(loaded, num_blocks=64, block_size=4, stream_interval=50)
    whole = run(engine, GREEDY)[-1]
    character = whole.text[9]
    stopped = run(engine, dataclasses.replace(GREEDY, stop=[character], output_kind=RequestOutputKind.DELTA))
    assert "".join(output.text for output in stopped) == whole.text[: whole.text.index(character)]
    engine.add_request("b", PROMPT, dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA))
    outputs = [output for _ in range(4) for output in engine.step()]
    last = engine.abort("b")
    assert last is not None and lengths([*outputs, last]) == [1, 3]
    engine.step()


@pytest.mark.parametrize("interval", [0, True, 2.0])
def test_an_invalid_stream_interval_is_refused(loaded: LoadedModel, interval: Any) -> None:
    with pytest.raises(ValueError, match="stream_interval is"):
        Engine(loaded, num_blocks=64, stream_interval=interval)
