"""Makes a transformers configuration and generation settings from a GGUF file's metadata.

`ARCHITECTURES` has the supported families of models, by their names in llama.cpp. A family's function adds the fields
that only models of this family have. A setting that affects the computation and has no counterpart in transformers is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from pointsman.engine.errors import ModelLoadError, UnsupportedModel, first_line
from pointsman.engine.gguf.reader import GGUFFile, GGUFTensor, as_decimal
from pointsman.files import represented

Fields = dict[str, Any]
"""Values of a config.json, by field name."""

COUNTS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Keys of counts in the metadata of every family -> their names in config.json."""
TOKEN_IDS: Mapping[str, str] = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Keys, in the metadata, of the ids of tokens that end a text, a turn, or a message."""
NEUTRAL: Mapping[str, Any] = {
    "attention.causal": True,
    "attention.scale": None,
    "attention.shared_kv_layers": 0,
    "embedding_scale": None,
    "expert_count": 0,
    "logit_scale": None,
    "residual_scale": None,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": None,
    "use_parallel_residual": False,
}
"""Keys of metadata that affect the computation -> the only value without an effect; None: the key must be absent."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary settings of all Llama 3.1 to 3.3 models. A GGUF file has only the resulting factors, in
`rope_freqs.weight`."""
END_OF_TURN = frozenset(
    {
        "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
        "<|end_of_turn|>", "<EOT>",
    }
)  # fmt: skip
"""Control tokens that always end a text, as in llama.cpp: the metadata has only one EOS, but the generation settings of
chat models name several."""
SAMPLING: Mapping[str, str] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of recommended sampling parameters in the metadata -> their names in generation_config.json."""
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
NO_TOKEN = 2**32 - 1
"""The value of a token id in the metadata if the model has no such token: -1 in 32 bits."""
CONTROL = 3
"""The number by which `tokenizer.ggml.token_type` marks control tokens."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of models, and how its GGUF files differ from models in transformers."""

    model_type: str
    """The family's name in transformers."""
    add: Callable[[GGUFFile, str, Fields], None] | None = None
    """Function that adds to a config.json the fields that only this family has. Its second argument is the prefix of
    the family's keys in the metadata of the GGUF file."""
    adds_one_to_norms: bool = False
    """Whether a GGUF file stores the weights of norms with 1 added."""
    interleaves_rope: bool = False
    """Whether llama.cpp rotates neighbouring elements of a head, so that the rows of query and key projections are
    interleaved."""


def architecture_of(gguf: GGUFFile) -> Architecture:
    """The entry of `ARCHITECTURES` for the model in a GGUF file.

    Raises:
        ModelLoadError: the metadata does not name the family.
        UnsupportedModel: the family is not in `ARCHITECTURES`, or the file holds no language model.
    """
    kind, name = gguf.text("general.type", "model"), gguf.text("general.architecture")
    if kind != "model" or name == "clip":
        what = "the image or audio part of a model" if name == "clip" else f"of the type {represented(kind)}"
        raise UnsupportedModel(f"{gguf.path} is {what}, no language model; give the GGUF file of the language model")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{gguf.path}: general.architecture is {represented(name)}; supported are {', '.join(ARCHITECTURES)}; give "
            "the model's directory in the Hugging Face format"
        )
    return ARCHITECTURES[name]


def make_config(gguf: GGUFFile) -> Any:
    """The transformers configuration of the model in a GGUF file.

    Raises:
        ModelLoadError: a field is absent or has a wrong value.
        UnsupportedModel: the family is not known, or a field affects the computation in an unsupported way.
    """
    from transformers import AutoConfig

    fields = config_fields(gguf)
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:
        raise UnsupportedModel(
            f"{gguf.path}: transformers has no configuration of type {fields['model_type']!r}: {first_line(error)}"
        ) from error


