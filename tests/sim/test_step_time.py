"""Step times and KV blocks: both calls agree, every part of a load adds time, figures match datasheets."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pointsman.sim.devices import device
from pointsman.sim.errors import SimulationError
from pointsman.sim.model import ModelShape
from pointsman.sim.shapes import SHAPES
from pointsman.sim.step_time import (
    KNOWN_CHECKS,
    Efficiencies,
    LinearStepTime,
    RooflineStepTime,
    StepLoad,
    StepTime,
    efficiencies_of,
    prefill_attention,
)

H100 = device("h100")
LLAMA = SHAPES["meta-llama/Llama-3.1-8B"]
LLAMA_70B = SHAPES["meta-llama/Llama-3.1-70B"]
QWEN_MOE = SHAPES["Qwen/Qwen3-30B-A3B"]
GPT_OSS = SHAPES["openai/gpt-oss-20b"]
GEMMA = SHAPES["google/gemma-3-27b-it"]
DEEPSEEK = SHAPES["deepseek-ai/DeepSeek-V3"]

LINEAR = LinearStepTime(
    per_step=1e-3, per_row=1e-5, per_token=2e-5, per_context_token=3e-9, per_attended=1e-10, per_sample=1e-6
)
MODELS: dict[str, StepTime] = {
    "linear": LINEAR,
    "host": replace(LINEAR, host_overhead=2e-3),
    "prefill": replace(LINEAR, per_prefill=3e-3),
    "tiles": replace(LINEAR, per_prefill=3e-3, fill_tokens=300, decode_tokens=64),
    "asynchronous": replace(LINEAR, host_overhead=2.6e-3, asynchronous=True),
    "overlapping": replace(LINEAR, r=4.0, host_overhead=1e-4),
    "overlapping-asynchronous": replace(LINEAR, r=3.0, host_overhead=2.6e-3, asynchronous=True),
    "linear-experts": replace(LINEAR, expert_weights=5e-3, expert_share=0.06),
    "overlapping-experts": replace(LINEAR, expert_weights=5e-3, expert_share=0.06, r=4.0),
    "llama": RooflineStepTime(shape=LLAMA, device=H100),
    "llama-70b": RooflineStepTime(shape=LLAMA_70B, device=H100, tensor_parallel=4),
    "experts": RooflineStepTime(shape=QWEN_MOE, device=H100),
    "windows": RooflineStepTime(shape=GPT_OSS, device=H100, efficiencies=Efficiencies(r=3.7)),
    "gemma": RooflineStepTime(shape=GEMMA, device=H100),
    "latent": RooflineStepTime(shape=DEEPSEEK, device=device("h200"), tensor_parallel=8),
}


def bound_of(model: StepTime) -> RooflineStepTime:
    assert isinstance(model, RooflineStepTime)
    bound = model.bound()
    assert bound is not None
    return bound


MODELS |= {f"bound of {name}": bound_of(MODELS[name]) for name in ("llama", "experts", "windows", "latent")}
HIDING = {"asynchronous", "overlapping-asynchronous"}
"""Names of the step-time models in which the host's time may be longer than the device's."""
LOADS = {
    "decodes": StepLoad.of_rows([(999, 1)] * 8),
    "prefill": StepLoad.of_rows([(0, 2048)]),
    "mixed": StepLoad.of_rows([(500, 1)] * 20 + [(1000, 700)], num_samples=20),
}


def decode_load(rows: int, context: int) -> StepLoad:
    return StepLoad(rows, rows, context, context, rows)


# ---------------------------------------------------------------------- both calls, every model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_steps", [0, 1, 3, 50, 5000])
def test_times_of_consecutive_decodes_equal_those_of_single_steps(name: str, num_steps: int) -> None:
    model = MODELS[name]
    for rows, before in itertools.product((1, 7, 128), (1, 90, 1000, 3000)):  # before, across and beyond the windows
        first = rows * before
        seconds = model.of_decodes(rows, first, num_steps)
        assert (seconds.shape, seconds.dtype) == ((num_steps,), np.float64)
        some = np.unique(np.linspace(0, num_steps - 1, 12).astype(int)) if num_steps else []
        alone = [model.of_step(decode_load(rows, first + step * rows)) for step in some]
        np.testing.assert_allclose(seconds[some], alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_callers_may_modify_the_returned_decode_times(name: str) -> None:
    model = MODELS[name]
    first = model.of_decodes(4, 4000, 10)
    kept = first.copy()
    first += 1
    np.testing.assert_array_equal(model.of_decodes(4, 4000, 10), kept)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("part", StepLoad._fields)
def test_a_larger_load_never_takes_less_time(name: str, load: str, part: str) -> None:
    model, before = MODELS[name], LOADS[load]
    more = before._replace(**{part: 2 * getattr(before, part) + 1})
    assert model.of_step(more) >= model.of_step(before) > 0


@pytest.mark.parametrize("name", sorted(set(MODELS) - HIDING))
@pytest.mark.parametrize("load", LOADS)
def test_a_longer_step_takes_more_time(name: str, load: str) -> None:
    assert MODELS[name].of_step(StepLoad(*(4 * value for value in LOADS[load]))) > MODELS[name].of_step(LOADS[load])


@pytest.mark.parametrize("name", MODELS)
def test_step_time_models_can_be_pickled(name: str) -> None:
    model = pickle.loads(pickle.dumps(MODELS[name]))
    assert model == MODELS[name]
    assert hash(model) == hash(MODELS[name])
    assert model.of_step(LOADS["mixed"]) == MODELS[name].of_step(LOADS["mixed"])


def test_the_load_of_a_step_is_the_sum_over_its_rows() -> None:
    assert StepLoad.of_rows([(10, 1), (5, 3)]) == (4, 2, 19, 11 + 6 + 7 + 8, 2)
    assert StepLoad.of_rows([(10, 1)] * 3) == decode_load(3, 33)


# ---------------------------------------------------------------------- linear


def test_linear_step_time_is_the_weighted_sum_of_the_load() -> None:
    load = StepLoad(30, 3, 2000, 50_000, 2)
    expected = 1e-3 + 30 * 2e-5 + 3 * 1e-5 + 2000 * 3e-9 + 50_000 * 1e-10 + 2 * 1e-6
    assert LINEAR.of_step(load) == pytest.approx(expected, rel=1e-12)
    assert replace(LINEAR, host_overhead=0.5).of_step(load) == pytest.approx(expected + 0.5)


def test_per_prefill_is_added_once_per_step() -> None:
    model = replace(LINEAR, per_prefill=0.5)
    for name, added in {"decodes": 0.0, "prefill": 0.5, "mixed": 0.5}.items():
        assert model.of_step(LOADS[name]) == pytest.approx(LINEAR.of_step(LOADS[name]) + added)


def test_an_asynchronous_host_overlaps_with_the_device() -> None:
    load = LOADS["prefill"]
    hidden = replace(LINEAR, host_overhead=1e-3, asynchronous=True)
    assert hidden.of_step(load) == LINEAR.of_step(load)
    assert replace(hidden, host_overhead=9.0).of_step(load) == 9.0


def test_linear_step_time_survives_a_json_round_trip() -> None:
    model = replace(LINEAR, host_overhead=1e-4, asynchronous=True)
    assert LinearStepTime.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"per_step": -1.0}, "per_step is -1"),
        ({"per_token": float("nan")}, "per_token is nan"),
        ({"per_galaxy": 1.0}, "per_galaxy"),
        ({"per_token": "1"}, "per_token is '1'"),
        ({"per_token": True}, "per_token is True"),
        ({"asynchronous": 1}, "asynchronous is 1"),
    ],
)
def test_error_names_the_wrong_step_time_coefficient(values: dict[str, Any], match: str) -> None:
    with pytest.raises(SimulationError, match=match):
        LinearStepTime.from_dict(values)


# ---------------------------------------------------------------------- roofline


def test_a_llama_8b_decode_on_an_h100_is_bound_by_reading_weights() -> None:
    model = RooflineStepTime(shape=LLAMA, device=H100)
    (alone,) = model.of_decodes(1, 500, 1)
    fastest = LLAMA.num_active_params * 2 / H100.bandwidth
    assert fastest < alone < 2 * fastest  # 4.5 to 9 ms; reported for engines: 6 to 8
    (batch,) = model.of_decodes(64, 64 * 500, 1)
    assert alone < batch < 2 * alone  # 64 times the tokens


def test_a_prefill_is_bound_by_compute() -> None:
    model = RooflineStepTime(shape=LLAMA, device=H100)
    fastest = 8192 * LLAMA.linear_flops / H100.flops("bf16")
    assert fastest < model.of_step(StepLoad.of_rows([(0, 8192)])) < 2.5 * fastest


def test_few_tokens_use_few_experts_and_many_tokens_use_all() -> None:
    model = RooflineStepTime(shape=QWEN_MOE, device=H100)
    one, eight, many = (model.of_decodes(rows, rows * 100, 1)[0] for rows in (1, 8, 512))
    assert one < QWEN_MOE.weight_bytes * 0.3 / H100.bandwidth
    assert eight > 2 * one
    assert many > (QWEN_MOE.weight_bytes - QWEN_MOE.head_bytes) / H100.bandwidth


def test_time_of_windowed_layers_stops_growing_beyond_the_window() -> None:
    model = RooflineStepTime(shape=GEMMA, device=H100)
    full = RooflineStepTime(shape=replace(GEMMA, sliding_window=0, num_windowed_layers=0), device=H100)

    def growth(model: RooflineStepTime, context: int) -> float:
        return model.of_decodes(8, 16 * context, 1)[0] - model.of_decodes(8, 8 * context, 1)[0]

    assert growth(model, 400) == pytest.approx(growth(full, 400), rel=1e-9)
    assert growth(model, 4000) == pytest.approx(growth(full, 4000) * 10 / 62, rel=0.1)


def test_quantised_weights_are_read_faster() -> None:
    plain = replace(GPT_OSS, quantization=None)
    fast, slow = (RooflineStepTime(shape=shape, device=H100).of_decodes(64, 6400, 1)[0] for shape in (GPT_OSS, plain))
    assert slow > 2 * fast


def test_tensor_parallelism_divides_work_and_adds_communication() -> None:
    load = LOADS["prefill"]
    alone, two = (RooflineStepTime(shape=LLAMA, device=H100, tensor_parallel=n) for n in (1, 2))
    assert alone.of_step(load) / 2 < two.of_step(load) < alone.of_step(load)
    slow_link = RooflineStepTime(shape=LLAMA, device=replace(H100, link_bandwidth=32e9), tensor_parallel=2)
    assert slow_link.of_step(load) > two.of_step(load)


def test_devices_that_cannot_share_the_model_are_refused() -> None:
    with pytest.raises(SimulationError, match="tensor_parallel is 3"):
        RooflineStepTime(shape=LLAMA, device=H100, tensor_parallel=3)
    with pytest.raises(SimulationError, match="H100-SXM has no link"):
        RooflineStepTime(shape=LLAMA, device=replace(H100, link_bandwidth=0), tensor_parallel=2)


@pytest.mark.parametrize(
    "values",
    [{"memory": 1.1}, {"linear": 0.0}, {"per_step": -1.0}, {"fill": -1.0}, {"per_prefill": np.inf}, {"r": 0.5}],
)
def test_error_names_an_efficiency_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(SimulationError, match=next(iter(values))):
        Efficiencies(**values)


def test_an_efficiency_above_the_highest_clock_is_refused() -> None:
    shares = Efficiencies(linear=1.09)
    RooflineStepTime(shape=LLAMA, device=device("rtx5090"), efficiencies=shares)
    with pytest.raises(SimulationError, match=r"linear is 1\.2; H100-SXM reaches at most 1\.1 times"):
        RooflineStepTime(shape=LLAMA, device=H100, efficiencies=replace(shares, linear=1.2))


def test_efficiencies_depend_on_the_kind_of_device_and_its_link() -> None:
    a100, l40s, geforce = (efficiencies_of(device(name)) for name in ("a100", "l40s", "rtx5090"))
    assert a100.linear > efficiencies_of(H100).linear > l40s.linear  # by FLOP per byte of bandwidth
    assert geforce.linear > 1 > geforce.attention
    assert l40s.link < a100.link
    assert l40s.all_reduce_latency > a100.all_reduce_latency
    assert RooflineStepTime(shape=LLAMA, device=device("a100")).efficiencies == a100


# ---------------------------------------------------------------------- prefills


def test_attention_of_a_prefill_takes_longer_by_tiles_that_are_not_full() -> None:
    """One row with a prefill: as long as with `fill_tokens` more tokens at the same positions."""
    load = StepLoad.of_rows([(1000, 512)], num_samples=0)
    mean = 1000 + 513 / 2
    assert prefill_attention(load, 300, 64) == pytest.approx(300 * mean, rel=0.002)
    beside = StepLoad.of_rows([(1000, 512), *[(2000, 1)] * 4])
    assert prefill_attention(beside, 300, 64) == pytest.approx(300 * (mean + 2001) + 64 * 4 * 2001, rel=0.002)
    assert prefill_attention(beside, 300, 64, window=100) == pytest.approx(300 * 200 + 64 * 400, rel=0.002)


def test_a_small_budget_makes_a_prefill_longer() -> None:
    """A prompt of 25,000 tokens alone on an RTX 5090 took 1.45 s with 16,384 tokens a step, and 2.36 s with 512, in the
    lightest load of the measured runs, where some requests wait for others."""
    model = RooflineStepTime(shape=SHAPES["Qwen/Qwen2.5-3B-Instruct"], device=device("rtx5090"))

    def seconds(budget: int) -> float:
        starts = range(0, 25_000, budget)
        loads = (StepLoad.of_rows([(start, min(budget, 25_000 - start))], num_samples=0) for start in starts)
        return sum(map(model.of_step, loads))

    taken = [seconds(budget) for budget in (512, 2048, 16384)]
    assert taken == sorted(taken, reverse=True)
    assert 1.1 < taken[2] < 1.45
    assert 1.2 < taken[0] / taken[2] < 1.7


def test_verified_drafts_are_no_prefill() -> None:
    """A step in which every token is sampled computes no prompt, though it has more tokens than rows."""
    load = StepLoad.of_rows([(1000, 4)] * 8, num_samples=32)
    for name in ("llama", "tiles"):
        prefill = load._replace(num_samples=31)
        assert MODELS[name].of_step(load) < MODELS[name].of_step(prefill) - 0.9e-3


def test_a_longer_context_of_decoding_rows_makes_a_prefill_longer() -> None:
    model = MODELS["llama"]
    rows = [[(500, 512), *[(context, 1)] * 20] for context in (500, 5000)]
    short, long = (model.of_step(StepLoad.of_rows(each)) for each in rows)
    read = 20 * 4500 * LLAMA.kv_bytes_per_token()[0] / H100.bandwidth
    assert long > short + read


def test_the_roofline_caveat_names_model_and_device() -> None:
    caveat = RooflineStepTime(shape=LLAMA, device=H100).caveat()
    assert LLAMA.name in caveat
    assert H100.name in caveat
    assert "TTFT by -24% to +1%, TPOT by -12% to -1%, end-to-end times by -19% to +0%" in caveat
    assert "nothing was measured on H100-SXM" in caveat
    assert "nothing was measured" not in RooflineStepTime(shape=LLAMA, device=device("a100")).caveat()


@pytest.mark.parametrize("name", ["h100", "a100", "rtx5090", "rtx-pro-6000", "mi300x"])
def test_alternatives_span_the_measured_errors(name: str) -> None:
    model = RooflineStepTime(shape=LLAMA, device=device(name))
    others = model.alternatives()
    assert 3 <= len(others) <= 8
    assert model not in others
    assert len(set(others)) == len(others)
    bound = bound_of(model)
    worst = max(abs(1 / (1 + check.e2e) - 1) for check in KNOWN_CHECKS)
    for load in LOADS.values():
        seconds = [other.of_step(load) for other in others]
        assert min(seconds) < model.of_step(load) < max(seconds)
        assert min(seconds) >= bound.of_step(load)
        assert max(seconds) / model.of_step(load) > 1.1
    assert max(other.of_step(LOADS["prefill"]) for other in others) > (1 + worst) * model.of_step(LOADS["prefill"])


def test_a_bound_has_no_alternatives() -> None:
    assert bound_of(RooflineStepTime(shape=LLAMA, device=H100)).alternatives() == ()


@pytest.mark.parametrize("name", ["llama", "llama-70b", "experts", "windows", "gemma", "latent"])
def test_no_step_is_shorter_than_the_bound(name: str) -> None:
    model = MODELS[name]
    assert isinstance(model, RooflineStepTime)
    best = replace(model, efficiencies=Efficiencies(memory=0.95, linear=1, attention=1, link=1, per_step=0, fill=0))
    bound = bound_of(model)
    for load in LOADS.values():
        assert 0 < bound.of_step(load) <= best.of_step(load) * 1.0001 < model.of_step(load)


def test_the_bound_of_a_decode_is_the_time_of_its_bytes() -> None:
    bound = bound_of(RooflineStepTime(shape=LLAMA, device=H100))
    read = LLAMA.num_active_params * 2 + (8 * 1000 + 8) * 131072
    assert bound.of_step(decode_load(8, 8 * 1000)) == pytest.approx(read / (0.95 * H100.bandwidth), rel=1e-9)


def test_the_bound_holds_if_the_positions_of_a_batch_are_in_one_row() -> None:
    """A step's load has only sums: the same sums may belong to rows of any lengths."""
    bound = bound_of(RooflineStepTime(shape=GEMMA, device=H100))
    rows = [(20_000, 1), *[(10, 1)] * 7]
    seen = sum(min(before + 1, GEMMA.sliding_window) for before, _ in rows)
    full, windowed = GEMMA.kv_bytes_per_token()
    load = StepLoad.of_rows(rows)
    read = GEMMA.num_active_params * 2 + full * load.num_context_tokens + windowed * seen + 8 * (full + windowed)
    assert bound.of_step(load) <= read / (0.95 * H100.bandwidth)


def test_the_figures_of_this_machine_bound_nothing() -> None:
    cpu = replace(H100, name="cpu", kind="cpu")
    assert RooflineStepTime(shape=LLAMA, device=cpu).bound() is None


@pytest.mark.parametrize("shape", [LLAMA, QWEN_MOE, GPT_OSS], ids=lambda shape: shape.name)
def test_near_returns_a_linear_step_time_close_to_the_roofline(shape: ModelShape) -> None:
    """At the load for which it is made, and at others with the same share of context in windows."""
    model = RooflineStepTime(shape=shape, device=H100)
    typical = StepLoad.of_rows([(500, 1)] * 20 + [(0, 100)])
    for load in (
        typical,
        StepLoad.of_rows([(500, 1)] * 4 + [(0, 20)]),
        StepLoad.of_rows([(500, 1)] * 100 + [(0, 500)]),
    ):
        assert model.to_linear(typical).of_step(load) == pytest.approx(model.of_step(load), rel=0.05)
