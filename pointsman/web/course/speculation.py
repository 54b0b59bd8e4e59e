"""Lesson: drafts, which are verified in the step that computes the request's next token."""

from __future__ import annotations

from functools import partial

import numpy as np

from pointsman.core import Request
from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant, millis
from pointsman.web.course.stage import Run, Stage, next_token

DRAFTS, OUTPUT = 3, 24


def _run_example(num_right: int | None) -> Run:
    """Run two requests. In each proposal the first `num_right` drafts equal the tokens that the model samples; None: no
    drafts."""

    def draft(request: Request, most: int) -> list[int]:
        tokens, found = request.all_token_ids, list[int]()
        for place in range(most):
            token = next_token(tokens)
            found.append(token if place < (num_right or 0) else token + 1)
            tokens = np.append(tokens, token)
        return found

    stage = Stage(
        num_blocks=16,
        max_num_seqs=2,
        num_draft_tokens=0 if num_right is None else DRAFTS,
        drafter=None if num_right is None else draft,
    )
    stage.add("A", 20, max_tokens=OUTPUT)
    stage.add("B", 12, max_tokens=OUTPUT)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    none, right, one, wrong = runs
    verified = sum(request.num_draft_tokens for request in one.requests.values())
    accepted = sum(request.num_accepted_tokens for request in one.requests.values())
    return {
        "output": OUTPUT,
        "drafts": DRAFTS,
        "row": right.tokens(1)["A"],
        "first": Moment(1, 1, "A"),
        "plain": Moment(1, 0, "A"),
        "gained": right.known(2, "A") - right.known(1, "A"),
        "gained_one": one.known(2, "A") - one.known(1, "A"),
        "second": Moment(2, 2, "A"),
        "rejected": DRAFTS + 1 - (one.known(2, "A") - one.known(1, "A")),
        "equal": sum(
            run.requests[name].output_token_ids.tolist() == none.requests[name].output_token_ids.tolist()
            for run in runs
            for name in "AB"
        ),
        "outputs": 2 * len(runs),
        "verified": verified,
        "accepted": accepted,
        **{f"steps_{name}": run.num_steps for name, run in zip(("none", "right", "one", "wrong"), runs, strict=True)},
        **{
            f"time_{name}": millis(run.seconds)
            for name, run in zip(("none", "right", "one", "wrong"), runs, strict=True)
        },
        **{
            f"computed_{name}": run.num_computed
            for name, run in zip(("none", "one", "wrong"), (none, one, wrong), strict=True)
        },
    }


LESSON = Lesson(
    title="Speculation",
    paragraphs=(
        "A step that decodes two tokens takes hardly less time than one that computes eight, so a proposer may guess. "
        "It proposes drafts: tokens that may follow. At {first} A computes {row} tokens, its newest one and {drafts} "
        "drafts, and the model says for each what it would have sampled there. All were right, so the step yields "
        "{gained} tokens; at {plain} without drafts it yields one. {output} tokens a request take {steps_right} steps "
        "instead of {steps_none}, {time_right} instead of {time_none}.",
        "The first wrong draft ends it: what comes after it was computed for a text that does not exist. If only the "
        "first draft is right, a step yields {gained_one} tokens, that draft and the one sampled after it. See "
        "{second}: the {rejected} others are rejected, which is a subtraction from the computed tokens; no block "
        "moves. Of {verified} verified drafts {accepted} are accepted, and the run takes {steps_one} steps.",
        "The output is the same in all variants: {equal} of {outputs} outputs are equal, token for token. So drafts "
        "can cost time, never text. If all are wrong the run takes {steps_wrong} steps as without, and computes "
        "{computed_wrong} tokens instead of {computed_none}: {time_wrong} instead of {time_none}. Drafts take budget "
        "only after every request has its own token, so none pays for the guesses of another.",
    ),
    choice="Drafts",
    variants=(
        Variant("none", "{steps_none} steps, {time_none}.", partial(_run_example, None)),
        Variant("all right", "{steps_right} steps, {time_right}.", partial(_run_example, DRAFTS)),
        Variant(
            "the first right",
            "{steps_one} steps, {time_one}; {computed_one} tokens computed.",
            partial(_run_example, 1),
        ),
        Variant(
            "all wrong",
            "{steps_wrong} steps, {time_wrong}; {computed_wrong} tokens computed.",
            partial(_run_example, 0),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "Of {drafts} drafts the first is right, the second wrong, and the third is the model's token after the "
            "wrong one. How many tokens does the step yield?",
            (
                Answer(
                    "{gained_one}",
                    "The accepted draft, and the token that the model samples in the place of the wrong one.",
                    is_right=True,
                ),
                Answer(
                    "3",
                    "The third draft follows a token that is not in the text, so it counts for nothing.",
                ),
                Answer(
                    "1",
                    "The step yields one token even if every draft is wrong; here the first draft is accepted too.",
                ),
                Answer(
                    "{row}",
                    "So many are computed. The step's yield ends at the first wrong draft.",
                ),
            ),
        ),
    ),
    stated=("3", "1"),
)
