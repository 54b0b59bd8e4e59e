"""Writes a GGUF file's model as a directory in the Hugging Face format, for programs that cannot read GGUF files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pointsman.engine.gguf.config import TOKEN_IDS, generation_fields, make_config
from pointsman.engine.gguf.reader import read_gguf
from pointsman.engine.gguf.tensors import read_weights
from pointsman.engine.gguf.tokenizer import make_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_directory(gguf_file: Path, directory: Path, dtype: str = "bfloat16") -> None:
    """Write config.json, generation_config.json, *.safetensors, and the tokenizer's files if there is a tokenizer.

    The directory is renamed to its final path only when it is complete.

    Args:
        gguf_file: path of the GGUF file, or of any part of the model.
        directory: path of a new or empty directory.
        dtype: type of the weights: "float32", "bfloat16" or "float16".

    Raises:
        ModelLoadError, UnsupportedModel: the file cannot be read.
        ValueError: the dtype is unknown, or the directory has files.
        OSError: the directory cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; give a new directory")
    gguf = read_gguf(gguf_file)
    config = make_config(gguf)
    tokenizer = make_tokenizer(gguf)
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=read_weights(gguf, config, DTYPES[dtype]), dtype=DTYPES[dtype]
    )
    generation = generation_fields(gguf)
    own_ids = {name: getattr(config, name) for name in TOKEN_IDS}
    samples = len(generation) > 1  # transformers uses sampling parameters only with do_sample
    model.generation_config = GenerationConfig(**{**own_ids, **generation}, do_sample=samples)
    part = directory.with_name(f".{directory.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    try:
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        mode = (part / "config.json").stat().st_mode
        for weights in part.glob("*.safetensors"):
            weights.chmod(mode)  # safetensors ignores the umask: only the owner could read its files
        part.replace(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
