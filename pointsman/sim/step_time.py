"""Step times: the protocol that the simulator calls, and two models of how long a step takes.

A model describes a step by five sums over its rows (`StepLoad`), because a scheduler knows these at no cost:

    LinearStepTime     seconds are a weighted sum of the five; the weights are fitted to a log.
    RooflineStepTime   seconds from the dimensions of a model and the figures of a device, without any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pointsman.sim.devices import Device, Dtype
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
    """Number of rows that sample a token."""

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
    """Additional seconds of a step with more tokens than rows: engines run plain decodes through kernels of their own,
    or captured as a graph."""
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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "asynchronous" and not (math.isfinite(value) and value >= 0):
                raise SimulationError(f"coefficient {name} is {value}; it must be finite and at least 0")
        if self.r < 1:
            raise SimulationError(f"r is {self.r}; it must be finite and at least 1")

    def of_step(self, load: StepLoad) -> float:
        memory = self._weights(load.num_tokens) + self.per_context_token * load.num_context_tokens
        compute = self.per_token * load.num_tokens + self.per_attended * load.num_attended
        both = memory + compute if self.r == 1 else math.pow(memory**self.r + compute**self.r, 1 / self.r)
        device = both + self.per_row * load.num_rows + self.per_sample * load.num_samples
        if load.num_tokens > load.num_rows:
            device += self.per_prefill
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
    """The shares of the peak figures that a device reaches, and the overhead of a step.

    The defaults are round figures for a tuned engine on a data-centre GPU, not fitted to any one: streams reach 80 to
    90 % of HBM bandwidth, large bf16 products 60 to 75 % of the dense peak, fused attention kernels somewhat less. An
    engine with CUDA graphs and asynchronous scheduling leaves part of a millisecond a step. Calibrate where it matters.
    """

    memory: float = 0.85
    """Share of the peak memory bandwidth that accesses to weights and KV reach."""
    linear: float = 0.65
    """Share of the peak FLOP/s that products with weights reach."""
    attention: float = 0.45
    """Share of the peak FLOP/s that attention reaches."""
    link: float = 0.7
    """Share of the peak link bandwidth that all-reduces reach."""
    host_link: float = 0.8
    """Share of the peak bandwidth to the host that copies of KV blocks from and to pinned memory reach."""
    all_reduce_latency: float = 10e-6
    """Minimum seconds of an all-reduce."""
    per_step: float = 0.4e-3
    """Seconds of any step: launch, sampling, and host work that the device does not hide."""
    per_row: float = 5e-6
    """Seconds of each row of a step: inputs, outputs, sampling."""
    r: float = 4.0
    """Memory and compute time m and c overlap to (m**r + c**r)**(1/r): 1 is their sum, infinity their maximum."""

    def __post_init__(self) -> None:
        for name in ("memory", "linear", "attention", "link", "host_link"):
            if not 0 < getattr(self, name) <= 1:
                raise SimulationError(f"efficiency {name} is {getattr(self, name)}; it must be above 0 and at most 1")
        for name in ("all_reduce_latency", "per_step", "per_row"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SimulationError(
                    f"{name} is {getattr(self, name)}; it must be a finite number of seconds, at least 0"
                )
        if not 1 <= self.r < math.inf:
            raise SimulationError(f"r is {self.r}; it must be finite and at least 1")


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


KNOWN_RUN = "a measured run of vLLM 0.19 with Llama-3.1-8B on an RTX PRO 6000"
KNOWN_ERRORS = {"TTFT": -0.47, "TPOT": -0.20, "end-to-end times": -0.26}
"""Errors of `RooflineStepTime` without calibration, as predicted / measured - 1, on the only measured run that it was
compared with. For TTFT and TPOT: the error of the mean over all requests. For end-to-end times: the mean of the errors
of single requests. The run: 300 ShareGPT requests at about 10 a second, bf16, max_num_seqs 128, max_num_batched_tokens
2048, from the LLMServingSim repository (bench/examples). tests/sim/test_calibrate.py computes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepTime:
    """Seconds from what a step reads and computes, on `tensor_parallel` equal devices.

    Memory time: the weights of the layers once; the weights of the routed experts that are expected to be used if each
    token draws its experts evenly; the output head if a row samples; the KV of the context read and of the tokens
    written. Compute time: products with weights and attention. Memory and compute time overlap by an r-norm. Two
    all-reduces a layer, and overhead by step and by row, are added.

    Approximations, because only sums over rows are known:

    - A windowed layer reads at most (window - 1) positions for each row and one for each token, and a token attends to
      at most `sliding_window`. The caps are applied to the sums. The result is exact if all rows are within the window
      or all beyond it, and too long for a mix.
    - Latent attention computes on latents for one token of each row, and on full heads for all other tokens.

    Left out: traffic of activations, the tiles of matrix products (steps of a few tokens more cost nothing), kernels
    that are slower for particular shapes, skewed routing of experts, pipeline parallelism.

    With data parallelism, a rank's experts compute the tokens of all ranks. In each layer with experts, a rank receives
    the activations of the other ranks' tokens and sends back their results (vLLM's `allgather_reducescatter`).

    Raises:
        SimulationError: the devices cannot be connected, or the heads cannot be divided among them.
    """

    shape: ModelShape
    device: Device
    tensor_parallel: int = 1
    kv_dtype_bytes: float = 2
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
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

    def __post_init__(self) -> None:
        check_parallel(self.shape, self.device, self.tensor_parallel)
        check_experts_divided(self.shape, self.device, self.data_parallel, has_expert_parallel=self.has_expert_parallel)

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
        shape, window = self.shape, self.shape.sliding_window
        windowed_context = min(load.num_context_tokens, load.num_rows * (window - 1) + load.num_tokens) if window else 0
        windowed_attended = min(load.num_attended, load.num_tokens * window)
        # Attention of one token of each row is that of a decode: it attends to the row's context. All other tokens of
        # the row attend to the remaining positions. A prefill has so many that the first makes no difference.
        decode, other = shape.decode_attention_flops, shape.attention_flops
        attention = shape.num_full_layers * (
            other * load.num_attended + (decode - other) * load.num_context_tokens
        ) + shape.num_windowed_layers * (other * windowed_attended + (decode - other) * windowed_context)
        full_kv, windowed_kv = shape.kv_bytes_per_token(self.kv_dtype_bytes, self.tensor_parallel)
        memory = (
            self._memory_seconds(load.num_tokens, load.num_samples)
            + (full_kv * load.num_context_tokens + windowed_kv * windowed_context) * self._seconds_per_byte
        )
        compute = self._linear_seconds(load.num_tokens, load.num_samples) + attention * self._seconds_per_attention_flop
        r = self.efficiencies.r
        return math.pow(math.pow(memory, r) + math.pow(compute, r), 1 / r) + self._rest_seconds(
            load.num_tokens, load.num_rows
        )

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
        if num_steps <= _MAX_SCALAR_STEPS and not mixed:
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
        memory **= r
        compute **= r
        memory += compute
        memory **= 1 / r
        memory += line.rest
        return memory

    def to_linear(self, load: StepLoad) -> LinearStepTime:
        """This model as a `LinearStepTime`, the form that is fitted to logs; used as a start of a search.

        Both forms give the same seconds near `load`, except for the costs that `LinearStepTime` lacks: KV that is
        written, all-reduces of more tokens than the load has, and head FLOPs of prompts.

        Args:
            load: load of a typical step; determines the share of the context within windows.
        """
        shape, window = self.shape, self.shape.sliding_window
        full_kv, windowed_kv = shape.kv_bytes_per_token(self.kv_dtype_bytes, self.tensor_parallel)
        context, attended = max(load.num_context_tokens, 1), max(load.num_attended, 1)
        read = min(1.0, (load.num_rows * (window - 1) + load.num_tokens) / context) if window else 0.0
        seen = min(1.0, load.num_tokens * window / attended) if window else 0.0
        layers = shape.num_full_layers + shape.num_windowed_layers * seen
        experts = shape.num_expert_layers * shape.num_experts * shape.expert_bytes if shape.num_experts else 0
        return LinearStepTime(
            per_step=(shape.common_bytes + shape.head_bytes) / self.tensor_parallel * self._seconds_per_byte
            + self._rest_seconds(load.num_tokens, 0),
            per_row=self.efficiencies.per_row + self._linear_seconds(0, 1),
            per_token=self._linear_seconds(1, 0),
            per_context_token=(full_kv + windowed_kv * read) * self._seconds_per_byte,
            per_attended=layers * shape.attention_flops * self._seconds_per_attention_flop,
            expert_weights=experts / self._num_expert_devices * self._seconds_per_byte,
            expert_share=-math.log1p(-shape.experts_per_token / shape.num_experts) if experts else 0.0,
            r=self.efficiencies.r,
        )

    def caveat(self) -> str:
        """A warning for the reader of a result: the nature of this model, and its known errors."""
        off = ", ".join(f"{name} {error:+.0%}" for name, error in KNOWN_ERRORS.items())
        return (
            "Step times come from datasheets and assumed efficiencies, not from a measurement of "
            f"{self.shape.name} on {self.device.name}: calibrate with a log before you rely on them. On {KNOWN_RUN} "
            f"they predict {off}."
        )

    # ------------------------------------------------------------------ parts

    def _decode_line(self, num_rows: int) -> _Decodes:
        shape = self.shape
        full_kv, windowed_kv = shape.kv_bytes_per_token(self.kv_dtype_bytes, self.tensor_parallel)
        flops = shape.decode_attention_flops * self._seconds_per_attention_flop
        return _Decodes(
            memory=self._memory_seconds(num_rows, num_rows),
            memory_per_position=full_kv * self._seconds_per_byte,
            memory_per_windowed=windowed_kv * self._seconds_per_byte,
            compute=self._linear_seconds(num_rows, num_rows),
            compute_per_position=shape.num_full_layers * flops,
            compute_per_windowed=shape.num_windowed_layers * flops,
            cap=float(num_rows * shape.sliding_window),
            rest=self._rest_seconds(num_rows, num_rows),
        )

    @property
    def _seconds_per_byte(self) -> float:
        return 1 / (self.device.bandwidth * self.efficiencies.memory)

    @property
    def _seconds_per_attention_flop(self) -> float:
        """Seconds of one attention FLOP of the whole model; each device has a share of the heads."""
        return 1 / (self.device.flops(self._plain_dtype) * self.efficiencies.attention * self.tensor_parallel)

    @property
    def _plain_dtype(self) -> Dtype:
        """Dtype of activations, and of weights that are not quantised."""
        return "fp32" if self.shape.dtype_bytes == 4 else "bf16"

    def _memory_seconds(self, num_tokens: int, num_samples: int) -> float:
        """Seconds for weights read and KV written."""
        shape = self.shape
        weights = shape.common_bytes
        if shape.num_experts:
            # A token misses an expert with probability 1 - k/E; n tokens miss it with that to the power of n.
            missed = (1 - shape.experts_per_token / shape.num_experts) ** (num_tokens + self.num_tokens_beside)
            used = self._most_of_a_device(shape.num_experts, 1 - missed)
            weights += shape.num_expert_layers * used * shape.expert_bytes * self.tensor_parallel
        if num_samples:
            weights += shape.head_bytes
        written = num_tokens * sum(shape.kv_bytes_per_token(self.kv_dtype_bytes, self.tensor_parallel))
        return (weights / self.tensor_parallel + written) * self._seconds_per_byte

    def _linear_seconds(self, num_tokens: int, num_samples: int) -> float:
        """Seconds of products with weights; the output head's in the plain dtype."""
        shape = self.shape
        plain = self.device.flops(self._plain_dtype)
        layers = plain if shape.quantization is None else self.device.flops(shape.quantization.computes_in)
        seconds = num_tokens * 2 * shape.common_params / layers + num_samples * shape.head_flops / plain
        if shape.num_experts:
            uses = self._most_of_a_device((num_tokens + self.num_tokens_beside) * shape.experts_per_token)
            seconds += shape.num_expert_layers * uses * 2 * shape.expert_params * self.tensor_parallel / layers
        return seconds / (self.efficiencies.linear * self.tensor_parallel)

    def _rest_seconds(self, num_tokens: int, num_rows: int) -> float:
        """Seconds of overhead and communication, which overlap with nothing."""
        seconds = self.efficiencies.per_step + num_rows * self.efficiencies.per_row
        if self.tensor_parallel > 1:
            # A ring sends each byte 2(p - 1)/p times over every link.
            sent = 2 * (1 - 1 / self.tensor_parallel) * num_tokens * self.shape.hidden_size * self.shape.dtype_bytes
            transfer = sent / (self.device.link_bandwidth * self.efficiencies.link)
            seconds += 2 * self.shape.num_layers * (self.efficiencies.all_reduce_latency + transfer)
        if self.data_parallel > 1:
            received = self.num_tokens_beside * self.shape.hidden_size * self.shape.dtype_bytes
            transfer = received / (self.device.link_bandwidth * self.efficiencies.link)
            seconds += 2 * self.shape.num_expert_layers * (self.efficiencies.all_reduce_latency + transfer)
        return seconds

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
        if not self.has_expert_parallel or devices == 1:
            return mean
        highest = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
        spread = math.sqrt(mean * (1 - (1 / devices if share is None else share)))
        limit = number if share is None else math.ceil(number / devices)
        return min(limit, mean + highest * spread)


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
