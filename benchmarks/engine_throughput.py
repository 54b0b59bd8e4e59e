"""Tokens per second of the bundled engine, beside transformers, vLLM and OpenVINO GenAI.

The workload: 64 requests that are all there from the start, prompts of 32 to 512 random tokens, outputs of 16 to 256,
greedy, ended by their length alone; a Qwen3 of 121 million random parameters; two threads. Every contender serves
the same requests, is warmed up once, keeps its process for all rounds and stands still while another has its turn.
Rounds are interleaved, each with other prompts of the same lengths, so that no prefix cache knows them. A ratio is the
peer's seconds divided by Pointsman's in the same round; reported is the median.

What each may use: 1 GiB of KV cache, 64 sequences at once and 1,024 tokens a step (room for the longest prompt beside
the decodes), for all that have such knobs; everything else at its default, which for vLLM means prefix caching,
asynchronous scheduling and its engine in processes of its own, and for OpenVINO no prefix caching. OpenVINO's cache
has the model's dtype, as the others' have. transformers gets batches of 16 in order of arrival, padded on the left,
each running until its longest output is complete. Its own continuous batching is slow on a CPU, so it runs once, after
the others, in a box of time.

In float32 all contenders should agree on what the model says; the share of requests whose first 8 tokens are those of
the first contender is reported and checked. (Near ties fall either way with the order of additions.)

vLLM and OpenVINO need the environments that `vllm_env.py` and `openvino_env.py` make; without them, or with `--quick`,
they are skipped. OpenVINO has no target yet: it is here for comparison. It gets the model from Optimum's converter,
because releases 2025.4.1 and 2026.4.1 could not compile a GGUF file of this shape of model ("Node ReadValue ...
contains dead weak ptr").

    python benchmarks/engine_throughput.py --check
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import openvino_env
import vllm_env
from _common import Targets, argument_parser, finish, note, print_table, run
from _engine_model import FULL, QUICK, Job, Shape, make_jobs, make_prompts, model_directory
from _engine_worker import FIRST_TOKENS, Settings
from _worker_process import WorkerFailed, WorkerProcess

HERE = Path(__file__).resolve().parent
OURS = "pointsman"
SLOTS = 64
TOKEN_BUDGET = 1024
STATIC_BATCH = 16
KV_CACHE_BYTES = 1 << 30
SECONDS_TO_OPEN = 600.0  # vLLM's compilation takes one of these minutes
SECONDS_TO_RUN = 1800.0
BOX_SECONDS = 600.0
WARM_UP_REQUESTS, WARM_UP_OUTPUT = 16, 16
WARM_UP_SEED = 1_000
DTYPES = {"float32": 4, "bfloat16": 2}
TARGETS = {
    "float32": {"transformers-static": 3.0, "vllm-eager": 1.0},
    "bfloat16": {"transformers-static": 2.5, "vllm-eager": 0.85},
}
LEAST_AGREEMENT = 0.9


@dataclass(frozen=True)
class Workload:
    """A model and the requests for it."""

    shape: Shape
    jobs: list[Job]

    @property
    def num_output_tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    def as_command(self, seed: int) -> dict[str, Any]:
        """The arguments of "run" for the round of that seed."""
        prompts = make_prompts(self.jobs, self.shape.vocab_size, seed)
        return {"prompts": prompts, "outputs": [job.output for job in self.jobs]}

    def warm_up(self) -> Workload:
        """The first requests with short outputs: prefill, mixed and decode steps, in a few seconds."""
        jobs = [Job(job.prompt, min(job.output, WARM_UP_OUTPUT)) for job in self.jobs[:WARM_UP_REQUESTS]]
        return Workload(self.shape, jobs)


@dataclass(frozen=True)
class Contender:
    """How to start one engine."""

    script: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None
    """Whose environment of `ENVIRONMENTS` it runs in; None is the driver's own."""
    runs_last: bool = False
    """Once, when all rounds are over: it takes so long that engines which stand still meanwhile give themselves up."""

    def python(self) -> Path:
        """The interpreter to start it with."""
        return ENVIRONMENTS[self.needs].python_of() if self.needs else Path(sys.executable)


ENVIRONMENTS = {"vLLM": vllm_env, "OpenVINO": openvino_env}

CONTENDERS = {
    "transformers-static": Contender("_engine_worker_transformers.py", {"mode": "static", "batch_size": STATIC_BATCH}),
    "transformers-continuous": Contender("_engine_worker_transformers.py", {"mode": "continuous"}, runs_last=True),
    "vllm-eager": Contender("_engine_worker_vllm.py", {"eager": True}, needs="vLLM"),
    "vllm-compiled": Contender("_engine_worker_vllm.py", {"eager": False}, needs="vLLM"),
    "openvino": Contender("_engine_worker_openvino.py", needs="OpenVINO"),
    OURS: Contender("_engine_worker_pointsman.py"),
}
QUICK_CONTENDERS = ("transformers-static", OURS)


