"""Loading of model directories, and the errors of directories that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, T5Config

from pointsman.engine import Engine
from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.kv.pool import choose_kv_dtype
from pointsman.engine.model import loader
from pointsman.engine.model.loader import choose_dtype, load_model
from tests.engine.tiny_models import COMMON, FAMILIES, ORIGINAL_LONGROPE, REFUSED, build


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama, without a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    model = build(LlamaConfig(**COMMON))
    model.generation_config = GenerationConfig(eos_token_id=[2, 7])
    model.save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def error_of(path: Path, kind: type[Exception] = ModelLoadError) -> str:
    with pytest.raises(kind) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_is_loaded_with_its_properties(saved: Path) -> None:
    loaded = load_model(saved)
    assert loaded.dtype == torch.float32
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.tokenizer is None
    assert (loaded.vocab_size, loaded.max_position_embeddings) == (199, 256)
    assert [(s.num_kv_heads, s.k_dim, s.v_dim, s.num_heads) for s in loaded.layers] == [(2, 12, 12, 4)] * 2


def test_a_model_can_be_loaded_in_bfloat16(saved: Path) -> None:
    assert load_model(saved, "bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'int3'; choose one of auto, float32, bfloat16, float16"):
        load_model(saved, "int3")


def test_dtype_auto_is_bfloat16_on_a_gpu_and_float32_elsewhere(saved: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert load_model(saved).dtype == choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("auto", gpu) == torch.bfloat16
    assert choose_dtype("float32", gpu) == torch.float32


def test_float16_needs_a_gpu(saved: Path) -> None:
    assert choose_dtype("float16", torch.device("cuda")) == torch.float16
    assert choose_kv_dtype("float16", torch.bfloat16, torch.device("cuda")) == torch.float16
    remedy = "is 'float16', which needs a GPU, and device is cpu; use float32 or bfloat16$"
    with pytest.raises(ValueError, match=f"^dtype {remedy}"):
        load_model(saved, "float16", device="cpu")
    with pytest.raises(ValueError, match=f"^kv_cache_dtype {remedy}"):
        Engine(load_model(saved, device="cpu"), kv_cache_dtype="float16")


def test_a_model_that_does_not_fit_the_device_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")

    monkeypatch.setattr(loader, "wrap_model", full)
    text = error_of(saved)
    assert str(saved) in text and "loading the model on cpu needs more memory than the device has free" in text
    assert "Tried to allocate 2.00 GiB" in text and "reserved" not in text
    assert text.endswith("or give a smaller model, a dtype of 16 bits or another device")


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    assert f"no model directory at {tmp_path / 'nowhere'}" in error_of(tmp_path / "nowhere")


def test_a_missing_config_is_an_error(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "has no config.json" in error_of(copy)


@pytest.mark.parametrize("text", ["{", "[1]", "{}"])
def test_a_config_without_a_model_type_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    assert "config.json" in error_of(copy)


def test_an_unknown_model_type_is_refused(copy: Path) -> None:
    change_config(copy, model_type="hal9000")
    assert "hal9000" in error_of(copy, UnsupportedModel)


def test_missing_weights_are_an_error(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "has no weight files (*.safetensors)" in error_of(copy)


@pytest.mark.parametrize("keep", [0, 6, 400, 0.5, -1])
def test_truncated_weights_are_an_error(copy: Path, keep: float) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert f"{file} is truncated or corrupt" in error_of(copy)


def test_a_corrupt_header_of_weights_is_an_error(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"#" * 5000)
    assert "truncated or corrupt" in error_of(copy)


def test_weights_of_another_model_are_refused(copy: Path) -> None:
    change_config(copy, num_hidden_layers=3)
    assert "lack 9 tensors, first model.layers.2." in error_of(copy)
    change_config(copy, num_hidden_layers=2, intermediate_size=80)
    assert "shape" in error_of(copy)


def test_a_missing_weight_file_is_named(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of 2 weight files, first model-2.safetensors" in error_of(copy)


def test_a_broken_tokenizer_is_an_error(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded" in error_of(copy)


def test_encoder_decoder_and_quantized_are_refused(copy: Path) -> None:
    T5Config(d_model=16, num_layers=1).save_pretrained(copy)
    assert "encoder-decoder" in error_of(copy, UnsupportedModel)
    LlamaConfig(**COMMON, quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(copy)
    assert "quantized" in error_of(copy, UnsupportedModel)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_compute_wrongly_are_refused(name: str, tmp_path: Path) -> None:
    refusal = REFUSED[name]
    build(refusal.family()).save_pretrained(tmp_path)
    assert refusal.error in error_of(tmp_path, UnsupportedModel)


def test_max_model_len_selects_the_longrope_frequencies_at_loading(tmp_path: Path) -> None:
    build(FAMILIES["phi3-longrope-short"]()).save_pretrained(tmp_path)
    assert load_model(tmp_path).max_position_embeddings == ORIGINAL_LONGROPE
    assert load_model(tmp_path, max_model_len=ORIGINAL_LONGROPE + 1).max_position_embeddings == 256
