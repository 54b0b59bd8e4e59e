"""The page that plays a film, in a real browser."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import Op, read_header, write_header
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.player import MAX_FILM, page_of
from pointsman.web.story import Teller, life_of, lives_of, meaning_of, preemptions_of
from pointsman.web.timeline import timeline_of
from tests.web.test_page_reader import longest_itl

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
pytestmark = pytest.mark.e2e
HTML = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def film() -> bytes:
    """A short pool: requests wait, are preempted and share prefixes. The id of the last
    request is HTML markup."""
    trace = [TraceRequest(0.05 * index, 60 + 7 * (index % 9), 40 + index % 30) for index in range(40)]
    config = SchedulerConfig(
        num_blocks=60, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=96, full_sequence_must_fit=False
    )
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    simulate(OpenLoop(trace), config, LinearStepTime(per_step=6e-3, per_token=8e-5), films=[recorder])
    recorder.close()
    return file.getvalue()


@pytest.fixture
def visit(open_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of a film."""

    def go(film: bytes | None, where: str = "", title: str = "run", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page_of(film, title), encoding="utf-8")
        return open_page(path.as_uri() + where, **options)

    return go


def told(page: Any) -> list[str]:
    return page.locator("[data-part=decided] li").all_inner_texts()


def at_step(page: Any, step: int) -> None:
    playwright.expect(page.locator("[data-part=number]")).to_have_value(str(step))


def go_to(page: Any, step: int) -> None:
    page.fill("[data-part=number]", str(step))
    page.press("[data-part=number]", "Enter")
    at_step(page, step)


