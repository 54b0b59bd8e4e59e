"""Model shapes: parameter counts against published ones, look-up, and reading of configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pointsman.sim.errors import UnknownName, UnsupportedModel
from pointsman.sim.shapes import SHAPES, model_shape

PUBLISHED = {
    # Billions of parameters, in total and active per token where the model card says it.
    "Llama-3.1-8B": (8.03, None),
    "Llama-3.1-70B": (70.55, None),
    "Llama-3.2-1B": (1.236, None),
    "Llama-3.2-3B": (3.213, None),
    "Qwen2.5-0.5B": (0.494, None),
    "Qwen2.5-1.5B": (1.544, None),
    "Qwen2.5-3B": (3.086, None),
    "Qwen2.5-7B": (7.616, None),
    "Qwen2.5-14B": (14.77, None),
    "Qwen2.5-32B": (32.76, None),
    "Qwen2.5-72B": (72.71, None),
    "Qwen3-0.6B": (0.596, None),
    "Qwen3-1.7B": (1.721, None),
    "Qwen3-4B": (4.022, None),
    "Qwen3-8B": (8.191, None),
    "Qwen3-14B": (14.77, None),
    "Qwen3-32B": (32.76, None),
    "Qwen3-30B-A3B": (30.53, 3.0),  # "3.3 B" counts the embedding matrix, which no token multiplies with
    "Qwen3-235B-A22B": (235.09, 22),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
    "gemma-3-4b": (4.30, None),
    "gemma-3-12b": (12.19, None),
    "gemma-3-27b": (27.43, None),
    "Mistral-7B": (7.248, None),
    "Mixtral-8x7B": (46.70, 12.9),
    "DeepSeek-V3": (671, 37),
    "phi-4": (14.66, None),
    "SmolLM3-3B": (3.075, None),
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}

Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(config: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return path

    return write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, folder: str, revision: str, **config: Any) -> None:
    snapshot = cache / folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA | config))


# ---------------------------------------------------------------------- built in


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_match_the_published_counts(name: str, cache: Path) -> None:
    total, active = PUBLISHED[name]
    shape = model_shape(name)
    assert shape.num_params == pytest.approx(total * 1e9, rel=0.02)
    if active is not None:
        assert shape.num_active_params == pytest.approx(active * 1e9, rel=0.02)


def test_every_built_in_shape_has_parameter_counts_and_a_source() -> None:
    assert {model_shape(name).name for name in PUBLISHED} == set(SHAPES)
    assert all("config.json" in shape.source for shape in SHAPES.values())


def test_weight_bytes_match_the_published_checkpoint_sizes() -> None:
    assert model_shape("gpt-oss-20b").weight_bytes == pytest.approx(12.8 * 2**30, rel=0.02)  # its model card
    assert model_shape("gpt-oss-120b").weight_bytes == pytest.approx(60.8 * 2**30, rel=0.02)
    assert model_shape("Llama-3.1-8B").weight_bytes == pytest.approx(16.06e9, rel=0.01)


def test_kv_bytes_per_token_match_the_published_dimensions() -> None:
    assert model_shape("Llama-3.1-8B").kv_bytes_per_token() == (131072, 0)
    assert model_shape("Llama-3.1-8B").kv_bytes_per_token(1, tensor_parallel=4) == (16384, 0)
    # Fewer KV heads than devices: each has one.
    assert model_shape("Llama-3.1-8B").kv_bytes_per_token(tensor_parallel=32) == (131072 / 8, 0)
    # A latent of 512 and 64 in each of 61 layers, on every device in full.
    assert model_shape("DeepSeek-V3").kv_bytes_per_token(tensor_parallel=8) == (576 * 2 * 61, 0)
    full, windowed = model_shape("gemma-3-27b").kv_bytes_per_token()
    assert (full / windowed, windowed) == (10 / 52, 52 * 2 * 16 * 128 * 2)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "llama-3.1-8b", "META-LLAMA/llama-3.1-8b-instruct", "Meta-Llama-3.1-8B"]
)
def test_models_are_found_without_organisation_and_in_any_case(name: str, cache: Path) -> None:
    assert model_shape(name) is SHAPES["meta-llama/Llama-3.1-8B"]


def test_an_unknown_model_lists_the_nearest_names(cache: Path) -> None:
    with pytest.raises(UnknownName, match=r"'Qwen3-9B'.*nearest: .*Qwen3-8B.*pointsman simulate --list"):
        model_shape("Qwen3-9B")
    with pytest.raises(UnknownName, match=r"'zzzz'; nearest: \S+, \S+, \S+\. `"):
        model_shape("zzzz")


# ---------------------------------------------------------------------- found


def test_model_shape_reads_a_config_file_or_its_directory(write: Write, tmp_path: Path) -> None:
    path = write(LLAMA)
    shape = model_shape(path)
    assert shape == model_shape(tmp_path)
    assert (shape.num_layers, shape.head_dim, shape.tied_embeddings, shape.dtype_bytes) == (4, 32, False, 2)
    assert shape.name == tmp_path.name
    assert str(path) in shape.source


def test_error_names_a_model_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"no config\.json"):
        model_shape(tmp_path)


def test_the_cached_revision_main_precedes_a_built_in_shape(cache: Path) -> None:
    folder = "models--meta-llama--Llama-3.1-8B"
    cached(cache, folder, "aaa", vocab_size=10)
    cached(cache, folder, "bbb", vocab_size=20)
    (cache / folder / "refs").mkdir()
    (cache / folder / "refs" / "main").write_text("aaa")
    assert model_shape("meta-llama/Llama-3.1-8B").vocab_size == 10
    assert model_shape("Llama-3.1-8B").vocab_size == 128256  # another name


def test_a_cached_model_is_found_without_a_revision_main(cache: Path) -> None:
    cached(cache, "models--org--own", "ccc")
    assert model_shape("org/own").name == "org/own"


def test_cache_folder_follows_hugging_face_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    cached(tmp_path / "home" / "hub", "models--org--a", "r")
    assert model_shape("org/a").vocab_size == 1000
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cached(tmp_path / "xdg" / "huggingface" / "hub", "models--org--b", "r")
    assert model_shape("org/b").vocab_size == 1000


def test_a_model_name_cannot_point_outside_the_cache_directory(cache: Path, tmp_path: Path) -> None:
    cached(tmp_path, "other", "r")
    with pytest.raises(UnknownName):
        model_shape("../other")


# ---------------------------------------------------------------------- read


def test_text_config_is_read_with_the_defaults_of_its_class(write: Write) -> None:
    # What google/gemma-3-4b-it has of these.
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    config = {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}, "vision_config": vision}
    shape = model_shape(write(config | {"torch_dtype": "bfloat16"}))
    built_in = model_shape("google/gemma-3-4b-it")
    assert shape.num_params == pytest.approx(built_in.num_params, rel=0.01)
    assert (shape.sliding_window, shape.num_windowed_layers) == (1024, 29)
    assert shape.kv_bytes_per_token() == built_in.kv_bytes_per_token()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, (512, 4)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({"model_type": "mistral", "sliding_window": 4096}, (0, 0)),  # no sequence is longer
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}, (0, 0)),
        ({"model_type": "qwen2", "sliding_window": 512}, (0, 0)),  # the class's default is false
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 3}, (512, 1)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}, (128, 2)),
        ({"model_type": "gemma2", "sliding_window": 256}, (256, 2)),
        ({"model_type": "gemma3_text", "sliding_window": 256, "sliding_window_pattern": 4}, (256, 3)),
    ],
)
def test_sliding_windows_are_read_from_each_form_of_config(
    config: dict[str, Any], expected: tuple[int, int], write: Write
) -> None:
    shape = model_shape(write(LLAMA | config))
    assert (shape.sliding_window, shape.num_windowed_layers) == expected


def test_experts_are_read_from_the_config_of_each_family(write: Write) -> None:
    moe = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    mixtral = model_shape(write(LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}))
    assert (mixtral.num_experts, mixtral.expert_intermediate_size, mixtral.intermediate_size) == (8, 512, 0)
    qwen = model_shape(write(LLAMA | moe | {"model_type": "qwen3_moe", "num_experts": 16, "mlp_only_layers": [0]}))
    assert (qwen.num_experts, qwen.expert_intermediate_size, qwen.num_dense_layers) == (16, 64, 1)
    latent = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    deepseek = {"model_type": "deepseek_v3", "n_routed_experts": 16, "n_shared_experts": 2, "first_k_dense_replace": 1}
    shape = model_shape(write(LLAMA | moe | latent | deepseek))
    assert (shape.num_shared_experts, shape.num_dense_layers, shape.num_expert_layers) == (2, 1, 3)
    assert shape.kv_bytes_per_layer() == (32 + 8) * 2


@pytest.mark.parametrize(
    ("quantization", "bits", "computes_in"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, "bf16"),
        ({"quant_method": "fp8"}, 8, "fp8"),
        ({"quant_method": "mxfp4"}, 4.25, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "int8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"a": 1}}
                },
            },
            8,
            "fp8",
        ),
    ],
)
def test_quantised_weights_are_counted_with_their_bits(
    quantization: dict[str, Any], bits: float, computes_in: str, write: Write
) -> None:
    plain = model_shape(write(LLAMA))
    shape = model_shape(write(LLAMA | {"quantization_config": quantization}))
    assert shape.quantization is not None
    assert shape.quantization.bits == pytest.approx(bits)
    assert shape.quantization.computes_in == computes_in
    embeddings = 2 * plain.head_bytes
    assert shape.weight_bytes - embeddings == pytest.approx((plain.weight_bytes - embeddings) * bits / 16, rel=1e-6)


def test_smollm3_is_read_with_the_defaults_of_its_class(write: Write) -> None:
    # What HuggingFaceTB/SmolLM3-3B has of these; it has no field for windows that its layers use.
    config = {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "vocab_size": 128256, "max_position_embeddings": 65536, "no_rope_layer_interval": 4,
        "use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 36,
    }  # fmt: skip
    shape, built_in = model_shape(write(config)), model_shape("SmolLM3-3B")
    assert shape == replace(built_in, name=shape.name, source=shape.source)
    with_windows = config | {"use_sliding_window": True, "sliding_window": 512}
    with_windows["layer_types"] = ["sliding_attention", "full_attention"] * 18
    assert model_shape(write(with_windows)).num_windowed_layers == 18


def test_activations_are_counted_by_layer_and_divided_by_heads() -> None:
    shape = model_shape("Llama-3.1-8B")
    layer = 8 * 4096 + 2 * 4096 + 3 * 2 * 1024 + 3 * 14336
    assert shape.activation_bytes() == 2 * 32 * layer
    assert shape.activation_bytes(2) == 2 * 32 * (8 * 4096 + (layer - 8 * 4096) / 2)
    experts = model_shape("Qwen3-30B-A3B")
    assert experts.activation_bytes() == 2 * 48 * (8 * 2048 + 2 * 4096 + 3 * 1024 + 3 * 8 * 768 + 4 * 8 * 2048)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize("missing", sorted(set(LLAMA) - {"torch_dtype", "num_key_value_heads"}))
def test_error_names_a_missing_config_field(missing: str, write: Write) -> None:
    path = write({key: value for key, value in LLAMA.items() if key != missing})
    with pytest.raises(UnsupportedModel, match=missing):
        model_shape(path)


def test_source_of_a_shape_says_that_the_config_has_no_dtype(write: Write) -> None:
    shape = model_shape(write({key: value for key, value in LLAMA.items() if key != "torch_dtype"}))
    assert shape.dtype_bytes == 2
    assert "no dtype" in shape.source


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "mamba", "mamba_d_state": 16}, "state-space"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"model_type": "t5"}, "'t5' is not known"),
        ({"sliding_window": 128}, "the field layer_types"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits None"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, "num_local_experts"),
    ],
)
def test_unsupported_fields_are_refused_by_name(config: dict[str, Any], match: str, write: Write) -> None:
    with pytest.raises(UnsupportedModel, match=match):
        model_shape(write(LLAMA | config))


def test_a_file_that_is_not_a_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[1]"):
        path.write_text(text)
        with pytest.raises(UnsupportedModel, match=r"config\.json: the file is not"):
            model_shape(path)
