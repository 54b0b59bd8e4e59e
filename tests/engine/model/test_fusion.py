"""The expected parts of a model are replaced by faster ones, and parts that only look similar are kept."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, LlamaConfig, OlmoConfig, Qwen2Config

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.llm import LLM
from pointsman.engine.model.fused_layers import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from pointsman.engine.model.linear import JoinedLinear
from pointsman.engine.model.loader import load_model, wrap_model
from tests.engine.tiny_models import COMMON, FAMILIES, HEAD16, SCALED_BY_POSITION, WINDOW, build, packs

WHOLE = {"FusedNorm": 5, "FusedAttention": 2, "FusedMLP": 2, "FusedLayer": 2}


def fused(model: Any, **options: Any) -> dict[str, int]:
    return wrap_model(model, **options).fused


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2", WHOLE),  # biases
        ("llama-yarn", WHOLE),
        ("mistral", WHOLE),  # a window
        ("qwen3", WHOLE),  # the norms of heads are part of the attention
        ("gemma2", {"FusedNorm": 9, "FusedAttention": 2, "FusedMLP": 2}),  # four norms a layer; gates by GELU
        ("granite", WHOLE),  # a scale of its own
        ("gpt2", {}),  # another kind of everything
    ],
)
def test_expected_parts_of_each_family_are_fused(family: str, expected: dict[str, int]) -> None:
    assert fused(build(FAMILIES[family]())) == expected


def test_a_layer_with_scaled_residuals_is_not_fused_whole() -> None:
    config = GraniteConfig(**COMMON, residual_multiplier=0.5)
    assert fused(build(config)) == {name: count for name, count in WHOLE.items() if name != "FusedLayer"}


@pytest.mark.parametrize("options", [{"fuse": False}, {"attention": "torch"}], ids=str)
def test_fusing_can_be_turned_off(options: dict[str, Any]) -> None:
    assert fused(build(FAMILIES["qwen3"]()), **options) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_large_model_are_packed(dtype: torch.dtype) -> None:
    """The model's weights have at least 512 x 512 elements, so all are packed, once, before the last self-check."""
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    loaded = wrap_model(build(Qwen2Config(**{**COMMON, **size})).to(dtype))
    assert loaded.fused == WHOLE
    forms = [module.form for module in loaded.model.modules() if isinstance(module, JoinedLinear)]
    assert forms == ["packed" if packs(dtype) else "plain"] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_last_layer_skips_tokens_without_needed_logits(dtype: torch.dtype) -> None:
    """Only the MLP of the last layer gets fewer tokens; a model without fused layers computes all tokens."""
    loaded = wrap_model(build(FAMILIES["qwen3"]()).to(dtype))
    assert loaded.drops_tokens_early
    sizes: list[list[int]] = []
    mlps = [module for module in loaded.model.modules() if isinstance(module, FusedMLP)]
    for mlp in mlps:
        sizes.append(noted := [])
        mlp.forward = partial(noting, mlp.forward, noted)
    engine = Engine(loaded, num_blocks=16, block_size=8, max_num_batched_tokens=16, max_num_seqs=4)
    for number, length in enumerate((9, 11)):
        engine.add_request(
            str(number), list(range(1 + number, 1 + number + length)), SamplingParams(max_tokens=2, ignore_eos=True)
        )
    while engine.has_unfinished_requests():
        engine.step()
    assert [noted[:2] for noted in sizes] == [[16, 5]] * (len(mlps) - 1) + [[1, 2]]
    assert not wrap_model(build(FAMILIES["qwen3"]()).to(dtype), fuse=False).drops_tokens_early


def noting(forward: Callable[[Tensor], Tensor], sizes: list[int], x: Tensor) -> Tensor:
    sizes.append(x.shape[1])
    return forward(x)


def test_models_in_bfloat16_are_fused() -> None:
    assert fused(build(FAMILIES["qwen3"]()).to(torch.bfloat16)) == WHOLE


def change_first(model: Any, kind: str, change: Any) -> None:
    """Apply `change` to the output of the first module of a kind."""
    module = next(one for one in model.modules() if type(one).__name__ == kind)
    forward = module.forward
    module.forward = lambda *arguments, **keywords: change(forward(*arguments, **keywords))


