"""A tiny model with an encoder in real vLLM: a script for the environment with vLLM.

    python vllm_media.py FAMILY ours|theirs FOLDER [KEY=VALUE ...]   prints one JSON line

What prompts with images, audio or video got with our scheduler, or vLLM's own. With ours, everything that must hold
between two calls is checked after each. KEY=VALUE are options of `LLM`, as JSON; but `max_tokens` is how many each
request generates.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from tests.integrations.vllm_groups import OURS, check_every_step
from tests.integrations.vllm_media_models import FAMILIES, SPECIAL, make
from tests.integrations.vllm_run import force_async_scheduling


def sample(kind: str, number: int) -> Any:
    """An image, a sound or a video; each number has a size of its own."""
    rng = np.random.default_rng(number)
    if kind == "audio":
        return rng.normal(size=4_000 + 6_000 * number).astype(np.float32), 16_000
    if kind == "video":
        return rng.integers(0, 255, (2 + 2 * (number % 4), 56, 56 + 28 * (number % 3), 3), dtype=np.uint8)
    return Image.fromarray(rng.integers(0, 255, (48 + 40 * number, 40 + 30 * number, 3), dtype=np.uint8))


def prompts(family: str) -> list[Any]:
    """Some inputs have the same samples at the same positions, some have others."""
    _, kind, placeholder = FAMILIES[family]
    shared = [12 + index * 7 % 500 for index in range(140)]
    made: list[Any] = []
    for number in range(8):
        own = [12 + index * (number + 3) % 500 for index in range(30 * number)]
        if not placeholder:
            heard = {"prompt": "", "multi_modal_data": {kind: sample(kind, number % 5)}}
            decoder = {"prompt_token_ids": [1, *own[: 4 * number]]}
            made.append({"encoder_prompt": heard, "decoder_prompt": decoder})
            continue
        samples = [sample(kind, 0), sample(kind, number % 3), sample(kind, number)][: 1 + number % 3]
        tokens = [1, *shared[:40]]
        for place in range(len(samples)):
            tokens += [SPECIAL.index(placeholder), *shared[: 20 + 40 * place]]
        made.append(TokensPrompt(prompt_token_ids=tokens + own, multi_modal_data={kind: samples}))
    return made


def main() -> None:
    family, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in sys.argv[4:])}
    if not (folder / "config.json").exists():
        make(family, folder)
    max_tokens = given.pop("max_tokens", 20)
    if given.get("async_scheduling"):
        force_async_scheduling()
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 40}
    options["max_model_len"] = {"whisper": 128, "qwen2-audio": 1024}.get(family, 512)
    if how != "theirs":
        options |= {"scheduler_cls": OURS, "additional_config": {"pointsman": {"socket": "", "preset": "vllm"}}}
    llm = LLM(str(folder), enforce_eager=True, seed=0, **{**options, **given})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if how != "theirs":
        check_every_step(scheduler)
    seen: list[Any] = []
    schedule = scheduler.schedule

    def noted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        seen.append([list(output.num_scheduled_tokens.values()), list(output.scheduled_encoder_inputs.values())])
        return output

    scheduler.schedule = noted
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for _ in range(2):  # again, with the caches of the first run
        outputs = llm.generate(prompts(family), params, use_tqdm=False)
        tokens += [list(each.outputs[0].token_ids) for each in outputs]
        cached += [each.num_cached_tokens for each in outputs]
    found = {
        "asynchronous": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "tokens": tokens,
        "cached": cached,
        "steps": seen,
        "groups": [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        "encoder": [scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size]
        if how == "theirs"
        else [scheduler.core.config.encoder_budget, scheduler.core.config.encoder_cache_size],
    }
    if how != "theirs":
        stats = scheduler.core.stats()
        found |= {"preemptions": stats.num_preemptions, "reused": stats.num_encoder_reused}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
