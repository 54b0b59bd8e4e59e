"""The race in Triton, interpreted on a CPU, gives the same tokens as the races in PyTorch and in compiled CPU code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling import race_triton
from pointsman.engine.sampling.batch import SamplingBatch
from pointsman.engine.sampling.race import mix_array
from pointsman.engine.sampling.race_kernels import draw_rows
from pointsman.engine.sampling.race_triton import DeviceParameters, DeviceRace
from pointsman.engine.sampling.sampler import Sampler, choose_on_cpu, choose_with_pytorch
from tests.engine.sampling.test_sampler import SamplingRow, chi_square, step_of
from tests.forms import short_or_long
from tests.triton_ahead import compile_all, kernel_of
from tests.triton_interpreter import quick_calls

V = 1000
HOTTEST = float(np.finfo(np.float32).max)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with quick_calls():
        yield


def batch_of(rows: list[dict[str, float]], seed: int = 0) -> SamplingBatch:
    """A batch of rows of SamplingParams' arguments, with random keys; temperature 0 is greedy."""
    random = np.array([at for at, one in enumerate(rows) if one.get("temperature", 1.0) > 0], dtype=np.int64)
    columns = {
        name: np.array([rows[at].get(name, default) for at in random], dtype=dtype)
        for name, default, dtype in (
            ("temperature", 1.0, np.float32),
            ("top_k", 0, np.int64),
            ("top_p", 1.0, np.float64),
            ("min_p", 0.0, np.float64),
        )
    }
    keys = mix_array(np.arange(len(rows), dtype=np.uint64) + np.uint64(seed << 32))[random]
    return SamplingBatch(len(rows), random, keys=keys, **columns)


def choose(logits: Tensor, batch: SamplingBatch, spare_rows: int = 0) -> tuple[list[int], list[bool]]:
    """The tokens and `ok` that `DeviceRace.choose` writes over output arrays and workspaces full of wrong values."""
    race = DeviceRace(len(logits) + spare_rows, logits.shape[1], "cpu")
    for name, value in vars(race).items():
        if isinstance(value, Tensor):
            value.fill_(math.nan if value.is_floating_point() else 0x5A5A5A5A)
            assert name.startswith("_")
    columns = DeviceParameters.columns(batch, len(logits) + spare_rows)
    parameters = DeviceParameters(**{name: torch.from_numpy(column) for name, column in columns.items()})
    tokens = torch.full((len(logits),), -(2**62))
    ok = torch.full((len(logits),), 77, dtype=torch.uint8)
    race.choose(logits, parameters, tokens, ok)
    assert set(ok.tolist()) <= {0, 1}
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all(), "rows that are not ok also have valid tokens"
    return tokens.tolist(), ok.bool().tolist()


def check(logits: Tensor, rows: list[dict[str, float]], seed: int = 0) -> list[int]:
    """Check that the three races choose equal tokens; returns the token of each row that is ok, and None for other
    rows."""
    batch = batch_of(rows, seed)
    tokens, ok = choose(logits, batch)
    whole = logits.float()
    for expected, expected_ok in (choose_with_pytorch(whole, batch), choose_on_cpu(whole, batch, draw_rows)):
        assert ok == expected_ok.tolist()
        wrong = [at for at in range(len(rows)) if ok[at] and tokens[at] != expected[at]]
        assert not wrong, [(at, rows[at], tokens[at], expected[at]) for at in wrong]
    return [token for token, is_ok in zip(tokens, ok, strict=True) if is_ok]


