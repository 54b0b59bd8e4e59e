"""Runs one forward pass of a transformers model over a flat batch of tokens, for the checks and the runner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.loaded import LoadedModel


def run_model(
    model: Any, token_ids: Tensor, positions: Tensor, keep: Tensor | None, num_rows: int | None = None
) -> Tensor:
    """Run one forward pass over a flat batch of t tokens.

    Args:
        token_ids, positions: [t] int64: input tokens, and their positions within their sequences.
        keep: [r] int64: indices of the tokens whose logits are returned; None: all tokens.
        num_rows: number of rows to compute, at least t. The rows beyond t repeat the last token and are not in the
            result. Only for attention backends that skip these rows.

    Returns:
        [r or t, vocab_size] logits.
    """
    num_tokens = len(token_ids)
    if num_rows is not None:
        token_ids, positions = repeat_last(token_ids, num_rows), repeat_last(positions, num_rows)
    options: dict[str, Any] = {}
    selects = keep is not None and can_select_logits(type(model).forward)
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
    if keep is None:
        return logits[:num_tokens]
    return logits if selects else logits[keep]


def run_paged(
    loaded: LoadedModel,
    pool: KVPool,
    backend: AttentionBackend,
    plans: Sequence[Any],
    token_ids: Tensor,
    positions: Tensor,
    keep: Tensor | None,
    num_rows: int | None = None,
) -> Tensor:
    """Run `run_model` with paged attention: the step's KV is written to the pool, and read from the pool.

    Args:
        plans: the backend's plan for each group of layers.
        token_ids, positions, keep, num_rows: see `run_model`. The last layer computes only the tokens of `keep`, if the
            model supports that.
    """
    early, late = (keep, None) if loaded.drops_tokens_early else (None, keep)
    context = loaded.context
    try:
        context.begin(plans, pool, backend, early)
        return run_model(loaded.model, token_ids, positions, late, num_rows)
    finally:
        context.end()


def repeat_last(values: Tensor, length: int) -> Tensor:
    """Values [n] -> [length]: the values, then repetitions of the last value. An empty tensor stays empty."""
    more = length - len(values)
    return torch.cat([values, values[-1:].expand(more)]) if more > 0 and len(values) else values


@cache
def can_select_logits(forward: Callable[..., Any]) -> bool:
    """Whether the `forward` of a model's class can compute only the logits of selected tokens, as in nearly all
    models."""
    return "logits_to_keep" in inspect.signature(forward).parameters
