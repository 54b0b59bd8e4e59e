"""Published GGUF files give the right answers, and load quickly."""

from __future__ import annotations

import time

import pytest

from pointsman.engine.llm import LLM
from pointsman.engine.model.loader import load_model
from pointsman.engine.params.sampling import SamplingParams
from tests.engine.real.weights import weights_of
from tests.forms import short_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SECONDS = 15.0
"""Limit of CPU time for loading 135 million weights; it takes two to five seconds on a machine without other work."""

pytestmark = pytest.mark.e2e


def test_smollm2_knows_the_capital_of_france() -> None:
    llm = LLM(str(weights_of("smollm2")))
    assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text.startswith(" Paris.")
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["float32"]))
def test_gemma3_continues_a_count(dtype: str) -> None:
    llm = LLM(str(weights_of("gemma3-270m")), dtype=dtype)
    assert llm.generate("2 + 2 =", GREEDY)[0].outputs[0].text.startswith(" 4")


@pytest.mark.long
def test_smollm2_loads_in_seconds() -> None:
    path = weights_of("smollm2")
    load_model(path)  # compiles the kernels
    began = time.process_time()
    load_model(path)
    assert time.process_time() - began < SECONDS
