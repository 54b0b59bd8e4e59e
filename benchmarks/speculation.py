"""What prompt lookup brings: tokens per second with drafts beside without, on text that repeats itself and on other.

Two engines share a model and take turns at the same requests; with greedy decoding their answers must be equal. Text
that repeats itself is what the models write when each token is the likeliest: small ones soon go round in circles, so
a lookup finds what comes next, as it does where an answer quotes its prompt. Text that is sampled repeats little, and
there drafts must not cost much.

What drafts bring depends on the requests that share a step, since they make it larger: a step of one request is nearly
as slow as one of nine, a step of eight is not. Where several run, another begins when one ends, as in a server.

    python benchmarks/speculation.py --check
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from _common import Targets, argument_parser, finish, note, print_table, run
from _engine_model import FULL, QUICK, model_directory
from _pointsman_engine import open_engine, set_threads, vocabulary_size

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.loader import load_model

DRAFTS = 8
PROMPT_TOKENS = 32
MOST_RUNNING = 8
WAVES = 2


@dataclass(frozen=True)
class Workload:
    """How many requests at once, and how they choose their tokens."""

    name: str
    running: int
    temperature: float
    least: float
    """The project's target: tokens per second with drafts by those without, at least."""

    @property
    def requests(self) -> int:
        """How many there are: where several run, another begins when one ends."""
        return self.running if self.running == 1 else WAVES * self.running


WORKLOADS = (
    Workload("repetitive, 1 request", 1, 0.0, 1.5),
    Workload("repetitive, 4 at a time", 4, 0.0, 0.97),
    Workload("repetitive, 8 at a time", 8, 0.0, 0.97),
    Workload("sampled, 1 request", 1, 1.0, 0.95),
    Workload("sampled, 8 at a time", 8, 1.0, 0.97),
)
LARGE_WORKLOADS = tuple(workload for workload in WORKLOADS if workload.running != 4)
"""For the larger model, which takes ten times as long."""


@dataclass
class Side:
    """One engine, and what each of its turns gave."""

    engine: Engine
    tokens_per_second: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def take_turn(self, workload: Workload, prompts: list[list[int]], num_tokens: int) -> None:
        """All requests of a workload, from the start; the computing of the first prompts is not measured."""
        engine = self.engine
        for seed, prompt in enumerate(prompts[: workload.requests]):
            params = SamplingParams(
                temperature=workload.temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{len(self.tokens_per_second)}-{seed:02}", prompt, params)
        engine.step()
        answers: dict[str, list[int]] = {}
        before, start = engine.counters.num_generated_tokens, perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        seconds = perf_counter() - start
        self.tokens_per_second.append((engine.counters.num_generated_tokens - before) / seconds)
        self.answers = [answers[name] for name in sorted(answers)]


def measure(
    model: str | Path, workloads: Sequence[Workload], num_rounds: int, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """By workload: what was measured."""
    loaded = load_model(model, "float32")
    set_threads(1)
    rng = np.random.default_rng(0)
    found = {}
    for workload in workloads:
        sides = [
            Side(
                open_engine(
                    loaded,
                    num_threads=1,
                    max_num_seqs=workload.running,
                    num_blocks=512,
                    enable_prefix_caching=False,
                    num_draft_tokens=drafts,
                )
            )
            for drafts in (0, DRAFTS)
        ]
        vocabulary = vocabulary_size(sides[0].engine)
        prompts = [rng.integers(3, vocabulary, size=PROMPT_TOKENS).tolist() for _ in range(WAVES * MOST_RUNNING)]
        for turn in range(num_rounds + 1):
            for side in sides if turn % 2 else reversed(sides):
                side.take_turn(workload, prompts, num_tokens)
        plain, drafting = sides
        stats = drafting.engine.scheduler.stats()
        pairs = zip(drafting.tokens_per_second[1:], plain.tokens_per_second[1:], strict=True)  # the first is warming up
        found[workload.name] = {
            "plain": median(plain.tokens_per_second[1:]),
            "drafting": median(drafting.tokens_per_second[1:]),
            "ratio": median(a / b for a, b in pairs),
            "acceptance": stats.num_accepted_tokens / max(stats.num_draft_tokens, 1),
            "equal": plain.answers == drafting.answers,
        }
        for side in sides:
            side.engine.close()
    return found


def report(name: str, found: dict[str, dict[str, Any]], targets: Targets) -> dict[str, Any]:
    """The table, the targets and the figures of one model."""
    rows = [
        [workload, *(each[key] for key in ("plain", "drafting", "ratio", "acceptance"))]
        for workload, each in found.items()
    ]
    print_table(
        f"{name}, up to {DRAFTS} drafts", ["workload", "tokens/s without", "with", "ratio", "drafts accepted"], rows
    )
    for workload in (one for one in WORKLOADS if one.name in found):
        each = found[workload.name]
        targets.at_least(
            f"{name}, {workload.name}: tokens per second with drafts / without", each["ratio"], workload.least
        )
        if not workload.temperature:
            targets.holds(f"{name}, {workload.name}: the same answers", each["equal"])
    return {
        workload: {key: round(value, 4) if isinstance(value, float) else value for key, value in each.items()}
        for workload, each in found.items()
    }


def main() -> int:
    parser = argument_parser(__doc__ or "")
    arguments = parser.parse_args()
    quick = arguments.quick
    shape = QUICK if quick else FULL
    num_rounds, num_tokens, num_large_tokens = (1, 120, 60) if quick else (4, 400, 100)
    targets = Targets()
    models = {"demo": report("demo", measure("demo", WORKLOADS, num_rounds, num_tokens), targets)}
    note("")
    large = measure(model_directory(shape), LARGE_WORKLOADS, min(num_rounds, 2), num_large_tokens)
    models[shape.name] = report(shape.name, large, targets)
    return finish("speculation", {"quick": quick, "drafts": DRAFTS, "models": models}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
