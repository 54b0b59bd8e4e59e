"""Part f: runs `pointsman serve` with a model of the small shape and random weights, under load from this process.

The model is saved to a temporary folder with the demo model's tokenizer. Prompts are token ids, so only outputs become
text.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _server_driver import Driven, drive
from _server_process import ServerProcess, start_server

from gpu_check.models import (
    BLOCK_SIZE,
    blocks_of,
    blocks_that_fit,
    free_memory,
    make_model,
    random_prompts,
    small_shape,
)
from gpu_check.part import Setting
from pointsman.engine.text.tokenizer import DEMO_MODEL
from pointsman.sim.model import ModelShape

MODEL_NAME = "random"
PROMPT, OUTPUT = 256, 128
"""Mean numbers of tokens; lengths are drawn from 0.5 to 1.5 times the mean."""
NUM_STREAMS, TINY_NUM_STREAMS = 64, 4
ROUNDS = 4
"""Number of requests of each stream."""
BUSY = 0.5
"""Rate of the requests at random moments, as a share of the highest rate."""


def run(setting: Setting) -> None:
    """Run the part."""
    tiny, shape = setting.tiny, small_shape(setting.tiny)
    num_streams, scale = (TINY_NUM_STREAMS, 8) if tiny else (NUM_STREAMS, 1)
    rng = np.random.default_rng(0)
    prompt_lens, outputs = (
        rng.integers(mean // scale // 2, mean // scale * 3 // 2, ROUNDS * num_streams).tolist()
        for mean in (PROMPT, OUTPUT)
    )
    longest = max(prompt_lens) + max(outputs)
    with tempfile.TemporaryDirectory(prefix="gpu_check_model_") as folder:
        num_blocks = _save(shape, setting.device, Path(folder), 2 * num_streams * blocks_of(longest))
        server = start_server(
            "--model", folder, "--served-model-name", MODEL_NAME, "--device", setting.device, "--dtype", "bfloat16",
            "--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--max-model-len", str(longest),
            "--max-num-seqs", str(num_streams), "--max-num-batched-tokens", str(256 if tiny else 8192),
            timeout=max(10.0, setting.seconds_left - 5),
        )  # fmt: skip
        with server:
            closed = _load(setting, server, shape, prompt_lens, outputs, seed=1, num_streams=num_streams)
            _report(setting, f"{num_streams} streams, one request after the other", closed)
            rate = BUSY * closed.num_complete / closed.seconds
            opened = _load(setting, server, shape, prompt_lens, outputs, seed=2, rate=rate)
            _report(setting, f"{rate:.1f} requests a second, at random moments", opened)


def _save(shape: ModelShape, device: str, folder: Path, wanted: int) -> int:
    """Save a model and its tokenizer; returns the number of KV blocks that fit beside it."""
    model = make_model(shape, device)
    num_blocks = blocks_that_fit(shape, device, wanted)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    del model
    free_memory()
    return num_blocks


def _load(
    setting: Setting, server: ServerProcess, shape: ModelShape, prompt_lens: list[int], outputs: list[int], seed: int,
    **how: Any,
) -> Driven:  # fmt: skip
    prompts = random_prompts(shape, prompt_lens, seed)
    asyncio.run(drive(("127.0.0.1", server.port), MODEL_NAME, prompts[:4], outputs[:4]))  # connections, code paths
    prompts = random_prompts(shape, prompt_lens, seed + 100)
    driven = asyncio.run(drive(("127.0.0.1", server.port), MODEL_NAME, prompts, outputs, seed=seed, **how))
    if driven.num_complete < driven.num_requests:
        log = server.log().splitlines()[-8:]
        setting.findings.wrong(
            f"{driven.num_complete} of {driven.num_requests} requests were answered completely; the log ends:\n"
            + "\n".join(log)
        )
    if not driven.num_complete:
        raise RuntimeError("no request was answered")
    return driven


def _report(setting: Setting, load: str, driven: Driven) -> None:
    figures = driven.figures()
    setting.findings.row(
        "the server, from its client; times in ms",
        load=load,
        requests=driven.num_complete,
        tokens_per_s=driven.output_tokens_per_second,
        ttft_p50=figures["median_ttft_ms"],
        ttft_p99=figures["p99_ttft_ms"],
        itl_p50=figures["median_itl_ms"],
        itl_p99=figures["p99_itl_ms"],
    )
