"""Makes models with random weights, on the device, from a seed, and engines for them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from pointsman.engine import Engine
from pointsman.engine.attention.paged import ATTENTION_NAME
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.sim.model import ModelShape
from pointsman.sim.shapes import model_shape

BLOCK_SIZE = 32
RESERVE = 0.1
"""Share of the device's memory that is reserved for activations and graphs."""
STEPS_IN_FLIGHT = 2


def small_shape(tiny: bool) -> ModelShape:
    """Qwen3-0.6B's shape: 28 layers, hidden 1024, 16 heads, 8 KV heads."""
    return _tiny("tiny, tied", 2, 64, tied=True) if tiny else model_shape("Qwen/Qwen3-0.6B")


def large_shape(tiny: bool) -> ModelShape:
    """Qwen3-8B's shape: 36 layers, hidden 4096, 32 heads, 8 KV heads."""
    return _tiny("tiny", 3, 96, tied=False) if tiny else model_shape("Qwen/Qwen3-8B")


def _tiny(name: str, layers: int, hidden: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=2 * hidden,
        vocab_size=2048,
        max_model_len=40960,
        source="made for the check",
        tied_embeddings=tied,
    )


def config_of(shape: ModelShape) -> Qwen3Config:
    """The transformers configuration of a shape."""
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=shape.tied_embeddings,
        eos_token_id=0,
        pad_token_id=0,
    )


def make_model(shape: ModelShape, device: str, attention: str = ATTENTION_NAME, seed: int = 0) -> Any:
    """A transformers model in bfloat16, with weights drawn on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.eval().requires_grad_(False)


def make_loaded(shape: ModelShape, device: str) -> LoadedModel:
    """A model for `Engine`."""
    return wrap_model(make_model(shape, device), path=shape.name)


def make_engine(loaded: LoadedModel, num_blocks: int, **knobs: Any) -> Engine:
    """An engine with enough steps in flight to hide the host's work."""
    return Engine(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_steps_in_flight=STEPS_IN_FLIGHT, **knobs)


def fits(shape: ModelShape, device: str) -> bool:
    """Whether the weights and some KV fit into the free memory."""
    return device == "cpu" or 1.25 * shape.weight_bytes < torch.cuda.mem_get_info()[0]


def blocks_that_fit(shape: ModelShape, device: str, wanted: int) -> int:
    """Number of KV blocks that fit into memory, at most `wanted`. The model is on the device already."""
    if device == "cpu":
        return wanted
    free, total = torch.cuda.mem_get_info()
    of_block = sum(shape.kv_bytes_per_token(shape.dtype_bytes)) * BLOCK_SIZE
    return max(0, min(wanted, int((free - RESERVE * total) // of_block)))


def blocks_of(num_tokens: int) -> int:
    """Number of blocks for a request's tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def random_prompts(shape: ModelShape, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts without common prefixes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, shape.vocab_size, length).tolist() for length in lengths]


def free_memory() -> None:
    """Return freed memory to the device, for the next model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
