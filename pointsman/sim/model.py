"""Model shapes: the dimensions of a model, the bytes that it reads and the FLOPs that it computes.

Supported are decoders of the Llama family and its descendants: gated MLPs (three matrices), mixtures of experts with
shared experts and leading dense layers, grouped-query or multi-head latent attention, sliding windows in some layers,
quantised weights. Biases and norms are left out; they are under 0.1 % of any built-in shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Storage of a model's quantised weights."""

    method: str
    """Name of the method, as in the config's `quant_method`: "awq", "fp8", ..."""
    bits: float
    """Bits per quantised weight, scales and zero points included."""
    covers: Literal["linear", "experts"] = "linear"
    """Which matrices are quantised. "linear": all matrices of the layers. "experts": only the matrices of routed
    experts. Embeddings and output head are never quantised."""
    computes_in: Literal["bf16", "fp8", "int8"] = "bf16"
    """Dtype of the products. "bf16": weights are converted as they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder. Counts are for the whole model, without parallelism."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Inner size of the dense layers' MLP; 0 if every layer has experts."""
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens that the model can hold, prompt and output together."""
    source: str
    """Source of these values, such as the model's `config.json`."""
    tied_embeddings: bool = False
    """Whether the output head is the embedding matrix."""
    dtype_bytes: int = 2
    """Bytes of a weight that is not quantised, and of an activation."""
    quantization: Quantization | None = None
    num_other_params: int = 0
    """Parameters that occupy memory but that a text step does not read, such as a vision encoder's."""

    num_experts: int = 0
    """Number of routed experts of a layer; 0: the layers are dense."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    """Inner size of a routed expert, and of a shared one."""
    num_shared_experts: int = 0
    """Number of experts of a layer that every token uses."""
    num_dense_layers: int = 0
    """Number of layers with a dense MLP in a mixture of experts."""

    kv_lora_rank: int = 0
    """Multi-head latent attention: size of the latent in the KV cache; 0: grouped-query attention. The three sizes
    below apply only to latent attention, and `num_kv_heads` only to grouped-query attention."""
    q_lora_rank: int = 0
    """Rank of the queries' low-rank projection; 0: queries have none."""
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0

    sliding_window: int = 0
    """Positions that a windowed layer attends to, the token's own included; 0: no layer has a window."""
    num_windowed_layers: int = 0

    # ------------------------------------------------------------------ parameters

    @property
    def attention_params(self) -> int:
        """Number of weights in one layer's attention."""
        hidden, heads = self.hidden_size, self.num_heads
        if not self.kv_lora_rank:
            return hidden * self.head_dim * 2 * (heads + self.num_kv_heads)
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        return (
            (hidden * rank + rank * query if rank else hidden * query)
            + hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
            + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
            + heads * self.v_head_dim * hidden
        )

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_params(self) -> int:
        """Number of weights in one routed expert of one layer."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def common_params(self) -> int:
        """Number of weights that every token uses, in all layers: without routed experts, embeddings and output
        head."""
        dense = (self.num_layers - self.num_expert_layers) * 3 * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.num_experts
        shared = self.num_shared_experts * self.expert_params
        return self.num_layers * self.attention_params + dense + self.num_expert_layers * (router + shared)

    @property
    def routed_params(self) -> int:
        """Number of weights in all routed experts of all layers."""
        return self.num_expert_layers * self.num_experts * self.expert_params

    @property
    def head_params(self) -> int:
        """Number of weights in the output head; the embedding matrix has the same number."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Number of all parameters, embeddings and `num_other_params` included."""
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return self.common_params + self.routed_params + embeddings + self.num_other_params

    @property
    def num_active_params(self) -> int:
        """Number of parameters that one token's forward pass multiplies with, output head included. The embedding
        matrix is not included: a token only looks up one row of it."""
        routed = self.num_expert_layers * self.experts_per_token * self.expert_params
        return self.common_params + routed + self.head_params

    # ------------------------------------------------------------------ bytes

    @property
    def common_bytes(self) -> float:
        """Bytes of `common_params`."""
        all_linear = self.quantization is not None and self.quantization.covers == "linear"
        return self.common_params * (self._quantised_bytes if all_linear else self.dtype_bytes)

    @property
    def expert_bytes(self) -> float:
        """Bytes of `expert_params`: one routed expert of one layer."""
        return self.expert_params * self._quantised_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of `head_params`."""
        return self.head_params * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        routed = self.num_expert_layers * self.num_experts * self.expert_bytes
        embeddings = self.head_bytes * (1 if self.tied_embeddings else 2)
        return round(self.common_bytes + routed + embeddings + self.num_other_params * self.dtype_bytes)

    @property
    def _quantised_bytes(self) -> float:
        """Bytes of a weight in the matrices that the quantization covers; bytes of an unquantised weight if the model
        has no quantization."""
        return self.dtype_bytes if self.quantization is None else self.quantization.bits / 8

    @property
    def num_full_layers(self) -> int:
        """Number of layers that attend to every earlier position."""
        return self.num_layers - self.num_windowed_layers

    def kv_bytes_per_layer(self, kv_dtype_bytes: float = 2, tensor_parallel: int = 1) -> float:
        """Bytes of KV of one token in one layer on one device.

        KV heads are divided among the devices, at least one for each; every device has the whole latent.
        """
        if self.kv_lora_rank:
            return (self.kv_lora_rank + self.qk_rope_head_dim) * kv_dtype_bytes
        return 2 * max(1.0, self.num_kv_heads / tensor_parallel) * self.head_dim * kv_dtype_bytes

    def kv_bytes_per_token(self, kv_dtype_bytes: float = 2, tensor_parallel: int = 1) -> tuple[float, float]:
        """Bytes of KV of one token on one device: in the layers that keep all positions, and in the windowed layers."""
        layer = self.kv_bytes_per_layer(kv_dtype_bytes, tensor_parallel)
        return self.num_full_layers * layer, self.num_windowed_layers * layer

    def activation_bytes(self, tensor_parallel: int = 1) -> float:
        """Bytes that the kernels between a token's matrix products read and write in all layers, on one device.

        In a layer: two normalisations with the residual (each reads and writes two vectors of the hidden size), rotary
        embedding and writing of KV, and the activation function of the MLP (reads two vectors of its inner size, writes
        one). Experts also gather and add up hidden states. What products themselves read and write is not counted:
        kernels overlap it with arithmetic.
        """
        if self.kv_lora_rank:
            query = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
            kv = self.kv_lora_rank + self.qk_rope_head_dim
        else:
            query, kv = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        used = self.experts_per_token + self.num_shared_experts
        inner = self.num_expert_layers * used * self.expert_intermediate_size
        inner += (self.num_layers - self.num_expert_layers) * self.intermediate_size
        whole = 8 * self.num_layers * self.hidden_size + 4 * self.num_expert_layers * used * self.hidden_size
        divided = self.num_layers * (2 * query + 3 * kv) + 3 * inner
        return self.dtype_bytes * (whole + divided / tensor_parallel)

    # ------------------------------------------------------------------ FLOPs

    @property
    def linear_flops(self) -> int:
        """FLOPs of all layers' matrix products for one token: two for each weight that it uses."""
        routed = self.num_expert_layers * self.experts_per_token * self.expert_params
        return 2 * (self.common_params + routed)

    @property
    def head_flops(self) -> int:
        """FLOPs of the output head to compute the logits of one position."""
        return 2 * self.head_params

    @property
    def attention_flops(self) -> int:
        """FLOPs of one layer for one position that a token attends to: scores and weighted sum of values, two each."""
        if self.kv_lora_rank:
            return 2 * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def decode_attention_flops(self) -> int:
        """`attention_flops` of a decode. Latent attention then works on the latents themselves, to read less."""
        if self.kv_lora_rank:
            return 2 * self.num_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)
        return self.attention_flops
