"""A tiny model with windows or chunks in real vLLM, as one KV group: a script for the environment with vLLM.

    python vllm_windows.py FAMILY ours|theirs|refused FOLDER   prints one JSON line

The tokens of the requests with our scheduler or vLLM's own; or why ours refuses the model as vLLM serves it by default.
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Text", WINDOW),
    "gpt-oss": ("GptOss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3", WINDOW),
    "cohere2": ("Cohere2", WINDOW),
}


def make(family: str, folder: Path) -> None:
    """The model, with random weights."""
    name, options = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZE, **options})
    model = getattr(transformers, f"{'Gemma3' if name == 'Gemma3Text' else name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # so large that layers, and not the last token, decide about the next one
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)


def main() -> None:
    family, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if not (folder / "config.json").exists():
        make(family, folder)
    options: dict[str, Any] = {} if how == "refused" else {"disable_hybrid_kv_cache_manager": True}
    if how != "theirs":
        options |= {"scheduler_cls": OURS, "additional_config": {"pointsman": {"socket": ""}}}
    try:
        llm = LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            seed=0,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=40 if how == "refused" else 12,
            skip_tokenizer_init=True,
            **options,
        )
    except Exception as error:
        if how != "refused":
            raise
        print(json.dumps(str(error)))
        return
    shared = [3 + index * 7 % 500 for index in range(140)]
    prompts = [[*shared, *(3 + index * (number + 3) % 500 for index in range(40 * number))] for number in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=each) for each in prompts], params, use_tqdm=False)
    print(json.dumps([list(each.outputs[0].token_ids) for each in outputs]))


if __name__ == "__main__":
    main()
