"""Compare the simulator's groups of layers with those of vLLM's hybrid KV cache manager.

Arguments: the first seed and the number of random models. Prints "tally" and "differences" as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace

import torch
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from pointsman.sim.memory import layer_groups
from pointsman.sim.shapes import model_shape

COMMON = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
PLAIN = model_shape("Llama-3.1-8B")


def compare(seed: int, tally: Counter[str]) -> str | None:
    """The difference in one random model, if there is one."""
    draw = random.Random(seed)
    windowed, full = draw.randrange(1, 60), draw.randrange(0, 40)
    kinds = [True] * windowed + [False] * full
    draw.shuffle(kinds)
    specs = {
        f"layer {number}": SlidingWindowSpec(**COMMON, sliding_window=512)
        if is_windowed
        else FullAttentionSpec(**COMMON)
        for number, is_windowed in enumerate(kinds)
    }
    theirs = _get_kv_cache_groups_uniform_page_size(specs)
    shape = replace(PLAIN, num_layers=windowed + full, num_windowed_layers=windowed, sliding_window=512)
    ours = layer_groups(shape)
    found = Counter(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in theirs)
    size = max(len(group.layer_names) for group in theirs)
    tally["models"] += 1
    tally["several groups of a kind"] += max(found.values()) > 1
    tally["a short group"] += any(len(group.layer_names) < size for group in theirs)
    if Counter(not group.is_full for group in ours.kv_groups) != found or ours.num_layers != size:
        return f"{full} full and {windowed} windowed layers: {ours}, in vLLM {found} of {size}"
    return None


def main() -> None:
    first, number = map(int, sys.argv[1:3])
    tally: Counter[str] = Counter()
    found = [compare(seed, tally) for seed in range(first, first + number)]
    print(json.dumps({"tally": tally, "differences": [each for each in found if each]}))


main()
