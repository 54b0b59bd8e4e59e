"""The course: recomputes the statements of its lessons, from the films alone."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import Request, RequestRefused, RequestStatus, Scheduler, SchedulerConfig
from pointsman.core.observe.film_format import Op
from pointsman.web.course.build import LESSONS, course_page, perform_all
from pointsman.web.course.lesson import Lesson, Moment, Performed
from pointsman.web.course.stage import STEP_TIME, Run

QUIZ = (
    ("Why batches wait", "What happens to GPU utilisation between steps 11 and 500?"),
    ("The order of a step", "Why does this order matter?"),
    ("Preemption", "goes to the front of the waiting queue, not to the end. Why?"),
)
"""The questions in the documents on which the course is based, each as (lesson, words of the question)."""


@pytest.fixture(scope="module")
def course() -> dict[str, Performed]:
    return {one.lesson.title: one for one in perform_all()}


def templates(lesson: Lesson) -> Iterator[str]:
    yield from lesson.paragraphs
    yield from (variant.shows for variant in lesson.variants)
    yield from (variant.name for variant in lesson.variants)
    for question in lesson.questions:
        yield question.text
        for answer in question.answers:
            yield from (answer.text, answer.why)


def names_in(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


# ------------------------------------------------------------------ all lessons


@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.title for lesson in LESSONS])
def test_each_lesson_has_its_paragraphs_variants_and_questions(lesson: Lesson, course: dict[str, Performed]) -> None:
    one = course[lesson.title]
    assert len(lesson.paragraphs) == 3 and 2 <= len(lesson.variants) <= 5 and lesson.questions
    for paragraph in lesson.paragraphs:
        assert len(one.text(paragraph).split()) < 95, "short paragraphs"
    assert set().union(*map(names_in, templates(lesson))) == set(one.figures), "each figure is used, and is there"
    assert len({variant.name for variant in lesson.variants}) == len(lesson.variants)
    for run in one.runs:
        assert len(run.film) < 16_384 and run.opened.is_complete and run.num_steps
    for question in lesson.questions:
        assert sum(answer.is_right for answer in question.answers) == 1 and len(question.answers) >= 3
        assert len({one.text(answer.text) for answer in question.answers}) == len(question.answers)
        explained = {one.text(answer.why) for answer in question.answers}
        assert len(explained) == len(question.answers) and all(len(why.split()) >= 3 for why in explained)


@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.title for lesson in LESSONS])
def test_numbers_in_lessons_are_figures_or_listed_quotations(lesson: Lesson) -> None:
    """Numbers that no run computes are listed as quotations from a document, or as names."""
    for template in templates(lesson):
        literal = "".join(text for text, *_ in string.Formatter().parse(template))
        numbers = set(re.findall(r"[A-Z]?\d[\d,.]*\d|[A-Z]?\d", re.sub(r"`[^`]*`|patient-\d", "", literal)))
        assert numbers <= set(lesson.stated), template


@pytest.mark.parametrize("lesson", LESSONS, ids=[lesson.title for lesson in LESSONS])
def test_every_moment_names_a_step_and_request_of_its_film(lesson: Lesson, course: dict[str, Performed]) -> None:
    one = course[lesson.title]
    for name, figure in one.figures.items():
        if isinstance(figure, Moment):
            run = one.runs[figure.variant]
            run.state(figure.step)
            assert figure.request is None or figure.request in run.names, name


@pytest.mark.parametrize(("title", "words"), QUIZ)
def test_lessons_ask_the_questions_of_the_document(title: str, words: str, course: dict[str, Performed]) -> None:
    one = course[title]
    assert any(words in one.text(question.text) for question in one.lesson.questions)


def test_two_builds_of_the_course_are_equal(course: dict[str, Performed]) -> None:
    """Equal pages can be compared and cached."""
    pages = [course_page(performed) for performed in (list(course.values()), perform_all())]
    assert pages[0] == pages[1]
    assert len(pages[0]) < 2_000_000
    assert not re.search(r"""(?:src|href)=["'](?!#)""", pages[0]), "it loads nothing"


def test_the_documentation_names_every_lesson() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "take_the_course.md").read_text()
    rows = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    assert rows == ["lesson", "---", *(lesson.title for lesson in LESSONS)]


# ------------------------------------------------------------------ single lessons