def mixture(random: np.random.Generator, num_rows: int, vocab_size: int) -> list[dict[str, float]]:
    """Random sampling parameters of rows. Every third row has neither top-k nor top-p, and some of these rows are
    greedy."""
    rows: list[dict[str, float]] = []
    for at in range(num_rows):
        one: dict[str, float] = {
            "temperature": float(random.choice([0.01, 0.3, 0.7, 1.0, 1.5, 30.0])),
            "min_p": float(random.choice([0.0, 0.0, 0.001, 0.05, 0.5, 1.0])),
        }
        if at % 3:
            one["top_k"] = int(random.choice([-1, 0, 1, 2, 20, vocab_size // 2, vocab_size - 1, vocab_size, 2**40]))
            one["top_p"] = float(random.choice([1e-9, 0.1, 0.5, 0.8, 0.95, 0.999, 1.0]))
        elif at % 2:
            one["temperature"] = 0.0
        rows.append(one)
    return rows


# ----------------------------------------------------------------------------------------------- equal to the others


@pytest.mark.parametrize(("spread", "dtype"), [(0.5, torch.float32), (3.0, torch.bfloat16), (12.0, torch.float16)])
def test_rows_of_mixed_logits_get_the_tokens_of_the_cpu_race(spread: float, dtype: torch.dtype) -> None:
    """Rows have flat, usual or sharp logits, and every fifth row is mostly masked; in bfloat16 tokens tie at every
    limit."""
    random = np.random.default_rng(int(spread))
    num_rows = short_or_long(45, 400)
    logits = torch.randn(num_rows, V, generator=torch.Generator().manual_seed(9)) * spread
    logits[::5, random.permutation(V)[: V - 15].copy()] = -math.inf
    tokens = check(logits.to(dtype), mixture(random, num_rows, V), seed=int(spread))
    assert len(tokens) == num_rows and len(set(tokens)) > num_rows // 3


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 4096, 4097, 9001])
def test_any_number_of_splits_gives_the_tokens_of_the_cpu(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    check(logits, mixture(random, 8, vocab_size), seed=vocab_size)


def test_rows_with_too_many_candidates_are_searched_whole() -> None:
    """Rows with top-k, with top-p and with both have 4,500 tokens of nearly equal weight, more than the list of
    candidates holds."""
    vocab_size = 4500
    assert race_triton.CAPACITY.value < vocab_size
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)) * 0.01
    batch = batch_of([{"top_p": 0.95}, {"top_k": 4300}, {"top_k": 4400, "top_p": 0.97, "min_p": 0.5}])
    race = DeviceRace(3, vocab_size, "cpu")
    tokens, _ = race.draw(logits, batch)
    assert (race._num_listed > race_triton.CAPACITY.value).all()
    assert tokens.tolist() == choose_with_pytorch(logits, batch)[0].tolist()


def test_logits_may_be_a_slice_and_parameters_may_have_more_rows() -> None:
    wide = torch.randn(6, V + 24, generator=torch.Generator().manual_seed(4))
    wide[:, V:] = 99.0
    logits, rows = wide[:, :V], mixture(np.random.default_rng(1), 6, V)
    tokens, _ = choose(logits, batch_of(rows), spare_rows=3)
    assert tokens == check(logits.contiguous(), rows)


def test_a_rows_token_does_not_depend_on_other_rows() -> None:
    rows = mixture(np.random.default_rng(5), 12, V)
    logits = torch.randn(12, V, generator=torch.Generator().manual_seed(5)) * 2
    batch = batch_of(rows)
    together, _ = choose(logits, batch)
    alone = [choose(logits[at : at + 1], batch.of_row(at))[0][0] for at in range(12)]
    assert together == alone


@st.composite
def hard_rows(draw: Any) -> tuple[list[list[float]], list[dict[str, float]]]:
    """Random rows with few distinct logits of any sign and size (also zeros of both signs), masked tokens, and any
    parameters."""
    vocab_size = draw(st.integers(1, 40))
    logit = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 8.0, -math.inf]),
        st.floats(-60.0, 60.0, width=16),
    )
    row = st.lists(logit, min_size=vocab_size, max_size=vocab_size)
    params = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-3, 0.25, 1.0, 2.0, 1e6, HOTTEST]),
            "top_k": st.integers(-1, vocab_size + 1),
            "top_p": st.sampled_from([1e-12, 0.31, 0.77, 0.983, 1.0]),
            "min_p": st.sampled_from([0.0, 1e-30, 0.013, 0.41]),
        }
    )
    num_rows = draw(st.integers(1, 3))
    return [draw(row) for _ in range(num_rows)], [draw(params) for _ in range(num_rows)]


@given(hard_rows(), st.integers(0, 1000))
@settings(max_examples=short_or_long(20, 400))
def test_any_logits_and_parameters_get_the_tokens_of_the_cpu(
    case: tuple[list[list[float]], list[dict[str, float]]], seed: int
) -> None:
    check(torch.tensor(case[0]), case[1], seed)


# ------------------------------------------------------------------------------------------------------ special cases


def test_rows_without_a_finite_maximum_are_not_ok() -> None:
    logits = torch.zeros(12, 30)
    logits[:, 17] = 5.0
    logits[0:3, 3] = math.nan
    logits[3:6, 29] = math.inf
    logits[6:9] = -math.inf
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.01}, {"temperature": 0.01, "top_k": 2}]
    tokens, ok = choose(logits, batch_of(kinds * 4))
    assert ok == [False] * 9 + [True] * 3
    assert tokens[9:] == [17] * 3
    assert check(logits, kinds * 4) == [17] * 3


