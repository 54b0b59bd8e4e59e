"""Tokens per second of the bundled engine, beside transformers, vLLM, OpenVINO GenAI and llama.cpp.

Without `--model`, the workload is 64 requests that all arrive at the start, prompts of 32 to 512 random tokens, outputs
of 16 to 256, greedy, ended by their length alone; a Qwen3 of 121 million random parameters; two threads. Rounds are
interleaved, each with other prompts of the same lengths, so that no prefix cache holds them. A ratio is the peer's
seconds divided by Pointsman's in the same round; the median is reported.

With `--model`, the weights and the prompts are real: 1, 4, 8, 16 and 64 requests at once, prompts of 30 to 200 tokens
in the model's chat format, outputs of 128 tokens. `_engine_loads.py` defines the comparisons. Reported for each
contender and load are output tokens per second, the median TTFT, and the peak of resident memory, in which shared pages
count for each process. The seconds to the first output are those from the start of the process to the first token; they
depend on caches of compilers and the system.

Limits: 1 GiB of KV cache, 64 sequences at once and 1,024 tokens a step (enough for the longest prompt beside the
decodes), for all engines with such knobs. All other settings keep their defaults: for vLLM prefix caching, asynchronous
scheduling and its engine in processes of its own, for OpenVINO no prefix caching. OpenVINO's cache has the model's
dtype, as the other caches. llama.cpp has a cache of 16-bit floats. transformers gets static batches in order of
arrival, padded on the left, each running until its longest output is complete: of 16 requests, or of up to 64 with
`--model`. Its own continuous batching is slow on a CPU, so it runs once, after the others, with a time limit.

In float32 all contenders should agree on the model's output. The share of requests with the same first 8 tokens as the
first contender is reported and checked. (Near ties depend on the order of additions.) Quantised contenders differ;
their share is for information.

vLLM, OpenVINO and llama.cpp need the environments that `vllm_env.py`, `openvino_env.py` and `llama_cpp_env.py` make;
without them they are skipped. With `--quick` only transformers runs, and with `--model` only llama.cpp. OpenVINO has no
target yet: it is here for comparison. It gets the model from Optimum's converter, because releases 2025.4.1 and
2026.4.1 could not compile a GGUF file of this shape of model ("Node ReadValue ... contains dead weak ptr").

    python benchmarks/engine_throughput.py --check
    python benchmarks/engine_throughput.py --model smollm2 --check
    python benchmarks/engine_throughput.py --model smollm2 --contenders pointsman-int8,llama.cpp --requests 1,16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _engine_contest import (
    OPENVINO,
    POINTSMAN,
    TRANSFORMERS_CONTINUOUS,
    TRANSFORMERS_STATIC,
    VLLM_COMPILED,
    VLLM_EAGER,
    Contender,
    Requests,
    Workload,
    check_agreement,
    chosen,
    compete,
    rounded,
    without_missing,
)
from _engine_model import FULL, QUICK, Job, Shape, make_jobs, make_prompts, model_directory
from _engine_worker import FIRST_TOKENS

OURS = "pointsman"
WARM_UP_REQUESTS, WARM_UP_OUTPUT = 16, 16
WARM_UP_SEED = 1_000
DTYPES = ("float32", "bfloat16")

CONTENDERS = {
    "transformers-static": TRANSFORMERS_STATIC,
    "transformers-continuous": TRANSFORMERS_CONTINUOUS,
    "vllm-eager": VLLM_EAGER,
    "vllm-compiled": VLLM_COMPILED,
    "openvino": OPENVINO,
    OURS: POINTSMAN,
}
QUICK_CONTENDERS = ("transformers-static", OURS)
TARGETS = {
    "float32": {"transformers-static": 3.0, "vllm-eager": 1.0},
    "bfloat16": {"transformers-static": 2.5, "vllm-eager": 0.85},
}


class RandomModel(Workload):
    """A model of random weights, and one load of random prompts."""

    def __init__(self, shape: Shape, jobs: Sequence[Job]) -> None:
        self.shape = shape
        self.jobs = jobs
        self.loads = [len(jobs)]
        self.max_tokens = max(job.prompt + job.output for job in jobs)
        self._directory = model_directory(shape)  # written here once, not by every worker

    def model_of(self, contender: Contender) -> Path:
        return self._directory

    def requests(self, load: int, round_number: int) -> Requests:
        prompts = make_prompts(self.jobs, self.shape.vocab_size, round_number)
        return Requests(prompts, [job.output for job in self.jobs])

    def warm_up(self) -> Requests:
        """The first requests with short outputs: prefill, mixed and decode steps, in a few seconds."""
        return self.requests(len(self.jobs), WARM_UP_SEED).first(WARM_UP_REQUESTS, WARM_UP_OUTPUT)


def report(
    names: Sequence[str], workload: RandomModel, dtype: str, arguments: argparse.Namespace, targets: Targets
) -> dict[str, Any]:
    """Compete in one dtype: table, figures, targets."""
    note(f"\n{dtype}: loading and warming up")
    contenders = {name: replace(CONTENDERS[name], dtype=dtype) for name in names}
    contestants = compete(contenders, workload, arguments.threads, arguments.rounds)
    (load,) = workload.loads
    num_tokens = workload.requests(load, 0).num_output_tokens
    ours = next((one for one in contestants if one.contender.is_ours), None)
    rows, figures = [], {}
    for one in contestants:
        figures[one.name] = entry = {
            "seconds": round(one.seconds(load), 3),
            "output_tokens_per_second": round(num_tokens / one.seconds(load), 2),
            "cpu_seconds": rounded(one.middle(load, "cpu_seconds"), 2),
            "ratio": None if ours is None or one is ours else rounded(one.ratio(load, ours)),
            "agreement": None if one is contestants[0] else rounded(one.agreement(contestants[0])),
        }
        rows.append([one.name, len(one.turns[load]), *entry.values()])
    header = ["", "rounds", "seconds", "output tokens/s", "CPU s", "its seconds / ours", f"same {FIRST_TOKENS} tokens"]
    title = f"{dtype}, {workload.shape.name} parameters, {load} requests, {arguments.threads} thread(s)"
    print_table(title, header, rows)
    if dtype == "float32":
        check_agreement(contestants, targets)
    for name, target in TARGETS[dtype].items():
        text = f"{dtype}: {name} / Pointsman, seconds"
        if arguments.quick:
            targets.skip(text, "--quick")
        elif (ratio := figures.get(name, {}).get("ratio")) is not None:
            targets.at_least(text, ratio, target)
        else:
            targets.skip(text, f"{name} did not run")
    return figures


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--model", metavar="MODEL", help="real weights and prompts: a named model, a directory, a GGUF file"
    )
    parser.add_argument(
        "--rounds", type=parse_positive_int, help="how often each contender serves the workload (3; quick: 2)"
    )
    parser.add_argument("--contenders", metavar="NAME,...", help="some of the contenders, which the tables name")
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES, "quantized", "all"],
        help="contenders of one dtype; quantized: llama.cpp beside Pointsman, with --model (all; quick: float32, and "
        "with --model quantized)",
    )
    parser.add_argument("--threads", type=parse_positive_int, help="of each contender (2; quick: 1)")
    parser.add_argument(
        "--requests",
        metavar="COUNT,...",
        type=counts,
        help="requests at once (64; quick: 16); with --model any number of loads (1,4,8,16,64; quick: 1,4,8)",
    )
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 3)
    arguments.threads = arguments.threads or (1 if arguments.quick else 2)
    if arguments.model is not None:
        from _engine_loads import measure  # imports PyTorch, by way of the engine that exports weights

        return measure(arguments)
    if arguments.dtype == "quantized":
        parser.error("--dtype quantized needs real weights; give --model")
    if len(arguments.requests or [0]) > 1:
        parser.error("several numbers in --requests need real weights; give one number, or --model")
    return measure_random(arguments)


def measure_random(arguments: argparse.Namespace) -> int:
    """Measure everything without --model; returns the exit code."""
    quick = arguments.quick
    (count,) = arguments.requests or [16 if quick else 64]
    if quick:
        workload = RandomModel(QUICK, make_jobs(count, (16, 128), (8, 64)))
    else:
        workload = RandomModel(FULL, make_jobs(count, (32, 512), (16, 256)))
    names = chosen(arguments.contenders or (",".join(QUICK_CONTENDERS) if quick else None), CONTENDERS)
    names = list(without_missing({name: CONTENDERS[name] for name in names}))
    if not names:
        raise SystemExit("none of the contenders is installed; give others with --contenders")
    dtype, targets = arguments.dtype or ("float32" if quick else "all"), Targets()
    dtypes = DTYPES if dtype == "all" else (dtype,)
    figures = {one: report(names, workload, one, arguments, targets) for one in dtypes}
    for one in DTYPES:
        if one not in dtypes:
            targets.skip(f"{one}: every peer / Pointsman, seconds", "--quick" if quick else f"--dtype {dtype}")
    setting = {"quick": quick, "rounds": arguments.rounds, "threads": arguments.threads}
    sizes = {
        "parameters": workload.shape.num_parameters,
        "requests": count,
        "prompt_tokens": sum(job.prompt for job in workload.jobs),
        "output_tokens": sum(job.output for job in workload.jobs),
    }
    return finish("engine_throughput", {**setting, **sizes, **figures}, targets, arguments.check)


def counts(text: str) -> list[int]:
    """The value of `--requests`: each number once, in ascending order."""
    return sorted({parse_positive_int(one) for one in text.split(",")})


if __name__ == "__main__":
    run(main)
