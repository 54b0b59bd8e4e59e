"""Step times: the protocol that the simulator calls, and two models of how long a step takes.

A model describes a step by five sums over its rows (`StepLoad`), because a scheduler knows these at no cost:

    LinearStepTime     seconds are a weighted sum of the five; the weights are fitted to a log.
    RooflineStepTime   seconds from the dimensions of a model and the figures of a device, without any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pointsman.sim.devices import Device, Dtype, Link
from pointsman.sim.errors import SimulationError
from pointsman.sim.model import ModelShape

FloatArray = npt.NDArray[np.float64]


class StepLoad(NamedTuple):
    """The work of a step, as sums over the step's rows."""

    num_tokens: int
    """Number of tokens computed in the step."""
    num_rows: int
    """Number of requests in the step."""
    num_context_tokens: int
    """Number of positions whose KV is read: in each row, the positions computed before and in the step."""
    num_attended: int
    """Sum over the computed tokens of the number of positions that a token attends to, its own included."""
    num_samples: int
    """Number of positions at which the model chooses a token: one for each row that samples, and one for each draft
    that the step verifies."""

    @classmethod
    def of_rows(cls, rows: list[tuple[int, int]], num_samples: int | None = None) -> StepLoad:
        """The load of rows given as (tokens computed before, tokens computed in the step); `num_samples` None: all rows
        sample."""
        return cls(
            num_tokens=sum(new for _, new in rows),
            num_rows=len(rows),
            num_context_tokens=sum(before + new for before, new in rows),
            num_attended=sum(before * new + new * (new + 1) // 2 for before, new in rows),
            num_samples=len(rows) if num_samples is None else num_samples,
        )


def is_prefill(load: StepLoad) -> bool:
    """Whether a step computes prompts: it then has more tokens than rows, and more than it samples."""
    return load.num_tokens > load.num_rows and load.num_tokens > load.num_samples


def prefill_attention(load: StepLoad, fill_tokens: float, decode_tokens: float, window: float = math.inf) -> float:
    """Attended positions that the attention of a step with a prefill costs beyond those that are attended to.

    A kernel computes tiles of many tokens, each tile on one processor of the device, over all positions of its row.
    Few tiles leave processors idle, and the last tiles of many do: a prefill takes as long as one of `fill_tokens` more
    tokens. So do the decoding rows of the step. The tile of a decoding row has one token, and costs as much as one with
    `decode_tokens`.

    The load has sums only: it is taken as that of one row with a prefill, and rows that decode.

    Args:
        load: load of a step with a prefill.
        window: maximum number of positions that a token attends to.
    """
    more = load.num_tokens - load.num_rows
    # Decodes add the same to both sums, so the difference is that of the prefill's tokens.
    before = (load.num_attended - load.num_context_tokens) / more
    decoding = max(0.0, load.num_context_tokens - before - more / 2)
    others = max(1, load.num_rows - 1)
    decoding = min(decoding, others * window)
    return fill_tokens * (min(before, window) + decoding / others) + decode_tokens * decoding


class StepTime(Protocol):
    """A model of how long steps take. Pure: equal loads take equal seconds."""

    def of_step(self, load: StepLoad) -> float:
        """Seconds of one step."""
        ...

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        """Seconds of each of `num_steps` consecutive steps in which every row decodes one token.

        The first step reads `num_context_tokens` positions (each row's computed tokens and the new one, summed). Every
        later step reads `num_rows` more. Equals `of_step` on the same loads to 1e-12 relative.

        Returns:
            Array [num_steps] of float64, which the caller may modify.
        """
        ...


@runtime_checkable
class RankStepTime(StepTime, Protocol):
    """Step times of one of several data parallel ranks, which share the experts of a model."""

    def beside(self, num_tokens: int) -> StepTime:
        """The step times while the other ranks together compute `num_tokens` tokens in the same step."""
        ...


# Step numbers 0, 1, ... of `of_decodes`: a slice costs less than an arange. Read-only, because all models share it.
_NUMBERS: FloatArray = np.arange(4096, dtype=np.float64)
_NUMBERS.flags.writeable = False
_MAX_BESIDE = 4096
"""Maximum number of step times beside other ranks that are kept."""
_MAX_SCALAR_STEPS = 4
"""Maximum number of steps whose seconds are computed as floats, which is faster than arrays for few steps."""


def _step_numbers(num_steps: int) -> FloatArray:
    return _NUMBERS[:num_steps] if num_steps <= len(_NUMBERS) else np.arange(num_steps, dtype=np.float64)


# ---------------------------------------------------------------------- fitted

ATTENDED = 1e-4
"""Typical `per_attended / per_token`: FLOPs of an attended position in all layers, 4 * layers * hidden, relative to
those of a token, 2 * parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """Seconds as a weighted sum of a step's load; `calibrate` fits it to a log.

    With `r` above 1, the parts bound by memory (step, context) overlap with the parts bound by compute (tokens,
    attended), as in `RooflineStepTime`. With the default all parts are summed.

    Raises:
        SimulationError: a coefficient is negative, or not a finite number.
    """

    per_step: float = 0.0
    """Seconds of any step."""
    per_row: float = 0.0
    per_token: float = 0.0
    per_context_token: float = 0.0
    per_attended: float = 0.0
    per_sample: float = 0.0
    per_prefill: float = 0.0
    """Additional seconds of a step that computes prompts, so has more tokens than rows and than `num_samples`: engines
    run decodes through kernels of their own, or captured as a graph."""
    host_overhead: float = 0.0
    """Seconds of the host's own work in a step: scheduling, inputs, outputs."""
    asynchronous: bool = False
    """Whether the host works on the next step while the device runs one. A step then takes the longer of the two
    times; otherwise their sum."""
    expert_weights: float = 0.0
    """Seconds to read the weights of all routed experts; memory time."""
    expert_share: float = 0.0
    """Share of the experts that a token touches: n tokens touch 1 - exp(-n * expert_share) of them."""
    r: float = 1.0
    """Memory and compute time m and c overlap to (m**r + c**r)**(1/r): 1 is their sum, 4 nearly their maximum."""
    fill_tokens: float = 0.0
    """Tokens by which attention of a prefill takes longer, see `prefill_attention`."""
    decode_tokens: float = 0.0
    """Tokens for which the token of a decoding row counts in a step with a prefill, see `prefill_attention`."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "asynchronous" and not (math.isfinite(value) and value >= 0):
                raise SimulationError(f"coefficient {name} is {value}; it must be finite and at least 0")
        if self.r < 1:
            raise SimulationError(f"r is {self.r}; it must be finite and at least 1")

    def of_step(self, load: StepLoad) -> float:
        memory = self._weights(load.num_tokens) + self.per_context_token * load.num_context_tokens
        attended: float = load.num_attended
        device = self.per_row * load.num_rows + self.per_sample * load.num_samples
        if is_prefill(load):
            device += self.per_prefill
            if self.fill_tokens or self.decode_tokens:
                attended += prefill_attention(load, self.fill_tokens, self.decode_tokens)
        compute = self.per_token * load.num_tokens + self.per_attended * attended
        device += memory + compute if self.r == 1 else math.pow(memory**self.r + compute**self.r, 1 / self.r)
        return max(device, self.host_overhead) if self.asynchronous else device + self.host_overhead

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        if self.r != 1:
            return self._overlapping_decodes(num_rows, num_context_tokens, num_steps)
        # Each row's token attends to the row's whole context: attended and context are the same sum.
        per_position = self.per_context_token + self.per_attended
        first = (
            self._weights(num_rows)
            + (self.per_row + self.per_token + self.per_sample) * num_rows
            + per_position * num_context_tokens
        )
        if not self.asynchronous:
            first += self.host_overhead
        seconds = _step_numbers(num_steps) * (per_position * num_rows)
        seconds += first
        if self.asynchronous and first < self.host_overhead:  # seconds never fall
            np.maximum(seconds, self.host_overhead, out=seconds)
        return seconds

    def _overlapping_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        context = _step_numbers(num_steps) * num_rows + num_context_tokens
        memory = context * self.per_context_token + self._weights(num_rows)
        compute = context * self.per_attended + self.per_token * num_rows
        seconds: FloatArray = (memory**self.r + compute**self.r) ** (1 / self.r)
        seconds += (self.per_row + self.per_sample) * num_rows
        if self.asynchronous:
            return np.maximum(seconds, self.host_overhead)
        seconds += self.host_overhead
        return seconds

    def _weights(self, num_tokens: int) -> float:
        if not self.expert_weights:
            return self.per_step
        return self.per_step - self.expert_weights * math.expm1(-num_tokens * self.expert_share)

    def to_dict(self) -> dict[str, Any]:
        """The coefficients by name, for JSON; `from_dict` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinearStepTime:
        """The model that `to_dict` described.

        Raises:
            SimulationError: a field is unknown, or a value has the wrong type or is out of range.
        """
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SimulationError(f"no coefficient is called {unknown[0]!r}; known are {', '.join(sorted(known))}")
        for name, value in values.items():
            wanted = bool if name == "asynchronous" else (int, float)
            if not isinstance(value, wanted) or (name != "asynchronous" and isinstance(value, bool)):
                raise SimulationError(
                    f"coefficient {name} is {value!r}; asynchronous must be true or false, all others numbers"
                )
        return cls(**values)


# ---------------------------------------------------------------------- from first principles


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """The shares of the peak figures that an engine's kernels reach on a device, and the overhead of a step.

    `efficiencies_of` has those of each kind of device. Calibrate where it matters.
    """

    memory: float = 0.85
    """Share of the peak memory bandwidth that accesses to weights, KV and activations reach."""
    linear: float = 0.7
    """Share of the peak FLOP/s that products with weights reach. Above 1 where a device runs at a higher clock than
    that of its datasheet; at most `Device.headroom`."""
    attention: float = 0.65
    """Share of the peak FLOP/s that attention reaches; the rest as for `linear`."""
    fill: float = 5000.0
    """Tokens by which attention of a prefill takes longer on a device with one head of 128 dimensions. More heads
    divide it, as they make more tiles of a token. Larger heads multiply it, as fewer of their tiles fit a processor.
    See `prefill_attention`."""
    decode_tokens: float = 64.0
    """Tokens for which the token of a decoding row counts in a step with a prefill, see `prefill_attention`. Latent
    attention has a kernel of its own for decodes: 0 there."""
    link: float = 0.7
    """Share of the peak link bandwidth that all-reduces reach."""
    host_link: float = 0.8
    """Share of the peak bandwidth to the host that copies of KV blocks from and to pinned memory reach."""
    all_reduce_latency: float = 10e-6
    """Minimum seconds of an all-reduce."""
    per_step: float = 0.6e-3
    """Seconds of any step: launch, sampling, and host work that the device does not hide."""
    per_row: float = 15e-6
    """Seconds of each row of a step: inputs, outputs, sampling."""
    per_prefill: float = 1e-3
    """Additional seconds of a step with a prefill, which is not captured as a graph."""
    r: float = 4.0
    """Memory and compute time m and c overlap to (m**r + c**r)**(1/r): 1 is their sum, infinity their maximum."""

    def __post_init__(self) -> None:
        for name in ("memory", "link", "host_link"):
            if not 0 < getattr(self, name) <= 1:
                raise SimulationError(f"efficiency {name} is {getattr(self, name)}; it must be above 0 and at most 1")
        for name in ("linear", "attention"):
            if not 0 < getattr(self, name) < math.inf:
                raise SimulationError(f"efficiency {name} is {getattr(self, name)}; it must be finite and above 0")
        for name in ("all_reduce_latency", "per_step", "per_row", "per_prefill", "fill", "decode_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SimulationError(f"{name} is {getattr(self, name)}; it must be finite and at least 0")
        if not self.r >= 1:
            raise SimulationError(f"r is {self.r}; it must be at least 1")


TYPICAL = Efficiencies()
"""Stands for the efficiencies of a device's kind, where none are given."""

LINEAR_BALANCE, ATTENTION_BALANCE = 400, 330
"""FLOP per byte of memory traffic at which products with weights, and attention, reach half of a device's peak; see
`efficiencies_of`."""


def efficiencies_of(device: Device) -> Efficiencies:
    """The efficiencies that are typical of a device, by its kind, its balance and its link to peers.

    A device with more FLOP/s for each byte/s of its memory reaches a smaller share of its FLOP/s: 1 / (1 + balance / b)
    with the constants above, which are fitted to runs of vLLM with Llama-3.2-3B on an A100 (balance 153). GeForce
    devices multiply at half the rate of their chips and at higher clocks than their datasheets say, so they reach their
    FLOP/s: fitted to the first two seeds of the runs with Qwen2.5-3B on an RTX 5090. `benchmarks/budget_runs.py` judges
    both on all other runs.

    Copies within the memory of an RTX PRO 6000 and an RTX 5090 reach 0.79 and 0.83 of the peak bandwidth. NCCL reduces
    over PCIe 5 in at least 24 us, and at 37 to 41 GB/s (voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md).
    """
    found = replace(TYPICAL, **_OF_LINK[device.link])
    if device.kind == "cpu":
        return replace(found, linear=0.65, attention=0.45)
    if device.kind == "geforce":
        return replace(found, memory=0.83, linear=1.09, attention=0.86)
    balance = device.flops("bf16") / device.bandwidth
    return replace(
        found,
        memory=0.8 if device.kind == "workstation" else found.memory,
        linear=1 / (1 + balance / LINEAR_BALANCE),
        attention=1 / (1 + balance / ATTENTION_BALANCE),
    )


_OF_LINK: Mapping[Link, dict[str, float]] = {
    "nvlink": {},
    "pcie": {"link": 0.6, "all_reduce_latency": 24e-6},
}

_BOUND = Efficiencies(
    memory=0.95, linear=1, attention=1, fill=0, decode_tokens=0, link=1, host_link=1, all_reduce_latency=0, per_step=0,
    per_row=0, per_prefill=0, r=math.inf,
)  # fmt: skip
"""Shares that no kernel exceeds, and no overhead. Refresh and turnarounds cost DRAM at least 5 % of its bandwidth."""


class _Terms(NamedTuple):
    """Seconds of the parts of a step, from the model's dimensions and the device's figures."""

    weights: float
    """Of reading the weights that every step reads."""
    head: float
    """Of reading the output head."""
    expert: float
    """Of reading one routed expert of each layer."""
    expert_use: float
    """Of a token's products with one routed expert of each layer, if experts are divided among ranks or devices;
    otherwise 0, and `token` has the products."""
    missed: float
    """Probability that a token misses an expert; 1 without experts."""
    written: float
    """Of writing a token's KV."""
    full_position: float
    """Of reading a position's KV, in the layers without a window; the next: in those with one."""
    windowed_position: float
    token: float
    """Of a token's products and activations."""
    sample: float
    """Of a sampled token's products with the output head."""
    full_attended: float
    """Of attention to one position, in the layers without a window; the next: in those with one."""
    windowed_attended: float
    full_decode: float
    """As `full_attended`, for the token of a decode; the next: in the layers with a window."""
    windowed_decode: float
    fill_tokens: float
    decode_tokens: float
    rest: float
    """Of overhead and all-reduces of any step."""
    rest_token: float
    """Of a token's all-reduces."""


class _Decodes(NamedTuple):
    """Seconds of a decode step with a fixed number of rows, as a function of the step's context c.

    Memory time m = m0 + m1 * c + m2 * min(c, cap); compute time k has the same form. The step takes the r-norm of m and
    k, plus `rest`.
    """

    memory: float
    memory_per_position: float
    memory_per_windowed: float
    compute: float
    compute_per_position: float
    compute_per_windowed: float
    cap: float
    rest: float


class Check(NamedTuple):
    """A comparison of step times from datasheets with measured runs: predicted / measured - 1 of the mean over the
    requests of a run, averaged over the runs."""

    device: str
    model: str
    num_runs: int
    ttft: float
    tpot: float
    e2e: float


KNOWN_CHECKS = (
    Check("RTX-5090", "Qwen2.5-0.5B", 60, -0.24, -0.10, -0.19),
    Check("RTX-5090", "Qwen2.5-3B", 300, -0.06, -0.03, -0.04),
    Check("RTX-5090", "SmolLM3-3B", 20, -0.13, -0.12, -0.13),
    Check("A100-80GB-SXM", "Qwen2.5-3B", 20, -0.20, -0.05, -0.15),
    Check("A100-80GB-SXM", "Llama-3.2-3B", 20, -0.15, -0.01, -0.10),
    Check("RTX-PRO-6000-Blackwell", "Llama-3.1-8B", 1, 0.01, -0.01, 0.00),
)
"""All comparisons. The first five: runs of vLLM 0.22 with long prompts and budgets of 512 to 16,384 tokens (P-PAS,
arXiv 2608.15171), with times of a client, which sees 0.1 to 0.4 s of each request outside the engine; `efficiencies_of`
was fitted to a part of them. The last: 300 ShareGPT requests to vLLM 0.19, with times of the engine (LLMServingSim
repository, bench/examples). benchmarks/budget_runs.py and tests/sim/test_calibrate.py compute them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepTime:
    """Seconds from what a step reads and computes, on `tensor_parallel` equal devices.

    Memory time: the weights of the layers once; the weights of the routed experts that are expected to be used if each
    token draws its experts evenly; the output head if a row samples; the KV of the context read and of the tokens
    written. Compute time: products with weights, attention, and the kernels between them, which read and write
    activations. Attention takes longer in steps with a prefill, see `prefill_attention`. Memory and compute time
    overlap by an r-norm. Two all-reduces a layer, and overhead by step and by row, are added.

    Approximations, because only sums over rows are known:

    - A windowed layer reads at most (window - 1) positions for each row and one for each token, and a token attends to
      at most `sliding_window`. The caps are applied to the sums. The result is exact if all rows are within the window
      or all beyond it, and too long for a mix.
    - Latent attention computes on latents for one token of each row, and on full heads for all other tokens.

    Left out: the tiles of matrix products (steps of a few tokens more cost nothing), kernels that are slower for
    particular shapes, skewed routing of experts, pipeline parallelism.

    With data parallelism, a rank's experts compute the tokens of all ranks. In each layer with experts, a rank receives
    the activations of the other ranks' tokens and sends back their results (vLLM's `allgather_reducescatter`).

    Raises:
        SimulationError: the devices cannot be connected, or the heads cannot be divided among them.
    """

    shape: ModelShape
    device: Device
    tensor_parallel: int = 1
    kv_dtype_bytes: float = 2
    efficiencies: Efficiencies = TYPICAL
    """Default: those of the device's kind, `efficiencies_of`."""
    is_bound: bool = False
    """Whether all approximations err towards shorter steps; `bound` sets it."""
    data_parallel: int = 1
    """Number of ranks, of `tensor_parallel` devices each, over all of whose devices the routed experts are divided."""
    has_expert_parallel: bool = False
    """Whether each of these devices has whole experts, so that a step waits for the device with the most work. False:
    each has an equal slice of every expert."""
    num_tokens_beside: int = 0
    """Number of tokens that the other ranks compute in the same step, see `beside`."""
    _beside: dict[int, RooflineStepTime] = field(default_factory=dict, init=False, repr=False, compare=False)
    _decodes: dict[int, _Decodes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of the formulas for the time of a decode step, by the step's number of rows."""

    _terms: _Terms = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_parallel(self.shape, self.device, self.tensor_parallel)
        check_experts_divided(self.shape, self.device, self.data_parallel, has_expert_parallel=self.has_expert_parallel)
        if self.efficiencies is TYPICAL:
            object.__setattr__(self, "efficiencies", efficiencies_of(self.device))
        for name in ("linear", "attention"):
            if (share := getattr(self.efficiencies, name)) > self.device.headroom:
                raise SimulationError(
                    f"efficiency {name} is {share}; {self.device.name} reaches at most {self.device.headroom} times "
                    "the FLOP/s of its datasheet"
                )
        object.__setattr__(self, "_terms", self._make_terms())

    def beside(self, num_tokens: int) -> RooflineStepTime:
        """The step times of a rank while the other ranks together compute `num_tokens` tokens in the same step."""
        if self.data_parallel == 1:
            return self
        found = self._beside.get(num_tokens)
        if found is None:
            if len(self._beside) >= _MAX_BESIDE:
                self._beside.clear()
            found = self._beside[num_tokens] = replace(self, num_tokens_beside=num_tokens)
        return found

    def of_step(self, load: StepLoad) -> float:
        terms, window = self._terms, self.shape.sliding_window
        num_tokens, num_rows, context, attended, num_samples = load
        # Attention of one token of each row is that of a decode: it attends to the row's context. All other tokens of
        # the row attend to the remaining positions. A prefill has so many that the first makes no difference.
        compute = (
            terms.token * num_tokens
            + terms.sample * num_samples
            + terms.full_attended * attended
            + (terms.full_decode - terms.full_attended) * context
        )
        if terms.expert_use:
            compute += self._expert_flop_seconds(num_tokens)
        memory = self._weight_seconds(num_tokens, num_samples) + terms.full_position * context
        if window:
            in_windows = self._num_windows(num_rows) * (window - 1) + num_tokens
            context = min(context, in_windows)
            attended = min(attended, in_windows if self.is_bound else num_tokens * window)
            memory += terms.windowed_position * context
            compute += terms.windowed_attended * attended + (terms.windowed_decode - terms.windowed_attended) * context
        rest = terms.rest + terms.rest_token * num_tokens + self.efficiencies.per_row * num_rows
        if num_tokens > num_rows and num_tokens > num_samples:
            rest += self.efficiencies.per_prefill
            compute += terms.full_attended * prefill_attention(load, terms.fill_tokens, terms.decode_tokens)
            if window:
                compute += terms.windowed_attended * prefill_attention(
                    load, terms.fill_tokens, terms.decode_tokens, window
                )
        r = self.efficiencies.r
        both = max(memory, compute) if r == math.inf else math.pow(math.pow(memory, r) + math.pow(compute, r), 1 / r)
        return both + rest

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        line = self._decodes.get(num_rows)
        if line is None:
            line = self._decodes[num_rows] = self._decode_line(num_rows)
        # Scalars first: this is the hot path, and a call of NumPy costs as much as ten operations on floats.
        memory_step, memory_base = line.memory_per_position * num_rows, line.memory
        compute_step, compute_base = line.compute_per_position * num_rows, line.compute
        memory_base += line.memory_per_position * num_context_tokens
        compute_base += line.compute_per_position * num_context_tokens
        mixed = False
        if line.cap:
            last = num_context_tokens + (num_steps - 1) * num_rows
            if num_context_tokens >= line.cap:
                memory_base += line.memory_per_windowed * line.cap
                compute_base += line.compute_per_windowed * line.cap
            elif last <= line.cap:
                memory_base += line.memory_per_windowed * num_context_tokens
                compute_base += line.compute_per_windowed * num_context_tokens
                memory_step += line.memory_per_windowed * num_rows
                compute_step += line.compute_per_windowed * num_rows
            else:
                mixed = True
        r = self.efficiencies.r
        if num_steps <= _MAX_SCALAR_STEPS and not mixed and r < math.inf:
            power, root = math.pow, 1 / r
            return np.array(
                [
                    power(
                        power(memory_base + step * memory_step, r) + power(compute_base + step * compute_step, r), root
                    )
                    + line.rest
                    for step in range(num_steps)
                ]
            )
        numbers = _step_numbers(num_steps)
        memory, compute = numbers * memory_step, numbers * compute_step
        memory += memory_base
        compute += compute_base
        if mixed:
            windowed = np.minimum(numbers * num_rows + num_context_tokens, line.cap)
            memory += windowed * line.memory_per_windowed
            compute += windowed * line.compute_per_windowed
        if r == math.inf:
            np.maximum(memory, compute, out=memory)
            memory += line.rest
            return memory
        memory **= r
        compute **= r
        memory += compute
        memory **= 1 / r
        memory += line.rest
        return memory

    def bound(self) -> RooflineStepTime | None:
        """Step times that no engine can go below with this model on these devices; None: the device's figures were
        measured on this machine, and other programs may exceed them.

        A step takes at least the time of its bytes at 95 % of the peak bandwidth, and at least the time of its FLOPs at
        the peak of the highest clock (`Device.headroom`). Overhead and communication take no time. Tokens choose the
        same experts. In layers with a window, the positions that are read belong to one row.
        """
        if self.device.kind == "cpu":
            return None
        return replace(self, efficiencies=_BOUND, is_bound=True)

    def to_linear(self, load: StepLoad) -> LinearStepTime:
        """This model as a `LinearStepTime`, the form that is fitted to logs; used as a start of a search.

        Both forms give the same seconds near `load`, except for the costs that `LinearStepTime` lacks: KV that is
        written, all-reduces of more tokens than the load has, and head FLOPs of prompts.

        Args:
            load: load of a typical step; determines the share of the context within windows.
        """
        shape, window = self.shape, self.shape.sliding_window
        context, attended = max(load.num_context_tokens, 1), max(load.num_attended, 1)
        read = min(1.0, (load.num_rows * (window - 1) + load.num_tokens) / context) if window else 0.0
        seen = min(1.0, load.num_tokens * window / attended) if window else 0.0
        terms = self._terms
        return LinearStepTime(
            per_step=terms.weights + terms.head + terms.rest + terms.rest_token * load.num_tokens,
            per_row=self.efficiencies.per_row + terms.sample,
            per_token=terms.token + self._expert_flop_seconds(load.num_tokens) / max(load.num_tokens, 1),
            per_context_token=terms.full_position + terms.windowed_position * read,
            per_attended=terms.full_attended + terms.windowed_attended * seen,
            per_prefill=self.efficiencies.per_prefill,
            expert_weights=terms.expert * shape.num_experts / self._num_expert_devices,
            expert_share=-math.log(terms.missed),
            r=self.efficiencies.r,
            fill_tokens=terms.fill_tokens,
            decode_tokens=terms.decode_tokens,
        )

    def alternatives(self) -> tuple[RooflineStepTime, ...]:
        """Equally plausible step times: efficiencies that span the errors of all `KNOWN_CHECKS`, and a wider span on a
        device on which nothing was measured; empty for a bound."""
        if self.is_bound:
            return ()
        is_measured = any(check.device == self.device.name for check in KNOWN_CHECKS)
        slow, fast = (0.8, 1.15) if is_measured else (0.7, 1.3)

        def changed(compute: float = 1.0, memory: float = 1.0, overhead: float = 1.0) -> RooflineStepTime:
            shares = self.efficiencies
            return replace(
                self,
                efficiencies=replace(
                    shares,
                    linear=min(shares.linear * compute, self.device.headroom),
                    attention=min(shares.attention * compute, self.device.headroom),
                    memory=min(shares.memory * memory, _BOUND.memory),
                    link=min(shares.link * memory, 1.0),
                    per_step=shares.per_step * overhead,
                    per_row=shares.per_row * overhead,
                    all_reduce_latency=shares.all_reduce_latency * overhead,
                ),
            )

        return (
            changed(slow, (1 + slow) / 2, 2.0),
            changed(fast, (1 + fast) / 2, 0.5),
            changed(compute=slow),
            changed(memory=(1 + slow) / 2),
            changed(overhead=2.5),
        )

    def caveat(self) -> str:
        """A warning for the reader of a result: the nature of this model, and its errors in all comparisons."""
        ranges = ", ".join(
            f"{name} by {_percent_range([getattr(check, field) for check in KNOWN_CHECKS])}"
            for name, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("end-to-end times", "e2e"))
        )
        devices = sorted({check.device for check in KNOWN_CHECKS})
        return (
            "Step times come from datasheets and assumed efficiencies, not from a measurement of "
            f"{self.shape.name} on {self.device.name}: calibrate with a log before you rely on them. In "
            f"{sum(check.num_runs for check in KNOWN_CHECKS)} measured runs of {len(KNOWN_CHECKS)} pairs of model and "
            f"device, the means of a pair were off: {ranges}. The devices were {', '.join(devices)}"
            f"{'' if self.device.name in devices else f'; nothing was measured on {self.device.name}'}."
        )

    # ------------------------------------------------------------------ parts

    def _num_windows(self, num_rows: int) -> int:
        """Number of rows whose windows are taken as full: all, or one if the result is a bound, because all positions
        may belong to one row."""
        return 1 if self.is_bound else num_rows

    def _decode_line(self, num_rows: int) -> _Decodes:
        terms, window = self._terms, self.shape.sliding_window
        return _Decodes(
            memory=self._weight_seconds(num_rows, num_rows),
            memory_per_position=terms.full_position,
            memory_per_windowed=terms.windowed_position,
            compute=(terms.token + terms.sample) * num_rows + self._expert_flop_seconds(num_rows),
            compute_per_position=terms.full_decode,
            compute_per_windowed=terms.windowed_decode,
            cap=float(num_rows + self._num_windows(num_rows) * (window - 1)) if window else 0.0,
            rest=terms.rest + (terms.rest_token + self.efficiencies.per_row) * num_rows,
        )

    def _weight_seconds(self, num_tokens: int, num_samples: int) -> float:
        """Seconds for weights read and KV written."""
        terms = self._terms
        seconds = terms.weights + terms.written * num_tokens
        if terms.expert:
            # A token misses an expert with probability 1 - k/E; n tokens miss it with that to the power of n.
            missed = terms.missed ** (1 if self.is_bound else num_tokens + self.num_tokens_beside)
            seconds += terms.expert * self._most_of_a_device(self.shape.num_experts, 1 - missed)
        return seconds + terms.head if num_samples else seconds

    def _expert_flop_seconds(self, num_tokens: int) -> float:
        """Seconds of products with routed experts, if they are divided among ranks or devices; otherwise 0, and `token`
        has them."""
        per_use = self._terms.expert_use
        if not per_use:
            return 0.0
        uses = (num_tokens + self.num_tokens_beside) * self.shape.experts_per_token
        return per_use * self._most_of_a_device(uses)

    def _make_terms(self) -> _Terms:
        shape, shares, parallel = self.shape, self.efficiencies, self.tensor_parallel
        byte = 1 / (self.device.bandwidth * shares.memory)
        full_kv, windowed_kv = shape.kv_bytes_per_token(self.kv_dtype_bytes, parallel)
        plain: Dtype = "fp32" if shape.dtype_bytes == 4 else "bf16"
        quantization = shape.quantization
        linear = self._flops(plain if quantization is None else quantization.computes_in) * shares.linear * parallel
        # The bound does not know the dtype in which kernels for an 8-bit cache compute.
        narrow = self.is_bound and self.kv_dtype_bytes < 2
        attention = self._flops("fp8" if narrow else plain) * shares.attention * parallel
        full, windowed = shape.num_full_layers / attention, shape.num_windowed_layers / attention
        activations = 0.0 if self.is_bound else shape.activation_bytes(parallel) * byte
        rest, rest_token = shares.per_step, 0.0
        if parallel > 1 and not self.is_bound:
            # A ring sends each byte 2(p - 1)/p times over every link.
            sent = 2 * (1 - 1 / parallel) * shape.hidden_size * shape.dtype_bytes
            rest += 2 * shape.num_layers * shares.all_reduce_latency
            rest_token = 2 * shape.num_layers * sent / (self.device.link_bandwidth * shares.link)
        if self.data_parallel > 1 and not self.is_bound:
            received = self.num_tokens_beside * shape.hidden_size * shape.dtype_bytes
            transfer = received / (self.device.link_bandwidth * shares.link)
            rest += 2 * shape.num_expert_layers * (shares.all_reduce_latency + transfer)
        routed = shape.num_expert_layers * 2 * shape.expert_params / linear  # of one use, on all devices of a rank
        return _Terms(
            weights=shape.common_bytes / parallel * byte,
            head=shape.head_bytes / parallel * byte,
            expert=0.0 if self.is_bound and self._is_spread else shape.num_expert_layers * shape.expert_bytes * byte,
            expert_use=routed * parallel if self._is_spread else 0.0,
            missed=1 - shape.experts_per_token / shape.num_experts if shape.num_experts else 1.0,
            written=(full_kv + windowed_kv) * byte,
            full_position=full_kv * byte,
            windowed_position=windowed_kv * byte,
            token=(2 * shape.common_params if self._is_spread else shape.linear_flops) / linear + activations,
            sample=shape.head_flops / (self._flops(plain) * shares.linear * parallel),
            full_attended=full * shape.attention_flops,
            windowed_attended=windowed * shape.attention_flops,
            full_decode=full * shape.decode_attention_flops,
            windowed_decode=windowed * shape.decode_attention_flops,
            fill_tokens=shares.fill * parallel / shape.num_heads * (shape.v_head_dim or shape.head_dim) / 128,
            decode_tokens=0.0 if shape.kv_lora_rank else shares.decode_tokens,
            rest=rest,
            rest_token=rest_token,
        )

    def _flops(self, dtype: Dtype) -> float:
        """FLOP/s of one device that efficiencies refer to."""
        return self.device.flops(dtype) * (self.device.headroom if self.is_bound else 1)

    @property
    def _is_spread(self) -> bool:
        """Whether the experts are divided among ranks, or as whole experts among devices."""
        return self.data_parallel > 1 or self.has_expert_parallel

    @property
    def _num_expert_devices(self) -> int:
        """Number of devices over which the routed experts are divided."""
        return self.data_parallel * self.tensor_parallel

    def _most_of_a_device(self, number: float, share: float | None = None) -> float:
        """Expected number of things on the device with the most of them: of `number` things, each on any device with
        equal probability; or of `number` things, equally many on each device, those used with probability `share`.
        Without expert parallelism every device has an equal share.

        With expert parallelism: the expected maximum of equal normal distributions (Blom, 1958), one for each device.
        """
        devices = self._num_expert_devices
        mean = number / devices * (1.0 if share is None else share)
        if not self.has_expert_parallel or devices == 1 or self.is_bound:
            return mean
        highest = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
        spread = math.sqrt(mean * (1 - (1 / devices if share is None else share)))
        limit = number if share is None else math.ceil(number / devices)
        return min(limit, mean + highest * spread)


def _percent_range(values: Sequence[float]) -> str:
    """The lowest and the highest value, in percent."""
    return f"{min(values):+.0%} to {max(values):+.0%}"


def check_experts_divided(shape: ModelShape, device: Device, data_parallel: int, *, has_expert_parallel: bool) -> None:
    """Check that `data_parallel` ranks can share the experts of the model.

    Raises:
        SimulationError: `data_parallel` is below 1, or the model has no experts, or the device has no link to peers.
    """
    if data_parallel < 1:
        raise SimulationError(f"data_parallel is {data_parallel}; it must be at least 1")
    if (data_parallel > 1 or has_expert_parallel) and not shape.num_experts:
        raise SimulationError(
            f"{shape.name} has no experts to divide; its data parallel ranks are independent: leave out data_parallel "
            "and expert parallelism"
        )
    if data_parallel > 1 and not device.link_bandwidth:
        raise SimulationError(f"data_parallel is {data_parallel}, but {device.name} has no link to peers; use 1")


def check_parallel(shape: ModelShape, device: Device, tensor_parallel: int) -> None:
    """Check that `tensor_parallel` devices can share the model.

    Raises:
        SimulationError: `tensor_parallel` is below 1 or does not divide the heads, or the device has no link to peers.
    """
    if tensor_parallel < 1 or shape.num_heads % tensor_parallel:
        raise SimulationError(
            f"tensor_parallel is {tensor_parallel}; it must divide the {shape.num_heads} heads of {shape.name}"
        )
    if tensor_parallel > 1 and not device.link_bandwidth:
        raise SimulationError(f"tensor_parallel is {tensor_parallel}, but {device.name} has no link to peers; use 1")
