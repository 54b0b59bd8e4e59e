"""Tensors of every type are dequantised; errors name missing and surplus tensors, and those of another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.gguf.config import make_config
from pointsman.engine.gguf.reader import read_gguf
from pointsman.engine.gguf.tensors import read_weights
from pointsman.engine.model.loader import load_model
from pointsman.engine.model.quantization import FEATURES_AT_ONCE, quantize_in_groups
from tests.engine.gguf_files import interleaved, write, write_gguf
from tests.engine.tiny_models import Family, build

WIDE = Family("llama", "", {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4})
STEPS = {"F16": 2.5e-4, "BF16": 2e-3, "Q8_0": 5e-3, "Q5_1": 2.5e-2, "Q5_0": 4.5e-2, "Q4_1": 5e-2, "Q4_0": 9e-2}
"""The largest error of a weight; weights are drawn with a standard deviation of 0.15."""


@pytest.fixture(scope="module")
def model() -> Any:
    return build(WIDE())


def weights_of(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    gguf = read_gguf(path)
    return read_weights(gguf, make_config(gguf), dtype)


@pytest.mark.parametrize("kind", STEPS)
def test_dequantised_weights_have_the_precision_of_their_type(kind: str, model: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model, kind=GGMLQuantizationType[kind])
    read = weights_of(path)
    assert read.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        error = (read[name] - weight).abs().max().item()
        assert error <= STEPS[kind], name
        assert weight.ndim == 1 or error > 0
    assert weights_of(path, torch.bfloat16)["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_weights_of_4_bits_can_be_stored_in_4_bits(kind: str, model: Any, tmp_path: Path) -> None:
    read = weights_of(write_gguf(tmp_path / "model.gguf", model, kind=GGMLQuantizationType[kind]))
    for weight in (one for one in read.values() if one.ndim == 2 and len(one) % FEATURES_AT_ONCE == 0):
        found = quantize_in_groups(weight)
        assert found is not None
        assert (found[1] - weight).abs().max() < 0.01 * weight.abs().max(), "the rounding to bfloat16"


@pytest.mark.parametrize("kind", ["F16", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_of_more_bits_are_not_stored_in_4_bits(kind: str, model: Any, tmp_path: Path) -> None:
    read = weights_of(write_gguf(tmp_path / "model.gguf", model, kind=GGMLQuantizationType[kind]))
    assert not any(quantize_in_groups(weight) for weight in read.values() if weight.ndim == 2)


def bits(data: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Numbers of `width` bits, the lowest of each byte first."""
    return np.stack([(data >> shift) & (2**width - 1) for shift in range(0, 8, width)])


def scales_of(packed: np.ndarray[Any, Any]) -> tuple[list[int], list[int]]:
    """The 8 scales and 8 minima of 6 bits in the 12 bytes of a block of type Q4_K or Q5_K."""
    low, high = [int(one) for one in packed[:8]], [int(one) for one in packed[8:]]
    scales = [one & 63 for one in low[:4]] + [(high[at] & 15) | (low[at] >> 6 << 4) for at in range(4)]
    minima = [one & 63 for one in low[4:]] + [(high[at] >> 4) | (low[4 + at] >> 6 << 4) for at in range(4)]
    return scales, minima


