"""Parts of a decoder layer that compute with fewer and larger operations: what `fusion.py` puts in a model's place.

Each keeps an array of arguments for its kernel and fills in, call by call, what changes: addresses and the number of
rows. Kernels read raw memory, so shapes and types that would not fit are errors here.

A step has hundreds of calls, and Python is slow after every product, which leaves nothing of it in the processor's
caches. So parts call the `forward` of their parts, on which no hooks are set, and keep them in a tuple as well: an
attribute that is a module is looked up by Python code of PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from pointsman.engine.attention.paged import AttentionContext, FusedAttentionBackend, PagedLayer
from pointsman.engine.kernels import layers as kernels
from pointsman.engine.model.linear import JoinedLinear


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
        self._arguments = np.zeros(kernels.NORM_ARGUMENTS, dtype=np.int64)
        self._arguments[4] = self.scalars.ctypes.data
        self._arguments[6] = weight.shape[0]

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
        weight = self.weight
        if x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            raise TypeError(
                f"the norm's weight is {weight.dtype} {tuple(weight.shape)} and its input {x.dtype} {tuple(x.shape)}"
            )
        arguments = self._arguments
        arguments[2] = weight.data_ptr()
        num_rows = x.numel() // x.shape[-1]
        arguments[1], arguments[3], arguments[5] = x.data_ptr(), out.data_ptr(), num_rows
        arguments[7], arguments[8] = addend, total
        kernels.norm_kernel(x.dtype)(arguments, kernels.threads_for(num_rows))


class FusedMLP(nn.Module):
    """A gated MLP: down(activation(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str) -> None:
        super().__init__()
        if gate.out_features != up.out_features:
            raise ValueError(f"the gate has {gate.out_features} features and what it gates {up.out_features}")
        self.gate_up = JoinedLinear([gate, up])
        self.down = JoinedLinear([down])
        self._arguments = np.zeros(kernels.GATE_ARGUMENTS, dtype=np.int64)
        self._arguments[4] = gate.out_features
        self._arguments[5] = kernels.ACTIVATIONS.index(activation)
        self._products = self.gate_up, self.down

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        gate_up, down = self._products
        both = gate_up.forward(x)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        arguments = self._arguments
        num_rows = both.numel() // both.shape[-1]
        arguments[1], arguments[2], arguments[3] = both.data_ptr(), out.data_ptr(), num_rows
        kernels.gate_kernel(both.dtype)(arguments, kernels.threads_for(num_rows))
        return down.forward(out)


@dataclass(slots=True)
class HeadNorms:
    """The norms of each head's queries and keys, alike but for their weights [k_dim]."""

    query: Tensor
    key: Tensor
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
        norms: HeadNorms | None,
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
        self.scalars = np.array([norms.epsilon, norms.offset] if norms else [0, 0], dtype=np.float32)
        arguments = self._arguments = np.zeros(kernels.HEADS_ARGUMENTS, dtype=np.int64)
        arguments[kernels.SCALARS] = self.scalars.ctypes.data
        arguments[kernels.NUM_HEADS], arguments[kernels.NUM_KV_HEADS] = shape.num_heads, shape.num_kv_heads
        arguments[kernels.K_DIM], arguments[kernels.V_DIM] = shape.k_dim, shape.v_dim
        for place in (kernels.QUERY_STRIDE, kernels.KEY_STRIDE, kernels.VALUE_STRIDE):
            arguments[place] = self.qkv.out_features
        arguments[kernels.QUERY_HEAD_STRIDE] = arguments[kernels.KEY_HEAD_STRIDE] = shape.k_dim
        arguments[kernels.VALUE_HEAD_STRIDE] = shape.v_dim
        self._products = self.qkv, self.output

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *_: Any,
        keep: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """[1, T, hidden] and (cos, sin) [1, T, rotary_dim] -> [1, T, hidden], or [1, r, hidden] of the tokens to keep.

        Keys and values are those of all tokens, in any case.
        """
        backend, plan, keys, values = self.layer.step()
        to_qkv, to_output = self._products
        qkv = to_qkv.forward(hidden_states)
        num_tokens = qkv.shape[1]
        query = qkv.new_empty(num_tokens, self.num_heads, self.k_dim)
        arguments = self._arguments
        address, size = qkv.data_ptr(), qkv.element_size()
        arguments[kernels.QUERY] = address
        arguments[kernels.KEY] = address + size * self._key_at
        arguments[kernels.VALUE] = address + size * self._value_at
        arguments[kernels.QUERY_OUT] = query.data_ptr()
        if self._norms is not None:
            arguments[kernels.QUERY_NORM] = self._norms.query.data_ptr()
            arguments[kernels.KEY_NORM] = self._norms.key.data_ptr()
        if self.rotary:
            assert position_embeddings is not None
            cos, sin = position_embeddings
            if not cos.dtype is sin.dtype is qkv.dtype:
                cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
            cos, sin = cos.contiguous(), sin.contiguous()
            if cos.shape != sin.shape or cos.shape[:2] != (1, num_tokens) or cos.shape[-1] > self.k_dim:
                raise ValueError(
                    f"rotary embeddings {tuple(cos.shape)} for {num_tokens} tokens and {self.k_dim} a head"
                )
            arguments[kernels.COS], arguments[kernels.SIN] = cos.data_ptr(), sin.data_ptr()
            arguments[kernels.ROTARY_DIM] = cos.shape[-1]
        cast(FusedAttentionBackend, backend).write_heads(plan, arguments, qkv.dtype, keys, values)
        attended = backend.attend(plan, query, keys, values, **self.options)
        attended = attended.view(1, num_tokens, -1)
        return to_output.forward(attended if keep is None else attended[:, keep]), None


class FusedLayer(nn.Module):
    """A decoder layer of fused parts: x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, first_norm: FusedNorm, attention: FusedAttention, second_norm: FusedNorm, mlp: FusedMLP) -> None:
        super().__init__()
        self.first_norm = first_norm
        self.attention = attention
        self.second_norm = second_norm
        self.mlp = mlp
        self.context: AttentionContext | None = None
        """Of a model's last layer: says which tokens' outputs are needed. The others need keys and values only."""
        self._parts = first_norm, attention, second_norm, mlp

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden], or fewer, see `context`; further arguments are those of the attention."""
        keep = None if self.context is None else self.context.keep
        position_embeddings = keywords.get("position_embeddings")
        first_norm, attention, second_norm, mlp = self._parts
        x = hidden_states.contiguous()
        attended, _ = attention.forward(first_norm.forward(x), position_embeddings, keep=keep)
        if keep is not None:
            x = x[:, keep]
        x, normed = second_norm.add_and_norm(x, attended)
        return x.add_(mlp.forward(normed))
