"""Does a profile of the bundled engine on this CPU predict another workload?

A run sends requests in real time, at random moments, to an engine that records its steps. Calibration runs have chats;
validation runs have longer prompts, shorter answers and another rate. They take turns, five of each. Each calibration
run becomes a profile, as `pointsman calibrate` makes it, and the simulator predicts the validation run that follows it:
the same arrivals and lengths, under the engine's own scheduler settings.

Throughput and p50 of TTFT and ITL must be within 10 % of what was measured, p99 within 25 %, or within 1.5 times the
spread of the five validation runs, whichever is more: a machine whose own runs differ cannot be predicted better. The
error is the median over the pairs. Rates are shares of what the engine serves at most, measured first, so that a fast
machine and a slow one are equally busy.

    python benchmarks/calibration.py --check
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, at_least_one, finish, note, print_table, run

from pointsman.core import SchedulerConfig
from pointsman.core.recording import Recorder
from pointsman.engine import Engine, SamplingParams
from pointsman.sim.calibrate import Calibration, calibrate
from pointsman.sim.simulator import simulate
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest

ROUNDS, ROUNDS_QUICK = 5, 2
SECONDS, SECONDS_QUICK = 20.0, 4.0
"""Of the arrivals of a run, about."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 16, 256, 512
NUM_PROBED = 24
"""Requests at once that show what the engine serves at most."""
LIMITS = {"tokens_per_second": 0.10, "ttft_p50": 0.10, "itl_p50": 0.10, "ttft_p99": 0.25, "itl_p99": 0.25}
SPREADS = 1.5


