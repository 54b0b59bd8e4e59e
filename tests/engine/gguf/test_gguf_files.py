"""Parts, kinds, versions and faults of GGUF files, and configurations that are refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter

from pointsman.engine.errors import ModelLoadError, UnsupportedModel
from pointsman.engine.gguf import is_gguf
from pointsman.engine.gguf.config import config_fields
from pointsman.engine.gguf.export import export_directory
from pointsman.engine.gguf.reader import read_gguf
from pointsman.engine.model.loader import load_model
from pointsman.engine.text.tokenizer import check_model_directory, read_tokenizer, weights_size
from tests.engine.gguf_files import add_tokenizer, trained_bpe, write, write_gguf
from tests.engine.tiny_models import FAMILIES, HEAD16, SLIDES, Family, build

PART = "model-{:05}-of-00003.gguf"


@pytest.fixture(scope="module")
def model() -> Any:
    return build(FAMILIES["llama"]())


@pytest.fixture
def path(model: Any, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", model)


@pytest.fixture
def parts(model: Any, tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "model.gguf", model, split_max_tensors=8)
    return [tmp_path / PART.format(number) for number in (1, 2, 3)]


def error_of(path: Path, kind: type[Exception] = ModelLoadError) -> str:
    with pytest.raises(kind) as error:
        load_model(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_gguf_files_are_recognised_by_name(path: Path, tmp_path: Path) -> None:
    assert is_gguf(path) and is_gguf(tmp_path / "ABSENT.GGUF")
    (tmp_path / "directory.gguf").mkdir()
    assert not is_gguf(tmp_path / "directory.gguf") and not is_gguf(tmp_path / "model.safetensors")


def test_a_gguf_file_is_checked_before_an_engine_is_started(path: Path, tmp_path: Path) -> None:
    check_model_directory(path)
    assert weights_size(path) == sum(weight.nbytes for weight in build(FAMILIES["llama"]()).parameters())
    with pytest.raises(ModelLoadError, match=r"absent.gguf cannot be read: No such file or directory"):
        check_model_directory(tmp_path / "absent.gguf")
    (tmp_path / "web.gguf").write_text("<!DOCTYPE html>")
    with pytest.raises(
        ModelLoadError, match=r"web.gguf is no GGUF file: it begins with b'<!DO', not b'GGUF'; download"
    ):
        check_model_directory(tmp_path / "web.gguf")


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize("given", [0, 2])
def test_the_parts_of_a_gguf_model_are_read_together(given: int, model: Any, parts: list[Path]) -> None:
    loaded = load_model(parts[given], fuse=False)
    assert read_gguf(parts[given]).path == parts[0]
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)


def test_the_error_names_a_missing_gguf_part(parts: list[Path]) -> None:
    parts[1].unlink()
    assert error_of(parts[0]) == f"{parts[1]} is missing; the model has 3 parts, copy all of them to this directory"


def test_a_part_with_another_parts_name_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[0], parts[2])
    assert "split.no is 0 and split.count 3; they must be 2 and 3; copy this part again" in error_of(parts[0])
    assert str(parts[2]) in error_of(parts[0])


def test_a_part_needs_a_part_number_in_its_name(parts: list[Path], tmp_path: Path) -> None:
    renamed = parts[0].rename(tmp_path / "first.gguf")
    assert "is one of 3 parts, but its name has no part number; name the parts NAME-00001-of-00003" in error_of(renamed)


# ---------------------------------------------------------------------- other files


def test_unsupported_versions_and_byte_orders_are_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 1) + data[8:])
    assert "is a GGUF file of version 1; supported are versions 2 and 3" in error_of(path, UnsupportedModel)
    writer = GGUFWriter(tmp_path / "big.gguf", "llama", endianess=GGUFEndian.BIG)
    write(writer)
    assert "is a GGUF file of big-endian numbers" in error_of(tmp_path / "big.gguf", UnsupportedModel)


@pytest.mark.parametrize("length", [0, 3, 100, 1500, -1])
def test_the_error_names_a_truncated_gguf_file(length: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:length])
    assert str(path) in error_of(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "error"),
    [
        ("bert", "model", "architecture is 'bert'; supported are llama, qwen2, qwen3, phi3, gemma, gemma2, gemma3"),
        ("clip", "mmproj", "is the image or audio part of a model, no language model"),
        ("llama", "adapter", "is of the type 'adapter', no language model"),
    ],
)
def test_files_without_a_language_model_are_refused(architecture: str, kind: str, error: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", architecture)
    writer.add_type(kind)
    write(writer)
    assert error in error_of(tmp_path / "other.gguf", UnsupportedModel)


# ---------------------------------------------------------------------- configuration


def edited(path: Path, model: Any, **fields: Any) -> Path:
    """A file with changed fields (`__` for the dots of a key); None removes a field."""

    def edit(writer: GGUFWriter) -> None:
        for name, value in fields.items():
            key = name.replace("__", ".")
            writer.kv_data[0].pop(key, None)
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            if value is not None:
                add.get(type(value), writer.add_array)(key, value)

    return write_gguf(path, model, edit=edit)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"llama__block_count": "2"}, "llama.block_count is '2'; it must be an integer from 1"),
        ({"llama__block_count": 400}, "llama.block_count is 400, but the file has only 21 tensors"),
        ({"llama__attention__head_count": [4, 4]}, "llama.attention.head_count is array([4, 4]"),
        ({"llama__attention__head_count": 0}, "llama.attention.head_count is 0; it must be an integer from 1"),
        (
            {"llama__attention__layer_norm_rms_epsilon": None},
            "has no field llama.attention.layer_norm_rms_epsilon; convert",
        ),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base is nan; it must be a number above 0"),
        (
            {"llama__embedding_length": 64},
            "token_embd.weight has the shape [199, 48], but the metadata requires [199, 64]",
        ),
        ({"llama__feed_forward_length": 2**30}, "describes"),
        (
            {"tokenizer__ggml__eos_token_id": 199},
            "tokenizer.ggml.eos_token_id is 199; it must be a token id from 0 to 198",
        ),
        ({"general__architecture": 5}, "general.architecture is 5; it must be a text"),
        ({"general__sampling__top_p": 7.0}, "model.gguf: top_p is 7.0"),
    ],
)
def test_the_error_names_a_wrong_metadata_field(fields: dict[str, Any], error: str, model: Any, tmp_path: Path) -> None:
    path = edited(tmp_path / "model.gguf", model, **fields)
    assert error in error_of(path) and str(path) in error_of(path)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count is 8, which is not supported here"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False, which is not supported here"),
        ({"llama__rope__dimension_count": 6}, "llama.rope.dimension_count is 6, but a head has 12 elements"),
        ({"llama__attention__value_length": 6}, "llama.attention.value_length is 6 and key_length 12"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "llama.rope.scaling.type is 'longrope'; in a file without tensors of rope factors, only none",
        ),
    ],
)
def test_metadata_of_unsupported_computations_is_refused(
    fields: dict[str, Any], error: str, model: Any, tmp_path: Path
) -> None:
    assert error in error_of(edited(tmp_path / "model.gguf", model, **fields), UnsupportedModel)


def test_metadata_without_an_effect_is_accepted(model: Any, tmp_path: Path) -> None:
    fields = {"llama__expert_count": 0, "llama__attention__causal": True, "llama__rope__scaling__type": "none"}
    assert config_fields(read_gguf(edited(tmp_path / "model.gguf", model, **fields)))["model_type"] == "llama"


def test_rotary_factors_of_an_unknown_kind_are_refused(model: Any, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4, 5, 9], np.float32))

    path = write_gguf(tmp_path / "model.gguf", model, edit=edit)
    assert "rope_freqs.weight does not have the rotary factors of a Llama 3.1 to 3.3 model" in error_of(
        path, UnsupportedModel
    )


def test_metadata_may_list_the_layers_with_a_window(tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention"]
    family = Family("gemma3_text", "", {**HEAD16, **SLIDES, "layer_types": layers, "query_pre_attn_scalar": 16})
    fields = {"gemma3__attention__sliding_window_pattern": [False, True]}
    path = edited(tmp_path / "model.gguf", build(family()), **fields)
    assert config_fields(read_gguf(path))["layer_types"] == layers


# ---------------------------------------------------------------------- export


def test_an_exported_directory_loads_as_the_same_model(tmp_path: Path) -> None:
    tokenizer = trained_bpe(300)
    model = build(Family("qwen3", "", {**HEAD16, "vocab_size": 300})())
    path = write_gguf(tmp_path / "model.gguf", model, edit=_tokens_and_sampling(tokenizer))
    export_directory(path, tmp_path / "new" / "directory")
    loaded, own = load_model(tmp_path / "new" / "directory", "bfloat16"), load_model(path, "bfloat16")
    assert loaded.eos_token_ids == own.eos_token_ids == (1, 3)
    assert loaded.generation_defaults == own.generation_defaults == {"temperature": 0.5}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("the capital")["input_ids"] == tokenizer("the capital")["input_ids"]
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    config = json.loads((tmp_path / "new" / "directory" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "bfloat16")
    assert len({each.stat().st_mode for each in (tmp_path / "new" / "directory").iterdir()}) == 1
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["directory"]


def _tokens_and_sampling(tokenizer: Any) -> Callable[[GGUFWriter], None]:
    add = add_tokenizer(tokenizer, "gpt2", pre="gpt-2")

    def edit(writer: GGUFWriter) -> None:
        add(writer)
        writer.add_sampling_temp(0.5)

    return edit


def test_export_needs_an_empty_directory(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exists and is not empty; give a new directory"):
        export_directory(path, tmp_path)
    with pytest.raises(ValueError, match="dtype is 'int4'; choose one of float32, bfloat16, float16"):
        export_directory(path, tmp_path / "new", "int4")
    assert read_tokenizer(path) is None
