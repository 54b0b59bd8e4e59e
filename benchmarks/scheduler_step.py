"""Cost of a step of the scheduler, beside vLLM's own scheduler, and under each policy.

Five measurements, in CPU time. The two schedulers alternate in one run with the same settings (blocks of 16, prefix
caching and statistics on):

1. steady decode: microseconds of `schedule` + `update` when every running request decodes one token;
2. the same beside features that every request uses: two steps in flight, each scheduled before the last one's tokens
   are there; drafts to verify (with `propose`); adapters; KV in several groups, with windows (Pointsman alone);
3. the same with requests waiting behind a head that blocks the queue, and the cost of aborting a waiting request;
4. the Azure conversation trace as a closed backlog: CPU seconds of all scheduler calls per million generated tokens, in
   a large pool (20,000 blocks) and in one that forces preemption (4,000);
5. every order, victim, reserve and limit beside `fcfs` with `latest`, alternating (`_scheduler_policies.py`).

vLLM's side needs the environment that `vllm_env.py` makes; without it, or with `--quick`, only Pointsman is measured.

    python benchmarks/scheduler_step.py --check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _common import (
    AZURE_TRACE,
    Targets,
    argument_parser,
    azure_lengths,
    finish,
    note,
    paired_ratio,
    print_table,
    run,
)
from _scheduler_policies import policies, report_policies
from _worker_process import WorkerProcess
from vllm_env import VLLM_VERSION, is_complete, python_of

from pointsman.core.state.batch import RECENT

HERE = Path(__file__).resolve().parent
SIZES = (1, 16, 64, 256, 1024, 4096)
TARGET_RATIOS = {1: 1.0, 16: 6.0, 64: 20.0, 256: 70.0, 1024: 200.0, 4096: 350.0}
STEPS_PER_ROUND = {1: 500, 16: 400, 64: 200, 256: 96, 1024: 64, 4096: 40}  # of vLLM's
OWN_STEPS_PER_ROUND = RECENT - 1
"""Steps of a round on our side: every row's recent tokens are moved in the same step, once in this number of steps, and
each round includes that step. With drafts, tokens are moved row by row: of some rows in most rounds, of many in every
third."""
# A round of few rows takes milliseconds, and a shared machine has equally long slow moments: the median needs many.
ROUNDS = 9
ROUNDS_PER_SIZE = {1: 25, 16: 25, 64: 25, 256: 25, 4096: 5}
GROWTH = (256, 4096)
"""Numbers of running requests that are compared again, alternating, for the ratio of their costs."""
FEATURES_RUNNING = 256
FEATURES: dict[str, dict[str, Any]] = {  # settings, for every request of the batch
    "asynchronous": {"max_steps_in_flight": 2},
    "speculation": {"num_draft_tokens": 3},
    "lora": {"num_loras": 8},
    "two_groups": {"knobs": {"kv_groups": [("full", 0), ("window", 128)]}},
    "six_groups": {"knobs": {"kv_groups": [("full", 0), *[("window", 1024)] * 5]}},
}
FEATURES_IN_WORDS = {
    "asynchronous": "two steps in flight",
    "speculation": "3 drafts for each, 0 to 3 accepted",
    "lora": "an adapter of 8 for each",
    "two_groups": "full attention and a window",
    "six_groups": "full attention and five windows",
}
MAX_FOR_A_FEATURE = 2.0  # multiples of a plain step
MAX_FOR = {"two_groups": 1.5, "six_groups": 2.2}  # of these
FEATURE_PASSES = 5  # of `ROUNDS` each, because a machine that changes its speed spoils a few pairs
WAITING = (0, 10_000, 100_000)
WAITING_RUNNING = 256
WAITING_STEPS = 48
ABORTS_PER_ROUND = 100
BACKLOG_REQUESTS = 2_000
BACKLOG_BLOCKS = (20_000, 4_000)
BACKLOG_STEPS = 100
"""Steps of each side before the other continues: a shared machine changes its speed within seconds, so of two whole
backlogs one may have had the slow seconds."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 16_384
TOKEN_BUDGET = 8_192
# Maximum tokens of a request of the decode measurements before the first timed step: its prompt, the steps in which the
# others are admitted, the warm-up, the steps after aborts.
HEADROOM = 256


