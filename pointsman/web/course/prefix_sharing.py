"""Lesson: prompts that begin alike share blocks."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

SYSTEM, OWN, BLOCK = 70, 20, 16


def _run_example(caches: bool = True, stamped: bool = False) -> Run:
    """Run A and B, which arrive together, and C, which arrives later. All begin with the same system prompt; if
    `stamped`, each has its own time stamp before it."""
    stage = Stage(num_blocks=32, max_num_seqs=4, enable_prefix_caching=caches)
    system = stage.prompt(SYSTEM)
    for name, step in (("A", 0), ("B", 0), ("C", 4)):
        stamp = stage.prompt(1) if stamped else []
        own = stage.prompt(OWN - len(stamp))
        stage.add(name, [*stamp, *system, *own], max_tokens=12, step=step)
    stage.add("D", system[: BLOCK * (SYSTEM // BLOCK)], max_tokens=4, step=24)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    run, off, stamped = runs
    together, late = run.starts("A")[0], run.starts("C")[0]
    return {
        "system": SYSTEM,
        "own": OWN,
        "together": Moment(together, 0, "B"),
        "a_tokens": run.tokens(together)["A"],
        "b_tokens": run.tokens(together)["B"],
        "cached": run.cached("B")[0],
        "blocks": run.cached("B")[0] // BLOCK,
        "not_shared": SYSTEM - run.cached("B")[0],
        "late": Moment(late, 0, "C"),
        "references": int(run.state(late).num_references().max()),
        "in_use": int((run.state(late).num_references() > 0).sum()),
        "in_use_off": int((off.state(late).num_references() > 0).sum()),
        "late_off": Moment(late, 1, "C"),
        "again": Moment(run.starts("D")[0], 0, "D"),
        "d_prompt": run.requests["D"].num_prompt_tokens,
        "d_cached": run.cached("D")[0],
        "computed": run.num_computed,
        "computed_off": off.num_computed,
        "computed_stamped": stamped.num_computed,
        "c_stamped": stamped.cached("C")[0],
        "stamped": Moment(stamped.starts("C")[0], 2, "C"),
    }


LESSON = Lesson(
    title="Prefix sharing",
    paragraphs=(
        "The prompts of A, B and C are a system prompt of {system} tokens, the same for all, and {own} tokens of their "
        "own. The KV of a token depends on nothing but the tokens up to it, so equal beginnings have equal KV. At "
        "{together} A computes {a_tokens} tokens and B, in the same step, only {b_tokens}: the other {cached} are in "
        "blocks that A writes. At {late} C shares them too; a shared block counts {references} references.",
        "Whole blocks are shared. Of the {system} common tokens {cached} fill {blocks} blocks; the other {not_shared} "
        "lie in a block with the request's own, which no other request can use. With the cache {in_use} blocks are in "
        "use at {late}, without it {in_use_off} (see {late_off} of that film). When a request finishes, its blocks are "
        "free and still findable: the green ones. At {again} D arrives after all have finished, and finds them.",
        "Sharing begins with the first token and ends with the first difference. Let each prompt begin with one token "
        "of its own, a time stamp say: at {stamped} C finds {c_stamped} tokens, and {computed_stamped} tokens are "
        "computed in all, as without a cache ({computed_off}); with the common part first it is {computed}. And one "
        "token is always computed: D has {d_prompt} tokens, all of them in cached blocks, and uses {d_cached}, since "
        "its last token must be computed to sample the next.",
    ),
    choice="Prompts",
    variants=(
        Variant(
            "common part first", "B and C find {cached} tokens each; {computed} are computed in all.", _run_example
        ),
        Variant(
            "no prefix cache",
            "Nothing is shared; {computed_off} tokens are computed.",
            partial(_run_example, caches=False),
        ),
        Variant(
            "a time stamp first",
            "The first token differs, so nothing after it is shared; {computed_stamped} tokens are computed.",
            partial(_run_example, stamped=True),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "Each prompt has a long instruction, and the present time in it. Where should the time stand?",
            (
                Answer(
                    "After the instruction.",
                    "The equal part comes first and is shared; nothing after the first difference is.",
                    is_right=True,
                ),
                Answer(
                    "Before the instruction.",
                    "Then the first block of every prompt differs, and the instruction behind it is computed every "
                    "time: at {stamped} C finds {c_stamped} tokens.",
                ),
                Answer(
                    "It makes no difference: the tokens of the instruction are the same.",
                    "Their KV is not: it depends on all tokens before them. A block is found by its content and by "
                    "everything in front of it.",
                ),
            ),
        ),
    ),
)
