"""Reads generation_config.json and checks the fields of config.json, with errors that name file, field and value.

transformers ignores some wrong values, and reports other wrong values without the file or the field. So the fields that
affect the computation are checked before transformers reads them. Fields that only one family has are left to
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from pointsman.engine.errors import ModelLoadError, first_line
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.text.tokenizer import read_json_object
from pointsman.files import represented

GENERATION_CONFIG = "generation_config.json"
REMEDY = "correct the field, or copy the model's own file again"

# ------------------------------------------------------------------------------------------------- generation

DEFAULTS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json that are used -> their names in `SamplingParams`. `do_sample` is ignored."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The generation settings of a model: the tokens that end texts, and default sampling parameters."""

    eos_token_ids: tuple[int, ...] | None
    """Ids of the tokens that end a text; None: the settings name no such tokens."""
    sampling: Mapping[str, Any]
    """Default sampling parameters, by their names in `SamplingParams`."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], vocab_size: int, source: str = "generation_config") -> GenerationSettings:
        """The settings in the fields of a generation_config.json, or of a `GenerationConfig` as a dict.

        Args:
            fields: values by field name; a field that is None counts as absent.
            vocab_size: token ids must be below it.
            source: name of the file, for error messages.

        Raises:
            ModelLoadError: a field has a wrong type or is out of range.
        """
        sampling = {}
        for field, name in DEFAULTS.items():
            value = fields.get(field)
            if value is None:
                continue
            try:
                SamplingParams(**{name: value})
            except ValueError as error:
                what = str(error).replace(name, field, 1)
                raise ModelLoadError(f"{source}: {what}; {REMEDY}") from None
            sampling[name] = value
        return cls(_eos_token_ids(fields.get("eos_token_id"), vocab_size, source), sampling)


def read_generation_settings(path: Path, config: Any) -> GenerationSettings:
    """The generation settings of a model's directory, from generation_config.json, or, without that file, from
    config.json.

    Args:
        path: the model's directory.
        config: transformers' configuration of the model.

    Raises:
        ModelLoadError: the file cannot be read, or a field has a wrong type or is out of range.
    """
    file, text = path / GENERATION_CONFIG, config.get_text_config(decoder=True)
    if not file.is_file():
        fields = GenerationConfig.from_model_config(config).to_dict()
        return GenerationSettings.of(fields, text.vocab_size, str(path / "config.json"))
    settings = GenerationSettings.of(read_json_object(file), text.vocab_size, str(file))
    try:
        GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelLoadError(f"{file}: {first_line(error)}; {REMEDY}") from error
    return settings


def _eos_token_ids(value: Any, vocab_size: int, source: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token_id in token_ids:
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            raise ModelLoadError(
                f"{source}: eos_token_id is {_shown(value)}; it must be a token id from 0 to {vocab_size - 1}, or a "
                f"list of them; {REMEDY}"
            )
    return token_ids


def choose_eos_token_ids(model: Any, tokenizer: Any | None, settings: GenerationSettings) -> tuple[int, ...]:
    """The tokens that end a text: the tokenizer's EOS first, then the EOS tokens of the generation settings, or, if the
    settings name none, of the model's configuration.

    Raises:
        ModelLoadError: the configuration's eos_token_id is no token id.
    """
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    configured = settings.eos_token_ids
    if configured is None:
        value = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
        configured = _eos_token_ids(value, vocab_size, "config.json") or ()
    own = getattr(tokenizer, "eos_token_id", None)
    if own is None or not 0 <= own < vocab_size:  # the model can never sample an EOS outside its vocabulary
        return tuple(dict.fromkeys(configured))
    return tuple(dict.fromkeys((own, *configured)))


# ------------------------------------------------------------------------------------------------- config.json


def check_fields(content: Mapping[str, Any], file: Path) -> None:
    """Check the fields of a config.json that affect the computation, in its `text_config` as well.

    Raises:
        ModelLoadError: a field has a wrong type or is out of range; the message names file, field and value.
    """
    for prefix, fields in _parts(content):
        for name, (is_right, wanted) in CONFIG_FIELDS.items():
            value = fields.get(name)
            if value is not None and not is_right(value):
                raise ModelLoadError(f"{file}: {prefix}{name} is {_shown(value)}; it must be {wanted}; {REMEDY}")
        for name in ("rope_scaling", "rope_parameters"):
            if fields.get(name) is not None:
                _check_rope(fields[name], f"{file}: {prefix}{name}")


def _parts(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", content
    text = content.get("text_config")
    if isinstance(text, Mapping):
        yield "text_config.", text


def _check_rope(value: Any, place: str) -> None:
    """Refuse rotary settings that transformers would ignore without an error."""
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{place} is {_shown(value)}; it must be an object like {ROPE_EXAMPLE}; {REMEDY}")
    nested = {name: one for name, one in value.items() if isinstance(one, Mapping)}
    for name, one in nested.items():
        _check_rope(one, f"{place}.{name}")
    if not nested:
        _check_rope_scaling(value, place)


def _check_rope_scaling(scaling: Mapping[str, Any], place: str) -> None:
    scales = scaling.keys() - UNSCALED
    kinds = [scaling[name] for name in ("rope_type", "type") if name in scaling]
    if scales and not kinds:
        raise ModelLoadError(
            f"{place} is {_shown(dict(scaling))} and names no rope_type, so nothing would be scaled; add a rope_type, "
            f"as in {ROPE_EXAMPLE}, or remove {', '.join(sorted(scales))}"
        )
    for kind in kinds:
        if not isinstance(kind, str):
            raise ModelLoadError(f"{place}: rope_type is {_shown(kind)}; it must be a name like linear; {REMEDY}")
    if len(set(kinds)) > 1 and not set(kinds) <= SAME_ROPE_TYPES:
        raise ModelLoadError(f"{place}: rope_type is {kinds[0]!r} and type is {kinds[1]!r}; remove one of them")
    for name, one in scaling.items():
        is_right, wanted = ROPE_FIELDS.get(name, _ANYTHING)
        if one is not None and not is_right(one):
            raise ModelLoadError(f"{place}: {name} is {_shown(one)}; it must be {wanted}; {REMEDY}")
        near = get_close_matches(name, ROPE_FIELDS, n=1, cutoff=MIN_SIMILARITY)
        if near and name not in ROPE_FIELDS:
            raise ModelLoadError(
                f"{place} has {name!r}, which would be ignored; is {near[0]} meant? rename or remove it"
            )
    if kinds and kinds[0] in NEEDS_FACTOR and scaling.get("factor") is None:
        raise ModelLoadError(f"{place} is of type {kinds[0]} and has no factor; add it, as in {ROPE_EXAMPLE}")
    if kinds and kinds[0] == "default" and scaling.get("factor", 1) != 1:
        raise ModelLoadError(
            f"{place}: factor is {scaling['factor']} and the rope_type is default, so nothing would be scaled; name "
            f"another type, as in {ROPE_EXAMPLE}, or remove factor"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return represented(value)


Check = tuple[Callable[[Any], bool], str]
"""A check of a field: a function that returns whether the field's value is correct, and a description of correct values
for error messages."""

_COUNT: Check = (lambda value: _is_int(value) and value >= 1, "an integer of at least 1")
_ABOVE_0: Check = (lambda value: _is_number(value) and value > 0, "a number above 0")
_NUMBER: Check = (_is_number, "a number")
_FACTOR: Check = (lambda value: _is_number(value) and value >= 1, "a number of at least 1")
_NUMBERS: Check = (lambda value: isinstance(value, list) and all(map(_is_number, value)), "a list of numbers")
_NAME: Check = (lambda value: isinstance(value, str), "a name")
_TRUTH: Check = (lambda value: isinstance(value, bool), "true or false")
_ANYTHING: Check = (lambda value: True, "anything")

MAX_LAYERS = 10_000
"""Maximum of `num_hidden_layers`. transformers makes a list with an entry for each layer before it finds that the
weights of the layers are missing."""
CONFIG_FIELDS: Mapping[str, Check] = {
    "max_position_embeddings": _COUNT,
    "vocab_size": _COUNT,
    "hidden_size": _COUNT,
    "num_hidden_layers": (
        lambda value: _is_int(value) and 1 <= value <= MAX_LAYERS,
        f"an integer from 1 to {MAX_LAYERS}",
    ),
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "sliding_window": (_is_int, "an integer, or null"),
    "rope_theta": _ABOVE_0,
    "hidden_act": _NAME,
    "eos_token_id": (
        lambda value: all(_is_int(one) and one >= 0 for one in (value if isinstance(value, list) else [value])),
        "a token id of at least 0, or a list of them",
    ),
    "layer_types": (lambda value: isinstance(value, list), "a list of names"),
    "quantization_config": (lambda value: isinstance(value, Mapping), "an object"),
    "text_config": (lambda value: isinstance(value, Mapping), "an object"),
}
"""Checks of the fields of config.json, by field name; a field that is null is left to transformers."""

ROPE_FIELDS: Mapping[str, Check] = {
    "rope_type": _NAME,
    "type": _NAME,
    "rope_theta": _ABOVE_0,
    "partial_rotary_factor": _ABOVE_0,
    "factor": _FACTOR,
    "original_max_position_embeddings": _COUNT,
    "max_position_embeddings": _COUNT,
    "attention_factor": _ABOVE_0,
    "beta_fast": _NUMBER,
    "beta_slow": _NUMBER,
    "mscale": _NUMBER,
    "mscale_all_dim": _NUMBER,
    "low_freq_factor": _NUMBER,
    "high_freq_factor": _NUMBER,
    "short_factor": _NUMBERS,
    "long_factor": _NUMBERS,
    "truncate": _TRUTH,
}
"""Checks of the fields of rotary embeddings, by field name; a few families have further fields, which are not
checked."""
UNSCALED = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
"""Fields that a rotary embedding without scaling may have."""
NEEDS_FACTOR = frozenset({"linear", "dynamic", "llama3", "yarn"})
SAME_ROPE_TYPES = frozenset({"longrope", "su"})
"""Two names of one rotary type: a configuration may have one name in `rope_type` and the other in `type`."""
MIN_SIMILARITY = 0.82
"""Minimum similarity, from 0 to 1, at which an unknown field name is reported as a misspelling of a known name."""
ROPE_EXAMPLE = '{"rope_type": "linear", "factor": 2.0}'
