"""Contests: engines in processes of their own serve the same requests in interleaved rounds, and are timed.

Every contender is warmed up once and keeps its process for all rounds. It is stopped while another one runs. The
contender that begins a round rotates. A peer that fails is named and left out from then on.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import llama_cpp_env
import openvino_env
import vllm_env
from _common import Targets, note
from _engine_worker import Settings
from _worker_process import WorkerFailed, WorkerProcess

HERE = Path(__file__).resolve().parent
SLOTS = 64
TOKEN_BUDGET = 1024
KV_CACHE_BYTES = 1 << 30
SECONDS_TO_OPEN = 600.0  # vLLM's compilation takes one of these minutes
SECONDS_TO_RUN = 1800.0
BOX_SECONDS = 600.0
MIN_AGREEMENT = 0.9
MAX_LEN_MULTIPLE = 256


@dataclass(frozen=True)
class Requests:
    """Requests that all arrive at once: prompts in tokens, and the number of tokens of each output."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.outputs)

    def first(self, count: int, max_output: int) -> Requests:
        """The first `count` requests, with outputs of at most `max_output` tokens."""
        return Requests(self.prompts[:count], [min(length, max_output) for length in self.outputs[:count]])


@dataclass(frozen=True)
class Contender:
    """How to start an engine."""

    script: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    needs: str | None = None
    """Name of the contender's environment in `ENVIRONMENTS`; None: the environment of the driver."""
    reads_gguf: bool = False
    """Whether the contender gets the GGUF file of a model that has one, instead of a directory."""
    runs_last: bool = False
    """Whether it runs once, after all rounds: it takes so long that other engines would time out while stopped."""
    is_ours: bool = False

    def python(self) -> Path:
        """The Python interpreter that starts the contender's worker."""
        return ENVIRONMENTS[self.needs].python_of() if self.needs else Path(sys.executable)


ENVIRONMENTS: Mapping[str, ModuleType] = {"vLLM": vllm_env, "OpenVINO": openvino_env, "llama.cpp": llama_cpp_env}

POINTSMAN = Contender("_engine_worker_pointsman.py", reads_gguf=True, is_ours=True)
TRANSFORMERS_STATIC = Contender("_engine_worker_transformers.py", {"mode": "static", "batch_size": 16})
TRANSFORMERS_CONTINUOUS = Contender("_engine_worker_transformers.py", {"mode": "continuous"}, runs_last=True)
VLLM_EAGER = Contender("_engine_worker_vllm.py", {"eager": True}, needs="vLLM")
VLLM_COMPILED = Contender("_engine_worker_vllm.py", {"eager": False}, needs="vLLM")
OPENVINO = Contender("_engine_worker_openvino.py", needs="OpenVINO")
LLAMA_CPP = Contender("_engine_worker_llama_cpp.py", needs="llama.cpp", reads_gguf=True)


class Workload(ABC):
    """A model, and the loads under which engines are measured. A load is a number of requests at once."""

    loads: Sequence[int]
    max_tokens: int
    """Maximum tokens of a request: its prompt and its output."""

    @abstractmethod
    def model_of(self, contender: Contender) -> Path:
        """The directory or the file of the model that a contender loads."""

    @abstractmethod
    def requests(self, load: int, round_number: int) -> Requests:
        """This number of requests. Each round has its own prompts, so no prefix cache holds them."""

    @abstractmethod
    def warm_up(self) -> Requests:
        """A few requests with short outputs, none of which occurs in a round."""


@dataclass(frozen=True)
class Turn:
    """The cost of the requests of one load for one contender in one round."""

    seconds: float
    cpu_seconds: float | None
    first_token: float | None
    """Median seconds from the start to a request's first token; None: the engine does not report them."""
    peak_mebibytes: float | None
    """Resident memory of its processes, the sum of their peaks during the turn."""


class Contestant:
    """A running contender and its turns."""

    def __init__(self, name: str, contender: Contender, workload: Workload, threads: int) -> None:
        self.name = name
        self.contender = contender
        self.turns: dict[int, dict[int, Turn]] = {}  # by load, by round
        self.tokens: dict[int, list[list[int]]] = {}  # by load: the first of each request, in the first round
        self._workload = workload
        requests = workload.warm_up()
        start = time.monotonic()
        command = [contender.python(), HERE / contender.script]
        self._worker = WorkerProcess(name, command, environment_of(contender, threads))
        try:
            settings = settings_of(workload, contender, threads)
            self.about = self._worker.ask("open", SECONDS_TO_OPEN, settings=asdict(settings))["about"]
            self._worker.ask("run", SECONDS_TO_OPEN, **asdict(requests.first(1, 1)))
            self.first_answer_seconds = time.monotonic() - start
            self._worker.ask("run", SECONDS_TO_OPEN, **asdict(requests))
        except BaseException:
            self.close()
            raise

    @property
    def in_play(self) -> bool:
        """Whether the contender runs in the next round."""
        return self._worker.is_alive

    def take_turn(self, load: int, round_number: int) -> None:
        """Serve the requests of a load once.

        Raises:
            WorkerFailed: the engine died or overran its time.
        """
        requests = self._workload.requests(load, round_number)
        before = self._worker.cpu_seconds()
        self._worker.reset_peak_bytes()
        timeout = BOX_SECONDS if self.contender.runs_last else SECONDS_TO_RUN
        answer = self._worker.ask("run", timeout, **asdict(requests))
        after = self._worker.cpu_seconds()
        self.turns.setdefault(load, {})[round_number] = Turn(
            answer["seconds"],
            None if before is None or after is None else after - before,
            answer["first_token"],
            None if (peak := self._worker.peak_bytes()) is None else peak / 2**20,
        )
        self.tokens.setdefault(load, answer["tokens"])

    def seconds(self, load: int) -> float:
        """The median of the rounds."""
        return median(turn.seconds for turn in self.turns[load].values())

    def middle(self, load: int, figure: str) -> float | None:
        """The median over the rounds of one figure of `Turn`; None if no round has it."""
        values = [getattr(turn, figure) for turn in self.turns[load].values()]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    def ratio(self, load: int, to: Contestant) -> float | None:
        """This contender's seconds / those of the contender `to`: the median of the rounds that both ran; None: no such
        round."""
        theirs = to.turns.get(load, {})
        shared = [turn.seconds / theirs[at].seconds for at, turn in self.turns.get(load, {}).items() if at in theirs]
        return median(shared) if shared else None

    def agreement(self, reference: Contestant) -> float | None:
        """Share of the requests with the same first tokens as another contender, over the loads of both."""
        pairs = [
            pair
            for load in self.tokens.keys() & reference.tokens.keys()
            for pair in zip(self.tokens[load], reference.tokens[load], strict=True)
        ]
        return sum(a == b for a, b in pairs) / len(pairs) if pairs else None

    def close(self) -> None:
        self._worker.close()


