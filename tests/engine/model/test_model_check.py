"""Models that pass the checks compute correctly in every type, and planted faults are found.

Faults are planted in the paged path or in a model, and the self-check or the probe must find each. test_equality.py
compares the tokens of each family; test_model_loader.py has the families that are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from pointsman.engine.attention import paged as attention
from pointsman.engine.attention.backends import BackendFactory
from pointsman.engine.attention.paged import AttentionBackend, PagedBatch
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.errors import UnsupportedModel
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.forward import run_model
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.self_check import TOLERANCE, SelfCheck, relative_error
from tests.engine.tiny_models import COMMON, FAMILIES, ORIGINAL_LONGROPE, VOCAB_SIZE, build, longrope

DIFFER = "logits of paged attention differ"


@pytest.fixture(params=["torch", "fast"])
def backend(request: pytest.FixtureRequest) -> BackendFactory:
    if request.param == "torch":
        return TorchAttention
    factory: BackendFactory = pytest.importorskip("pointsman.engine.attention.numba_backend").NumbaAttention
    return factory


# ------------------------------------------------------------------------------------------------ the self-check


class Faulty(TorchAttention):
    """A backend that ignores one feature of attention."""

    def __init__(self, layers: Sequence[LayerShape], device: torch.device | str, feature: str) -> None:
        super().__init__(layers, device)
        self.feature = feature

    def attend(self, plan: Any, query: Tensor, keys: Tensor, values: Tensor, **features: Any) -> Tensor:
        return super().attend(plan, query, keys, values, **{**features, self.feature: NEUTRAL.get(self.feature)})


NEUTRAL = {"scale": 1.0}
"""Feature of attention -> the value that turns it off, if this is not None."""


@pytest.mark.parametrize(
    ("family", "feature"),
    [
        ("mistral", "window"),
        ("gemma2", "softcap"),
        ("gemma3", "window"),
        ("gemma2", "scale"),
        ("gpt-oss", "sinks"),
        ("gpt-oss", "window"),
    ],
)
def test_a_backend_that_ignores_an_attention_feature_is_refused(family: str, feature: str) -> None:
    def factory(layers: Sequence[LayerShape], device: torch.device) -> AttentionBackend:
        return Faulty(layers, device, feature)

    with pytest.raises(UnsupportedModel, match=DIFFER):
        wrap_model(build(FAMILIES[family]()), attention=factory)


@pytest.mark.parametrize(("family", "feature"), [("mistral", "window"), ("gpt-oss", "sinks"), ("gpt-oss", "window")])
def test_the_self_check_finds_an_ignored_feature_in_bfloat16(family: str, feature: str) -> None:
    def factory(layers: Sequence[LayerShape], device: torch.device) -> AttentionBackend:
        return Faulty(layers, device, feature)

    with pytest.raises(UnsupportedModel, match=DIFFER):
        wrap_model(build(FAMILIES[family]()).to(torch.bfloat16), attention=factory)


def test_large_vocabularies_and_many_layers_pass_in_bfloat16() -> None:
    config = LlamaConfig(**{**COMMON, "vocab_size": 32_000, "num_hidden_layers": 48})
    assert wrap_model(build(config).to(torch.bfloat16)).dtype == torch.bfloat16


def sharp_mistral() -> Any:
    """A Mistral with very large attention scores, so that rounding changes the attention, as in some trained models."""
    config = FAMILIES["mistral"]()
    config.num_hidden_layers = 8
    model = build(config, seed=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 8
    return model.to(torch.bfloat16)


def test_the_self_check_accepts_a_models_own_bfloat16_rounding() -> None:
    model = sharp_mistral()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = wrap_model(model, fuse=False)
    check = SelfCheck(loaded.model, loaded.layers, loaded.context, loaded.attention)
    errors = torch.cat([relative_error(*pair) for pair in zip(check._paged_logits(), check.plain, strict=True)])
    assert float(errors.quantile(0.75)) > TOLERANCE[torch.bfloat16], "the model's own rounding must be bad"
    assert wrap_model(sharp_mistral()).dtype == torch.bfloat16, "also with fused layers"
    after = loaded.model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


def test_the_self_check_finds_faults_despite_large_rounding_errors() -> None:
    def factory(layers: Sequence[LayerShape], device: torch.device) -> AttentionBackend:
        return Faulty(layers, device, "window")

    with pytest.raises(UnsupportedModel, match="measured against float32; rounding alone causes"):
        wrap_model(sharp_mistral(), attention=factory)


def test_a_loaded_model_can_be_checked_with_another_backend(backend: BackendFactory) -> None:
    loaded = wrap_model(build(FAMILIES["gemma2"]()), fuse=False)
    device = loaded.model.device
    SelfCheck(loaded.model, loaded.layers, loaded.context, backend(loaded.layers, device)).run()
    with pytest.raises(UnsupportedModel, match=DIFFER):
        SelfCheck(loaded.model, loaded.layers, loaded.context, Faulty(loaded.layers, device, "softcap")).run()


def test_the_self_check_finds_kv_that_is_written_to_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.PagedBatch.build.__func__

    def shifted(cls: Any, *arguments: Any) -> Any:
        batch = original(cls, *arguments)
        batch.slot_offsets = batch.block_size - 1 - batch.slot_offsets
        batch.tails = np.zeros_like(batch.tails)  # with shifted slots, these would be wrong
        return batch

    monkeypatch.setattr(attention.PagedBatch, "build", classmethod(shifted))
    with pytest.raises(UnsupportedModel, match=DIFFER):
        wrap_model(build(FAMILIES["qwen3"]()))


def test_the_self_check_finds_state_shared_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model mixes neighbouring tokens outside attention, as convolutions do, so requests in a batch affect each
    other."""
    model = build(FAMILIES["llama"]())
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda hidden: original(hidden + hidden.roll(1, dims=1)))
    with pytest.raises(UnsupportedModel, match=DIFFER):
        wrap_model(model)


