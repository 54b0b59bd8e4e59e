"""Lesson: a long prompt in chunks, and the shorter time between tokens."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant, millis
from pointsman.web.course.stage import STEP_TIME, Run, Stage

PROMPT, BUDGETS, ARRIVES = 2000, (2048, 1024, 512, 256, 128), 10


def _run_example(budget: int) -> Run:
    """Run four requests that decode when a request with a long prompt arrives."""
    stage = Stage(num_blocks=192, max_num_batched_tokens=budget)
    for name in "ABCD":
        stage.add(name, 16, max_tokens=40)
    stage.add("long", PROMPT, max_tokens=5, step=ARRIVES)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    whole, middle, small = runs[0], runs[2], runs[-1]
    return {
        "prompt": PROMPT,
        "decoding": whole.outputs[0].num_rows,
        "before": millis(whole.token_times("A")[5] - whole.token_times("A")[4]),
        "per_step": millis(STEP_TIME.per_step),
        "per_token": f"{1e3 * STEP_TIME.per_token:.2f} ms",
        "stall": Moment(ARRIVES, 0, "A"),
        "whole": millis(whole.longest_itl("A")),
        "first": Moment(ARRIVES, 2, "long"),
        "middle_budget": BUDGETS[2],
        "chunk": middle.tokens(ARRIVES)["long"],
        "chunks": _num_chunks(middle),
        "last": Moment(ARRIVES + _num_chunks(middle) - 1, 2, "long"),
        "middle": millis(middle.longest_itl("A")),
        "ttft_whole": millis(whole.ttft("long")),
        "ttft_middle": millis(middle.ttft("long")),
        "small_budget": BUDGETS[-1],
        "small": millis(small.longest_itl("A")),
        "ttft_small": millis(small.ttft("long")),
        "small_chunks": _num_chunks(small),
        **{f"itl_{budget}": millis(run.longest_itl("A")) for budget, run in zip(BUDGETS, runs, strict=True)},
        **{f"ttft_{budget}": millis(run.ttft("long")) for budget, run in zip(BUDGETS, runs, strict=True)},
    }


def _num_chunks(run: Run) -> int:
    """Number of steps that compute the long prompt."""
    return sum(run.tokens(step).get("long", 0) > 1 for step in range(run.num_steps))


_SHOWS = "Longest time between two tokens of A: {itl_%d}; time to the first token of the long prompt: {ttft_%d}."

LESSON = Lesson(
    title="Chunked prefill",
    paragraphs=(
        "Everything in a step is done when the step is done. In this film a step takes {per_step} and {per_token} for "
        "each token, so {decoding} requests that decode get a token every {before}. Then a prompt of {prompt:,} tokens "
        "arrives. At {stall} all of it is computed in one step, and A waits {whole} for its next token: the user sees "
        "the output stop.",
        "With a budget of {middle_budget} tokens a step the prompt is cut. Running requests are served first, so at "
        "{first} they have their {decoding} tokens and the prompt gets the {chunk} that remain; it is complete at "
        "{last}, after {chunks} chunks. The longest wait of A is now {middle}. No part of the scheduler knows about "
        "chunks: a prompt that does not fit is computed in part, and the next step continues.",
        "The price is paid by the long prompt: its first token comes after {ttft_middle} instead of {ttft_whole}, and "
        "after {ttft_small} with a budget of {small_budget} ({small_chunks} steps, each with its own {per_step}). A "
        "document recommends chunks to shorten the time to the first token. They shorten the time between the tokens "
        "of the others (ITL); the prompt's own TTFT grows. Try the budgets: you choose a point on that curve.",
    ),
    choice="Tokens a step",
    variants=tuple(
        Variant(
            f"{budget:,}, {'the whole prompt' if index == 0 else 'chunks'}",
            _SHOWS % (budget, budget),
            partial(_run_example, budget),
        )
        for index, budget in enumerate(BUDGETS)
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "Users complain that output stutters whenever a long prompt arrives. What helps?",
            (
                Answer(
                    "A smaller token budget for a step.",
                    "The longest step bounds the time between tokens: {whole} with the whole prompt, {small} with a "
                    "budget of {small_budget}. A target for it can be set directly (`target-itl`).",
                    is_right=True,
                ),
                Answer(
                    "A larger budget, so that the prompt is out of the way sooner.",
                    "That is the stutter: one long step, at whose end all others get their next token.",
                ),
                Answer(
                    "More KV blocks.",
                    "No request lacks blocks here. The pool bounds what is held, the budget what a step computes.",
                ),
                Answer(
                    "Decoding requests before prompts.",
                    "They are first already: they run. It does not help, since the step ends for all rows at once.",
                ),
            ),
        ),
    ),
    stated=tuple(f"{budget:,}" for budget in BUDGETS),
)