def test_batching_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Why batches wait"]
    static, continuous = one.runs[:2]
    rows = [[output.num_rows for output in run.outputs] for run in one.runs]
    for run, each in zip(one.runs, rows, strict=True):
        assert all(len(run.state(step).running) == each[step] for step in (0, 9, 10, 11, 250, 499))
    used = [sum(each) / 4000 for each in rows]
    assert used == [0.1425, 1.0, 1.0]
    assert round(used[0], 2) == 0.14 != 0.23, "not what the course says"
    assert (one.figures["used_static"], one.figures["used_continuous"]) == ("14.2 %", "100 %")
    assert rows[0] == [8] * 10 + [1] * 490 and one.figures["tail"] == "12.5 %"
    assert {len(static.state(step).waiting) for step in (9, 10, 250, 499)} == {88}, "waiting stays as it is"
    assert static.known(499, "A1") == 16 + 499, "its last token comes with step 499: the next batch starts at 500"
    assert continuous.starts("B2") == [10] and one.figures["sooner"] == 490
    assert len(continuous.starts("B2")) == 1 and "B2" in continuous.tokens(10) and "B2" not in static.tokens(10)
    finished = {run: sum(event.op is Op.FINISHED for _, event in run.events) for run in (static, continuous)}
    assert one.figures["served_static"] == finished[static] + 1  # A1's end comes after the last step
    assert one.figures["served_continuous"] == finished[continuous] + len(ending(continuous, 499))


def ending(run: Run, step: int) -> list[str]:
    """The requests whose last token a step samples."""
    state = run.state(step).requests
    return [
        name
        for name in run.tokens(step)
        if state[run.names.index(name)].num_generated_tokens + 1 == run.requests[name].max_tokens
    ]


def status(run: Run, step: int, name: str) -> str:
    return run.state(step).requests[run.names.index(name)].status


def test_states_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Four states, and what else a request waits for"]
    plain, grammar, remote, parts, preempted = one.runs
    at = {name: figure.step for name, figure in one.figures.items() if isinstance(figure, Moment)}
    assert status(plain, at["waiting"], "R") == "waiting" and list(plain.tokens(at["waiting"])) == ["A"]
    assert status(plain, at["prefill"], "R") == "running"
    assert (plain.tokens(at["prefill"]), plain.tokens(at["second"])) == ({"R": 32}, {"R": 16})
    assert not plain.outputs[at["prefill"]].samples[0] and plain.outputs[at["second"]].samples[0]
    assert {plain.tokens(step)["R"] for step in range(at["decoding"], plain.num_steps)} == {1}
    assert plain.end("R") == at["finished"]
    assert not {"PREFILL", "DECODING"} & {state.name for state in RequestStatus}
    for run, name in ((grammar, "waiting_for_grammar"), (remote, "waiting_for_remote_kvs")):
        assert status(run, 0, "R") == name and run.starts("A") == [0], "it blocks nothing"
        assert run.names.index("R") < run.names.index("A"), "and came before"
        assert run.starts("R") == [at["ready"]]
    assert status(parts, at["part_done"], "R") == "waiting_for_streaming_req"
    assert status(parts, at["part_done"] - 1, "R") == "running"
    assert parts.starts("R") == [0, at["next_part"]]
    assert status(preempted, at["preempted"], "R") == "preempted"
    assert preempted.starts("R")[1] == at["resumed"]
    assert preempted.known(at["resumed"], "R") > 40, "with all its tokens"
    assert preempted.tokens(at["resumed"])["R"] + preempted.cached("R")[1] == preempted.known(at["resumed"], "R")
    scheduler = Scheduler(SchedulerConfig(num_blocks=2, max_model_len=64))
    with pytest.raises(RequestRefused):
        scheduler.add(Request("long", range(60), arrival_time=0.0, max_tokens=4), 0.0)


