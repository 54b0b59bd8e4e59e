"""Which device, which attention backend, which faster layers: one place for the choice.

| device | attention | layers |
| --- | --- | --- |
| CPU | `numba_attention.py`, compiled | fused and prepacked (`fusion.py`) |
| GPU, or where numba is missing | `torch_attention.py`, plain PyTorch | the model's own |

A further backend (Triton kernels for GPUs, say) is a class with the methods of `AttentionBackend` and a line in
`choose_attention`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.errors import first_line
from pointsman.engine.kv.pool import LayerShape

if TYPE_CHECKING:
    from pointsman.engine.model.loader import LoadedModel
    from pointsman.engine.model.self_check import SelfCheck

logger = logging.getLogger(__name__)

BackendFactory: TypeAlias = Callable[[Sequence[LayerShape], torch.device], AttentionBackend]
"""Makes the attention backend of a model from its layers' shapes and its device; every backend's class is one."""
AttentionChoice: TypeAlias = str | BackendFactory
ATTENTION_NAMES = ("auto", "numba", "torch")


def choose_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if PyTorch sees one, else the CPU.

    Raises:
        ValueError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"device is {name!r}, which cannot be used here ({first_line(error)}); use cpu or auto"
        ) from None
    return device


def choose_attention(
    choice: AttentionChoice, layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The attention backend for a model.

    Raises:
        ValueError: an unknown name, or a backend that cannot run on this device.
    """
    if not isinstance(choice, str):
        return choice(layers, device)
    if choice not in ATTENTION_NAMES:
        raise ValueError(f"attention is {choice!r}; choose one of {', '.join(ATTENTION_NAMES)}, or give a class")
    if choice == "torch" or (choice == "auto" and device.type != "cpu"):
        return TorchAttention(layers, device)
    try:
        from pointsman.engine.attention.numba_backend import NumbaAttention
        from pointsman.engine.kernels.runtime import STORAGE
    except ImportError as error:
        if choice == "numba":
            raise ValueError(f"attention is 'numba', which cannot be imported ({error}); pip install numba") from error
        logger.warning("numba cannot be imported (%s); attention is plain PyTorch, which is slower", error)
        return TorchAttention(layers, device)
    if dtype not in STORAGE:
        if choice == "numba":
            raise ValueError(f"attention is 'numba', which has no kernels for {dtype}; use float32 or bfloat16")
        return TorchAttention(layers, device)
    return NumbaAttention(layers, device)


def fuse_for(model: Any, check: SelfCheck, *, store: bool) -> dict[str, int]:
    """Replace parts of the model by faster ones where the backend has them; how many of each kind.

    Args:
        store: put their weights into their final form; else `linear.store_weights` is to do so.
    """
    if check.backend.name != "numba":
        return {}
    from pointsman.engine.model.fusion import fuse

    with check.first_step() as step:
        return dict(fuse(model, step, store=store))


def drops_early(model: Any, check: SelfCheck) -> bool:
    """Whether the last layer of a fused model leaves out tokens that nobody asks for; it is told to, if it can."""
    from pointsman.engine.model.fusion import drop_tokens_early

    with check.first_step() as step:
        return drop_tokens_early(model, step)


def attention_of(loaded: LoadedModel, attention: AttentionChoice | AttentionBackend) -> AttentionBackend:
    """The attention of a model that is loaded: what it was checked with, or another that its layers can use."""
    if attention == "auto":
        return loaded.attention
    if not (isinstance(attention, str) or callable(attention)):
        backend = attention
    else:
        backend = choose_attention(attention, loaded.layers, loaded.model.device, loaded.dtype)
    if loaded.fused and not hasattr(backend, "write_heads"):
        raise ValueError(
            f"the model was loaded with fused layers, which need its own attention ({loaded.attention.name}) and not "
            f"{backend.name}; load it with fuse=False"
        )
    return backend
