"""Lesson: the token budget, with the worked example of a document on vLLM, step by step, and corrections."""

from __future__ import annotations

from functools import partial

import numpy as np

from pointsman.core import Request
from pointsman.core.policy.gate import Int64Array, Limit
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral
from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BUDGET, SMALL_BUDGET, BLOCKS, DOCUMENT_BLOCKS = 2048, 512, 128, 100
_OUTPUTS = 50
"""Number of output tokens of A before the step of the example."""


class _FirstChunk(Limit):
    """Limits each prompt to 300 tokens a step, until the run removes this limit. So the prompt of the lesson's request
    C is half computed when the lesson's example begins."""

    name = "first-chunk"
    most = 300

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, self.most, out=want)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return min(want, self.most)


def _run_example(num_blocks: int, budget: int) -> Run:
    """Run the example: an earlier request leaves 256 tokens of D's prompt in the cache; A decodes; B and C arrive, then
    D and E."""
    limit = _FirstChunk()

    def drafts(request: Request, most: int) -> list[int]:
        return [1] * most if request.request_id == "A" and request.num_output_tokens == _OUTPUTS else []

    stage = Stage(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        num_draft_tokens=2,
        token_limits=(limit,),
        drafter=drafts,
    )
    shared = stage.prompt(256)
    stage.add("earlier", [*shared, 1], max_tokens=1)
    stage.add("A", 100, max_tokens=70, step=1)
    stage.add("B", 200, max_tokens=20, step=_OUTPUTS)
    stage.add("C", 500, max_tokens=20, step=_OUTPUTS)
    stage.add("D", [*shared, *stage.prompt(744)], max_tokens=12, step=_OUTPUTS + 1)
    stage.add("E", 500, max_tokens=6, step=_OUTPUTS + 1)
    stage.at(_OUTPUTS + 1, lambda: setattr(limit, "most", BUDGET))
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    step = _OUTPUTS + 1
    run, short, small = runs
    tokens = run.tokens(step)
    held = sum(len(short.table(step, name)) for name in "ABC")
    return {
        "budget": BUDGET,
        "example": Moment(step, 0),
        "a": tokens["A"],
        "b": tokens["B"],
        "c": tokens["C"],
        "d": tokens["D"],
        "after_a": BUDGET - tokens["A"],
        "after_b": BUDGET - tokens["A"] - tokens["B"],
        "after_c": BUDGET - tokens["A"] - tokens["B"] - tokens["C"],
        "after_d": BUDGET - sum(tokens.values()),
        "total": sum(tokens.values()),
        "cached": run.cached("D")[0],
        "d_prompt": run.requests["D"].num_prompt_tokens,
        "seqs": run.config.max_num_seqs,
        "a_known": run.known(step, "A"),
        "a_computed": run.known(step, "A") - 1,
        "drafts": int(run.outputs[step].num_draft_tokens[0]),
        "document_blocks": DOCUMENT_BLOCKS,
        "held": held,
        "free": DOCUMENT_BLOCKS - held,
        "d_blocks": DOCUMENT_BLOCKS - held + short.waits("D")[0].missing,
        "waits": Moment(step, 1, "D"),
        "d_starts": Moment(short.starts("D")[0], 1, "D"),
        "cut": small.tokens(step)["D"],
        "cut_at": Moment(step, 2, "D"),
        "left": small.tokens(step + 1)["D"],
        "next": Moment(step + 1, 2, "D"),
    }


LESSON = Lesson(
    title="Tokens, not requests: the budget",
    paragraphs=(
        "A step is bounded in tokens. A document on vLLM works an example with a budget of {budget:,} tokens and "
        "{seqs} sequences: go to {example} and read This step. Running requests come first: A asks for {a} tokens, "
        "which leaves {after_a:,}; B for {b}, {after_b:,} left; C for the other {c} of its prompt, {after_c:,} left. "
        "Then the queue: of D's {d_prompt:,} tokens {cached} are cached, so it takes {d}, and {after_d:,} are left. E "
        "would fit, but the {seqs} sequences are taken. The step has {total} tokens.",
        "These are the document's numbers, and its account of A needs a correction. Its A has 150 tokens, all "
        "computed, and 3 drafts. But a token is computed in the step after the one that samples it: of {a_known} known "
        "tokens {a_computed} are computed. A asks for that one, and for {drafts} drafts: {a} tokens. The newest token "
        "is not computed yet, at any time: that is why every running request asks for one.",
        "Two more corrections. The document's pool of {document_blocks} blocks cannot hold the step: A, B and C have "
        "{held} blocks, so {free} are free, and D needs {d_blocks}. Choose that pool: at {waits} D waits. The document "
        "would preempt C for it. But a waiting request never takes blocks from running ones under first come, first "
        "served. D waits until A, B and C are done: it starts at {d_starts}.",
    ),
    choice="Pool and budget",
    variants=(
        Variant(
            "128 blocks, 2,048 tokens",
            "The example is {example}; before it, its state is made.",
            partial(_run_example, BLOCKS, BUDGET),
        ),
        Variant(
            "100 blocks, 2,048 tokens",
            "The document's pool: D waits at {waits} and starts at {d_starts}.",
            partial(_run_example, DOCUMENT_BLOCKS, BUDGET),
        ),
        Variant(
            "128 blocks, 512 tokens",
            "D gets the {cut} tokens that are left at {cut_at}, and its other {left} at {next}.",
            partial(_run_example, BLOCKS, SMALL_BUDGET),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "In the example {after_d:,} tokens of the budget are left, and E has fewer. Why does E not start?",
            (
                Answer(
                    "The number of sequences is a limit of its own, and D took the last slot.",
                    "Budget, sequences and blocks are three limits; a request must fit all of them. Waiting names the "
                    "one that E lacks: sequence limit.",
                    is_right=True,
                ),
                Answer(
                    "Its prompt does not fit beside what the others will need in later steps.",
                    "The budget bounds one step; the next one has its own. A prompt may even start if only a part of "
                    "it fits.",
                ),
                Answer(
                    "D and E may not start in the same step.",
                    "Several requests may start in one step; B and C did.",
                ),
                Answer(
                    "The rest of the budget is kept for the running requests.",
                    "They were served first and have all that they asked for. The remaining budget of a step is "
                    "not used.",
                ),
            ),
        ),
        Question(
            "The pool is too small for D while A, B and C run. What happens under first come, first served?",
            (
                Answer(
                    "D waits until enough blocks are free.",
                    "Only a running request that lacks a block leads to a preemption. Under the order `priority` a "
                    "more urgent waiting request may preempt others; D is not more urgent.",
                    is_right=True,
                ),
                Answer(
                    "C is preempted, as it was admitted last.",
                    "So says the document. It would be a bad trade: C would lose its blocks so that a request that "
                    "came later can begin. vLLM does not do it either.",
                ),
                Answer(
                    "D starts with the blocks that are free, and gets more later.",
                    "That would over-commit the pool: D's whole sequence must fit when it is admitted.",
                ),
            ),
        ),
    ),
    stated=("150", "3", "128", "100", "2,048", "512"),
)
