"""Fused parts of a decoder layer, which compute with fewer and larger operations. `fusion.py` puts them into a model.

Kernels of the device (`LayerKernels`) compute the operations between matrix products. The kernels read raw memory, so
wrong shapes and types raise errors before a kernel runs.

A step has hundreds of calls, and Python is slow after every product, because the product evicts the interpreter from
the processor's caches. So each layer calls `forward` of its own submodules directly, as they have no hooks. A layer
also stores its submodules in a tuple, because PyTorch looks up module attributes in Python code.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from pointsman.engine.attention.fused import FusedAttentionBackend, HeadNorms, Heads, LayerKernels
from pointsman.engine.attention.paged import AttentionContext, PagedLayer
from pointsman.engine.model.linear import JoinedLinear


class FusedNorm(nn.Module):
    """An RMS norm in one pass.

    Args:
        weight: [width] factor of each element.
        epsilon: number that is added to the mean square.
        offset: number that is added to the weight; 1 in the Gemma families.
        kernels: the layer kernels of the weight's device.
    """

    def __init__(self, weight: Tensor, epsilon: float, offset: float, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight = weight
        self._kernel = kernels.norm(epsilon, offset)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] inputs -> their norm, in the same shape."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(x, out, None, None)
        return out

    def add_and_norm(self, x: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
        """The sum x + addend, and the norm of the sum. Both arguments are contiguous and have the same shape."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._run(x, out, addend, total)
        return total, out

    def _run(self, x: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None:
        weight = self.weight
        if x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            raise TypeError(
                f"the norm's weight is {weight.dtype} {tuple(weight.shape)}, but its input is {x.dtype} "
                f"{tuple(x.shape)}; the types and the last dimensions must be equal"
            )
        self._kernel(x, weight, out, addend, total)


class FusedMLP(nn.Module):
    """A gated MLP: down(activation(gate(x)) * up(x)); gate and up are computed in one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str, kernels: LayerKernels) -> None:
        super().__init__()
        if gate.out_features != up.out_features:
            raise ValueError(
                f"gate_proj has {gate.out_features} output features and up_proj {up.out_features}; they must be equal"
            )
        self.gate_up = JoinedLinear([gate, up])
        self.down = JoinedLinear([down])
        self._kernel = kernels.gate(gate.out_features, activation)
        self._products = self.gate_up, self.down

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [1, T, hidden] -> outputs of the MLP [1, T, hidden]."""
        gate_up, down = self._products
        both = gate_up.forward(x)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        self._kernel(both, out)
        return down.forward(out)


class FusedAttention(nn.Module):
    """Attention from hidden states to hidden states, in four operations.

    One product computes queries, keys and values. One pass norms and rotates them, and writes keys and values to the
    pool. The paged kernel computes attention. One product computes the output.
    """

    def __init__(
        self,
        projections: list[nn.Linear],
        output: nn.Linear,
        layer: PagedLayer,
        options: dict[str, Any],
        norms: HeadNorms | None,
        rotary: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.qkv = JoinedLinear(projections)
        self.output = JoinedLinear([output])
        self.rotary = rotary
        self.options = options
        key_at = projections[0].out_features
        self._heads = Heads(layer.shape, norms, key_at, key_at + projections[1].out_features)
        self._products = self.qkv, self.output

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *_: Any,
        keep: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """Hidden states [1, T, hidden], (cos, sin) [1, T, rotary_dim] -> outputs [1, T, hidden]; [1, r, hidden] with
        `keep`.

        `keep` [r] has the indices of the tokens whose outputs are computed. Keys and values of all T tokens are
        computed with or without `keep`.
        """
        backend, plan, keys, values = self.layer.step()
        to_qkv, to_output = self._products
        qkv = to_qkv.forward(hidden_states)[0]
        num_tokens = qkv.shape[0]
        rotary: tuple[Tensor, Tensor] | None = None
        if self.rotary:
            assert position_embeddings is not None
            cos, sin = position_embeddings
            if not cos.dtype is sin.dtype is qkv.dtype:
                cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
            k_dim = self._heads.shape.k_dim
            if cos.shape != sin.shape or cos.shape[:2] != (1, num_tokens) or cos.shape[-1] > k_dim:
                raise ValueError(
                    f"rotary embeddings have the shape {tuple(cos.shape)}; it must be (1, {num_tokens}, "
                    f"at most {k_dim})"
                )
            rotary = cos[0].contiguous(), sin[0].contiguous()
        fused = cast(FusedAttentionBackend, backend)
        query = fused.write_heads(plan, self._heads, qkv, rotary, keys, values)
        attended = backend.attend(plan, query, keys, values, **self.options)
        attended = attended.view(1, num_tokens, -1)
        return to_output.forward(attended if keep is None else attended[:, keep]), None


class FusedLayer(nn.Module):
    """A decoder layer of fused parts: y = x + attention(first_norm(x)), then y + mlp(second_norm(y))."""

    def __init__(self, first_norm: FusedNorm, attention: FusedAttention, second_norm: FusedNorm, mlp: FusedMLP) -> None:
        super().__init__()
        self.first_norm = first_norm
        self.attention = attention
        self.second_norm = second_norm
        self.mlp = mlp
        self.context: AttentionContext | None = None
        """Context that names the tokens whose outputs are needed; set only in a model's last layer. For the other
        tokens only keys and values are computed."""
        self._parts = first_norm, attention, second_norm, mlp

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Hidden states [1, T, hidden] -> outputs of the layer [1, T, hidden], or only of the tokens `context.keep`.
        `position_embeddings`: see `FusedAttention.forward`."""
        keep = None if self.context is None else self.context.keep
        position_embeddings = keywords.get("position_embeddings")
        first_norm, attention, second_norm, mlp = self._parts
        x = hidden_states.contiguous()
        attended, _ = attention.forward(first_norm.forward(x), position_embeddings, keep=keep)
        if keep is not None:
            x = x[:, keep]
        x, normed = second_norm.add_and_norm(x, attended)
        return x.add_(mlp.forward(normed))
