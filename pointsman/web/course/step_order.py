"""Lesson: the order of the actions in a step, and why the blocks of finished requests are freed first."""

from __future__ import annotations

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BLOCKS = 10


def _run_example(ahead: bool) -> Run:
    """Run A and B, which hold most of the pool, and D, which needs the blocks of A."""
    stage = Stage(num_blocks=BLOCKS, max_num_seqs=4, ahead=ahead)
    stage.add("A", 60, max_tokens=4)
    stage.add("B", 60, max_tokens=16)
    stage.add("D", 60, max_tokens=6, step=1)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    run, ahead = runs
    (start,), (late,) = run.starts("D"), ahead.starts("D")
    waits = run.waits("D")[0]
    return {
        "blocks": BLOCKS,
        "waits": Moment(waits.step, 0, "D"),
        "missing": waits.missing,
        "last": Moment(start - 1, 0, "A"),
        "held": len(run.table(start - 1, "A")),
        "start": Moment(start, 0, "D"),
        "reused": len(set(run.table(start, "D")) & set(run.table(start - 1, "A"))),
        "late": Moment(late, 1, "D"),
        "later": late - start,
    }


LESSON = Lesson(
    title="The order of a step",
    paragraphs=(
        "A step has a fixed order. What finished is freed; a more urgent request may displace running ones; running "
        "requests get their tokens and blocks, and if blocks run out, one is preempted; waiting requests are admitted "
        "with what is left; the batch goes to the model. Read the decisions of any step from top to bottom: this is "
        "their order.",
        "The pool has {blocks} blocks. At {waits} D waits, {missing} blocks short. At {last} A still runs and holds "
        "{held} blocks; the token of that step is its last. So before {start} is decided, A is finished and its blocks "
        "are free, and in that same step D starts, in {reused} of A's own blocks. Were finished requests freed last, D "
        "would start a step later.",
        "That is not a thought experiment. An engine may schedule a step while the one before it still runs, which "
        "hides the time of the scheduler. Then the token that ends A is not back when the next step is decided: choose "
        "it above the film, and D starts at {late}, {later} step later. Here the freeing is the end of `update`, not "
        "the beginning of `schedule` as in a course; between the two no block is given out, so it is the same order.",
    ),
    choice="The next step is decided",
    variants=(
        Variant(
            "when the result is back", "D starts at {start}, in the step after A's last.", lambda: _run_example(False)
        ),
        Variant(
            "one step ahead",
            "D starts at {late}: A's last token came too late for the step before.",
            lambda: _run_example(True),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "The scheduler frees finished requests before it gives blocks to others. Why does this order matter?",
            (
                Answer(
                    "Their blocks can be used by requests that are admitted in the same step.",
                    "At {start} D starts in the blocks that A has just released. In any other order they would lie "
                    "idle for a step, and a running request might be preempted although blocks are about to be free.",
                    is_right=True,
                ),
                Answer(
                    "So that callers get their last tokens sooner.",
                    "A token is returned when the step that sampled it is over, whatever the order of the next one.",
                ),
                Answer(
                    "Because a finished request could be preempted otherwise.",
                    "Only running requests are preempted. A finished one has nothing to lose; but its blocks help "
                    "others.",
                ),
                Answer(
                    "It does not: by the end of the step the same blocks are free.",
                    "By then the step's batch is decided. What could have started waits for the next one.",
                ),
            ),
        ),
    ),
)
