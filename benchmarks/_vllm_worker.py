"""vLLM's side of `scheduler_step.py` and `vllm_scheduler.py`, to be run in the environment that `vllm_env.py` makes.

Builds vLLM's own `Scheduler` from a `VllmConfig` for a tiny model directory (a config.json is all that a scheduler
needs) with one group of full-attention layers, and feeds it `ModelRunnerOutput`s as its model runner would.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import math
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _scheduler_worker import BLOCK_SIZE, EOS, STOP_TOKENS, VOCABULARY, Session, Settings, serve
from _vllm_runner import StandInRunner, runner_output
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.multimodal import encoder_budget
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import scheduler as own_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LAYOUTS = {
    "": 1,
    "window": 2,  # full attention and a window, as gpt-oss
    "windows": 6,  # full attention and five of windows, as Gemma 3
    # Full attention and three of Mamba states, as Granite 4 without prefix caching: there vLLM raises the block size of
    # attention to the size of a state.
    "states": 4,
    "images": 1,  # full attention, and prompts with images
}
"""Layouts of KV, with their numbers of groups."""
STATE_BLOCK_SIZE = 528
"""Tokens in a block of attention beside states; 528 to 896 for the models that vLLM serves."""
IMAGES_IN_STEP, IMAGES_CACHED = 4096, 8192
"""Embeddings."""
LAYER = "model.layers.0.self_attn.attn"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 22,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


@cache
def model_directory() -> Path:
    """A directory with the configuration of a tiny Llama, kept while this process runs."""
    directory = tempfile.TemporaryDirectory(prefix="pointsman-benchmark-")
    model_directory.keep = directory  # type: ignore[attr-defined]
    path = Path(directory.name)
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def build_config(settings: Settings) -> VllmConfig:
    """vLLM's configuration: prefix caching and chunked prefill on, everything else at its default."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model_directory()),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=settings.max_model_len,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=settings.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            async_scheduling=False,
            enable_chunked_prefill=True,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    # vLLM turns it off without a GPU, whatever the setting.
    config.scheduler_config.async_scheduling = settings.max_steps_in_flight > 1
    return config


def build_kv_cache_config(
    num_blocks: int, block_size: int = BLOCK_SIZE, layout: str = "", max_model_len: int = 0
) -> KVCacheConfig:
    """A layer for each group of a layout, with `num_blocks` blocks together."""
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    block_size = STATE_BLOCK_SIZE if layout == "states" else block_size
    specs: list[Any] = [FullAttentionSpec(block_size=block_size, **sizes)]
    if layout == "states":
        specs += [MambaSpec(block_size=max_model_len, shapes=((2, 4),), dtypes=(torch.float32,))] * 3
    elif layout.startswith("window"):
        window = 128 if layout == "window" else 1024
        specs += [SlidingWindowSpec(block_size=block_size, sliding_window=window, **sizes)] * (LAYOUTS[layout] - 1)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],  # memory for the workers; a scheduler reads none of it
        kv_cache_groups=[KVCacheGroupSpec([f"{LAYER}{n or ''}"], spec) for n, spec in enumerate(specs)],
    )


class StandInBudget:
    """The budget of a step and the capacity of the cache, in place of the values that vLLM asks the processor of a
    model
    with images for."""

    sizes = (0, 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.encoder_compute_budget, self.encoder_cache_size = self.sizes
        self.mm_max_toks_per_item = {"image": 1}


def stand_in_for_encoder(config: VllmConfig, sizes: tuple[int, int], *, is_encoder_decoder: bool = False) -> None:
    """Give a configuration an encoder with a budget and a cache of this number of embeddings; 0: none.
    `is_encoder_decoder`: layers keep KV of its outputs."""
    encoder_budget.MultiModalBudget = own_scheduler.MultiModalBudget = StandInBudget
    StandInBudget.sizes = sizes
    ModelConfig.supports_multimodal_inputs = property(lambda config: getattr(config, "has_images", False))
    config.model_config.has_images = any(sizes)
    ModelConfig.is_encoder_decoder = property(lambda config: getattr(config, "has_decoder", False))
    config.model_config.has_decoder = is_encoder_decoder


def feature_of(key: str, offset: int, mask: str) -> MultiModalFeatureSpec:
    """An image without a payload; "1" in the mask: an embedding."""
    position = PlaceholderRange(offset, len(mask), torch.tensor([each == "1" for each in mask]))
    return MultiModalFeatureSpec(data=None, modality="image", identifier=key, mm_position=position)


class VllmSession(Session):
    """vLLM's scheduler with its statistics on."""

    scheduler_class: type | None = None
    """The scheduler class; None: vLLM's own."""
    additional_config: dict[str, object] | None = None

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        config = build_config(settings)
        config.additional_config = self.additional_config or {}
        num_blocks, has_states = LAYOUTS[settings.layout] * settings.num_blocks, settings.layout == "states"
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.enable_prefix_caching = not has_states
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        stand_in_for_encoder(config, (IMAGES_IN_STEP, IMAGES_CACHED) if settings.layout == "images" else (0, 0))
        self.block_hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        own = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = (self.scheduler_class or own)(
            vllm_config=config,
            kv_cache_config=build_kv_cache_config(
                num_blocks, layout=settings.layout, max_model_len=settings.max_model_len
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(settings.max_model_len, STATE_BLOCK_SIZE) if has_states else BLOCK_SIZE,
            hash_block_size=STATE_BLOCK_SIZE if has_states else BLOCK_SIZE,
            log_stats=True,
        )
        self.runner = StandInRunner()
        self.add = self.scheduler.add_request
        self.schedule = self.scheduler.schedule
        self.update = self.scheduler.update_from_output
        self.abort = partial(self.scheduler.finish_requests, finished_status=RequestStatus.FINISHED_ABORTED)

    def make_request(self, request_id: str, prompt: npt.NDArray[np.int32], max_tokens: int) -> Request:
        params = SamplingParams(
            max_tokens=min(max_tokens, self.settings.max_model_len - len(prompt)),
            ignore_eos=True,
            stop_token_ids=list(STOP_TOKENS[: self.settings.num_stop_tokens]),
        )
        params.update_from_generation_config({}, EOS)
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.tolist(),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.block_hasher,
            mm_features=self.images(len(prompt)) if self.settings.layout == "images" else None,
        )

    def images(self, num_tokens: int) -> list[Any]:
        """One image of 12 embeddings in a short prompt, otherwise one of 256 in every 400 tokens; some images recur."""
        places = range(16, num_tokens - 256, 400) if num_tokens > 272 else range(2, 3)
        size = 256 if num_tokens > 272 else 12
        return [feature_of(f"image {self.rng.integers(500)} of {size}", place, "1" * size) for place in places]

    def result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        tokens = iter(self.tokens(len(output.num_scheduled_tokens)).tolist())
        return self.runner.execute(output, lambda request_id, position: next(tokens))

    def decode_result(self, like: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(like.num_scheduled_tokens)
        return runner_output(request_ids, [[token] for token in self.tokens(len(request_ids)).tolist()])

    def num_scheduled(self, output: SchedulerOutput) -> tuple[int, int]:
        return len(output.num_scheduled_tokens), output.total_num_scheduled_tokens

    def counts(self) -> tuple[int, int]:
        return self.scheduler.get_request_counts()

    def num_preemptions(self, request: Request) -> int:
        return self.runner.num_preemptions.get(request.request_id, 0)


if __name__ == "__main__":
    serve(VllmSession)
