"""Frames: the messages are read correctly from pieces of any length."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from pointsman.core import PreemptionCause, RequestEvent, RequestEventType
from pointsman.core.errors import RequestRefused, UnknownRequest
from pointsman.engine import SamplingParams
from pointsman.engine.outputs.request_output import RequestMetrics
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.server.service.sampling import for_sample
from pointsman.server.wire.logprobs import Logprobs
from pointsman.server.wire.messages import Add, Delta, EngineOutputs, EngineRequest, StepNote, Unpacker, pack, portable

GRAMMAR = StructuredOutputsParams(json={"type": "object", "properties": {f"name{i}": {} for i in range(500)}})


def test_messages_split_into_any_pieces_are_read_whole() -> None:
    messages = [
        Add([(1, EngineRequest("a", list(range(1000)), SamplingParams(temperature=0, stop=["x"]), deadline=5.0))]),
        EngineOutputs(
            accepted=[1],
            deltas=[(1, Delta("hé", [5], Logprobs([1], [5], [-0.5], [1], [b"h\xc3"])))],
            steps=[StepNote(3, 1, 1e-5)],
        ),
        EngineOutputs(errors=[(2, RequestRefused("too long"))]),
    ]
    stream = b"".join(pack(message) for message in messages)
    rng = random.Random(0)
    for _ in range(50):
        unpacker, found, start = Unpacker(), [], 0
        while start < len(stream):
            end = start + rng.choice((1, 3, 50, 5000))
            found += unpacker.feed(stream[start:end])
            start = end
        assert [pickle.dumps(one) for one in found[:2]] == [pickle.dumps(one) for one in messages[:2]]
        (key, error) = found[2].errors[0]
        assert (key, type(error), str(error)) == (2, RequestRefused, "too long")


def test_outputs_are_equal_after_pickling() -> None:
    metrics = RequestMetrics(1.0, 1.5, 2.0, 2.5, num_cached_tokens=4, num_external_tokens=2, num_preemptions=1)
    plain = EngineOutputs(
        accepted=[7],
        tokens=[(key, "é\u2028 \U0001f600", [5, 2**31], key) for key in range(20)],
        deltas=[
            (20, Delta("x", [6], finish_reason="stop", stop_reason=7, metrics=metrics, num_cached_tokens=4)),
            (21, Delta(finish_reason="error", finish_detail="why", metrics=RequestMetrics(1.0))),
        ],
        steps=[StepNote(3, 1, 1e-5), StepNote(4, 4, 0.5)],
    )
    frame = pack(plain)
    assert list(Unpacker().feed(frame)) == [plain]
    (found,) = Unpacker().feed(frame)
    assert found.steps[1].num_generated_tokens == 4
    for more in (
        {"finish_reason": "stop"},
        {"finish_detail": "eos"},
        {"stop_reason": 0},
        {"logprobs": Logprobs([1], [5], [-0.5], [1], [b"a"])},
        {"prompt_logprobs": Logprobs([1], [5], [-0.5], [1], [b"a"])},
        {"metrics": RequestMetrics(1.0, preemption_causes=(PreemptionCause.MEMORY,), num_preemptions=1)},
        {"metrics": RequestMetrics(1.0, events=[RequestEvent(RequestEventType.QUEUED, 1.0)])},
        {"metrics": metrics, "logprobs": Logprobs([1], [5], [-0.5], [1], [b"a"])},
        {"metrics": metrics, "prompt_logprobs": Logprobs([1], [5], [-0.5], [1], [b"a"])},
    ):
        outputs = EngineOutputs(tokens=[(1, "a", [5], 0)], deltas=[(2, Delta("b", [6], **more))])  # type: ignore[arg-type]
        (found,) = Unpacker().feed(pack(outputs))
        assert pickle.dumps(found) == pickle.dumps(outputs), more
    for delta in (Delta(embedding=np.ones(3, np.float32)), Delta(embedding=np.ones(3, np.float32), metrics=metrics)):
        (found,) = Unpacker().feed(pack(EngineOutputs(deltas=[(1, delta)])))
        assert found.deltas[0][1].embedding.tolist() == [1.0] * 3


def test_shared_objects_are_sent_once() -> None:
    prompt, biases = list(range(2000)), dict.fromkeys(range(300), 0.25)
    first = SamplingParams(seed=7, logit_bias=biases, stop=["some text"] * 16, structured_outputs=GRAMMAR)
    params = [for_sample(first, max_tokens=16, sample=number) for number in range(40)]
    requests = [(key, EngineRequest(f"job-{key}", prompt, own)) for key, own in enumerate(params)]
    one, all_of_them = pack(Add(requests[:1])), pack(Add(requests))
    assert len(one) > 20_000 and len(all_of_them) < len(one) + 40 * 300
    (found,) = Unpacker().feed(all_of_them)
    assert found == Add(requests)
    assert [request.params.seed for _, request in found.requests] == list(range(7, 47))


def test_invalid_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="a message has 4294967295 bytes, but at most"):
        list(Unpacker().feed(b"\xff\xff\xff\xffHTTP"))


def test_errors_keep_their_class_if_picklable() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} of {two}")

    known = portable(UnknownRequest("no request 'a'"))
    assert (type(known), str(known)) == (UnknownRequest, "no request 'a'")
    odd = portable(Odd(1, 2))
    assert (type(odd), str(odd)) == (RuntimeError, "Odd: 1 of 2")


def test_merged_deltas_equal_one_delta() -> None:
    one = Delta("a", [1], Logprobs([1], [1], [-1.0], [1], [b"a"]), num_cached_tokens=7, prompt_logprobs=Logprobs([0]))
    one.merge(Delta("", [2], Logprobs([1], [2], [-2.0], [1], [b""]), num_cached_tokens=7))
    one.merge(Delta("bc", [3], Logprobs([1], [3], [-3.0], [2], [b"bc"]), "stop", "", 3, num_cached_tokens=7))
    assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == ("abc", [1, 2, 3], "stop", 3)
    assert one.logprobs is not None and one.logprobs.token_ids == [1, 2, 3] and one.logprobs.counts == [1, 1, 1]
    assert one.prompt_logprobs == Logprobs([0]) and one.num_cached_tokens == 7
