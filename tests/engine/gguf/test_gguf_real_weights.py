"""Published GGUF files, where `POINTSMAN_TEST_WEIGHTS` names a folder with some: answers, and times to load."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pointsman.engine.llm import LLM
from pointsman.engine.model.loader import load_model
from pointsman.engine.params.sampling import SamplingParams

FOLDER = os.environ.get("POINTSMAN_TEST_WEIGHTS", "")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SECONDS = 15.0
"""To load 135 million weights, with other tests beside; alone it takes two to five."""

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not FOLDER, reason="POINTSMAN_TEST_WEIGHTS names no folder")]


def file_of(pattern: str) -> Path:
    files = sorted(Path(FOLDER).glob(pattern))
    if not files:
        pytest.skip(f"{FOLDER} has no {pattern}")
    return files[0]


def test_smollm2_knows_the_capital_of_france() -> None:
    llm = LLM(str(file_of("*SmolLM2-135M-Instruct*.gguf")))
    assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text.startswith(" Paris.")
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")


def test_gemma3_counts() -> None:
    llm = LLM(str(file_of("gemma-3-270m-*.gguf")))
    assert llm.generate("2 + 2 =", GREEDY)[0].outputs[0].text.startswith(" 4")


def test_smollm2_loads_in_seconds() -> None:
    path = file_of("*SmolLM2-135M-Instruct*.gguf")
    load_model(path)  # compiles the kernels
    began = time.perf_counter()
    load_model(path)
    assert time.perf_counter() - began < SECONDS
