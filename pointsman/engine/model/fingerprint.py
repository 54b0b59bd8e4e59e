"""Computes a model's fingerprint: two engines have equal fingerprints only if they compute the same keys and values.

A fingerprint is a SHA-256 digest over the model's configuration and the bytes of every weight in memory, so it also
changes when weights are changed in memory. A model with fused layers or 8-bit weights has another fingerprint than the
plain model, because its keys and values differ in the last bits. Hashing runs at about a gigabyte a second.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.kv.pool import as_bytes
from pointsman.engine.model.linear import JoinedLinear

if TYPE_CHECKING:
    from pointsman.engine.model.loaded import LoadedModel

IGNORED_ENTRIES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")
"""Entries of a configuration that do not affect the computation. Dtypes are hashed with the weights."""


def model_fingerprint(loaded: LoadedModel) -> bytes:
    """The fingerprint of a model, 32 bytes. The weights must not change while it is computed.

    Raises:
        UnsupportedModel: some weights could not be found, so the model might be confused with another model.
    """
    digest = hashlib.sha256()
    config = loaded.config.to_dict()
    known = {name: value for name, value in config.items() if name not in IGNORED_ENTRIES}
    digest.update(json.dumps(known, sort_keys=True, default=repr).encode())
    seen: set[int] = set()
    num_elements = 0
    for name, tensor, source in _tensors(loaded.model):
        is_copy = source in ("joined", "scales")  # a copy's memory is reused, so its address is no identity
        is_new = is_copy or tensor.data_ptr() not in seen
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {is_new}".encode())
        if is_new:  # tied embeddings are one tensor with two names
            if not is_copy:
                seen.add(tensor.data_ptr())
            if source in ("weight", "joined"):
                num_elements += tensor.numel()
            digest.update(as_bytes(tensor))
    if num_elements < loaded.num_parameters:
        raise UnsupportedModel(
            f"the model's fingerprint covers {num_elements:,} of {loaded.num_parameters:,} weights, so a KV store "
            "could confuse it with another model; load it with fuse=False"
        )
    return digest.digest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Literal["weight", "buffer", "joined", "scales"]]]:
    """Yield the name, the tensor and the kind of every tensor in the model's modules. A tensor of a `JoinedLinear` may
    be a temporary copy of a weight that the layer stores in another form."""
    for path, module in model.named_modules():
        if isinstance(module, JoinedLinear):
            for name, tensor in sorted(module.plain_weights().items()):
                yield f"{path}.{name}", tensor, "scales" if name == "scales" else "joined"
            continue
        for name, tensor in sorted(module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}", tensor, "buffer"
        for name, value in sorted({**vars(module), **module._parameters}.items()):
            for suffix, tensor in _tensors_in(value):
                yield f"{path}.{name}{suffix}", tensor, "weight"


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (suffix, tensor) for an attribute of a module: the value itself with an empty suffix if the value is a
    tensor, or each tensor in the (nested) fields of a dataclass, with the field's name as suffix."""
    if isinstance(value, Tensor):
        yield "", value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            for suffix, tensor in _tensors_in(getattr(value, one.name, None)):
                yield f".{one.name}{suffix}", tensor
