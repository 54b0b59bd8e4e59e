"""Lesson: preemption, the choice of the victim, its place in the queue, and the help of the cache."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BLOCKS, ENOUGH = 13, 24


def _run_example(num_blocks: int, caches: bool = True) -> Run:
    """Run A, B and C, which fill the pool, and D, which arrives while they run."""
    stage = Stage(num_blocks=num_blocks, max_num_seqs=4, enable_prefix_caching=caches)
    stage.add("A", 40, max_tokens=14)
    stage.add("B", 40, max_tokens=30)
    stage.add("C", 100, max_tokens=24)
    stage.add("D", 40, max_tokens=6, step=3)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    run, without, large = runs
    (preempted,) = run.preemptions("C")
    step, resumed = preempted.step, run.starts("C")[1]
    (again,) = without.preemptions("C")
    before = run.table(step - 1, "C")
    return {
        "blocks": BLOCKS,
        "full": Moment(step - 1, 0),
        "step": Moment(step, 0, "C"),
        "known": run.known(step, "A"),
        "released": len(before),
        "taken": sum(len(run.table(step, name)) - len(run.table(step - 1, name)) for name in "AB"),
        "free": BLOCKS - len(run.table(step, "A")) - len(run.table(step, "B")),
        "generated": run.state(step).requests[run.names.index("C")].num_generated_tokens,
        "lost": preempted.lost,
        "d_waits": Moment(step, 0, "D"),
        "d_blocks": len(run.table(run.starts("D")[0], "D")),
        "resumed": Moment(resumed, 0, "C"),
        "d_starts": Moment(run.starts("D")[0], 0, "D"),
        "cached": run.cached("C")[1],
        "computes": run.tokens(resumed)["C"],
        "recomputed": run.num_recomputed,
        "resumed_without": Moment(without.starts("C")[1], 1, "C"),
        "computes_without": without.tokens(without.starts("C")[1])["C"],
        "lost_without": again.lost,
        "enough": ENOUGH,
        "none": len(large.preemptions()),
        "later": run.end("C") - large.end("C"),
    }


LESSON = Lesson(
    title="Preemption",
    paragraphs=(
        "Running requests grow, and {blocks} blocks are all there is. At {full} the pool is full. At {step} A and B "
        "have {known} tokens, and each needs a block. Something has to be released: the request that was admitted last "
        "is preempted. That is C. (A course's listing preempts the request that asks; its prose says what happens "
        "here.) The oldest are kept, so there is always one that runs to its end. C releases {released} blocks; A and "
        "B take {taken} of them.",
        "C goes to the front of the queue. D has waited since before, and its {d_blocks} blocks would fit into the "
        "{free} that are now free; yet it waits behind C, at {d_waits}. C was admitted before, and at the end of "
        "the queue every later arrival would bypass it. It resumes at {resumed}, and D starts at {d_starts}.",
        "C keeps its {generated} generated tokens (the course discards them), and the caller notices nothing but a "
        "pause. Only the KV of {lost} tokens was released, and not even that is gone: free blocks keep their content "
        "until they are needed. At {resumed} C finds {cached} tokens in the cache and computes {computes}. Without the "
        "prefix cache it computes {computes_without} at {resumed_without}. With {enough} blocks there are {none} "
        "preemptions, and C finishes {later} steps sooner.",
    ),
    choice="Pool",
    variants=(
        Variant(
            "13 blocks",
            "C is preempted at {step} and resumes at {resumed} with {cached} cached tokens.",
            partial(_run_example, BLOCKS),
        ),
        Variant(
            "13 blocks, no prefix cache",
            "C loses {lost_without} tokens and computes all of them again at {resumed_without}.",
            partial(_run_example, BLOCKS, False),
        ),
        Variant("24 blocks", "The pool holds all four: {none} preemptions.", partial(_run_example, ENOUGH)),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "A preempted request goes to the front of the waiting queue, not to the end. Why?",
            (
                Answer(
                    "It was admitted before the waiting requests, and at the end all later arrivals would bypass it.",
                    "Order of arrival is kept, and its blocks are more likely to be cached still when it resumes soon.",
                    is_right=True,
                ),
                Answer(
                    "Its KV is still in its blocks, so it can continue at once.",
                    "Its blocks are free, and others may take them: A and B took {taken} of {released} at {step}. The "
                    "rest is found through the prefix cache, if there is one.",
                ),
                Answer(
                    "It is more urgent than the others.",
                    "Its priority does not change. It was preempted because it was admitted last.",
                ),
                Answer(
                    "So that it preempts the request that took its blocks.",
                    "A waiting request preempts nothing under first come, first served. C waits until enough blocks "
                    "are free.",
                ),
            ),
        ),
        Question(
            "What does a preempted request lose?",
            (
                Answer(
                    "Its blocks: the KV that others take before it resumes is computed again.",
                    "Here that is {recomputed} of {lost} tokens, and all of them without the prefix cache.",
                    is_right=True,
                ),
                Answer(
                    "The tokens that it has generated.",
                    "They are kept and are part of what is computed again, like a longer prompt. No token is generated "
                    "twice.",
                ),
                Answer(
                    "Nothing: its KV is copied to the memory of the CPU.",
                    "A document calls it that, but it is recomputation. Swapping is a mode of its own "
                    "(`preemption_mode`), and needs host memory.",
                ),
            ),
        ),
    ),
    stated=("13", "24"),
)
