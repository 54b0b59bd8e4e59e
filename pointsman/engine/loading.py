"""What an `Engine` runs: a model, and the attention that computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pointsman.engine.model.backends import attention_of
from pointsman.engine.model.loader import LoadedModel, load_model

if TYPE_CHECKING:
    from pointsman.engine.attention.paged import AttentionBackend
    from pointsman.engine.model.backends import AttentionChoice


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
