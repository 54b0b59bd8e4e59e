"""Joined and packed linear layers compute what `nn.Linear` computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pointsman.engine.model.linear import (
    SMALL_BATCH,
    JoinedLinear,
    join_linear_layers,
    packing_works,
    rounded_up_rows,
    store_weights,
)
from pointsman.engine.model.quantization import check_quantization, quantize_in_groups
from tests.engine.tiny_models import packs

FORMS = {40: "plain", 160: "both", 1024: "packed"}
"""in_features -> how a layer with 812 out_features stores its weight."""
LARGE = 1024


def layers(in_features: int, *sizes: int, bias: bool, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(in_features, size, bias=bias, dtype=dtype).requires_grad_(False) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_features", FORMS)
@pytest.mark.parametrize("num_rows", [1, 7, 32, 64, 130])
def test_outputs_of_joined_layers_are_concatenated(
    dtype: torch.dtype, bias: bool, in_features: int, num_rows: int
) -> None:
    parts = layers(in_features, 512, 300, bias=bias, dtype=dtype)
    joined = JoinedLinear(parts)
    x = torch.randn(1, num_rows, in_features).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    with torch.inference_mode():
        want = torch.cat([part(x) for part in parts], dim=-1)
        torch.testing.assert_close(joined(x), want, rtol=tolerance, atol=tolerance)
        joined.store()
        assert joined.form == (FORMS[in_features] if packs(dtype) else "plain")
        torch.testing.assert_close(joined(x), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_int8_errors_are_rounding_errors(bias: bool, num_rows: int) -> None:
    parts = layers(LARGE, 512, 300, bias=bias)
    joined = JoinedLinear(parts)
    joined.store("int8")
    assert joined.form == "int8" and joined.weight.untyped_storage().nbytes() == 4
    x = torch.randn(1, num_rows, LARGE)
    with torch.inference_mode():
        got, want = joined(x), torch.cat([part(x) for part in parts], dim=-1)
    error = float((got - want).norm() / want.norm())
    assert 1e-4 < error < 0.03, "two roundings of about half a 127th each"


def in_4_bits(part: nn.Linear, levels: int = 16) -> nn.Linear:
    """A linear layer whose weights are exact in 4 bits, in groups of 32, as if read from a GGUF file."""
    digits = torch.randint(0, levels, part.weight.shape).view(-1, 32)
    first, step = 15 * torch.rand(len(digits), 1), torch.rand(len(digits), 1) / 9
    part.weight.copy_(((digits - first) * step).view_as(part.weight))
    return part


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, SMALL_BATCH, SMALL_BATCH + 1, 64])
def test_weights_in_4_bits_are_kept_exactly(bias: bool, num_rows: int) -> None:
    parts = [in_4_bits(part) for part in layers(LARGE, 512, 304, bias=bias)]
    joined, in_8_bits = JoinedLinear(parts), JoinedLinear(parts)
    joined.store("int4")
    in_8_bits.store("int8")
    assert joined.is_in_4_bits and not in_8_bits.is_in_4_bits
    x = torch.randn(1, num_rows, LARGE)
    with torch.inference_mode():
        want = torch.cat([part(x) for part in parts], dim=-1)
        error, in_8_bits_error = (float((one(x) - want).norm() / want.norm()) for one in (joined, in_8_bits))
    assert 1e-4 < error < (0.005 if num_rows <= SMALL_BATCH else 0.01)
    assert in_8_bits_error < 0.01


def test_a_row_of_a_small_4_bit_batch_does_not_depend_on_others() -> None:
    (part,) = layers(LARGE, 304, bias=True)
    joined = JoinedLinear([in_4_bits(part)])
    joined.store("int4")
    x = torch.randn(1, SMALL_BATCH, LARGE)
    x[0, 2, 5] = torch.nan
    with torch.inference_mode():
        together = joined(x)
        alone = torch.cat([joined(x[:, row : row + 1]) for row in range(SMALL_BATCH)], dim=1)
    assert torch.equal(together.isnan().all(-1), torch.tensor([[False, False, True, False]]))
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())


@pytest.mark.parametrize("num_rows", [1, SMALL_BATCH + 1])
@pytest.mark.parametrize("in_features", FORMS)
def test_small_batches_in_bfloat16_use_4_bits(in_features: int, num_rows: int) -> None:
    """Few rows are computed in 4 bits, and more rows without quantization."""
    size = in_features // 32 * 32
    parts = [in_4_bits(part).bfloat16() for part in layers(size, 512, 304, bias=True)]
    joined, plain = JoinedLinear(parts), JoinedLinear(parts)
    joined.store("int4")
    plain.store()
    assert joined.is_in_4_bits and joined.form == plain.form
    x = torch.randn(1, num_rows, size).bfloat16()
    with torch.inference_mode():
        got, want = joined(x), plain(x)
    assert got.dtype == torch.bfloat16 and not torch.equal(got, want)
    assert float((got - want).float().norm() / want.float().norm()) < 0.02


@pytest.mark.parametrize("why", ["more bits", "one group of more bits", "width", "features"])
def test_weights_that_need_more_than_4_bits_stay_in_8_bits(why: str) -> None:
    (part,) = layers(48 if why == "width" else 64, 40 if why == "features" else 32, bias=False)
    if why in ("features", "one group of more bits"):
        in_4_bits(part)
    if why == "one group of more bits":
        part.weight[31, 7] += 0.05
    joined = JoinedLinear([part])
    joined.store("int4")
    assert joined.form == "int8" and not joined.is_in_4_bits


def test_weights_with_a_mean_too_large_for_4_bits_stay_in_8_bits() -> None:
    weight = in_4_bits(layers(64, 32, bias=False)[0]).weight
    assert quantize_in_groups(weight + 1) is not None
    assert quantize_in_groups(weight + 100) is None


@pytest.mark.parametrize("levels", [2, 5, 11, 16])
def test_4_bit_groups_may_have_fewer_than_16_different_weights(levels: int) -> None:
    weight = in_4_bits(layers(64, 32, bias=False)[0], levels).weight
    found = quantize_in_groups(weight)
    assert found is not None
    torch.testing.assert_close(found[1], weight, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_int8_errors_in_bfloat16_are_small(num_rows: int) -> None:
    """A model with int4 in bfloat16 stores its output layer in int8."""
    (part,) = layers(LARGE, 512, bias=True, dtype=torch.bfloat16)
    joined = JoinedLinear([part])
    joined.store("int8")
    x = torch.randn(1, num_rows, LARGE).bfloat16()
    with torch.inference_mode():
        got, want = joined(x), part(x)
    assert got.dtype == torch.bfloat16 and float((got - want).float().norm() / want.float().norm()) < 0.01


@pytest.mark.parametrize("x", [torch.zeros(2, 32), torch.zeros(3, 64, dtype=torch.bfloat16)], ids=["width", "type"])
def test_an_input_of_wrong_shape_or_type_is_an_error_in_int8(x: torch.Tensor) -> None:
    joined = JoinedLinear(layers(64, 32, bias=False))
    joined.store("int8")
    with pytest.raises(TypeError, match=r"must be torch\.float32 \[\.\.\., 64\]"):
        joined(x)


@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_row_does_not_depend_on_other_rows(bias: bool) -> None:
    (part,) = layers(LARGE, 300, bias=bias)
    joined = JoinedLinear([part])
    joined.store("int8")
    x = torch.randn(1, 130, LARGE) * torch.logspace(-30, 3, 130)[:, None]
    x[0, 7] = 0
    with torch.inference_mode():
        together = joined(x)
        for row in range(130):
            assert torch.equal(joined(x[:, row : row + 1]), together[:, row : row + 1])
        want = part(x)
    error = (together - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-20)
    assert float(error.max()) < 0.03, "also for rows of very small and very large numbers"


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_affects_no_other_int8_row(place: int, value: float) -> None:
    (part,) = layers(64, 32, bias=True)
    joined = JoinedLinear([part])
    joined.store("int8")
    x = torch.randn(1, 7, 64)
    broken = x.clone()
    broken[0, place, 5] = value
    with torch.inference_mode():
        got, want = joined(broken), joined(x)
    others = [row for row in range(7) if row != place]
    assert got[0, place].isnan().all() and torch.equal(got[0, others], want[0, others])


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("int3", "cpu", torch.float32, "quantization is 'int3'; choose int8, int4, or None"),
        ("int8", "cpu", torch.bfloat16, "needs float32 on a CPU"),
        ("int8", "cuda", torch.float32, "needs float32 on a CPU"),
        ("int4", "cpu", torch.float16, "needs float32 or bfloat16 on a CPU"),
    ],
)
def test_unsupported_quantization_is_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_quantization(name, torch.device(device), dtype)
    check_quantization(None, torch.device(device), dtype)


def test_a_bias_on_some_layers_only_is_an_error() -> None:
    mixed = layers(8, 4, bias=True) + layers(8, 4, bias=False)
    with pytest.raises(ValueError, match="1 of 2 layers have a bias"):
        JoinedLinear(mixed)


def test_the_plain_weight_of_a_packed_layer_is_nan_of_its_type() -> None:
    """The attribute `weight` of a packed layer is a NaN that takes no memory, so products with it are NaN."""
    joined = JoinedLinear(layers(LARGE, 512, bias=False))
    store_weights(joined)
    assert joined.weight.dtype == torch.float32 and joined.weight.shape == (512, LARGE)
    assert torch.nn.functional.linear(torch.randn(1, LARGE), joined.weight).isnan().all()
    assert joined.weight.untyped_storage().nbytes() == 4


def test_only_large_linear_layers_that_are_called_are_replaced() -> None:
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
    assert join_linear_layers(model, called) == 1
    kinds = {name: type(child).__name__ for name, child in model.items()}
    assert kinds == {"called": "JoinedLinear", "uncalled": "Linear", "small": "Linear", "own": "Subclass"}


@pytest.mark.parametrize("broken", ["missing", "wrong"])
def test_weights_are_not_packed_if_packing_fails(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Weights stay row by row if PyTorch's packing operators are missing or compute wrongly."""

    class Operators:
        if broken == "wrong":

            @staticmethod
            def _reorder_linear_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
                return weight * 2

            @staticmethod
            def _linear_pointwise(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
                return x @ weight.T

    packing_works.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "mkldnn", Operators())
        joined = JoinedLinear(layers(LARGE, 512, bias=False))
        joined.store()
        assert joined.form == "plain"
    packing_works.cache_clear()
    assert packing_works(torch.float32)


def test_numbers_of_rows_are_rounded_to_few_sizes() -> None:
    """oneDNN compiles a program for each number of rows, so large numbers are rounded up; small numbers stay
    unchanged."""
    wholes = {count: rounded_up_rows(count) for count in range(1025)}
    assert all(0 <= whole - count < 32 for count, whole in wholes.items())
    assert all(whole == count for count, whole in wholes.items() if count <= 8)
    assert all(whole - count < 8 for count, whole in wholes.items() if count <= 64)
    assert len(set(wholes.values())) <= 48
