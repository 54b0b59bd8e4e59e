"""Tiny models with random weights: every family's real code, in milliseconds.

`FAMILIES` are the configurations whose tokens must equal transformers'. `REFUSED` are the configurations that must be
refused, each with words from its error. The tests are parametrised with these two, and the tables in
docs/reference/models.md are made from them.

Weights are drawn wide (standard deviation 0.15) and norms, biases and sinks are perturbed, so that attention is far
from uniform and every feature of a family (a window, a softcap, a bias) changes the outcome. Greedy output must be
varied to test anything, so output embeddings are untied (a tied, random model repeats its last token), and embeddings
are scaled down where they would be much larger than the layers' outputs. Windows and the original lengths of rotary
embeddings are shorter than the sequences that the tests run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Ministral3Config

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
WINDOW = 20
HEAD16 = {"head_dim": 16}
SLIDES = {"sliding_window": WINDOW}
SOME_SLIDE = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK = {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ORIGINAL_LENGTH = 64
ORIGINAL_LONGROPE = 128
ROPE: dict[str, Any] = {"rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", **ROPE, "original_max_position_embeddings": ORIGINAL_LENGTH}
LLAMA3 = {
    **{**YARN, "rope_type": "llama3"},
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


EMBEDDING_SCALE = {
    "gemma": 0.2,
    "gemma2": 0.1,
    "gemma3_text": 0.1,
    "vaultgemma": 0.2,
    "gpt2": 2.0,
    "gpt_bigcode": 2.0,
}
"""Model type -> factor of the random input embeddings."""


def longrope(original: int) -> dict[str, Any]:
    """Options of a model with two sets of rotary frequencies, for sequences up to `original` tokens and longer ones."""
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
            "original_max_position_embeddings": original,
        },
    }


SCALED_BY_POSITION: dict[str, Any] = {
    **Ministral3Config().rope_parameters,
    "original_max_position_embeddings": 16,  # so that positions beyond it, where queries are scaled, are tested
    "llama_4_scaling_beta": 0.5,
}


@dataclass(frozen=True)
class Family:
    """One configuration of a model; a call returns the transformers configuration."""

    model_type: str
    features: str
    """The special features of the family's attention, for the table in docs/reference/models.md; "": plain rotary
    attention."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the configuration in addition to `COMMON`."""
    max_model_len: int | None = None
    """The maximum length passed to `wrap_model`; only "longrope" depends on it."""
    min_prompt: int = 1
    """Length of the shortest prompt for which the engine's tokens equal transformers'."""

    def __call__(self) -> Any:
        config = AutoConfig.for_model(self.model_type)
        names = {**vars(config), **dict.fromkeys(config.attribute_map)}
        common = {name: value for name, value in COMMON.items() if name in names}
        return type(config)(**{**common, **self.options})


@dataclass(frozen=True)
class Refusal:
    """A configuration that must be refused."""

    family: Family
    error: str
    """Words that the error must contain."""
    reason: str
    """Reason of the refusal, for the table in docs/reference/models.md."""


