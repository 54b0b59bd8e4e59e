"""Prediction of one workload by the profile of another, for engines on this CPU: the bundled engine, and vLLM.

A run sends requests in real time, at random moments, to an engine that records its steps. Calibration runs have chats;
validation runs have longer prompts, shorter outputs and another rate. They alternate, five of each. Each calibration
run becomes a profile, as `pointsman calibrate` makes it, and the simulator predicts the validation run that follows it:
the same arrivals and lengths, under the settings in the recording.

Throughput and p50 of TTFT and ITL must be within 10 % of the measurement, p99 within 25 %, or within 1.5 times the
spread of the five validation runs, whichever is more: a machine whose own runs differ cannot be predicted better. The
error is the median over the pairs. Rates are shares of the engine's maximum, measured first, so that a fast machine and
a slow one are equally busy. Near their limit a queue would magnify every error.

Both engines are stepped by their client, in one process: nothing lies between it and the scheduler, as in the
simulator.
vLLM's is another process (`_vllm_calibration_worker.py`), and `Observer` records.

    python benchmarks/calibration.py --check
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _live_engines import DEMO, BundledEngine, Vllm, prompts_of
from _open_loop import TokenTimes
from vllm_env import VLLM_VERSION, is_complete

from pointsman.core import SchedulerConfig
from pointsman.core.recording import Recorder
from pointsman.sim.calibrate import calibrate_steps
from pointsman.sim.simulator import simulate
from pointsman.sim.step_log import StepLog, observed_steps, read_steps
from pointsman.sim.step_time import StepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_observed

ROUNDS, ROUNDS_QUICK = 5, 2
NUM_REQUESTS, NUM_REQUESTS_QUICK = 240, 20
"""Requests of a run. The p99 of 240 TTFTs lies between the third and the fourth from the top."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 16, 256, 512
NUM_PROBED = 24
"""Requests at once for the measurement of the engine's maximum rate."""
LIMITS = {"tokens_per_second": 0.10, "ttft_p50": 0.10, "itl_p50": 0.10, "ttft_p99": 0.25, "itl_p99": 0.25}
SPREADS = 1.5


