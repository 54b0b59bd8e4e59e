"""Part a: compares Triton's attention and sampling kernels with float64 and with PyTorch on the same device.

Attention: random steps of prompt chunks and decodes over a shuffled pool whose free slots are NaN. After the write,
every slot of the pool is checked. Outputs are compared with attention in float64, computed row by row. Memory that
outputs will probably be allocated from is filled with NaN before.

Sampling: random rows and parameters, masked tokens, NaN, ties. Tokens must be those of `choose_with_pytorch`.

Triton needs at least a second to compile each form of a kernel, so several processes share the cases.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_check.part import Setting
from gpu_check.roofline import seconds_of
from pointsman.engine.attention.paged import AttentionBackend, PagedBatch
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.kv.layout import LayerShape
from pointsman.engine.kv.pool import KVPool, blocks_for
from pointsman.engine.sampling.batch import SamplingBatch
from pointsman.engine.sampling.sampler import choose_with_pytorch

UNITS = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Allowed rounding error of each type, relative to values of 1. For long sums, float32 has 32 times its rounding."""
INTERPRETED = ("float32", "float16")
"""Triton's interpreter multiplies the bits of bfloat16 as if they were integers."""
MAX_UNITS, RMS_UNITS = 4.0, 1.0
"""Limits of the largest error relative to the largest value, and of the errors' RMS relative to the outputs' RMS."""
NUM_WORKERS = 8
MAX_OTHER = 0.01
"""Maximum share of rows with top-p that get another token, because rounding changes the sums of probabilities."""