FAMILIES: dict[str, Family] = {
    "qwen3": Family("qwen3", "norms of queries and keys", HEAD16),
    "qwen2": Family("qwen2", "biases of queries, keys and values"),
    "llama": Family("llama", ""),
    "llama-yarn": Family("llama", "RoPE type yarn", {"rope_parameters": YARN}),
    "mistral": Family("mistral", "sliding window", SLIDES),
    "gemma2": Family(
        "gemma2",
        "softcap, sliding window on part of the layers",
        {**HEAD16, **SOME_SLIDE, "attn_logit_softcapping": 1.0},
    ),
    "gemma3": Family("gemma3_text", "sliding window and another RoPE on part of the layers", {**HEAD16, **SOME_SLIDE}),
    "gpt2": Family("gpt2", "learned positions"),
    "gpt-oss": Family(
        "gpt_oss",
        "sinks, sliding window on part of the layers, yarn, experts",
        {**HEAD16, **SOME_SLIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "deepseek-v3": Family("deepseek_v3", "latent attention (keys and values of unlike width), experts", DEEPSEEK),
    # Further configurations of the same attention.
    "llama-linear": Family("llama", "RoPE type linear", {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama-llama3": Family("llama", "RoPE type llama3", {"rope_parameters": LLAMA3}),
    "qwen3-sliding": Family(
        "qwen3", "sliding window on part of the layers", {**HEAD16, **SOME_SLIDE, "use_sliding_window": True}
    ),
    "phi3-longrope-short": Family("phi3", "RoPE type longrope, up to its original length", longrope(ORIGINAL_LONGROPE)),
    "phi3-longrope-long": Family(
        "phi3", "RoPE type longrope, prompts above its original length", longrope(8), max_model_len=256, min_prompt=9
    ),
    # Other families.
    "afmoe": Family(
        "afmoe", "gated attention, sliding window on part of the layers, experts", {**SOME_SLIDE, **EXPERTS}
    ),
    "apertus": Family("apertus", "norms of queries and keys"),
    "arcee": Family("arcee", ""),
    "biogpt": Family("biogpt", "learned positions with an offset"),
    "bitnet": Family("bitnet", "norm after attention"),
    "cohere": Family("cohere", "attention and MLP in parallel", {"logit_scale": 1.0}),
    "cohere2": Family(
        "cohere2", "sliding window on part of the layers, no RoPE on the others", {**SOME_SLIDE, "logit_scale": 1.0}
    ),
    "cwm": Family("cwm", "sliding window on part of the layers", SOME_SLIDE),
    "deepseek-v2": Family(
        "deepseek_v2", "latent attention, experts", {**DEEPSEEK, "topk_method": "greedy", "head_dim": 8}
    ),
    "dots1": Family(
        "dots1", "experts", {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    ),
    "ernie4_5": Family("ernie4_5", ""),
    "ernie4_5-moe": Family("ernie4_5_moe", "experts", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "exaone4": Family("exaone4", "sliding window on part of the layers, no RoPE on the others", SOME_SLIDE),
    "flex_olmo": Family("flex_olmo", "experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": Family("gemma", "", HEAD16),
    "glm": Family("glm", "RoPE on part of each head", HEAD16),
    "glm4": Family("glm4", "RoPE on part of each head", HEAD16),
    "glm4-moe": Family("glm4_moe", "RoPE on part of each head, experts", {**EXPERTS, **HEAD16, "n_routed_experts": 4}),
    "glm4-moe-lite": Family("glm4_moe_lite", "latent attention, experts", DEEPSEEK),
    "gpt_bigcode": Family("gpt_bigcode", "learned positions, one KV head"),
    "gpt_neox": Family("gpt_neox", "RoPE on part of each head, attention and MLP in parallel", {"rotary_pct": 0.5}),
    "granite": Family("granite", "attention scale of its own", {"attention_multiplier": 0.4}),
    "granitemoe": Family("granitemoe", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": Family("granitemoeshared", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": Family("helium", "", {"head_dim": 12}),
    "hunyuan-dense": Family("hunyuan_v1_dense", "norms of queries and keys", HEAD16),
    "hunyuan-moe": Family("hunyuan_v1_moe", "experts", {**HEAD16, "num_experts": 4, "moe_topk": [2, 2]}),
    "jais2": Family("jais2", ""),
    "jetmoe": Family(
        "jetmoe", "experts choose the heads", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 12}
    ),
    "mimo-v2-flash": Family(
        "mimo_v2_flash", "sinks, sliding window on part of the layers, experts", {**SOME_SLIDE, **EXPERTS}
    ),
    "minicpm3": Family("minicpm3", "latent attention", LATENT),
    "minimax-m2": Family("minimax_m2", "experts", {**HEAD16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral": Family("ministral", "sliding window on part of the layers", {**HEAD16, **SOME_SLIDE}),
    "ministral3": Family(
        "ministral3",
        "queries scaled by position, sliding window, yarn",
        {**HEAD16, **SLIDES, "rope_parameters": SCALED_BY_POSITION},
    ),
    "mixtral": Family("mixtral", "sliding window, experts", {**SLIDES, "num_local_experts": 4}),
    "modernbert-decoder": Family(
        "modernbert-decoder",
        "sliding window and another RoPE on part of the layers",
        {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    ),
    "nanochat": Family("nanochat", "norms of queries and keys"),
    "nemotron": Family("nemotron", "RoPE on part of each head", HEAD16),
    "olmo": Family("olmo", "clipped queries, keys and values", {"clip_qkv": 1.0}),
    "olmo2": Family("olmo2", "norms of queries and keys"),
    "olmo3": Family("olmo3", "norms of queries and keys, sliding window on part of the layers", SOME_SLIDE),
    "olmoe": Family("olmoe", "norms of queries and keys, experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Family("opt", "learned positions with an offset", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "persimmon": Family("persimmon", "RoPE on part of each head, norms of queries and keys"),
    "phi": Family("phi", "RoPE on part of each head, attention and MLP in parallel", {"hidden_size": 64}),
    "phi3": Family("phi3", "fused projection, sliding window", SLIDES),
    "phimoe": Family("phimoe", "experts", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2-moe": Family("qwen2_moe", "experts", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": Family("qwen3_moe", "norms of queries and keys, experts", {**HEAD16, **EXPERTS, "num_experts": 4}),
    "seed-oss": Family("seed_oss", "biases of queries, keys and values", HEAD16),
    "smollm3": Family("smollm3", "no RoPE on part of the layers", {"no_rope_layers": [1, 0]}),
    "solar-open": Family("solar_open", "experts", {**HEAD16, **EXPERTS, "n_routed_experts": 4}),
    "stablelm": Family("stablelm", "RoPE on part of each head", {"hidden_size": 64}),
    "starcoder2": Family("starcoder2", "sliding window", SLIDES),
    "vaultgemma": Family("vaultgemma", "softcap, sliding window on part of the layers", {**HEAD16, **SOME_SLIDE}),
    "youtu": Family("youtu", "latent attention", LATENT),
}

THOROUGH = ("qwen3", "gemma2", "gpt2", "gpt-oss", "deepseek-v3")
"""Families that run in every setting; other families run in one setting, which combines all scheduling features."""

NO_INTERFACE = "computes attention on its own, not through transformers' attention interface"
RECURRENT = "has layers with a recurrent state, which paged KV cannot hold"
LENGTH = "has frequencies that depend on the longest sequence of a batch, so requests would change each other's output"

REFUSED: dict[str, Refusal] = {
    "bloom": Refusal(Family("bloom", "ALiBi"), "0 of 2 layers called", NO_INTERFACE),
    "falcon": Refusal(
        Family("falcon", "fused KV heads, ALiBi in some versions"),
        "computes attention in its own classes",
        NO_INTERFACE,
    ),
    "mpt": Refusal(Family("mpt", "ALiBi"), "0 of 2 layers called", NO_INTERFACE),
    "gptj": Refusal(
        Family("gptj", "RoPE on part of each head", {"rotary_dim": 8}),
        "computes attention in its own classes",
        NO_INTERFACE,
    ),
    "codegen": Refusal(
        Family("codegen", "RoPE on part of each head", {"rotary_dim": 8}), "0 of 2 layers called", NO_INTERFACE
    ),
    "gpt_neo": Refusal(
        Family("gpt_neo", "local attention", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
        "computes attention in its own classes",
        NO_INTERFACE,
    ),
    "gpt_neox_japanese": Refusal(Family("gpt_neox_japanese", "RoPE"), "0 of 2 layers called", NO_INTERFACE),
    "openai-gpt": Refusal(Family("openai-gpt", "learned positions"), "0 of 2 layers called", NO_INTERFACE),
    "xglm": Refusal(
        Family("xglm", "sinusoidal positions", {"d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
        "0 of 2 layers called",
        NO_INTERFACE,
    ),
    "diffllama": Refusal(
        Family("diffllama", "difference of two attentions"),
        "in 4 calls",
        "asks for attention twice per layer",
    ),
    "doge": Refusal(
        Family("doge", "masks of its own"), "attention masks of its own", "builds attention masks of its own"
    ),
    "bert": Refusal(
        Family("bert", "attends in both directions"), "logits of paged attention differ", "attends in both directions"
    ),
    "llama-dynamic": Refusal(
        Family("llama", "RoPE type dynamic", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
        "'dynamic': its frequencies depend on the longest sequence in the batch",
        LENGTH,
    ),
    "gemma3-dynamic-in-one-layer-type": Refusal(
        Family(
            "gemma3_text",
            "RoPE type dynamic on part of the layers",
            {
                **HEAD16,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
                },
            },
        ),
        "'dynamic'",
        LENGTH,
    ),
    "phimoe-longrope": Refusal(
        Family(
            "phimoe",
            "RoPE type longrope",
            {
                "num_local_experts": 4,
                "sliding_window": None,
                "rope_parameters": {
                    **longrope(64)["rope_parameters"],
                    "short_mscale": 1.1,
                    "long_mscale": 1.2,
                },
            },
        ),
        "'longrope': its frequencies depend on the longest sequence in the batch",
        "has frequencies and a scale that depend on the longest sequence of a batch, so neither can be fixed",
    ),
    "phimoe-window": Refusal(
        Family("phimoe", "sliding window", {"num_local_experts": 4, **SLIDES}),
        "no layer passes its sliding window of 20 to the attention function",
        "applies its window through a mask, which the paged path does not read",
    ),
    "falcon_h1": Refusal(
        Family(
            "falcon_h1",
            "attention and Mamba in a layer",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        ),
        "layers of type hybrid",
        RECURRENT,
    ),
    "mamba": Refusal(Family("mamba", "state space"), "layers of type linear_attention", RECURRENT),
    "jamba": Refusal(Family("jamba", "Mamba layers"), "layers of type linear_attention", RECURRENT),
    "qwen3_next": Refusal(
        Family("qwen3_next", "linear attention", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}),
        "layers of type linear_attention",
        RECURRENT,
    ),
    "minimax": Refusal(Family("minimax", "lightning attention"), "layers of type linear_attention", RECURRENT),
    "recurrent_gemma": Refusal(
        Family("recurrent_gemma", "recurrent layers"), "layers of type linear_attention", RECURRENT
    ),
    "rwkv": Refusal(Family("rwkv", "recurrent"), "0 of 2 layers called", RECURRENT),
    "lfm2": Refusal(
        Family("lfm2", "convolutions", {"layer_types": ["conv", "full_attention"]}), "layers of type conv", RECURRENT
    ),
    "llama4": Refusal(
        Family("llama4_text", "chunked attention"), "layers of type chunked_attention", "attends within fixed chunks"
    ),
    "deepseek_v32": Refusal(
        Family("deepseek_v32", "sparse attention", {**DEEPSEEK, "index_n_heads": 2, "index_head_dim": 8}),
        "layers of type indexed_attention",
        "chooses the tokens that it attends to with an index of its own",
    ),
    "gemma3n": Refusal(
        Family(
            "gemma3n_text",
            "shared KV",
            {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "activation_sparsity_pattern": [0.0] * 4,
                "vocab_size_per_layer_input": VOCAB_SIZE,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 8,
            },
        ),
        "layers that use the KV of other layers",
        "has layers that use the KV of other layers, which the pool cannot hold",
    ),
}


def build(config: Any, seed: int = 0) -> Any:
    """A model with wide random weights, in float32, with transformers' eager attention; equal seeds give equal
    weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # transformers draws sinks and some biases, which are kept, from the global
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data.copy_(noise * 0.15)
        else:
            parameter.data.add_(noise * 0.05)
    model.get_input_embeddings().weight.data.mul_(EMBEDDING_SCALE.get(config.model_type, 1.0))
    return model.eval()


def packs(dtype: torch.dtype) -> bool:
    """Whether linear layers of this type can be packed on this processor: without AVX-512 oneDNN has no bfloat16."""
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
