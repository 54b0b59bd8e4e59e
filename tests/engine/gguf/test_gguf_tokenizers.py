"""Tokenizers from metadata give the same token ids and texts as the tokenizer that was written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.gguf.config import generation_fields
from pointsman.engine.gguf.reader import read_gguf
from pointsman.engine.text.tokenizer import read_tokenizer, render_chat
from tests.engine.gguf_files import add_tokenizer, trained_bpe, write_gguf
from tests.engine.real_tokenizers import download
from tests.engine.text_tokenizers import HARD_TEXT, sentencepiece
from tests.engine.tiny_models import Family, build
from tests.forms import short_of

TEXTS = (
    "",
    " ",
    "The capital of France is",
    HARD_TEXT,
    "  two spaces, then\t\ttabs\n\n\nand 1234567.89 don't WE'LL HTTPServer/path\r\n  x ",
    "def f(x):\n        return x  # ▁▁ <tool> <|im_end|> éx",
)
ALPHABET = " \n\t▁abctheéßЖ日😀<>|[]bA1.0'/_\u0301\u200d"


def random_texts(seed: int, count: int = 300) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 40))) for _ in range(count)]


def model_for(num_tokens: int) -> Any:
    return build(Family("llama", "", {"vocab_size": num_tokens, "hidden_size": 8, "head_dim": 2})())


def tokenizer_of(path: Path, tokenizer: Any, kind: str, **options: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    num_tokens = options.setdefault("num_tokens", max(backend.get_vocab().values()) + 1)
    write_gguf(path, model_for(num_tokens), edit=add_tokenizer(tokenizer, kind, **options))
    return read_tokenizer(path)


def assert_same(read: Any, original: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        token_ids = read(text, add_special_tokens=False)["input_ids"]
        assert token_ids == original.encode(text, add_special_tokens=False).ids, repr(text)
        assert read.decode(token_ids) == original.decode(token_ids, skip_special_tokens=False), repr(text)


def test_byte_level_bpe_is_read_back_unchanged(tmp_path: Path) -> None:
    original = trained_bpe(300)
    read = tokenizer_of(tmp_path / "model.gguf", original, "gpt2", pre="gpt-2", num_tokens=310)
    assert_same(read, original.backend_tokenizer, [*TEXTS, *random_texts(0)])
    assert (read.bos_token, read.eos_token, read.pad_token, len(read)) == ("<s>", "<eos>", "<pad>", len(original))
    chat = [{"role": "user", "content": "hi"}]
    assert render_chat(read, chat, {}) == "hi<|im_end|>"
    assert read.decode(read("hi<|im_end|>")["input_ids"], skip_special_tokens=True) == "hi"


def test_sentencepiece_bpe_is_read_back_unchanged(tmp_path: Path) -> None:
    original = sentencepiece(falls_back=True)
    read = tokenizer_of(tmp_path / "model.gguf", original, "llama")
    # The last text has added tokens, which the original tokenizer finds only in normalized text.
    assert_same(read, original.backend_tokenizer, [*TEXTS[:-1], *random_texts(1)])


REAL = {
    "llama3_1": ("gpt2", {"pre": "llama-bpe"}),
    "qwen3": ("gpt2", {"pre": "qwen2"}),
    "gptoss": ("gpt2", {"pre": "gpt-4o"}),
    "gemma3": ("llama", {"add_space_prefix": False}),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", short_of([*REAL], ["llama3_1", "gemma3"]))
def test_tokenizers_of_published_models_are_read_unchanged(name: str, tmp_path: Path) -> None:
    kind, options = REAL[name]
    original = Tokenizer.from_file(str(download(name) / "tokenizer.json"))
    read = tokenizer_of(tmp_path / "model.gguf", original, kind, **options)
    assert_same(read, original, [*TEXTS, *random_texts(2, 1000), Path(__file__).read_text(encoding="utf-8")])


def written(path: Path, edit: Callable[[GGUFWriter], object], **options: Any) -> Path:
    """A file with the trained tokenizer, whose fields are edited afterwards."""
    add = add_tokenizer(trained_bpe(300), "gpt2", **{"pre": "gpt-2", **options})

    def add_and_edit(writer: GGUFWriter) -> None:
        add(writer)
        edit(writer)

    return write_gguf(path, model_for(300), edit=add_and_edit)


def replace(key: str, value: Any) -> Callable[[GGUFWriter], None]:
    """The edit that gives an existing field another value of the same type."""

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    return edit


def error_of(path: Path, kind: type[Exception] = ModelLoadError) -> str:
    with pytest.raises(kind) as error:
        read_tokenizer(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("adds_bos", "adds_eos", "expected"),
    [
        (True, False, "<s>the"),
        (False, True, "the<eos>"),
        (True, True, "<s>the<eos>"),
        (False, False, "the"),
        (None, None, "the"),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_requires(
    adds_bos: bool | None, adds_eos: bool | None, expected: str, tmp_path: Path
) -> None:
    def edit(writer: GGUFWriter) -> None:
        if adds_bos is not None and adds_eos is not None:
            writer.add_add_bos_token(adds_bos)
            writer.add_add_eos_token(adds_eos)

    read = read_tokenizer(written(tmp_path / "model.gguf", edit))
    assert read is not None
    assert read.decode(read("the")["input_ids"]) == expected


def test_llama3_and_sentencepiece_begin_with_bos_by_default(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", lambda writer: None, pre="llama-bpe")
    llama3 = read_tokenizer(path)
    spm = tokenizer_of(tmp_path / "spm.gguf", sentencepiece(falls_back=True), "llama")
    assert llama3 is not None
    assert llama3("the")["input_ids"][0] == llama3.bos_token_id
    assert spm("the")["input_ids"][0] == spm.bos_token_id


def test_generation_ends_at_eos_and_at_end_of_turn_tokens(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)

    path = written(tmp_path / "model.gguf", edit)
    assert generation_fields(read_gguf(path)) == {"eos_token_id": [1, 7, 3], "temperature": 0.5, "top_k": 20}


def test_a_chat_template_can_be_chosen_by_name(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])

    read = read_tokenizer(written(tmp_path / "model.gguf", edit))
    assert read is not None
    assert render_chat(read, [{"role": "user", "content": "hi"}], {}) == "plain"
    assert render_chat(read, [{"role": "user", "content": "hi"}], {"chat_template": "tool_use"}) == "tools"


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", replace("tokenizer.ggml.pre", "viking"))
    assert "tokenizer.ggml.pre is 'viking'; supported are gpt-2, smollm, llama-bpe" in error_of(path, UnsupportedModel)


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", replace("tokenizer.ggml.model", "rwkv"))
    assert "tokenizer.ggml.model is 'rwkv'; supported are gpt2 and llama" in error_of(path, UnsupportedModel)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tokenizer.ggml.merges", ["a b", "nothing"], "tokenizer.ggml.merges[1] is 'nothing'; it must be two tokens"),
        ("tokenizer.ggml.merges", ["a unheardof"], "Token `unheardof` out of vocabulary; convert the model again"),
        (
            "tokenizer.ggml.token_type",
            [1, 1],
            "tokenizer.ggml.token_type has 2 values, but tokenizer.ggml.tokens has 300",
        ),
        ("tokenizer.ggml.tokens", ["a"] * 300, "tokenizer.ggml.tokens has 'a' twice"),
        ("tokenizer.ggml.eos_token_id", 300, "tokenizer.ggml.eos_token_id is 300; it must be a token id from 0 to 299"),
    ],
)
def test_the_error_names_a_wrong_metadata_field(key: str, value: Any, error: str, tmp_path: Path) -> None:
    assert error in error_of(written(tmp_path / "model.gguf", replace(key, value)))
