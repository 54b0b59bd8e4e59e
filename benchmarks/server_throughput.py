"""`pointsman serve` beside vLLM's own API server, under vLLM's own client.

`vllm bench serve` sends 200 requests of random prompts (dataset "random", 64 to 192 tokens, outputs of 32 to 96,
greedy, `--ignore-eos`), all at once (rate inf) and at 20 a second, to one server and then to the other, round by round;
each round has other prompts, the same for both. The model is a Qwen3 of random weights with the demo model's tokenizer:
9 million parameters, so that the servers' own work shows beside the model's (`--size large`: 98 million).

Both servers have the same settings: float32, threads, 64 sequences at once, 1,024 tokens a step, blocks of 32 tokens, 1
GiB of KV cache, sequences of up to 1,024 tokens. All others keep their defaults; vLLM's model is therefore compiled
(`--peers vllm-eager`: not compiled). Client and server share the machine's cores if there are too few.

Reported per rate: output tokens per second; mean, median and 99th percentile of the time to the first token (TTFT),
between the pieces of an output (ITL) and per token after the first (TPOT), in milliseconds; and processor seconds of
the server. Ratios are taken within a round, the median counts.

vLLM, and its client, need the environment that `vllm_env.py` makes. `--quick` needs neither: Pointsman serves the demo
model to a client of this project, 48 requests.

    python benchmarks/server_throughput.py --check
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import vllm_env
from _common import Targets, argument_parser, finish, note, print_table, run
from _engine_model import make_jobs, make_prompts
from _server_driver import drive
from _server_probe import run_async
from _server_sides import (
    DEMO_FILES,
    LARGE,
    SERVED_MODEL_NAME,
    SMALL,
    VOCABULARY,
    Knobs,
    PointsmanSide,
    Side,
    VllmSide,
    served_directory,
    write_vllm_metadata,
)

OURS = "pointsman"
PEERS: dict[str, Callable[[Knobs], Side]] = {
    "vllm": partial(VllmSide, eager=False),
    "vllm-eager": partial(VllmSide, eager=True),
}
SIZES = {"small": SMALL, "large": LARGE}
RATES = (float("inf"), 20.0)
NUM_REQUESTS, NUM_REQUESTS_QUICK = 200, 48
INPUT, OUTPUT, RANGE = 128, 64, 0.5
"""Mean tokens of prompts and outputs, and their maximum distance from it, as a share."""
WARM_UP = 32
SECONDS_TO_BENCH = 900.0
COLUMNS = (
    "output_throughput",
    *(f"{form}_{name}_ms" for name in ("ttft", "itl", "tpot") for form in ("mean", "median", "p99")),
)
HEADER = ("output tokens/s", *(f"{name} {form}" for name in ("TTFT", "ITL", "TPOT") for form in ("mean", "p50", "p99")))
RATE_BOUND = 0.99
"""Minimum ratio of tokens per second at a finite rate. There arrivals determine the pace of both sides, and the ratio
is
1 except for the length of the last outputs."""

Results = dict[tuple[str, float], list[dict[str, Any]]]
"""Results by side and rate, one per round."""


def bench(
    side: Side, model: Path, rate: float, num_requests: int, seed: int, folder: Path, *, detailed: bool = False
) -> dict[str, Any]:
    """Run vLLM's client once; its result is written to `folder`.

    Args:
        detailed: with the times of each request.

    Raises:
        RuntimeError: it failed; the message ends with its last output.
    """
    command = [str(vllm_env.python_of()), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm"]
    command += ["--base-url", f"http://127.0.0.1:{side.port}", "--model", SERVED_MODEL_NAME, "--tokenizer", str(model)]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    command += ["--random-range-ratio", str(RANGE), "--num-prompts", str(num_requests), "--request-rate", str(rate)]
    command += ["--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99", "--save-result"]
    command += ["--save-detailed"] if detailed else []
    command += ["--result-dir", str(folder), "--result-filename", "result.json"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(write_vllm_metadata(folder / "metadata")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    before = side.cpu_seconds()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_TO_BENCH)
    if ran.returncode:
        raise RuntimeError(f"vllm bench serve failed against {side.name}:\n{(ran.stdout + ran.stderr)[-4000:]}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result | {"server_cpu_seconds": side.cpu_seconds() - before}


def warm_up(side: Side) -> None:
    """Send some streams that are not counted."""
    jobs = make_jobs(WARM_UP, (16, INPUT), (8, 16))
    prompts = make_prompts(jobs, VOCABULARY, seed=1_000)
    run_async(drive(side.address, SERVED_MODEL_NAME, prompts, [job.output for job in jobs]))


def compete(peers: Sequence[str], knobs: Knobs, rounds: int) -> Results:
    """Start all servers, then run them alternately.

    Raises:
        RuntimeError: a server did not start, or the client failed.
    """
    makers: dict[str, Callable[[Knobs], Side]] = {name: PEERS[name] for name in peers} | {OURS: PointsmanSide}
    sides: list[Side] = []
    results: Results = {}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for name, make in makers.items():
                note(f"  starting {name}")
                sides.append(make(knobs))
                warm_up(sides[-1])
                sides[-1].pause()
            for number in range(rounds):
                for rate in RATES:
                    for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                        side.resume()
                        seed = 100 * number + (0 if rate == float("inf") else 1)
                        result = bench(side, knobs.model, rate, NUM_REQUESTS, seed, Path(temporary))
                        side.pause()
                        results.setdefault((side.name, rate), []).append(result)
                        speed = f"{result['output_throughput']:.0f} tokens/s"
                        note(f"  round {number + 1}, rate {rate:g}: {side.name} {speed}")
        finally:
            for side in sides:
                side.stop()
    return results


def report(results: Results, num_requests: int, targets: Targets) -> dict[str, Any]:
    """A table per rate; ratios; targets."""
    figures: dict[str, Any] = {}
    names = list(dict.fromkeys(name for name, _ in results))
    for rate in dict.fromkeys(rate for _, rate in results):
        rows: list[list[object]] = []
        entry: dict[str, Any] = {}
        for name in names:
            runs = results[name, rate]
            medians = {column: median(each[column] for each in runs) for column in COLUMNS}
            cpu = median(each["server_cpu_seconds"] for each in runs)
            completed = [each["completed"] for each in runs]
            rows.append([name, min(completed), *medians.values(), cpu])
            entry[name] = {column: round(value, 3) for column, value in medians.items()}
            entry[name] |= {"completed": min(completed), "server_cpu_seconds": round(cpu, 2)}
        print_table(f"rate {rate:g}, latencies in ms", ["", "complete", *HEADER, "server CPU s"], rows)
        ours = results[OURS, rate]
        least = min(each["completed"] for each in ours)
        text = f"rate {rate:g}: {least} of {num_requests} requests are complete; target: all"
        targets.holds(text, least == num_requests)
        for name in names:
            if name != OURS:
                entry[f"ratios to {name}"] = ratios = ratios_of(ours, results[name, rate])
                note(f"  Pointsman / {name}: " + ", ".join(f"{column} {value:.2f}" for column, value in ratios.items()))
                min_ratio = 1.0 if rate == float("inf") else RATE_BOUND
                text = f"rate {rate:g}: output tokens/s, Pointsman / {name}"
                targets.at_least(text, ratios["output_throughput"], min_ratio)
                targets.at_most(f"rate {rate:g}: p99 ITL, Pointsman / {name}", ratios["p99_itl_ms"], 1.0)
        figures[f"{rate:g}"] = entry
    return figures


def ratios_of(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ours / theirs in the same round, the median of the rounds."""
    rounds = list(zip(ours, theirs, strict=True))
    return {column: round(median(a[column] / b[column] for a, b in rounds), 4) for column in COLUMNS}


