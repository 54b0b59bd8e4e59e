"""What an `Engine` is made of: a model with its attention, and the number of KV blocks. Nothing is allocated for the
blocks here, so that a setting that cannot be used is refused before memory is taken for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pointsman.engine.backends import attention_of
from pointsman.engine.kv_pool import choose_num_blocks
from pointsman.engine.model_loader import LoadedModel, load_model

if TYPE_CHECKING:
    import torch

    from pointsman.engine.attention import AttentionBackend
    from pointsman.engine.backends import AttentionChoice


def load_with_attention(
    model: str | Path | LoadedModel | None,
    dtype: str,
    attention: AttentionChoice | AttentionBackend,
    *,
    max_model_len: int | None,
    device: str,
    fuse: bool,
    quantization: str | None,
) -> tuple[LoadedModel, AttentionBackend]:
    """The model, loaded if it is not yet, and the backend that computes its attention. All arguments are `Engine`'s.

    Raises:
        ModelLoadError, UnsupportedModel: the model cannot be read, or not be run correctly.
        ValueError: an option is unknown, or cannot be chosen for this model any more.
    """
    if isinstance(model, LoadedModel):
        if (device, fuse, quantization) != ("auto", True, None):
            raise ValueError("the model is loaded already; give device, fuse and quantization to load_model")
        return model, attention_of(model, attention)
    if not isinstance(attention, str) and not callable(attention):
        raise ValueError("attention is a backend object, which fits one model; load that with load_model first")
    loaded = load_model(
        model,
        dtype,
        device=device,
        max_model_len=max_model_len,
        attention=attention,
        fuse=fuse,
        quantization=quantization,
    )
    return loaded, loaded.attention


def choose_pool_size(
    loaded: LoadedModel,
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """How many blocks of `block_size` tokens the KV pool has.

    Raises:
        ValueError: what it depends on is out of range, or two settings contradict each other.
    """
    # `SchedulerConfig` checks these two, but only together with the pool's size, which depends on them.
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    return choose_num_blocks(
        loaded.layers,
        num_blocks=num_blocks,
        kv_cache_bytes=kv_cache_bytes,
        block_size=block_size,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
