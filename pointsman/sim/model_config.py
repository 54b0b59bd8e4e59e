"""Model configurations: reads a `config.json` of Hugging Face into a `ModelShape`, or refuses it and names the field.

Nothing is guessed. The model type must be known, and each field that it needs must be present, unless the type's
configuration class in transformers gives it a default (`_Family.defaults`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pointsman.files import MAX_MESSAGE, read_input, represented, shown
from pointsman.sim.errors import UnsupportedModel
from pointsman.sim.model import ModelShape, Quantization


@dataclass(frozen=True, slots=True)
class _Family:
    """A model type: the values that apply where its config lacks a field."""

    windows: Literal["none", "all", "pattern"] = "none"
    """Layers to which `sliding_window` applies, if no field of the config names them. "none": the model type has no
    `sliding_window`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of optional fields, as in the type's class in transformers."""
    experts: bool = False


_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(defaults=_UNTIED),
    "mistral": _Family("all", _UNTIED | {"sliding_window": 4096}),
    "mixtral": _Family("all", _UNTIED | {"sliding_window": None}, experts=True),
    "qwen2": _Family("none", _UNTIED | {"use_sliding_window": False}),
    "qwen3": _Family("none", _UNTIED | {"use_sliding_window": False, "head_dim": 128}),
    "qwen3_moe": _Family("none", _UNTIED | {"use_sliding_window": False}, experts=True),
    "smollm3": _Family(
        "none",
        _TIED
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": None,
        },
    ),
    "phi3": _Family("all", _UNTIED | {"sliding_window": None}),
    "gemma": _Family(defaults=_TIED | {"head_dim": 256}),
    "gemma2": _Family("pattern", _TIED | {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}),
    "gemma3_text": _Family("pattern", _GEMMA3),
    "gpt_oss": _Family("pattern", _UNTIED | {"sliding_window_pattern": 2, "head_dim": 64}, experts=True),
    "deepseek_v2": _Family(defaults=_UNTIED, experts=True),
    "deepseek_v3": _Family(defaults=_UNTIED, experts=True),
    "olmo2": _Family(defaults=_UNTIED),
    "granite": _Family(defaults=_UNTIED),
}
MAX = 2**40
"""Maximum of any count, so that a float can hold the product of two counts."""
_OTHER_CACHES = re.compile(r"^(mamba|ssm|rwkv|linear_(attn|attention|num|key|value)|conv_|time_|recurrent|lru_)")
"""Fields of state-space and linear-attention layers, whose state is no KV cache."""


