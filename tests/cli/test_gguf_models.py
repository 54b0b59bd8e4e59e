"""A GGUF file as `--model` of the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Finished
from tests.engine.gguf_files import add_tokenizer, trained_bpe, write_gguf
from tests.engine.tiny_models import Family, build

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build(Family("llama", "", {"vocab_size": 300})())
    edit = add_tokenizer(trained_bpe(300), "gpt2", pre="gpt-2")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, edit=edit)


def test_generate_runs_a_gguf_file(pointsman: Run, gguf_file: Path) -> None:
    finished = pointsman("generate", "--model", gguf_file, "-p", "the capital", "--max-tokens", 5, "--json")
    request = json.loads(finished.out.splitlines()[0])
    assert (finished.code, request["prompt"], request["num_output_tokens"] > 0) == (0, "the capital", True)


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_broken_gguf_file_is_refused_in_one_line(command: str, pointsman: Run, gguf_file: Path) -> None:
    broken = gguf_file.with_name("broken.gguf")
    broken.write_bytes(gguf_file.read_bytes()[:2000])
    finished = pointsman(command, "--model", broken)
    assert finished.code == 2
    assert finished.err.count("\n") == 1 and str(broken) in finished.err and "copy it again" in finished.err
