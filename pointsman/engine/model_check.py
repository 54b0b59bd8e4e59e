"""Whether a model computes correctly on the paged path: what is refused by its configuration, a probe, a self-check.

A wrong answer from a model that was let in would look like a bad model, so a model must earn its way in:

1. `check_config` refuses what cannot work by construction: encoder-decoders, recurrent or hybrid layers, layers that
   share KV, and rotary embeddings whose frequencies depend on the length of the batch (transformers reads the
   largest position of the WHOLE batch, so one request would change another's).
2. `probe_layers` runs a few tokens with an attention function that only records. Every layer must ask for attention
   exactly once; a model that computes attention on its own (ALiBi models do) never calls it. What it records,
   KV heads and widths per layer, also sizes the pool.
3. `self_check` runs a ragged batch of chunks and decodes over a small pool of shuffled blocks and compares every
   logit with a plain forward pass of transformers. Whatever the first two overlooked shows here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pointsman.engine.attention import ATTENTION_NAME, AttentionContext, PagedBatch, PagedLayer, set_handler
from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.kv_pool import KVPool, LayerShape, blocks_for
from pointsman.engine.torch_attention import TorchAttention

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies are fixed when the model is built."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT = "its frequencies depend on the longest sequence in the batch, so requests would change each other"

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest allowed error of logits in the self-check, relative to their spread over the vocabulary."""


# ------------------------------------------------------------------------------------------------ 1. configuration


def check_config(config: Any) -> None:
    """Refuse configurations that the paged path cannot compute.

    Raises:
        UnsupportedModel: says which part, and why.
    """
    text = config.get_text_config(decoder=True)
    name = config.model_type
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only models can run here")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(f"{name} has quantized weights; use the unquantized model")
    for rope_type in rope_types(text):
        check_rope_type(name, rope_type)
    other = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if other:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(other)}; only full and sliding-window attention can run here"
        )
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedModel(f"{name} has {shared} layers that share the KV of others, which the KV pool cannot hold")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(f"{name} attends within chunks of {text.attention_chunk_size}, which is not supported")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{name} attends in both directions; only causal models can run here")


def rope_types(config: Any) -> list[str]:
    """The rotary types that a configuration names: one, one per layer type, or none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [str(one.get("rope_type", one.get("type", "default"))) for one in nested or [parameters]]


def check_rope_type(name: str, rope_type: str) -> None:
    """Refuse a rotary type that is not known to be independent of the batch."""
    if rope_type in ROPE_TYPES:
        return
    why = LENGTH_DEPENDENT if rope_type in ("dynamic", "longrope") else "it is not among the types known to be safe"
    raise UnsupportedModel(
        f"{name} uses the rotary embedding {rope_type!r}: {why}; supported are {', '.join(sorted(ROPE_TYPES))}"
    )


# ------------------------------------------------------------------------------------------------------- 2. probe


@dataclass(slots=True)
class ProbedLayer:
    """One attention module as the probe saw it."""

    module: nn.Module
    shape: LayerShape
    window: int | None


class _Recorder:
    """Answers attention calls with zeros and notes who called."""

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
        UnsupportedModel: a layer does not use the attention interface, or one does more than once.
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
    try:
        run_model(model, torch.tensor([1, 2, 3]), torch.arange(3), keep=None)
    finally:
        for module in model.modules():
            set_handler(module, None)
    expected = config.num_hidden_layers
    seen = recorder.layers
    if len(seen) != expected or len({id(layer.module) for layer in seen}) != expected:
        raise UnsupportedModel(
            f"{name}: {len({id(layer.module) for layer in seen})} of {expected} layers asked transformers' attention "
            f"interface for attention, in {len(seen)} calls; each must once, because what computes attention on its "
            "own (ALiBi, linear attention, state-space layers) never sees the paged KV"
        )
    if recorder.masks:
        raise UnsupportedModel(f"{name} builds attention masks of its own, which the paged path would ignore")
    _check_windows(name, config, seen)
    return seen


def _check_windows(name: str, config: Any, layers: list[ProbedLayer]) -> None:
    """A window that the model applies through a mask only would be lost: each must arrive as an argument."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window and not kinds and not any(layer.window for layer in layers):
        raise UnsupportedModel(
            f"{name}: its sliding window of {window} is handed to no layer's attention function, so the paged path "
            "would ignore it"
        )
    for index, layer in enumerate(layers):
        slides = kinds[index] == "sliding_attention" if kinds else False
        if slides and not layer.window:
            raise UnsupportedModel(
                f"{name}: layer {index} has a sliding window of {window} but does not hand it to the attention "
                "function, so the paged path would ignore it"
            )


# -------------------------------------------------------------------------------------------------- 3. self-check