def compete(contenders: Mapping[str, Contender], workload: Workload, threads: int, rounds: int) -> list[Contestant]:
    """Start all contenders, and run them alternately. Returns those that finished a turn, in the same order.

    Raises:
        WorkerFailed: one of Pointsman's own failed, so there is nothing to compare.
    """
    contestants: list[Contestant] = []
    try:
        for name, contender in contenders.items():
            with continue_without_failed_peer(name, contender):
                contestants.append(Contestant(name, contender, workload, threads))
                note(f"  {name}: {contestants[-1].about}")
        for round_number in range(rounds):
            first = round_number % len(contestants)  # no contender is always the first after a pause
            for load in workload.loads:
                for one in contestants[first:] + contestants[:first]:
                    if not one.contender.runs_last:
                        _take_turn(one, load, round_number)
        for one in contestants:
            if one.contender.runs_last:
                for load in workload.loads:
                    _take_turn(one, load, 0)  # its tokens are compared
    finally:
        for one in contestants:
            one.close()
    return [one for one in contestants if one.turns]


def _take_turn(one: Contestant, load: int, round_number: int) -> None:
    if one.in_play:
        with continue_without_failed_peer(one.name, one.contender):
            one.take_turn(load, round_number)
            turn = one.turns[load][round_number]
            note(f"  round {round_number + 1}, {load} at once, {one.name}: {turn.seconds:.2f} s")


@contextmanager
def continue_without_failed_peer(name: str, contender: Contender) -> Iterator[None]:
    """Report a failed peer, and continue."""
    try:
        yield
    except WorkerFailed as error:
        if contender.is_ours:
            raise
        note(f"{name} is left out from here: {error}")


def check_agreement(contestants: Sequence[Contestant], targets: Targets) -> None:
    """Check that all engines agree on the model's output, which they should in float32."""
    reference, *others = contestants
    for other in others:
        if (share := other.agreement(reference)) is not None:
            text = f"share of requests on which {other.name} agrees with {reference.name}"
            targets.at_least(text, share, MIN_AGREEMENT)


def chosen(names: str | None, contenders: Iterable[str]) -> list[str]:
    """The contenders in this list of names, in their own order; None: all.

    Raises:
        SystemExit: a name is not among them.
    """
    known = list(contenders)
    wanted = known if names is None else names.split(",")
    if unknown := sorted(set(wanted) - set(known)):
        raise SystemExit(f"no contender is called {', '.join(unknown)}; choose from {', '.join(known)}")
    return [name for name in known if name in wanted]


def without_missing(contenders: Mapping[str, Contender]) -> dict[str, Contender]:
    """The contenders whose environment exists; the others are named."""
    missing = {one.needs for one in contenders.values() if one.needs and not ENVIRONMENTS[one.needs].is_complete()}
    for peer in sorted(missing):
        maker = f"benchmarks/{ENVIRONMENTS[peer].__name__}.py"
        note(f"skipped: {peer}, there is no environment for it; python {maker} makes it")
    return {name: one for name, one in contenders.items() if one.needs not in missing}


def environment_of(contender: Contender, threads: int) -> dict[str, str | None]:
    """The environment variables of a contender's process: equal numbers of threads, no downloads."""
    variables: dict[str, str | None] = {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": None,  # make sets it for shared machines; here each engine runs alone
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if contender.needs == "vLLM":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_BYTES >> 30)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    if contender.needs == "OpenVINO":
        variables |= openvino_env.NO_TELEMETRY
    return variables


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def settings_of(workload: Workload, contender: Contender, threads: int) -> Settings:
    """The settings of all contenders."""
    return Settings(
        model=str(workload.model_of(contender)),
        dtype=contender.dtype,
        threads=threads,
        max_model_len=-(-workload.max_tokens // MAX_LEN_MULTIPLE) * MAX_LEN_MULTIPLE,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=TOKEN_BUDGET,
        kv_cache_bytes=KV_CACHE_BYTES,
        options=contender.options,
    )
