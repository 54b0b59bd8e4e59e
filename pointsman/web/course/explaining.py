"""Lesson: reading `explain`: why a request waits, how much of which resource it lacks, and the holders."""

from __future__ import annotations

from typing import Any

from pointsman.core import Explanation, ParkReason
from pointsman.web.course.lesson import Answer, Figure, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

ASKED = 6
"""The last step that was decided before `explain` is called."""


def _make_stage(**settings: Any) -> Stage:
    """The stage of a variant; in every variant, `explain` is called for C and D after the same step."""
    stage = Stage(**{"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings})

    def ask() -> None:
        for name in ("C", "D"):
            stage.notes[name] = stage.scheduler.explain(name)

    stage.at(ASKED + 1, ask)
    return stage


def _run_without_blocks() -> Run:
    stage = _make_stage(num_blocks=11)
    stage.add("A", 60, max_tokens=12)
    stage.add("B", 60, max_tokens=18)
    stage.add("C", 60, max_tokens=6, step=3)
    stage.add("D", 10, max_tokens=6, step=4)
    return stage.run()


def _run_without_slots() -> Run:
    stage = _make_stage(max_num_seqs=2)
    stage.add("A", 20, max_tokens=10)
    stage.add("B", 20, max_tokens=16)
    stage.add("C", 20, max_tokens=6, step=3)
    stage.add("D", 20, max_tokens=6, step=4)
    return stage.run()


def _run_without_budget() -> Run:
    stage = _make_stage()
    stage.add("A", 20, max_tokens=12)
    stage.add("B", 200, max_tokens=6, step=5)
    stage.add("C", 60, max_tokens=6, step=5)
    stage.add("D", 20, max_tokens=6, step=6)
    return stage.run()


def _run_without_grammar() -> Run:
    stage = _make_stage()
    stage.add("A", 20, max_tokens=12)
    stage.add("C", 20, max_tokens=6, step=3, park=ParkReason.GRAMMAR)
    stage.add("D", 20, max_tokens=6, step=4)
    stage.at(ASKED + 3, lambda: stage.scheduler.ready("C", stage.now))
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    found: dict[str, Figure] = {}
    for index, (name, run) in enumerate(zip(("blocks", "slots", "budget", "grammar"), runs, strict=True)):
        found[f"c_{name}"] = run.notes["C"].sentence
        found[f"at_{name}"] = Moment(ASKED, index, "C")
        found[f"start_{name}"] = Moment(run.starts("C")[0], index, "C")
    of_c: Explanation = runs[0].notes["C"]
    return {
        **found,
        "missing": of_c.missing,
        "holder": of_c.holders[0].request_id,
        "held": of_c.holders[0].amount,
        "wanted": of_c.missing + runs[0].config.num_blocks - sum(holder.amount for holder in of_c.holders),
        "free": runs[0].config.num_blocks - sum(holder.amount for holder in of_c.holders),
        "d_slots": runs[1].notes["D"].sentence,
        "d_start": Moment(runs[3].starts("D")[0], 3, "D"),
        "behind": runs[0].notes["D"].sentence,
        "d_blocks": -(-runs[0].requests["D"].num_prompt_tokens // 16),
        "first_done": min(("A", "B"), key=runs[0].end),
    }


LESSON = Lesson(
    title="Reading explain",
    paragraphs=(
        "A counter cannot say why one request is stuck. `Scheduler.explain(id)` can; a server answers the same at `GET "
        "/v1/requests`. After {at_blocks} it says: “{c_blocks}” Read three parts. What it lacks: {missing} blocks, as "
        "it needs {wanted} and only {free} of the pool is free. Why: the reason. Which requests hold it, the largest "
        "share first: {holder} holds {held}. So it helps when {first_done} is done: C starts at {start_blocks}.",
        "The same request, other limits. All slots taken: “{c_slots}” More blocks would not help. The step full: "
        "“{c_budget}” That is over soon: C starts at {start_budget}. The reason names the first limit that keeps the "
        "request out; more of another resource does not help.",
        "D came after C. In the first film it would fit, as it needs {d_blocks} block. But: “{behind}” Under first "
        "come, first served the first request that does not fit blocks the queue. Otherwise small requests could "
        "bypass it forever. So look for the blocker. And where C waits for a grammar (“{c_grammar}”), it blocks "
        "nothing: D starts at {d_start}.",
    ),
    choice="C waits for",
    variants=(
        Variant("blocks", "After {at_blocks}: “{c_blocks}” It starts at {start_blocks}.", _run_without_blocks),
        Variant("a sequence slot", "After {at_slots}: “{c_slots}” It starts at {start_slots}.", _run_without_slots),
        Variant("the budget", "After {at_budget}: “{c_budget}” It starts at {start_budget}.", _run_without_budget),
        Variant("its grammar", "After {at_grammar}: “{c_grammar}” It starts at {start_grammar}.", _run_without_grammar),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "`explain` says: “{d_slots}” What lets D start sooner?",
            (
                Answer(
                    "What lets C start: another sequence slot, or the end of a running request.",
                    "D waits behind C, and C waits for a slot. Remove what the blocker lacks.",
                    is_right=True,
                ),
                Answer(
                    "More KV blocks.",
                    "Neither of the two lacks blocks. The reason names the resource: sequence slots.",
                ),
                Answer(
                    "A shorter prompt for D.",
                    "D is not checked: the queue is blocked before it.",
                ),
                Answer(
                    "Aborting D and sending it again.",
                    "It would come back to the end of the queue.",
                ),
            ),
        ),
    ),
)
