"""Lesson: blocks, and the token at which a request needs another block."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BLOCK, LENGTHS, OUTPUT = 16, (31, 32, 33), 20


def _run_example(length: int) -> Run:
    stage = Stage(num_blocks=8, max_num_seqs=2)
    stage.add("A", length, max_tokens=OUTPUT)
    return stage.run()


def _growth_steps(run: Run) -> list[int]:
    """The steps, after the first, in which A gets a block."""
    sizes = [len(run.table(step, "A")) for step in range(run.num_steps)]
    return [step for step in range(1, run.num_steps) if sizes[step] > sizes[step - 1]]


def _compute_figures(runs: list[Run]) -> Figures:
    below, exact, above = runs
    step = _growth_steps(exact)[0]
    return {
        "block": BLOCK,
        "below": LENGTHS[0],
        "exact": LENGTHS[1],
        "above": LENGTHS[2],
        "first_below": len(below.table(0, "A")),
        "first_exact": len(exact.table(0, "A")),
        "first_above": len(above.table(0, "A")),
        "start": Moment(0, 1, "A"),
        "grows": Moment(step, 1, "A"),
        "known": exact.known(step, "A"),
        "remainder": exact.known(step, "A") % BLOCK,
        "grown": len(exact.table(step, "A")),
        "grows_below": Moment(_growth_steps(below)[0], 0, "A"),
        "known_below": below.known(_growth_steps(below)[0], "A"),
        "last_fit": Moment(_growth_steps(below)[0] - 1, 0, "A"),
        "known_fit": below.known(_growth_steps(below)[0] - 1, "A"),
        "grows_above": Moment(_growth_steps(above)[0], 2, "A"),
        "known_above": above.known(_growth_steps(above)[0], "A"),
    }


LESSON = Lesson(
    title="Blocks, and when a request needs another",
    paragraphs=(
        "The KV of a token takes a slot in a block of {block} tokens, and a request holds whole blocks: its table. "
        "Look at KV pool at {start}: a prompt of {exact} tokens fills {first_exact} blocks to the last slot. By the "
        "end of that step A has its first output token, and still {first_exact} blocks: a token that has been sampled "
        "has no KV yet. The next step computes it, and that needs a slot.",
        "So the third block comes at {grows}, when {known} tokens are known. A compact engine checks just this: `len % "
        "block_size == 1`, is the newest token the first of a new block? Here {known} % {block} is {remainder}. It "
        "looks like an error, as one expects 0. But at a length of {exact}, remainder 0, the last slot was just taken, "
        "and no block is needed yet. The token after it needs the block.",
        "Choose a prompt of {below}: at {last_fit} the {known_fit} known tokens fit exactly, and at {grows_below} with "
        "{known_below} the block is added. With {above} the prompt itself needs {first_above} blocks at once, and the "
        "next comes only at {grows_above}, with {known_above} tokens. A running request asks for one block in {block} "
        "steps; in the other steps it cannot run out of memory, so it cannot cause a preemption.",
    ),
    choice="Prompt tokens",
    variants=tuple(
        Variant(f"{length} tokens", shows, partial(_run_example, length))
        for length, shows in zip(
            LENGTHS,
            (
                "{first_below} blocks; one more at {grows_below}, with {known_below} known tokens.",
                "{first_exact} blocks, full; one more at {grows}, with {known} known tokens.",
                "{first_above} blocks; one more at {grows_above}, with {known_above} known tokens.",
            ),
            strict=True,
        )
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "Blocks have {block} tokens; the length of a request counts its newest sampled token. At which length does "
            "its next step need another block?",
            (
                Answer(
                    "{known}",
                    "{known} % {block} is {remainder}: the step computes token number {known}, the first one of block "
                    "number {grown}.",
                    is_right=True,
                ),
                Answer(
                    "{exact}",
                    "The step computes token number {exact}, which takes the last slot of block number {first_exact}, "
                    "and the request has that block.",
                ),
                Answer(
                    "{below}",
                    "There is still a free slot in block number {first_below} for the token after this one.",
                ),
                Answer(
                    "At every length: each token needs memory.",
                    "Each token needs a slot, and {block} slots come at once, as a block.",
                ),
            ),
        ),
    ),
    stated=("31", "32", "33", "0", "1"),
)
