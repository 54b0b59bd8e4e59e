"""Advice: what a log leaves open about step times, and a load whose log would tell.

A log of one load, such as that of a server that is always full, does not show how long the steps of other loads take.
`allowed_ranges` has the steps that users of a profile ask for, `about_open` says which of them are open, and for which
ten minutes of load the engine should be measured.

The advised load comes in bursts (gaps by a gamma distribution, as `vllm bench serve --burstiness`): each fills the
engine and drains until one request is left, so its log has all numbers of running requests, each for some time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pointsman.sim.alternatives import Question, Range
from pointsman.sim.bounded import bounded
from pointsman.sim.profile import EngineSettings, Profile
from pointsman.sim.step_time import StepLoad, StepTime
from pointsman.traces import MeasuredRequest

LONGER = 4
"""Multiple of the log's mean length for which the step times are asked, too."""
SECONDS = 600
"""Duration of the advised load."""
BUSY = 0.5
"""Share of the engine's estimated maximum request rate that the advised load has in the mean."""
SPREAD = 0.9
"""Lengths of the advised load are uniform within this share of their means."""
UNKNOWN_MODEL = "MODEL"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean numbers of tokens of a log's requests."""

    prompt: int
    output: int

    @classmethod
    def of(cls, measured: Sequence[MeasuredRequest]) -> Lengths:
        """The mean lengths of measured requests."""
        prompts = [each.request.num_prompt_tokens for each in measured]
        outputs = [each.request.num_output_tokens for each in measured]
        return cls(max(1, round(float(np.mean(prompts)))), max(1, round(float(np.mean(outputs)))))


def questions_of(lengths: Lengths, settings: EngineSettings) -> list[Question]:
    """The loads whose step times users of a profile ask for, whether the log has them or not."""
    position, full = lengths.prompt + lengths.output // 2, settings.max_num_seqs
    budget, some = settings.max_num_batched_tokens, max(2, full // 4)

    def decodes(rows: int, context: int) -> StepLoad:
        return StepLoad(rows, rows, rows * context, rows * context, rows)

    return [
        Question("one request decodes", decodes(1, position)),
        Question(f"{full:,} requests decode", decodes(full, position)),
        Question(f"a prompt of {budget:,} tokens", StepLoad(budget, 1, budget, budget * (budget + 1) // 2, 1)),
        Question(f"{some:,} requests decode at {LONGER} times the length", decodes(some, LONGER * position)),
    ]


def about_open(profile: Profile, ranges: Sequence[Range], lengths: Lengths) -> list[str]:
    """Sentences on the step times that the log leaves open, and on the load that would show them; none: it leaves
    nothing open.

    Args:
        profile: the profile of the log.
        ranges: the step times that the log allows.
        lengths: mean lengths of the log's requests.
    """
    if not (found := [each for each in ranges if each.is_open]):
        return []
    texts = [f"{each.question.name}, {1e3 * each.low:.3g} to {1e3 * each.high:.3g} ms" for each in found]
    return [
        f"the log leaves open how long these steps take: {'; '.join(texts)}. Answers about such loads are as uncertain",
        f"ten minutes of this load would tell: {advised_load(profile, lengths).command(profile.model)} and then "
        "pointsman calibrate bursts.json with the engine's settings",
    ]


class AdvisedLoad(NamedTuple):
    """A load to measure an engine with."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    rate: float
    """Requests a second in the mean."""
    burstiness: float
    """Shape of the gamma distribution of the gaps between arrivals."""

    def command(self, model: str = "") -> str:
        """The command that sends this load to vLLM."""
        return (
            f"vllm bench serve --model {model or UNKNOWN_MODEL} --dataset-name random --random-input-len "
            f"{self.num_prompt_tokens} --random-output-len {self.num_output_tokens} --random-range-ratio {SPREAD:g} "
            f"--ignore-eos --num-prompts {self.num_requests} --request-rate {self.rate:.3g} --burstiness "
            f"{self.burstiness:.2g} --save-result --save-detailed --result-filename bursts.json"
        )


def advised_load(profile: Profile, lengths: Lengths) -> AdvisedLoad:
    """The load whose log shows the step times of all numbers of running requests, and of long prompts."""
    settings, output = profile.settings, lengths.output
    step_time: StepTime = bounded(profile.step_time, profile.floor)
    prompt = max(lengths.prompt, round(settings.max_num_batched_tokens / (1 + SPREAD)))
    if settings.max_model_len is not None:
        prompt = max(1, min(prompt, math.floor(settings.max_model_len / (1 + SPREAD)) - output))
    rows = settings.max_num_seqs
    if settings.num_blocks is not None:
        groups = max(1, len(settings.kv_groups))
        rows = min(rows, settings.num_blocks * settings.block_size // (groups * (prompt + output)))
    rows = max(1, rows)
    context = rows * (prompt + output // 2)
    decoding = output * step_time.of_step(StepLoad(rows, rows, context, context, rows)) / rows
    prefill = StepLoad(prompt, 1, prompt, prompt * (prompt + 1) // 2, 1)
    rate = BUSY * settings.data_parallel_size / (decoding + step_time.of_step(prefill))
    num_requests = max(20, round(rate * SECONDS))
    return AdvisedLoad(prompt, output, num_requests, rate, 1 / min(rows, max(2, num_requests // 10)))
