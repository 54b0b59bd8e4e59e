"""Which step times explain when the requests of a log got their tokens? A search with the simulator in its loop.

A log of requests has no step in it, so a candidate is judged by a simulation: the requests arrive as they did, and the
times of the training requests are compared with the measured ones. Each simulation ends when these are done.

    shares      the parameters of the search: how much of a typical step each coefficient explains
    starts      guesses of different character (bound by overhead, memory, compute, or both), fixed and deterministic
    search      every start gets a scale and a few iterations; the best go on until they converge; the lowest
                training error wins

Least squares finds the minimum next to its start, and some of these minima predict badly. Their training errors tell
them apart, so several starts are needed, and are enough.

SciPy is imported where it is used: the rest of the simulator does without.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.accuracy import Times
from pointsman.sim.fleet import RoundRobin
from pointsman.sim.outcome import Timings
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import Simulation
from pointsman.sim.step_time import LinearStepTime, StepTime
from pointsman.traces import MeasuredRequest

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Progress = Callable[[int, int], None]
"""Called now and then with the number of simulations that are done, and the most that there may be."""

COEFFICIENTS = ("per_step", "per_row", "per_token", "per_context_token", "per_attended")
"""What is fitted. Every row but an unfinished prefill samples, so a log cannot tell `per_sample` from `per_row`."""

STARTS: dict[str, tuple[float, tuple[float, ...]]] = {
    "overhead": (1.0, (0.70, 0.05, 0.15, 0.08, 0.02)),
    "memory": (1.0, (0.40, 0.05, 0.15, 0.35, 0.05)),
    "compute": (1.0, (0.25, 0.05, 0.55, 0.10, 0.05)),
    "weights": (4.0, (0.80, 0.05, 0.30, 0.10, 0.05)),
    "roofline": (4.0, (0.50, 0.05, 0.60, 0.35, 0.10)),
}
"""`LinearStepTime.r`, and shares of a typical step in the order of `COEFFICIENTS`. Engines whose small and large steps
are bound by different things (weights that are read for few tokens as for many) need an `r` above 1; others fit better
as a sum."""

SLACK = 1.5
"""A simulation ends at the latest at this multiple of the time at which the last training request finished."""
TPOT_WEIGHT, TTFT_WEIGHT = 0.5, 0.3
"""Relative to the end-to-end error of a request, whose weight is 1."""
UNSCALED, UNKNOWN = math.inf, 1e300
"""Costs of starts: of a guess, and of one whose cost on these requests is not known yet."""
SOFT = 0.05
"""Errors well above this one count linearly, so that a few outliers do not decide."""
RIDGE = 2e-3
"""Pull of each share towards its start. It decides only between coefficients that the log cannot tell apart."""
NUM_SCALINGS, NUM_FIRST, NUM_MORE = 6, 8, 10
"""Evaluations: of a start's scale, of each start, and of the best ones."""
NUM_BEST = 2
COARSE, FINE = 0.06, 0.02
"""Widths of the differences that slopes come from, in shares, plus as much of the share itself. Steps are decided one
way or another, so errors jump, and a slope over less than some jumps is noise. On a real log narrow slopes stopped at
training errors up to four times those of wide ones."""

FIRST_STEPS, MORE_STEPS, MIN_FIRST = 4000, 800_000, 20
"""A simulation costs by its steps, and a log of few, long requests has many. The starts are then tried on fewer of the
training requests, which take about `FIRST_STEPS`, but at least `MIN_FIRST`; and the best go on for as many evaluations
as `MORE_STEPS` allow."""


class Start(NamedTuple):
    """A point of the search."""

    name: str
    r: float
    shares: FloatArray
    cost: float
    """Mean over training requests of the soft squared error; what the choice goes by."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is fitted to what."""

    measured: Sequence[MeasuredRequest]
    """By arrival. Of those that are not in `train`, only arrivals and lengths are read."""
    train: Indices
    """In the order in which they finished."""
    config: SchedulerConfig

    @property
    def end(self) -> float:
        """When the last training request finished."""
        return self.measured[int(self.train[-1])].last_token

    def first(self, num_train: int) -> Problem:
        """The same with fewer training requests."""
        return replace(self, train=self.train[:num_train])