@pytest.mark.parametrize(
    ("kind", "replacement"),
    [("Qwen2RMSNorm", FusedNorm), ("Qwen2MLP", FusedMLP), ("Qwen2Attention", FusedAttention)],
)
def test_a_part_with_other_outputs_is_not_fused(kind: str, replacement: type[nn.Module]) -> None:
    """The output of one norm, MLP or attention is multiplied by 1.001: this part is kept, and all other parts are
    replaced."""

    def change(output: Any) -> Any:
        return (output[0] * 1.001, *output[1:]) if isinstance(output, tuple) else output * 1.001

    model = build(FAMILIES["qwen2"]())
    change_first(model, kind, change)
    loaded = wrap_model(model)
    assert loaded.fused[replacement.__name__] == WHOLE[replacement.__name__] - 1
    assert loaded.fused["FusedLayer"] == 1
    assert any(type(one).__name__ == kind for one in loaded.model.modules())


def test_a_layer_with_an_additional_operation_is_not_fused() -> None:
    """The layer has the four usual parts, and applies one more operation to their outputs."""
    model = build(FAMILIES["qwen2"]())
    change_first(model, "Qwen2DecoderLayer", lambda output: output * 1.001)
    found = fused(model)
    assert found == {**WHOLE, "FusedLayer": 1}


def test_fusion_keeps_parts_whose_replacements_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FusedMLP, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(FusedMLP, "forward", broken)
    found = fused(build(FAMILIES["qwen2"]()))
    assert found == {"FusedNorm": 5, "FusedAttention": 2}


def test_fusion_tries_the_next_candidate_after_one_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedMLP.__init__

    def no_silu(self: FusedMLP, *arguments: Any) -> None:
        if "silu" in arguments:
            raise RuntimeError("no such kernel")
        original(self, *arguments)

    monkeypatch.setattr(FusedMLP, "__init__", no_silu)
    assert fused(build(LlamaConfig(**COMMON, hidden_act="gelu_pytorch_tanh"))) == WHOLE


