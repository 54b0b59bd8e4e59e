"""Checks that a model computes correctly on the paged path, and refuses it otherwise.

Wrong logits would look like a bad model, so a model is used only after three checks:

1. `check_config` refuses models that cannot work by construction: encoder-decoders, recurrent or hybrid layers, layers
   that share KV, and rotary embeddings whose frequencies depend on the length of the batch. (transformers reads the
   largest position of the WHOLE batch, so one request would change another's output.) One such kind of embedding,
   "longrope", only chooses between two sets of frequencies. `fix_longrope` chooses one set when the model is loaded.
2. `probe_layers` runs a few tokens with an attention function that only records its calls. Every layer must call it
   exactly once. A model that computes attention in its own code (ALiBi models do) never calls it. The recorded KV heads
   and widths of each layer also size the pool.
3. `SelfCheck` (in `self_check.py`) runs a ragged batch of chunks and decodes over a small pool of shuffled blocks, and
   compares every logit with a plain forward pass of transformers. It finds the errors that the first two checks miss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pointsman.engine.attention.paged import (
    AttentionContext,
    PagedLayer,
    set_handler,
)
from pointsman.engine.errors import UnsupportedModel, first_line
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.model.forward import run_model

logger = logging.getLogger(__name__)

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings whose frequencies are fixed when the model is built."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT = "its frequencies depend on the longest sequence in the batch, so requests would change each other"


# ------------------------------------------------------------------------------------------------ 1. configuration


def check_config(config: Any) -> None:
    """Refuse a configuration of a model that the paged path cannot compute.

    Raises:
        UnsupportedModel: a part of the model is not supported; the message names the part and the reason.
    """
    text = config.get_text_config(decoder=True)
    name = config.model_type
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only models can run here")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(f"{name} has quantized weights; use the unquantized model")
    for rope_type in rope_types(text):
        if rope_type != "longrope":  # `fix_longrope` checks longrope after the model is loaded
            check_rope_type(name, rope_type)
    other = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if other:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(other)}; only full and sliding-window attention can run here"
        )
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedModel(
            f"{name} has {shared} layers that use the KV of other layers; only models in which "
            "each layer has its own KV can run here"
        )
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(f"{name} attends within chunks of {text.attention_chunk_size}, which is not supported")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{name} attends in both directions; only causal models can run here")


def rope_types(config: Any) -> list[str]:
    """The types of rotary embeddings that a configuration names: one type, one for each layer type, or none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [str(one.get("rope_type", one.get("type", "default"))) for one in nested or [parameters]]


def check_rope_type(name: str, rope_type: str) -> None:
    """Refuse a type of rotary embedding, unless its frequencies are known to be independent of the batch."""
    if rope_type in ROPE_TYPES:
        return
    why = LENGTH_DEPENDENT if rope_type in ("dynamic", "longrope") else "it is not among the types known to be safe"
    raise UnsupportedModel(
        f"{name} uses the rotary embedding {rope_type!r}: {why}; supported are {', '.join(sorted(ROPE_TYPES))}"
    )


def fix_longrope(model: Any, max_model_len: int | None) -> int | None:
    """Choose one of the two sets of frequencies of a "longrope" model permanently; returns the model's maximum length.

    Such a model has a short set of frequencies for sequences up to its original length, and a long set for longer
    sequences. transformers chooses one of the sets again in every forward pass. If `max_model_len` is at most the
    original length, all requests get the short set, as in transformers. Otherwise all requests get the long set. The
    long set is right for a prompt above the original length. transformers would run a shorter sequence with the short
    set until it exceeds the original length, and then recompute the whole sequence.

    Args:
        max_model_len: maximum number of tokens of a request's sequence; None: the original length.

    Returns:
        Maximum number of tokens of a sequence with the chosen set; None if the model has no such embedding.

    Raises:
        UnsupportedModel: the model does not choose its frequencies in this way.
    """
    config = model.config.get_text_config(decoder=True)
    name = model.config.model_type
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    if not modules:
        return None
    original = int(config.rope_parameters["original_max_position_embeddings"])
    longest = int(config.max_position_embeddings)
    is_long = max_model_len is not None and max_model_len > original
    for module in modules:
        short = getattr(module, "original_inv_freq", None)
        if not isinstance(short, Tensor):
            check_rope_type(name, "longrope")
        frequencies = short
        if is_long:
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, model.device, seq_len=original + 1)
        module.inv_freq.copy_(frequencies)
        module.rope_type = "default"  # with this type, transformers does not choose frequencies
        _check_frequencies_are_fixed(name, module, original, config)
    if is_long:
        logger.warning(
            "%s: all requests use the rotary frequencies for more than %d tokens, also shorter ones, for which "
            "transformers uses the short frequencies. Set max_model_len to %d or less to use the short frequencies",
            name,
            original,
            original,
        )
        return longest
    return min(original, longest)