# ---------------------------------------------------------------------- a simulation of the log


class _Done(Exception):
    """All awaited requests have finished."""


class LogWorkload:
    """The requests of a log, as they arrived; distinct prompts.

    Args:
        measured: the log.
        awaited: the simulation may end when these requests have finished; None: when all have.
    """

    def __init__(self, measured: Sequence[MeasuredRequest], awaited: Indices | None = None) -> None:
        self._measured = measured
        self._awaited = None if awaited is None else set(awaited.tolist())

    @property
    def num_requests(self) -> int:
        return len(self._measured)

    def first_arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        for index, each in enumerate(self._measured):
            lengths = each.request
            name = f"request-{index}"
            yield each.queued, SimRequest(name, lengths.num_prompt_tokens, lengths.num_output_tokens, index=index)

    def on_finished(self, request: SimRequest, now: float) -> None:
        if self._awaited is not None:
            self._awaited.discard(request.index)
            if not self._awaited:
                raise _Done


def run_log(
    measured: Sequence[MeasuredRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    awaited: Indices | None = None,
    until: float = math.inf,
) -> Timings:
    """The timings of a simulation of the log, a row for each request, until all awaited ones have finished."""
    simulation = Simulation(
        LogWorkload(measured, awaited),
        config,
        step_time,
        num_replicas=1,
        routing=RoundRobin(),
        is_stepping=False,
        seed=0,
    )
    try:
        return simulation.run(until, None).timings
    except _Done:
        simulation.timings.close()
        return simulation.timings


def times_of(timings: Timings, which: Indices, num_output_tokens: npt.NDArray[np.int64], until: float) -> Times:
    """Simulated times of some requests; what has not happened counts as if it did at `until`."""
    is_finished = timings.reason[which] >= 0
    first, last = timings.first_token[which], timings.last_token[which]
    return Times(
        timings.arrival[which],
        np.where(np.isnan(first), until, first),
        np.where(is_finished, last, until),
        num_output_tokens,
    )


# ---------------------------------------------------------------------- the objective


class Objective:
    """Errors of a candidate, as a vector for least squares; see the module docstring.

    Args:
        problem: what is fitted to what.
        num_train: simulate only until this number of training requests have finished, and judge by them.
        count: called after each simulation.
    """

    def __init__(self, problem: Problem, num_train: int, count: Callable[[], None] = lambda: None) -> None:
        self.seconds, self.scale = _typical_step(problem)
        self._problem = problem = problem.first(num_train)
        self._count = count
        self._until = SLACK * problem.end
        self._times = times = Times.of([problem.measured[index] for index in problem.train])
        num_gaps = times.num_output_tokens - 1
        has_tpot = (num_gaps > 0) & (times.tpot > 0)
        # A mean over few gaps is mostly noise.
        self._tpot_weight = np.where(has_tpot, TPOT_WEIGHT * np.sqrt(np.minimum(num_gaps / 16, 1)), 0.0)
        self._tpot = np.where(has_tpot, times.tpot, 1.0)
        # When in a step a request arrives is chance: errors of a part of a step do not count as relative ones.
        self._ttft = times.ttft + self.seconds
        self._e2e = np.maximum(times.e2e, 1e-3 * self.seconds)  # 0 in a broken log
        self.r = 1.0
        """Of the step times; see `LinearStepTime`."""
        self.start: FloatArray | None = None
        """Shares that the ridge pulls to."""

    def __len__(self) -> int:
        return len(self._times)

    def step_time(self, shares: FloatArray) -> LinearStepTime:
        """The step times that these shares mean."""
        return LinearStepTime(**dict(zip(COEFFICIENTS, (shares * self.scale).tolist(), strict=True)), r=self.r)

    def simulated(self, shares: FloatArray) -> Times:
        """What happens to the training requests with these shares."""
        problem = self._problem
        timings = run_log(
            problem.measured, problem.config, self.step_time(shares), awaited=problem.train, until=self._until
        )
        self._count()
        return times_of(timings, problem.train, self._times.num_output_tokens, self._until)

    def errors(self, shares: FloatArray) -> FloatArray:
        """[3 * requests + coefficients]: end to end, per output token, to the first token, and the ridge."""
        found, start = self.simulated(shares), shares if self.start is None else self.start
        return np.concatenate(
            [
                found.e2e / self._e2e - self._times.e2e / self._e2e,
                self._tpot_weight * (found.tpot / self._tpot - 1) * (self._tpot_weight > 0),
                TTFT_WEIGHT * (found.ttft - self._times.ttft) / self._ttft,
                RIDGE * math.sqrt(len(self)) * (shares - start),
            ]
        )

    def cost(self, errors: FloatArray) -> float:
        """Mean over requests of the soft squared errors, the ridge left out."""
        squares = (errors[: 3 * len(self)] / SOFT) ** 2
        return float(SOFT**2 * (np.sqrt(1 + squares) - 1).sum() / len(self))

    def scaled(self, shares: FloatArray) -> FloatArray:
        """The shares times a factor with which the mean end-to-end time is that of the log."""
        wanted = float(np.log(self._times.e2e.mean()))
        low, high, factor = -math.inf, math.inf, 0.0  # logarithms
        for _ in range(NUM_SCALINGS):
            excess = float(np.log(self.simulated(shares * math.exp(factor)).e2e.mean())) - wanted
            if abs(excess) < 0.02:
                break
            if excess > 0:
                high = factor
            else:
                low = factor
            step = max(-1.5, min(1.5, -excess))
            factor = factor + step if not low < factor + step < high or math.isinf(high - low) else (low + high) / 2
        return shares * math.exp(factor)


def _typical_step(problem: Problem) -> tuple[float, FloatArray]:
    """Seconds of a typical step of the log, and of each coefficient the value that alone explains them.

    From the training requests' times; of the others only that they had not finished by then.
    """
    times = Times.of([problem.measured[index] for index in problem.train])
    has_tpot = (times.num_output_tokens > 1) & (times.tpot > 0)
    seconds = float(np.median(times.tpot[has_tpot])) if has_tpot.any() else float(np.median(times.ttft))
    seconds = max(seconds, 1e-7)
    end, finished = problem.end, set(problem.train.tolist())
    arrived = [(index, each) for index, each in enumerate(problem.measured) if each.queued < end] or [
        (0, problem.measured[0])
    ]
    present = sum((each.last_token if index in finished else end) - each.queued for index, each in arrived)
    prompts = float(sum(each.request.num_prompt_tokens for _, each in arrived))
    outputs = float(np.mean([each.request.num_output_tokens for _, each in arrived]))
    rows = min(max(present / max(end, seconds), 1.0), float(problem.config.max_num_seqs))
    prompt = prompts / len(arrived)
    computed = min(prompts * seconds / max(end, seconds), float(problem.config.max_num_batched_tokens))
    context = rows * (prompt + outputs / 2)
    loads = np.array([1.0, rows, rows + computed, context, context + computed * prompt / 2])
    return seconds, seconds / loads


# ---------------------------------------------------------------------- the search


def search(problem: Problem, *, num_processes: int | None = None, progress: Progress | None = None) -> LinearStepTime:
    """The step times with the lowest training error that the starts lead to.

    Args:
        problem: what is fitted to what.
        num_processes: how many starts are tried at a time; None: one for each CPU.
        progress: see `Progress`.
    """
    starts = [Start(name, r, np.array(shares), UNSCALED) for name, (r, shares) in STARTS.items()]
    num_train, num_first, num_more = _plan(problem)
    per_evaluation = 1 + len(COEFFICIENTS)
    first = len(starts) * (NUM_SCALINGS + NUM_FIRST * per_evaluation)
    more = NUM_BEST * num_more * per_evaluation
    with _Workers(problem, num_processes or os.cpu_count() or 1, progress) as workers:
        tried = workers.run([(start, num_first, NUM_FIRST, COARSE) for start in starts], first + more)
        best = sorted(tried, key=lambda start: start.cost)[:NUM_BEST]
        if num_first < num_train:  # other requests, another cost
            best = [start._replace(cost=UNKNOWN) for start in best]
        refined = workers.run([(start, num_train, num_more, FINE) for start in best], workers.num_done + more)
    chosen = min(refined, key=lambda start: start.cost)
    objective = Objective(problem, num_train)
    objective.r = chosen.r
    return objective.step_time(chosen.shares)


def _plan(problem: Problem) -> tuple[int, int, int]:
    """Training requests, those on which starts are tried, and evaluations for the best ones."""
    seconds, _ = _typical_step(problem)
    ends = np.array([problem.measured[index].last_token for index in problem.train])
    steps = np.minimum(
        ends / seconds, np.cumsum([problem.measured[index].request.num_output_tokens + 1 for index in problem.train])
    )
    num_train = len(ends)
    num_first = min(num_train, max(MIN_FIRST, int(np.searchsorted(steps, FIRST_STEPS))))
    num_more = int(MORE_STEPS / (NUM_BEST * (1 + len(COEFFICIENTS)) * max(float(steps[-1]), 1.0)))
    return num_train, num_first, max(3, min(NUM_MORE, num_more))


def improve(objective: Objective, start: Start, num_evaluations: int, width: float) -> Start:
    """The minimum that least squares reaches from a start, which is scaled first if nothing is known of it."""
    from scipy.optimize import least_squares

    objective.r = start.r
    shares = objective.scaled(start.shares) if start.cost == UNSCALED else start.shares
    objective.start = shares
    known: dict[bytes, FloatArray] = {}

    def errors(at: FloatArray) -> FloatArray:
        key = at.tobytes()
        if key not in known:
            known.clear()
            known[key] = objective.errors(at)
        return known[key]

    def slopes(at: FloatArray) -> FloatArray:
        base, columns = errors(at), []
        for index, share in enumerate(at.tolist()):
            beside = at.copy()
            beside[index] += width * (1 + share)
            columns.append((objective.errors(beside) - base) / (width * (1 + share)))
        return np.stack(columns, axis=1)

    found: Any = least_squares(
        errors,
        np.maximum(shares, 1e-3),
        jac=slopes,
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=SOFT,
        xtol=1e-3,
        ftol=1e-4,
        max_nfev=num_evaluations,
    )
    cost = objective.cost(found.fun)
    return start._replace(shares=found.x, cost=cost) if cost < start.cost else start


_in_worker: tuple[Problem, Callable[[], None]] | None = None


def _begin_worker(problem: Problem, counter: Any) -> None:
    global _in_worker

    def count() -> None:
        with counter.get_lock():
            counter.value += 1

    _in_worker = problem, count


def _improve(start: Start, num_train: int, num_evaluations: int, width: float) -> Start:
    assert _in_worker is not None
    problem, count = _in_worker
    return improve(Objective(problem, num_train, count), start, num_evaluations, width)


class _Workers:
    """Processes that improve starts; with one CPU, this process does."""

    def __init__(self, problem: Problem, num_processes: int, progress: Progress | None) -> None:
        self.num_done = 0
        self._progress = progress
        self._total = 0
        self._pool: ProcessPoolExecutor | None = None
        self._problem = problem
        num_processes = min(num_processes, len(STARTS))
        if num_processes > 1:
            context = get_context("spawn")  # a fork would copy the locks of whatever threads there are
            self._counter: Any = context.Value("i", 0)
            self._pool = ProcessPoolExecutor(
                num_processes, mp_context=context, initializer=_begin_worker, initargs=(problem, self._counter)
            )

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, tasks: list[tuple[Start, int, int, float]], total: int) -> list[Start]:
        """What each start becomes, in the order of the tasks."""
        self._total = total
        if self._pool is None:
            return [
                improve(Objective(self._problem, num_train, self._count), start, num_evaluations, width)
                for start, num_train, num_evaluations, width in tasks
            ]
        futures: list[Future[Start]] = [self._pool.submit(_improve, *task) for task in tasks]
        while wait(futures, timeout=0.2).not_done:
            self._report(self._counter.value)
        self._report(self._counter.value)
        return [future.result() for future in futures]

    def _count(self) -> None:
        self._report(self.num_done + 1)

    def _report(self, num_done: int) -> None:
        self.num_done = num_done
        if self._progress is not None:
            self._progress(num_done, max(self._total, num_done))