def test_greedy_rows_choose_the_first_maximum_in_any_split() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [4095, 4096, 8999]] = 2.0
    logits[1, [4100, 8999]] = 2.0
    logits[2] = -math.inf
    logits[2, [8998, 8999]] = -7.0
    assert check(logits, [{"temperature": 0.0}] * 3) == [4095, 4100, 8998]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((60, 50), -math.inf)
    logits[:, [7, 30]] = torch.tensor([0.0, -2.0])
    kinds: list[dict[str, float]] = [{"temperature": HOTTEST}, {"top_k": 40}, {"top_p": 0.99999}, {"top_k": 2}]
    assert set(check(logits, kinds * 15)) == {7, 30}


def test_extreme_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[-5e3, 4e4, 4e4 - 1.0, 3.3e38, 3.3e38, -3.3e38]]).repeat(40, 1)
    assert set(check(logits, [{"temperature": 2e-5}] * 20 + [{"temperature": 2e-5, "top_p": 0.9}] * 20)) == {3, 4}
    logits = torch.linspace(-50, 50, 8).repeat(60, 1)
    hot: list[dict[str, float]] = [{"temperature": HOTTEST}, {"temperature": HOTTEST, "top_p": 0.5}]
    assert set(check(logits, hot * 30)) == set(range(8)), "all weights are 1, so they tie at the limit of top-p"


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(36, 1)
    assert set(check(logits, [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 2, "top_p": 0.5}] * 12)) == {0, 2, 3, 4}
    assert set(check(logits[:8], [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 0.0}] * 2)) == {0}
    zeros = torch.tensor([[-1.0, 0.0, -0.0, 0.0]]).repeat(16, 1)
    assert set(check(zeros, [{"top_k": 1}] * 16)) == {1, 2, 3}


def test_top_p_meets_its_limit_within_a_millionth() -> None:
    """Ten tokens have nearly the same probability, 0.1. The seventh is kept if the limit is 1e-6 above the sum of six,
    and cut if the limit is 1e-6 below. With the chosen keys the seventh wins among seven.
    """
    logits = (0.1 + torch.arange(10, dtype=torch.float64) * 1e-4).log().float()[None]
    six = float(torch.softmax(logits[0].double(), 0)[4:].sum())
    above = batch_of([{"top_p": six + 1e-6}] * 60)
    tokens, _ = choose_with_pytorch(logits.expand(60, -1), above)
    seventh = (tokens == 3).nonzero()[0].tolist()
    assert len(seventh) >= 3
    for at in seventh[:3]:
        own = above.of_row(at)
        assert choose(logits, own)[0] == [3]
        below = replace(own, top_p=np.array([six - 1e-6]))
        assert choose(logits, below)[0] == choose_with_pytorch(logits, below)[0].tolist() != [3]


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """min-p keeps 4 of 6 tokens, with and without top-k. The limit 16.3 of the chi-squared statistic is that of 3
    degrees of freedom at 0.1 %."""
    draws = short_or_long(100, 2000)
    logits = torch.tensor([0.9, -3.0, 1.5, 0.2, -0.4, 1.2])
    kept = [0, 2, 3, 5]
    kinds = [{"temperature": 1.3, "min_p": 0.25}, {"temperature": 1.3, "min_p": 0.25, "top_k": 5}]
    for own in kinds[: short_or_long(1, 2)]:
        tokens, _ = choose(logits.repeat(draws, 1), batch_of([own] * draws, seed=3))
        counts = np.bincount(tokens, minlength=6)
        expected = torch.softmax(logits[kept].double() / 1.3, 0).numpy() * draws
        assert counts.sum() == counts[kept].sum()
        assert chi_square(counts[kept], expected) < 16.3


# ------------------------------------------------------------------------------------------------------- the interface


def test_columns_have_each_rows_parameters_and_unused_rows_are_greedy() -> None:
    batch = batch_of([{"temperature": 0.0}, {"temperature": 0.5, "top_k": 2**40, "top_p": 0.8, "min_p": 0.1}])
    columns = DeviceParameters.columns(batch, 3)
    assert {name: (str(column.dtype), column.tolist()) for name, column in columns.items()} == {
        "temperature": ("float32", [0.0, 0.5, 0.0]),
        "top_k": ("int32", [0, 2**31 - 1, 0]),
        "top_p": ("float64", [1.0, 0.8, 1.0]),
        "min_p": ("float32", [0.0, float(np.float32(0.1)), 0.0]),
        "keys": ("int64", [0, int(batch.keys.view(np.int64)[0]), 0]),
    }
    with pytest.raises(ValueError, match="has 2 rows, and the columns have only 1"):
        DeviceParameters.columns(batch, 1)


