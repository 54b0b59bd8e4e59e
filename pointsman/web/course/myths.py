"""Lesson: three beginners' beliefs about schedulers, after a course on nano-vLLM."""

from __future__ import annotations

from functools import partial

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

BLOCKS, ENOUGH = 9, 32


def _run_example(num_blocks: int) -> Run:
    """Run three requests that arrive and finish at different times."""
    stage = Stage(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=32)
    stage.add("A", 30, max_tokens=44)
    stage.add("B", 20, max_tokens=10, step=8)
    stage.add("C", 44, max_tokens=24, step=12)
    return stage.run()


def _steps_with_changes(run: Run) -> list[int]:
    """The steps whose requests differ from the requests of the previous step."""
    return [step for step in range(1, run.num_steps) if run.tokens(step).keys() != run.tokens(step - 1).keys()]


def _compute_figures(runs: list[Run]) -> Figures:
    short, large = runs
    (preempted,) = short.preemptions()
    mixed = short.starts("C")[0]
    changed = _steps_with_changes(short)
    state = short.state(mixed).requests
    equal = [
        short.requests[name].output_token_ids.tolist() == large.requests[name].output_token_ids.tolist()
        for name in "ABC"
    ]
    return {
        "steps": short.num_steps,
        "changed": len(changed),
        "first": Moment(changed[0], 0),
        "second": Moment(changed[1], 0),
        "third": Moment(changed[2], 0),
        "preempted": Moment(preempted.step, 0, "C"),
        "resumed": Moment(short.starts("C")[1], 0, "C"),
        "kept": short.state(preempted.step).requests[short.names.index("C")].num_generated_tokens,
        "end": Moment(short.end("C"), 0),
        "end_large": Moment(large.end("C"), 1),
        "output": short.requests["C"].num_output_tokens,
        "equal": sum(equal),
        "requests": len(equal),
        "mixed": Moment(mixed, 0),
        "a_token": state[short.names.index("A")].num_generated_tokens + 1,
        "b_token": state[short.names.index("B")].num_generated_tokens + 1,
        "c_chunk": short.tokens(mixed)["C"],
        "c_prompt": short.requests["C"].num_prompt_tokens,
        "b_end": Moment(short.end("B"), 0),
        "a_end": Moment(short.end("A"), 0),
        "enough": ENOUGH,
    }


LESSON = Lesson(
    title="Three myths",
    paragraphs=(
        "“The scheduler makes a plan once, at the start.” There is no plan: it cannot know when a request ends, or "
        "what arrives. Each of these {steps} steps was decided by itself, from what was true then. Most are like the "
        "one before, as nothing happened. In {changed} the requests of the batch are others: at {first} B has come, at "
        "{second} C, at {third} B is gone.",
        "“A preempted request fails.” C loses its blocks at {preempted}, resumes at {resumed} and is done at {end}; in "
        "a pool of {enough} blocks, where it is not preempted, at {end_large}. That is all its caller notices. The "
        "course says that the model generates the same tokens again. It need not: the {kept} tokens that C had are "
        "kept, and only their KV is computed again. All {output} of its tokens, and those of the others, are equal in "
        "both pools ({equal} of {requests} outputs).",
        "“In a continuous batch all start and finish together.” That is a static batch. Look at {mixed}: A decodes its "
        "token number {a_token}, B its number {b_token}, and of C's {c_prompt} prompt tokens the first {c_chunk} are "
        "computed, all in one forward pass. They began in different steps, and B is done at {b_end}, A at {a_end}, C "
        "at {end}.",
    ),
    choice="Pool",
    variants=(
        Variant("9 blocks", "C is preempted at {preempted} and done at {end}.", partial(_run_example, BLOCKS)),
        Variant("32 blocks", "No request is preempted; C is done at {end_large}.", partial(_run_example, ENOUGH)),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "A request was preempted while a caller read its stream. What does the caller see?",
            (
                Answer(
                    "A pause, and then the next token.",
                    "Its tokens are kept, so the stream continues where it stopped: after {kept} tokens comes the next "
                    "one.",
                    is_right=True,
                ),
                Answer(
                    "An error; the client has to try again.",
                    "Preemption exists so that no request fails when memory runs out.",
                ),
                Answer(
                    "The text from its beginning, a second time.",
                    "Its tokens were not discarded, so none is sampled twice. Only KV is computed again.",
                ),
                Answer(
                    "A different text from there on.",
                    "The next token depends on the tokens before it, and these are the same: {equal} of {requests} "
                    "outputs are equal in both pools.",
                ),
            ),
        ),
        Question(
            "How many steps ahead does the scheduler know its batches?",
            (
                Answer(
                    "None: it decides each step when it comes.",
                    "A token that ends a request, an arrival, an abort: each may change the next step.",
                    is_right=True,
                ),
                Answer(
                    "Until the shortest request in the batch is done.",
                    "When that is, is known only if its length is. Any token may be the one that ends a text; and "
                    "requests arrive in between.",
                ),
                Answer(
                    "Until all requests of the batch are done.",
                    "That is a static batch.",
                ),
            ),
        ),
    ),
    stated=("9", "32"),
)
