"""Made-up requests for vLLM, and the configurations that run them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 2048  # of the demo model


@dataclass(frozen=True)
class Way:
    """A configuration of vLLM."""

    engine: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    max_length: int = 60
    """Maximum tokens of an output."""
    min_preemptions: int = 0


_SMALL_POOL = {"num_gpu_blocks_override": 20}  # 19 blocks, for requests of up to 13
WAYS = {
    "plain": Way(),
    "chunked": Way({"max_num_batched_tokens": 256}),
    "pressure": Way(_SMALL_POOL, max_length=130, min_preemptions=50),
    "priority": Way({**_SMALL_POOL, "scheduling_policy": "priority"}, min_preemptions=50),
    "ngram": Way(
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        }
    ),
    "async": Way(asynchronous=True),
    "async-pressure": Way(_SMALL_POOL, asynchronous=True, max_length=130, min_preemptions=50),
}
ENGINE = {"max_model_len": 512, "block_size": 32, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


def make_requests(count: int, seed: int, max_length: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Requests of mixed lengths with shared prefixes, priorities, stop tokens and grammars; and the aborts, by step."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(number)]

    prefixes = [tokens(96) for _ in range(4)]
    requests = []
    for number in range(count):
        prompt = tokens(rng.choice([3, 20, 70, 150]))
        if rng.random() < 0.5:
            prompt = rng.choice(prefixes) + prompt
        if rng.random() < 0.2:
            prompt = prompt + prompt[-10:] * 3  # a repetition to be found
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, max_length), "ignore_eos": rng.random() < 0.3}
        if rng.random() < 0.2:
            params["stop_token_ids"] = tokens(200)
        if rng.random() < 0.1:
            params["regex"] = "[ab]{6,12}"
        request = {"id": f"r{number}", "prompt": prompt, "params": params, "priority": rng.randrange(3)}
        requests.append(request | {"step": rng.randrange(2 * count // 3 + 1)})
    aborts = {f"r{rng.randrange(count)}": rng.randrange(count) for _ in range(count // 10)}
    return requests, aborts
