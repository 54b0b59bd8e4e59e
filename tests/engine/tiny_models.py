"""Tiny models with random weights: every family's real code, in milliseconds.

Weights are drawn wide (standard deviation 0.15) and norms and biases are perturbed, so that attention is far from
uniform and every feature of a family (a window, a softcap, a bias) changes the outcome. Greedy output must be varied to
test anything, so output embeddings are untied (a tied, random model repeats its last token), and embeddings are scaled
down where they would drown what the layers add.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2 = {
    **{
        name: COMMON[name]
        for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    },
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
}
ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

EMBEDDING_SCALE = {"gemma2": 0.2, "gemma3_text": 0.2, "gpt2": 2.0}

FAMILIES: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-yarn": lambda: LlamaConfig(**COMMON, rope_parameters={"rope_type": "yarn", **ROPE}),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=20),
    "gemma2": lambda: Gemma2Config(**COMMON, head_dim=16, sliding_window=20, attn_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON, head_dim=16, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: GPT2Config(**GPT2),
}

ACCEPTED: dict[str, Any] = {
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        word_embed_proj_dim=48,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **COMMON,
        head_dim=16,
        sliding_window=20,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "yarn", **ROPE},
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "bloom": (lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=48, n_layer=2, n_head=4), "0 of 2 layers asked"),
    "phi3-longrope": (
        lambda: Phi3Config(
            **COMMON,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 64,
            },
        ),
        "'longrope': its frequencies depend on the longest sequence in the batch",
    ),
    "llama-dynamic": (
        lambda: LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", **ROPE}),
        "'dynamic': its frequencies depend on the longest sequence in the batch",
    ),
    "gemma3-dynamic-in-one-layer-type": (
        lambda: Gemma3TextConfig(
            **COMMON,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
            },
        ),
        "'dynamic'",
    ),
    "hybrid": (
        lambda: FalconH1Config(**COMMON, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
        "layers of type hybrid",
    ),
}


def build(config: Any, seed: int = 0) -> Any:
    """A model with wide random weights, in float32, with transformers' eager attention."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise * 0.15)
        else:
            parameter.data.add_(noise * 0.05)
    model.get_input_embeddings().weight.data.mul_(EMBEDDING_SCALE.get(config.model_type, 1.0))
    return model.eval()
