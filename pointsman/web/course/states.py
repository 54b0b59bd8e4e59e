"""Lesson: the states of a request, and what it can wait for besides capacity."""

from __future__ import annotations

from pointsman.core import ParkReason
from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

_READY = 5
"""The step before which the resource of the parked request becomes available."""


def _run_plain() -> Run:
    """Run requests with one sequence slot, and a token budget that splits the prompt of R into two chunks."""
    stage = Stage(max_num_seqs=1, max_num_batched_tokens=32, num_blocks=16)
    stage.add("A", 16, max_tokens=3)
    stage.add("R", 48, max_tokens=4)
    return stage.run()


def _run_parked(reason: ParkReason) -> Run:
    stage = Stage(max_num_seqs=2, num_blocks=16)
    stage.add("R", 32, max_tokens=4, park=reason)
    stage.add("A", 16, max_tokens=8)
    stage.at(_READY, lambda: stage.scheduler.ready("R", stage.now))
    return stage.run()


def _run_prompt_parts() -> Run:
    stage = Stage(max_num_seqs=2, num_blocks=16)
    stage.add("R", 32, max_tokens=0, more_input=True)
    stage.add("A", 16, max_tokens=8)
    part = stage.prompt(20)
    stage.at(_READY, lambda: stage.scheduler.extend("R", part, stage.now, max_tokens=4))
    return stage.run()


def _run_preempted() -> Run:
    """Run A and R, which fill the pool. A is the first that needs another block, so R, which was admitted last, is
    preempted."""
    stage = Stage(max_num_seqs=2, num_blocks=5)
    stage.add("A", 30, max_tokens=8)
    stage.add("R", 40, max_tokens=8)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    plain, grammar, _, parts, preempted = runs
    (first,) = plain.starts("R")
    decoding = next(step for step in range(first, plain.num_steps) if plain.tokens(step)["R"] == 1)
    resumed = preempted.starts("R")[1]
    return {
        "prompt": plain.requests["R"].num_prompt_tokens,
        "waiting": Moment(0, 0, "R"),
        "prefill": Moment(first, 0, "R"),
        "chunk": plain.tokens(first)["R"],
        "rest": plain.tokens(first + 1)["R"],
        "second": Moment(first + 1, 0, "R"),
        "decoding": Moment(decoding, 0, "R"),
        "finished": Moment(plain.end("R"), 0),
        "parked": Moment(0, 1, "R"),
        "a_starts": Moment(grammar.starts("A")[0], 1, "A"),
        "ready": Moment(grammar.starts("R")[0], 1, "R"),
        "remote": Moment(0, 2, "R"),
        "part_done": Moment(next(step for step in range(9) if parts.state(step).parked), 3, "R"),
        "next_part": Moment(parts.starts("R")[1], 3, "R"),
        "preempted": Moment(preempted.preemptions("R")[0].step, 4, "R"),
        "resumed": Moment(resumed, 4, "R"),
    }


LESSON = Lesson(
    title="Four states, and what else a request waits for",
    paragraphs=(
        "A course names four states: WAITING, PREFILL, DECODING, FINISHED. Follow R: it waits at {waiting}, as A has "
        "the only slot. At {prefill} the first {chunk} of its {prompt} prompt tokens are computed, at {second} the "
        "other {rest}, and with these its first token is sampled. From {decoding} on it decodes a token a step; at "
        "{finished} it is finished. The scheduler keeps one state for the middle two, RUNNING: the number of computed "
        "tokens chases the number of known ones.",
        "vLLM has three more states in which a request waits for something other than capacity: for the compilation of "
        "its grammar (a document calls it WAITING_FOR_FSM), for KV from another machine, for more input of its caller. "
        "Choose them above the film. Such a request is parked beside the queue, so it blocks nothing: at {parked} R "
        "waits for its grammar, and A, which came later, starts at {a_starts}. When the grammar is there R is queued "
        "again, and starts at {ready}.",
        "PREEMPTED is a state of its own too: R ran, lost its blocks at {preempted}, and waits in the queue with all "
        "its tokens. At {resumed} it resumes, which is not the same as starting: the tokens that it generated are "
        "computed again with the prompt. And a request that could never run (longer than the pool, say) is refused "
        "when it is added; a document on vLLM calls that FINISHED_IGNORED.",
    ),
    choice="R waits for",
    variants=(
        Variant("a slot", "Waiting, prefill in two steps, decoding, finished.", _run_plain),
        Variant(
            "its grammar",
            "R is parked from {parked} on, and starts at {ready}.",
            lambda: _run_parked(ParkReason.GRAMMAR),
        ),
        Variant(
            "KV from elsewhere",
            "R is parked at {remote} until another machine has sent its KV.",
            lambda: _run_parked(ParkReason.REMOTE_KVS),
        ),
        Variant(
            "more input",
            "R's prompt comes in parts: the first is complete at {part_done}, the next one starts at {next_part}.",
            _run_prompt_parts,
        ),
        Variant("blocks, preempted", "R loses its blocks at {preempted} and resumes at {resumed}.", _run_preempted),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "The oldest request waits for its grammar. What do the requests behind it do?",
            (
                Answer(
                    "They start, if there is room for them.",
                    "A parked request is not in the queue, so it blocks nothing. It keeps its place by arrival for "
                    "when it is ready.",
                    is_right=True,
                ),
                Answer(
                    "They wait: first come, first served.",
                    "That holds in the queue, for requests that wait for capacity. A parked one waits for something "
                    "else: A starts at {a_starts}.",
                ),
                Answer(
                    "They start, and the oldest one goes to the end of the queue.",
                    "It loses no place: when it is ready, it is queued by its arrival.",
                ),
            ),
        ),
        Question(
            "Which of these does the scheduler store for a running request?",
            (
                Answer(
                    "How many tokens it has, and how many of them are computed.",
                    "Prefill or decoding follows from the two numbers, and a chunk of a prompt needs no state.",
                    is_right=True,
                ),
                Answer(
                    "Whether it is in PREFILL or in DECODING.",
                    "That is what a display derives. In one step a request may do both: at {second} it computes prompt "
                    "tokens and samples its first token.",
                ),
                Answer(
                    "Which chunk of its prompt comes next.",
                    "The next chunk begins where the computed tokens end, so nothing has to be kept.",
                ),
            ),
        ),
    ),
)