class Contestant:
    """A running contender and its times."""

    def __init__(self, name: str, contender: Contender, settings: Settings) -> None:
        self.name = name
        self.runs_last = contender.runs_last
        self.seconds: dict[int, float] = {}  # by round
        self.cpu_seconds: dict[int, float | None] = {}
        self.tokens: list[list[int]] = []  # the first of each request, in the first round
        command = [contender.python(), HERE / contender.script]
        self._worker = WorkerProcess(name, command, environment_of(contender, settings.threads))
        try:
            self.about = self._worker.ask("open", SECONDS_TO_OPEN, settings=asdict(settings))["about"]
        except WorkerFailed:
            self.close()
            raise

    @property
    def in_play(self) -> bool:
        """Whether it is there for another round."""
        return self._worker.is_alive

    def warm_up(self, workload: Workload) -> None:
        """Serve a little, untimed."""
        self._worker.ask("run", SECONDS_TO_OPEN, **workload.warm_up().as_command(WARM_UP_SEED))

    def take_turn(self, workload: Workload, round_number: int) -> None:
        """Serve all requests once."""
        before = self._worker.cpu_seconds()
        timeout = BOX_SECONDS if self.runs_last else SECONDS_TO_RUN
        answer = self._worker.ask("run", timeout, **workload.as_command(round_number))
        after = self._worker.cpu_seconds()
        self.seconds[round_number] = answer["seconds"]
        self.cpu_seconds[round_number] = None if before is None or after is None else after - before
        if not self.tokens:
            self.tokens = answer["tokens"]

    def close(self) -> None:
        self._worker.close()


def environment_of(contender: Contender, threads: int) -> dict[str, str | None]:
    """The variables that a contender's process starts with: as many threads for each, nothing fetched."""
    variables: dict[str, str | None] = {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": None,  # make sets it for shared machines; here each engine has its turn to itself
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if contender.needs == "vLLM":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_BYTES >> 30)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    if contender.needs == "OpenVINO":
        variables |= openvino_env.NO_TELEMETRY
    return variables


