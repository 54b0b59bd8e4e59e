"""Prediction of one workload by the profile of another, for engines on this CPU: the bundled engine, and vLLM.

A run sends requests in real time, at random moments, to an engine that records its steps. Calibration runs have chats;
validation runs have longer prompts, shorter outputs and another rate. They alternate, five of each. Each calibration
run becomes a profile, as `pointsman calibrate` makes it, and the simulator predicts the validation run that follows it:
the same arrivals and lengths, under the settings in the recording.

Throughput, mean end-to-end time, p50 of TTFT and p50 of ITL must be within 10 % of the measurement, p99 within 25 %, or
within 1.5 times the spread of the five validation runs, whichever is more: a machine whose own runs differ cannot be
predicted better. The error is the median over the pairs. Rates are shares of the engine's maximum, measured first, so
that a fast machine and a slow one are equally busy. Near their limit a queue would magnify every error.

Both engines are stepped by their client, in one process: nothing lies between it and the scheduler, as in the
simulator.
vLLM's is another process (`_vllm_calibration_worker.py`), and `Observer` records. It runs three times: plainly; with
n-gram drafts, whose acceptance the recording shows; and with a model of which most layers attend within a window.

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
from pointsman.sim.features import PLAIN, Features
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
LIMITS = {
    "tokens_per_second": 0.10,
    "e2e_mean": 0.10,
    "ttft_p50": 0.10,
    "itl_p50": 0.10,
    "ttft_p99": 0.25,
    "itl_p99": 0.25,
}
SPREADS = 1.5
HOSTS = ("engine", "vllm", "vllm-drafts", "vllm-window")
NUM_DRAFTS, PHRASE = 4, 4
"""Maximum drafts of a request in a step; the prompts then repeat this many tokens, so that drafts are found."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
WINDOW, NUM_WINDOWED, NUM_LAYERS = 64, 5, 6
"""Tokens of the windows of the model with windows, and its numbers of layers."""


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
        title: what runs, in words.
        phrase: number of tokens that each prompt repeats; None: prompts do not repeat themselves.
        options: further settings of vLLM's `EngineArgs`.

    Raises:
        WorkerFailed: it did not start.
    """

    def __init__(
        self, model: str, folder: Path, threads: int, title: str = "", phrase: int | None = None, **options: Any
    ) -> None:
        self._phrase = phrase
        self.title = f"vLLM {VLLM_VERSION}{title}"
        directory = DEMO if model == "demo" else Path(model)
        self._vocab_size = int(json.loads((directory / "config.json").read_text())["vocab_size"])
        self._recording = folder / "vllm.jsonl"
        self._num_requests: list[int] = []
        settings = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            **options,
        }
        self._live = Vllm(directory, settings, threads, record=str(self._recording))

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> TokenTimes:
        self._num_requests.append(len(sent))
        return _serve(self._live, sent, self._vocab_size, seed, self._phrase)

    def close(self) -> list[StepLog]:
        self._live.close()
        return steps_of_runs(self._recording, self._num_requests)


def make_window_model(folder: Path) -> Path:
    """A Gemma 3 with random weights in the folder, of the demo model's size; most of its layers have a window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["sliding_attention"] * NUM_WINDOWED + ["full_attention"] * (NUM_LAYERS - NUM_WINDOWED)
    config = Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        sliding_window=WINDOW,
        layer_types=kinds,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def _serve(
    live: BundledEngine | Vllm, sent: Sequence[TraceRequest], vocab_size: int, seed: int, phrase: int | None = None
) -> TokenTimes:
    arrivals, lengths = [each.arrival_time for each in sent], [each.num_output_tokens for each in sent]
    prompts = prompts_of(sent, vocab_size, seed)
    if phrase is not None:
        prompts = [[prompt[place % phrase] for place in range(len(prompt))] for prompt in prompts]
    return live.serve(arrivals, prompts, lengths)


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
    gaps = np.concatenate([np.diff(np.unique(each)) for each in tokens])  # the tokens of a step arrive together
    arrivals, last = np.array([each.arrival_time for each in sent]), np.array([each[-1] for each in tokens])
    return figures(first - arrivals, gaps, last - arrivals, sum(map(len, tokens)), max(map(max, tokens)))


def figures(ttft: Any, gaps: Any, e2e: Any, num_tokens: int, seconds: float) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "tokens_per_second": num_tokens / seconds,
        "e2e_mean": float(np.mean(e2e)),
        "ttft_p50": float(np.percentile(ttft, 50)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "itl_p99": float(np.percentile(gaps, 99)),
    }


def predicted(
    step_time: StepTime, sent: Sequence[TraceRequest], config: SchedulerConfig, features: Features = PLAIN
) -> dict[str, float]:
    """The figures of a simulation of the measured requests."""
    timings = simulate(OpenLoop(sent), config, step_time, features=features).timings
    gaps, counts = timings.gaps()
    return figures(
        timings.first_token - timings.arrival,
        np.repeat(gaps, counts),
        timings.last_token - timings.arrival,
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
        config, drafts = SchedulerConfig(**log.config), log.speculation
        pairs.append((predicted(profile.step_time, validation, config, Features(speculation=drafts)), each))
        off = profile.held_out_errors["step_mape"]
        note(f"pair {number + 1}: steps of the calibration run are off by {off:.1%} (held out)")
        if drafts is not None:
            note(f"  {drafts.mean_length:.2f} tokens a step; of drafts found in {drafts.proposal[0]:.0%} of the steps")
    return pairs


def make_host(name: str, model: str, folder: Path, threads: int) -> Host:
    """The engine of a name in `HOSTS`."""
    if name == "engine":
        return EngineHost(model, folder)
    if name == "vllm-drafts":
        return VllmHost(
            model, folder, threads, " with n-gram drafts", PHRASE, speculative_config=DRAFTS, async_scheduling=False
        )
    if name == "vllm-window":
        return VllmHost(str(make_window_model(folder / "window")), folder, threads, " with windows")
    return VllmHost(model, folder, threads)


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
    parser.add_argument("--host", choices=(*HOSTS, "all"), default="all", help="which engines to measure")
    parser.add_argument("--model", default="demo", help="a model directory; the bundled demo model if not given")
    parser.add_argument("--threads", type=parse_positive_int, default=1, help="of each engine's arithmetic")
    parser.add_argument("--rounds", type=parse_positive_int, help=f"pairs of runs [default: {ROUNDS}]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quick, targets = arguments.quick, Targets()
    rounds = arguments.rounds or (ROUNDS_QUICK if quick else ROUNDS)
    found: dict[str, Any] = {}
    for name in HOSTS:
        found[name] = None
        if arguments.host not in (name, "all"):
            targets.skip(f"predictions of {name}", f"--host {arguments.host}")
            continue
        if name != "engine" and not is_complete():
            note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
            targets.skip(f"predictions of {name}", "no environment for vLLM")
            continue
        with tempfile.TemporaryDirectory() as folder:
            host = make_host(name, arguments.model, Path(folder), arguments.threads)
            pairs = measure(host, rounds, NUM_REQUESTS_QUICK if quick else NUM_REQUESTS)
        found[name] = judge(host.title, pairs, targets)
    return finish("calibration", {"quick": quick, "rounds": rounds, **found}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
