"""Speculative decoding in the engine: equal outputs in fewer steps, and an unchanged distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pointsman.core import ConfigError
from pointsman.engine import Engine, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from pointsman.engine.drafts import ngram_lookup, prompt_lookup
from pointsman.engine.drafts.ngram_lookup import NgramLookup
from pointsman.engine.drafts.prompt_lookup import PromptLookup
from pointsman.engine.drafts.verification import Verification
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build

REPETITIVE = [40 + i % 7 for i in range(60)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


def make(loaded: LoadedModel, drafts: int, **knobs: Any) -> Engine:
    knobs = {"num_blocks": 160, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 48, **knobs}
    lookup = {"prompt_lookup_min": 1} if drafts else {}
    return Engine(loaded, num_draft_tokens=drafts, **lookup, **knobs)


def run(engine: Engine, params: list[SamplingParams], prompts: list[list[int]]) -> list[RequestOutput]:
    """The last output of each request."""
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"r{index}", prompt, one)
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_invariants()
    return [ended[f"r{index}"] for index in range(len(prompts))]


def story(output: RequestOutput) -> tuple[Any, ...]:
    """The final state of a request, as its caller sees it."""
    sample = output.outputs[0]
    logprobs = [{token: round(entry.logprob, 3) for token, entry in place.items()} for place in sample.logprobs or ()]
    return sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, logprobs


def prompts_of(count: int) -> list[list[int]]:
    return [[3 + index, *REPETITIVE[: 12 + 9 * index]] for index in range(count)]


class Oracle(PromptLookup):
    """Proposes the tokens of a run without drafts, wrong from every fourth token on."""

    answers: dict[str, list[int]]

    def propose(self, output: Any, update: Any, now: float) -> None:
        counts, drafts = np.zeros(output.num_rows, dtype=np.int64), []
        for index, request in enumerate(output.requests):
            if request.row is not None and request.num_output_tokens:
                start = request.num_output_tokens
                right = self.answers[request.request_id][start : start + 3]
                guess = [(token + (place % 4 == 3)) % 199 for place, token in enumerate(right, start)]
                counts[index] = len(guess)
                drafts += guess
        self._scheduler.propose(output, drafts, counts, now)


MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "logprobs": 1},
    {"temperature": 0.7, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {50: 4.0, 44: 3.0}, "min_tokens": 9, "stop_token_ids": [50]},
    {"temperature": 0.0, "stop": ["a", "5", "-"]},
    {
        "temperature": 0.0,
        "stop": ["b", "+"],
        "include_stop_str_in_output": True,
        "output_kind": RequestOutputKind.DELTA,
    },
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "bad_words": ["x"]},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[a-f]{3,9}")},
]
POOLS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 34, "max_model_len": 120},  # preemption
    {"max_num_batched_tokens": 30, "long_prefill_token_threshold": 5},
    {"enable_prefix_caching": False, "draft_table": ((3, 1),)},
]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_outputs_with_drafts_equal_outputs_without_drafts(loaded: LoadedModel, pool: dict[str, Any]) -> None:
    params = [SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **one}) for one in MIXTURE]
    prompts = prompts_of(len(params))
    plain = run(make(loaded, 0, **{**pool, "draft_table": ()}), params, prompts)
    engine = make(loaded, 4, **pool)
    assert [story(output) for output in run(engine, params, prompts)] == [story(output) for output in plain]
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == ("num_blocks" in pool)
    assert stats.num_free_blocks == stats.num_blocks


def test_correct_drafts_are_accepted_and_save_steps(loaded: LoadedModel) -> None:
    params = [SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **one}) for one in MIXTURE[:4]]
    prompts = prompts_of(len(params))
    plain = run(make(loaded, 0), params, prompts)
    engine = make(loaded, 3)
    oracle = Oracle(engine.scheduler, 1, 1, engine.counters, engine.runner.num_computed_rows)
    oracle.answers = {output.request_id: list(output.token_ids) for output in plain}
    engine.steps.proposer = oracle
    assert [story(output) for output in run(engine, params, prompts)] == [story(output) for output in plain]
    stats = engine.scheduler.stats()
    assert stats.num_accepted_tokens > 60
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert engine.counters.num_steps < 25


def test_a_delta_output_has_all_tokens_of_its_step(loaded: LoadedModel) -> None:
    engine = make(loaded, 3)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (plain,) = run(make(loaded, 0), [params], [REPETITIVE])
    oracle = Oracle(engine.scheduler, 1, 1, engine.counters, engine.runner.num_computed_rows)
    oracle.answers = {"a": list(plain.token_ids)}
    engine.steps.proposer = oracle
    engine.add_request("a", REPETITIVE, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True,
                                                       output_kind=RequestOutputKind.DELTA))  # fmt: skip
    deltas = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if engine.scheduler.get_request("a") and not engine.scheduler.get_request("a").num_output_tokens:
            continue  # a chunk of the prompt
        assert len(outputs) == 1
        deltas.append((outputs[0].token_ids, outputs[0].text))
    assert max(len(tokens) for tokens, _ in deltas) > 1
    assert [token for tokens, _ in deltas for token in tokens] == plain.token_ids
    assert "".join(text for _, text in deltas) == plain.text


def test_drafts_do_not_change_the_distribution() -> None:
    """Chi-square: 4,000 draws at two positions over four tokens, with a draft that is right about half the time."""
    rng = np.random.default_rng(0)
    first, second = np.array([0.5, 0.3, 0.15, 0.05]), {0: [0.1, 0.6, 0.2, 0.1], 1: [0.7, 0.1, 0.1, 0.1]}
    pairs: dict[tuple[int, ...], int] = {}
    num_draws = 4000
    for _ in range(num_draws):
        draft = 1
        drawn = [int(rng.choice(4, p=first)), int(rng.choice(4, p=second[1]))]  # conditioned on a correct draft
        one = Verification(
            rows=np.array([0]), counts=np.array([2]), starts=np.array([0]), sampling=np.array([0, 0]),
            behind=np.array([1, 0]), drafts=np.array([draft]),
        )  # fmt: skip
        result, _ = one.verify(np.array(drawn), np.ones(2, dtype=bool), 1)
        tokens = tuple(np.asarray(result.token_ids).tolist())
        assert len(tokens) == 1 + (drawn[0] == draft)
        pairs[tokens] = pairs.get(tokens, 0) + 1
    expected = {(token,): first[token] for token in (0, 2, 3)}
    expected |= {(1, token): first[1] * second[1][token] for token in range(4)}
    chi_square = sum((pairs.get(key, 0) - num_draws * p) ** 2 / (num_draws * p) for key, p in expected.items())
    assert chi_square < 22.5, "0.1 % of runs, with 6 degrees of freedom"


def test_the_sampled_distribution_of_an_engine_is_the_same_with_drafts(loaded: LoadedModel) -> None:
    """Chi-square over the tokens that two engines sample at the second position, with different seeds."""
    allowed = [40, 41, 42]
    prompt = [40, 41, 42, 40, 41, 42, 40]
    counts = []
    for drafts, first_seed in ((0, 0), (2, 10_000)):
        engine = make(loaded, drafts, max_num_seqs=16, max_num_batched_tokens=64, num_blocks=400)
        params = [
            SamplingParams(
                temperature=3.0, seed=first_seed + seed, max_tokens=4, ignore_eos=True, allowed_token_ids=allowed
            )
            for seed in range(300)
        ]
        ended = run(engine, params, [prompt] * len(params))
        counts.append([sum(tuple(one.token_ids[1:3]) == (a, b) for one in ended) for a in allowed for b in allowed])
        assert bool(engine.scheduler.stats().num_accepted_tokens) == bool(drafts)
    a, b = (np.array(one, dtype=float) for one in counts)
    used = a + b > 0
    chi_square = float((((a - b) ** 2) / np.where(used, a + b, 1))[used].sum())
    assert chi_square < 26.1, "0.1 % of runs, with 8 degrees of freedom"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"prompt_lookup_max": 3}, "no drafts are looked up, so they would have no effect"),
        (
            {"num_draft_tokens": 2, "prompt_lookup_min": 0},
            "prompt_lookup_min is 0; it must be an integer of at least 1",
        ),
        (
            {"num_draft_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is 4, more than prompt_lookup_max, 3",
        ),
        ({"num_draft_tokens": 2, "max_steps_in_flight": 2}, "drafts need the newest token"),
    ],
)
def test_invalid_speculation_knobs_are_refused(loaded: LoadedModel, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(loaded, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=47, **knobs)


def test_drafts_that_are_always_wrong_are_no_longer_proposed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any cost of steps: with odds below 1 %, five drafts cannot gain 5 %."""
    wrong = loaded.vocab_size - 1
    monkeypatch.setattr(NgramLookup, "expected_tokens", lambda self, count: [wrong] * count)
    monkeypatch.setattr(ngram_lookup, "look_up", lambda *_: (0, 2))  # the first token, which never comes again
    engine = make(loaded, 5, max_model_len=256, num_blocks=80)
    bias = {wrong: -100.0, 3: -100.0}
    params = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True, logit_bias=bias)
    request = engine.add_request("a", prompts_of(1)[0], params)
    last = 0
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.last_output is not None
        last = request.num_output_tokens if len(engine.last_output.draft_token_ids) else last
    stats = engine.scheduler.stats()
    assert stats.num_accepted_tokens == 0
    assert stats.num_draft_tokens > 0
    assert last < 215