def reference(block: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """A block of 256 weights, dequantised by the description of its type."""
    if kind == "Q6_K":
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8).astype(np.float32)
        step = block[208:].view(np.float16).astype(np.float32)[0]
        quants = []
        for half in (0, 1):
            fours = bits(low[64 * half : 64 * half + 64], 4).reshape(2, 2, 32).reshape(4, 32)
            twos = bits(high[32 * half : 32 * half + 32], 2)
            quants.append(fours | (twos << 4))
        return step * np.repeat(scales, 16) * (np.concatenate(quants).reshape(-1).astype(np.float32) - 32)
    step, smallest = block[:4].view(np.float16).astype(np.float32)
    scales, minima = scales_of(block[4:16])
    quants_at = 16 if kind == "Q4_K" else 48
    fours = np.concatenate([bits(block[at : at + 32], 4) for at in range(quants_at, quants_at + 128, 32)])
    if kind == "Q5_K":
        fours = fours | (bits(block[16:48], 1) << 4)
    pairs = zip(fours.astype(np.float32), scales, minima, strict=True)
    return np.concatenate([step * scale * four - smallest * minimum for four, scale, minimum in pairs])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_weights_are_dequantised(kind: str, model: Any, tmp_path: Path) -> None:
    type_of = GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (256, GGML_QUANT_SIZES[type_of][1]), np.uint8)
    steps = rng.uniform(1e-3, 2e-3, (256, 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[:, -2:] = steps[:, :2]
    else:
        blocks[:, :4] = steps

    def replaced(writer: GGUFWriter) -> None:
        add = writer.add_tensor

        def add_tensor(name: str, values: Any, **options: Any) -> None:
            if name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
                values, options = blocks, {"raw_dtype": type_of}
            add(name, values, **options)

        writer.add_tensor = add_tensor  # type: ignore[method-assign]

    path = write_gguf(tmp_path / "model.gguf", model, edit=replaced)
    expected = np.stack([reference(block, kind) for block in blocks])
    read = weights_of(path)
    np.testing.assert_allclose(read["model.layers.1.mlp.down_proj.weight"], expected, rtol=1e-5, atol=1e-6)
    queries = read["model.layers.0.self_attn.q_proj.weight"].numpy()
    np.testing.assert_allclose(interleaved(queries, 4), expected, rtol=1e-5, atol=1e-6)
    assert (quantize_in_groups(torch.from_numpy(queries)) is not None) == (kind == "Q4_K")


def changed(path: Path, model: Any, **tensors: np.ndarray[Any, Any] | None) -> Path:
    """A file with changed tensors (`__` for the dots of a name); None removes a tensor."""
    others = {name.replace("__", "."): values for name, values in tensors.items()}

    def edit(writer: GGUFWriter) -> None:
        add = writer.add_tensor

        def add_tensor(name: str, values: Any, **options: Any) -> None:
            if name not in others:
                add(name, values, **options)

        writer.add_tensor = add_tensor  # type: ignore[method-assign]
        for name, values in others.items():
            if values is not None:
                add(name, values)

    return write_gguf(path, model, edit=edit)


def test_the_error_names_a_missing_tensor(model: Any, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", model, blk__1__ffn_up__weight=None)
    with pytest.raises(
        ModelLoadError, match=r"model.gguf has no tensor blk.1.ffn_up.weight for the weight model.layers.1.mlp.up_p"
    ):
        load_model(path)


def test_the_error_names_a_tensor_of_another_shape(model: Any, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", model, blk__0__ffn_up__weight=np.zeros((256, 128), np.float32))
    with pytest.raises(ModelLoadError, match=r"blk.0.ffn_up.weight has the shape \[256, 128\].* requires \[256, 256\]"):
        load_model(path)


def test_a_tensor_that_is_no_weight_is_refused(model: Any, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", model, blk__0__attn_sinks__weight=np.zeros(4, np.float32))
    with pytest.raises(
        UnsupportedModel, match=r"the tensor blk.0.attn_sinks.weight is no weight of a model of type llama"
    ):
        load_model(path)


def test_an_unsupported_tensor_type_is_refused(model: Any, tmp_path: Path) -> None:
    path = changed(tmp_path / "model.gguf", model, blk__0__ffn_up__weight=np.zeros((256, 256), np.float64))
    with pytest.raises(
        UnsupportedModel, match=r"blk.0.ffn_up.weight is of type F64; supported are F32, F16, .* use another quantis"
    ):
        load_model(path)


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    write(writer)
    with pytest.raises(ModelLoadError, match=r"has no field llama.context_length; convert the model again"):
        load_model(tmp_path / "vocabulary.gguf")
