"""The choice of device and attention: the fastest available one, or an error that names a missing one."""

from __future__ import annotations

import sys

import pytest
import torch

from pointsman.engine import Engine
from pointsman.engine.attention.backends import choose_attention, choose_device
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.model.loader import load_model, wrap_model
from tests.engine.tiny_models import FAMILIES, build

LAYERS = [LayerShape(1, 8, 8, 2)]
CPU = torch.device("cpu")


def test_device_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("name", ["cuda:97", "abacus"])
def test_a_missing_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"device is '{name}', which cannot be used here .*; use cpu or auto"):
        load_model("demo", device=name)


def test_attention_is_chosen_by_name_device_and_type() -> None:
    assert choose_attention("auto", LAYERS, CPU, torch.float32).name == "numba"
    assert choose_attention("torch", LAYERS, CPU, torch.float32).name == "torch"
    assert choose_attention("auto", LAYERS, CPU, torch.float16).name == "torch", "no kernels for this type"
    assert choose_attention("auto", LAYERS, torch.device("meta"), torch.float32).name == "torch", "no CPU"
    with pytest.raises(ValueError, match="attention is 'flash'; choose one of auto, numba, torch, triton"):
        choose_attention("flash", LAYERS, CPU, torch.float32)
    with pytest.raises(ValueError, match=r"no kernels for torch\.float16"):
        choose_attention("numba", LAYERS, CPU, torch.float16)


def test_without_numba_attention_is_plain_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("pointsman.engine.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pointsman.engine.attention.numba_backend", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    loaded = wrap_model(build(FAMILIES["qwen3"]()))
    assert loaded.attention.name == "torch" and loaded.fused == {}
    assert "numba cannot be imported" in caplog.text
    with pytest.raises(ValueError, match="pip install numba"):
        choose_attention("numba", LAYERS, CPU, torch.float32)


def test_options_that_a_loaded_model_cannot_have_are_refused() -> None:
    loaded = wrap_model(build(FAMILIES["qwen3"]()))
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8'; choose one of auto, float32, bfloat16"):
        Engine(loaded, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="attention is a backend object, which was made for one loaded model"):
        Engine("demo", attention=loaded.attention)
    for options in ({"device": "cpu"}, {"fuse": False}, {"quantization": "int8"}):
        with pytest.raises(ValueError, match="the model is loaded already"):
            Engine(loaded, **options)
