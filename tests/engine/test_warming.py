"""Warm-up: the first request waits for nothing, and the engine keeps no trace of the warm-up."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest
from _pytest.logging import LogCaptureFixture

from pointsman.core.recording import Recorder
from pointsman.engine import Engine, EngineStepError, PoolingParams, SamplingParams
from pointsman.engine.drafts import prompt_lookup
from pointsman.engine.drafts.draft_counts import StepCost
from pointsman.engine.kernels.attention import attention_kernel
from pointsman.engine.kernels.layers import gate_kernel, heads_kernel, norm_kernel
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.engine.sampling.race_kernels import draw_rows
from pointsman.engine.sampling.sampler import Sampler
from pointsman.engine.stats import read_stats
from pointsman.engine.warming import warm_up
from tests.engine.engine_loop import drain, free_blocks
from tests.engine.text_tokenizers import byte_tokenizer
from tests.engine.tiny_models import FAMILIES, build
from tests.forms import short_of

PROMPT = [5, 6, 7] * 20
LOGGER = "pointsman.engine.warming"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), tokenizer=byte_tokenizer())


def make(loaded: LoadedModel | str, **knobs: Any) -> Engine:
    return Engine(loaded, **{"num_blocks": 64, "block_size": 4, "max_model_len": 128, "seed": 3, **knobs})


def outputs(engine: Engine) -> dict[str, Any]:
    """The outputs of requests of several kinds."""
    for name, params in {
        "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        "drawn": SamplingParams(max_tokens=8, ignore_eos=True, top_p=0.9, top_k=30),
        "told": SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1, presence_penalty=1),
        "pooled": PoolingParams(),
    }.items():
        engine.add_request(name, PROMPT, params)
    found = drain(engine)
    return {
        name: (one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for name, one in found.items()
    }


def decisions(recording: io.StringIO) -> str:
    """The lines of a recording without measured times, so that two recordings can be compared."""
    return re.sub(r'"step_time":[^,]*,', "", recording.getvalue())


def warnings(caplog: LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == LOGGER and one.levelno >= logging.WARNING]


KNOBS: list[dict[str, Any]] = [
    {},
    {"max_steps_in_flight": 2},
    {"num_draft_tokens": 3},
    {"num_draft_tokens": 40, "draft_table": ((1, 40), (4, 0)), "order": "priority", "max_num_seqs": 4},
    {"kv_cache_dtype": "bfloat16", "kv_offload_bytes": 2**20},
    {"max_model_len": 16, "block_size": 1},
    {"max_model_len": 3, "num_blocks": 1},  # too short for a warm-up
    {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    {"batching": "static", "watermark": 0.5, "max_num_active_seqs": 1},
]


@pytest.fixture
def drafts_ignore_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the search for drafts independent of measured times: drafts are searched in every step, and the costs of
    steps are not observed."""
    monkeypatch.setattr(prompt_lookup, "SEARCH_SHARE", 1e9)
    monkeypatch.setattr(StepCost, "observe", lambda self, num_tokens, seconds: None)


@pytest.mark.usefixtures("drafts_ignore_times")
@pytest.mark.parametrize("knobs", short_of(KNOBS, KNOBS[1::3]), ids=str)
def test_warm_up_leaves_no_trace_in_the_engine(
    loaded: LoadedModel, knobs: dict[str, Any], caplog: LogCaptureFixture
) -> None:
    recorded, untouched = io.StringIO(), io.StringIO()
    engine = make(loaded, recorder=Recorder(recorded), log_request_events=True, clock=lambda: 1.0, **knobs)
    new = make(loaded, recorder=Recorder(untouched), log_request_events=True, clock=lambda: 1.0, **knobs)
    with caplog.at_level(logging.INFO):
        warm_up(engine)
    assert warnings(caplog) == []
    assert read_stats(engine, 1.0) == read_stats(new, 1.0)
    assert engine.scheduler.stats() == new.scheduler.stats()
    assert engine.counters == new.counters and engine.last_output is None
    assert recorded.getvalue() == untouched.getvalue()
    assert not engine.has_unfinished_requests() and free_blocks(engine) == engine.scheduler.config.num_blocks
    assert len(engine.grammars._cache) == 0 and engine.grammars.num_waiting == 0
    engine.scheduler.check_invariants()
    if engine.max_model_len > len(PROMPT) + 8:
        assert outputs(engine) == outputs(new)
        assert decisions(recorded) == decisions(untouched), "step by step the same decisions, from the first number on"


def test_after_warm_up_nothing_is_compiled_or_started() -> None:
    engine = make("demo", kv_cache_dtype="bfloat16")
    warm_up(engine)
    kernels = (attention_kernel, heads_kernel, norm_kernel, gate_kernel)
    compiled = [kernel.cache_info().misses for kernel in kernels]
    signatures = list(draw_rows.signatures)
    pid = engine.grammars.pid
    assert pid is not None
    outputs(engine)
    for number, params in enumerate(
        (
            SamplingParams(max_tokens=3),
            SamplingParams(max_tokens=3, min_p=0.1, logit_bias={3: 2.0}, bad_words=["a"]),
            SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=[1, 2, 3]),
            SamplingParams(max_tokens=3, structured_outputs=StructuredOutputsParams(json={"type": "integer"})),
        )
    ):
        engine.add_request(f"alone-{number}", PROMPT, params)
        drain(engine)
    assert [kernel.cache_info().misses for kernel in kernels] == compiled
    assert draw_rows.signatures == signatures
    assert engine.grammars.pid == pid


def test_warm_up_verifies_drafts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(loaded, num_draft_tokens=3)
    seen = []
    prepare = Sampler.prepare
    monkeypatch.setattr(
        Sampler,
        "prepare",
        lambda self, output, *rest: seen.append(len(output.draft_token_ids)) or prepare(self, output, *rest),
    )
    warm_up(engine)
    assert any(seen)


def test_a_model_without_a_tokenizer_is_warmed_up(caplog: LogCaptureFixture) -> None:
    engine = make(wrap_model(build(FAMILIES["llama"](), seed=1)))
    with caplog.at_level(logging.INFO):
        warm_up(engine)
    assert warnings(caplog) == [] and engine.grammars.pid is None


def test_warm_up_raises_if_the_model_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(loaded)
    with monkeypatch.context() as patch:
        patch.setattr("pointsman.engine.model.forward.run_model", fail)
        with pytest.raises(EngineStepError, match="no such operation"):
            warm_up(engine)
    assert outputs(engine) == outputs(make(loaded)), "the engine is unchanged"


def test_failures_of_some_warm_up_requests_are_logged(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    engine = make(loaded)
    with monkeypatch.context() as patch:
        patch.setattr("pointsman.engine.sampling.sampler.token_logprobs", fail)
        warm_up(engine)
    lines = warnings(caplog)
    assert lines and all("a request failed" in line and "no such operation" in line for line in lines)
    assert len(lines) == 2, "the requests with log probabilities"
    assert outputs(engine) == outputs(make(loaded))


def test_a_failing_warm_up_grammar_is_logged(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    engine = make(loaded)
    with monkeypatch.context() as patch:
        patch.setattr("pointsman.engine.grammar.process.GrammarProcess._exchange_job", lambda *_: b"-a bad day\0")
        warm_up(engine)
    assert "a bad day" in caplog.text and warnings(caplog) == []
    assert outputs(engine) == outputs(make(loaded))


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such operation")
