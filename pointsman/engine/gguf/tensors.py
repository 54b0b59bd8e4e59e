"""Makes the weights of a transformers model from a GGUF file's tensors.

Tensors are dequantised in pieces that fit in a processor's cache, directly into the finished weight. So loading takes
hardly more memory than the model's weights. The system can drop pages of the mapped file at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map
from torch import Tensor

from pointsman.engine.errors import ModelLoadError, UnsupportedModel, first_line
from pointsman.engine.gguf.config import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    architecture_of,
)
from pointsman.engine.gguf.reader import GGUFFile, GGUFTensor
from pointsman.engine.machine import num_cores
from pointsman.files import shown

NOT_WEIGHTS = frozenset({ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS})
"""Names of tensors that belong to the configuration, and are no weights."""
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
        "IQ4_XS",
    )
)  # fmt: skip
"""Types of tensors that can be dequantised."""
PIECE = 2**17
"""Number of elements of a tensor that are dequantised together: 512 KiB in float32."""


def read_weights(gguf: GGUFFile, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a model, by their names in transformers.

    Args:
        gguf: content of the model's GGUF file.
        config: transformers' configuration of the model, from `make_config`.
        dtype: type of the weights.

    Raises:
        ModelLoadError: a tensor is missing, or has another shape than in the configuration.
        UnsupportedModel: a tensor has an unsupported type, or is no weight of the model.
    """
    places = dict(_match_names(gguf, config))
    check_types(gguf)
    for name, tensor in gguf.tensors.items():
        if name not in places and name not in NOT_WEIGHTS:
            raise UnsupportedModel(
                f"{tensor.file}: the tensor {shown(name)} is no weight of a model of type {config.model_type}; give "
                "the model's directory in the Hugging Face format"
            )
    with ThreadPoolExecutor(num_cores()) as threads:  # NumPy releases the interpreter's lock
        weights = threads.map(lambda name: _dequantised(gguf, gguf.tensors[name], config, dtype), places)
        return dict(zip(places.values(), weights, strict=True))


def check_types(gguf: GGUFFile) -> None:
    """Refuse tensors of unsupported types.

    Raises:
        UnsupportedModel: a tensor has an unsupported type.
    """
    for tensor in gguf.tensors.values():
        if tensor.type not in SUPPORTED_TYPES:
            raise UnsupportedModel(
                f"{tensor.file}: the tensor {shown(tensor.name)} is of type {tensor.type.name}; supported are "
                f"{', '.join(kind.name for kind in SUPPORTED_TYPES)}; use another quantisation, such as Q4_K_M"
            )


def _match_names(gguf: GGUFFile, config: Any) -> Iterator[tuple[str, str]]:
    """Yield, for each weight of the model, the name of its tensor in the file and the name of the weight in
    transformers.

    Raises:
        ModelLoadError, UnsupportedModel: see `read_weights`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise UnsupportedModel(f"{gguf.path}: transformers cannot build the model: {first_line(error)}") from error
    family = gguf.text("general.architecture")
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == family)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    for place, weight in model.named_parameters():
        if config.tie_word_embeddings and weight is model.lm_head.weight:
            place = "model.embed_tokens.weight"
        name = names.get_name(place, try_suffixes=(".weight", ".bias"))
        tensor = gguf.tensors.get(name or "")
        if tensor is None:
            raise ModelLoadError(f"{gguf.path} has no tensor {name} for the weight {place}; convert the model again")
        if tensor.shape != tuple(weight.shape):
            raise ModelLoadError(
                f"{tensor.file}: the tensor {shown(tensor.name)} has the shape {list(tensor.shape)}, but the metadata "
                f"requires {list(weight.shape)}; convert the model again"
            )
        yield tensor.name, place


def _dequantised(gguf: GGUFFile, tensor: GGUFTensor, config: Any, dtype: torch.dtype) -> Tensor:
    family = architecture_of(gguf)
    data = tensor.data
    if family.interleaves_rope and ".attn_q." in tensor.name:
        data = _deinterleaved(data, config.num_attention_heads)
    elif family.interleaves_rope and ".attn_k." in tensor.name:
        data = _deinterleaved(data, config.num_key_value_heads)
    weight = torch.empty(tensor.num_elements, dtype=dtype)
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    data = data.reshape(-1)
    step = PIECE // block_size * block_bytes
    for at in range(0, len(data), step):
        piece = dequantize(np.array(data[None, at : at + step]), tensor.type)[0]
        if family.adds_one_to_norms and tensor.name.endswith("norm.weight"):
            piece = piece - 1
        start = at // block_bytes * block_size
        weight[start : start + len(piece)] = torch.from_numpy(piece)
    return weight.reshape(tensor.shape)


def _deinterleaved(data: npt.NDArray[np.uint8], num_heads: int) -> npt.NDArray[np.uint8]:
    """Reorder the rows of a query or key projection, so that the two halves of each head follow each other, as in
    transformers.

    Args:
        data: bytes of the projection's weight [rows, bytes], or of its bias, in which each row is a number of 4 bytes.
        num_heads: number of heads of the queries or keys.
    """
    rows = data if data.ndim == 2 else data.reshape(-1, 4)
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(data.shape)
