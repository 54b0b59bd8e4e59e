"""Fit to requests: searches, with the simulator in its loop, for step times that explain a log's token times.

A log of requests contains no steps, so a candidate is judged by a simulation: the requests arrive as they did, and the
times of the training requests are compared with the measured ones. Each simulation ends when these requests are done.

    STARTS      guesses of step times that are bound by weights, overhead, compute, or all of these
    Objective   errors of a simulation, each divided by the error that chance alone would make
    search      every start gets a scale and a few iterations, the best starts more iterations. The start with lowest
                training error is iterated until that error falls no more

An iteration is Gauss-Newton with slopes by regression. A step's decision is discrete, so errors jump where coefficients
move a little, and the difference of two simulations is mostly noise. Each simulation therefore moves all coefficients,
up and down by the rows of a Hadamard matrix, and each slope uses all simulations. The mean over these simulations is
the error at the point itself.

Coefficients are logarithms here. A log cannot separate some of them. A prior decides what the log leaves open: a normal
distribution about the start. The coefficients of the starts have ratios that are typical of transformers on real
devices. A coefficient that this log does not show therefore still has a value that predicts other loads.

SciPy is imported where it is used: the rest of the simulator does not need it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.accuracy import Times
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import RoundRobin
from pointsman.sim.outcome import Timings
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import Simulation
from pointsman.sim.step_time import ATTENDED, LinearStepTime, StepLoad, StepTime
from pointsman.traces import MeasuredRequest

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Progress = Callable[[int, int], None]
"""Function that gets the number of finished simulations and the maximum number, from time to time."""

SPREADS = {
    "per_step": 1.0,
    "per_row": 1.5,
    "per_token": 1.5,
    "per_context_token": 1.5,
    "per_attended": 1.0,
    "expert_weights": 1.0,
    "expert_share": 0.5,
    "r": 1.0,
}
"""Fitted coefficients, each with the standard deviation of its prior: that of the coefficient's logarithm (for r: the
logarithm of r - 1) about its value at the start. Every row except an unfinished prefill samples, so a log cannot
separate `per_sample` from `per_row`; `per_prefill` is fitted to steps alone."""
SCALED = ("per_step", "per_row", "per_token", "per_context_token", "per_attended", "expert_weights")
"""Names of the coefficients that are seconds; a change of scale multiplies them all by one factor."""

STARTS: dict[str, LinearStepTime] = {
    "sum": LinearStepTime(
        per_step=1, per_row=3e-3, per_token=5e-3, per_context_token=1e-5, per_attended=ATTENDED * 5e-3, r=1.2
    ),
    "weights": LinearStepTime(
        per_step=1, per_row=1e-3, per_token=5e-3, per_context_token=1e-5, per_attended=ATTENDED * 5e-3, r=4
    ),
    "experts": LinearStepTime(
        per_step=0.15, per_row=5e-4, per_token=1e-3, per_context_token=3e-6, per_attended=ATTENDED * 1e-3,
        expert_weights=1, expert_share=0.06, r=4,
    ),
    "overhead": LinearStepTime(
        per_step=1, per_row=3e-3, per_token=1e-3, per_context_token=5e-6, per_attended=ATTENDED * 1e-3
    ),
    "compute": LinearStepTime(
        per_step=1, per_row=1e-2, per_token=5e-2, per_context_token=1e-5, per_attended=ATTENDED * 5e-2
    ),
}  # fmt: skip
"""Guesses, up to a common factor. A coefficient that is 0 stays 0. `per_token` is 5e-3 of a step: the time for the
FLOPs of a token relative to the time for reading the weights on GPUs; the ratio is ten times as high on a CPU.
`per_context_token` is 1e-5: the KV of a position relative to the weights."""

SLACK = 1.5
"""Multiple of the time at which the last training request finished: a simulation ends at this time at the latest."""
PHASE, RELATIVE, TTFT_RELATIVE = 0.5, 0.01, 0.03
"""Errors of a simulated time that chance alone may cause. `PHASE`: as a fraction of a typical step's duration, because
a request may arrive at any time within a step. `RELATIVE`: as a fraction of the measured time; `TTFT_RELATIVE`: the
same for a TTFT."""
TPOT_WEIGHT, TTFT_WEIGHT = 0.5, 0.5
"""Weights of the TPOT and TTFT errors of a request; the end-to-end error has weight 1."""
SOFT = 3.0
"""An error above this multiple of the error from chance adds to the cost linearly, not squared, so that a few outliers
do not dominate the fit."""
NUM_SCALINGS, NEAR = 6, 0.02
"""Maximum number of simulations that find the scale of a start, and the relative error of the mean end-to-end time at
which a scale is accepted."""
FIRST = ((0.05, 0.7, 6), (0.05, 0.7, 4), (0.03, 0.5, 3), (0.02, 0.5, 2))
MORE = ((0.02, 0.3), (0.01, 0.3), (0.01, 0.2))
"""Iterations of all starts (`FIRST`), and of the best starts (`MORE`). Values of an iteration: how far a coefficient
moves when its slope is measured, as a share of a typical step; the maximum change of its logarithm; in `FIRST`, the
number of starts to keep."""
MAX_LATE, CONVERGED = 8, 0.95
"""Maximum number of further iterations of the best start. The search stops if the cost after an iteration is more than
the share `CONVERGED` of the cost before it."""
BY_CHANCE = 2 * (1 + TPOT_WEIGHT**2 + TTFT_WEIGHT**2)
"""Approximate cost of the true step times, caused by chance alone. The last iterations stop at this cost, because a
lower one would fit noise."""
MAX_MOVE = 0.4
"""Maximum move of a coefficient when its slope is measured, relative to the coefficient. It limits the move of
coefficients that hardly change the errors."""

MAX_RUNS = 32
"""Maximum number of simulations in one iteration of one of the best starts."""

FIRST_STEPS, MORE_STEPS, MIN_FIRST = 4000, 800_000, 20
"""The cost of a simulation is its number of steps, and a log of few, long requests has many. The starts are then tried
on fewer training requests: as many as take about `FIRST_STEPS` steps, but at least `MIN_FIRST` requests. The best
starts get the iterations for which `MORE_STEPS` steps suffice, at least one. `MORE_STEPS` also limits the further
iterations of the best start."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The data on which candidate step times are judged: the log, its training requests, and the scheduler's
    configuration."""

    measured: Sequence[MeasuredRequest]
    """Requests of the log, by arrival. Of requests outside `train`, only arrivals and lengths are read."""
    train: Indices
    """Indices of the training requests, in the order in which they finished."""
    config: SchedulerConfig
    features: Features = PLAIN
    """Drafts of the log's engine."""

    @property
    def end(self) -> float:
        """Time at which the last training request finished."""
        return self.measured[int(self.train[-1])].last_token

    def with_first_requests(self, num_train: int) -> Problem:
        """The same problem with the first `num_train` training requests only."""
        return replace(self, train=self.train[:num_train])