def test_the_probe_finds_a_layer_that_attends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["llama"]())
    attend = model.model.layers[1].self_attn
    original = attend.forward
    monkeypatch.setattr(attend, "forward", lambda *a, **k: (original(*a, **k), original(*a, **k))[1])
    with pytest.raises(UnsupportedModel, match=r"2 of 2 layers called .* in 3 calls"):
        wrap_model(model)


@pytest.mark.parametrize("family", ["qwen3", "bloom-like"])
def test_a_model_whose_forward_fails_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = build(FAMILIES["qwen3"]())
    layer = 1 if family == "qwen3" else 0

    def fail(*arguments: Any, **options: Any) -> Any:
        raise TypeError("there is no mask\nand a second line")

    monkeypatch.setattr(model.model.layers[layer].self_attn, "forward", fail)
    with pytest.raises(UnsupportedModel, match=rf"there is no mask\), after {layer} of 2 layers called") as error:
        wrap_model(model)
    assert "\n" not in str(error.value)


def test_a_paged_model_does_not_run_without_a_runner() -> None:
    model = wrap_model(build(FAMILIES["qwen2"]())).model
    with pytest.raises(RuntimeError, match="outside a step"):
        model(input_ids=torch.tensor([[1, 2]]))


# ------------------------------------------------------------------------- rotary embeddings with two sets of angles


def logits_of(loaded: LoadedModel, sequences: list[Tensor], chunk: int, backend: BackendFactory) -> list[Tensor]:
    """Teacher-forced logits [len, vocab_size] of sequences that share every step, `chunk` tokens of each at a time."""
    size = 4
    width = -(-max(map(len, sequences)) // size)
    tables = np.arange(width * len(sequences)).reshape(width, len(sequences)).T
    pool = KVPool(loaded.layers, num_blocks=tables.size, block_size=size, dtype=loaded.dtype)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), chunk):
        rows = [row for row, sequence in enumerate(sequences) if len(sequence) > start]
        pieces = [sequences[row][start : start + chunk] for row in rows]
        counts = [len(piece) for piece in pieces]
        batch = PagedBatch.build(np.array(counts), np.full(len(rows), start), tables[rows], size)
        attention = backend(loaded.layers, loaded.model.device)
        loaded.context.begin([attention.plan(batch)], pool, attention)
        logits = run_model(loaded.model, torch.cat(pieces), torch.from_numpy(batch.positions), keep=None)
        loaded.context.end()
        for row, part in zip(rows, torch.split(logits, counts), strict=True):
            parts[row].append(part)
    return [torch.cat(part) for part in parts]


