"""The settings in a model's directory: ends of texts, defaults of requests, and errors that name a wrong field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pointsman.engine import LLM, SamplingParams
from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.model.loader import load_model, wrap_model
from tests.engine.text_tokenizers import byte_level
from tests.engine.tiny_models import COMMON, build

GREEDY = SamplingParams(temperature=0, max_tokens=9, logit_bias={1: 100})
"""Generation settings that let only token 1 be sampled."""
LINEAR = {"rope_type": "linear", "factor": 2.0}
ABSENT = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and its tokenizer, whose EOS is token 1; config.json names 2."""
    path = tmp_path_factory.mktemp("llama")
    build(LlamaConfig(**{**COMMON, "vocab_size": 300})).save_pretrained(path)
    tokenizer = byte_level()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, name: str, **values: Any) -> None:
    """Set fields of a JSON file in the model's directory; a field with the value ABSENT is removed."""
    file = path / f"{name}.json"
    content = {**(json.loads(file.read_text()) if file.is_file() else {}), **values}
    file.write_text(json.dumps({field: value for field, value in content.items() if value is not ABSENT}))


def refused(path: Path) -> str:
    """Load a model that must be refused; return the error, one line with a remedy, without the directory's path."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(path)
    line = str(caught.value)
    assert "\n" not in line and not line.endswith(":")
    return line.replace(str(path), "DIR")


# ------------------------------------------------------------------------------------------------- end of a text


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, (1,)),
        (2, None, (1, 2)),
        (2, 2, (1, 2)),
        (2, [3, 1, 5], (1, 3, 5)),
        (1, [1], (1,)),
        (2, [], (1,)),
        ([2, 7], None, (1, 2, 7)),
    ],
)
def test_texts_end_at_the_eos_of_tokenizer_and_settings(
    copy: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    change(copy, "config", eos_token_id=config)
    change(copy, "generation_config", eos_token_id=ABSENT if generation is None else generation)
    assert load_model(copy).eos_token_ids == expected


def test_a_tokenizers_eos_beyond_the_vocabulary_is_ignored() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<end>"])
    tokenizer.eos_token = "<end>"
    assert tokenizer.eos_token_id >= 199
    assert wrap_model(build(LlamaConfig(**COMMON)), tokenizer=tokenizer).eos_token_ids == (2,)


def test_only_eos_tokens_after_the_first_are_a_stop_reason(copy: Path) -> None:
    change(copy, "config", eos_token_id=None)
    change(copy, "generation_config", eos_token_id=[5, 9])
    llm = LLM(copy, num_blocks=64, block_size=4, log_stats_interval=None)

    def run(token: int, **fields: Any) -> tuple[list[int], str | None, int | str | None]:
        params = SamplingParams(temperature=0, max_tokens=9, logit_bias={token: 100}, **fields)
        (output,) = llm.generate({"prompt_token_ids": [30, 31]}, params, use_tqdm=False)
        return output.token_ids, output.finish_reason, output.stop_reason

    assert run(1) == ([1], "stop", None)
    assert run(5) == ([5], "stop", 5)
    assert run(9, stop_token_ids=[9]) == ([9], "stop", 9)
    for token in (1, 5):
        assert run(token, ignore_eos=True) == ([token] * 9, "length", None)
        assert run(token, ignore_eos=True, stop_token_ids=[token]) == ([token], "stop", token)
        for ignores in (False, True):  # as in vLLM: min_tokens excludes EOS, also if EOS would not end the text
            tokens, _, _ = run(token, min_tokens=3, ignore_eos=ignores)
            assert token not in tokens[:3] and tokens[3] == token
    (vector,) = llm.embed("a", use_tqdm=False)
    assert vector.outputs.embedding is not None


# ------------------------------------------------------------------------------------------------- defaults


def test_recommended_sampling_values_apply_without_do_sample(copy: Path) -> None:
    values = {
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    change(copy, "generation_config", **values, max_new_tokens=5, do_sample=False)
    llm = LLM(copy, num_blocks=64, block_size=4, log_stats_interval=None)
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=5, **values)
    prompts: list[Any] = [{"prompt_token_ids": [30, 31]}] * 2
    lengths = [len(one.token_ids) for one in llm.generate(prompts, use_tqdm=False)]
    assert max(lengths) <= 5
    given = SamplingParams(max_tokens=7, ignore_eos=True)
    assert len(llm.generate(prompts[0], given, use_tqdm=False)[0].token_ids) == 7


def test_without_recommended_values_sampling_params_apply(saved: Path) -> None:
    assert LLM(saved, num_blocks=64, log_stats_interval=None).get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("eos_token_id", "x", "eos_token_id is 'x'; it must be a token id from 0 to 299"),
        ("eos_token_id", True, "eos_token_id is True"),
        ("eos_token_id", 2.0, "eos_token_id is 2.0"),
        ("eos_token_id", -1, "eos_token_id is -1"),
        ("eos_token_id", [2, "x"], "eos_token_id is [2, 'x']"),
        ("eos_token_id", [2, 300], "eos_token_id is [2, 300]"),
        ("eos_token_id", {}, "eos_token_id is {}"),
        ("temperature", "x", "temperature is 'x'; it must be a number of 0 (greedy) or more"),
        ("temperature", -1, "temperature is -1"),
        ("top_p", 2, "top_p is 2; it must be above 0 and at most 1"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("min_p", True, "min_p is True"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("presence_penalty", 3, "presence_penalty is 3"),
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be at least 1"),
        ("max_new_tokens", "9", "max_new_tokens is '9'"),
        ("early_stopping", "x", "early_stopping"),
    ],
)
def test_wrong_generation_settings_are_named_in_the_error(copy: Path, field: str, value: Any, words: str) -> None:
    change(copy, "generation_config", **{field: value})
    line = refused(copy)
    assert line.startswith("DIR/generation_config.json: ") and words in line
    assert line.endswith("; correct the field, or copy the model's own file again")


@pytest.mark.parametrize("text", ["{", "[1]", "5", ""])
def test_generation_settings_that_are_no_object_are_refused(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_text(text)
    assert refused(copy).startswith("DIR/generation_config.json ")


def test_settings_of_a_model_in_memory_are_checked() -> None:
    model = build(LlamaConfig(**COMMON))
    model.generation_config.temperature = "x"
    with pytest.raises(ModelLoadError, match="generation_config: temperature is 'x'"):
        wrap_model(model)


# ------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", "x"),
        ("eos_token_id", -1),
        ("eos_token_id", [1, None]),
        ("max_position_embeddings", "256"),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", True),
        ("max_position_embeddings", 2.5),
        ("vocab_size", "300"),
        ("num_hidden_layers", "2"),
        ("num_attention_heads", 0),
        ("hidden_size", None),
        ("sliding_window", "x"),
        ("rope_theta", "x"),
        ("rms_norm_eps", "x"),
        ("layer_types", "full_attention"),
        ("quantization_config", "x"),
        ("text_config", 5),
    ],
)
def test_wrong_configuration_fields_are_named_in_the_error(copy: Path, field: str, value: Any) -> None:
    change(copy, "config", **{field: value})
    line = refused(copy)
    assert line.startswith("DIR/config.json: ") and field in line and str(value).strip("[") in line


def test_an_eos_outside_the_vocabulary_is_named_in_the_error(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    change(copy, "config", eos_token_id=300)
    assert refused(copy).startswith("DIR/config.json: eos_token_id is 300; it must be a token id from 0 to 299")


def test_an_unknown_activation_is_named_in_the_error(copy: Path) -> None:
    change(copy, "config", hidden_act="hal")
    assert "DIR/config.json: transformers does not know the name 'hal'" in refused(copy)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"factor": 2.0}, "names no rope_type, so nothing would be scaled"),
        ({"rope_typ": "linear", "factor": 2.0}, "names no rope_type"),
        ({"rope_type": "default", "factor": 2.0}, "the rope_type is default, so nothing would be scaled"),
        ({"rope_type": None, "factor": 2.0}, "rope_type is None"),
        ({"rope_type": 5, "factor": 2.0}, "rope_type is 5"),
        ({"type": "linear"}, "is of type linear and has no factor; add it"),
        ({"rope_type": "yarn"}, "is of type yarn and has no factor; add it"),
        ({"rope_type": "linear", "facter": 2.0}, "has 'facter', which would be ignored; is factor meant?"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fasst": 3}, "has 'beta_fasst', which would be ignored"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'; it must be a number of at least 1"),
        ({"rope_type": "linear", "factor": True}, "factor is True"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "yarn", "factor": -1}, "factor is -1"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_type is 'linear' and type is 'yarn'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ("linear", "is 'linear'; it must be an object like"),
        ([], "is []; it must be an object like"),
    ],
)
def test_rotary_settings_without_effect_are_named_in_the_error(copy: Path, field: str, value: Any, words: str) -> None:
    change(copy, "config", **{"rope_parameters": ABSENT, "rope_theta": 1e4, field: value})
    line = refused(copy)
    assert line.startswith("DIR/config.json: ") and words in line


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        LINEAR,
        {"type": "linear", "factor": 2},
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "default", "factor": 1.0},
        {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "attn_factor": 1, "original_max_position_embeddings": 64},
    ],
)
def test_valid_rotary_settings_are_accepted(copy: Path, value: Any) -> None:
    change(copy, "config", rope_parameters=ABSENT, rope_theta=1e4, rope_scaling=value)
    assert load_model(copy).max_position_embeddings == 256


def test_an_unknown_rotary_type_is_refused_by_the_check_of_types(copy: Path) -> None:
    change(copy, "config", rope_parameters=ABSENT, rope_scaling={"rope_type": "hal", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="'hal': it is not among the types known to be safe"):
        load_model(copy)


# ------------------------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", 5),
        ("chat_template", {"default": 5}),
        ("chat_template", [{"name": "default"}]),
        ("eos_token", 5),
        ("bos_token", ["a"]),
        ("tokenizer_class", 5),
        ("added_tokens_decoder", 5),
    ],
)
def test_wrong_tokenizer_settings_are_named_in_the_error(copy: Path, field: str, value: Any) -> None:
    change(copy, "tokenizer_config", **{field: value})
    assert refused(copy).startswith(f"DIR/tokenizer_config.json: {field} is {value!r}; it must be ")


@pytest.mark.parametrize("fields", [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "GPT2Tokenizer"}])
def test_settings_of_a_tokenizer_without_a_vocabulary_are_refused(copy: Path, fields: dict[str, str]) -> None:
    (copy / "tokenizer.json").unlink()
    change(copy, "tokenizer_config", **fields)
    assert "DIR has tokenizer_config.json and no vocabulary beside it; copy the model's tokenizer.json" in refused(copy)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_settings_of_a_tokenizer_that_are_no_object_are_refused(copy: Path, text: str) -> None:
    (copy / "tokenizer_config.json").write_text(text)
    assert refused(copy).startswith("DIR/tokenizer_config.json ")