@dataclass(frozen=True)
class Kind:
    """Lengths of requests, in tokens, and how busy they keep the engine."""

    name: str
    prompt: float
    """Median; lengths are lognormal."""
    output: float
    busy: float
    """Share of the highest rate."""

    def lengths(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """(prompt, output) tokens of each request."""
        prompts = np.clip(rng.lognormal(np.log(self.prompt), 0.6, count), 1, MAX_MODEL_LEN // 2).astype(int)
        outputs = np.clip(rng.lognormal(np.log(self.output), 0.5, count), 2, MAX_MODEL_LEN // 2).astype(int)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


CALIBRATION = Kind("chats", prompt=40, output=40, busy=0.6)
VALIDATION = Kind("long prompts", prompt=110, output=24, busy=0.5)


def requests(kind: Kind, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Requests at random moments; the first one at once."""
    rng = np.random.default_rng(seed)
    count = max(2, round(rate * seconds))
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    lengths = kind.lengths(count, rng)
    return [TraceRequest(at, *each) for at, each in zip((arrivals - arrivals[0]).tolist(), lengths, strict=True)]


class Host:
    """An engine, and the loop that sends requests to it.

    Args:
        model: a directory, or "demo".
    """

    def __init__(self, model: str) -> None:
        self.engine = Engine(
            model,
            num_threads=torch.get_num_threads(),
            max_model_len=MAX_MODEL_LEN,
            num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // 16,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            clock=monotonic,
        )
        self._num_sent = 0
        self.serve([TraceRequest(0.0, 64, 8)] * 4, 0)  # compiles, allocates

    @property
    def config(self) -> SchedulerConfig:
        """Of its scheduler."""
        return self.engine.scheduler.config

    def recorded(self, sent: Sequence[TraceRequest], seed: int, path: Path) -> dict[str, float]:
        """As `serve`; the steps are in `path`. Validation runs are recorded too, as recording takes time."""
        with path.open("w", encoding="utf-8") as file:
            self.engine.scheduler.start_recording(Recorder(file))
            try:
                return self.serve(sent, seed)
            finally:
                self.engine.scheduler.stop_recording()

    def highest_rate(self, kind: Kind) -> float:
        """Requests a second that it serves if all are there at once."""
        lengths = kind.lengths(NUM_PROBED, np.random.default_rng(0))
        start = monotonic()
        self.serve([TraceRequest(0.0, *each) for each in lengths], 1)
        return NUM_PROBED / (monotonic() - start)

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> dict[str, float]:
        """Send the requests at their times, and measure as a report of the simulator does."""
        engine, rng = self.engine, np.random.default_rng(seed)
        vocabulary = int(engine.model_config.vocab_size)
        prompts = [rng.integers(10, vocabulary, size=each.num_prompt_tokens).tolist() for each in sent]
        names = [f"r{self._num_sent + index}" for index in range(len(sent))]
        self._num_sent += len(sent)
        tokens: dict[str, list[float]] = {name: [] for name in names}
        start, next_one = monotonic(), 0
        while next_one < len(sent) or engine.has_unfinished_requests():
            while next_one < len(sent) and start + sent[next_one].arrival_time <= monotonic():
                each = sent[next_one]
                params = SamplingParams(temperature=0.0, max_tokens=each.num_output_tokens, ignore_eos=True)
                arrival = start + each.arrival_time
                engine.add_request(names[next_one], prompts[next_one], params, arrival_time=arrival)
                next_one += 1
            if engine.has_unfinished_requests():
                outputs = engine.step()
                now = monotonic() - start
                for output in outputs:
                    tokens[output.request_id].append(now)
            else:
                sleep(max(0.0, start + sent[next_one].arrival_time - monotonic()))
        while not engine.scheduler.is_idle:
            engine.step()  # the last ends are reported by an empty step
        times = list(tokens.values())
        if [len(each) for each in times] != [each.num_output_tokens for each in sent]:
            raise RuntimeError("a request got more or fewer tokens than it asked for")
        first = np.array([each[0] for each in times])
        gaps = np.concatenate([np.diff(each) for each in times])
        return figures(first - [each.arrival_time for each in sent], gaps, sum(map(len, times)), max(map(max, times)))


def figures(ttft: Any, gaps: Any, num_tokens: int, seconds: float) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "tokens_per_second": num_tokens / seconds,
        "ttft_p50": float(np.percentile(ttft, 50)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "itl_p99": float(np.percentile(gaps, 99)),
    }


def predicted(found: Calibration, sent: Sequence[TraceRequest], config: SchedulerConfig) -> dict[str, float]:
    """The same figures of a simulation."""
    outcome = simulate(OpenLoop(sent), config, found.profile.step_time)
    timings = outcome.timings
    gaps, counts = timings.gaps()
    return figures(
        timings.first_token - timings.arrival,
        np.repeat(gaps, counts),
        int(timings.num_output_tokens.sum()),
        float(np.max(timings.last_token)),
    )


def spread(values: Sequence[float]) -> float:
    """The farthest that one of them is from their median, relative to it."""
    middle = median(values)
    return max(abs(value / middle - 1) for value in values)


def measure(host: Host, rounds: int, seconds: float, folder: Path) -> list[tuple[dict[str, float], dict[str, float]]]:
    """(predicted, measured) of each pair of runs, which take turns."""
    rates = {kind.name: kind.busy * host.highest_rate(kind) for kind in (CALIBRATION, VALIDATION)}
    note("requests per second: " + ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items()))
    # Always the same requests, so that what differs between the runs is the machine.
    validation = requests(VALIDATION, rates[VALIDATION.name], seconds, seed=2)
    pairs = []
    for number in range(rounds):
        log = folder / f"calibration-{number}.jsonl"
        host.recorded(requests(CALIBRATION, rates[CALIBRATION.name], seconds, seed=10 + number), 100 + number, log)
        measured = host.recorded(validation, 200 + number, folder / "validation.jsonl")
        found = calibrate(log)
        pairs.append((predicted(found, validation, host.config), measured))
        held_out = found.profile.held_out_errors
        note(f"pair {number + 1}: steps of the calibration run are off by {held_out['step_mape']:.1%} (held out)")
    return pairs


def judge(pairs: Sequence[tuple[dict[str, float], dict[str, float]]], targets: Targets) -> dict[str, Any]:
    """The table, the targets and the figures."""
    found: dict[str, Any] = {}
    rows = []
    for name, fixed in LIMITS.items():
        errors = [predicted[name] / measured[name] - 1 for predicted, measured in pairs]
        measured = [each[name] for _, each in pairs]
        limit = max(fixed, SPREADS * spread(measured))
        error = median(errors)
        targets.at_most(f"{name}, |predicted / measured - 1|", abs(error), round(limit, 4))
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
    print_table(f"{VALIDATION.name}, predicted from {CALIBRATION.name}: medians of {len(pairs)} pairs", header, rows)
    return found


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo", help="a model directory; the bundled demo model if not given")
    parser.add_argument("--threads", type=at_least_one, default=1, help="PyTorch's threads")
    parser.add_argument("--rounds", type=at_least_one, help=f"pairs of runs [default: {ROUNDS}]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quick, targets = arguments.quick, Targets()
    rounds = arguments.rounds or (ROUNDS_QUICK if quick else ROUNDS)
    host = Host(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(host, rounds, SECONDS_QUICK if quick else SECONDS, Path(folder))
    result = {"quick": quick, "rounds": rounds, "engine": judge(pairs, targets)}
    return finish("calibration", result, targets, arguments.check)


if __name__ == "__main__":
    run(main)