Side = dict[str, list[float]]  # worker name -> one figure per round


def measure_decode(workers: Sequence[WorkerProcess], size: int, rounds: int, **more: Any) -> Side:
    """CPU us per step of steady decode with `size` running requests, per worker and round; `more` settings for both."""
    steps = {worker.name: OWN_STEPS_PER_ROUND for worker in workers}
    steps["vllm"] = STEPS_PER_ROUND.get(size, 40)
    warm_up = min(24, steps["vllm"] // 4)  # not timed: the other side has just had the processor
    blocks_each = -(-(HEADROOM + rounds * (warm_up + max(steps.values()))) // BLOCK_SIZE)
    settings = {
        "num_blocks": 1 + size * blocks_each,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": size,
        "max_num_batched_tokens": max(TOKEN_BUDGET, size),
        **more,
    }
    for worker in workers:
        worker.ask("open", name="decode", settings=settings, running=size, waiting=None)
    figures: Side = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            worker.ask("decode", name="decode", steps=warm_up)
            figures[worker.name].append(worker.ask("decode", name="decode", steps=steps[worker.name])["us"])
    for worker in workers:
        worker.ask("close", name="decode")
    return figures


def measure_growth(worker: WorkerProcess, rounds: int) -> dict[int, list[float]]:
    """CPU us per step of steady decode at each size of `GROWTH`, per round."""
    steps = OWN_STEPS_PER_ROUND
    for size in GROWTH:
        settings = {
            "num_blocks": 1 + size * -(-(HEADROOM + rounds * steps) // BLOCK_SIZE),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": size,
            "max_num_batched_tokens": TOKEN_BUDGET,
        }
        worker.ask("open", name=str(size), settings=settings, running=size, waiting=None)
    figures: dict[int, list[float]] = {size: [] for size in GROWTH}
    for _ in range(rounds):
        for size, seconds in figures.items():
            seconds.append(worker.ask("decode", name=str(size), steps=steps)["us"])
    for size in GROWTH:
        worker.ask("close", name=str(size))
    return figures


def measure_features(worker: WorkerProcess, rounds: int) -> dict[str, list[float]]:
    """CPU us per step of decoding, per round, plain and with each of `FEATURES` at every request.

    Call it several times if the rounds need more tokens than the requests have.
    """
    steps = OWN_STEPS_PER_ROUND
    for name, settings in {"plain": {}, **FEATURES}.items():
        most = 1 + settings.get("num_draft_tokens", 0)  # tokens of a request and step
        blocks_each = -(-(HEADROOM + rounds * steps * most) // BLOCK_SIZE)
        num_groups = len(settings.get("knobs", {}).get("kv_groups", ())) or 1
        settings = {
            "num_blocks": 1 + FEATURES_RUNNING * blocks_each * num_groups,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": FEATURES_RUNNING,
            "max_num_batched_tokens": TOKEN_BUDGET,
            **settings,
        }
        worker.ask("open", name=name, settings=settings, running=FEATURES_RUNNING, waiting=None)
    figures: dict[str, list[float]] = {name: [] for name in ("plain", *FEATURES)}
    for _ in range(rounds):
        for name, seconds in figures.items():
            what = "speculation" if name == "speculation" else "decode"
            seconds.append(worker.ask(what, name=name, steps=steps)["us"])
    for name in figures:
        worker.ask("close", name=name)
    return figures


def measure_waiting(
    workers: Sequence[WorkerProcess], lengths: Sequence[int], rounds: int
) -> tuple[dict[int, Side], dict[int, Side]]:
    """CPU us per step, and per abort of a waiting request, by the number of requests behind a blocked head."""
    blocks_each = -(-(HEADROOM + rounds * (WAITING_STEPS + 1)) // BLOCK_SIZE)
    num_blocks = 1 + WAITING_RUNNING * blocks_each
    settings = {
        "num_blocks": num_blocks,
        "max_model_len": num_blocks * BLOCK_SIZE,  # the head needs the whole pool
        "max_num_seqs": 2 * WAITING_RUNNING,  # so that blocks, not sequence slots, block the head
        "max_num_batched_tokens": TOKEN_BUDGET,
    }
    for worker in workers:
        for length in lengths:
            worker.ask("open", name=str(length), settings=settings, running=WAITING_RUNNING, waiting=length)
    steps: dict[int, Side] = {length: {worker.name: [] for worker in workers} for length in lengths}
    aborts: dict[int, Side] = {length: {worker.name: [] for worker in workers} for length in lengths}
    for _ in range(rounds):
        for length in lengths:
            for worker in workers:
                steps[length][worker.name].append(worker.ask("decode", name=str(length), steps=WAITING_STEPS)["us"])
                aborts[length][worker.name].append(worker.ask("abort", name=str(length), count=ABORTS_PER_ROUND)["us"])
    for worker in workers:
        for length in lengths:
            worker.ask("close", name=str(length))
    return steps, aborts


def measure_backlog(
    workers: Sequence[WorkerProcess], lengths: list[tuple[int, int]], num_blocks: int, rounds: int, **more: Any
) -> tuple[dict[str, dict[str, float]], float | None]:
    """The cost of serving the backlog for each worker: the round of median CPU time, and seconds per million tokens.
    And
    the ratio of vLLM's scheduler to ours, which is None without it. `more`: settings for both."""
    settings = {
        "num_blocks": num_blocks,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 256,
        "max_num_batched_tokens": TOKEN_BUDGET,
        **more,
    }
    runs: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            worker.ask("open_backlog", name="backlog", settings=settings, lengths=lengths)
        serving = list(workers)
        while serving:
            for worker in tuple(serving):
                served = worker.ask("advance_backlog", name="backlog", steps=BACKLOG_STEPS)
                if served:
                    runs[worker.name].append(served)
                    serving.remove(worker)
    generated = sum(output for _, output in lengths)
    middle = {name: sorted(results, key=lambda r: r["seconds"])[len(results) // 2] for name, results in runs.items()}
    ratio = None
    if "vllm" in runs:
        seconds = {name: [result["seconds"] for result in results] for name, results in runs.items()}
        ratio = paired_ratio(seconds["vllm"], seconds["pointsman"])
    costs = {name: {**result, "per_million": result["seconds"] / generated * 1e6} for name, result in middle.items()}
    return costs, ratio


def report_decode(
    workers: Sequence[WorkerProcess], sizes: Sequence[int], rounds: int, targets: Targets
) -> dict[str, Any]:
    """Steady decode at each size: table, figures, targets."""
    ours: dict[int, float] = {}
    theirs: dict[int, float | None] = {}
    rows: list[list[object]] = []
    for size in sizes:
        figures = measure_decode(workers, size, rounds if rounds < ROUNDS else ROUNDS_PER_SIZE.get(size, rounds))
        ours[size] = median(figures["pointsman"])
        theirs[size] = median(figures["vllm"]) if "vllm" in figures else None
        ratio = _ratio(theirs[size], ours[size])
        rows.append([size, ours[size], theirs[size], ratio, TARGET_RATIOS.get(size)])
    for size, target in TARGET_RATIOS.items():
        name, ratio = f"vLLM / Pointsman at {size} running", _ratio(theirs.get(size), ours.get(size, 0.0))
        if ratio is not None:
            targets.at_least(name, ratio, target)
        else:
            targets.skip(name, "without vLLM's side" if size in ours else "not among --sizes")
    print_table(
        "steady decode, CPU us of schedule + update per step",
        ["running", "Pointsman", f"vLLM {VLLM_VERSION}", "ratio", "target"],
        rows,
    )
    few, many = GROWTH
    growth: dict[str, Any] = {}
    if few in ours and many in ours:
        figures_by_size = measure_growth(workers[0], rounds)
        us, times = median(figures_by_size[many]), paired_ratio(figures_by_size[many], figures_by_size[few])
        text = (
            f"{many} running cost {us:.0f} us, {times:.2f} times {few} (in turns); target: under 80 us or under 5 times"
        )
        targets.holds(text, us < 80 or times < 5)
        growth = {"growth_us": round(us, 2), "growth_ratio": round(times, 3)}
    else:
        targets.skip(f"cost of {many} running beside {few}", "not both among --sizes")
    return {
        "pointsman_us": _by_size(ours),
        "vllm_us": _by_size(theirs),
        "ratio": {str(size): _ratio(theirs[size], ours[size]) for size in sizes},
        **growth,
    }


def report_features(worker: WorkerProcess, rounds: int, passes: int, targets: Targets) -> dict[str, Any]:
    """Features beside plain decoding: table, figures, targets."""
    figures = measure_features(worker, rounds)
    for _ in range(passes - 1):
        for name, more in measure_features(worker, rounds).items():
            figures[name] += more
    rows: list[list[object]] = [["plain", median(figures["plain"]), None]]
    named: dict[str, Any] = {}
    for name, what in FEATURES_IN_WORDS.items():
        times = paired_ratio(figures[name], figures["plain"])
        rows.append([what, median(figures[name]), times])
        targets.at_most(f"a step with {what} / a plain one", times, MAX_FOR.get(name, MAX_FOR_A_FEATURE))
        named |= {f"{name}_us": round(median(figures[name]), 2), f"{name}_ratio": round(times, 3)}
    print_table(f"decoding of {FEATURES_RUNNING}, CPU us per step", ["", "us", "times"], rows)
    return named


def report_waiting(workers: Sequence[WorkerProcess], rounds: int, targets: Targets) -> dict[str, Any]:
    """Requests behind a blocked head: table, figures, targets."""
    steps, aborts = measure_waiting(workers, WAITING, rounds)
    names = [worker.name for worker in workers]
    both = (steps, aborts)
    table = [[f"{n:,}", *(median(figures[n][name]) for figures in both for name in names)] for n in WAITING]
    header = ["waiting", *(f"{name} {what}" for what in ("step", "abort") for name in names)]
    print_table(f"{WAITING_RUNNING} running, others behind a blocked head, CPU us", header, table)
    flat = {name: paired_ratio(steps[WAITING[-1]][name], steps[WAITING[0]][name]) for name in names}
    targets.at_most(f"step with {WAITING[-1]:,} waiting / with none", flat["pointsman"], 1.3)
    figures: dict[str, Any] = {"waiting_ratio": {name: round(value, 3) for name, value in flat.items()}}
    for name in names:
        figures[f"waiting_{name}_us"] = {str(length): round(median(steps[length][name]), 2) for length in WAITING}
        figures[f"abort_{name}_us"] = {str(length): round(median(aborts[length][name]), 2) for length in WAITING}
    return figures


def report_backlog(workers: Sequence[WorkerProcess], trace: Path, rounds: int, targets: Targets) -> dict[str, Any]:
    """The trace as a closed backlog: table, figures, targets."""
    target = "vLLM / Pointsman on the Azure backlog"
    lengths = azure_lengths(trace, BACKLOG_REQUESTS)
    if lengths is None:
        targets.skip(target, "no trace")
        return {"backlog": None}
    if not any(worker.name == "vllm" for worker in workers):
        targets.skip(target, "without vLLM's side")
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for num_blocks in BACKLOG_BLOCKS:
        results, ratio = measure_backlog(workers, lengths, num_blocks, rounds)
        for name, result in results.items():
            split = [result[f"{part}_seconds"] for part in ("add", "schedule", "update")]
            row = [f"{num_blocks:,}", name, result["per_million"], *split, result["make_seconds"]]
            rows.append([*row, int(result["steps"]), int(result["preemptions"])])
        if ratio is not None:
            rows.append([f"{num_blocks:,}", "ratio", ratio, *[None] * 6])
            if num_blocks == BACKLOG_BLOCKS[0]:
                targets.at_least(target, ratio, 15.0)
        figures[str(num_blocks)] = {
            "ratio": ratio and round(ratio, 2),
            **{name: _rounded(result) for name, result in results.items()},
        }
    header = ["blocks", "", "CPU s/M tokens", "add s", "schedule s", "update s", "(requests s)", "steps", "preemptions"]
    print_table(f"Azure trace, first {len(lengths):,} requests at once, 256 sequences, budget 8,192", header, rows)
    note("  (requests: making the request objects, which vLLM hashes prompts in; not counted for either)")
    return {"backlog": figures}


def start_workers(without_vllm: bool, quick: bool) -> list[WorkerProcess]:
    """Start both sides, or only ours, and report why."""
    workers = [_worker("pointsman", Path(sys.executable), "_pointsman_worker.py")]
    if quick or without_vllm:
        note(f"skipped: vLLM's side ({'--quick' if quick else '--no-vllm'})")
    elif not is_complete():
        note("skipped: vLLM's side, there is no environment for it; python benchmarks/vllm_env.py makes it")
    else:
        workers.append(_worker("vllm", python_of(), "_vllm_worker.py"))
    return workers


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", help="numbers of running requests, as 1,16,64")
    parser.add_argument("--policies", help="names of the policies that are measured, as fair,bypass; all if left out")
    parser.add_argument("--no-vllm", action="store_true", help="measure Pointsman alone")
    parser.add_argument("--trace", type=Path, default=AZURE_TRACE, help="an Azure LLM inference trace, CSV")
    arguments = parser.parse_args()
    names = arguments.policies.split(",") if arguments.policies else ()
    unknown = set(names) - {found.name for found in policies()}
    if unknown:
        parser.error(f"no policy is called {', '.join(sorted(unknown))}; pointsman policies lists all policies")
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else list(SIZES)
    rounds = 5 if arguments.quick else ROUNDS

    targets = Targets()
    workers = start_workers(arguments.no_vllm, arguments.quick)
    try:
        figures = report_decode(workers, sizes, rounds, targets)
        figures |= report_features(workers[0], rounds, 1 if arguments.quick else FEATURE_PASSES, targets)
        figures |= report_waiting(workers, rounds, targets)
        figures |= report_backlog(workers, arguments.trace, 1 if arguments.quick else 3, targets)
    finally:
        for worker in workers:
            worker.close()
    worker = _worker("policies", Path(sys.executable), "_scheduler_policies_worker.py")
    try:
        figures |= report_policies(worker, names, 3 if arguments.quick else rounds, targets)
    finally:
        worker.close()
    compared = [worker.name for worker in workers]
    return finish("scheduler_step", {"quick": arguments.quick, "sides": compared, **figures}, targets, arguments.check)


def _worker(name: str, python: Path, script: str) -> WorkerProcess:
    """A process that owns schedulers of one kind; see `_scheduler_worker.py`."""
    return WorkerProcess(name, [python, HERE / script], {"OMP_NUM_THREADS": "1"})


def _ratio(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else round(theirs / ours, 2)


def _by_size(figures: dict[int, Any]) -> dict[str, float | None]:
    return {str(size): None if value is None else round(value, 2) for size, value in figures.items()}


def _rounded(result: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in result.items()}


if __name__ == "__main__":
    run(main)
