"""Overhead of the server: the same requests through `pointsman serve` and through the offline engine.

The demo model, 256 requests, prompts of 32 to 128 random tokens, outputs of 64 to 192, greedy. Offline, `LLM.generate`
gets them all at once; the server gets them from a client that keeps 64 streams open, and sends a request when one has
ended. Both have 64 sequences at once and the same knobs, one thread for the model. They alternate, and each is stopped
while the other runs. The loss is 1 - server's tokens per second / engine's, within a round; the median counts. The
server has a second turn in each round, while a process of its own reads /live/film. The cost of that is judged by the
processor time of the server's processes, which other programs disturb less than tokens per second.

With `--against CHECKOUT` it measures something else: the same streamed requests through the servers of this checkout
and
of another one, alternating, and the ratio of the cost of their processes; see `_server_against.py`.

Client, API and engine are three processes on the machine's cores: the processor time that each takes is reported, as
seconds per 1,000 tokens.

    python benchmarks/server_overhead.py --check
    python benchmarks/server_overhead.py --check --against ../pointsman-of-last-week
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _engine_model import Job, make_jobs, make_prompts
from _engine_worker import Settings
from _server_against import TARGET, TINY, measure_against, report_against
from _server_driver import Driven, drive
from _server_probe import run_async
from _server_process import processor_seconds
from _server_sides import DEMO_FILES, SERVED_MODEL_NAME, VOCABULARY, Knobs, PointsmanSide, served_directory
from _worker_process import WorkerProcess

HERE = Path(__file__).resolve().parent
THROUGHPUT, WATCHED = "share of throughput lost", "share of the processor time for being watched"
MAX_LOSS = 0.10
MAX_WATCHED_SHARE = 0.03
WATCHED_SEED = 2_000  # other prompts, so that none is cached
WARM_UP_SEED = 1_000
WATCH = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as answer:
    answer.read1(); print("watching", flush=True)
    while answer.read1(): pass
"""
SECONDS_TO_OPEN, SECONDS_TO_RUN = 120.0, 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One round: the cost of the same requests on both sides."""

    engine_seconds: float
    engine_cpu: float
    driven: Driven
    watched: Driven
    api_cpu: float
    server_engine_cpu: float
    watched_cpu: float
    """Processor seconds of both processes."""

    @property
    def loss(self) -> float:
        """Share of the offline engine's tokens per second that the server loses."""
        return 1.0 - self.engine_seconds / self.driven.seconds

    @property
    def watched_loss(self) -> float:
        """Share of the server's tokens per second that it loses while it is watched."""
        return 1.0 - self.driven.seconds / self.watched.seconds

    @property
    def watched_share(self) -> float:
        """Share of a watched server's processor time that is due to the watching."""
        return 1.0 - (self.api_cpu + self.server_engine_cpu) / self.watched_cpu


