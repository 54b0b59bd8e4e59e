"""Texts of real vLLM: one forced token after each prefix of a token sequence. Run by `test_vllm_texts.py`.

vllm_texts.py MODEL_DIRECTORY TOKEN_IDS_AS_JSON
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams, TokensPrompt


def main(model: str, token_ids: list[int]) -> dict[str, Any]:
    """For each split: the text, and the decoded token and prompt tokens."""
    llm = LLM(model, max_model_len=512, max_num_seqs=16, enforce_eager=True, dtype="float32", seed=0)
    splits = range(1, len(token_ids))
    prompts = [TokensPrompt(prompt_token_ids=token_ids[:split]) for split in splits]
    params = [
        SamplingParams(
            temperature=0, max_tokens=1, allowed_token_ids=[token_ids[split]], ignore_eos=True, logprobs=0,
            prompt_logprobs=0,
        )
        for split in splits
    ]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    last = outputs[-1]
    return {
        "texts": [output.outputs[0].text for output in outputs],
        "decoded": [
            output.outputs[0].logprobs[0][token_ids[split]].decoded_token
            for split, output in zip(splits, outputs, strict=True)
        ],
        "prompt": [
            entry[token_id].decoded_token
            for token_id, entry in zip(token_ids[1:], last.prompt_logprobs[1:], strict=False)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
