"""OpenVINO GenAI's side of `engine_throughput.py`, to be run in the environment that `openvino_env.py` makes.

OpenVINO reads no safetensors, so the model is converted once, in 32-bit floats and without compression, and kept beside
the original; the plugin for the processor rounds the weights to the requested precision. The benchmark runs its
continuous batching. Conversion and compilation belong to "open", which is not timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from _engine_worker import Answer, Session, Settings, serve
from openvino import Core, Tensor
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

PRECISION = {"float32": "f32", "bfloat16": "bf16"}
ANY_TOKEN = 0


class OpenVinoSession(Session):
    """A compiled model with its own scheduler and block pool; all other settings keep their defaults."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        precision = PRECISION[settings.dtype]
        if precision == "bf16" and "BF16" not in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("OpenVINO would compute bfloat16 in float32 on this processor; use --dtype float32")
        scheduler = SchedulerConfig()
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.cache_size = settings.kv_cache_bytes >> 30
        self.properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": settings.threads,
            # The converter records f16, also for a model that computes in f32. Every other cache has the model's own
            # numbers; for bf16, f16 becomes bf16 anyway.
            "KV_CACHE_PRECISION": precision,
        }
        self.pipeline = ContinuousBatchingPipeline(converted(Path(settings.model)), scheduler, "CPU", self.properties)

    def about(self) -> dict[str, Any]:
        return {
            "version": version("openvino-genai"),
            "converter": version("optimum-intel"),
            "threads": self.properties["INFERENCE_NUM_THREADS"],
            "precision": self.properties["INFERENCE_PRECISION_HINT"],
            "kv_cache": self.properties["KV_CACHE_PRECISION"],
        }

    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        answers = self.pipeline.generate(
            [Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts],
            [greedy(length) for length in outputs],
        )
        return [Answer(list(answer.m_generation_ids[0])) for answer in answers]


def greedy(length: int) -> GenerationConfig:
    """The parameters of greedy decoding with exactly `length` output tokens."""
    config = GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = length
    config.ignore_eos = True
    config.set_eos_token_id(ANY_TOKEN)  # it requires one, which is ignored
    return config


def converted(model: Path) -> Path:
    """The directory with the model in OpenVINO's format; it is written first if it is missing."""
    directory = model.with_name(f"{model.name}-openvino-{version('optimum-intel')}")
    if directory.is_dir():
        return directory
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="writing-") as temporary:
        made = Path(temporary) / "model"
        # In a process of its own, so that this one need not load PyTorch, whose threads and memory would stay.
        converter = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
        subprocess.run([*converter, "--model", str(model), *options, str(made)], check=True)
        try:
            os.replace(made, directory)
        except OSError:  # another process was faster, and wrote the same
            if not directory.is_dir():
                raise
    return directory


if __name__ == "__main__":
    serve(OpenVinoSession)
