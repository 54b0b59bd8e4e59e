"""Internals of the bundled engine that benchmarks read, in one place, and a stopwatch for its parts.

Everything that depends on the engine's internal names is here, so that a renaming changes only this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from time import perf_counter
from typing import Any

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.kernels import runtime


@dataclass(frozen=True)
class Part:
    """A function that a stopwatch can wrap: `owner` is "module" or "module:Class"."""

    label: str
    owner: str
    function: str


PARTS = (
    Part("schedule", "pointsman.core.scheduler:Scheduler", "schedule"),
    Part("execute: prepare inputs", "pointsman.engine.model.runner:ModelRunner", "prepare"),
    Part("execute: run", "pointsman.engine.model.runner:ModelRunner", "run"),
    Part("execute: model", "pointsman.engine.model.runner", "run_model"),
    Part("execute: sampling", "pointsman.engine.sampling.sampler:Sampler", "run"),
    Part("update", "pointsman.core.scheduler:Scheduler", "update"),
    Part("report: outputs", "pointsman.engine.outputs.processor:OutputProcessor", "process"),
)
"""The parts of a step's time, as calls that nest as their labels do."""

KERNELS = (Part("compiled kernels", "pointsman.engine.kernels.runtime:Kernel", "__call__"),)
"""Compiled functions that do the model's arithmetic outside PyTorch, which its profiler therefore cannot see. Functions
that it sees as well (registered operators), or that call PyTorch, must not be here: they would be counted twice."""


@dataclass
class Stopwatch:
    """Seconds and calls of parts, by label."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def around(self, parts: Sequence[Part]) -> Iterator[None]:
        """Time every call of the parts inside the context (about 0.3 us a call); missing parts are left out."""
        replaced: list[tuple[Any, str, Any]] = []
        try:
            for part in parts:
                owner = _owner(part)
                if owner is not None and part.function in vars(owner):
                    original = vars(owner)[part.function]
                    replaced.append((owner, part.function, original))
                    setattr(owner, part.function, self._timed(part.label, original))
            yield
        finally:
            for owner, name, original in replaced:
                setattr(owner, name, original)

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds, calls = self.seconds, self.calls

        def timed(*arguments: Any, **options: Any) -> Any:
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[label] += perf_counter() - start
                calls[label] += 1

        return timed


def open_engine(model: Any, **knobs: Any) -> Engine:
    """An engine over a model directory, or over a loaded model; other knobs keep their defaults."""
    return Engine(model, **knobs)


def watch_passes(engine: Engine) -> list[tuple[float, float]]:
    """A list that grows by (start, end) of every pass through the model, sampling included."""
    passes: list[tuple[float, float]] = []
    run = engine.runner.run

    def watched(prepared: Any) -> Any:
        start = perf_counter()
        execution = run(prepared)
        passes.append((start, perf_counter()))
        return execution

    engine.runner.run = watched  # type: ignore[method-assign]
    return passes


@cache
def watch_begins() -> list[float]:
    """A list that grows by the seconds for starting a kernel on other threads, in any engine. There is one list."""
    begins: list[float] = []
    begin_and_end = runtime.openmp_begin_and_end()
    if begin_and_end is None:
        return begins
    begin, end = begin_and_end

    def watched(*arguments: int) -> None:
        start = perf_counter()
        begin(*arguments)
        begins.append(perf_counter() - start)

    runtime.openmp_begin_and_end = lambda: (watched, end)  # type: ignore[assignment]
    return begins


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy sampling parameters for a request that only its length ends."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def last_step(engine: Engine) -> tuple[int, int]:
    """(rows, tokens) of the step that ran last."""
    output = engine.last_output
    return (0, 0) if output is None else (output.num_rows, output.total_num_scheduled_tokens)


def scheduler_seconds(engine: Engine) -> float:
    """Seconds that the engine has spent in the scheduler since its start, as the engine counts them."""
    return float(engine.counters.scheduler_time)


def kernel_seconds(stopwatch: Stopwatch) -> float:
    """Seconds in compiled functions outside PyTorch, as `stopwatch` has seen them."""
    return sum(stopwatch.seconds.get(part.label, 0.0) for part in KERNELS)


def vocabulary_size(engine: Engine) -> int:
    return int(engine.model_config.vocab_size)


def _owner(part: Part) -> Any | None:
    """The module or class of a part; None if this engine has no such part."""
    module_name, _, class_name = part.owner.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError:
        return None
    return getattr(module, class_name, None) if class_name else module
