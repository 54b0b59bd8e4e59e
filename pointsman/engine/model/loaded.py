"""LoadedModel: a model that passed its checks, with the properties that loading has determined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pointsman.engine.attention.paged import AttentionBackend, AttentionContext
from pointsman.engine.kv.layout import LayerShape


@dataclass(slots=True)
class LoadedModel:
    """A model that passed its checks, ready for a `ModelRunner`."""

    path: str
    model: Any
    """The transformers model, in evaluation mode. Its attention is computed through `context`."""
    config: Any
    """transformers' configuration of the model's text part."""
    tokenizer: Any | None
    """The model's tokenizer; None: the model has no tokenizer, so prompts must be token ids."""
    layers: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]
    """For each layer, the number of tokens to which a token attends, itself included; None: no limit."""
    context: AttentionContext
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end a text: the tokenizer's EOS first, then the EOS tokens of the generation settings."""
    generation_defaults: Mapping[str, Any]
    """The model's recommended sampling parameters, by their names in `SamplingParams`. Parameters that a request sets
    have priority."""
    max_position_embeddings: int | None
    """Maximum number of tokens of a sequence for the model as it was loaded; None: its configuration names no
    maximum."""
    attention: AttentionBackend
    """The attention backend with which the model was checked."""
    fused: dict[str, int]
    """Number of parts of each kind that were replaced by faster parts. The new parts need the backend `attention`."""
    drops_tokens_early: bool
    """Whether the model's last layer skips the tokens whose logits are not needed."""
    num_parameters: int

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Number of rows of the input embedding; token ids must be below this number."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def choose_max_model_len(self, max_model_len: int | None) -> int:
        """Maximum number of tokens of a sequence: `max_model_len`, or, if it is None, the model's own maximum.

        Raises:
            ValueError: the model cannot run a sequence of this length, or its configuration names no maximum.
        """
        longest = self.max_position_embeddings
        if max_model_len is None:
            if longest is None:
                raise ValueError(f"the model in {self.path} names no maximum length of a sequence; give max_model_len")
            return longest
        if not isinstance(max_model_len, int) or max_model_len < 1:
            raise ValueError(f"max_model_len is {max_model_len!r}; it must be an integer of at least 1")
        if longest is not None and max_model_len > longest:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the model allows at most {longest} tokens; lower max_model_len"
            )
        return max_model_len