def config_fields(gguf: GGUFFile) -> Fields:
    """The fields of a config.json for the model in a GGUF file. Raises the errors of `make_config`."""
    architecture = architecture_of(gguf)
    prefix = gguf.text("general.architecture")
    for key, value in NEUTRAL.items():
        given = gguf.metadata.get(f"{prefix}.{key}", value)
        if not (given is value or given == value):
            raise UnsupportedModel(f"{gguf.path}: {prefix}.{key} is {represented(given)}, which is not supported here")
    fields: Fields = {"model_type": architecture.model_type}
    for key, name in COUNTS.items():
        fields[name] = gguf.count(f"{prefix}.{key}")
    if fields["num_hidden_layers"] > len(gguf.tensors):
        raise ModelLoadError(
            f"{gguf.path}: {prefix}.block_count is {fields['num_hidden_layers']}, but the file has only "
            f"{len(gguf.tensors)} tensors; convert the model again"
        )
    fields["num_key_value_heads"] = gguf.count(f"{prefix}.attention.head_count_kv", fields["num_attention_heads"])
    fields["rms_norm_eps"] = gguf.number(f"{prefix}.attention.layer_norm_rms_epsilon")
    fields["vocab_size"] = _embedding_tensor(gguf).shape[0]
    # llama.cpp writes the output projection only if it differs from the embedding.
    fields["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    for name, key in TOKEN_IDS.items():
        fields[name] = token_id(gguf, key)
    _add_heads(gguf, prefix, fields)
    if architecture.add is not None:
        architecture.add(gguf, prefix, fields)
    return fields


def generation_fields(gguf: GGUFFile) -> Fields:
    """The fields of a generation_config.json for the model in a GGUF file: the tokens that end a text, and sampling
    parameters.

    Raises:
        ModelLoadError: an id in the metadata is no token id, or the tokens or their types are wrong.
    """
    ends = [end for end in (token_id(gguf, key) for key in ENDS) if end is not None]
    if "tokenizer.ggml.token_type" in gguf.metadata:
        tokens = gguf.texts("tokenizer.ggml.tokens")
        controls = np.flatnonzero(gguf.numbers("tokenizer.ggml.token_type")[: len(tokens)] == CONTROL)
        ends += [int(at) for at in controls if tokens[at] in END_OF_TURN]
    sampling = {name: gguf.metadata[key] for key, name in SAMPLING.items() if key in gguf.metadata}
    return {"eos_token_id": list(dict.fromkeys(ends)) or None, **sampling}


def token_id(gguf: GGUFFile, key: str) -> int | None:
    """The token id under a key of the metadata; None: the key is absent, or its value is `NO_TOKEN`.

    Raises:
        ModelLoadError: the value is no token id.
    """
    value, num_tokens = gguf.metadata.get(key), _embedding_tensor(gguf).shape[0]
    if value is None or value == NO_TOKEN:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise ModelLoadError(
            f"{gguf.path}: {key} is {represented(value)}; it must be a token id from 0 to {num_tokens - 1}; convert "
            "the model again"
        )
    return value


def _embedding_tensor(gguf: GGUFFile) -> GGUFTensor:
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise ModelLoadError(
            f"{gguf.path} has no tensor token_embd.weight of two dimensions; give the GGUF file of a whole model"
        )
    return tensor


def _add_heads(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    """Add the fields for the width of a head, and for the rotary embedding."""
    default = fields["hidden_size"] // fields["num_attention_heads"]
    head_dim = fields["head_dim"] = gguf.count(f"{prefix}.attention.key_length", default)
    if (width := gguf.count(f"{prefix}.attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel(
            f"{gguf.path}: {prefix}.attention.value_length is {width} and key_length {head_dim}; only equal lengths "
            "are supported here"
        )
    rope: Fields = {"rope_type": "default", "rope_theta": gguf.number(f"{prefix}.rope.freq_base", 10_000.0)}
    num_rotated = gguf.count(f"{prefix}.rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        if prefix != "phi3" or num_rotated > head_dim:
            raise UnsupportedModel(
                f"{gguf.path}: {prefix}.rope.dimension_count is {num_rotated}, but a head has {head_dim} elements; "
                f"{prefix} models in which the two numbers differ are not supported here"
            )
        rope["partial_rotary_factor"] = num_rotated / head_dim
    _scale_rope(gguf, prefix, fields, rope, num_rotated)
    fields["rope_parameters"] = rope


def _scale_rope(gguf: GGUFFile, prefix: str, fields: Fields, rope: Fields, num_rotated: int) -> None:
    scaling = f"{prefix}.rope.scaling"
    kind = gguf.text(f"{scaling}.type", "none")
    if ROPE_FACTORS in gguf.tensors:
        if kind != "none":
            raise UnsupportedModel(
                f"{gguf.path} has both the tensor {ROPE_FACTORS} and {scaling}.type {kind!r}; convert the model with "
                "one of the two"
            )
        _scale_llama3(gguf, rope, num_rotated)
    elif LONG_FACTORS in gguf.tensors:
        original = gguf.count(f"{scaling}.original_context_length")
        rope["rope_type"] = "longrope"
        rope["short_factor"] = [as_decimal(one) for one in _rope_factors(gguf, SHORT_FACTORS, num_rotated)]
        rope["long_factor"] = [as_decimal(one) for one in _rope_factors(gguf, LONG_FACTORS, num_rotated)]
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"] = original
    elif kind in ("linear", "yarn"):
        rope["rope_type"] = kind
        rope["factor"] = gguf.number(f"{scaling}.factor")
        if kind == "yarn":
            length = gguf.count(f"{scaling}.original_context_length", fields["max_position_embeddings"])
            rope["original_max_position_embeddings"] = length
            for name in ("beta_fast", "beta_slow"):
                if f"{scaling}.yarn_{name}" in gguf.metadata:
                    rope[name] = gguf.number(f"{scaling}.yarn_{name}")
            if (factor := gguf.number(f"{scaling}.attn_factor", 1.0)) != 1.0:
                raise UnsupportedModel(f"{gguf.path}: {scaling}.attn_factor is {factor}, which is not supported here")
    elif kind != "none":
        raise UnsupportedModel(
            f"{gguf.path}: {scaling}.type is {represented(kind)}; in a file without tensors of rope factors, only "
            "none, linear and yarn are supported"
        )


def _scale_llama3(gguf: GGUFFile, rope: Fields, num_rotated: int) -> None:
    """Add the rotary settings of Llama 3.1 to 3.3, if these settings give the factors in the file.

    Raises:
        UnsupportedModel: the factors result from other settings.
    """
    factors = _rope_factors(gguf, ROPE_FACTORS, num_rotated)
    factor = float(factors.max())
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (2 * np.pi)
    turns = turns * rope["rope_theta"] ** -(np.arange(0, num_rotated, 2) / num_rotated)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / factors, (1 - smooth) / factor + smooth, rtol=1e-4, atol=0):
        raise UnsupportedModel(
            f"{gguf.path}: {ROPE_FACTORS} does not have the rotary factors of a Llama 3.1 to 3.3 model; give the "
            "model's directory in the Hugging Face format"
        )
    if factor != 1:
        rope.update({"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE})


def _rope_factors(gguf: GGUFFile, name: str, num_rotated: int) -> npt.NDArray[np.float32]:
    """Divisors of the rotary frequencies, from the tensor `name` of the file.

    Raises:
        ModelLoadError: the tensor is missing, or has another size or type.
    """
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type != GGMLQuantizationType.F32 or tensor.shape != (num_rotated // 2,):
        raise ModelLoadError(
            f"{gguf.path} has no tensor {name} of {num_rotated // 2} float32 numbers; convert the model again"
        )
    factors = tensor.data.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelLoadError(f"{gguf.path}: {name} has factors that are not above 0; convert the model again")
    return factors


# ------------------------------------------------------------------------------------------------ families


def _add_llama(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    """Add the fields of Llama and Mistral models. In llama.cpp both families are named llama; only Mistral has a
    window."""
    fields["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    fields["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    if f"{prefix}.attention.sliding_window" in gguf.metadata:
        fields["model_type"] = "mistral"
        fields["sliding_window"] = gguf.count(f"{prefix}.attention.sliding_window")


def _add_qwen3(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    fields["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors


def _add_phi3(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    """Add the sliding window of Phi-3 models. A window of 0 tokens means no window."""
    if gguf.metadata.get(f"{prefix}.attention.sliding_window"):
        fields["sliding_window"] = gguf.count(f"{prefix}.attention.sliding_window")


def _add_gemma2(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    _add_window(gguf, prefix, fields, every=2)
    _add_query_scale(fields, num_layers_of_27b=46)
    fields["attn_logit_softcapping"] = gguf.number(f"{prefix}.attn_logit_softcapping", 50.0)
    fields["final_logit_softcapping"] = gguf.number(f"{prefix}.final_logit_softcapping", 30.0)


def _add_gemma3(gguf: GGUFFile, prefix: str, fields: Fields) -> None:
    """Add the fields of Gemma 3 models. Layers with a window have another rotary embedding, which is never scaled."""
    _add_window(gguf, prefix, fields, every=6)
    _add_query_scale(fields, num_layers_of_27b=62)
    own = {"rope_type": "default", "rope_theta": gguf.number(f"{prefix}.rope.freq_base_swa", 10_000.0)}
    fields["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": own}
    if f"{prefix}.final_logit_softcapping" in gguf.metadata:
        fields["final_logit_softcapping"] = gguf.number(f"{prefix}.final_logit_softcapping")


def _add_window(gguf: GGUFFile, prefix: str, fields: Fields, *, every: int) -> None:
    """Add the sliding window, and the layers with it: all except each `every`-th layer, unless the metadata lists
    them."""
    fields["sliding_window"] = gguf.count(f"{prefix}.attention.sliding_window")
    key, num_layers = f"{prefix}.attention.sliding_window_pattern", fields["num_hidden_layers"]
    if isinstance(gguf.metadata.get(key), np.ndarray):
        slides = gguf.numbers(key).astype(bool).tolist()
        if len(slides) != num_layers:
            raise ModelLoadError(
                f"{gguf.path}: {key} has {len(slides)} values, but the model has {num_layers} layers; convert it again"
            )
    else:
        every = gguf.count(key, every)
        slides = [(layer + 1) % every != 0 for layer in range(num_layers)]
    fields["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]


def _add_query_scale(fields: Fields, *, num_layers_of_27b: int) -> None:
    """Add the factor that scales queries, which the metadata lacks. As in llama.cpp, the number of layers identifies
    the 27B model, whose factor differs from the factor of smaller models."""
    if fields["num_hidden_layers"] == num_layers_of_27b:
        fields["query_pre_attn_scalar"] = fields["hidden_size"] // fields["num_attention_heads"]
    else:
        fields["query_pre_attn_scalar"] = fields["head_dim"]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _add_llama, interleaves_rope=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _add_qwen3),
    "phi3": Architecture("phi3", _add_phi3),
    "gemma": Architecture("gemma", adds_one_to_norms=True),
    "gemma2": Architecture("gemma2", _add_gemma2, adds_one_to_norms=True),
    "gemma3": Architecture("gemma3_text", _add_gemma3, adds_one_to_norms=True),
}
