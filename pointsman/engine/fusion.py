"""Make a loaded model faster without knowing what model it is.

Most decoder-only families are built of the same parts under the same names: RMS norms, a gated MLP, and attention
with separate projections, optional norms per head and rotary embeddings. Each such part can be computed with fewer and
larger operations (`kernels/layers.py`, `linear.py`). Which parts a model has is found out by trying:

1. A part is recognised by its submodules, and a replacement is built from them.
2. The model runs once, on a small mixed batch, and every part's inputs and outputs are noted.
3. A replacement that gives the same outputs for the same inputs takes the part's place. One that does not is dropped:
   the family does something there that only looks alike, and keeps its own code.

So no family is named here, and a part is never replaced on faith. The self-check of the whole model runs once more
afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pointsman.engine.attention import PagedLayer, attention_options, get_handler, set_handler
from pointsman.engine.kernels import layers as kernels
from pointsman.engine.kernels.runtime import STORAGE
from pointsman.engine.linear import JoinedLinear, can_join, join_linear_layers

logger = logging.getLogger(__name__)

Builder: TypeAlias = Callable[[], nn.Module]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference between a part and its replacement, relative to the outputs' largest magnitude."""


# ----------------------------------------------------------------------------------------------- replacements


class FusedNorm(nn.Module):
    """An RMS norm in one pass.

    Args:
        weight: [width].
        epsilon: added to the mean square.
        offset: added to the weight; 1 in the Gemma families.
    """

    def __init__(self, weight: Tensor, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.scalars = np.array([epsilon, offset], dtype=np.float32)
        width = weight.shape[0]
        self._arguments = np.zeros(kernels.NORM_ARGUMENTS, dtype=np.int64)
        self._arguments[2] = weight.data_ptr()
        self._arguments[4] = self.scalars.ctypes.data
        self._arguments[6] = width
        self._kernel = kernels.norm_kernel(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x, out, 0, 0)
        return out

    def add_and_norm(self, x: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
        """x + addend, and its norm; both arguments contiguous, of one shape."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._run(x, out, addend.data_ptr(), total.data_ptr())
        return total, out

    def _run(self, x: Tensor, out: Tensor, addend: int, total: int) -> None:
        if x.dtype != self.weight.dtype:  # the kernel reads both as the same type
            raise TypeError(f"the norm's weight is {self.weight.dtype} and its input {x.dtype}")
        arguments = self._arguments
        num_rows = x.numel() // x.shape[-1]
        arguments[1], arguments[3], arguments[5] = x.data_ptr(), out.data_ptr(), num_rows
        arguments[7], arguments[8] = addend, total
        self._kernel(arguments, kernels.threads_for(num_rows))


class FusedMLP(nn.Module):
    """A gated MLP: down(activation(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str) -> None:
        super().__init__()
        self.gate_up = JoinedLinear([gate, up])
        self.down = JoinedLinear([down])
        self._arguments = np.zeros(kernels.GATE_ARGUMENTS, dtype=np.int64)
        self._arguments[4] = gate.out_features
        self._arguments[5] = kernels.ACTIVATIONS.index(activation)
        self._kernel = kernels.gate_kernel(gate.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        both = self.gate_up(x)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        arguments = self._arguments
        num_rows = both.numel() // both.shape[-1]
        arguments[1], arguments[2], arguments[3] = both.data_ptr(), out.data_ptr(), num_rows
        self._kernel(arguments, kernels.threads_for(num_rows))
        return self.down(out)  # type: ignore[no-any-return]


@dataclass(slots=True)
class HeadNorm:
    """The norm of one head's queries or keys."""

    weight: Tensor
    epsilon: float
    offset: float


class FusedAttention(nn.Module):
    """Attention from hidden states to hidden states.

    One product for queries, keys and values; one pass that norms and rotates them and writes the pool; the paged
    kernel; one product for the output.
    """

    def __init__(
        self,
        projections: list[nn.Linear],
        output: nn.Linear,
        layer: PagedLayer,
        options: dict[str, Any],
        norms: tuple[HeadNorm, HeadNorm] | None,
        rotary: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = JoinedLinear(projections)
        self.output = JoinedLinear([output])
        self.rotary = rotary
        self.options = options
        shape = layer.shape
        self.num_heads, self.k_dim, self.v_dim = shape.num_heads, shape.k_dim, shape.v_dim
        self._key_at = projections[0].out_features
        self._value_at = self._key_at + projections[1].out_features
        self._norms = norms
        self.scalars = np.array([norms[0].epsilon, norms[0].offset] if norms else [0, 0], dtype=np.float32)
        arguments = self._arguments = np.zeros(kernels.HEADS_ARGUMENTS, dtype=np.int64)
        if norms:
            arguments[kernels.QUERY_NORM] = norms[0].weight.data_ptr()
            arguments[kernels.KEY_NORM] = norms[1].weight.data_ptr()
        arguments[kernels.SCALARS] = self.scalars.ctypes.data
        arguments[kernels.NUM_HEADS], arguments[kernels.NUM_KV_HEADS] = shape.num_heads, shape.num_kv_heads
        arguments[kernels.K_DIM], arguments[kernels.V_DIM] = shape.k_dim, shape.v_dim
        for place in (kernels.QUERY_STRIDE, kernels.KEY_STRIDE, kernels.VALUE_STRIDE):
            arguments[place] = self.qkv.out_features
        arguments[kernels.QUERY_HEAD_STRIDE] = arguments[kernels.KEY_HEAD_STRIDE] = shape.k_dim
        arguments[kernels.VALUE_HEAD_STRIDE] = shape.v_dim

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] and (cos, sin) [1, T, rotary_dim] -> [1, T, hidden]."""
        backend, plan, keys, values = self.layer.step()
        qkv = self.qkv(hidden_states)
        num_tokens = qkv.shape[1]
        query = qkv.new_empty(num_tokens, self.num_heads, self.k_dim)
        arguments = self._arguments
        address, size = qkv.data_ptr(), qkv.element_size()
        arguments[kernels.QUERY] = address
        arguments[kernels.KEY] = address + size * self._key_at
        arguments[kernels.VALUE] = address + size * self._value_at
        arguments[kernels.QUERY_OUT] = query.data_ptr()
        if self.rotary:
            cos, sin = (one.to(qkv.dtype).contiguous() for one in position_embeddings)  # type: ignore[union-attr]
            arguments[kernels.COS], arguments[kernels.SIN] = cos.data_ptr(), sin.data_ptr()
            arguments[kernels.ROTARY_DIM] = cos.shape[-1]
        backend.write_heads(plan, arguments, qkv.dtype, keys, values)
        attended = backend.attend(plan, query, keys, values, **self.options)
        return self.output(attended.view(1, num_tokens, -1)), None


class FusedLayer(nn.Module):
    """A decoder layer of fused parts: x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, first_norm: FusedNorm, attention: FusedAttention, second_norm: FusedNorm, mlp: FusedMLP) -> None:
        super().__init__()
        self.first_norm = first_norm
        self.attention = attention
        self.second_norm = second_norm
        self.mlp = mlp

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; further arguments are those of the attention."""
        position_embeddings = keywords.get("position_embeddings")
        # The parts' own methods, not their calls: a step has hundreds, and nobody hooks them.
        x = hidden_states.contiguous()
        attended, _ = self.attention.forward(self.first_norm.forward(x), position_embeddings)
        x, normed = self.second_norm.add_and_norm(x, attended)
        return x.add_(self.mlp.forward(normed))


# ------------------------------------------------------------------------------------------ what may be replaced


@dataclass(slots=True)
class Part:
    """A part of the model that looks like something there is a replacement for."""

    parent: nn.Module
    name: str
    module: nn.Module
    candidates: list[Builder]
    """Builders of replacements, the likeliest first."""


@dataclass(slots=True)
class Call:
    """One call of a module: what went in and what came out."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


def find_parts(model: nn.Module, options: dict[nn.Module, dict[str, Any]]) -> Iterator[Part]:
    """All parts with a likely replacement, outer ones before those inside them.

    Args:
        options: for each attention module the keywords of its calls of the attention function.
    """
    for parent in model.modules():
        for name, module in parent.named_children():
            if candidates := candidates_for(module, options.get(module)):
                yield Part(parent, name, module, candidates)


def candidates_for(module: Any, options: dict[str, Any] | None) -> list[Builder]:
    """Builders of what might replace a module; `options`: how it calls the attention function, if it does."""
    if is_fused_layer(module):
        norms = module.input_layernorm, module.post_attention_layernorm
        return [partial(FusedLayer, norms[0], module.self_attn, norms[1], module.mlp)]
    if options is not None:
        return attention_candidates(module, options)
    if all(can_join(getattr(module, one, None)) for one in ("gate_proj", "up_proj", "down_proj")):
        return mlp_candidates(module)
    if is_norm(module):
        return [partial(FusedNorm, module.weight, norm_epsilon(module), offset) for offset in (0.0, 1.0)]
    return []


def is_fused_layer(module: nn.Module) -> bool:
    """Whether a module has the four parts of a usual decoder layer and no others, all of them fused already."""
    return {name: type(child) for name, child in module.named_children()} == {
        "self_attn": FusedAttention,
        "mlp": FusedMLP,
        "input_layernorm": FusedNorm,
        "post_attention_layernorm": FusedNorm,
    }


def is_norm(module: nn.Module) -> bool:
    """Whether a module has the parameters of an RMS norm: one vector, and an epsilon beside it."""
    parameters = list(module.named_parameters())
    return (
        len(parameters) == 1
        and parameters[0][0] == "weight"
        and parameters[0][1].ndim == 1
        and parameters[0][1].dtype in STORAGE
        and parameters[0][1].device.type == "cpu"
        and norm_epsilon(module) is not None
    )


def norm_epsilon(module: nn.Module) -> float | None:
    """The number that an RMS norm adds to the mean square, under the names in use."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def mlp_candidates(module: Any) -> list[Builder]:
    """A gated MLP, by the names of its layers."""
    return [partial(FusedMLP, module.gate_proj, module.up_proj, module.down_proj, kind) for kind in kernels.ACTIVATIONS]


def attention_candidates(module: Any, options: dict[str, Any]) -> list[Builder]:
    """Attention with separate projections, by the names of its layers."""
    layer: PagedLayer = get_handler(module)
    projections: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    output: Any = getattr(module, "o_proj", None)
    shape = layer.shape
    sizes = [shape.num_heads * shape.k_dim, shape.num_kv_heads * shape.k_dim, shape.num_kv_heads * shape.v_dim]
    if not all(can_join(one) for one in [*projections, output]):
        return []
    if [one.out_features for one in projections] != sizes or len({one.bias is None for one in projections}) > 1:
        return []
    norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    build = partial(FusedAttention, projections, output, layer, attention_options(shape.k_dim, options))
    if all(one is None for one in norms):
        return [partial(build, None, rotary) for rotary in (True, False)]
    if not all(one is not None and is_norm(one) and len(one.weight) == shape.k_dim for one in norms):
        return []
    return [
        partial(build, tuple(HeadNorm(one.weight, norm_epsilon(one), offset) for one in norms), rotary)
        for rotary in (True, False)
        for offset in (0.0, 1.0)
    ]


# ------------------------------------------------------------------------------------------------------ replacing


def fuse(model: nn.Module, run: Callable[[], Any]) -> Counter[str]:
    """Replace what can be replaced, in place.

    Args:
        model: attached to paged attention with a `NumbaAttention` backend.
        run: one forward pass over a mixed batch, which leaves the attention context as it was during the pass.

    Returns:
        How many parts of each kind were replaced.
    """
    options = _attention_calls(model, run)
    done: Counter[str] = Counter()
    called: set[nn.Module] = set()
    for _ in range(2):  # parts, then layers that consist of fused parts
        parts = list(find_parts(model, options))
        calls, linear = _record(model, parts, run)
        called |= linear
        replaced: set[nn.Module] = set()
        for part in parts:
            if part.parent in replaced or part.module not in calls:
                continue
            replacement = _first_equal(part, calls[part.module])
            if replacement is not None:
                setattr(part.parent, part.name, replacement)
                replaced.update(part.module.modules())
                done[type(replacement).__name__] += 1
    if joined := join_linear_layers(model, called):
        done[JoinedLinear.__name__] = joined
    logger.info("fused: %s", ", ".join(f"{count} {kind}" for kind, count in done.items()))
    return done


def _attention_calls(model: nn.Module, run: Callable[[], Any]) -> dict[nn.Module, dict[str, Any]]:
    """The keywords with which each attention module calls its attention function."""
    found: dict[nn.Module, dict[str, Any]] = {}
    layers = {module: get_handler(module) for module in model.modules() if isinstance(get_handler(module), PagedLayer)}

    def noting(layer: PagedLayer) -> Callable[..., Tensor]:
        def handler(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
            found[module] = options
            return layer(module, query, key, value, options)

        return handler

    try:
        for module, layer in layers.items():
            set_handler(module, noting(layer))
        run()
    finally:
        for module, layer in layers.items():
            set_handler(module, layer)
    return found


def _record(
    model: nn.Module, parts: list[Part], run: Callable[[], Any]
) -> tuple[dict[nn.Module, Call], set[nn.Module]]:
    """Run the model once and note the first call of each part, and which linear layers are called."""
    calls: dict[nn.Module, Call] = {}
    linear: set[nn.Module] = set()

    def note_linear(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        linear.add(module)

    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if module not in calls:
            calls[module] = Call(
                tuple(_copy(one) for one in arguments), {k: _copy(v) for k, v in keywords.items()}, _copy(output)
            )

    hooks = [part.module.register_forward_hook(note, with_kwargs=True) for part in parts]
    hooks += [module.register_forward_hook(note_linear) for module in model.modules() if can_join(module)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls, linear


def _copy(value: Any) -> Any:
    """A copy of a tensor: models change some in place. Tuples of tensors likewise, all else as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(_copy(one) for one in value) if type(value) is tuple else value


def _first_equal(part: Part, call: Call) -> nn.Module | None:
    """The first replacement that answers the call as the part did."""
    want = call.output[0] if isinstance(call.output, tuple) else call.output
    for build in part.candidates:
        try:
            replacement = build()
            with torch.inference_mode():
                got = replacement(*call.arguments, **call.keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            logger.debug("%s is not replaced: %s", part.name, error)
            continue
        got = got[0] if isinstance(got, tuple) else got
        if isinstance(got, Tensor) and isinstance(want, Tensor) and is_close(got, want):
            return replacement
    return None


def is_close(got: Tensor, want: Tensor) -> bool:
    """Whether two outputs differ by rounding at most."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    error = (got.float() - want.float()).abs().max()
    return bool(error <= TOLERANCE[want.dtype] * want.float().abs().max().clamp(min=1e-6))