def test_the_player_shows_the_states_of_the_film(visit: Callable[..., Any], film: bytes) -> None:
    """Sentences, rows, waiting requests and blocks at several steps, some of them done with other steps in one call."""
    found, page = Film(io.BytesIO(film)), visit(film)
    teller = Teller(found)
    longest = max(range(len(found.frames)), key=lambda index: found.frames[index].num_steps)
    for index, place in ((0, 0), (7, 0), (len(found.frames) // 2, 0), (longest, 0), (longest, 1), (longest, -1)):
        frame = found.frames[index]
        step = frame.step_id + place % frame.num_steps
        state = found.state_at(index, step)
        go_to(page, step)
        if sentences := teller.decided(index) if step == frame.step_id else ["every running request decodes a token"]:
            assert told(page) == sentences
        where = page.locator("[data-part=decidedTitle]").inner_text()
        assert where.startswith(f"Decided for step {step}, at {state.time:.3f} s")
        for number, text in zip(state.running, page.locator("[data-part=running] .why").all_inner_texts(), strict=True):
            one = state.requests[number]
            assert text.startswith(f"{one.num_computed_tokens} of ")
            assert text.endswith(f"computed, {one.num_generated_tokens} generated")
        assert page.locator("[data-part=running] .name").all_inner_texts() == [
            teller.name(number) for number in state.running
        ]
        waiting = page.locator("[data-part=waiting] li").all_inner_texts()
        assert len(waiting) == len(state.waiting) + len(state.parked)
        if state.blocker is not None:
            assert waiting[len(state.skipped)].startswith(
                f"{teller.name(state.blocker)} {teller.why(state, state.blocker)}"
            )
        used = int((state.num_references() > 0).sum())
        assert page.locator("[data-part=poolTitle]").inner_text().startswith(f"KV pool: {used} of 60 blocks in use")


def test_a_title_may_contain_the_placeholder_of_a_page_part(visit: Callable[..., Any], film: bytes) -> None:
    page = visit(film, title="{script}.film {view}")
    at_step(page, 0)
    playwright.expect(page.locator("#title")).to_have_text("{script}.film {view}")


def test_buttons_and_keys_move_by_single_steps(visit: Callable[..., Any], film: bytes) -> None:
    """Several steps that were done in one call are also shown one by one."""
    found, page = Film(io.BytesIO(film)), visit(film)
    steps = [frame.step_id + place for frame in found.frames for place in range(frame.num_steps)]
    run = next(frame.step_id for frame in found.frames if frame.num_steps > 3)
    at_step(page, 0)
    page.click("[data-part=step]")
    at_step(page, 1)
    for key, place in (
        ("ArrowRight", 2),
        ("Shift+ArrowRight", 12),
        ("ArrowLeft", 11),
        ("End", len(steps) - 1),
        ("ArrowRight", len(steps) - 1),
        ("Home", 0),
    ):
        page.locator("[data-part=line]").press(key)
        at_step(page, steps[place])
    go_to(page, run + 1)
    for key, step in (("ArrowRight", run + 2), ("ArrowLeft", run + 1), ("ArrowLeft", run), ("ArrowLeft", run - 1)):
        page.locator("[data-part=line]").press(key)
        at_step(page, step)
    page.click("[data-part=reset]")
    page.click("[data-part=step]")
    page.click("[data-part=back]")
    at_step(page, 0)
    page.select_option("[data-part=speed]", "50")
    page.locator("[data-part=line]").press(" ")
    playwright.expect(page.locator("[data-part=play]")).to_have_text("⏸ Pause")
    playwright.expect(page.locator("[data-part=number]")).not_to_have_value("0")
    playwright.expect(page.locator("[data-part=number]")).to_have_value(re.compile(r"\d\d+"))
    page.click("[data-part=play]")
    stopped = page.input_value("[data-part=number]")
    page.wait_for_timeout(120)
    assert page.input_value("[data-part=number]") == stopped
    page.click("[data-part=reset]")
    at_step(page, 0)


def test_dragging_on_the_time_line_moves_to_the_step(visit: Callable[..., Any], film: bytes) -> None:
    found, page = Film(io.BytesIO(film)), visit(film)
    box = page.locator("[data-part=line]").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=5)
    page.mouse.up()
    step = int(page.input_value("[data-part=number]"))
    time = found.state_at(found.frame_of_step(step), step).time
    assert time == pytest.approx(0.6 * found.end, abs=0.03 * found.end)


def test_a_followed_request_shows_its_life_and_waits(visit: Callable[..., Any], film: bytes) -> None:
    """A request is found by its id; its life and waits equal the film's; its moments lead to their steps."""
    found, page = Film(io.BytesIO(film)), visit(film)
    number = max(range(len(found.requests)), key=lambda one: sum(life_of(found, one).waited.values()))
    life, name = life_of(found, number), found.requests[number].request_id
    page.locator("[data-part=line]").press("/")
    assert page.evaluate("document.activeElement.dataset.part") == "find"
    page.keyboard.type(name)
    page.keyboard.press("Enter")
    playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text(f"The life of {name}")
    assert f"waited {sum(life.waited.values()):.3f} s" in page.locator("[data-part=waited]").inner_text()
    assert len(page.locator("[data-part=moments] li").all()) == len(life.moments)
    page.locator("[data-part=moments] button").first.click()
    assert told(page).count(life.moments[0][1]) == 1
    assert f"request={name}" in page.url
    page.keyboard.press("Escape")
    playwright.expect(page.locator("[data-part=life]")).to_be_hidden()
    page.locator("[data-part=find]").fill("nobody")
    page.locator("[data-part=find]").press("Enter")
    playwright.expect(page.locator("#problem")).to_have_text("no request is called nobody")


def test_preemptions_are_found_by_key_mark_and_list(visit: Callable[..., Any], film: bytes) -> None:
    """Keys go to the next and the previous preemption; a mark on the time line leads to its step; the list has all."""
    found, page = Film(io.BytesIO(film)), visit(film)
    preempted = [event.op is Op.PREEMPTED for event in found.events(0, None)].count(True)
    frames = [
        index
        for index in range(len(found.frames))
        if any(event.op is Op.PREEMPTED for event in found.events(index, index + 1))
    ]
    steps = [found.frames[index].step_id for index in frames]
    page.keyboard.press("p")
    at_step(page, steps[0])
    page.click("[data-part=preemption]")
    at_step(page, steps[1])
    page.keyboard.press("P")
    at_step(page, steps[0])
    page.keyboard.press("P")
    playwright.expect(page.locator("#problem")).to_have_text("no preemption before this step")
    line = page.locator("[data-part=line]").bounding_box()
    last = frames[-1]
    x = line["width"] * found.frames[last].time / found.end
    page.mouse.move(line["x"] + x, line["y"] + 104)
    assert " is preempted: " in page.locator("[data-part=line]").get_attribute("title")
    page.mouse.click(line["x"] + x + 1, line["y"] + 104)
    at_step(page, steps[-1])
    page.click("[data-part=most] summary")
    entries = page.locator("[data-part=preemptions] li")
    playwright.expect(entries).to_have_count(preempted)
    costs = [one.cost() for one in preemptions_of(found)]
    assert [text.rpartition("; ")[2] for text in entries.all_inner_texts()] == costs
    recomputed = sum(one.num_recomputed_tokens or 0 for one in preemptions_of(found))
    title = page.locator("[data-part=preemptionsTitle]")
    playwright.expect(title).to_have_text(f"{preempted} preemptions, {recomputed:,} tokens recomputed")
    page.locator("[data-part=preemptions] button").nth(0).click()
    at_step(page, steps[0])
    assert any(" is preempted: " in one for one in told(page))


def test_the_player_lists_the_longest_waits(visit: Callable[..., Any], film: bytes) -> None:
    found, page = Film(io.BytesIO(film)), visit(film)
    page.click("[data-part=most] summary")
    rows = page.locator("[data-part=waits] tr")
    longest = sorted(lives_of(found), key=lambda life: -life.total_waited)[:20]
    playwright.expect(rows).to_have_count(21)
    for place in (0, 1, 19):
        cells = rows.nth(place + 1).locator("th, td").all_inner_texts()
        assert cells[1] == f"{longest[place].total_waited:.3f} s"
    page.locator("[data-part=waits] button").first.click()
    playwright.expect(page.locator("[data-part=life]")).to_be_in_viewport()
    name = found.requests[longest[0].number].request_id
    playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text(f"The life of {name}")
    reasons = page.locator("[data-part=reasons] li").all_inner_texts()
    expected = [
        f"{seconds:.3f} s {reason.replace('_', ' ')}: {meaning_of(reason)}"
        for reason, seconds in longest[0].waited.items()
    ]
    assert reasons == expected


def test_arrow_keys_move_the_focus_between_blocks(visit: Callable[..., Any], film: bytes) -> None:
    page = visit(film, "#step=30")
    page.focus("[data-part=pool]")
    block = page.locator("[data-part=block]")
    page.keyboard.press("ArrowRight")
    playwright.expect(block).to_contain_text("block 1: ")
    page.keyboard.press("ArrowRight")
    playwright.expect(block).to_contain_text("block 2: ")
    page.keyboard.press("ArrowLeft")
    playwright.expect(block).to_contain_text("block 1: ")
    page.keyboard.press("ArrowDown")
    playwright.expect(block).not_to_contain_text("block 1: ")
    at_step(page, 30)


def test_counters_and_log_cover_the_steps_so_far(visit: Callable[..., Any], film: bytes) -> None:
    """Counters count up to the shown step. In the log, each sentence about an earlier step leads to that step."""
    found, page = Film(io.BytesIO(film)), visit(film)
    index = 2 * len(found.frames) // 3
    step, events = found.frames[index].step_id, list(found.events(0, index + 1))
    go_to(page, step)
    names, values = (page.locator(f"[data-part=counters] {tag}").all_inner_texts() for tag in ("dt", "dd"))
    counters = dict(zip(names, (int(value.replace(",", "")) for value in values), strict=True))
    assert counters["steps"] == step + 1 and counters["refused"] == 0
    assert counters["preemptions"] == sum(event.op is Op.PREEMPTED for event in events) > 0
    assert counters["finished"] == sum(event.op is Op.FINISHED for event in events) > 0
    prefilled, decoded = counters["tokens prefilled"], counters["tokens decoded"]
    timeline = timeline_of(found)[0]
    assert prefilled == timeline.num_prefill_tokens[: index + 1].sum()
    assert decoded == (timeline.num_decode_tokens * timeline.num_steps)[: index + 1].sum()
    teller = Teller(found)
    last = max(frame for frame in range(index) if teller.decided(frame))
    first = page.locator("[data-part=log] li").first
    assert first.inner_text() == f"step {found.frames[last].step_id}{teller.decided(last)[-1]}"
    first.locator("button").press("Enter")
    at_step(page, found.frames[last].step_id)
    assert told(page) == teller.decided(last)


def test_diagram_shows_the_states_and_moves_of_requests(visit: Callable[..., Any], film: bytes) -> None:
    """The states of requests, the moves of a step, and the responses to memory pressure."""
    found, page = Film(io.BytesIO(film)), visit(film)
    ops = [[event.op for event in found.events(index, index + 1)] for index in range(len(found.frames))]
    index = next(index for index, one in enumerate(ops) if one.count(Op.PREEMPTED) == 1)
    before = sum(one.count(Op.PREEMPTED) for one in ops[: index + 1])
    step, state = found.frames[index].step_id, found.state_at(index, found.frames[index].step_id)
    go_to(page, step)
    assert not page.locator(".state").first.is_visible()
    page.locator("[data-part=diagram] summary").press("Enter")
    playwright.expect(page.locator(".state.running .number")).to_have_text(str(len(state.running)))
    waiting = [state.requests[number].status for number in state.waiting]
    for name in ("waiting", "preempted"):
        assert page.locator(f".state.{name} .number").text_content() == str(waiting.count(name))
    move = page.locator(".move.lit[aria-label^='running → preempted']")
    assert move.get_attribute("aria-label").endswith(f"{before} time{'s' * (before > 1)} so far, 1 in this step")
    says = page.locator("[data-part=says]")
    assert "running → preempted once" in says.inner_text()
    move.focus()
    playwright.expect(says).to_have_text(move.get_attribute("aria-label"))
    page.locator("[data-part=line]").focus()
    playwright.expect(says).to_contain_text("In this step: ")
    page.locator(".states svg").scroll_into_view_if_needed()
    box = page.locator(".states svg").bounding_box()
    page.mouse.move(box["x"] + 172 / 360 * box["width"], box["y"] + 150 / 364 * box["height"])
    playwright.expect(says).to_contain_text("waiting → running: it is admitted")
    rungs = page.locator("[data-part=ladder] li")
    assert "1 preemption; " in rungs.nth(2).inner_text() and f"{before} preemption" in rungs.nth(2).inner_text()
    assert "lit" in (rungs.nth(2).get_attribute("class") or "")
    for event in found.events(0, index + 1):
        last = event
    blocked = found.header["names"]["reasons"][last.fields["blocked"] - 1] if last.fields["blocked"] else ""
    assert ("lit" in (rungs.nth(1).get_attribute("class") or "")) == (blocked in ("blocks", "preemption", "watermark"))
    assert "lit" not in (rungs.nth(3).get_attribute("class") or "")
    evicting = next(
        number for number, frame in enumerate(found.frames)
        for event in found.events(number, number + 1)
        if event.op in (Op.STEP, Op.STEPS) and event.fields["evicted"] and frame.num_steps == 1
    )  # fmt: skip
    go_to(page, found.frames[evicting].step_id)
    assert "lit" in (rungs.nth(0).get_attribute("class") or "")
    total = sum(
        event.fields["evicted"] for event in found.events(0, evicting + 1) if event.op in (Op.STEP, Op.STEPS)
    )  # fmt: skip
    assert f"{total} block{'s' * (total > 1)} so far" in rungs.nth(0).inner_text()


def test_the_time_line_shows_the_longest_gap_between_tokens(visit: Callable[..., Any], film: bytes) -> None:
    """The longest gap is visible at its step, even if many steps share a column of pixels."""
    found = Film(io.BytesIO(film))
    gaps = longest_itl(found)
    page = visit(film, viewport={"width": 360, "height": 800})
    text = page.locator("[data-part=lineLegend]").inner_text()
    assert f"to {float(f'{1000 * max(gaps):.3g}'):g} ms, logarithmic" in text
    frame, step = [
        (index, frame.step_id + place) for index, frame in enumerate(found.frames) for place in range(frame.num_steps)
    ][gaps.index(max(gaps))]
    share = found.state_at(frame, step).time / found.end
    painted = page.evaluate(
        """(share) => {
          const canvas = panes[0].view.part("line"), context = canvas.getContext("2d");
          const pixels = (place, y) => context.getImageData(Math.floor(place * canvas.width) - 1, y, 3, 3).data;
          const has = (place, y) => [...pixels(place, y)].some((one) => one);
          return [has(share, TOP_OF_ITL + 2), has(share, LINE_HEIGHT - 5), has(0.999, TOP_OF_ITL + 2), canvas.width];
        }""",
        share,
    )
    assert painted[:3] == [True, True, False] and painted[3] < found.num_steps


def test_a_link_to_the_player_contains_step_and_request(visit: Callable[..., Any], film: bytes) -> None:
    found = Film(io.BytesIO(film))
    step, name = max(found.frames, key=lambda frame: frame.num_steps).step_id + 1, found.requests[3].request_id
    page = visit(film, f"#step={step}&request={name}")
    at_step(page, step)
    assert f"step={step}&" in page.url
    playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text(f"The life of {name}")


def test_the_player_shows_the_owner_of_a_block(visit: Callable[..., Any], film: bytes) -> None:
    found, page = Film(io.BytesIO(film)), visit(film)
    index = len(found.frames) // 2
    go_to(page, found.frames[index].step_id)
    state = found.state_at(index, found.frames[index].step_id)
    number = state.running[0]
    block, (columns, size) = (
        state.requests[number].table[0],
        page.evaluate("[panes[0].view.cells.columns, panes[0].view.cells.size]"),
    )
    page.locator("[data-part=pool]").hover(
        position={"x": (block % columns + 0.5) * size, "y": (block // columns + 0.5) * size}
    )
    text = page.locator("[data-part=block]").inner_text()
    assert (
        text.startswith(f"block {block}: ") and found.requests[number].request_id in text and "tokens 0 to 15" in text
    )


def test_a_film_is_opened_from_a_file(visit: Callable[..., Any], film: bytes, tmp_path: Path) -> None:
    page = visit(None)
    (tmp_path / "my.film").write_bytes(film)
    page.set_input_files("#file", tmp_path / "my.film")
    playwright.expect(page.locator("#title")).to_have_text("my.film")
    at_step(page, 0)
    (tmp_path / "cut.film").write_bytes(film[: len(film) // 4])
    (tmp_path / "none.film").write_bytes(b"{}")
    for name, why in (
        ("none.film", "none.film: it is not a film"),
        ("cut.film", "cut.film: the film's header is broken"),
    ):
        page.set_input_files("#file", tmp_path / name)
        playwright.expect(page.locator("#problem")).to_contain_text(why)


def test_a_film_of_a_newer_format_is_refused_with_a_sentence(visit: Callable[..., Any], film: bytes) -> None:
    file, newer = io.BytesIO(film), io.BytesIO()
    write_header(newer, {**read_header(file), "format_version": 4})
    page = visit(newer.getvalue() + file.read())
    playwright.expect(page.locator("#problem")).to_contain_text("format version 4, and this page reads 3")


def test_markup_in_ids_is_shown_as_text(visit: Callable[..., Any]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64))
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    scheduler.start_film(recorder)
    scheduler.add(Request(HTML, range(5), arrival_time=0.0, max_tokens=2, tenant="<b>"), 0.0)
    scheduler.update(scheduler.schedule(0.0), StepResult([7]), 1.0)
    scheduler.remove_listener(recorder)
    recorder.close()
    page = visit(file.getvalue(), title=f"</title><script>{HTML}")
    at_step(page, 0)
    assert told(page)[0] == f"{HTML} is added of tenant <b>: 5 prompt tokens"
    assert page.locator("[data-part=running] .name").inner_text() == HTML
    page.locator("[data-part=running] button").click()
    playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text(f"The life of {HTML}")
    assert page.locator("img, b").count() == 0
    assert page.title().startswith("</title><script>")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1920])
def test_the_player_fits_and_is_accessible(visit: Callable[..., Any], film: bytes, scheme: str, width: int) -> None:
    """No sideways scrolling at a phone's width, and nothing serious that axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(film, "#step=60", color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page.locator("[data-part=running] button").first.click()
    page.click("[data-part=diagram] summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []


def test_too_large_a_film_is_refused() -> None:
    with pytest.raises(ValueError, match="a page holds at most"):
        page_of(bytes(MAX_FILM + 1), "large")