@dataclass(frozen=True)
class Kind:
    """Lengths of requests, in tokens, and how busy they keep the engine."""

    name: str
    prompt: float
    """Median prompt tokens; lengths are lognormal."""
    output: float
    busy: float
    """Share of the maximum rate."""

    def lengths(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """(prompt, output) tokens of each request."""
        prompts = np.clip(rng.lognormal(np.log(self.prompt), 0.6, count), 1, MAX_MODEL_LEN // 2).astype(int)
        outputs = np.clip(rng.lognormal(np.log(self.output), 0.5, count), 2, MAX_MODEL_LEN // 2).astype(int)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


CALIBRATION = Kind("chats", prompt=40, output=40, busy=0.6)
VALIDATION = Kind("long prompts", prompt=110, output=24, busy=0.5)


def requests(kind: Kind, rate: float, count: int, seed: int) -> list[TraceRequest]:
    """Requests at random times; the first one arrives at once."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    lengths = kind.lengths(count, rng)
    return [TraceRequest(at, *each) for at, each in zip((arrivals - arrivals[0]).tolist(), lengths, strict=True)]


class Host(Protocol):
    """An engine, and a client that sends requests to it."""

    title: str

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> TokenTimes:
        """Send the requests at their times, with prompts of random tokens, until all are finished."""
        ...

    def close(self) -> list[StepLog]:
        """End it. Returns the recorded steps of each call of `serve`."""
        ...


class EngineHost:
    """The bundled engine.

    Args:
        model: a directory, or "demo".
        folder: for the recordings.
    """

    title = "the bundled engine"

    def __init__(self, model: str, folder: Path) -> None:
        settings = {
            "num_threads": torch.get_num_threads(),
            "max_model_len": MAX_MODEL_LEN,
            "num_blocks": MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
        self._live = BundledEngine(model, settings)
        self._folder = folder
        self._recordings: list[Path] = []

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> TokenTimes:
        # Validation runs are recorded too, because recording takes time.
        path = self._folder / f"engine-{len(self._recordings)}.jsonl"
        self._recordings.append(path)
        scheduler = self._live.engine.scheduler
        with path.open("w", encoding="utf-8") as file:
            scheduler.start_recording(Recorder(file))
            try:
                return _serve(self._live, sent, self._live.vocab_size, seed)
            finally:
                scheduler.stop_recording()

    def close(self) -> list[StepLog]:
        return [read_steps(path) for path in self._recordings]


class VllmHost:
    """vLLM with Observer.

    Args:
        model: a directory, or "demo".
        folder: for the recordings.
        threads: of the model runner.

    Raises:
        WorkerFailed: it did not start.
    """

    title = f"vLLM {VLLM_VERSION}"

    def __init__(self, model: str, folder: Path, threads: int) -> None:
        directory = DEMO if model == "demo" else Path(model)
        self._vocab_size = int(json.loads((directory / "config.json").read_text())["vocab_size"])
        self._recording = folder / "vllm.jsonl"
        self._num_requests: list[int] = []
        settings = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
        self._live = Vllm(directory, settings, threads, record=str(self._recording))

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> TokenTimes:
        self._num_requests.append(len(sent))
        return _serve(self._live, sent, self._vocab_size, seed)

    def close(self) -> list[StepLog]:
        self._live.close()
        return steps_of_runs(self._recording, self._num_requests)


def _serve(live: BundledEngine | Vllm, sent: Sequence[TraceRequest], vocab_size: int, seed: int) -> TokenTimes:
    arrivals, lengths = [each.arrival_time for each in sent], [each.num_output_tokens for each in sent]
    return live.serve(arrivals, prompts_of(sent, vocab_size, seed), lengths)


def steps_of_runs(recording: Path, num_requests: Sequence[int]) -> list[StepLog]:
    """The steps of an observed recording, by run; `num_requests` are the numbers of requests of the runs.

    The engine is idle between two runs.
    """
    observed = read_observed(recording)
    found, last = [], 0
    for count in num_requests:
        first, last = last, last + count
        is_its = observed.ended > observed.requests[first].queued
        if last < len(observed.requests):
            is_its &= observed.ended < observed.requests[last].queued
        steps = {name: column[is_its] for name, column in observed.steps.items()}
        of_run = replace(observed, requests=observed.requests[first:last], steps=steps)
        found.append(observed_steps(of_run, recording))
    return found


def highest_rate(host: Host, kind: Kind) -> float:
    """Requests a second that it serves if all arrive at once."""
    sent = [TraceRequest(0.0, *each) for each in kind.lengths(NUM_PROBED, np.random.default_rng(0))]
    return NUM_PROBED / max(map(max, host.serve(sent, seed=1)))


def measured(sent: Sequence[TraceRequest], tokens: TokenTimes) -> dict[str, float]:
    """The figures of a run."""
    if [len(each) for each in tokens] != [each.num_output_tokens for each in sent]:
        raise RuntimeError("a request got more or fewer tokens than it asked for")
    first = np.array([each[0] for each in tokens])
    gaps = np.concatenate([np.diff(each) for each in tokens])
    return figures(first - [each.arrival_time for each in sent], gaps, sum(map(len, tokens)), max(map(max, tokens)))


def figures(ttft: Any, gaps: Any, num_tokens: int, seconds: float) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "tokens_per_second": num_tokens / seconds,
        "ttft_p50": float(np.percentile(ttft, 50)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "itl_p99": float(np.percentile(gaps, 99)),
    }


def predicted(step_time: StepTime, sent: Sequence[TraceRequest], config: SchedulerConfig) -> dict[str, float]:
    """The figures of a simulation of the measured requests."""
    timings = simulate(OpenLoop(sent), config, step_time).timings
    gaps, counts = timings.gaps()
    return figures(
        timings.first_token - timings.arrival,
        np.repeat(gaps, counts),
        int(timings.num_output_tokens.sum()),
        float(np.max(timings.last_token)),
    )


def spread(values: Sequence[float]) -> float:
    """The maximum distance of a value from the median of all, relative to it."""
    middle = median(values)
    return max(abs(value / middle - 1) for value in values)


def measure(host: Host, rounds: int, count: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(predicted, measured) of each pair of runs, which alternate."""
    host.serve([TraceRequest(0.0, 64, 8)] * 4, seed=0)  # compiles, allocates
    rates = {kind.name: kind.busy * highest_rate(host, kind) for kind in (CALIBRATION, VALIDATION)}
    note(f"{host.title}, requests per second: " + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
    # Always the same requests, so that runs differ only by the machine.
    validation = requests(VALIDATION, rates[VALIDATION.name], count, seed=2)
    found = []
    for number in range(rounds):
        host.serve(requests(CALIBRATION, rates[CALIBRATION.name], count, seed=10 + number), 100 + number)
        found.append(measured(validation, host.serve(validation, 200 + number)))
    logs = host.close()[-2 * rounds :]
    pairs = []
    for number, each in enumerate(found):
        log = logs[2 * number]
        profile = calibrate_steps(log, f"calibration run {number + 1}").profile
        pairs.append((predicted(profile.step_time, validation, SchedulerConfig(**log.config)), each))
        off = profile.held_out_errors["step_mape"]
        note(f"pair {number + 1}: steps of the calibration run are off by {off:.1%} (held out)")
    return pairs


def judge(title: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]], targets: Targets) -> dict[str, Any]:
    """The table, the targets and the figures."""
    found: dict[str, Any] = {}
    rows = []
    for name, fixed in LIMITS.items():
        errors = [predicted[name] / measured[name] - 1 for predicted, measured in pairs]
        measured = [each[name] for _, each in pairs]
        limit = max(fixed, SPREADS * spread(measured))
        error = median(errors)
        targets.at_most(f"{title}, {name}, |predicted / measured - 1|", abs(error), round(limit, 4))
        entry = found[name] = {
            "predicted": median(each[name] for each, _ in pairs),
            "measured": median(measured),
            "error": round(error, 4),
            "errors": [round(each, 4) for each in errors],
            "spread": round(spread(measured), 4),
            "limit": round(limit, 4),
        }
        rows.append([name, *(entry[key] for key in ("predicted", "measured", "error", "spread", "limit"))])
    header = ["", "predicted", "measured", "error", "spread of runs", "limit"]
    print_table(
        f"{title}: {VALIDATION.name}, predicted from {CALIBRATION.name}: medians of {len(pairs)} pairs", header, rows
    )
    return found


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--host", choices=("engine", "vllm", "both"), default="both", help="which engines to measure")
    parser.add_argument("--model", default="demo", help="a model directory; the bundled demo model if not given")
    parser.add_argument("--threads", type=parse_positive_int, default=1, help="of each engine's arithmetic")
    parser.add_argument("--rounds", type=parse_positive_int, help=f"pairs of runs [default: {ROUNDS}]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quick, targets = arguments.quick, Targets()
    rounds = arguments.rounds or (ROUNDS_QUICK if quick else ROUNDS)
    found: dict[str, Any] = {}
    for name in ("engine", "vllm"):
        found[name] = None
        if arguments.host not in (name, "both"):
            targets.skip(f"predictions of {name}", f"--host {arguments.host}")
            continue
        if name == "vllm" and not is_complete():
            note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
            targets.skip("predictions of vllm", "no environment for vLLM")
            continue
        with tempfile.TemporaryDirectory() as folder:
            host: Host
            if name == "engine":
                host = EngineHost(arguments.model, Path(folder))
            else:
                host = VllmHost(arguments.model, Path(folder), arguments.threads)
            pairs = measure(host, rounds, NUM_REQUESTS_QUICK if quick else NUM_REQUESTS)
        found[name] = judge(host.title, pairs, targets)
    return finish("calibration", {"quick": quick, "rounds": rounds, **found}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