def _check_frequencies_are_fixed(name: str, module: nn.Module, original: int, config: Any) -> None:
    """Refuse a rotary module whose angles depend on the largest position of the batch, although one set of frequencies
    was chosen."""
    frequencies = module.get_buffer("inv_freq")
    hidden = frequencies.new_zeros(1, 1, config.hidden_size)
    positions = torch.tensor([[0, 1, 2, original + 1]], device=frequencies.device)
    with torch.inference_mode():
        alone = module(hidden, positions[:, :3])
        beside = module(hidden, positions)
    if any(not torch.equal(one, other[:, :3]) for one, other in zip(alone, beside, strict=True)):
        check_rope_type(name, "longrope")


# ------------------------------------------------------------------------------------------------------- 2. probe


@dataclass(slots=True)
class ProbedLayer:
    """One attention module, with the shape of its KV and its sliding window, as `probe_layers` recorded them."""

    module: nn.Module
    shape: LayerShape
    window: int | None


class _Recorder:
    """The attention handler that `probe_layers` sets: it returns zeros for each call, and records the calling
    module."""

    def __init__(self) -> None:
        self.layers: list[ProbedLayer] = []
        self.masks = 0

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        self.masks += options.get("attention_mask") is not None
        shape = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], query.shape[1])
        self.layers.append(ProbedLayer(module, shape, options.get("sliding_window")))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def probe_layers(model: Any) -> list[ProbedLayer]:
    """The model's attention layers, in the order in which they run.

    Raises:
        UnsupportedModel: a layer does not call transformers' attention interface, or calls it more than once.
    """
    config = model.config.get_text_config(decoder=True)
    name = model.config.model_type
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
            if isinstance(kind, str):
                check_rope_type(name, kind)
    recorder = _Recorder()
    for module in model.modules():
        set_handler(module, recorder)
    expected = config.num_hidden_layers
    seen = recorder.layers
    try:
        run_model(model, torch.tensor([1, 2, 3]), torch.arange(3), keep=None)
    except Exception as error:
        raise UnsupportedModel(
            f"{name}: a forward pass with replaced attention failed ({type(error).__name__}: {first_line(error)}), "
            f"after {len(seen)} of {expected} layers called transformers' attention interface; only models that "
            "compute masks and attention through that interface can run here"
        ) from error
    finally:
        for module in model.modules():
            set_handler(module, None)
    if len(seen) != expected or len({id(layer.module) for layer in seen}) != expected:
        raise UnsupportedModel(
            f"{name}: {len({id(layer.module) for layer in seen})} of {expected} layers called transformers' attention "
            f"interface, in {len(seen)} calls; each layer must call it once, because paged attention cannot replace "
            "attention that a layer computes in its own code (ALiBi, linear attention, state-space layers)"
        )
    if recorder.masks:
        raise UnsupportedModel(f"{name} builds attention masks of its own, which paged attention would ignore")
    _check_windows(name, config, seen)
    return seen


def _check_windows(name: str, config: Any, layers: list[ProbedLayer]) -> None:
    """Refuse a model whose sliding window is only in the attention mask, and no argument of the attention call: the
    paged path ignores masks."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window and not kinds and not any(layer.window for layer in layers):
        raise UnsupportedModel(
            f"{name}: no layer passes its sliding window of {window} to the attention function, so paged attention "
            "would ignore the window"
        )
    for index, layer in enumerate(layers):
        slides = kinds[index] == "sliding_attention" if kinds else False
        if slides and not layer.window:
            raise UnsupportedModel(
                f"{name}: layer {index} has a sliding window of {window} but does not pass it to the attention "
                "function, so paged attention would ignore the window"
            )


# --------------------------------------------------------------------------------------------------- shared parts


def attach_paged_attention(layers: list[ProbedLayer]) -> AttentionContext:
    """Set a paged attention handler for every attention module; returns the context that all these handlers share,
    which will hold the plans and the pool of the current step."""
    context = AttentionContext()
    for index, layer in enumerate(layers):
        set_handler(layer.module, PagedLayer(context, index, layer.shape))
    return context