# ---------------------------------------------------------------------- a simulation of the log


class _Done(Exception):
    """Raised to end a simulation when all awaited requests have finished."""


class LogWorkload:
    """A workload of the requests of a log, with their recorded arrivals; all prompts are distinct.

    Args:
        measured: the log.
        awaited: indices of the requests after whose end the simulation may end; None: all requests.
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


def simulate_log(
    measured: Sequence[MeasuredRequest],
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    awaited: Indices | None = None,
    until: float = math.inf,
    features: Features = PLAIN,
) -> Timings:
    """Simulate the log until all awaited requests have finished. Returns timings with a row for each request."""
    simulation = Simulation(
        LogWorkload(measured, awaited),
        config,
        step_time,
        num_replicas=1,
        routing=RoundRobin(),
        is_stepping=False,
        seed=0,
        features=features,
    )
    try:
        return simulation.run(until, None).timings
    except _Done:
        simulation.timings.close()
        return simulation.timings


def simulated_times(
    timings: Timings, request_indices: Indices, num_output_tokens: npt.NDArray[np.int64], until: float
) -> Times:
    """Simulated times of the requests `request_indices`. An event that had not happened when the simulation ended
    counts as if it had happened at `until`."""
    is_finished = timings.reason[request_indices] >= 0
    first, last = timings.first_token[request_indices], timings.last_token[request_indices]
    return Times(
        timings.arrival[request_indices],
        np.where(np.isnan(first), until, first),
        np.where(is_finished, last, until),
        num_output_tokens,
    )


# ---------------------------------------------------------------------- the objective


class Objective:
    """Errors of a candidate, as a vector for least squares; see the module docstring.

    Args:
        problem: the log and its training requests.
        num_train: number of training requests after whose end a simulation stops; only these requests are compared.
    """

    def __init__(self, problem: Problem, num_train: int) -> None:
        self.typical = typical_load(problem)
        self.seconds = typical_seconds(problem)
        self._problem = problem = problem.with_first_requests(num_train)
        self._until = SLACK * problem.end
        self._times = times = Times.of([problem.measured[index] for index in problem.train])
        num_gaps = times.num_output_tokens - 1
        phase = PHASE * self.seconds
        self._e2e = 1 / np.hypot(RELATIVE * times.e2e, phase)
        tpot = TPOT_WEIGHT / np.hypot(RELATIVE * times.tpot, phase / np.maximum(num_gaps, 1))
        self._tpot = np.where((num_gaps > 0) & (times.tpot > 0), tpot, 0.0)
        self._ttft = TTFT_WEIGHT / np.hypot(TTFT_RELATIVE * times.ttft, phase)

    def __len__(self) -> int:
        return len(self._times)

    def simulate_times(self, step_time: StepTime) -> Times:
        """The times of the training requests in a simulation with `step_time`."""
        problem = self._problem
        timings = simulate_log(
            problem.measured,
            problem.config,
            step_time,
            awaited=problem.train,
            until=self._until,
            features=problem.features,
        )
        return simulated_times(timings, problem.train, self._times.num_output_tokens, self._until)

    def errors(self, step_time: StepTime) -> FloatArray:
        """An array [3 * requests]: errors of end-to-end time, TPOT and TTFT, in multiples of the error from chance."""
        found, times = self.simulate_times(step_time), self._times
        return np.concatenate(
            [
                (found.e2e - times.e2e) * self._e2e,
                (found.tpot - times.tpot) * self._tpot,
                (found.ttft - times.ttft) * self._ttft,
            ]
        )

    def log_e2e_ratio(self, step_time: StepTime) -> float:
        """Logarithm of the simulated mean end-to-end time, relative to the measured one."""
        return float(np.log(self.simulate_times(step_time).e2e.mean() / self._times.e2e.mean()))

    def cost(self, errors: FloatArray) -> float:
        """The cost of `errors`, by which starts are compared: mean over requests of the squared errors, linear above
        `SOFT`."""
        return float(2 * SOFT**2 * (np.sqrt(1 + (errors / SOFT) ** 2) - 1).sum() / len(self))


def typical_seconds(problem: Problem) -> float:
    """Approximate seconds of a step of the log, from the training requests' times."""
    times = Times.of([problem.measured[index] for index in problem.train])
    has_tpot = (times.num_output_tokens > 1) & (times.tpot > 0)
    return max(float(np.median(times.tpot[has_tpot]) if has_tpot.any() else np.median(times.ttft)), 1e-7)