@pytest.fixture
def searched() -> Iterator[list[int]]:
    """The steps that are searched for drafts."""
    steps: list[int] = []
    follow = PromptLookup._append_newest_tokens

    def watched(self: PromptLookup, output: Any, update: Any) -> Any:
        steps.append(output.step_id)
        return follow(self, output, update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "_append_newest_tokens", watched)
        yield steps


def test_searches_for_drafts_without_result_become_rare(
    loaded: LoadedModel, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accepted draft makes every step search again."""
    monkeypatch.setattr(prompt_lookup, "SEARCH_SHARE", 0.0)  # as if steps took no time
    engine = make(loaded, 4)
    engine.add_request("a", list(range(3, 40)), SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True))
    monkeypatch.setattr(ngram_lookup, "look_up", lambda *_: (0, 0))
    while engine.has_unfinished_requests():
        engine.step()
    assert np.diff(searched).tolist() == [1, 2, 4, *[8] * (len(searched) - 4)]
    monkeypatch.undo()
    monkeypatch.setattr(NgramLookup, "expected_tokens", lambda self, count: always[-count:])
    always = [77] * 4
    likely = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logit_bias={77: 100.0})
    engine.add_request("b", [77] * 40, likely)
    searched.clear()
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.stats().num_accepted_tokens > 20
    assert searched[-1] - searched[-8] == 7


def test_drafts_are_searched_in_every_step_if_steps_are_long(
    loaded: LoadedModel, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lookup, "SEARCH_SHARE", 1e9)
    engine = make(loaded, 4)
    engine.add_request("a", list(range(3, 40)), SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(searched) == searched[-1] - searched[0] + 1


def test_a_preempted_request_keeps_its_lookup_of_drafts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected tokens follow an earlier occurrence of the request's newest tokens."""
    checked = 0
    propose = PromptLookup.propose

    def watched(self: PromptLookup, output: Any, update: Any, now: float) -> None:
        nonlocal checked
        propose(self, output, update, now)
        for request in output.requests:
            known = self._lookups.get(request)
            if known is not None and request.row is not None and request.num_output_tokens:
                assert known.tolist() == request.all_token_ids.tolist()[: len(known)]
                checked += len(known) == request.num_tokens
        assert not self._lookups.keys() & set(output.finished)

    monkeypatch.setattr(PromptLookup, "propose", watched)
    monkeypatch.setattr(prompt_lookup, "LONGEST_PAUSE", 4)
    engine = make(loaded, 4, num_blocks=34, max_model_len=120)
    params = [SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **one}) for one in MIXTURE]
    run(engine, params, prompts_of(len(params)))
    assert engine.scheduler.stats().num_preemptions > 0
    assert checked > 50
