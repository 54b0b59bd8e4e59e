"""A tiny model with random weights, and the command run in this process or as a process of its own."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import pytest

from pointsman.cli import main
from tests.forked_engines import start_command

MAX_MODEL_LEN = 512
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run of the command."""

    code: int
    out: str
    err: str

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def requests(self) -> dict[str, dict[str, Any]]:
        return {line["request_id"]: line for line in self.json_lines if line["type"] == "request"}

    @property
    def summary(self) -> dict[str, Any]:
        summary = self.json_lines[-1]
        assert summary["type"] == "summary"
        return summary

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("pointsman: error: ")]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two small layers and a tokenizer whose tokens are bytes."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {char: index for index, char in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def pointsman(capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs the command in this process; returns its output and exit code."""

    def run(*args: object) -> Finished:
        handlers = [signal.getsignal(number) for number in SIGNALS]
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        assert [signal.getsignal(number) for number in SIGNALS] == handlers, "a command restores the signal handlers"
        out, err = capfd.readouterr()
        return Finished(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def pointsman_process() -> Callable[..., Finished]:
    """Runs the command as a process of its own, forked from one that has imported the modules."""

    def run(*args: object, stdin: str | None = None) -> Finished:
        with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            given.write(stdin or "")
            given.seek(0)
            process = start_command(*map(str, args), descriptors=[given.fileno(), out.fileno(), err.fileno()])
            try:
                code = process.wait(120)
            finally:
                process.kill()
            out.seek(0)
            err.seek(0)
            return Finished(code, out.read(), err.read())

    return run