class Offline:
    """The engine without a server, in a process that is stopped between its turns."""

    def __init__(self, knobs: Knobs) -> None:
        settings = Settings(
            model=str(knobs.model),
            dtype=knobs.dtype,
            threads=knobs.threads,
            max_model_len=knobs.max_model_len,
            max_num_seqs=knobs.max_num_seqs,
            max_num_batched_tokens=knobs.max_num_batched_tokens,
            kv_cache_bytes=knobs.kv_cache_gib << 30,
            options={"block_size": knobs.block_size},
        )
        self._worker = WorkerProcess("offline engine", [sys.executable, HERE / "_engine_worker_pointsman.py"], {})
        try:
            self._worker.ask("open", SECONDS_TO_OPEN, settings=asdict(settings))
        except BaseException:
            self._worker.close()
            raise

    def serve(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[float, float]:
        """Seconds, and processor seconds, for all requests."""
        before = self._worker.cpu_seconds() or 0.0
        answer = self._worker.ask("run", SECONDS_TO_RUN, prompts=prompts, outputs=outputs)
        return float(answer["seconds"]), (self._worker.cpu_seconds() or 0.0) - before

    def close(self) -> None:
        self._worker.close()


@contextmanager
def watching(url: str) -> Iterator[None]:
    """Watch the server in this context."""
    command = [sys.executable, "-c", WATCH, f"{url}/live/film"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def take_turn(
    offline: Offline, side: PointsmanSide, jobs: Sequence[Job], num_streams: int, seed: int, *, server_first: bool
) -> Turn:
    """Serve the requests of one seed on both sides; the server is stopped when this returns."""
    prompts, outputs = make_prompts(jobs, VOCABULARY, seed), [job.output for job in jobs]
    engine = None if server_first else offline.serve(prompts, outputs)
    others = make_prompts(jobs, VOCABULARY, WATCHED_SEED + seed)

    def serve(prompts: Sequence[Sequence[int]]) -> tuple[Driven, list[float]]:
        """The results, with the processor seconds of engine and API."""
        before = [processor_seconds(pid) for pid in side.pids()]
        driven = run_async(drive(side.address, SERVED_MODEL_NAME, prompts, outputs, num_streams=num_streams))
        return driven, [processor_seconds(pid) - start for pid, start in zip(side.pids(), before, strict=True)]

    def serve_watched() -> tuple[Driven, list[float]]:
        with watching(f"http://127.0.0.1:{side.port}"):
            return serve(others)

    side.resume()
    found = serve_watched() if server_first else None
    driven, (engine_cpu, api_cpu) = serve(prompts)
    watched, watched_cpu = found or serve_watched()
    side.pause()
    engine = engine or offline.serve(prompts, outputs)
    return Turn(*engine, driven, watched, api_cpu, engine_cpu, sum(watched_cpu))


def measure(knobs: Knobs, jobs: Sequence[Job], num_streams: int, rounds: int) -> list[Turn]:
    """Start both, warm them up, and run them alternately."""
    offline = Offline(knobs)
    side: PointsmanSide | None = None
    try:
        side = PointsmanSide(knobs)
        side.pause()
        few = jobs[: min(len(jobs), knobs.max_num_seqs)]
        take_turn(offline, side, few, num_streams, WARM_UP_SEED, server_first=True)
        turns = []
        for number in range(rounds):
            turns.append(take_turn(offline, side, jobs, num_streams, number, server_first=bool(number % 2)))
            note(f"  round {number + 1}: loss {turns[-1].loss:.1%}")
        return turns
    finally:
        if side is not None:
            side.stop()
        offline.close()


def report(turns: Sequence[Turn], jobs: Sequence[Job], num_streams: int, targets: Targets) -> dict[str, Any]:
    """Tables, targets, figures."""
    tokens = sum(job.output for job in jobs)
    engine_seconds = median(turn.engine_seconds for turn in turns)
    seconds = median(turn.driven.seconds for turn in turns)
    loss = median(turn.loss for turn in turns)
    per_thousand = {
        "offline engine": median(turn.engine_cpu for turn in turns) * 1000 / tokens,
        "engine process": median(turn.server_engine_cpu for turn in turns) * 1000 / tokens,
        "API process": median(turn.api_cpu for turn in turns) * 1000 / tokens,
        "client": median(turn.driven.client_seconds for turn in turns) * 1000 / tokens,
    }
    print_table(
        f"{len(jobs)} requests, {num_streams} streams, median of {len(turns)} rounds",
        ["", "seconds", "output tokens/s"],
        [["offline engine", engine_seconds, tokens / engine_seconds], ["server", seconds, tokens / seconds]],
    )
    print_table("processor seconds per 1,000 tokens", ["", "s"], [list(pair) for pair in per_thousand.items()])
    rounds = ", ".join(f"{turn.loss:.1%}" for turn in turns)
    note(f"  lost to the server: {loss:.1%} (by round: {rounds})")
    watched_loss = median(turn.watched_loss for turn in turns)
    rounds = ", ".join(f"{turn.watched_loss:.1%}" for turn in turns)
    note(f"  of the server's tokens/s lost while it is watched: {watched_loss:.1%} (by round: {rounds})")
    watched_share = median(turn.watched_share for turn in turns)
    rounds = ", ".join(f"{turn.watched_share:.1%}" for turn in turns)
    note(f"  of its processor time for being watched: {watched_share:.1%} (by round: {rounds})")
    complete = min(driven.num_complete for turn in turns for driven in (turn.driven, turn.watched))
    targets.holds(f"{complete} of {len(jobs)} requests are complete; target: all", complete == len(jobs))
    targets.at_most(THROUGHPUT, loss, MAX_LOSS)
    targets.at_most(WATCHED, watched_share, MAX_WATCHED_SHARE)
    return {
        "output_tokens": tokens,
        "engine_tokens_per_second": round(tokens / engine_seconds, 1),
        "server_tokens_per_second": round(tokens / seconds, 1),
        "loss": round(loss, 4),
        "watched_loss": round(watched_loss, 4),
        "watched_share": round(watched_share, 4),
        "losses": [round(turn.loss, 4) for turn in turns],
        "cpu_seconds_per_1000_tokens": {name: round(value, 4) for name, value in per_thousand.items()},
        "complete": complete,
    }


def compare_checkouts(arguments: argparse.Namespace) -> int:
    """The run with `--against`."""
    quick = arguments.quick
    rounds, starts = arguments.rounds or (8 if quick else 24), arguments.starts or (1 if quick else 24)
    jobs = make_jobs(arguments.requests or 32, (16, 32), (24, 40))
    knobs = Knobs(served_directory(TINY), arguments.threads, max_num_seqs=64, max_num_batched_tokens=512)
    targets = Targets()
    found = measure_against(arguments.against, knobs, jobs, arguments.streams, rounds, starts)
    figures = report_against(arguments.against, found, jobs, arguments.streams, targets)
    for name in (THROUGHPUT, WATCHED):
        targets.skip(name, "not with --against")
    setting = {"quick": quick, "starts": starts, "rounds": rounds, "requests": len(jobs), "streams": arguments.streams}
    return finish("server_overhead", {**setting, "threads": arguments.threads, **figures}, targets, arguments.check)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="how often both serve the requests (5; quick: 2; against: 24 and 8)")
    parser.add_argument("--requests", type=int, help="of a round (256; quick: 96; against: 32)")
    parser.add_argument("--streams", type=int, default=64, help="that the client keeps open")
    parser.add_argument("--threads", type=int, default=1, help="of the model, on both sides")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="measure the server of another checkout instead"
    )
    parser.add_argument("--starts", type=parse_positive_int, help="of the servers, with --against (24; quick: 1)")
    arguments = parser.parse_args()
    if arguments.against is not None:
        return compare_checkouts(arguments)
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    jobs = make_jobs(arguments.requests or (96 if arguments.quick else 256), (32, 128), (64, 192))
    knobs = Knobs(DEMO_FILES, arguments.threads, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512)
    targets = Targets()
    targets.skip(TARGET, "no --against CHECKOUT")
    figures = report(measure(knobs, jobs, arguments.streams, rounds), jobs, arguments.streams, targets)
    setting = {"quick": arguments.quick, "rounds": rounds, "requests": len(jobs), "streams": arguments.streams}
    return finish("server_overhead", {**setting, "threads": arguments.threads, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