Factory = Callable[[list[LayerShape], torch.device], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Case:
    """One form of attention."""

    name: str
    shape: LayerShape
    """(KV heads, key dim, value dim, heads)."""
    block_size: int = 32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = (
    Case("128", LayerShape(8, 128, 128, 32)),
    Case("64 window", LayerShape(8, 64, 64, 32), block_size=16, window=128),
    Case("256 softcap window", LayerShape(2, 256, 256, 8), window=300, softcap=50.0),
    Case("64 sinks window", LayerShape(8, 64, 64, 64), window=128, has_sinks=True),
    Case("80 one head each", LayerShape(4, 80, 80, 4), block_size=16),
    Case("96 groups of 6", LayerShape(2, 96, 96, 12), softcap=30.0),
    Case("32 groups of 2", LayerShape(3, 32, 32, 6), block_size=8),
    Case("192 and 128", LayerShape(2, 192, 128, 16), has_sinks=True),
    Case("128 groups of 7", LayerShape(1, 128, 128, 7), block_size=64, window=64, softcap=20.0, has_sinks=True),
)
TINY_CASES = (
    Case("32 groups of 2", LayerShape(2, 32, 32, 4), block_size=8),
    Case("16 and 24, all", LayerShape(1, 16, 24, 3), block_size=4, window=9, softcap=5.0, has_sinks=True),
)


@dataclass(slots=True)
class Outcome:
    """The errors of one case in one type."""

    name: str
    dtype: str
    largest: float = 0.0
    """Largest error of the backend, in units of the type."""
    rms: float = 0.0
    torch_rms: float = 0.0
    """Largest error of PyTorch's backend, in units of the type."""
    num_steps: int = 0
    wrong: list[str] = field(default_factory=list)


def run(setting: Setting) -> None:
    """Run the part."""
    cases = TINY_CASES if setting.tiny else CASES
    dtypes = INTERPRETED if not setting.on_gpu else tuple(UNITS)
    jobs = [(case, dtype, setting.device, setting.tiny) for case in cases for dtype in dtypes]
    num_workers = min(NUM_WORKERS, os.cpu_count() or 1, len(jobs))
    spawning = multiprocessing.get_context("spawn")  # the device's libraries do not survive a fork
    with ProcessPoolExecutor(num_workers, mp_context=spawning) as workers:
        race = workers.submit(_run_race, setting.device, setting.tiny)
        futures = {workers.submit(_run_case, *job): job for job in jobs}
        for future in as_completed(futures):
            case, dtype = futures[future][:2]
            try:
                outcome = future.result()
            except Exception as error:  # this case fails, and the others continue
                setting.findings.wrong(f"attention {case.name} {dtype}: {type(error).__name__}: {error}")
                continue
            _report(setting, outcome)
        try:
            outcomes = race.result()
        except Exception as error:
            setting.findings.wrong(f"sampling: {type(error).__name__}: {error}")
            return
    for each in outcomes:
        wrong = each.pop("wrong")
        setting.findings.row("sampling kernels beside PyTorch", **each)
        for text in wrong:
            setting.findings.wrong(text)


def _report(setting: Setting, outcome: Outcome) -> None:
    setting.findings.row(
        "attention kernels: errors in units of the type",
        case=outcome.name,
        dtype=outcome.dtype,
        steps=outcome.num_steps,
        largest=outcome.largest,
        rms=outcome.rms,
        torch_rms=outcome.torch_rms,
    )
    for text in outcome.wrong:
        setting.findings.wrong(f"attention {outcome.name} {outcome.dtype}: {text}")


# --------------------------------------------------------------------------------------------------------- attention


def _run_case(case: Case, dtype: str, device: str, tiny: bool) -> Outcome:
    from pointsman.engine.attention.triton_backend import TritonAttention

    return check_case(TritonAttention, case, dtype, device, tiny=tiny)


def check_case(factory: Factory, case: Case, dtype: str, device: str, *, tiny: bool) -> Outcome:
    """Compare a backend with float64, in random steps."""
    outcome = Outcome(case.name, dtype)
    for seed in range(2 if tiny else 5):
        if outcome.wrong:
            break
        step = RandomStep(case, dtype, device, seed, tiny=tiny)
        got, problems = step.compute(factory)
        outcome.wrong += [f"step {seed}: {text}" for text in problems]
        beside, _ = step.compute(TorchAttention)
        want = step.expected()
        unit = UNITS[dtype]
        largest = float((got.double() - want).abs().max() / step.largest_value) / unit
        rms, torch_rms = (relative_rms(one.double(), want) / unit for one in (got, beside))
        outcome.largest, outcome.rms = max(outcome.largest, largest), max(outcome.rms, rms)
        outcome.torch_rms = max(outcome.torch_rms, torch_rms)
        outcome.num_steps += 1
        if not (largest <= MAX_UNITS and rms <= RMS_UNITS):  # also NaN
            outcome.wrong.append(
                f"step {seed}: errors of {largest:.3g} units at most, {rms:.3g} by root mean square; limits "
                f"{MAX_UNITS:g} and {RMS_UNITS:g}"
            )
    return outcome


def relative_rms(got: Tensor, want: Tensor) -> float:
    """The root mean square of the errors relative to that of the expected values."""
    return float(((got - want).square().mean() / want.square().mean()).sqrt())


class RandomStep:
    """A step of random rows, its pool and all keys, values and queries, from a seed.

    Every third step has only decodes.
    """

    def __init__(self, case: Case, dtype: str, device: str, seed: int, *, tiny: bool) -> None:
        self.case, self.dtype, self.device = case, getattr(torch, dtype), torch.device(device)
        rng = np.random.default_rng([seed, case.shape.k_dim])
        num_rows, longest, chunk = (4, 24, 12) if tiny else (24, 1500, 300)
        self.query_lens = np.where(rng.random(num_rows) < 0.5, 1, rng.integers(2, chunk, num_rows))
        if seed % 3 == 1:
            self.query_lens[:] = 1
        self.computed = np.where(rng.random(num_rows) < 0.2, 0, rng.integers(0, longest, num_rows))
        totals = self.query_lens + self.computed
        needs = [blocks_for(total, case.block_size) for total in totals.tolist()]
        self.num_blocks = sum(needs) + 3
        ids = rng.permutation(self.num_blocks)
        self.tables = np.full((num_rows, max(needs) + 2), 10**6)  # entries past a row's blocks must not be read
        for row, (end, need) in enumerate(zip(np.cumsum(needs), needs, strict=True)):
            self.tables[row, :need] = ids[end - need : end]
        shape, generator = case.shape, torch.Generator(self.device).manual_seed(seed)

        def random(count: int, heads: int, dim: int) -> Tensor:
            return torch.randn(count, heads, dim, generator=generator, device=self.device).to(self.dtype)

        self.keys = [random(total, shape.num_kv_heads, shape.k_dim) for total in totals.tolist()]
        self.values = [random(total, shape.num_kv_heads, shape.v_dim) for total in totals.tolist()]
        self.query = random(int(self.query_lens.sum()), shape.num_heads, shape.k_dim)
        self.sinks = random(1, shape.num_heads, 1).flatten() if case.has_sinks else None
        self.scale = shape.k_dim**-0.5

    @property
    def largest_value(self) -> float:
        return max(float(values.abs().max()) for values in self.values)

    def compute(self, factory: Factory) -> tuple[Tensor, list[str]]:
        """A backend's output [T, heads, v_dim] over a new pool, and the faults of the pool afterwards."""
        backend = factory([self.case.shape], self.device)
        pool = KVPool(
            [self.case.shape], num_blocks=self.num_blocks, block_size=self.case.block_size, dtype=self.dtype,
            device=self.device,
        )  # fmt: skip
        pool.keys[0].fill_(math.nan)
        pool.values[0].fill_(math.nan)
        self._write(backend, pool, np.zeros_like(self.computed), self.computed)
        plan = self._write(backend, pool, self.computed, self.query_lens)
        problems = self._problems_of(pool)
        poison = torch.full_like(self.query, math.nan)
        del poison  # the allocator reuses its memory for the next tensor
        got = backend.attend(
            plan,
            self.query,
            pool.keys[0],
            pool.values[0],
            scale=self.scale,
            window=self.case.window,
            softcap=self.case.softcap,
            sinks=self.sinks,
        )
        return got, problems

    def _write(self, backend: AttentionBackend, pool: KVPool, first: Any, counts: Any) -> Any:
        rows = np.nonzero(counts)[0]
        batch = PagedBatch.build(counts[rows], first[rows], self.tables[rows], self.case.block_size)
        plan = backend.plan(batch)
        key, value = (
            torch.cat([parts[row][first[row] : first[row] + counts[row]] for row in rows])
            for parts in (self.keys, self.values)
        )
        backend.write(plan, key, value, pool.keys[0], pool.values[0])
        return plan

    def _problems_of(self, pool: KVPool) -> list[str]:
        """The faults of all slots: written KV, zeros after a row's end in its last block, and NaN in all others."""
        size, problems = self.case.block_size, []
        for name, cache, parts in (("keys", pool.keys[0], self.keys), ("values", pool.values[0], self.values)):
            want = torch.full_like(cache, math.nan)
            for row, part in enumerate(parts):
                num_slots = blocks_for(len(part), size) * size
                filled = torch.cat([part, part.new_zeros(num_slots - len(part), *part.shape[1:])])
                blocks = torch.from_numpy(self.tables[row, : num_slots // size]).to(self.device)
                want[blocks] = filled.view(-1, size, *part.shape[1:]).transpose(1, 2)
            num_other = int((cache != want).logical_and(~(cache.isnan() & want.isnan())).sum())
            if num_other:
                problems.append(f"{num_other} of {want.numel()} numbers in the pool's {name} are not what was written")
        return problems

    def expected(self) -> Tensor:
        """[T, heads, v_dim] float64: attention, computed row by row."""
        case, group, outputs, start = self.case, self.case.shape.num_heads // self.case.shape.num_kv_heads, [], 0
        for row, (count, before) in enumerate(zip(self.query_lens.tolist(), self.computed.tolist(), strict=True)):
            query = self.query[start : start + count].double()
            start += count
            key = self.keys[row].double().repeat_interleave(group, dim=1)
            value = self.values[row].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,shd->hts", query, key) * self.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            position = torch.arange(before, before + count, device=self.device)[:, None]
            other = torch.arange(before + count, device=self.device)[None]
            hidden = other > position
            if case.window is not None:
                hidden |= other <= position - case.window
            scores = scores.masked_fill(hidden, -math.inf)
            if self.sinks is not None:
                column = self.sinks.double()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, column], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : before + count]
            outputs.append(torch.einsum("hts,shd->thd", weights, value))
        return torch.cat(outputs)


# ---------------------------------------------------------------------------------------------------------- sampling


def _run_race(device: str, tiny: bool) -> list[dict[str, Any]]:
    from pointsman.engine.sampling.race_triton import DeviceParameters, DeviceRace

    num_rows, sizes = (8, (700,)) if tiny else (256, (151936, 262144, 50257))
    dtypes = INTERPRETED if device == "cpu" else tuple(UNITS)
    outcomes = []
    for vocab_size in sizes:
        race = DeviceRace(num_rows, vocab_size, torch.device(device))

        def choose(logits: Tensor, batch: SamplingBatch, race: Any = race) -> tuple[Any, Any]:
            columns = DeviceParameters.columns(batch, len(logits))
            tensors = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
            tokens = torch.full((len(logits),), -1, dtype=torch.int64, device=device)
            ok = torch.full((len(logits),), 7, dtype=torch.uint8, device=device)
            race.choose(logits, DeviceParameters(**tensors), tokens, ok)
            return tokens.cpu().numpy(), ok.cpu().numpy()

        for dtype in dtypes:
            outcome = check_race(choose, num_rows, vocab_size, dtype, device)
            outcomes.append(outcome)
        if device != "cpu":
            outcome["greedy_ms"] = _time_race(race, DeviceParameters, num_rows, vocab_size, device)
    return outcomes


def _time_race(race: Any, parameters: Any, num_rows: int, vocab_size: int, device: str) -> float:
    """Milliseconds for choosing tokens of plain greedy rows in bfloat16."""
    logits = torch.randn(num_rows, vocab_size, device=device).bfloat16()
    no_ints, no_floats = np.zeros(0, dtype=np.int64), np.zeros(0)
    batch = SamplingBatch(
        num_rows, no_ints, no_floats.astype(np.float32), no_ints, no_floats, no_floats, no_ints.astype(np.uint64)
    )
    columns = parameters.columns(batch, num_rows)
    tensors = parameters(**{name: torch.from_numpy(column).to(device) for name, column in columns.items()})
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    ok = torch.empty(num_rows, dtype=torch.uint8, device=device)
    return seconds_of(lambda: race.choose(logits, tensors, tokens, ok), device) * 1e3


def check_race(
    choose: Callable[[Tensor, SamplingBatch], tuple[Any, Any]], num_rows: int, vocab_size: int, dtype: str, device: str
) -> dict[str, Any]:
    """Compare `choose` with `choose_with_pytorch`, in random rounds.

    Args:
        choose: logits [n, vocab_size] and their batch -> tokens [n], and whether each row has a finite maximum [n].
    """
    outcome: dict[str, Any] = {
        "vocabulary": vocab_size, "dtype": dtype, "rows": 0, "other tokens": 0, "of them top-p": 0, "wrong": [],
    }  # fmt: skip
    for seed in range(3):
        logits, batch, is_top_p = random_rows(num_rows, vocab_size, dtype, device, seed)
        tokens, ok = choose(logits, batch)
        want_tokens, want_ok = choose_with_pytorch(logits.float(), batch)
        if not np.array_equal(ok.astype(bool), want_ok) or ok.max(initial=0) > 1:
            outcome["wrong"].append(f"sampling {vocab_size} {dtype}, round {seed}: ok is {ok.tolist()}")
        differs = (tokens != want_tokens) & want_ok
        outcome["rows"] += num_rows
        outcome["other tokens"] += int(differs.sum())
        outcome["of them top-p"] += int((differs & is_top_p).sum())
    num_sure = outcome["other tokens"] - outcome["of them top-p"]
    if num_sure or outcome["of them top-p"] > MAX_OTHER * outcome["rows"]:
        outcome["wrong"].append(
            f"sampling {vocab_size} {dtype}: {outcome['other tokens']} of {outcome['rows']} rows got another token "
            f"than in PyTorch, {outcome['of them top-p']} of them with top-p, of which {MAX_OTHER:.0%} may"
        )
    return outcome


def random_rows(
    num_rows: int, vocab_size: int, dtype: str, device: str, seed: int
) -> tuple[Tensor, SamplingBatch, np.ndarray[Any, Any]]:
    """Logits, their sampling parameters, and whether each row has top-p: greedy rows, all kinds of cuts, odd rows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator, device=device) * 4).to(getattr(torch, dtype))
    masked = torch.rand(num_rows // 4, vocab_size, generator=generator, device=device) < 0.9
    logits[: num_rows // 4].masked_fill_(masked, -math.inf)
    logits[-1] = -math.inf
    logits[-2, vocab_size // 2] = math.nan
    logits[-3] = 0.0  # all tie
    random = np.nonzero(rng.random(num_rows) < 0.8)[0]
    count = len(random)

    def some(values: np.ndarray[Any, Any], off: float) -> np.ndarray[Any, Any]:
        return np.where(rng.random(count) < 0.5, values, off)

    top_p = some(rng.uniform(0.01, 0.99, count), 1.0)
    is_top_p = np.zeros(num_rows, dtype=bool)
    is_top_p[random] = top_p < 1.0
    batch = SamplingBatch(
        num_rows=num_rows,
        random=random,
        temperature=rng.choice([1e-3, 0.3, 0.6, 1.0, 2.0, 50.0], count).astype(np.float32),
        top_k=some(rng.choice([1, 5, 50, 1000], count), 0).astype(np.int64),
        top_p=top_p,
        min_p=some(rng.uniform(0.001, 0.5, count), 0.0),
        keys=rng.integers(0, 2**64, count, dtype=np.uint64),
    )
    return logits, batch, is_top_p
