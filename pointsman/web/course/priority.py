"""Lesson: priority, priority preemption, and starvation."""

from __future__ import annotations

from functools import partial
from typing import Any

from pointsman.web.course.lesson import Answer, Figures, Lesson, Moment, Question, Variant
from pointsman.web.course.stage import Run, Stage

SLOTS, URGENT, EVERY = 2, 16, 4


def _run_example(**settings: Any) -> Run:
    """Run two requests of low priority, a third that waits, and a stream of urgent requests that fills both slots."""
    stage = Stage(max_num_seqs=SLOTS, num_blocks=64, **settings)
    for name in ("patient-1", "patient-2", "patient-3"):
        stage.add(name, 32, max_tokens=24, priority=5, tenant="patient")
    for index in range(URGENT):
        stage.add(
            f"urgent-{index + 1}", 16, max_tokens=2 * EVERY, priority=0, tenant="urgent", step=EVERY * (index + 1)
        )
    return stage.run()


def _compute_figures(runs: list[Run]) -> Figures:
    fcfs, priority, calm, fair = runs
    displaced = priority.preemptions()[0]
    last = f"urgent-{URGENT}"
    return {
        "slots": SLOTS,
        "urgent": URGENT,
        "every": EVERY,
        "patient_number": fcfs.requests["patient-1"].priority,
        "urgent_number": fcfs.requests["urgent-1"].priority,
        "waits": Moment(EVERY, 0, "urgent-1"),
        "served": Moment(fcfs.starts("urgent-1")[0], 0, "urgent-1"),
        "displaces": Moment(displaced.step, 1, displaced.request_id),
        "victim": displaced.request_id,
        "lost": displaced.lost,
        "resumes": Moment(priority.starts(displaced.request_id)[1], 1, displaced.request_id),
        "starved": Moment(priority.starts("patient-3")[0], 1, "patient-3"),
        "starved_calm": Moment(calm.starts("patient-3")[0], 2, "patient-3"),
        "fcfs_start": Moment(fcfs.starts("patient-3")[0], 0, "patient-3"),
        "fair_start": Moment(fair.starts("patient-3")[0], 3, "patient-3"),
        "fair_urgent": Moment(fair.starts("urgent-1")[0], 3, "urgent-1"),
        "calm_urgent": Moment(calm.starts("urgent-1")[0], 2, "urgent-1"),
        "last_urgent": Moment(priority.end(last), 1, last),
        "last_fair": Moment(fair.end(last), 3, last),
    }


LESSON = Lesson(
    title="Priority and starvation",
    paragraphs=(
        "There are {slots} slots. Three patient requests have priority {patient_number}; from {waits} on an urgent one "
        "of priority {urgent_number} comes every {every} steps (a smaller number is more urgent). Under `fcfs` the "
        "first of them starts at {served}, when the patient ones are done. Under `priority` it does not wait: at "
        "{displaces} {victim} is preempted for it, which is called priority preemption, and loses {lost} tokens. The "
        "victim is the least urgent request, and of equals the one that was admitted last.",
        "Now follow the patient ones. {victim} resumes at {resumes}, when the stream of {urgent} urgent requests has "
        "come to its end, and patient-3, which came before all of them, starts at {starved} instead of {fcfs_start}. "
        "Were the stream endless, they would wait forever: that is starvation. Without priority preemption the running "
        "requests stay, the first urgent request starts at {calm_urgent}, and patient-3 starves all the same, until "
        "{starved_calm}.",
        "Every order here states its bound: what may start before a request that came earlier. Under `fcfs` nothing "
        "may; under `priority` everything more urgent, without end. Between them is, for one, `fair`: the tenant with "
        "the least service is next. The first urgent request starts at {fair_urgent} and patient-3 at {fair_start}. "
        "The price is paid by the stream: its last request is done at {last_fair} and not at {last_urgent}.",
    ),
    choice="Order",
    variants=(
        Variant("fcfs", "In order of arrival: patient-3 starts at {fcfs_start}.", _run_example),
        Variant(
            "priority",
            "Urgent requests preempt patient ones; patient-3 starts at {starved}.",
            partial(_run_example, order="priority"),
        ),
        Variant(
            "priority, without preemption",
            "Urgent requests start first, and preempt nothing; patient-3 starts at {starved_calm}.",
            partial(_run_example, order="priority", displace=False),
        ),
        Variant(
            "fair",
            "Urgent and patient requests are two tenants, served alternately; patient-3 starts at {fair_start}.",
            partial(_run_example, order="fair"),
        ),
    ),
    figures=_compute_figures,
    questions=(
        Question(
            "Under `priority`, patient requests never finish while an urgent stream fills the server. Is that an error "
            "of the scheduler?",
            (
                Answer(
                    "No: the order is kept as it was asked for. An order with a bound on waiting helps, or more "
                    "capacity.",
                    "`priority` promises nothing to the less urgent. With `fair` patient-3 starts at {fair_start}, in "
                    "the middle of the stream.",
                    is_right=True,
                ),
                Answer(
                    "Yes: a preempted request goes to the front of the queue, so it must be next.",
                    "To the front of those of its urgency. More urgent ones are before it.",
                ),
                Answer(
                    "Yes: priority preemption should be off.",
                    "That protects running requests. Waiting ones starve as before: patient-3 starts at "
                    "{starved_calm}.",
                ),
            ),
        ),
    ),
    stated=("3", "1"),
)
