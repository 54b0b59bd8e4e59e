"""Part c: measures decode steps of 1 to 256 requests with 1,024 tokens of context against the memory bandwidth.

Prompts are computed once for each engine. Each measurement adds the requests again, with their KV in the prefix cache.
"""

from __future__ import annotations

from gpu_check.models import (
    BLOCK_SIZE,
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
from gpu_check.roofline import decode_share, measure_bandwidth
from gpu_check.steps import MAX_OUTPUT, GraphTimes, time_decodes
from pointsman.engine.model.loaded import LoadedModel
from pointsman.sim.model import ModelShape

SIZES, TINY_SIZES = (1, 8, 32, 64, 128, 256), (1, 4)
CONTEXT, TINY_CONTEXT = 1024, 64
NUM_STEPS, TINY_NUM_STEPS = 32, 6
MAX_NUM_BATCHED_TOKENS = 8192
SECONDS_OF_ROUND = 25.0
"""Time for another engine, without graphs; it is skipped if less time remains."""
GOALS = {128: 0.7, 1: 0.6}
"""Number of requests -> minimum share of the bandwidth, for the large model with graphs."""
MAX_LOOP = 1.05
"""Maximum time of a step in the loop, relative to its graph."""


def run(setting: Setting) -> None:
    """Run the part."""
    findings = setting.findings
    bandwidth = measure_bandwidth(setting.device, tiny=setting.tiny)
    free_memory()
    findings.figure("bandwidth of a device copy, GB/s", round(bandwidth / 1e9, 1))
    for shape in (large_shape(setting.tiny), small_shape(setting.tiny)):  # goals are for the large shape
        if not fits(shape, setting.device):
            findings.skip(
                f"decode steps of {shape.name}", f"{shape.weight_bytes / 2**30:.1f} GiB of weights do not fit"
            )
            continue
        loaded = make_loaded(shape, setting.device)
        _time_all(setting, shape, loaded, bandwidth, enforce_eager=False)
        if setting.seconds_left > SECONDS_OF_ROUND or setting.tiny:
            _time_all(setting, shape, loaded, bandwidth, enforce_eager=True)
        else:
            findings.skip(f"decode steps of {shape.name} without graphs", f"{setting.seconds_left:.0f} s were left")
        del loaded
        free_memory()


def _time_all(
    setting: Setting, shape: ModelShape, loaded: LoadedModel, bandwidth: float, *, enforce_eager: bool
) -> None:
    findings, tiny = setting.findings, setting.tiny
    sizes, context, num_steps = (TINY_SIZES, TINY_CONTEXT, TINY_NUM_STEPS) if tiny else (SIZES, CONTEXT, NUM_STEPS)
    longest = context + MAX_OUTPUT
    per_request = blocks_of(context + num_steps + context // 8)  # the first requests decode while others prefill
    num_blocks = blocks_that_fit(shape, setting.device, sizes[-1] * per_request + 2 * per_request)
    prompts = random_prompts(shape, [context - num_steps // 2] * sizes[-1], seed=1)
    graphs = GraphTimes()
    with graphs.watching():  # before the engine is made, because it may store the replay function
        engine = make_engine(
            loaded,
            num_blocks,
            max_model_len=longest,
            max_num_seqs=sizes[-1],
            max_num_batched_tokens=64 if tiny else MAX_NUM_BATCHED_TOKENS,
            full_sequence_must_fit=False,
            enforce_eager=enforce_eager,
        )
        for size in sizes:
            if (size + 1) * per_request > num_blocks:
                findings.skip(
                    f"{size} requests of {shape.name}",
                    f"{num_blocks} blocks of {BLOCK_SIZE} tokens fit into the memory",
                )
                continue
            time = time_decodes(engine, prompts[:size], num_steps, setting.device, graphs)
            share = decode_share(shape, time.num_context_tokens, time.seconds, bandwidth)
            loop = None if time.graph_seconds is None else time.seconds / time.graph_seconds
            findings.row(
                "decode steps",
                model=shape.name,
                graphs=time.graph_seconds is not None,
                requests=size,
                context=round(time.num_context_tokens / size),
                step_ms=time.seconds * 1e3,
                graph_ms=None if time.graph_seconds is None else time.graph_seconds * 1e3,
                loop_by_graph=loop,
                tokens_per_s=size / time.seconds,
                of_bandwidth=share,
            )
            if enforce_eager or shape != large_shape(tiny):
                continue
            if size in GOALS:
                name = f"decode of {size} request(s) of {shape.name}, share of the bandwidth"
                if time.graph_seconds is None:
                    findings.skip(name, "no graph was replayed")
                else:
                    findings.goal(name, share, at_least=GOALS[size])
            if loop is not None:
                findings.goal(f"step of {size} request(s) of {shape.name} by its graph", loop, at_most=MAX_LOOP)
    if setting.on_gpu and not enforce_eager and not graphs.num_taken:
        findings.wrong(f"{shape.name}: no step replayed a graph")
    engine.close()
    del engine
    free_memory()