def settings_of(workload: Workload, dtype: str, threads: int, contender: Contender) -> Settings:
    longest = max(job.prompt + job.output for job in workload.jobs)
    return Settings(
        model=str(model_directory(workload.shape)),
        dtype=dtype,
        threads=threads,
        max_model_len=-(-longest // 256) * 256,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=TOKEN_BUDGET,
        kv_cache_bytes=KV_CACHE_BYTES,
        kv_cache_tokens=KV_CACHE_BYTES // workload.shape.kv_bytes_per_token(DTYPES[dtype]),
        options=contender.options,
    )


def compete(names: Sequence[str], workload: Workload, dtype: str, threads: int, rounds: int) -> list[Contestant]:
    """Start all, warm them up, and let them take turns; a peer that fails is named and left out from there.

    Raises:
        WorkerFailed: Pointsman failed, so there is nothing to compare.
    """
    contestants: list[Contestant] = []
    try:
        for name in names:
            with peers_may_fail(name):
                contender = CONTENDERS[name]
                contestants.append(Contestant(name, contender, settings_of(workload, dtype, threads, contender)))
                note(f"  {name}: {contestants[-1].about}")
                contestants[-1].warm_up(workload)
        for round_number in range(rounds):
            first = round_number % len(contestants)  # no contender always gets the rested processor
            for contestant in contestants[first:] + contestants[:first]:
                if contestant.in_play and not contestant.runs_last:
                    with peers_may_fail(contestant.name):
                        contestant.take_turn(workload, round_number)
        for contestant in contestants:
            if contestant.in_play and contestant.runs_last:
                with peers_may_fail(contestant.name):
                    contestant.take_turn(workload, 0)  # whose tokens are compared
    finally:
        for contestant in contestants:
            contestant.close()
    return [contestant for contestant in contestants if contestant.seconds]


@contextmanager
def peers_may_fail(name: str) -> Iterator[None]:
    """Where a peer fails, say so and go on."""
    try:
        yield
    except WorkerFailed as error:
        if name == OURS:
            raise
        note(f"{name} is left out from here: {error}")


# --------------------------------------------------------------------------------------------------------- figures


def ratios(contestants: Sequence[Contestant]) -> dict[str, float]:
    """Peer's seconds / Pointsman's, the median of the rounds that both ran."""
    ours = next((one.seconds for one in contestants if one.name == OURS), {})
    found = {}
    for one in contestants:
        shared = [seconds / ours[number] for number, seconds in one.seconds.items() if number in ours]
        if one.name != OURS and shared:
            found[one.name] = median(shared)
    return found


def agreement(contestants: Sequence[Contestant]) -> dict[str, float]:
    """Share of the requests whose first tokens are those of the first contender, for each of the others."""
    reference, *others = contestants
    return {
        one.name: sum(a == b for a, b in zip(one.tokens, reference.tokens, strict=True)) / len(reference.tokens)
        for one in others
    }


def report(
    names: Sequence[str], workload: Workload, dtype: str, arguments: argparse.Namespace, targets: Targets
) -> dict[str, Any]:
    """Compete in one dtype: table, figures, targets."""
    note(f"\n{dtype}: loading and warming up")
    contestants = compete(names, workload, dtype, arguments.threads, arguments.rounds)
    speedups, agreements = ratios(contestants), agreement(contestants)
    rows, figures = [], {}
    for one in contestants:
        seconds = median(one.seconds.values())
        cpu = [value for value in one.cpu_seconds.values() if value is not None]
        figures[one.name] = entry = {
            "seconds": round(seconds, 3),
            "output_tokens_per_second": round(workload.num_output_tokens / seconds, 2),
            "cpu_seconds": round(median(cpu), 2) if cpu else None,
            "ratio": _rounded(speedups.get(one.name)),
            "agreement": _rounded(agreements.get(one.name)),
        }
        rows.append([one.name, len(one.seconds), *entry.values()])
    header = ["", "rounds", "seconds", "output tokens/s", "CPU s", "its seconds / ours", f"same {FIRST_TOKENS} tokens"]
    title = f"{dtype}, {workload.shape.name} parameters, {len(workload.jobs)} requests, {arguments.threads} thread(s)"
    print_table(title, header, rows)
    if dtype == "float32":
        for name, share in agreements.items():
            text = f"share of requests on which {name} agrees with {contestants[0].name}"
            targets.at_least(text, share, LEAST_AGREEMENT)
    for name, target in TARGETS[dtype].items():
        text = f"{dtype}: {name} / Pointsman, seconds"
        if arguments.quick:
            targets.skip(text, "--quick")
        elif name in speedups:
            targets.at_least(text, speedups[name], target)
        else:
            targets.skip(text, f"{name} did not run")
    return figures


def choose(arguments: argparse.Namespace) -> list[str]:
    """The contenders to start: those asked for that can be, in the order above."""
    if arguments.contenders:
        wanted = arguments.contenders.split(",")
        unknown = sorted(set(wanted) - set(CONTENDERS))
        if unknown:
            raise SystemExit(f"no contender is called {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    else:
        wanted = list(QUICK_CONTENDERS if arguments.quick else CONTENDERS)
    chosen = [name for name in CONTENDERS if name in wanted]
    for peer, environment in ENVIRONMENTS.items():
        if any(CONTENDERS[name].needs == peer for name in chosen) and not environment.is_complete():
            maker = f"benchmarks/{environment.__name__}.py"
            note(f"skipped: {peer}, there is no environment for it; python {maker} makes it")
            chosen = [name for name in chosen if CONTENDERS[name].needs != peer]
    if not chosen:
        raise SystemExit("no contender is left; choose others with --contenders")
    return chosen


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="how often each contender serves the workload (3; quick: 2)")
    parser.add_argument("--contenders", help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], help="default: both; quick: float32")
    parser.add_argument("--threads", type=int, help="of each contender (2; quick: 1)")
    parser.add_argument("--requests", type=int, help="how many (64; quick: 16)")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.rounds = arguments.rounds or (2 if quick else 3)
    arguments.threads = arguments.threads or (1 if quick else 2)
    dtype = arguments.dtype or ("float32" if quick else "both")
    if quick:
        workload = Workload(QUICK, make_jobs(arguments.requests or 16, (16, 128), (8, 64)))
    else:
        workload = Workload(FULL, make_jobs(arguments.requests or 64, (32, 512), (16, 256)))
    model_directory(workload.shape)  # written here once, not by every worker

    names, targets = choose(arguments), Targets()
    figures = {
        one: report(names, workload, one, arguments, targets) for one in (DTYPES if dtype == "both" else (dtype,))
    }
    if dtype != "both":
        for one in set(DTYPES) - {dtype}:
            targets.skip(f"{one}: every peer / Pointsman, seconds", "--quick" if quick else f"--dtype {dtype}")
    setting = {"quick": quick, "rounds": arguments.rounds, "threads": arguments.threads}
    sizes = {
        "parameters": workload.shape.num_parameters,
        "requests": len(workload.jobs),
        "prompt_tokens": sum(job.prompt for job in workload.jobs),
        "output_tokens": workload.num_output_tokens,
    }
    return finish("engine_throughput", {**setting, **sizes, **figures}, targets, arguments.check)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    run(main)
