"""Savings of KV outside the pool: host memory under pressure, swapped requests, and a store between two engines.

**Host memory.** Users of several system prompts alternate, in a pool that holds fewer than half of the prompts and in
which requests preempt each other. One engine has host memory for evicted blocks, the other has not. They share a model
and alternate. Measured are the computed tokens (prompts, and recomputation after preemptions), which do not depend on
the machine, and the time.

**Swap.** Short prompts with long outputs outgrow a pool repeatedly. One engine recomputes the KV of preempted requests,
one swaps it to host memory, one decides for each request. Measured are recomputed tokens, and the time.

**A store.** One engine computes a prompt for one token and writes its KV to a directory; another engine, which has
never
seen the prompt, gets the request. Measured is the wall time from `add_request` to the first token on that second
engine, beside an engine without the store, prompt by prompt.

The outputs of both sides must be equal, token for token.

    python benchmarks/kv_transfer.py --check
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, finish, note, print_table, run
from _engine_model import FULL, QUICK, model_directory
from _pointsman_engine import exactly, open_engine, vocabulary_size

from pointsman.engine import Engine
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model

BLOCK_SIZE = 32
SYSTEM_PROMPTS = 6
SYSTEM_TOKENS = 256
USER_TOKENS = (16, 48)
ANSWER_TOKENS = 64
USERS = 4  # of each system prompt, in a turn
NUM_BLOCKS = 32  # a running request takes 10
HOST_BYTES = 1 << 30
SWAP_TOKENS, SWAP_TOKENS_QUICK = 320, 96  # of an output
SWAP_BLOCKS, SWAP_BLOCKS_QUICK, SWAP_BLOCK_SIZE = 144, 48, 8  # a request takes at most 46, and 18
SWAP_REQUESTS = 16
ROUNDS, ROUNDS_QUICK = 2, 1
PROMPT_TOKENS = 512
PROMPTS, PROMPTS_QUICK = 12, 2
MAX_COMPUTED = 0.4
MAX_TIME = 0.8
MIN_RATIO = 2.0
MAX_RECOMPUTED = 0.25

Tokens = list[int]


@dataclass
class Side:
    """An engine, and the cost of each of its turns."""

    engine: Engine
    num_tokens: int = ANSWER_TOKENS
    """Tokens of each output."""
    seconds: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """Number of prompt tokens and recomputed tokens."""
    recomputed: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    answers: dict[str, Tokens] = field(default_factory=dict)

    def take_turn(self, turn: int, prompts: list[Tokens]) -> None:
        """Serve all prompts at once, to the end."""
        engine = self.engine
        before, was, start = self._computed(), engine.scheduler.stats(), perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{index}", prompt, exactly(self.num_tokens))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    self.answers[output.request_id] = list(output.token_ids)
        self.seconds.append(perf_counter() - start)
        self.computed.append(self._computed() - before)
        stats = engine.scheduler.stats()
        self.preemptions.append(stats.num_preemptions - was.num_preemptions)
        self.recomputed.append(stats.num_recomputed_tokens - was.num_recomputed_tokens)

    def _computed(self) -> int:
        counters, stats = self.engine.counters, self.engine.scheduler.stats()
        return counters.num_prompt_tokens - counters.num_cached_tokens + stats.num_recomputed_tokens


def measure_offload(loaded: LoadedModel, num_rounds: int) -> dict[str, Side]:
    """Measure with and without host memory; the first turn, in which no prompt is cached, is discarded."""
    knobs: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "full_sequence_must_fit": False,
    }
    sides = {
        "without": Side(open_engine(loaded, **knobs)),
        "with": Side(open_engine(loaded, kv_offload_bytes=HOST_BYTES, **knobs)),
    }
    rng = np.random.default_rng(0)
    vocabulary = vocabulary_size(sides["with"].engine)

    def tokens(count: int) -> Tokens:
        return list(rng.integers(10, vocabulary, size=count).tolist())

    systems = [tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    for turn in range(num_rounds + 1):
        prompts = [system + tokens(int(rng.integers(*USER_TOKENS))) for _ in range(USERS) for system in systems]
        for side in sides.values() if turn % 2 else reversed(sides.values()):
            side.take_turn(turn, prompts)
            if turn == 0:
                side.seconds.clear(), side.computed.clear(), side.preemptions.clear()
    if sides["with"].answers != sides["without"].answers:
        raise RuntimeError("the outputs differ with host memory")
    return sides


def measure_swap(loaded: LoadedModel, num_rounds: int, num_tokens: int, num_blocks: int) -> dict[str, Side]:
    """Measure by `preemption_mode`; the first turn is discarded."""
    knobs: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": SWAP_BLOCK_SIZE,
        "max_model_len": USER_TOKENS[1] + num_tokens,
        "max_num_seqs": 8,
        "full_sequence_must_fit": False,
    }
    sides = {"recompute": Side(open_engine(loaded, **knobs), num_tokens)}
    for mode in ("swap", "cheaper"):
        engine = open_engine(loaded, kv_offload_bytes=HOST_BYTES, preemption_mode=mode, **knobs)
        sides[mode] = Side(engine, num_tokens)
    rng = np.random.default_rng(2)
    vocabulary = vocabulary_size(sides["swap"].engine)
    for turn in range(num_rounds + 1):
        lengths = rng.integers(*USER_TOKENS, size=SWAP_REQUESTS).tolist()
        prompts = [list(rng.integers(10, vocabulary, size=length).tolist()) for length in lengths]
        for side in sides.values() if turn % 2 else reversed(sides.values()):
            side.take_turn(turn, prompts)
            if turn == 0:
                side.seconds.clear(), side.recomputed.clear(), side.preemptions.clear()
    if any(side.answers != sides["recompute"].answers for side in sides.values()):
        raise RuntimeError("the outputs differ where requests swap")
    return sides


def measure_store(loaded: LoadedModel, num_prompts: int, directory: Path) -> dict[str, list[float]]:
    """Seconds to the first token of the decoding engine, with and without the store."""
    knobs: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    prefill = open_engine(loaded, kv_store=directory, kv_store_role="producer", **knobs)
    sides = {
        "without": open_engine(loaded, **knobs),
        "with": open_engine(loaded, kv_store=directory, kv_store_role="consumer", **knobs),
    }
    rng = np.random.default_rng(1)
    vocabulary = vocabulary_size(prefill)
    seconds: dict[str, list[float]] = {label: [] for label in sides}
    for number in range(num_prompts + 1):
        prompt = list(rng.integers(10, vocabulary, size=PROMPT_TOKENS).tolist())
        _first_token(prefill, f"r{number}", prompt, 1)
        prefill.close()  # waits until everything is written; the next prompt starts it again
        answers = []
        for label in seconds if number % 2 else reversed(seconds):
            elapsed, answer = _first_token(sides[label], f"r{number}", prompt, 8)
            answers.append(answer)
            if number:
                seconds[label].append(elapsed)
        if answers[0] != answers[1]:
            raise RuntimeError("the outputs differ with the store")
    expected = (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE * (num_prompts + 1)
    loaded_tokens = sides["with"].counters.num_external_tokens
    if loaded_tokens != expected:
        raise RuntimeError(f"{loaded_tokens} tokens came from the store, of {expected}")
    return seconds


def _first_token(engine: Engine, name: str, prompt: Tokens, num_tokens: int) -> tuple[float, Tokens]:
    """Seconds until the first token, and the whole output."""
    elapsed, answer = 0.0, Tokens()
    start = perf_counter()
    engine.add_request(name, prompt, exactly(num_tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            elapsed = elapsed or perf_counter() - start
            answer = list(output.token_ids)
    return elapsed, answer


def report_offload(sides: dict[str, Side], targets: Targets) -> dict[str, Any]:
    """The table, the targets and the figures of host memory."""
    names = list(sides)
    rows = [
        [label, *(median(getattr(sides[label], what)) for what in ("computed", "preemptions", "seconds"))]
        for label in names
    ]
    title = f"{SYSTEM_PROMPTS * USERS} requests with {SYSTEM_PROMPTS} system prompts, {NUM_BLOCKS} blocks"
    print_table(title, ["host memory", "tokens computed", "preemptions", "seconds"], rows)
    without, with_it = sides["without"], sides["with"]
    computed = sum(with_it.computed) / sum(without.computed)
    seconds = median(a / b for a, b in zip(with_it.seconds, without.seconds, strict=True))
    counters = with_it.engine.counters
    note(f"  {counters.num_offloaded_blocks} blocks were copied out, {counters.num_restored_blocks} back")
    targets.at_most("prompt tokens computed, with host memory / without", computed, MAX_COMPUTED)
    targets.at_most("time, with host memory / without", seconds, MAX_TIME)
    return {
        "computed_ratio": round(computed, 4),
        "time_ratio": round(seconds, 4),
        "computed": {label: side.computed for label, side in sides.items()},
        "preemptions": {label: side.preemptions for label, side in sides.items()},
        "offloaded_blocks": counters.num_offloaded_blocks,
        "restored_blocks": counters.num_restored_blocks,
    }


def report_swap(sides: dict[str, Side], targets: Targets) -> dict[str, Any]:
    """The table, the target and the figures of requests that swap."""
    rows: list[list[object]] = []
    for mode, side in sides.items():
        decisions = side.engine.scheduler.stats().preemption_decisions
        counters = side.engine.counters
        copied = f"{counters.num_offloaded_blocks} out, {counters.num_restored_blocks} back"
        sums = sum(side.preemptions), sum(side.recomputed)
        rows.append([mode, *sums, f"{decisions['swap']} of {sum(decisions.values())}", copied, median(side.seconds)])
    title = f"{SWAP_REQUESTS} requests with outputs of {sides['swap'].num_tokens} tokens"
    print_table(title, ["preemption mode", "preemptions", "recomputed", "swapped", "blocks copied", "seconds"], rows)
    before = sides["recompute"]
    ratios = {mode: sum(side.recomputed) / max(1, sum(before.recomputed)) for mode, side in sides.items()}
    times = {
        mode: median(a / b for a, b in zip(side.seconds, before.seconds, strict=True)) for mode, side in sides.items()
    }
    targets.at_most("recomputed tokens, swap / recompute", ratios["swap"], MAX_RECOMPUTED)
    return {
        "recomputed_ratio": {mode: round(ratio, 4) for mode, ratio in ratios.items()},
        "time_ratio": {mode: round(ratio, 4) for mode, ratio in times.items()},
        "recomputed": {mode: sum(side.recomputed) for mode, side in sides.items()},
        "preemptions": {mode: sum(side.preemptions) for mode, side in sides.items()},
        "decisions": {mode: side.engine.scheduler.stats().preemption_decisions for mode, side in sides.items()},
    }


def report_store(seconds: dict[str, list[float]], targets: Targets) -> dict[str, Any]:
    """The table, the target and the figures of the store."""
    rows = [[label, median(each) * 1e3, min(each) * 1e3] for label, each in seconds.items()]
    title = f"time to first token of {PROMPT_TOKENS} tokens on the engine that decodes"
    print_table(title, ["store", "median, ms", "fastest, ms"], rows)
    ratio = median(a / b for a, b in zip(seconds["without"], seconds["with"], strict=True))
    targets.at_least("time to first token, without the store / with it", ratio, MIN_RATIO)
    return {
        "first_token_ratio": round(ratio, 4),
        "first_token_ms": {label: round(median(each) * 1e3, 3) for label, each in seconds.items()},
    }


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", help="a model directory, or demo; default: 121 M random parameters, quick: 10 M")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    quick = arguments.quick
    loaded = load_model(arguments.model or model_directory(QUICK if quick else FULL), arguments.dtype)

    targets = Targets()
    offload = report_offload(measure_offload(loaded, ROUNDS_QUICK if quick else ROUNDS), targets)
    num_tokens, num_blocks = (SWAP_TOKENS_QUICK, SWAP_BLOCKS_QUICK) if quick else (SWAP_TOKENS, SWAP_BLOCKS)
    swap = report_swap(measure_swap(loaded, ROUNDS_QUICK if quick else ROUNDS, num_tokens, num_blocks), targets)
    with TemporaryDirectory() as directory:
        store = report_store(measure_store(loaded, PROMPTS_QUICK if quick else PROMPTS, Path(directory)), targets)
    figures = {"quick": quick, "threads": arguments.threads, "dtype": arguments.dtype}
    figures |= {"offload": offload, "swap": swap, "store": store}
    return finish("kv_transfer", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