def read_config(path: Path, name: str) -> ModelShape:
    """The shape described by the `config.json` at `path`.

    Args:
        path: the file.
        name: the name of the shape.

    Raises:
        UnsupportedModel: the file is not JSON, a field is missing or makes no sense, or the step-time model does not
            know a feature of the model.
        OSError: the file cannot be read.
    """
    try:
        config = json.loads(read_input(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: the file is not JSON ({error}); give the config.json of a model") from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: the file is not a JSON object; give the config.json of a model")
    return _Reader(config, path).shape(name)


class _Reader:
    """Reads fields of one config; errors name the file."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self._path = path
        self._outer = config
        nested = config.get("text_config")
        self._text: dict[str, Any] = nested if isinstance(nested, dict) else config
        model_type = self._text.get("model_type", config.get("model_type"))
        if model_type == "gemma3":
            model_type = "gemma3_text"
        self._refuse_other_caches(model_type)
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            raise self._error(f"model_type {model_type!r} is not known; known are {', '.join(_FAMILIES)}")
        self._type = model_type
        self._family = _FAMILIES[model_type]

    def shape(self, name: str) -> ModelShape:
        hidden, heads = self._get_count("hidden_size"), self._get_count("num_attention_heads")
        max_model_len = self._get_count("max_position_embeddings")
        window, num_windowed = self._windows(max_model_len)
        experts = self._expert_fields() if self._family.experts else {}
        latent = self._latent_fields() if self._type.startswith("deepseek") else {}
        tied = self._get_field("tie_word_embeddings")
        if not isinstance(tied, bool):
            raise self._error(f"tie_word_embeddings is {tied!r}; it must be true or false")
        dtype_bytes, note = self._dtype_bytes()
        return ModelShape(
            name=name,
            num_layers=self._get_count("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._get_count("num_key_value_heads", default=heads),
            head_dim=self._get_count("head_dim", default=hidden // heads),
            vocab_size=self._get_count("vocab_size"),
            max_model_len=max_model_len,
            tied_embeddings=tied,
            dtype_bytes=dtype_bytes,
            quantization=self._quantization(),
            num_other_params=self._vision_params(),
            sliding_window=window,
            num_windowed_layers=num_windowed,
            source=f"{self._path}{note}",
            **{"intermediate_size": self._dense_intermediate_size(experts)} | experts | latent,
        )

    # ------------------------------------------------------------------ parts

    def _dense_intermediate_size(self, experts: dict[str, int]) -> int:
        if experts and not experts["num_dense_layers"]:
            return 0  # the field belongs to the experts, or to a dense model of the family
        return self._get_count("intermediate_size")

    def _expert_fields(self) -> dict[str, int]:
        expert_size = "intermediate_size" if self._type in ("mixtral", "gpt_oss") else "moe_intermediate_size"
        sparse_step = "moe_layer_freq" if self._type.startswith("deepseek") else "decoder_sparse_step"
        if self._text.get(sparse_step, 1) != 1:
            raise self._error(f"{sparse_step} is {self._text[sparse_step]!r}; only 1 (experts in every layer) is known")
        first_dense = self._get_count("first_k_dense_replace", minimum=0, default=0)
        return {
            "num_experts": self._get_count("num_local_experts", "num_experts", "n_routed_experts"),
            "experts_per_token": self._get_count("num_experts_per_tok", "experts_per_token"),
            "expert_intermediate_size": self._get_count(expert_size),
            "num_shared_experts": self._get_count("n_shared_experts", minimum=0, default=0),
            "num_dense_layers": first_dense + len(self._text.get("mlp_only_layers") or []),
        }

    def _latent_fields(self) -> dict[str, int]:
        rank = self._text.get("q_lora_rank")
        return {
            "kv_lora_rank": self._get_count("kv_lora_rank"),
            "q_lora_rank": 0 if rank is None else self._get_count("q_lora_rank"),
            "qk_rope_head_dim": self._get_count("qk_rope_head_dim"),
            "qk_nope_head_dim": self._get_count("qk_nope_head_dim"),
            "v_head_dim": self._get_count("v_head_dim"),
        }

    def _windows(self, max_model_len: int) -> tuple[int, int]:
        """The size of the sliding window, and the number of layers that have it; (0, 0) if no layer has a window."""
        window, layers = self._get_field("sliding_window", default=None), self._get_count("num_hidden_layers")
        if window is None or self._get_field("use_sliding_window", default=True) is False:
            return 0, 0
        window = self._get_count("sliding_window")
        if window >= max_model_len:
            return 0, 0
        if (types := self._text.get("layer_types")) is not None:
            windowed = types.count("sliding_attention")
        elif self._text.get("use_sliding_window") is True:
            windowed = max(
                0, layers - self._get_count("max_window_layers", minimum=0)
            )  # layers below it have no window
        elif self._family.windows == "pattern":
            windowed = layers - layers // self._get_count("sliding_window_pattern", "_sliding_window_pattern")
        elif self._family.windows == "all":
            windowed = layers
        else:
            raise self._error(
                f"sliding_window is {window}, but the field layer_types, which says which layers have it, is missing"
            )
        return (window, windowed) if windowed else (0, 0)

    def _dtype_bytes(self) -> tuple[int, str]:
        """Bytes of a weight that is not quantised, and a text to add to `ModelShape.source`."""
        for config in (self._text, self._outer):
            dtype = config.get("dtype") or config.get("torch_dtype")
            if dtype in ("bfloat16", "float16"):
                return 2, ""
            if dtype == "float32":
                return 4, ""
            if dtype is not None:
                raise self._error(f"dtype {dtype!r} is not known; known are bfloat16, float16, float32")
        return 2, " (no dtype in it: 16 bits, as engines load it)"

    def _quantization(self) -> Quantization | None:
        config = self._text.get("quantization_config") or self._outer.get("quantization_config")
        if config is None:
            return None
        if not isinstance(config, dict):
            raise self._error(f"quantization_config is {config!r}; it must be an object")
        method = config.get("quant_method")
        match method:
            case "fp8" | "fbgemm_fp8":
                return Quantization(method=method, bits=8, computes_in="fp8")
            case "mxfp4":
                # 4 bits and an 8-bit scale for every 32 weights; the checkpoints that use it keep attention in bf16.
                return Quantization(method=method, bits=4.25, covers="experts" if self._family.experts else "linear")
            case "awq" | "gptq":
                bits = self._checked_bits(config.get("bits", config.get("w_bit")))
                group = config.get("group_size", config.get("q_group_size"))
                # A group has a 16-bit scale and a zero point; without groups (-1) each column has one, negligible here.
                extra = (16 + bits) / group if isinstance(group, int) and group > 0 else 0
                return Quantization(method=method, bits=bits + extra)
            case "bitsandbytes":
                if config.get("load_in_4bit"):
                    # A scale for every 64 weights: 32 bits, or 8 and a little if it is quantised in turn.
                    scale = 8.127 if config.get("bnb_4bit_use_double_quant") else 32
                    return Quantization(method=method, bits=4 + scale / 64)
                if config.get("load_in_8bit"):
                    return Quantization(method=method, bits=8, computes_in="int8")
                raise self._error("quantization_config of bitsandbytes has neither load_in_4bit nor load_in_8bit")
            case "compressed-tensors":
                return self._compressed_tensors_quantization(config)
        raise self._error(
            f"quant_method {method!r} is not known; known are awq, gptq, fp8, fbgemm_fp8, mxfp4, bitsandbytes, "
            f"compressed-tensors"
        )

    def _compressed_tensors_quantization(self, config: dict[str, Any]) -> Quantization:
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            raise self._error("quantization_config of compressed-tensors must have exactly one entry in config_groups")
        (group,) = groups.values()
        weights = group.get("weights") or {}
        bits, size = self._checked_bits(weights.get("num_bits")), weights.get("group_size")
        extra = 16 / size if isinstance(size, int) and size > 0 else 0
        computes_in: Literal["bf16", "fp8", "int8"] = "bf16"
        if group.get("input_activations") and bits == 8:
            computes_in = "fp8" if weights.get("type") == "float" else "int8"
        return Quantization(method="compressed-tensors", bits=bits + extra, computes_in=computes_in)

    def _checked_bits(self, bits: object) -> int:
        if not isinstance(bits, int) or not 1 <= bits <= 16:
            raise self._error(f"quantization_config has bits {bits!r}; it must be a whole number from 1 to 16")
        return bits

    def _vision_params(self) -> int:
        """Weights of a vision encoder beside the text model. The encoder's layers have an ungated MLP."""
        vision = self._outer.get("vision_config")
        if self._text is self._outer or not isinstance(vision, dict):
            return 0
        sizes = [vision.get(key) for key in ("hidden_size", "num_hidden_layers", "intermediate_size")]
        hidden, layers, intermediate = (size if isinstance(size, int) else 0 for size in sizes)
        if not (hidden and layers and intermediate):
            raise self._error("vision_config lacks hidden_size, num_hidden_layers or intermediate_size")
        return layers * (4 * hidden * hidden + 2 * hidden * intermediate)

    def _refuse_other_caches(self, model_type: object) -> None:
        for key, value in self._text.items():
            if _OTHER_CACHES.match(key) and value not in (None, False):
                raise self._error(
                    f"{key}: {model_type!r} has state-space or linear-attention layers, which the step-time model "
                    "does not know"
                )
        for layer_type in self._text.get("layer_types") or []:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise self._error(f"layer_types has {layer_type!r}; known are full_attention and sliding_attention")

    # ------------------------------------------------------------------ fields

    def _get_field(self, *names: str, **default: Any) -> Any:
        for name in names:
            if name in self._text:
                return self._text[name]
        for name in names:
            if name in self._family.defaults:
                return self._family.defaults[name]
        if "default" in default:
            return default["default"]
        raise self._error(f"the field {' or '.join(names)!r} is missing, which model_type {self._type!r} needs")

    def _get_count(self, *names: str, minimum: int = 1, **default: int) -> int:
        """The whole number, at least `minimum`, in the first of the fields `names` that the config has."""
        value = self._get_field(*names, **default)
        if value is None and "default" in default:
            return default["default"]
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX:
            raise self._error(f"{names[0]} is {represented(value)}; it must be a whole number from {minimum} to {MAX}")
        return value

    def _error(self, text: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._path}: {shown(text, MAX_MESSAGE)}")