def test_step_order_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["The order of a step"]
    run, ahead = one.runs
    start = run.starts("D")[0]
    assert "A" in run.tokens(start - 1) and ending(run, start - 1) == ["A"]
    assert [event.op for step, event in run.events if step == start and event.op in (Op.FINISHED, Op.ADMITTED)] == [
        Op.FINISHED,
        Op.ADMITTED,
    ]
    reused = set(run.table(start, "D")) & set(run.table(start - 1, "A"))
    assert len(reused) == one.figures["reused"] > 0
    (wait,) = run.waits("D")
    assert (wait.reason, wait.missing, wait.step) == ("blocks", one.figures["missing"], 1)
    assert len(run.table(start, "D")) == len(run.table(1, "A")) and one.figures["held"] == len(run.table(1, "A"))
    assert ahead.starts("D") == [start + one.figures["later"]], "a step later, where the result comes later"
    assert one.figures["later"] == 1


def test_budget_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    """The run computes the numbers of the document on vLLM, and the numbers with which the lesson corrects it."""
    one = course["Tokens, not requests: the budget"]
    run, short, small = one.runs
    step = one.figures["example"].step
    assert run.tokens(step) == {"A": 3, "B": 1, "C": 200, "D": 744}
    assert [one.figures[f"after_{name}"] for name in "abcd"] == [2045, 2044, 1844, 1100]
    assert one.figures["total"] == 948 and run.cached("D") == [256] == [one.figures["cached"]]
    assert [(wait.step, wait.reason) for wait in run.waits("E")] == [(step, "sequence_limit")]
    assert run.known(step, "E") <= one.figures["after_d"]
    computed = dict(zip("ABC", run.outputs[step].num_computed_tokens.tolist(), strict=False))
    assert computed == {"A": 149, "B": 200, "C": 300}
    assert (one.figures["a_known"], one.figures["a_computed"], one.figures["drafts"]) == (150, 149, 2)
    assert run.outputs[step].num_draft_tokens.tolist() == [2, 0, 0, 0]
    assert short.waits("D")[0][2:] == ("blocks", 18, "C")
    assert sum(len(short.table(step, name)) for name in "ABC") == one.figures["held"] == 55
    assert (one.figures["free"], one.figures["d_blocks"]) == (100 - 55, -(-1000 // 16))
    assert not short.preemptions(), "nothing is preempted for a waiting request"
    assert short.starts("D") == [max(short.end(name) for name in "ABC")]
    cut = [small.tokens(step), small.tokens(step + 1)]
    assert sum(cut[0].values()) == 512 and cut[0]["D"] + cut[1]["D"] == 744
    assert (cut[0]["D"], cut[1]["D"]) == (one.figures["cut"], one.figures["left"])


def test_chunked_prefill_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Chunked prefill"]
    itls, ttfts = ([f(run) for run in one.runs] for f in (lambda r: r.longest_itl("A"), lambda r: r.ttft("long")))
    assert all(before > after for before, after in pairwise(itls)), "smaller chunks, shorter ITL"
    assert all(before < after for before, after in pairwise(ttfts)), "and a longer TTFT"
    assert itls[0] == pytest.approx(STEP_TIME.per_step + 2004 * STEP_TIME.per_token)
    for run, budget in zip(one.runs, (2048, 1024, 512, 256, 128), strict=True):
        assert run.config.max_num_batched_tokens == budget
        assert all({"A", "B", "C", "D"} <= run.tokens(step).keys() for step in range(40)), "a token each, every step"
    assert one.runs[0].tokens(10)["long"] == 2000
    chunks = [run.tokens(step)["long"] for run in one.runs[2:3] for step in range(10, 14)]
    assert chunks[:3] == [508] * 3 and sum(chunks) == 2000 and one.figures["chunks"] == 4
    assert one.figures["last"].step == 13 and one.runs[2].outputs[13].samples.all()
    for name, run in (("whole", one.runs[0]), ("middle", one.runs[2]), ("small", one.runs[4])):
        assert one.figures[name] == f"{1e3 * run.longest_itl('A'):.0f} ms"
        assert one.figures[f"ttft_{name}"] == f"{1e3 * run.ttft('long'):.0f} ms"


def test_blocks_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Blocks, and when a request needs another"]
    for run, length in zip(one.runs, (31, 32, 33), strict=True):
        sizes = [len(run.table(step, "A")) for step in range(20)]
        grows = [step for step in range(1, 20) if sizes[step] > sizes[step - 1]]
        assert sizes[0] == -(-length // 16)
        assert all(run.known(step, "A") % 16 == 1 for step in grows), "len % block_size == 1"
        others = set(range(1, 20)) - set(grows)
        assert all(run.known(step, "A") % 16 != 1 for step in others)
        assert all(after - before == 16 for before, after in pairwise(grows))
    assert (one.figures["known"], one.figures["remainder"], one.figures["grown"]) == (33, 1, 3)
    assert [one.figures[name].step for name in ("grows_below", "grows", "grows_above")] == [2, 1, 16]
    assert (one.figures["known_fit"], one.figures["known_below"], one.figures["known_above"]) == (32, 33, 49)


def test_prefix_sharing_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Prefix sharing"]
    run, off, stamped = one.runs
    assert run.cached("B") == run.cached("C") == [64] and run.starts("A") == run.starts("B") == [0]
    assert run.tokens(0) == {"A": 90, "B": 26}
    late = one.figures["late"].step
    shared = set(run.table(late, "A")) & set(run.table(late, "B")) & set(run.table(late, "C"))
    assert len(shared) == one.figures["blocks"] == 4
    assert run.state(late).num_references()[list(shared)].tolist() == [one.figures["references"]] * 4
    in_use = [int((each.state(late).num_references() > 0).sum()) for each in (run, off)]
    assert in_use == [one.figures["in_use"], one.figures["in_use_off"]] and in_use[0] < in_use[1]
    again = one.figures["again"].step
    assert not run.state(again - 1).running and run.state(again - 1).is_cached.any(), "free, and findable"
    assert run.cached("D") == [48] and run.known(again, "D") == 64 and run.tokens(again) == {"D": 16}
    assert stamped.cached("B") == stamped.cached("C") == [0] and off.cached("B") == [0]
    assert run.num_computed < off.num_computed
    assert (one.figures["computed"], one.figures["computed_off"]) == (run.num_computed, off.num_computed)
    assert one.figures["computed_stamped"] == stamped.num_computed


def test_preemption_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Preemption"]
    run, without, large = one.runs
    ((step, victim, lost, _),) = run.preemptions()
    before, after = run.state(step - 1), run.state(step)
    assert victim == run.names[before.running[-1]] == "C", "the one that was admitted last"
    assert int((before.num_references() > 0).sum()) == 13, "the pool was full"
    for name in "AB":
        assert run.known(step, name) % 16 == 1 and len(run.table(step, name)) == len(run.table(step - 1, name)) + 1
    assert (len(run.table(step - 1, "C")), one.figures["taken"]) == (one.figures["released"], 2)
    assert int((after.num_references() == 0).sum()) == one.figures["free"] >= one.figures["d_blocks"]
    assert one.figures["d_blocks"] == len(run.table(run.starts("D")[0], "D"))
    assert "D" in [run.names[number] for number in before.waiting], "D waited before"
    assert run.names[after.blocker] == "C", "and is behind C now: C is at the front of the queue"
    assert step < run.starts("C")[1] < run.starts("D")[0]
    assert lost == one.figures["lost"] == run.outputs[step - 1].num_computed_tokens[2] + 1
    resumed = run.starts("C")[1]
    assert run.cached("C")[1] == 80 == one.figures["cached"] and run.tokens(resumed)["C"] == one.figures["computes"]
    assert one.figures["recomputed"] == lost - 80 == run.num_recomputed
    assert without.cached("C") == [0, 0] and without.tokens(without.starts("C")[1])["C"] == lost + 1
    assert not large.preemptions() and one.figures["none"] == 0
    assert one.figures["later"] == run.end("C") - large.end("C") > 0
    generated = after.requests[2].num_generated_tokens
    assert run.known(resumed, "C") == 100 + generated and one.figures["generated"] == generated, "it keeps its tokens"
    outputs = [[each.requests[name].output_token_ids.tolist() for name in "ABCD"] for each in one.runs]
    assert outputs[0] == outputs[1] == outputs[2]


def test_thrash_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Thrash, the watermark, and four responses"]
    plain, mark, seqs, budget, more = one.runs
    numbers = [sum(event.op is Op.PREEMPTED for _, event in run.events) for run in one.runs]
    assert [one.figures[f"n_{name}"] for name in ("plain", "mark", "seqs", "budget", "more")] == numbers
    assert numbers[1] < numbers[0] / 2 and numbers[2] == 0 and numbers[4] < numbers[0] / 2, "what helps"
    assert abs(numbers[3] - numbers[0]) < numbers[0] / 8, "and what does next to nothing"
    assert mark.seconds < 1.05 * plain.seconds < seqs.seconds and more.seconds < 0.75 * plain.seconds
    mean = {run: sum(run.ttft(name) for name in run.requests) / 32 for run in one.runs}
    assert mean[plain] < mean[mark] < 0.6 * mean[seqs], "of the settings that help the watermark costs least"
    assert plain.seconds < mark.seconds, "but it is not free"
    assert len(plain.preemptions(one.figures["worst"])) == one.figures["times"] >= 2, "the same one again"
    held = one.figures["held"]
    reserve = one.figures["reserve"]
    assert [wait.reason for wait in mark.waits(held.request) if wait.step == held.step] == ["watermark"]
    free = [int((mark.state(step).num_references() == 0).sum()) for step in (held.step, held.step + 12)]
    assert free[0] == one.figures["free"] and free[1] < min(reserve, free[0]), "what runs may use it"
    assert len({one.step for one in plain.preemptions()}) < 0.2 * plain.num_steps, "not nearly every step"
    assert budget.config.max_num_batched_tokens < plain.config.max_num_batched_tokens


def test_priority_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Priority and starvation"]
    fcfs, priority, calm, fair = one.runs
    first = priority.preemptions()[0]
    assert first.request_id == "patient-2" and priority.starts("urgent-1") == [first.step] == [4]
    assert fcfs.starts("urgent-1") == [max(fcfs.end(f"patient-{number}") for number in (1, 2))]
    assert priority.names[priority.state(3).running[-1]] == "patient-2", "of equals the one that was admitted last"
    last = max(priority.starts(f"urgent-{number + 1}")[0] for number in range(16))
    assert priority.starts("patient-2")[1] > last and priority.starts("patient-3")[0] > last, "starvation"
    assert calm.starts("patient-3")[0] >= calm.starts("urgent-16")[0] and not calm.preemptions()
    assert fcfs.starts("patient-3") == [24], "in the order of arrival"
    assert fair.starts("urgent-1")[0] <= fair.starts("patient-3")[0] < last, "in the middle of the stream"
    assert fair.end("urgent-16") > priority.end("urgent-16"), "the price"
    assert not fair.preemptions()


def test_speculation_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Speculation"]
    none, right, first, wrong = one.runs
    outputs = [[run.requests[name].output_token_ids.tolist() for name in "AB"] for run in one.runs]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3] and one.figures["equal"] == one.figures["outputs"] == 8
    assert right.tokens(1) == {"A": 4, "B": 4} and right.known(2, "A") - right.known(1, "A") == 4
    assert first.known(2, "A") - first.known(1, "A") == 2 == one.figures["gained_one"]
    assert wrong.known(2, "A") - wrong.known(1, "A") == 1
    tables = [len(first.table(step, "A")) for step in range(first.num_steps)]
    assert tables == sorted(tables), "rejected drafts move no block"
    assert [run.num_steps for run in one.runs] == [24, 7, 13, 24]
    assert right.seconds < 0.4 * none.seconds and wrong.seconds > none.seconds
    drafts = [sum(r.num_draft_tokens for r in first.requests.values()), one.figures["verified"]]
    assert drafts[0] == drafts[1] and one.figures["accepted"] < one.figures["verified"]


def test_myths_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Three myths"]
    short, large = one.runs
    rows = [tuple(short.state(step).running) for step in range(short.num_steps)]
    changed = [step for step in range(1, len(rows)) if rows[step] != rows[step - 1]]
    assert len(changed) == one.figures["changed"]
    assert [short.starts("B")[0], short.starts("C")[0], short.end("B")] == changed[:3]
    assert [one.figures[name].step for name in ("first", "second", "third")] == changed[:3]
    (preempted,) = short.preemptions()
    assert preempted.request_id == "C" and not large.preemptions()
    assert short.end("C") > large.end("C"), "a longer wait"
    outputs = [[run.requests[name].output_token_ids.tolist() for name in "ABC"] for run in one.runs]
    assert outputs[0] == outputs[1] and len(outputs[0][2]) == one.figures["output"], "and the same output"
    assert short.known(short.starts("C")[1], "C") == 44 + one.figures["kept"]
    mixed = one.figures["mixed"].step
    assert short.tokens(mixed) == {"A": 1, "B": 1, "C": one.figures["c_chunk"]} and one.figures["c_chunk"] < 44
    assert [short.known(mixed, name) - short.requests[name].num_prompt_tokens for name in "AB"] == [
        one.figures["a_token"] - 1,
        one.figures["b_token"] - 1,
    ]
    assert len({short.end(name) for name in "ABC"}) == len({short.starts(name)[0] for name in "ABC"}) == 3


def test_explaining_lesson_matches_its_runs(course: dict[str, Performed]) -> None:
    one = course["Reading explain"]
    reasons = ["blocks", "sequence_limit", "budget", "parked"]
    assert [run.notes["C"].reason.value for run in one.runs] == reasons
    for run, name in zip(one.runs[:3], ("blocks", "slots", "budget"), strict=True):
        assert run.waits("C")[-1].reason == run.notes["C"].reason.value
        assert one.figures[f"c_{name}"] == run.notes["C"].sentence and run.notes["C"].sentence.startswith("C waits for")
        assert run.names[run.state(6).blocker] == "C"
    blocks, slots, budget, grammar = one.runs
    used = int((blocks.state(6).num_references() > 0).sum())
    assert one.figures["free"] == 11 - used
    assert one.figures["wanted"] == len(blocks.table(blocks.starts("C")[0], "C")) == one.figures["missing"] + 11 - used
    assert blocks.starts("C") == [blocks.end(one.figures["first_done"])], "it starts when that one is done"
    assert slots.starts("C") == [min(slots.end("A"), slots.end("B"))] and budget.starts("C")[0] <= 8
    assert blocks.notes["D"].sentence == one.figures["behind"] and "behind C" in one.figures["behind"]
    assert one.figures["d_blocks"] == len(blocks.table(blocks.starts("D")[0], "D")) < 4
    assert grammar.starts("D")[0] < grammar.starts("C")[0], "it blocks nothing"


# ------------------------------------------------------------------ in a real browser


@pytest.fixture(scope="module")
def page_file(course: dict[str, Performed], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("course") / "course.html"
    path.write_text(course_page(list(course.values())), encoding="utf-8")
    return path


@pytest.fixture
def visit(open_page: Callable[..., Any], page_file: Path) -> Callable[..., Any]:
    """Opens the course."""
    return lambda where="", **options: open_page(page_file.as_uri() + where, **options)


EVERY_MOMENT = """async () => {
  const found = [];
  for (const button of [...document.querySelectorAll("#paragraphs .moment")]) {
    button.click();
    await opening;
    const chosen = view.chosen === null ? null : view.film.requests[view.chosen].id;
    found.push([button.textContent, at.variant, view.film.frames[view.frame].step, chosen, $("problem").hidden]);
  }
  return found;
}"""
EVERY_VARIANT = """async () => {
  const found = [];
  for (const option of [...$("variant").options]) {
    $("variant").value = option.value;
    $("variant").dispatchEvent(new Event("change"));
    await opening;
    found.push([option.textContent, $("shows").textContent, view.film.frames.length, view.film.hasBlocks]);
  }
  return found;
}"""
EVERY_ANSWER = """() => [...document.querySelectorAll("fieldset")].map((field) =>
  [...field.querySelectorAll("label")].map((label) => {
    label.click();
    return [label.textContent.trim(), field.querySelector("[role=status]").textContent];
  }))"""


@pytest.mark.e2e
def test_the_page_shows_every_lesson_variant_and_answer(
    visit: Callable[..., Any], course: dict[str, Performed]
) -> None:
    page = visit()
    answered = 0
    for number, one in enumerate(course.values()):
        lesson = one.lesson
        assert page.locator("#lesson").inner_text() == f"{number + 1}. {lesson.title}"
        assert page.locator("#paragraphs p").all_text_contents() == [
            one.text(text).replace("`", "") for text in lesson.paragraphs
        ]
        moments = [piece for text in lesson.paragraphs for piece in one.pieces(text) if isinstance(piece, Moment)]
        assert moments and page.evaluate(EVERY_MOMENT) == [
            [f"step {each.step}", each.variant, each.step, each.request, True] for each in moments
        ]
        assert page.evaluate(EVERY_VARIANT) == [
            [variant.name, one.text(variant.shows).replace("`", ""), len(run.opened.frames), True]
            for variant, run in zip(lesson.variants, one.runs, strict=True)
        ]
        assert page.evaluate(EVERY_ANSWER) == [
            [
                [
                    one.text(answer.text).replace("`", ""),
                    f"{'Right' if answer.is_right else 'Wrong'}. {one.text(answer.why)}".replace("`", ""),
                ]
                for answer in question.answers
            ]
            for question in lesson.questions
        ]
        answered += len(lesson.questions)
        assert page.locator("#progress").inner_text().startswith(f"{answered} of ")
        if number + 1 < len(course):
            page.click("#next")
    assert page.locator("#next").is_disabled()
    assert all("answered" in text for text in page.locator("#lessons li").all_text_contents())
    page.reload()
    assert page.locator("#progress").inner_text().startswith(f"{answered} of {answered} ")  # kept


def shown(page: Any) -> list[Any]:
    """Lesson and variant, from 0, the step, and the followed request, once the film is loaded."""
    found: list[Any] = page.evaluate("""async () => {
      await opening;
      const chosen = view.chosen === null ? null : view.film.requests[view.chosen].id;
      return [at.lesson, at.variant, view.film.frames[view.frame].step, chosen, opened];
    }""")
    assert found.pop() == f"film-{found[0]}-{found[1]}"
    return found


def in_lesson(page: Any, title: str) -> None:
    """Waits until a lesson is shown."""
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect(page.locator("#lesson")).to_have_text(title)


@pytest.mark.e2e
def test_the_course_works_with_keys_only(visit: Callable[..., Any]) -> None:
    """Open another lesson, a step, another variant, and answer a question, without a mouse."""
    page = visit("#lesson=7")
    page.locator("#contents summary").press("Enter")
    page.locator("#lessons a").nth(7).press("Enter")
    in_lesson(page, "8. Preemption")
    assert page.evaluate("document.activeElement.id") == "lesson", "screen readers continue there"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert shown(page) == [7, 0, 8, None]
    page.keyboard.press("ArrowRight")
    assert shown(page) == [7, 0, 9, None] and "#lesson=8&variant=1&step=9" in page.url
    page.locator("#variant").focus()
    page.keyboard.press("ArrowDown")
    assert shown(page) == [7, 1, 0, None]
    page.locator("fieldset input").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("[role=status]").first.inner_text().startswith("Wrong.")
    page.keyboard.press("ArrowUp")
    assert page.locator("[role=status]").first.inner_text().startswith("Right.")
    page.locator("#next").press("Enter")
    assert shown(page)[:2] == [8, 0]


@pytest.mark.e2e
def test_a_link_to_the_course_contains_lesson_and_step(visit: Callable[..., Any]) -> None:
    page = visit("#lesson=8&variant=2&step=9&request=C")
    assert shown(page) == [7, 1, 9, "C"]
    assert page.locator("[data-part=lifeTitle]").inner_text() == "The life of C"
    assert page.locator("#variant").input_value() == "1"
    page.goto(page.url.split("#")[0] + "#lesson=99&variant=x&step=-4&request=<b>")  # missing targets are ignored
    in_lesson(page, "13. Reading explain")
    assert shown(page) == [12, 0, 0, None] and page.locator("#problem").is_hidden()


@pytest.mark.e2e
@pytest.mark.parametrize(("lesson", "width", "scheme"), [(4, 360, "light"), (9, 360, "dark"), (9, 1280, "dark")])
def test_the_course_page_fits_and_is_accessible(
    visit: Callable[..., Any], lesson: int, width: int, scheme: str
) -> None:
    """No sideways scrolling at a phone's width, and nothing serious that axe-core finds, with a question answered."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(f"#lesson={lesson}", color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
    shown(page)
    page.locator("fieldset input").nth(1).check()
    page.locator("#contents summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []


@pytest.mark.e2e
def test_the_course_works_without_storage(visit: Callable[..., Any]) -> None:
    """A page that is a file may have no local storage; the progress is then lost when the page is closed."""
    page = visit()
    page.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('none') } })")
    page.reload()
    page.locator("fieldset input").first.check()
    assert page.locator("#progress").inner_text().startswith("1 of ")
    page.reload()
    assert page.locator("#progress").inner_text().startswith("0 of ")