def typical_load(problem: Problem) -> StepLoad:
    """Approximate load of a step of the log. Requests outside `train` count as unfinished until the end of the training
    requests."""
    seconds, end, finished = typical_seconds(problem), problem.end, set(problem.train.tolist())
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
    attended = context + computed * prompt / 2
    return StepLoad(*(math.ceil(part) for part in (rows + computed, rows, context, attended, rows)))


# ---------------------------------------------------------------------- points


class Slopes(NamedTuple):
    """A point of the search, with the mean errors and slopes of the simulations around it."""

    step_time: LinearStepTime
    errors: FloatArray
    """Mean of each error over the simulations, [errors]."""
    slopes: FloatArray
    """Slope of each error over the logarithm of each fitted coefficient, [errors, fitted coefficients]."""
    limit: float
    """Maximum change of a coefficient's logarithm in the move from this point."""


class Start(NamedTuple):
    """A start of the search: its current point, its best point, and the prior of its coefficients."""

    name: str
    step_time: LinearStepTime
    prior: LinearStepTime
    """Center of the prior, which pulls coefficients towards these values."""
    certainty: float = 1.0
    """The prior's standard deviations are those in `SPREADS`, divided by this number."""
    cost: float = math.inf
    """Lowest cost of the points so far, computed from errors that are means over simulations."""
    at_cost: Slopes | None = None
    """The point with the lowest cost; None: no point has a cost yet."""

    @property
    def free_names(self) -> list[str]:
        """Names of the fitted coefficients."""
        return [name for name in SPREADS if getattr(self.prior, name) > (1 if name == "r" else 0)]

    def prior_spreads(self) -> FloatArray:
        """Standard deviations of the prior, one for each fitted coefficient."""
        return np.array([SPREADS[name] for name in self.free_names]) / self.certainty


