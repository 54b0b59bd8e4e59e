"""Tiny models that read images, audio and video, with random weights: for the environment with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

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
    """A tokenizer of words: the special ones, and "w12" to "w511"."""
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
    """Qwen 2 VL: an embedding for each patch of an image, and positions from the grid of patches."""
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


def qwen2_audio() -> tuple[Any, Any]:
    """Qwen 2 Audio: an embedding for each 40 ms of sound."""
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**audio, num_mel_bins=16, max_source_positions=1500),
        text_config=transformers.Qwen2Config(**{**TEXT, "num_attention_heads": 2, "num_key_value_heads": 1}),
        audio_token_index=SPECIAL.index("<image>"),
    )
    sounds = transformers.WhisperFeatureExtractor(feature_size=16)
    processor = transformers.Qwen2AudioProcessor(
        sounds, tokenizer(), audio_token="<image>", audio_bos_token="<boi>", audio_eos_token="<eoi>"
    )
    return transformers.Qwen2AudioForConditionalGeneration(config), processor


def whisper() -> tuple[Any, Any]:
    """Whisper, an encoder-decoder: 50 embeddings of sound, without placeholders in the prompt."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=50,
        max_target_positions=128,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    processor = transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1), tokenizer()
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model, processor


FAMILIES = {
    "llava": (llava, "image", "<image>"),
    "gemma3": (gemma3, "image", "<boi>"),
    "qwen2-vl": (qwen2_vl, "image", "<image>"),
    "qwen2-vl-video": (qwen2_vl, "video", "<video>"),
    "qwen2-audio": (qwen2_audio, "audio", "<image>"),
    "whisper": (whisper, "audio", ""),
}
"""The function that makes a model, its inputs, and their placeholder; "": none, it is an encoder-decoder."""


def make(family: str, folder: Path) -> None:
    """The model, with random weights."""
    torch.manual_seed(1)
    model, processor = FAMILIES[family][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that the layers decide about the next token, not just the last token
                parameter.normal_(0.0, 0.2)
        if family != "whisper":
            model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    path = folder / "model.safetensors"  # vLLM knows the older names of some weights
    older = (
        ("vision_tower.", "vision_tower.vision_model."),
        ("language_model.model.model.", "language_model.model."),
        ("language_model.model.lm_head.", "language_model.lm_head."),
    )
    weights = load_file(path)
    for name, before in older:
        weights = {key.replace(name, before): value for key, value in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})
