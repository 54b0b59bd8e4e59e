"""Writes transformers models and tokenizers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quantize
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""transformers' model type -> name of the architecture in GGUF files."""
SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = F32,
    edit: Callable[[GGUFWriter], object] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model and return the path.

    Args:
        kind: of all weights with two dimensions whose rows are whole blocks; the others stay in 32 bits.
        edit: adds fields, such as a tokenizer's, or changes those that are there (`writer.kv_data`).
        split_max_tensors: of each part; 0: all in one file.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    _add_config(writer, config)
    if edit is not None:
        edit(writer)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = interleaved(values, config.num_attention_heads)
        elif architecture == "llama" and ".k_proj." in name:
            values = interleaved(values, config.num_key_value_heads)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        is_quantized = values.ndim == 2 and values.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        used = kind if is_quantized else F32
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), quantize(values, used), raw_dtype=used)
    _add_rope_factors(writer, config)
    write(writer)
    return path


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The rows of each head reordered for rotations of neighbouring elements: 0, half, 1, half + 1, ..."""
    half = values.shape[0] // num_heads // 2
    order = [head * 2 * half + at + side * half for head in range(num_heads) for at in range(half) for side in (0, 1)]
    return values[order]


def _add_config(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if config.model_type in ("mistral", "phi3", "gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_rope_factors(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config.head_dim))


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Factors by which Llama 3 divides rotary frequencies: 1 for short wave lengths, `factor` for long ones,
    interpolated in between."""
    factors = []
    for at in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (at / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def trained_bpe(num_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few words, with control tokens, added tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<eos>", "<pad>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the capital of the country is there", "naïve日本 don't 12345\n\n  x"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("éx", normalized=False), AddedToken("<tool>", normalized=False)])
    template = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


def add_tokenizer(
    tokenizer: Any, kind: str, *, pre: str = "", num_tokens: int = 0, add_space_prefix: bool = True
) -> Callable[[GGUFWriter], None]:
    """The `edit` that adds a fast tokenizer, and its chat template if it has one.

    Args:
        tokenizer: of transformers, or of the tokenizers library.
        kind: "gpt2" or "llama".
        pre: how texts are split, for "gpt2".
        num_tokens: rows of the embedding; further tokens are unused.
        add_space_prefix: whether texts begin with a space, for "llama".
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    content = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    types = dict.fromkeys(vocabulary.values(), TokenType.NORMAL)
    texts = {at: token for token, at in vocabulary.items()}
    for one in content["added_tokens"]:
        types[one["id"]] = TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED
        if not one["special"]:
            texts[one["id"]] = one["content"].replace("▁", " ")
    for byte in range(256):
        if kind == "llama" and f"<0x{byte:02X}>" in vocabulary:
            types[vocabulary[f"<0x{byte:02X}>"]] = TokenType.BYTE
    for at in range(num_tokens):
        if texts.setdefault(at, f"[PAD{at}]") not in vocabulary and at not in types:
            types[at] = TokenType.UNUSED
    merges = [tuple(one.split(" ")) if isinstance(one, str) else one for one in content["model"]["merges"]]
    template = getattr(tokenizer, "chat_template", None)

    def add(writer: GGUFWriter) -> None:
        for name, key in SPECIAL.items():
            del writer.kv_data[0][key]
            if (special := getattr(tokenizer, name, None)) is not None:
                writer.add_uint32(key, special)
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre or "default")
        writer.add_token_list([texts[at] for at in sorted(texts)])
        writer.add_token_types([types[at] for at in sorted(texts)])
        if kind == "gpt2":
            writer.add_token_merges([" ".join(pair) for pair in merges])
        else:
            ranks: dict[str, int] = {}
            for pair in merges:
                ranks.setdefault("".join(pair), len(ranks))
            writer.add_add_space_prefix(add_space_prefix)
            writer.add_token_scores([-float(ranks.get(texts[at], len(ranks))) for at in sorted(texts)])
        if template is not None:
            writer.add_chat_template(template)

    return add