def quick(knobs: Knobs) -> Results:
    """Pointsman alone, driven by the client that needs no environment of its own."""
    spread = round(RANGE * INPUT), round(RANGE * OUTPUT)
    inputs, outputs = (INPUT - spread[0], INPUT + spread[0]), (OUTPUT - spread[1], OUTPUT + spread[1])
    jobs = make_jobs(NUM_REQUESTS_QUICK, inputs, outputs)
    side = PointsmanSide(knobs)
    results: Results = {}
    try:
        warm_up(side)
        for number, rate in enumerate(RATES):
            before = side.cpu_seconds()
            prompts = make_prompts(jobs, VOCABULARY, seed=number)
            driven = run_async(
                drive(side.address, SERVED_MODEL_NAME, prompts, [job.output for job in jobs], rate=rate, seed=number)
            )
            figures = driven.figures() | {"server_cpu_seconds": side.cpu_seconds() - before}
            results[OURS, rate] = [figures]
    finally:
        side.stop()
    return results


def peer_names(text: str) -> list[str]:
    """The names in "vllm,vllm-eager"."""
    names = text.split(",")
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer is called {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    return names


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=peer_names, default=["vllm"], help=f"some of {','.join(PEERS)} (vllm)")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="of the model")
    parser.add_argument("--threads", type=int, help="of each server's model (2; quick: 1)")
    arguments = parser.parse_args()
    threads = arguments.threads or (1 if arguments.quick else 2)
    targets = Targets()
    setting: dict[str, Any] = {"quick": arguments.quick, "threads": threads}
    if arguments.quick:
        num_requests = NUM_REQUESTS_QUICK
        results = quick(Knobs(DEMO_FILES, threads))
        setting |= {"model": "demo", "client": "own", "rounds": 1}
    else:
        if not vllm_env.is_complete():
            raise SystemExit(
                "the environment with vLLM, whose client sends the load, is missing; run python benchmarks/vllm_env.py"
            )
        num_requests = NUM_REQUESTS
        knobs = Knobs(served_directory(SIZES[arguments.size]), threads)
        results = compete(arguments.peers, knobs, arguments.rounds)
        setting |= {"parameters": SIZES[arguments.size].num_parameters, "client": "vllm", "rounds": arguments.rounds}
    setting["requests"] = num_requests
    figures = report(results, num_requests, targets)
    if arguments.quick:
        targets.skip("output tokens/s and p99 ITL, Pointsman / its peers", "--quick runs no peer")
    return finish("server_throughput", {**setting, "rates": figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
