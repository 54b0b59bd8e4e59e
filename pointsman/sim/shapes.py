"""Built-in model shapes, and their lookup by name or path.

`model_shape("meta-llama/Llama-3.1-8B")` accepts, in this order: a directory with a `config.json`, the path of a
`config.json`, a name in the Hugging Face cache of this machine, a built-in name with or without its organisation.
Nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pointsman.files import cache_home
from pointsman.sim.errors import UnknownName
from pointsman.sim.model import ModelShape, Quantization
from pointsman.sim.model_config import read_config


def model_shape(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """The shape of the model that `name_or_path` names.

    Raises:
        UnknownName: `name_or_path` is not a path, and neither the cache nor the table has the name.
        UnsupportedModel: the model's `config.json` cannot be understood.
        OSError: the model's `config.json` cannot be read.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownName(f"{path} has no config.json; give a config.json, its directory, or a built-in model")
        return read_config(path / "config.json", path.resolve().name)
    if path.is_file():
        return read_config(path, path.resolve().parent.name)
    if (cached := _cached_config(text)) is not None:
        return read_config(cached, text)
    if text.lower() in _BY_KEY:
        return _BY_KEY[text.lower()]
    known = [*SHAPES, *_SAME_SHAPE]
    raise UnknownName.nearest_to(text, "model", known if "/" in text else [name.partition("/")[2] for name in known])


# ---------------------------------------------------------------------- the Hugging Face cache


def _cache_folder() -> Path:
    """The folder in which huggingface_hub keeps models, determined by the library's rules."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return cache_home() / "huggingface" / "hub"


def _cached_config(name: str) -> Path | None:
    """`config.json` of the model `name` in the cache: of the revision "main", otherwise of the latest revision; None:
    the model is not cached."""
    if name.count("/") > 1 or ".." in name:
        return None
    folder = _cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        main = (folder / "refs" / "main").read_text().strip()
        revisions: Iterable[Path] = [folder / "snapshots" / main]
    except OSError:
        revisions = []
    try:
        others = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        others = []
    return next((path / "config.json" for path in [*revisions, *others] if (path / "config.json").is_file()), None)


# ---------------------------------------------------------------------- the table


def _shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int, longest: int,
    **more: Any,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_model_len=longest,
        source=f"config.json of {name} on Hugging Face",
        **more,
    )


def _experts(number: int, per_token: int, intermediate: int, **more: int) -> dict[str, Any]:
    return {"num_experts": number, "experts_per_token": per_token, "expert_intermediate_size": intermediate, **more}


def _windows(window: int, layers: int) -> dict[str, Any]:
    return {"sliding_window": window, "num_windowed_layers": layers}


_TIED: dict[str, Any] = {"tied_embeddings": True}
_MXFP4: dict[str, Any] = {"quantization": Quantization(method="mxfp4", bits=4.25, covers="experts")}
_GEMMA3: dict[str, Any] = _TIED | {"num_other_params": 420_000_000}  # SigLIP and the projection after it
_DEEPSEEK: dict[str, Any] = {
    "quantization": Quantization(method="fp8", bits=8, computes_in="fp8"),
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
# Columns: layers, hidden size, heads, KV heads, head size, MLP size, vocabulary, longest sequence.
_TABLE = (
    _shape("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    _shape("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    _shape("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, **_TIED),
    _shape("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, 131072, **_TIED),
    _shape("Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 14, 2, 64, 4864, 151936, 32768, **_TIED),
    _shape("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 12, 2, 128, 8960, 151936, 32768, **_TIED),
    _shape("Qwen/Qwen2.5-3B-Instruct", 36, 2048, 16, 2, 128, 11008, 151936, 32768, **_TIED),
    _shape("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 28, 4, 128, 18944, 152064, 32768),
    _shape("Qwen/Qwen2.5-14B-Instruct", 48, 5120, 40, 8, 128, 13824, 152064, 32768),
    _shape("Qwen/Qwen2.5-32B-Instruct", 64, 5120, 40, 8, 128, 27648, 152064, 32768),
    _shape("Qwen/Qwen2.5-72B-Instruct", 80, 8192, 64, 8, 128, 29568, 152064, 32768),
    _shape("HuggingFaceTB/SmolLM3-3B", 36, 2048, 16, 4, 128, 11008, 128256, 65536, **_TIED),
    _shape("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, **_TIED),
    _shape("Qwen/Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, 40960, **_TIED),
    _shape("Qwen/Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, **_TIED),
    _shape("Qwen/Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
    _shape("Qwen/Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960),
    _shape("Qwen/Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    _shape("Qwen/Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, 40960, **_experts(128, 8, 768)),
    _shape("Qwen/Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 0, 151936, 40960, **_experts(128, 8, 1536)),
    _shape(
        "openai/gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 201088, 131072,
        **_experts(32, 4, 2880), **_windows(128, 12), **_MXFP4,
    ),
    _shape(
        "openai/gpt-oss-120b", 36, 2880, 64, 8, 64, 0, 201088, 131072,
        **_experts(128, 4, 2880), **_windows(128, 18), **_MXFP4,
    ),
    _shape("google/gemma-3-4b-it", 34, 2560, 8, 4, 256, 10240, 262208, 131072, **_windows(1024, 29), **_GEMMA3),
    _shape("google/gemma-3-12b-it", 48, 3840, 16, 8, 256, 15360, 262208, 131072, **_windows(1024, 40), **_GEMMA3),
    _shape("google/gemma-3-27b-it", 62, 5376, 32, 16, 128, 21504, 262208, 131072, **_windows(1024, 52), **_GEMMA3),
    _shape("mistralai/Mistral-7B-v0.3", 32, 4096, 32, 8, 128, 14336, 32768, 32768),
    _shape("mistralai/Mixtral-8x7B-v0.1", 32, 4096, 32, 8, 128, 0, 32000, 32768, **_experts(8, 2, 14336)),
    _shape(
        "deepseek-ai/DeepSeek-V3", 61, 7168, 128, 128, 128, 18432, 129280, 163840,
        **_experts(256, 8, 2048, num_shared_experts=1, num_dense_layers=3), **_DEEPSEEK,
    ),
    _shape("microsoft/phi-4", 40, 5120, 40, 10, 128, 17920, 100352, 16384),
)  # fmt: skip

SHAPES: Mapping[str, ModelShape] = MappingProxyType({shape.name: shape for shape in _TABLE})
"""Built-in shapes by the name of their repository on Hugging Face."""

_SAME_SHAPE: Mapping[str, str] = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-3B": "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B": "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-32B": "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen2.5-72B": "Qwen/Qwen2.5-72B-Instruct",
    "google/gemma-3-4b": "google/gemma-3-4b-it",
    "google/gemma-3-12b": "google/gemma-3-12b-it",
    "google/gemma-3-27b": "google/gemma-3-27b-it",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistralai/Mistral-7B": "mistralai/Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
}
"""Names of models that have the dimensions of a built-in model."""


def _shapes_by_key() -> dict[str, ModelShape]:
    """The built-in shapes by lower-case name, with and without organisation."""
    names = {**{name: name for name in SHAPES}, **_SAME_SHAPE}
    return {key.lower(): SHAPES[shape] for name, shape in names.items() for key in (name, name.partition("/")[2])}


_BY_KEY = _shapes_by_key()
