"""Part b: checks that the demo model's float32 tokens, with and without graphs, equal those of PyTorch on a CPU.

If the reference's two most likely tokens are closer than rounding, a greedy request may continue with either. Such ties
are counted, and the tokens after them are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_check.models import STEPS_IN_FLIGHT
from gpu_check.part import Setting
from pointsman.engine import Engine, RequestOutput, SamplingParams

PROMPTS = (
    "The import statement", "A list is", "To open a file", "class Point:", "for line in", "def main():",
    "A dictionary maps keys to values. The keys must be", "The with statement is used to", "Exceptions are raised when",
    "import os\n", "A generator function returns", "while True:",
)  # fmt: skip
NUM_TOKENS, TINY_NUM_TOKENS = 48, 12
TIE = 1e-4
"""Maximum difference of log probabilities that rounding can make."""


def greedy_params(num_tokens: int, logprobs: int | None = None) -> list[SamplingParams]:
    """Greedy parameters for each prompt."""
    return [SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)] * len(PROMPTS)


def sampled_params(num_tokens: int) -> list[SamplingParams]:
    """Different parameters for each prompt: temperature alone, each cut, all cuts, penalties."""
    kinds = (
        {"temperature": 0.8},
        {"temperature": 0.6, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    )
    return [
        SamplingParams(**kinds[number % len(kinds)], seed=number, max_tokens=num_tokens, ignore_eos=True)  # type: ignore[arg-type]
        for number in range(len(PROMPTS))
    ]


def outputs_of(engine: Engine, params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """The last outputs, by prompt."""
    for number, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add_request(str(number), prompt, each)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_invariants()
    while not engine.scheduler.is_idle:
        engine.step()  # an empty step reports the last finished requests
    return [done[str(number)] for number in range(len(PROMPTS))]


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """The first index at which two outputs of equal length differ; None: they are equal."""
    return next((at for at, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)


def gap(output: RequestOutput, at: int) -> float:
    """Log probability of the most likely token at index `at` of an output, minus that of the second."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    first, second = sorted((entry.logprob for entry in logprobs[at].values()), reverse=True)[:2]
    return first - second


def run(setting: Setting) -> None:
    """Run the part."""
    findings, num_tokens = setting.findings, TINY_NUM_TOKENS if setting.tiny else NUM_TOKENS
    reference = Engine(
        "demo", dtype="float32", device="cpu", attention="torch", fuse=False, num_blocks=256, max_steps_in_flight=1
    )
    greedy = outputs_of(reference, greedy_params(num_tokens, logprobs=2))
    sampled = outputs_of(reference, sampled_params(num_tokens))
    findings.figure("tokens compared in each row", 2 * num_tokens * len(PROMPTS))
    for name, enforce_eager, steps in (
        ("graphs, 2 steps in flight", False, STEPS_IN_FLIGHT), ("graphs, 1 step in flight", False, 1),
        ("eager, 2 steps in flight", True, STEPS_IN_FLIGHT),
    ):  # fmt: skip
        engine = Engine(
            "demo",
            dtype="float32",
            device=setting.device,
            num_blocks=256,
            enforce_eager=enforce_eager,
            max_steps_in_flight=steps,
        )
        num_ties = num_other = 0
        for output, want in zip(outputs_of(engine, greedy_params(num_tokens)), greedy, strict=True):
            at = first_difference(output.token_ids, want.token_ids)
            if at is not None and gap(want, at) < TIE:
                num_ties += 1
            elif at is not None:
                num_other += 1
                findings.wrong(
                    f"{name}: greedy output {want.request_id} differs at token {at}, {gap(want, at):.2g} apart"
                )
        for output, want in zip(outputs_of(engine, sampled_params(num_tokens)), sampled, strict=True):
            at = first_difference(output.token_ids, want.token_ids)
            if at is not None:
                num_other += 1
                findings.wrong(f"{name}: sampled output {want.request_id} differs at token {at}")
        findings.row(
            "outputs equal to the CPU's", engine=name, attention=engine.attention.name, requests=2 * len(PROMPTS),
            other=num_other, ties=num_ties,
        )  # fmt: skip
        engine.close()
