"""Model and requests of the engine benchmarks: random weights, and requests of random lengths.

Random weights cost as much to run as trained ones, and every engine reads them from the same safetensors file, so
contenders differ only in the engine. The scales follow those at the start of training: linear layers keep the size of
their input, layers that write to the residual stream are smaller by the root of their number, and embeddings are so
small that after one layer the context decides the next token. With embeddings of size 1 the tied output layer would
predict each token itself, and a comparison of tokens would show nothing.

Weights are drawn with numpy, so that a driver need not import PyTorch. A directory is written once, and kept in
`benchmarks/.cache`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE = Path(__file__).resolve().parent / ".cache"
RECIPE = 1
"""Incremented when weights are drawn differently, so that an older directory is not reused."""
EMBEDDING_SCALE = 0.02
NORM_SPREAD = 0.1  # norms are not all ones, so that an engine without one differs


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model's dimensions; the output layer is the embedding, transposed."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int = 2048

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape, _ in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """(name, shape, standard deviation) of every weight; a deviation of 0 marks the weight of a norm."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        residual = (2 * self.num_layers) ** -0.5
        yield "model.embed_tokens.weight", (self.vocab_size, hidden), EMBEDDING_SCALE
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (hidden,), 0.0
            for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
                yield f"{prefix}self_attn.{name}.weight", (rows, hidden), hidden**-0.5
            yield prefix + "self_attn.q_norm.weight", (self.head_dim,), 0.0
            yield prefix + "self_attn.k_norm.weight", (self.head_dim,), 0.0
            yield prefix + "self_attn.o_proj.weight", (hidden, queries), queries**-0.5 * residual
            yield prefix + "post_attention_layernorm.weight", (hidden,), 0.0
            for name in ("gate_proj", "up_proj"):
                yield f"{prefix}mlp.{name}.weight", (inner, hidden), hidden**-0.5
            yield prefix + "mlp.down_proj.weight", (hidden, inner), inner**-0.5 * residual
        yield "model.norm.weight", (hidden,), 0.0

    def config(self) -> dict[str, Any]:
        """The contents of config.json. No EOS: a request ends at its length."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "dtype": "float32",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": EMBEDDING_SCALE,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_model_len,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


FULL = Shape("121M", 768, 14, 12, 4, 64, 2304, 32_000)
QUICK = Shape("10M", 256, 10, 4, 2, 64, 768, 8_192)


def model_directory(shape: Shape, cache: Path = CACHE) -> Path:
    """The directory with a model of this shape, which is written first if it is missing."""
    key = json.dumps([RECIPE, asdict(shape)], sort_keys=True)
    directory = cache / f"qwen3-{shape.name}-{blake2b(key.encode(), digest_size=4).hexdigest()}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="writing-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        _write(shape, made)
        try:
            os.replace(made, directory)
        except OSError:  # another process was faster, and wrote the same
            if not directory.is_dir():
                raise
    return directory


def _write(shape: Shape, directory: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, dimensions, scale in shape.tensors():
        noise = rng.standard_normal(dimensions, dtype=np.float32)
        weights[name] = noise * np.float32(scale) if scale else 1 + noise * np.float32(NORM_SPREAD)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Job:
    """One request, in tokens."""

    prompt: int
    output: int


def make_jobs(count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> list[Job]:
    """`count` requests with lengths drawn evenly from both ranges, their ends included."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt[0], prompt[1] + 1, size=count).tolist()
    outputs = rng.integers(output[0], output[1] + 1, size=count).tolist()
    return [Job(*lengths) for lengths in zip(prompts, outputs, strict=True)]


def make_prompts(jobs: Sequence[Job], vocab_size: int, seed: int) -> list[list[int]]:
    """Random tokens for each job. Rounds take different seeds, so that prefix caches do not hold the second round."""
    rng = np.random.default_rng([seed, vocab_size])
    return [rng.integers(0, vocab_size, size=job.prompt).tolist() for job in jobs]
