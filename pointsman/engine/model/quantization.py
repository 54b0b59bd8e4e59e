"""Weights of linear layers in 8 or 4 bits, and PyTorch's products with such weights.

The operators of PyTorch are private or deprecated, so `check_quantization` tests them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pointsman.engine.errors import first_line

QUANTIZATIONS = {"int8": (torch.float32,), "int4": (torch.float32, torch.bfloat16)}
"""Names of quantizations -> the model types that support them."""
GROUP = 32
"""Number of 4-bit weights of one output feature that share a scale and a zero, as in GGUF's Q4_0 and Q4_1."""
FEATURES_AT_ONCE = 16
"""The number of output features of every 4-bit product must be a multiple of this."""
TOLERANCE = 0.1
"""Largest allowed distance of a number from its grid point, in grid steps; rounding to bfloat16 causes up to 0.03."""
MAX_ROUNDING_ERROR = 0.05
"""Maximum error of rounding scales and zeros to bfloat16, relative to the spread of numbers within the groups; the
error of published files is 0.002."""


@cache
def int8_product() -> Any:
    """PyTorch's product of float32 rows with int8 weights; it rounds the rows to 8 bits, all with one scale and zero
    point.

    The C function is returned, because the Python object around it takes 13 us in each call to check its arguments.

    Raises:
        AttributeError: this PyTorch has no such product.
    """
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    return getattr(product, "_op", product)


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight [out, in] in 4 bits: each number is (digit - 8) * scale + zero, with the scale and zero of its group."""

    packed: Tensor
    """The digits of all groups, in the order in which PyTorch's 4-bit product reads them."""
    scales_and_zeros: Tensor
    """[in / GROUP, out, 2] bfloat16: scale and zero of each group."""

    def product(self, x: Tensor) -> Tensor:
        """Inputs `x` [rows, in] -> products [rows, out] in the dtype of `x`; computed in bfloat16."""
        out: Tensor = _int4_product()(x.bfloat16(), self.packed, GROUP, self.scales_and_zeros)
        return out.to(x.dtype)


def quantize_in_groups(weight: Tensor) -> tuple[Groups, Tensor] | None:
    """The weight [out, in] in 4 bits, and its rounded values as a plain tensor; None: the weight needs more than 4
    bits.

    A weight that a file stores in 4 bits stays in 4 bits: the numbers of a group lie on a grid of at most 16 points,
    and each number keeps its grid point. The size of a grid step and the middle of the grid are rounded to bfloat16, if
    the error is small (`MAX_ROUNDING_ERROR`).
    """
    num_out, num_in = weight.shape
    if num_in % GROUP or num_out % FEATURES_AT_ONCE:
        return None
    groups = weight.float().reshape(-1, GROUP)
    of_one_feature = num_in // GROUP
    if _find_digits(groups[:of_one_feature]) is None:  # a quick test, which finds nearly all other weights
        return None
    found = _find_digits(groups)
    if found is None:
        return None
    digits, scale, low = found
    scale = scale.bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    rounded = (digits - 8) * scale[:, None] + zero[:, None]
    if (rounded - groups).norm() > MAX_ROUNDING_ERROR * (groups - low[:, None]).norm():
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits.view(num_out, num_in).int(), 1)
    both = torch.stack([scale, zero], dim=-1).view(num_out, of_one_feature, 2)
    return Groups(packed, both.transpose(0, 1).contiguous().bfloat16()), rounded.view(num_out, num_in).to(weight.dtype)


def _find_digits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Digits from 0 to 15 [n, GROUP], grid steps [n] and smallest numbers [n] of groups; None: a group needs more than
    16 digits."""
    low = groups.amin(1)
    span = groups.amax(1) - low
    digits, scale = torch.empty_like(groups), torch.empty_like(span)
    left = torch.arange(len(groups))
    for num_steps in range(15, 0, -1):  # the largest number need not be the last digit
        step = span[left] / num_steps
        places = (groups[left] - low[left, None]) / step.masked_fill(step == 0, 1.0)[:, None]
        whole = places.round()
        is_right = (places - whole).abs_().amax(1) < TOLERANCE
        right = left[is_right]
        digits[right], scale[right] = whole[is_right], step[is_right]
        left = left[~is_right]
        if not len(left):
            return digits, scale, low
    return None


@cache
def _int4_product() -> Any:
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return getattr(product, "_op", product)  # the C function, as in `int8_product`


def check_quantization(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Check that weights of type `dtype` on `device` can be quantized as `name`; None is always allowed.

    Raises:
        ValueError: an unknown name, or a device, type or PyTorch that does not support it.
    """
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization is {name!r}; choose {', '.join(QUANTIZATIONS)}, or None for none")
    dtypes = QUANTIZATIONS[name]
    if device.type != "cpu" or dtype not in dtypes:
        needed = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise ValueError(f"quantization is {name!r} with {dtype} on {device}; it needs {needed} on a CPU")
    try:
        int8_product()(torch.ones(1, 8), 1.0, 128, quantize_per_feature(torch.ones(8, 8)))
        if name == "int4":
            found = quantize_in_groups(torch.ones(FEATURES_AT_ONCE, GROUP))
            assert found is not None  # all numbers are equal, so 4 bits suffice
            found[0].product(torch.ones(1, GROUP))
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            f"quantization is {name!r}, which this PyTorch cannot do ({first_line(error)}); leave it out"
        ) from error


def quantize_per_feature(weight: Tensor) -> Any:
    """A float32 weight [out, in] rounded to 8 bits, with one scale per output feature, packed for `int8_product`."""
    scales = (weight.abs().amax(dim=1).double() / 127).clamp(min=1e-12)
    zero_points = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch plans to replace these tensors by torchao's
        rounded = torch.quantize_per_channel(weight.contiguous(), scales, zero_points, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(rounded, None)


@cache
def activation_limit() -> int:
    """The largest rounded activation: 127, or 63 (7 bits) where the processor's sums of 8-bit products could
    overflow."""
    test = getattr(torch.cpu, "_is_vnni_supported", None)
    return 127 if test is not None and test() else 63
