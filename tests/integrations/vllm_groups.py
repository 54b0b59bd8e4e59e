"""A tiny model with its groups of KV in real vLLM: a script for the environment with vLLM.

    python vllm_groups.py FAMILY ours|theirs|one|refused FOLDER [KEY=VALUE ...]   prints one JSON line

The outputs of the requests with our scheduler, or vLLM's own; `one`: ours, with all KV in one group; `refused`: why
ours does not start. With ours, all invariants are checked after each call. KEY=VALUE are options of `LLM`, as JSON; but
`shared` is the number of tokens that all prompts have in common, and `max_tokens` the output tokens of each request.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import transformers
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

DEMO = Path(__file__).parents[2] / "pointsman" / "engine" / "demo"
OURS = "pointsman.integrations.vllm.Scheduler"
SIZE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
PATTERN = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"num_hidden_layers": 4, "layer_types": PATTERN, "sliding_window": 64}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"num_hidden_layers": 3}),
    # The prefix of its class names in transformers, and its configuration.
    "gemma3": ("Gemma3Text", WINDOW),
    "gpt-oss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3", WINDOW),
    "cohere2": ("Cohere2", WINDOW),
    "mistral": ("Mistral", {"num_hidden_layers": 3, "sliding_window": 64}),  # a window in every layer
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 1, 0, 1],
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_expand": 2,
            "num_attention_heads": 2,
            **MAMBA,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {**WINDOW, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_attention_heads": 2,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "hybrid_override_pattern": "M*M-",
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_hidden_layers": 3,
            "num_heads": 4,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "intermediate_size": 128,
        },
    ),
    "bert": ("Bert", {"num_hidden_layers": 2, "num_attention_heads": 2}),  # stores no KV
    "falcon-h1": ("FalconH1", {"num_hidden_layers": 3, "mamba_d_ssm": 128, "mamba_expand": 2, **MAMBA}),
}


def make(family: str, folder: Path) -> None:
    """The model, with random weights."""
    name, options = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZE, **options})
    model_name = name if name in ("Llama4Text",) else name.removesuffix("Text")
    class_name = "Llama4ForCausalLM" if model_name == "Llama4Text" else f"{model_name}ForCausalLM"
    class_name = "BertModel" if family == "bert" else class_name
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # So large that the layers decide about the next token, not just the last token.
            if parameter.dim() > 1 and "conv" not in name:
                parameter.normal_(0.0, 0.2)
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)


def check_every_step(scheduler: Any) -> None:
    """Verify the core's invariants after each call."""
    for name in ("schedule", "update_from_output"):
        call = getattr(scheduler, name)

        def checked(*arguments: Any, call: Any = call) -> Any:
            found = call(*arguments)
            scheduler.core.check_invariants()
            return found

        setattr(scheduler, name, checked)


def main() -> None:
    family, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in sys.argv[4:])}
    num_shared, max_tokens = given.pop("shared", 140), given.pop("max_tokens", 40)
    if not (folder / "config.json").exists():
        make(family, folder)
    options: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True} if how == "one" else {}
    if how != "theirs":
        options |= {"scheduler_cls": OURS, "additional_config": {"pointsman": {"socket": ""}}}
    options = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 40,
        **options,
        **given,
    }
    if family == "bert":
        options |= {
            "runner": "pooling",
            "max_num_batched_tokens": 512,
            "tokenizer": str(DEMO),
            "skip_tokenizer_init": False,
        }
    try:
        llm = LLM(str(folder), enforce_eager=True, seed=0, **options)
    except Exception as error:
        if how != "refused":
            raise
        print(json.dumps(str(error)))
        return
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if how != "theirs":
        check_every_step(scheduler)
    steps: list[int] = []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *arguments: steps.append(1) or schedule(*arguments)
    shared = [3 + index * 7 % 500 for index in range(num_shared)]
    prompts = [[*shared, *(3 + index * (number + 3) % 500 for index in range(40 * number))] for number in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for _ in range(2):  # again, with the cache of the first run
        given_prompts = [TokensPrompt(prompt_token_ids=each) for each in prompts]
        if family == "bert":
            tokens += [each.outputs.embedding for each in llm.embed(given_prompts, use_tqdm=False)]
            continue
        outputs = llm.generate(given_prompts, params, use_tqdm=False)
        tokens += [list(each.outputs[0].token_ids) for each in outputs]
        cached += [each.num_cached_tokens for each in outputs]
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    found = {
        "tokens": tokens,
        "cached": cached,
        "steps": len(steps),
        "groups": [type(spec).__name__ for spec in specs],
        "block_sizes": [spec.block_size for spec in specs],
        "layers": [len(group.layer_names) for group in scheduler.kv_cache_config.kv_cache_groups],
        "concurrency": llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency,
        "usage": scheduler.get_kv_cache_usage() if how != "theirs" else 0.0,
    }
    if how != "theirs":
        found["preemptions"] = scheduler.core.stats().num_preemptions
        found["not found"] = "" if scheduler.groups is None else scheduler.groups.prefix_cache_limit()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
