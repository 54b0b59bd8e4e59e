"""The packaged demo model is complete, small, loadable offline, and has learned its text.

The sentences below were written for this test, in the style of the documentation in the model's training text. None of
them is in that text, so a low loss shows learning and not memory. The control, the same words in a random order, shows
that the loss measures the language and not the choice of words.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pointsman.engine

DEMO = Path(pointsman.engine.__file__).parent / "demo"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
LARGEST = 8_000_000  # bytes; the whole directory is in the wheel

SENTENCES = (
    "If the file does not exist, an exception is raised and the function returns None.",
    "The second argument must be a string that contains the name of the module to be loaded.",
    "Return a new list with the elements of the given sequence in reverse order.",
    "A class may define a method that is called when the instance is about to be destroyed.",
    "Raise ValueError if the value is not an integer or if it is less than zero.",
    "This method is called by the interpreter when the object is used in a boolean context.",
    "The default encoding is used when the argument is omitted.",
    "Note that the order of the keys in the dictionary is the order in which they were added.",
)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


@torch.inference_mode()
def loss(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> float:
    """Mean negative log likelihood of a token in the texts, in nats, without the first token of each text."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        logits = model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def test_demo_directory_has_all_files_and_is_small() -> None:
    """Every file that a loader needs exists, and none is large."""
    sizes = {path.name: path.stat().st_size for path in DEMO.iterdir() if path.is_file()}
    assert set(sizes) >= FILES
    assert sum(sizes.values()) < LARGEST


def test_demo_config_allows_long_positions_and_names_one_eos(model: Any, tokenizer: Any) -> None:
    """Long positions are allowed, the rotary embedding is not scaled, and all files name the same EOS token."""
    config = model.config
    assert config.max_position_embeddings >= 16384
    assert config.rope_parameters["rope_type"] == "default"
    assert config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer)
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token_id == config.eos_token_id == model.generation_config.eos_token_id
    stored = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    assert stored["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        "The import statement",
        "  leading, trailing and   inner space \t\n\n\n",
        "def f(x):\n    return x ** 2\n",
        "naïve Straße, 日本語, Ελληνικά, 🐍 e\u0301 \u200b",
        "\x00\x7f\r\n",
    ],
)
def test_demo_tokenizer_decodes_its_ids_to_the_same_text(tokenizer: Any, text: str) -> None:
    """A byte-level vocabulary neither loses nor adds characters of any text."""
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_demo_chat_template_joins_the_messages(tokenizer: Any) -> None:
    """The demo model's chat template turns a conversation into text for the model to continue, without roles."""
    messages = [{"role": "user", "content": "A list is"}, {"role": "assistant", "content": "a sequence."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "A list is\n\na sequence."


def test_demo_model_prefers_sentences_to_shuffled_words(model: Any, tokenizer: Any) -> None:
    """The loss of new sentences is far below that of a uniform guess, and below that of the same words in random
    order."""
    shuffler = random.Random(3)
    disorder = tuple(" ".join(shuffler.sample(words, len(words))) for words in map(str.split, SENTENCES))
    ordered = loss(model, tokenizer, SENTENCES)
    assert ordered < 5.0 < math.log(model.config.vocab_size)
    assert ordered < loss(model, tokenizer, disorder) - 1.0


@torch.inference_mode()
def test_greedy_text_of_the_demo_model_is_readable(model: Any, tokenizer: Any) -> None:
    """The most likely continuation has whole characters, and mostly letters and spaces."""
    inputs = tokenizer("The import statement", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(text) > 20
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert sum(c.isalpha() or c.isspace() for c in text) > 0.8 * len(text)


@torch.inference_mode()
def test_demo_model_ends_some_texts_with_eos(model: Any, tokenizer: Any) -> None:
    """Sampled at the recommended temperature, the model ends some of its texts by EOS."""
    torch.manual_seed(5)
    inputs = tokenizer("To open a file", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=128, num_return_sequences=16, do_sample=True, temperature=0.7)
    assert (output == tokenizer.eos_token_id).any(dim=1).sum() >= 2
