"""vLLM's `speculative_config` as the knobs that it stands for here.

    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}

is `num_draft_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4`. The keys are those of `vllm/config/speculative.py` of
vLLM 0.32. It imports no PyTorch, so that the command line can check it before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman.core.errors import ConfigError

KNOBS = {
    "num_speculative_tokens": "num_draft_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}
"""What each key sets."""
REMEDIES = {
    "model": "drafts come from the request's own tokens, not from a second model",
    "num_speculative_tokens_per_batch_size": "use the knob draft_table, such as ((16, 2), (64, 0))",
}


def speculation_knobs(config: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs that a `speculative_config` stands for; their values are checked where knobs are.

    Of `prompt_lookup_min` and `prompt_lookup_max` one alone is both, as in vLLM. Without either they have their
    defaults here, which are wider than vLLM's 5 and 5; answers do not depend on them.

    Args:
        config: None in it is as if the key were not there.
        others: knobs that are set beside it.

    Raises:
        ConfigError: a method or key that is not supported, no number of tokens, or a knob that is set beside it, too.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f'speculative_config is {config!r}; give a mapping, like {{"method": "ngram", "num_speculative_tokens": 5}}'
        )
    values = {key: value for key, value in config.items() if value is not None}
    method = values.pop("method", None)
    if method != "ngram":
        raise ConfigError(f'speculative_config: method is {method!r}; the one there is is "ngram", prompt lookup')
    for key in values:
        if key not in KNOBS:
            remedy = REMEDIES.get(key, f"known are method, {', '.join(KNOBS)}")
            raise ConfigError(f"speculative_config: {key} is not supported; {remedy}")
    tokens = values.get("num_speculative_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens is {tokens!r}; it must be an integer of at least 1, the most "
            "drafts of a request and step"
        )
    for one, other in (("prompt_lookup_min", "prompt_lookup_max"), ("prompt_lookup_max", "prompt_lookup_min")):
        if one in values:
            values.setdefault(other, values[one])
    for knob in KNOBS.values():
        if knob in others:
            raise ConfigError(f"speculative_config and {knob} {others[knob]!r} both set speculation; give one of them")
    return {KNOBS[key]: value for key, value in values.items()}
