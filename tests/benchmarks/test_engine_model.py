"""The model and the requests of the engine benchmarks are what the benchmarks say they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks._engine_model import FULL, QUICK, Shape, make_jobs, make_prompts, model_directory

TINY = Shape("tiny", 32, 2, 2, 1, 16, 64, 128)


def test_parameter_counts() -> None:
    assert round(FULL.num_parameters / 1e6) == 121
    assert round(QUICK.num_parameters / 1e6) == 10
    assert FULL.kv_bytes_per_token(4) == 2 * 14 * 4 * 64 * 4


def test_directory_holds_every_weight_once(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    directory = model_directory(TINY, tmp_path)
    weights = load_file(directory / "model.safetensors")
    assert sum(weight.size for weight in weights.values()) == TINY.num_parameters
    assert all(np.isfinite(weight).all() and weight.std() > 0 for weight in weights.values())
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] is None
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]  # nothing half-written stays


def test_directory_is_written_once_and_names_its_shape(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    directory = model_directory(TINY, tmp_path)
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert model_directory(TINY, tmp_path) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    other = Shape("tiny", 32, 3, 2, 1, 16, 64, 128)
    assert model_directory(other, tmp_path) != directory


@pytest.mark.e2e
def test_greedy_tokens_depend_on_the_context(tmp_path: Path) -> None:
    """Weights whose every answer were the last token again could not tell a right engine from a wrong one."""
    pytest.importorskip("torch")
    from pointsman.engine import LLM, SamplingParams

    shape = Shape("small", 64, 4, 2, 1, 32, 128, 512)
    llm = LLM(str(model_directory(shape, tmp_path)), max_model_len=128, max_num_seqs=4)
    prompts = make_prompts(make_jobs(4, (20, 40), (16, 16)), shape.vocab_size, seed=0)
    same_end = [[*prompt[:-1], 7] for prompt in prompts]  # so that only the context differs
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in same_end], params, use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(tokens)) == len(tokens)
    assert len({token for some in tokens for token in some}) > 16


def test_jobs_fill_their_ranges_and_stay_the_same() -> None:
    jobs = make_jobs(200, (32, 64), (1, 8))
    assert {job.output for job in jobs} == set(range(1, 9))
    assert min(job.prompt for job in jobs) >= 32
    assert max(job.prompt for job in jobs) <= 64
    assert jobs == make_jobs(200, (32, 64), (1, 8))


def test_rounds_have_other_prompts_of_the_same_lengths() -> None:
    jobs = make_jobs(8, (32, 64), (1, 8))
    first, second = make_prompts(jobs, 1000, seed=0), make_prompts(jobs, 1000, seed=1)
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in second] == [job.prompt for job in jobs]
    assert all(a[:16] != b[:16] for a, b in zip(first, second, strict=True))  # no prefix cache knows them
    assert first == make_prompts(jobs, 1000, seed=0)
