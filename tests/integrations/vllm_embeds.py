"""Prompts given as embeddings, in real vLLM: a script for the environment with vLLM.

    python vllm_embeds.py FAMILY ours|theirs FOLDER [KEY=VALUE ...]   prints one JSON line

What they, and the same prompts as tokens, got with our scheduler, or vLLM's own. KEY=VALUE are options of `LLM`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import transformers
from vllm import LLM, SamplingParams
from vllm.inputs import EmbedsPrompt, TokensPrompt

from tests.integrations import vllm_groups
from tests.integrations.vllm_groups import OURS, check_every_step, make

vllm_groups.FAMILIES["qwen3"] = ("Qwen3", {"num_hidden_layers": 2})


def main() -> None:
    family, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in sys.argv[4:])}
    if not (folder / "config.json").exists():
        make(family, folder)
    table = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    if family.startswith("gemma"):
        table = table * table.shape[1] ** 0.5
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    options |= {"dtype": "float32", "num_gpu_blocks_override": 40, "enable_prompt_embeds": True}
    if how == "ours":
        options |= {"scheduler_cls": OURS, "additional_config": {"pointsman": {"socket": ""}}}
    llm = LLM(str(folder), enforce_eager=True, seed=0, skip_tokenizer_init=True, **{**options, **given})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if how == "ours":
        check_every_step(scheduler)
    shared = [3 + index * 7 % 500 for index in range(140)]
    prompts: list[Any] = []
    for number in range(6):
        ids = [*shared, *(3 + index * (number + 3) % 500 for index in range(40 * number))]
        if number == 5:
            ids[0] += 1  # another beginning: no other prompt has its embeddings
        prompts += [EmbedsPrompt(prompt_embeds=table[ids]), TokensPrompt(prompt_token_ids=ids)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [list(each.outputs[0].token_ids) for each in outputs]
        cached += [each.num_cached_tokens for each in outputs]
    found = {"tokens": tokens, "cached": cached}
    if how == "ours":
        found["preemptions"] = scheduler.core.stats().num_preemptions
    print(json.dumps(found))


if __name__ == "__main__":
    main()
