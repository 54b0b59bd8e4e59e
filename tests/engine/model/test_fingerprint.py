"""A model's fingerprint is equal for equal models, and differs for all others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pointsman.engine import UnsupportedModel
from pointsman.engine.model.fingerprint import model_fingerprint
from pointsman.engine.model.linear import JoinedLinear
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model, wrap_model
from tests.engine.kv_requests import make, run_rounds
from tests.engine.tiny_models import FAMILIES, build


def load(**options: object) -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1), **options)


def test_equal_models_have_equal_fingerprints() -> None:
    loaded = load()
    before = model_fingerprint(loaded)
    assert before == model_fingerprint(load())
    run_rounds(make(loaded), 1)
    assert model_fingerprint(loaded) == before


def test_packed_weights_do_not_change_the_fingerprint() -> None:
    first, second = load_model("demo"), load_model("demo")
    assert any(isinstance(one, JoinedLinear) and one.form == "packed" for one in first.model.modules())
    assert model_fingerprint(first) == model_fingerprint(second)
    others = [load_model("demo", **options) for options in ({"dtype": "bfloat16"}, {"quantization": "int8"})]
    assert len({model_fingerprint(one) for one in (first, *others)}) == 3
    assert model_fingerprint(others[1]) == model_fingerprint(load_model("demo", quantization="int8"))


def _embedding(loaded: LoadedModel) -> None:
    loaded.model.get_input_embeddings().weight[7, 3] += 1e-3


def _norm(loaded: LoadedModel) -> None:
    loaded.model.model.layers[1].first_norm.weight[0] += 1e-3


def _joined(loaded: LoadedModel) -> None:
    next(one for one in loaded.model.modules() if isinstance(one, JoinedLinear)).weight[1, 1] += 1e-3


def _head_norm(loaded: LoadedModel) -> None:
    loaded.model.model.layers[0].attention._heads.norms.key[2] += 1e-3


def _epsilon(loaded: LoadedModel) -> None:
    loaded.config.rms_norm_eps *= 2


def _rotary(loaded: LoadedModel) -> None:
    loaded.model.model.rotary_emb.inv_freq[1] *= 1.01


@pytest.mark.parametrize("change", [_embedding, _norm, _joined, _head_norm, _epsilon, _rotary])
def test_changed_weights_or_settings_change_the_fingerprint(change: Callable[[LoadedModel], None]) -> None:
    loaded = load()
    before = model_fingerprint(loaded)
    with torch.inference_mode():
        change(loaded)
    assert model_fingerprint(loaded) != before


def test_a_model_with_hidden_weights_has_no_fingerprint() -> None:
    """Otherwise models that differ only in hidden weights would have the same fingerprint."""

    class Opaque(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            object.__setattr__(self, "_call", lambda *arguments, **keywords: inner(*arguments, **keywords))

        def forward(self, *arguments: object, **keywords: object) -> object:
            return self._call(*arguments, **keywords)

    loaded = load()
    loaded.model.model.layers[0].mlp = Opaque(loaded.model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match=r"the model's fingerprint covers [\d,]+ of [\d,]+ weights"):
        model_fingerprint(loaded)
