"""Part d: measures prompts of 2,048 and 16,384 tokens in one step against the rate of a large matrix product."""

from __future__ import annotations

from statistics import median

from gpu_check.models import (
    blocks_of,
    blocks_that_fit,
    fits,
    free_memory,
    large_shape,
    make_engine,
    make_loaded,
    random_prompts,
    small_shape,
)
from gpu_check.part import Setting
from gpu_check.roofline import measure_product, prompt_flops, prompt_share
from gpu_check.steps import time_prompt

LENGTHS, TINY_LENGTHS = (2048, 16384), (64, 128)
NUM_REPEATS = 5
GOAL = 0.5
"""Minimum share of the product's rate, for the large model and the shorter prompt."""


def run(setting: Setting) -> None:
    """Run the part."""
    findings = setting.findings
    product_rate = measure_product(setting.device, tiny=setting.tiny)
    free_memory()
    findings.figure("rate of a bfloat16 product, TFLOP/s", round(product_rate / 1e12, 3))
    lengths = TINY_LENGTHS if setting.tiny else LENGTHS
    for shape in (large_shape(setting.tiny), small_shape(setting.tiny)):
        if not fits(shape, setting.device):
            findings.skip(f"prompts of {shape.name}", f"{shape.weight_bytes / 2**30:.1f} GiB of weights do not fit")
            continue
        loaded = make_loaded(shape, setting.device)
        num_blocks = blocks_that_fit(shape, setting.device, 2 * blocks_of(lengths[-1]))
        if num_blocks < blocks_of(lengths[-1]) + 1:
            findings.skip(f"prompts of {shape.name}", f"{num_blocks} KV blocks fit into the memory")
            continue
        engine = make_engine(
            loaded,
            num_blocks,
            max_model_len=lengths[-1] + 1,
            max_num_seqs=4,
            max_num_batched_tokens=lengths[-1],
            enable_prefix_caching=False,
        )
        for length in lengths:
            prompts = random_prompts(shape, [length] * (NUM_REPEATS + 2), seed=length)
            times = [time_prompt(engine, prompt, setting.device) for prompt in prompts][2:]  # the first two warm up
            seconds = median(times)
            share = prompt_share(shape, length, seconds, product_rate)
            findings.row(
                "prompts in one step",
                model=shape.name,
                tokens=length,
                ms=seconds * 1e3,
                tokens_per_s=length / seconds,
                tflop_per_s=prompt_flops(shape, length) / seconds / 1e12,
                of_product=share,
            )
            if shape == large_shape(setting.tiny) and length == lengths[0]:
                findings.goal(
                    f"prompt of {length} tokens of {shape.name}, share of a product's rate", share, at_least=GOAL
                )
        engine.close()
        del engine, loaded
        free_memory()
