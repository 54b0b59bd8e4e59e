"""Lesson: why batches wait. Static against continuous batching, with the course's own example."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant, percent
from pointsman.web.course.stage import Run, Stage

SLOTS, LONG, SHORT, EQUAL = 8, 500, 10, 70
_GROUPS = 12  # more groups of requests than the filmed steps can serve


def _run_example(batching: str, long: int = LONG, short: int = SHORT) -> Run:
    """Run the first 500 steps of groups of one long and seven short requests, all added at the start."""
    stage = Stage(batching=batching, max_num_seqs=SLOTS, num_blocks=512)
    for group in range(1, _GROUPS + 1):
        for index in range(SLOTS):
            stage.add(f"{'ABCDEFGH'[index]}{group}", 16, max_tokens=short if index else long)
    return stage.run(LONG)


def _compute_figures(runs: list[Run]) -> Figures:
    static, continuous, equal = runs
    first_gap = next(step for step, output in enumerate(static.outputs) if output.num_rows < SLOTS)
    return {
        "slots": SLOTS,
        "others": SLOTS - 1,
        "long": LONG,
        "short": SHORT,
        "equal": EQUAL,
        "used_static": percent(static.slots_used, 1),
        "used_continuous": percent(continuous.slots_used),
        "used_equal": percent(equal.slots_used),
        "tail": percent(static.outputs[-1].num_rows / SLOTS, 1),
        "busy": SLOTS * SHORT + LONG - SHORT,
        "slot_steps": SLOTS * LONG,
        "after_short": SHORT + 1,
        "served_static": _num_complete_requests(static),
        "served_continuous": _num_complete_requests(continuous),
        "full": Moment(0),
        "gap": Moment(first_gap),
        "refilled": Moment(first_gap, 1, "B2"),
        "sooner": LONG - continuous.starts("B2")[0],
    }


def _num_complete_requests(run: Run) -> int:
    """Number of requests that have all their output tokens."""
    return sum(request.num_output_tokens == request.max_tokens for request in run.requests.values())


LESSON = Lesson(
    title="Why batches wait",
    paragraphs=(
        "A forward pass of a language model takes hardly longer for {slots} requests than for one, so requests are "
        "computed in batches. Here the batch has {slots} slots. Request A1 generates {long} tokens, the {others} "
        "others of its group {short} each, and more groups like it wait. With a static batch all slots are full at "
        "{full}. At {gap} the short ones have finished, and nothing takes their place: Waiting stays as it is until A1 "
        "is done.",
        "Count the slots: {short} steps of {slots} requests and the rest of one make {busy} of {slot_steps:,} "
        "slot-steps, which is {used_static}. A course that tells this example says about 23 %; its own numbers give "
        "what is measured here. Lengths that differ are the cause, not batching: with outputs of {equal} tokens each "
        "(choose it above the film) the same static batch uses {used_equal}.",
        "Continuous batching decides again before every step. At {refilled} the {others} freed slots have their next "
        "requests, among them B2: it starts {sooner} steps sooner than in a static batch. The slots are used to "
        "{used_continuous} as long as requests wait, and in these {long} steps {served_continuous} requests are served "
        "where the static batch served {served_static}.",
    ),
    choice="Batching",
    variants=(
        Variant(
            "static, mixed lengths",
            "Admits only when nothing runs. Slots used: {used_static}.",
            partial(_run_example, "static"),
        ),
        Variant(
            "continuous, mixed lengths",
            "Admits in every step. Slots used: {used_continuous}.",
            partial(_run_example, "mixed"),
        ),
        Variant(
            "static, equal lengths",
            "Every output has {equal} tokens. Slots used: {used_equal}.",
            partial(_run_example, "static", EQUAL, EQUAL),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "With static batching {slots} requests start together; {others} finish in step {short}, one takes {long} "
            "steps. What happens to GPU utilisation between steps {after_short} and {long}?",
            (
                Answer(
                    "It falls to {tail}: one slot of {slots} works, the others stay empty.",
                    "The batch is closed until its longest request is done. Over all {long} steps that makes "
                    "{used_static}. (The film counts from step 0.)",
                    is_right=True,
                ),
                Answer(
                    "It stays near 100 %: the long request takes over the freed capacity.",
                    "A request generates one token a step, because each token needs the one before it. It cannot use "
                    "more than its own slot.",
                ),
                Answer(
                    "It dips for a moment, until waiting requests take the {others} slots.",
                    "That is continuous batching. A static batch admits nothing while it runs: choose both variants "
                    "and compare {gap}.",
                ),
                Answer(
                    "It falls to zero until the batch is complete.",
                    "The long request still runs, one token in each step: that is the 1 of {slots} in This step.",
                ),
            ),
        ),
    ),
    stated=("A1", "B2", "23", "100", "0", "1"),
)
