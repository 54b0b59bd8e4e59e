"""Joined and packed linear layers compute what `nn.Linear` computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pointsman.engine import linear
from pointsman.engine.linear import JoinedLinear, can_join, pack_linear_layers

SMALL, LARGE = 40, 1024  # in_features: the products with 512 and 300 rows lie on both sides of PACKED_FROM


def layers(in_features: int, *sizes: int, bias: bool, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(in_features, size, bias=bias, dtype=dtype).requires_grad_(False) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_features", [SMALL, LARGE])
@pytest.mark.parametrize("num_rows", [1, 7, 64, 130])
def test_outputs_lie_behind_each_other(dtype: torch.dtype, bias: bool, in_features: int, num_rows: int) -> None:
    parts = layers(in_features, 512, 300, bias=bias, dtype=dtype)
    joined = JoinedLinear(parts)
    assert (joined.packed is not None) == (in_features == LARGE)
    x = torch.randn(1, num_rows, in_features).to(dtype)
    with torch.inference_mode():
        got, want = joined(x), torch.cat([part(x) for part in parts], dim=-1)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_bias_on_some_layers_only_is_an_error() -> None:
    mixed = layers(8, 4, bias=True) + layers(8, 4, bias=False)
    with pytest.raises(ValueError, match="1 of 2 layers have a bias"):
        JoinedLinear(mixed)


def test_a_packed_weight_has_a_type_and_no_numbers() -> None:
    """Whoever computes with it sees at once that it is not there; it takes no memory."""
    joined = JoinedLinear(layers(LARGE, 512, bias=False))
    assert joined.weight.dtype == torch.float32 and joined.weight.shape == (512, LARGE)
    assert torch.nn.functional.linear(torch.randn(1, LARGE), joined.weight).isnan().all()
    assert joined.weight.untyped_storage().nbytes() == 4


def test_only_large_layers_that_are_called_are_packed() -> None:
    class Subclass(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "called": layers(LARGE, 512, bias=True)[0],
            "uncalled": layers(LARGE, 512, bias=True)[0],
            "small": layers(8, 8, bias=True)[0],
            "own": Subclass(LARGE, 512),
        }
    )
    called = {model["called"], model["small"], model["own"]}
    assert pack_linear_layers(model, called) == 1
    kinds = {name: type(child).__name__ for name, child in model.items()}
    assert kinds == {"called": "JoinedLinear", "uncalled": "Linear", "small": "Linear", "own": "Subclass"}


def test_where_packing_is_missing_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a PyTorch without these operators, or with ones that answer wrongly."""
    for broken in (None, lambda weight, rows: weight * 2):
        linear.packing_works.cache_clear()
        with monkeypatch.context() as patch:
            if broken is None:
                patch.setattr(JoinedLinear, "__init__", _without_operators)
            else:
                patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", broken)
            assert not can_join(layers(LARGE, 512, bias=False)[0])
    linear.packing_works.cache_clear()
    assert can_join(layers(LARGE, 512, bias=False)[0])


def _without_operators(self: JoinedLinear, parts: list[nn.Linear]) -> None:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")