def test_invalid_arguments_are_refused_with_the_remedy() -> None:
    race = DeviceRace(2, 8, "cpu")
    columns = DeviceParameters.columns(batch_of([{}, {}]), 2)
    parameters = DeviceParameters(**{name: torch.from_numpy(column) for name, column in columns.items()})
    tokens, ok = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.uint8)
    logits = torch.zeros(2, 8)
    race.choose(logits[:0], parameters, tokens[:0], ok[:0])
    for message, arguments in (
        ("must be [n, 8]", (logits[:, :7], parameters, tokens, ok)),
        ("max_rows is 2; make a DeviceRace", (torch.zeros(3, 8), parameters, tokens, ok)),
        ("torch.float64 with strides", (logits.double(), parameters, tokens, ok)),
        ("strides (1, 2)", (torch.zeros(8, 2).T, parameters, tokens, ok)),
        ("parameters.top_p is [2] torch.float32", (logits, replace(parameters, top_p=torch.ones(2)), tokens, ok)),
        ("tokens is [1] torch.int64; it must be contiguous, [2]", (logits, parameters, tokens[:1], ok)),
        ("ok is [2] torch.bool", (logits, parameters, tokens, ok.bool())),
    ):
        with pytest.raises(ValueError) as error:
            race.choose(*arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="vocab_size is 524288; it must be 1 to 524287"):
        DeviceRace(1, 1 << 19, "cpu")
    with pytest.raises(ValueError, match="max_rows is 0"):
        DeviceRace(0, 8, "cpu")


def test_a_gpus_sampler_draws_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's device selects the Triton kernels, although the logits are on the CPU here. A larger step gets
    larger workspaces."""
    drawn: list[int] = []
    draw = DeviceRace.draw
    monkeypatch.setattr(DeviceRace, "draw", lambda race, *args: drawn.append(race.max_rows) or draw(race, *args))
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.6, "logit_bias": {3: 4.0}}, {}]
    sampler = Sampler(300, device="cuda")
    for num_rows in (4, 3, 6):
        rows = [SamplingRow(SamplingParams(seed=at, **kinds[at % 4]), at, at, (1,)) for at in range(num_rows)]
        step = step_of(rows)
        logits = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(num_rows)) * 3
        logits[2, 9] = math.nan if num_rows == 6 else 0.0
        expected = Sampler(300).sample(logits, *step)
        sampled = sampler.sample(logits, *step)
        assert sampled.ok.tolist() == expected.ok.tolist()
        assert sampled.token_ids[sampled.ok].tolist() == expected.token_ids[expected.ok].tolist()
        assert sampled.ok.all() == (num_rows != 6)
    half = logits[:2].bfloat16()
    step = step_of(rows[:2])
    assert sampler.sample(half, *step).token_ids.tolist() == Sampler(300).sample(half, *step).token_ids.tolist()
    assert drawn == [4, 4, 8, 8]
    sampler.sample(logits[:1], *step_of(rows[:1]))
    assert len(drawn) == 4, "greedy rows alone need no kernels"


# --------------------------------------------------------------------------------------------------- for a real device

TYPES = {
    "row_stride": "i32", "vocab_size": "i32", "num_splits": "i32", "maxima": "*fp32", "argmaxima": "*i32",
    "counts": "*i32", "num_listed": "*i32", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp64",
    "min_ps": "*fp32", "keys": "*i64", "bests": "*fp64", "winners": "*i32", "masses": "*i64", "listed": "*i32",
    "tokens": "*i64", "ok": "*u8", "PADDED_SPLITS": "constexpr",
}  # fmt: skip
NUM_WARPS = {"_maxima": 8, "_race_or_count": 8, "_list_candidates": 8, "_finish": 4}


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_for_gpus_without_spills(arch: int) -> None:
    kernels = []
    for logits_type in ("*fp32", "*bf16", "*fp16"):
        for padded_splits in (1, 64):
            for name, num_warps in NUM_WARPS.items():
                function = getattr(race_triton, name)
                signature = {name: (TYPES | {"logits": logits_type})[name] for name in function.arg_names}
                constexprs = {"PADDED_SPLITS": padded_splits} if "PADDED_SPLITS" in signature else {}
                divisible = [name for name, kind in signature.items() if kind.startswith("*")]
                options = {"num_warps": num_warps}
                if logits_type == "*fp32":  # bfloat16 stands for a vocabulary of no multiple of 16
                    divisible += ["row_stride", "vocab_size"]
                kernels.append(kernel_of(function, signature, constexprs, options=options, divisible=divisible))
    for kernel, found in zip(kernels, compile_all(kernels, arch), strict=True):
        print(f"sm_{arch} {kernel.name} {kernel.signature['logits']} {kernel.constexprs}: {found}")
        assert (found.stack_bytes, found.spill_stores, found.spill_loads) == (0, 0, 0), kernel
        assert found.registers <= 168, kernel  # three programs of `_finish` share a multiprocessor
        assert found.shared_bytes <= 16_384, kernel
