"""Gain of prompt lookup: tokens per second with and without drafts, on repetitive and on other text.

Two engines share a model and serve the same requests, alternating every few steps. Each has a clock of its own that is
stopped while the other works, so a slow moment of the machine affects both. With greedy decoding their outputs must be
equal. Repetitive text is the greedy output of the models: small ones soon repeat themselves, so a lookup finds the next
tokens, as it does if an output quotes its prompt. Sampled text repeats little, and there drafts must not cost much.

The gain of drafts depends on the requests that share a step, since drafts make it larger: a step of one request is
nearly as slow as one of nine, a step of eight is not. If several run, another begins when one ends, as in a server.

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
import torch
from _common import Targets, argument_parser, finish, note, paired_ratio, print_table, run
from _engine_model import FULL, QUICK, model_directory
from _pointsman_engine import open_engine, vocabulary_size

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model

DRAFTS = 8
PROMPT_TOKENS = 32
MAX_RUNNING = 8
WAVES = 2
STEPS_PER_TURN = 16


@dataclass(frozen=True)
class Workload:
    """The number of requests at once, and how they choose their tokens."""

    name: str
    running: int
    temperature: float
    least: float
    """The project's target: minimum ratio of tokens per second with drafts to those without."""
    ignores_eos: bool = True

    @property
    def requests(self) -> int:
        """The number of requests: if several run, another begins when one ends."""
        return self.running if self.running == 1 else WAVES * self.running


WORKLOADS = (
    Workload("repetitive, 1 request", 1, 0.0, 1.5),
    Workload("repetitive, 4 at a time", 4, 0.0, 0.97),
    Workload("repetitive, 8 at a time", 8, 0.0, 0.97),
    Workload("sampled, 1 request", 1, 1.0, 0.95),
    Workload("sampled, 8 at a time", 8, 1.0, 0.97),
)
LARGE_WORKLOADS = tuple(workload for workload in WORKLOADS if workload.running != 4)
"""Rounds and tokens for the larger model, which takes ten times as long."""


@dataclass
class Side:
    """One engine, and the measurements of its turns."""

    engine: Engine
    tokens_per_second: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    _seconds: float = 0.0
    _answers: dict[str, list[int]] = field(default_factory=dict)
    _begun: int = 0

    def begin(self, workload: Workload, prompts: list[list[int]], num_tokens: int) -> None:
        """Start all requests of a workload; the computation of the first prompts is not measured."""
        for seed, prompt in enumerate(prompts[: workload.requests]):
            params = SamplingParams(
                temperature=workload.temperature,
                seed=seed,
                max_tokens=num_tokens,
                ignore_eos=workload.ignores_eos,
                detokenize=False,
            )
            self.engine.add_request(f"{len(self.tokens_per_second)}-{seed:02}", prompt, params)
        self.engine.step()
        self._seconds, self._answers = 0.0, {}
        self._begun = self.engine.counters.num_generated_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated since `begin`."""
        return self.engine.counters.num_generated_tokens - self._begun

    @property
    def is_done(self) -> bool:
        return not self.engine.has_unfinished_requests()

    def take_turn(self) -> None:
        """Run a few steps; the round ends with the last request."""
        start = perf_counter()
        for _ in range(STEPS_PER_TURN):
            for output in self.engine.step():
                if output.finished:
                    self._answers[output.request_id] = list(output.outputs[0].token_ids)
            if self.is_done:
                break
        self._seconds += perf_counter() - start
        if self.is_done:
            self.tokens_per_second.append(self.num_tokens / self._seconds)
            self.answers = [self._answers[name] for name in sorted(self._answers)]


def open_sides(loaded: LoadedModel, running: int, **knobs: Any) -> list[Side]:
    """An engine without drafts, and one with them; both for this number of requests at once."""
    knobs = {"num_threads": 1, "max_num_seqs": running, "num_blocks": 512, "enable_prefix_caching": False, **knobs}
    return [Side(open_engine(loaded, num_draft_tokens=drafts, **knobs)) for drafts in (0, DRAFTS)]


def take_turns(sides: Sequence[Side]) -> None:
    """Run turns until all are done; the side with the fewest generated tokens is next."""
    while left := [side for side in sides if not side.is_done]:
        min(left, key=lambda side: side.num_tokens).take_turn()


def measure(
    model: str | Path, workloads: Sequence[Workload], num_rounds: int, num_tokens: int
) -> dict[str, dict[str, Any]]:
    """The measurements by workload."""
    loaded = load_model(model, "float32")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    found = {}
    for workload in workloads:
        sides = open_sides(loaded, workload.running)
        vocabulary = vocabulary_size(sides[0].engine)
        prompts = [rng.integers(3, vocabulary, size=PROMPT_TOKENS).tolist() for _ in range(WAVES * MAX_RUNNING)]
        for _ in range(num_rounds + 1):
            for side in sides:
                side.begin(workload, prompts, num_tokens)
            take_turns(sides)
        plain, drafting = sides
        stats = drafting.engine.scheduler.stats()
        found[workload.name] = {
            "plain": median(plain.tokens_per_second[1:]),  # the first is warming up
            "drafting": median(drafting.tokens_per_second[1:]),
            "ratio": paired_ratio(drafting.tokens_per_second[1:], plain.tokens_per_second[1:]),
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
