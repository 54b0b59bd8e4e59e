"""A tiny model with an encoder in real vLLM: a script for the environment with vLLM.

    python vllm_images.py FAMILY ours|theirs|check FOLDER [KEY=VALUE ...]   prints one JSON line

What prompts with images got with our scheduler, or vLLM's own. With ours, everything that must hold between two calls
is checked after each. KEY=VALUE are options of `LLM`, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from tests.integrations.vllm_groups import OURS, check_every_step

VOCABULARY = 512
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<boi>", "<eoi>", "\n\n", "\n", "\n\n\n", "\n\n\n\n", "<video>"]
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
}


def tokenizer() -> Any:
    """Of words: the special ones, and "w12" to "w511"."""
    words = SPECIAL + [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[4:],
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "video_token": "<video>",
        },
    )


def llava() -> tuple[Any, Any]:
    """LLaVA: 16 embeddings for an image."""
    vision = transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=8, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=SPECIAL.index("<image>"),
        image_token_id=SPECIAL.index("<image>"),
        image_seq_length=16,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_resize=True, do_center_crop=True
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    """Gemma 3: 16 embeddings for an image, between tokens of its own; windows and full attention."""
    text = {**TEXT, "num_hidden_layers": 4, "sliding_window": 64}
    pattern = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=64, patch_size=8),
        text_config=transformers.Gemma3TextConfig(**text, layer_types=pattern),
        mm_tokens_per_image=16,
        image_token_index=SPECIAL.index("<image>"),
        image_token_id=SPECIAL.index("<image>"),
        boi_token_index=SPECIAL.index("<boi>"),
        eoi_token_index=SPECIAL.index("<eoi>"),
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, do_resize=True)
    processor = transformers.Gemma3Processor(images, tokenizer(), image_seq_length=16)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def qwen2_vl() -> tuple[Any, Any]:
    """Qwen 2 VL: as many embeddings as an image has patches, and positions made of their grid."""
    vision = {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "patch_size": 14, "mlp_ratio": 2}
    text = {
        **TEXT,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    config = transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=SPECIAL.index("<image>"),
        video_token_id=SPECIAL.index("<video>"),
        vision_start_token_id=SPECIAL.index("<boi>"),
        vision_end_token_id=SPECIAL.index("<eoi>"),
    )
    pixels = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 24}
    images = transformers.Qwen2VLImageProcessor(size=pixels)
    videos = transformers.Qwen2VLVideoProcessor(size=pixels)
    processor = transformers.Qwen2VLProcessor(images, tokenizer(), videos)
    return transformers.Qwen2VLForConditionalGeneration(config), processor


FAMILIES = {"llava": (llava, "<image>"), "gemma3": (gemma3, "<boi>"), "qwen2-vl": (qwen2_vl, "<image>")}
"""How a model is made, and what stands for an image in its prompts."""


def make(family: str, folder: Path) -> None:
    """The model, with random weights."""
    torch.manual_seed(1)
    model, processor = FAMILIES[family][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that layers, and not the last token, decide about the next one
                parameter.normal_(0.0, 0.2)
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    path = folder / "model.safetensors"  # vLLM knows the older names of the weights of CLIP and SigLIP
    weights = {
        key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def picture(number: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(number).integers(0, 255, (48 + 40 * number, 40 + 30 * number, 3), dtype=np.uint8)
    )


def prompts(family: str) -> list[TokensPrompt]:
    """Some with the same images at the same places, and some with others there."""
    image = SPECIAL.index(FAMILIES[family][1])
    shared = [12 + index * 7 % 500 for index in range(140)]
    made = []
    for number in range(8):
        own = [12 + index * (number + 3) % 500 for index in range(30 * number)]
        pictures = [picture(0), picture(number % 3), picture(number)][: 1 + number % 3]
        tokens = [1, *shared[:40]]
        for place in range(len(pictures)):
            tokens += [image, *shared[: 20 + 40 * place]]
        made.append(TokensPrompt(prompt_token_ids=tokens + own, multi_modal_data={"image": pictures}))
    return made


def main() -> None:
    family, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in sys.argv[4:])}
    if not (folder / "config.json").exists():
        make(family, folder)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 40}
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
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    tokens, cached = [], []
    for _ in range(2):  # once more: what the first time left in the caches
        outputs = llm.generate(prompts(family), params, use_tqdm=False)
        tokens += [list(each.outputs[0].token_ids) for each in outputs]
        cached += [each.num_cached_tokens for each in outputs]
    found = {
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
