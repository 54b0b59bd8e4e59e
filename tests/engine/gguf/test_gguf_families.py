"""Models of each family, written as GGUF files and read back, have the same configuration, weights and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pointsman.engine.gguf.config import make_config
from pointsman.engine.gguf.export import export_directory
from pointsman.engine.gguf.reader import read_gguf
from pointsman.engine.model.loader import load_model
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny_models import FAMILIES, HEAD16, LLAMA3, SLIDES, Family, build, longrope

GEMMA3_LAYERS = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
TIED = {"tie_word_embeddings": True}
MODELS = {
    **{name: FAMILIES[name] for name in ("llama", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3")},
    "llama-llama3": Family(
        "llama", "", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}}
    ),
    "llama-biases": Family("llama", "", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Family("llama", "", TIED),
    "gemma": Family("gemma", "", {**HEAD16, **TIED}),
    "gemma2": Family(
        "gemma2", "", {**HEAD16, **SLIDES, **TIED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0}
    ),
    "gemma3": Family("gemma3_text", "", {**HEAD16, **SLIDES, **GEMMA3_LAYERS, "query_pre_attn_scalar": 16}),
    "gemma3-linear": Family(
        "gemma3_text",
        "",
        {
            **HEAD16,
            **SLIDES,
            **GEMMA3_LAYERS,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "phi3-longrope": Family("phi3", "", longrope(64)),
    "phi3-partial": Family(
        "phi3", "", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
}
NOT_IN_GGUF = {"_name_or_path", "transformers_version", "dtype", "architectures", "head_dim", "use_cache"}
"""Fields of a configuration that do not affect the computation, or that have their default value."""


def logits_of(model: Any) -> torch.Tensor:
    token_ids = torch.arange(3, 63).reshape(1, -1) % model.config.vocab_size
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids).logits
    return logits


def exported(path: Path, directory: Path) -> Any:
    """The model in a directory that is exported from a file."""
    export_directory(path, directory, "float32")
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_written_as_gguf_is_read_back_unchanged(name: str, tmp_path: Path) -> None:
    model = build(MODELS[name]())
    path = write_gguf(tmp_path / "model.gguf", model)
    known, found = model.config.to_dict(), make_config(read_gguf(path)).to_dict()
    assert {key: found.get(key) for key in known.keys() - NOT_IN_GGUF} == {
        key: known[key] for key in known.keys() - NOT_IN_GGUF
    }
    precision = 1e-4 if name.startswith("gemma") else 0  # 1 is added to norms and subtracted again
    read = exported(path, tmp_path / "directory")
    torch.testing.assert_close(logits_of(read), logits_of(model), rtol=precision, atol=precision)
    loaded = load_model(path)
    assert loaded.eos_token_ids == (2,)
    assert loaded.path == str(path)