def self_check(model: Any, layers: list[ProbedLayer], context: AttentionContext) -> None:
    """Compare the paged path with a plain forward pass.

    Three sequences share four steps over a pool of shuffled blocks, so that steps mix first chunks, later chunks and
    single tokens.

    Raises:
        UnsupportedModel: the logits differ by more than rounding.
    """
    sequences, steps = _check_plan(model)
    plain = [_plain_logits(model, sequence) for sequence in sequences]
    paged = _paged_logits(model, layers, context, sequences, steps)
    errors = torch.cat([relative_error(got, want) for got, want in zip(paged, plain, strict=True)])
    dtype = model.dtype
    # In float32 every position must agree. In a narrow type, rounding may tip an expert's choice: the median must.
    error = float(errors.max() if dtype == torch.float32 else errors.median())
    if not error <= TOLERANCE[dtype]:
        raise UnsupportedModel(
            f"{model.config.model_type}: logits of the paged path differ from transformers' own by {error:.2g} of "
            f"their spread (at most {TOLERANCE[dtype]} is rounding); some part of this model is not computed per token"
        )


def relative_error(got: Tensor, want: Tensor) -> Tensor:
    """[t] largest difference of each row of logits [t, vocab_size], relative to the row's standard deviation."""
    difference = (got.float() - want.float()).abs().amax(dim=-1)
    return difference / want.float().std(dim=-1).clamp(min=1e-6)


def _check_plan(model: Any) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Token sequences, and per step how many tokens of each are computed."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 64
    steps: list[tuple[int, ...]] = [(13, 21, 0), (19, 1, 6), (1, 1, 3), (4, 1, 1)]
    if longest < sum(step[0] for step in steps):
        steps = [(2, 1, 0), (1, 1, 1), (1, 1, 1)]
    lengths = [sum(step[row] for step in steps) for row in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths], steps


def _plain_logits(model: Any, token_ids: Tensor) -> Tensor:
    with plain_attention(model):
        return run_model(model, token_ids, torch.arange(len(token_ids)), keep=None)


def _paged_logits(
    model: Any,
    layers: list[ProbedLayer],
    context: AttentionContext,
    sequences: list[Tensor],
    steps: list[tuple[int, ...]],
) -> list[Tensor]:
    """Logits of every position of every sequence, computed step by step over a small pool."""
    block_size = 4
    per_row = blocks_for(max(len(sequence) for sequence in sequences), block_size)
    shapes = [layer.shape for layer in layers]
    pool = KVPool(shapes, num_blocks=3 * per_row, block_size=block_size, dtype=model.dtype, device=model.device)
    # Shuffled by a stride that has no factor in common with the count, so that a row's blocks lie apart.
    tables = (np.arange(3 * per_row) * (3 * per_row - 1) % (3 * per_row)).reshape(per_row, 3).T
    backend = TorchAttention(shapes, model.device)
    computed = np.zeros(3, dtype=np.int64)
    collected: list[list[Tensor]] = [[], [], []]
    for step in steps:
        counts = np.array(step)
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], computed[rows], tables[rows], block_size, model.device)
        token_ids = torch.cat([sequences[row][computed[row] : computed[row] + counts[row]] for row in rows])
        context.begin(batch, pool, backend)
        try:
            logits = run_model(model, token_ids, torch.from_numpy(batch.positions), keep=None)
        finally:
            context.end()
        for row, part in zip(rows.tolist(), torch.split(logits, counts[rows].tolist()), strict=True):
            collected[row].append(part)
        computed += counts
    return [torch.cat(parts) for parts in collected]


# --------------------------------------------------------------------------------------------------- shared parts


def attach(layers: list[ProbedLayer]) -> AttentionContext:
    """Give every attention module its paged handler; the context says what they attend over."""
    context = AttentionContext()
    for index, layer in enumerate(layers):
        set_handler(layer.module, PagedLayer(context, index))
    return context


def run_model(model: Any, token_ids: Tensor, positions: Tensor, keep: Tensor | None) -> Tensor:
    """One forward pass over a flat batch.

    Args:
        token_ids, positions: [t] int64.
        keep: [r] int64, the rows whose logits are wanted; None: all.

    Returns:
        [r or t, vocab_size] logits.
    """
    options: dict[str, Any] = {}
    selects = keep is not None and takes_logits_to_keep(model)
    if selects:
        options["logits_to_keep"] = keep
    with torch.inference_mode():
        output = model(
            input_ids=token_ids[None].to(model.device),
            position_ids=positions[None].to(model.device),
            use_cache=False,
            **options,
        )
    logits: Tensor = output.logits[0]
    return logits if keep is None or selects else logits[keep]


def takes_logits_to_keep(model: Any) -> bool:
    """Whether the model can be asked for some rows' logits only; nearly all can."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Run the model with transformers' own eager attention meanwhile."""
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = ATTENTION_NAME