def _logarithms(step_time: LinearStepTime, names: Sequence[str]) -> FloatArray:
    return np.log([getattr(step_time, name) - (name == "r") for name in names])


def with_log_changes(step_time: LinearStepTime, names: Sequence[str], changes: FloatArray) -> LinearStepTime:
    """`step_time` with `changes` added to the logarithms of the coefficients `names`."""
    logarithms = np.clip(_logarithms(step_time, names) + changes, -60, 60)
    values = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
    if "r" in values:
        values["r"] = 1 + min(values["r"], 50)  # 51 is nearly the maximum of both times; a larger power overflows
    return replace(step_time, **values)


def _multiply_seconds(step_time: LinearStepTime, factor: float) -> LinearStepTime:
    return replace(step_time, **{name: factor * getattr(step_time, name) for name in SCALED})


def log_midpoint(one: LinearStepTime, other: LinearStepTime, names: Sequence[str]) -> LinearStepTime:
    """The point halfway between two step times, by the logarithms of the coefficients `names`."""
    return with_log_changes(one, names, (_logarithms(other, names) - _logarithms(one, names)) / 2)


def slope_moves(start: Start, typical: StepLoad, width: float) -> FloatArray:
    """Relative move of each fitted coefficient when its slope is measured: the move that changes the duration of a step
    by the share `width`, limited to `width` to `MAX_MOVE`. The step is a typical step, or a step with one of its rows,
    whichever changes more."""
    rows = typical.num_rows
    alone = StepLoad(1, 1, max(1, typical.num_context_tokens // rows), max(1, typical.num_context_tokens // rows), 1)
    effects = np.zeros(len(start.free_names))
    for load in (typical, alone):
        plain = start.step_time.of_step(load)
        lower = [with_log_changes(start.step_time, [name], np.array([-0.1])).of_step(load) for name in start.free_names]
        effects = np.maximum(effects, np.abs(plain - np.array(lower)) / (0.1 * plain))
    return np.clip(width / np.maximum(effects, 1e-9), width, MAX_MOVE)


def hadamard_rows(num_factors: int, is_folded: bool) -> FloatArray:
    """Matrix [simulations, factors] of 1 and -1: columns are orthogonal to each other and to a column of ones.

    If folded, each row also occurs with opposite signs, so that the joint effect of two factors is not attributed to a
    third factor.
    """
    from scipy.linalg import hadamard

    size = 2 ** math.ceil(math.log2(num_factors + 1))
    rows: FloatArray = hadamard(size)[:, 1 : num_factors + 1].astype(np.float64)
    return np.concatenate([rows, -rows]) if is_folded else rows


def regression_slopes(
    rows: FloatArray, coefficient_moves: FloatArray, errors: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Mean of each error, [errors], and its slopes by regression, [errors, fitted coefficients].

    Args:
        rows: result of `hadamard_rows`, [simulations, fitted coefficients].
        coefficient_moves: result of `slope_moves`, one value for each fitted coefficient.
        errors: errors in the simulations of `rows`, [simulations, errors].
    """
    mean = errors.mean(axis=0)
    return mean, (rows.T @ (errors - mean) / len(rows) / coefficient_moves[:, None]).T


def gauss_newton_point(start: Start) -> LinearStepTime:
    """The step times that one Gauss-Newton iteration gives from the best point of a start."""
    from scipy.optimize import least_squares

    assert start.at_cost is not None
    point, mean, by_coefficient, limit = start.at_cost
    distance, spreads = (
        _logarithms(point, start.free_names) - _logarithms(start.prior, start.free_names),
        start.prior_spreads(),
    )
    jacobian = np.concatenate([by_coefficient, np.diag(1 / spreads)])
    found: Any = least_squares(
        lambda change: np.concatenate([mean + by_coefficient @ change, (distance + change) / spreads]),
        np.zeros(len(spreads)),
        jac=lambda _: jacobian,
        bounds=(-limit, limit),
        loss="soft_l1",
        f_scale=SOFT,
    )
    return with_log_changes(point, start.free_names, found.x)


# ---------------------------------------------------------------------- the search


def search_step_times(
    problem: Problem,
    *,
    estimate: LinearStepTime | None = None,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> LinearStepTime:
    """Search from every start. Returns the step times with the lowest training error.

    Args:
        problem: the log and its training requests.
        estimate: an additional start, from a model and a device; it is trusted more than the other starts.
        num_processes: number of parallel simulations; None: one for each CPU.
        progress: see `Progress`.
    """
    starts = [Start(name, guess, guess) for name, guess in STARTS.items()]
    if estimate is not None:
        starts.insert(0, Start("estimate", estimate, estimate, certainty=2.0))
    num_first, num_more, num_late = _plan_iterations(problem)
    max_simulations = len(starts) * NUM_SCALINGS + (num_more * 2 + num_late) * MAX_RUNS
    for _, _, num_kept in ((0, 0, len(starts)), *FIRST[:-1]):
        max_simulations += sum(sorted(len(hadamard_rows(len(each.free_names), False)) for each in starts)[-num_kept:])
    with _Simulations(problem, num_processes or os.cpu_count() or 1, max_simulations, progress) as simulations:
        starts = simulations.scale_starts(starts, num_first)
        for width, limit, num_kept in FIRST:
            starts = simulations.iterate_starts(starts, num_first, width, limit, is_folded=False)
            starts = sorted(starts, key=lambda start: start.cost)[:num_kept]
        if num_first < len(problem.train):  # costs over different requests are not comparable
            starts = [start._replace(cost=math.inf, at_cost=None) for start in starts]
        for width, limit in MORE[-num_more:]:
            starts = simulations.iterate_starts(starts, len(problem.train), width, limit, is_folded=True)
        chosen = min(starts, key=lambda start: start.cost)
        before = math.inf
        while num_late and BY_CHANCE < chosen.cost < CONVERGED * before:
            before = chosen.cost
            [chosen] = simulations.iterate_starts([chosen], len(problem.train), width, limit, is_folded=True)
            num_late -= 1
    best = chosen.at_cost
    assert best is not None
    # Where the search has converged, the best point and its improvement estimate the same minimum; their mean is
    # nearer.
    return log_midpoint(
        best.step_time, gauss_newton_point(chosen._replace(at_cost=best._replace(limit=limit))), chosen.free_names
    )


def _plan_iterations(problem: Problem) -> tuple[int, int, int]:
    """(number of training requests on which starts are tried, number of iterations of the best starts, maximum number
    of further iterations of the best start)."""
    seconds = typical_seconds(problem)
    ends = np.array([problem.measured[index].last_token for index in problem.train])
    steps = np.minimum(
        ends / seconds, np.cumsum([problem.measured[index].request.num_output_tokens + 1 for index in problem.train])
    )
    num_first = min(len(ends), max(MIN_FIRST, int(np.searchsorted(steps, FIRST_STEPS))))
    num_runs = MORE_STEPS / max(float(steps[-1]), 1.0)
    num_more, num_late = int(num_runs / (2 * MAX_RUNS)), int(num_runs / MAX_RUNS)
    return num_first, max(1, min(len(MORE), num_more)), min(MAX_LATE, num_late)


_problem: Problem | None = None
"""The problem that this worker process simulates."""


def _init_fit_worker(problem: Problem) -> None:
    global _problem
    _problem = problem


def _candidate_errors(step_time: LinearStepTime, num_train: int) -> FloatArray:
    assert _problem is not None
    return Objective(_problem, num_train).errors(step_time)


def _candidate_excess(step_time: LinearStepTime, num_train: int) -> float:
    assert _problem is not None
    return Objective(_problem, num_train).log_e2e_ratio(step_time)


class _Simulations:
    """Runs simulations in worker processes; with one CPU, in this process."""

    def __init__(self, problem: Problem, num_processes: int, max_simulations: int, progress: Progress | None) -> None:
        self._problem = problem
        self._max_simulations = max_simulations
        self._num_done = 0
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None
        if num_processes > 1:
            context = get_context("spawn")  # a fork would copy locks that other threads hold
            self._pool = ProcessPoolExecutor(
                num_processes, mp_context=context, initializer=_init_fit_worker, initargs=(problem,)
            )
        else:
            _init_fit_worker(problem)

    def __enter__(self) -> _Simulations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def scale_starts(self, starts: Sequence[Start], num_train: int) -> list[Start]:
        """The starts, each scaled by the factor that makes the mean end-to-end time equal to that of the log."""
        seconds, typical = typical_seconds(self._problem), typical_load(self._problem)
        guesses = [_multiply_seconds(each.step_time, seconds / each.step_time.of_step(typical)) for each in starts]
        low, high, at = [-math.inf] * len(starts), [math.inf] * len(starts), [0.0] * len(starts)  # logarithms
        open_ones = list(range(len(starts)))
        for _ in range(NUM_SCALINGS):
            points = [_multiply_seconds(guesses[index], math.exp(at[index])) for index in open_ones]
            for index, excess in zip(
                list(open_ones), self._run_at_points(_candidate_excess, points, num_train), strict=True
            ):
                if abs(excess) < NEAR:
                    open_ones.remove(index)
                    continue
                if excess > 0:
                    high[index] = at[index]
                else:
                    low[index] = at[index]
                step = at[index] + max(-1.5, min(1.5, -excess))
                is_bracketed = not math.isinf(high[index] - low[index])
                at[index] = (
                    (low[index] + high[index]) / 2 if is_bracketed and not low[index] < step < high[index] else step
                )
            if not open_ones:
                break
        found = [_multiply_seconds(guess, math.exp(factor)) for guess, factor in zip(guesses, at, strict=True)]
        return [each._replace(step_time=point, prior=point) for each, point in zip(starts, found, strict=True)]

    def iterate_starts(
        self, starts: Sequence[Start], num_train: int, width: float, limit: float, *, is_folded: bool
    ) -> list[Start]:
        """Run one iteration of each start. If the errors of a start rose, it returns to its best point, with a smaller
        `limit`."""
        objective = Objective(self._problem, num_train)
        designs, points = [], []
        for start in starts:
            rows, far = hadamard_rows(len(start.free_names), is_folded), slope_moves(start, objective.typical, width)
            designs.append((rows, far))
            points += [with_log_changes(start.step_time, start.free_names, np.log1p(row * far)) for row in rows]
        errors = self._run_at_points(_candidate_errors, points, num_train)
        improved = []
        for start, (rows, far) in zip(starts, designs, strict=True):
            there, errors = np.array(errors[: len(rows)]), errors[len(rows) :]
            mean, by_coefficient = regression_slopes(rows, far, there)
            if (cost := objective.cost(mean)) < start.cost:
                start = start._replace(cost=cost, at_cost=Slopes(start.step_time, mean, by_coefficient, limit))
            elif start.at_cost is not None:
                start = start._replace(at_cost=start.at_cost._replace(limit=start.at_cost.limit / 3))
            improved.append(start._replace(step_time=gauss_newton_point(start)))
        return improved

    def _run_at_points(
        self, function: Callable[[LinearStepTime, int], Any], points: list[LinearStepTime], num_train: int
    ) -> list[Any]:
        """The result of `function` at each point, in the order of the points."""
        if self._pool is None:
            results: Iterator[Any] = map(function, points, [num_train] * len(points))
        else:
            results = self._pool.map(function, points, [num_train] * len(points))
        found = []
        for result in results:
            found.append(result)
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, max(self._max_simulations, self._num_done))
        return found