def random_tokens(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def plain_logits(model: Any, sequence: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=sequence[None], use_cache=False).logits[0]


def test_a_longrope_model_defaults_to_its_original_length() -> None:
    model = build(FAMILIES["phi3-longrope-short"]())
    assert wrap_model(copy.deepcopy(model)).max_position_embeddings == ORIGINAL_LONGROPE
    assert wrap_model(copy.deepcopy(model), max_model_len=40).max_position_embeddings == ORIGINAL_LONGROPE
    assert wrap_model(copy.deepcopy(model), max_model_len=ORIGINAL_LONGROPE + 1).max_position_embeddings == 256


@pytest.mark.parametrize(("max_model_len", "lengths"), [(None, (20, 32, 5)), (64, (33, 60, 40))])
def test_longrope_logits_do_not_depend_on_the_batch(max_model_len: int | None, lengths: tuple[int, ...]) -> None:
    model = build(FAMILIES["phi3-longrope-short"].__class__("phi3", "", longrope(32))())
    loaded = wrap_model(copy.deepcopy(model), max_model_len=max_model_len)
    sequences = random_tokens(*lengths)
    for got, sequence in zip(logits_of(loaded, sequences, 7, TorchAttention), sequences, strict=True):
        assert relative_error(got, plain_logits(model, sequence)).max() < 1e-3


def test_longrope_with_long_frequencies_warns(caplog: pytest.LogCaptureFixture) -> None:
    wrap_model(build(FAMILIES["phi3-longrope-long"]()), max_model_len=256)
    assert "frequencies for more than 8 tokens" in caplog.text


def test_longrope_that_still_depends_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILIES["phi3-longrope-short"]())
    rotary = model.model.rotary_emb
    original = rotary.forward

    def scaled(hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = original(hidden, positions)
        scale = 2.0 if positions.max() >= ORIGINAL_LONGROPE else 1.0
        return cos * scale, sin * scale

    monkeypatch.setattr(rotary, "forward", scaled)
    with pytest.raises(UnsupportedModel, match="'longrope': its frequencies depend on the longest sequence"):
        wrap_model(model)


# ------------------------------------------------------------------------------------------------------ bfloat16

ROUNDING = 0.02
"""Largest median error of a row of bfloat16 logits between two orders of summation, relative to the row's spread."""


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt2", "gpt-oss", "deepseek-v3", "olmo2"])
def test_bfloat16_logits_are_about_as_exact_as_transformers(name: str, backend: BackendFactory) -> None:
    """Teacher-forced logits of 130 positions, computed in steps of 7 tokens of three sequences.

    They are close to transformers' in bfloat16, and at most 1.2 times as far from float32 as transformers' own.
    """
    model = build(FAMILIES[name](), seed=3)  # with 2, rounding decides between two of gpt-oss's experts
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    sequences = random_tokens(60, 33, 37)
    exact = torch.cat([plain_logits(model, sequence) for sequence in sequences])
    theirs = torch.cat([plain_logits(narrow, sequence) for sequence in sequences])
    loaded = wrap_model(narrow, attention=backend)
    ours = torch.cat(logits_of(loaded, sequences, 7, backend))
    assert ours.dtype == torch.bfloat16
    error, their_error = relative_error(ours, exact).median(), relative_error(theirs, exact).median()
    apart = relative_error(ours, theirs).median()
    print(f"{name}: ours to float32 {error:.4f}, theirs {their_error:.4f}, ours to theirs {apart:.4f}")
    assert apart <= ROUNDING
    assert error <= 1.2 * their_error
