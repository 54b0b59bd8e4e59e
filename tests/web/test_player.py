"""The page that plays a film, in a real browser."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.film_format import read_header, write_header
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.player import MAX_FILM, page_of
from pointsman.web.story import Teller, life_of

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason=f"pages are tried in {CHROMIUM}, which is not there"),
]
HTML = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def film() -> bytes:
    """A short pool: requests wait, are preempted and share prefixes. The last has markup for an id."""
    trace = [TraceRequest(0.05 * index, 60 + 7 * (index % 9), 40 + index % 30) for index in range(40)]
    config = SchedulerConfig(
        num_blocks=60, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=96, full_sequence_must_fit=False
    )
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    simulate(OpenLoop(trace), config, LinearStepTime(per_step=6e-3, per_token=8e-5), films=[recorder])
    recorder.close()
    return file.getvalue()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tool:
        running = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page, and fails if it logs an error or asks the network for anything."""
    complaints: list[str] = []
    contexts = []

    def go(film: bytes | None, where: str = "", title: str = "run", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page_of(film, title), encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if not _is_local(request.url) else None)
        page.goto(path.as_uri() + where)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "blob:", "data:"))


def told(page: Any) -> list[str]:
    return page.locator("[data-part=decided] li").all_inner_texts()


def at_step(page: Any, step: int) -> None:
    playwright.expect(page.locator("[data-part=number]")).to_have_value(str(step))


def test_it_shows_what_the_film_says(visit: Callable[..., Any], film: bytes) -> None:
    """Sentences, rows, waiting requests and blocks, at frames here and there."""
    found, page = Film(io.BytesIO(film)), visit(film)
    teller = Teller(found)
    for index in (0, 7, len(found.frames) // 2, len(found.frames) - 1):
        frame, state = found.frames[index], found.state_at(index)
        page.fill("[data-part=number]", str(frame.step_id))
        page.press("[data-part=number]", "Enter")
        at_step(page, frame.step_id)
        if sentences := teller.decided(index):
            assert told(page) == sentences
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


def test_buttons_and_keys(visit: Callable[..., Any], film: bytes) -> None:
    frames, page = Film(io.BytesIO(film)).frames, visit(film)
    at_step(page, 0)
    page.click("[data-part=step]")
    at_step(page, frames[1].step_id)
    for key, place in (
        ("ArrowRight", 2),
        ("Shift+ArrowRight", 12),
        ("ArrowLeft", 11),
        ("End", len(frames) - 1),
        ("ArrowRight", len(frames) - 1),
        ("Home", 0),
    ):
        page.locator("[data-part=line]").press(key)
        at_step(page, frames[place].step_id)
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


def test_scrubbing(visit: Callable[..., Any], film: bytes) -> None:
    found, page = Film(io.BytesIO(film)), visit(film)
    box = page.locator("[data-part=line]").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=5)
    page.mouse.up()
    step = int(page.input_value("[data-part=number]"))
    frame = found.frames[found.frame_of_step(step)]
    assert frame.time == pytest.approx(0.6 * found.end, abs=0.03 * found.end)


def test_following_a_request(visit: Callable[..., Any], film: bytes) -> None:
    """Found by its id, its life and what it waited for are those of the film; its moments lead to their steps."""
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
    page.locator("[data-part=moments] button").last.click()
    assert f"request={name}" in page.url
    page.keyboard.press("Escape")
    playwright.expect(page.locator("[data-part=life]")).to_be_hidden()
    page.locator("[data-part=find]").fill("nobody")
    page.locator("[data-part=find]").press("Enter")
    playwright.expect(page.locator("#problem")).to_have_text("no request is called nobody")


def test_a_link_carries_step_and_request(visit: Callable[..., Any], film: bytes) -> None:
    found = Film(io.BytesIO(film))
    frame, name = found.frames[20], found.requests[3].request_id
    page = visit(film, f"#step={frame.step_id}&request={name}")
    at_step(page, frame.step_id)
    playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text(f"The life of {name}")


def test_a_block_names_its_owner(visit: Callable[..., Any], film: bytes) -> None:
    found, page = Film(io.BytesIO(film)), visit(film)
    index = len(found.frames) // 2
    page.locator("[data-part=number]").fill(str(found.frames[index].step_id))
    page.locator("[data-part=number]").press("Enter")
    state = found.state_at(index)
    number = state.running[0]
    block, (columns, size) = state.requests[number].table[0], page.evaluate("[view.cells.columns, view.cells.size]")
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
    for name, why in (("none.film", "none.film: it is no film"), ("cut.film", "cut.film: the film's header is broken")):
        page.set_input_files("#file", tmp_path / name)
        playwright.expect(page.locator("#problem")).to_contain_text(why)


def test_a_newer_film_is_refused_in_words(visit: Callable[..., Any], film: bytes) -> None:
    file, newer = io.BytesIO(film), io.BytesIO()
    write_header(newer, {**read_header(file), "format_version": 3})
    page = visit(newer.getvalue() + file.read())
    playwright.expect(page.locator("#problem")).to_contain_text("format version 3, and this page reads 2")


def test_markup_is_text(visit: Callable[..., Any]) -> None:
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
def test_it_fits_and_can_be_read(visit: Callable[..., Any], film: bytes, scheme: str, width: int) -> None:
    """No sideways scrolling at a phone's width, and nothing serious that axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(film, "#step=60", color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page.locator("[data-part=running] button").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []


def test_a_film_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="a page carries"):
        page_of(bytes(MAX_FILM + 1), "large")