def test_fusion_that_fails_only_in_the_whole_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedLayer.forward
    calls = 0

    def right_at_first(self: FusedLayer, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return original(self, hidden_states, *arguments, **keywords) * (1.0 if calls <= 2 else 1.5)

    monkeypatch.setattr(FusedLayer, "forward", right_at_first)
    with pytest.raises(UnsupportedModel, match=r"with fused layers the model fails its check .* fuse=False"):
        wrap_model(build(FAMILIES["qwen2"]()))


def test_a_model_whose_fusion_fails_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(FAMILIES["qwen2"]()).save_pretrained(tmp_path)
    original = FusedAttention.forward

    def right_alone(self: FusedAttention, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        output, weights = original(self, hidden_states, *arguments, **keywords)
        return output * (
            1.0 if hidden_states.shape[1] == 40 else 1.5
        ), weights  # 34 tokens, filled up: the step of the trials

    monkeypatch.setattr(FusedAttention, "forward", right_alone)
    loaded = load_model(tmp_path)
    assert loaded.fused == {} and loaded.attention.name == "numba"
    assert "loading the model again with its own layers" in caplog.text


def test_attention_that_depends_on_positions_is_not_fused() -> None:
    """The model scales queries from position 16 on. Only inputs with later positions show this difference."""
    loaded = wrap_model(build(FAMILIES["ministral3"]()))
    assert "FusedAttention" not in loaded.fused and loaded.fused["FusedMLP"] == 2
    far = {**SCALED_BY_POSITION, "original_max_position_embeddings": 4096}  # beyond the positions of any check
    config = type(FAMILIES["ministral3"]())(**{**COMMON, **HEAD16}, sliding_window=WINDOW, rope_parameters=far)
    assert "FusedAttention" not in fused(build(config))


@pytest.mark.parametrize("clip", [0.5, 4.0, 50.0])
def test_attention_with_a_clamp_is_not_fused(clip: float) -> None:
    """The clamp is found although no recorded input is large enough for it."""
    config = OlmoConfig(**COMMON, clip_qkv=clip)
    assert "FusedAttention" not in fused(build(config))
    assert fused(build(OlmoConfig(**COMMON)))["FusedAttention"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fusion_compares_parts_in_float32(dtype: torch.dtype) -> None:
    """In bfloat16 these parts could not be distinguished from usual ones: a norm that subtracts the mean, and gates
    with other activations."""
    cohere = build(FAMILIES["cohere"]()).to(dtype)
    assert "FusedNorm" not in fused(cohere)
    for activation, count in (("silu", 2), ("gelu_pytorch_tanh", 2), ("gelu", 0), ("quick_gelu", 0), ("relu", 0)):
        model = build(LlamaConfig(**COMMON, hidden_act=activation)).to(dtype)
        for name, weight in model.named_parameters():
            if "gate_proj" in name:
                weight.data.mul_(0.1)  # for small inputs the activations differ little
        assert fused(model).get("FusedMLP", 0) == count, activation


def test_fusion_frees_replaced_parts() -> None:
    model = build(FAMILIES["qwen2"]())
    old = [weakref.ref(one) for one in model.modules() if type(one) is nn.Linear and one is not model.lm_head]
    loaded = wrap_model(model)
    gc.collect()
    assert loaded.fused == WHOLE and len(old) == 14
    assert not any(one() is not None for one in old)


def test_quantization_without_any_quantized_layer_is_an_error() -> None:
    for options in ({"fuse": False}, {"attention": "torch"}):
        with pytest.raises(ValueError, match="no linear layer of this model was fused"):
            wrap_model(build(FAMILIES["qwen2"]()), quantization="int8", **options)
    with pytest.raises(ValueError, match="no linear layer of this model was fused"):
        wrap_model(build(FAMILIES["gpt2"]()), quantization="int8")
    with pytest.raises(ValueError, match="no layer of this model has weights in 4 bits; give a GGUF file"):
        wrap_model(build(FAMILIES["qwen2"]()), quantization="int4")


@pytest.mark.e2e
def test_int8_hardly_raises_the_demo_models_loss() -> None:
    """The negative log likelihood of a text changes by less than 1 %, as in the documentation."""
    text = (Path(__file__).parents[3] / "docs" / "how_it_works" / "map.md").read_text(encoding="utf-8")[:6000]
    losses = []
    for options in ({}, {"quantization": "int8"}):
        engine = Engine("demo", num_blocks=256, max_model_len=4096, **options)
        engine.add_request("a", text, SamplingParams(max_tokens=1, prompt_logprobs=0))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        entries = outputs[-1].prompt_logprobs[1:]
        losses.append(-sum(next(iter(entry.values())).logprob for entry in entries) / len(entries))
    exact, rounded = losses
    assert exact != rounded and abs(rounded / exact - 1) < 0.01, losses


@pytest.mark.e2e
def test_int8_outputs_do_not_depend_on_other_requests() -> None:
    """Outputs are equal to the last bit. Prompts are not cut into chunks, which would change the order of sums."""
    llm = LLM("demo", quantization="int8", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    prompts = [f"Chapter {i}: " + "a list, " * i for i in range(16)]
    together, alone = llm.generate(prompts, params), [llm.generate(prompt, params)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_fused_model_needs_its_own_attention() -> None:
    loaded = wrap_model(build(FAMILIES["qwen2"]()))
    for attention in ("torch", TorchAttention, TorchAttention(loaded.layers)):
        with pytest.raises(ValueError, match=r"fused layers, which need the attention numba, not torch"):
            Engine(loaded, attention=attention, num_blocks=8)
    plain = wrap_model(build(FAMILIES["qwen2"]()), fuse=False)
    assert Engine(plain, attention="torch", num_blocks=8).attention.name == "torch"


@pytest.mark.e2e
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_pool_dtype_works_with_any_model_dtype(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    """Fused layers and the model's own layers have similar rounding errors, so most of their tokens are equal."""
    tokens = []
    for options in ({}, {"attention": "torch"}):
        loaded = wrap_model(copy.deepcopy(build(FAMILIES["qwen3"](), seed=1)).to(dtype), **options)
        engine = Engine(loaded, num_blocks=64, block_size=4, kv_cache_dtype=kv_cache_dtype)
        assert str(engine.kv_pool.dtype) == f"torch.{kv_cache_dtype}"
        for i in range(12):
            engine.add_request(str(i), [5 + i] * (3 + i), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        done = {}
        while engine.has_unfinished_requests():
            done.update((one.request_id, one.token_ids) for one in engine.step() if one.finished)
        tokens.append([done[str(i)] for i in range(12)])
    same = sum(one[0] == other[0] for one, other in zip(*tokens, strict=True))
    assert same == 12 if dtype == torch.float32 and kv_cache_dtype == "float32" else same >= 9
