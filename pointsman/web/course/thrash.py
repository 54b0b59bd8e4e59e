"""Lesson: thrash, the watermark, and the four responses to a rising preemption counter."""

from __future__ import annotations

from functools import partial
from typing import Any

from pointsman.web.course.lesson import Answer, Figure, Figures, Lesson, Moment, Question, Variant, millis, percent
from pointsman.web.course.stage import Run, Stage

REQUESTS, BLOCKS, WATERMARK, SEQS, BUDGET, SMALL_BUDGET = 32, 48, 0.15, 5, 512, 64
_NAMES = ("plain", "mark", "seqs", "budget", "more")


def _run_example(**settings: Any) -> Run:
    """Run requests with prompts of three or four blocks that grow to seven or nine blocks; a new request arrives every
    second step."""
    values = {"num_blocks": BLOCKS, "max_num_seqs": 16, "max_num_batched_tokens": BUDGET, **settings}
    stage = Stage(**values)
    for index in range(REQUESTS):
        stage.add(f"r{index + 1}", 36 + 5 * (index % 4), max_tokens=60 + 7 * (index % 5), step=2 * index)
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    plain, mark = runs[:2]
    found: dict[str, Figure] = {}
    for name, run in zip(_NAMES, runs, strict=True):
        ttfts = [run.ttft(request) for request in run.requests]
        found[f"n_{name}"] = len(run.preemptions())
        found[f"share_{name}"] = percent(run.num_recomputed / run.num_computed)
        found[f"ttft_{name}"] = millis(sum(ttfts) / len(ttfts))
        found[f"time_{name}"] = millis(run.seconds)
    first = plain.preemptions()[0]
    counts = {name: len(plain.preemptions(name)) for name in plain.requests}
    worst = max(counts, key=lambda name: counts[name])
    held = next(wait for wait in mark.waits() if wait.reason == "watermark")
    state = mark.state(held.step)
    free = BLOCKS - int((state.num_references() > 0).sum())
    return {
        **found,
        "blocks": BLOCKS,
        "requests": REQUESTS,
        "first": Moment(first.step, 0, first.request_id),
        "victim": first.request_id,
        "steps": plain.num_steps,
        "rate": percent(len({one.step for one in plain.preemptions()}) / plain.num_steps),
        "worst": worst,
        "times": counts[worst],
        "last": Moment(plain.preemptions(worst)[-1].step, 0, worst),
        "held": Moment(held.step, 1, held.request_id),
        "held_id": held.request_id,
        "free": free,
        "reserve": int(WATERMARK * BLOCKS),
        "watermark": WATERMARK,
        "seqs": SEQS,
        "budget": SMALL_BUDGET,
    }


_SHOWS = (
    "{n_%s} preemptions; {share_%s} of the computed tokens are recomputed; mean TTFT {ttft_%s}; all is done after "
    "{time_%s}."
)

LESSON = Lesson(
    title="Thrash, the watermark, and four responses",
    paragraphs=(
        "Admission sees what a request has, not what it will become. Here {requests} requests arrive in a pool of "
        "{blocks} blocks; most start small, and all grow. The first preemption is that of {victim} at {first}. Victims "
        "resume into a pool that is soon full again: {worst} is preempted {times} times, the last time at {last}. That "
        "is thrash: {n_plain} preemptions in {steps} steps, and {share_plain} of all computed tokens are computed "
        "again. (On nearly every step, says a document; here it is {rate} of them.)",
        "A watermark keeps a share of the pool free of admissions, while something runs. With {watermark} that is "
        "{reserve} blocks: at {held} there are {free} free ones, and {held_id} waits for the watermark. Running "
        "requests may use the reserve, as it is meant for their growth. Admission stops before the pool is full, so "
        "there is a gap between the two. The same load then has {n_mark} preemptions.",
        "A preemption counter that rises has four answers. Raise the watermark: {n_mark} instead of {n_plain}. "
        "Requests wait longer: mean TTFT {ttft_mark} instead of {ttft_plain}, and the run ends after {time_mark} "
        "instead of {time_plain}. Lower the number of sequences (here to {seqs}): {n_seqs}, but mean TTFT "
        "{ttft_seqs}, end after {time_seqs}. Lower the token budget (to {budget}): {n_budget}, next to nothing, as "
        "it bounds what a step computes and not what requests hold. Add capacity (twice the blocks): {n_more}, end "
        "after {time_more}, and more memory to pay for.",
    ),
    choice="Response",
    variants=(
        Variant("none", _SHOWS.replace("%s", "plain"), _run_example),
        Variant("a watermark", _SHOWS.replace("%s", "mark"), partial(_run_example, watermark=WATERMARK)),
        Variant("fewer sequences", _SHOWS.replace("%s", "seqs"), partial(_run_example, max_num_seqs=SEQS)),
        Variant(
            "a smaller budget",
            _SHOWS.replace("%s", "budget"),
            partial(_run_example, max_num_batched_tokens=SMALL_BUDGET),
        ),
        Variant("twice the blocks", _SHOWS.replace("%s", "more"), partial(_run_example, num_blocks=2 * BLOCKS)),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "`vllm:num_preemptions` rises steadily. What do you try first?",
            (
                Answer(
                    "A watermark.",
                    "Of the settings that help, it costs least: {n_mark} preemptions instead of {n_plain}, mean TTFT "
                    "{ttft_mark} instead of {ttft_plain}, end of the run after {time_mark} instead of {time_plain}.",
                    is_right=True,
                ),
                Answer(
                    "A smaller token budget.",
                    "It hardly changes what requests hold: {n_budget} preemptions instead of {n_plain}. It helps "
                    "against long steps.",
                ),
                Answer(
                    "Far fewer sequences.",
                    "That ends the preemptions, but fewer requests run at once: mean TTFT {ttft_seqs} instead of "
                    "{ttft_plain}, end of the run after {time_seqs} instead of {time_plain}. Try a watermark first.",
                ),
                Answer(
                    "A larger queue, so that no request is refused.",
                    "Waiting requests hold no blocks. The queue is not where the memory goes.",
                ),
            ),
        ),
        Question(
            "A running request needs a block, and only the watermark's blocks are free. What happens?",
            (
                Answer(
                    "It gets one.",
                    "The reserve is for running requests. It raises the bar for admissions alone.",
                    is_right=True,
                ),
                Answer(
                    "A request is preempted, so that the reserve stays free.",
                    "Then the reserve would cause what it is there to prevent.",
                ),
                Answer(
                    "It waits a step.",
                    "A running request that lacks a block leads to a preemption; but here blocks are free for it.",
                ),
            ),
        ),
    ),
)
