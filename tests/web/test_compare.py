"""The page of two films, in a real browser."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.core.observe.film import FilmRecorder
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest
from pointsman.web.film import Film
from pointsman.web.player import page_of

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
pytestmark = pytest.mark.e2e
STEP_TIME = LinearStepTime(per_step=6e-3, per_token=8e-5)


def run(count: int = 40, **settings: Any) -> tuple[bytes, Outcome]:
    trace = [TraceRequest(0.05 * index, 60 + 7 * (index % 9), 40 + index % 30) for index in range(count)]
    config = SchedulerConfig(num_blocks=60, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=96, **settings)
    file = io.BytesIO()
    recorder = FilmRecorder(file)
    outcome = simulate(OpenLoop(trace), config, STEP_TIME, films=[recorder])
    recorder.close()
    return file.getvalue(), outcome


@pytest.fixture(scope="module")
def continuous() -> tuple[bytes, Outcome]:
    return run()


@pytest.fixture(scope="module")
def static() -> tuple[bytes, Outcome]:
    return run(batching="static")


@pytest.fixture
def visit(
    open_page: Callable[..., Any], tmp_path: Path, continuous: tuple[bytes, Outcome], static: tuple[bytes, Outcome]
) -> Callable[..., Any]:
    """Opens the page of static and continuous batching."""

    def go(where: str = "", **options: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page_of(static[0], "static", (continuous[0], "continuous")), encoding="utf-8")
        page = open_page(path.as_uri() + where, **options)
        playwright.expect(page.locator("#second [data-part=decidedTitle]")).to_contain_text("step")
        return page

    return go


def move(page: Any, which: str, to: int) -> None:
    page.fill(f"#{which} [data-part=number]", str(to))
    page.press(f"#{which} [data-part=number]", "Enter")


def test_figures_of_two_films_match_their_runs(visit: Callable[..., Any], static: Any, continuous: Any) -> None:
    page = visit()
    rows = {
        cells[0]: cells[1:]
        for cells in (row.locator("th, td").all_inner_texts() for row in page.locator("#figures tr").all()[1:])
    }
    for index, (data, outcome) in enumerate((static, continuous)):
        timings, film = outcome.timings, Film(io.BytesIO(data))
        ttft, e2e = timings.first_token - timings.arrival, timings.last_token - timings.arrival
        expected = {
            "requests finished": f"{len(ttft)}",
            "steps": f"{film.num_steps}",
            "TTFT, mean": f"{ttft.mean():.3f} s",
            "TTFT, 99th percentile": f"{np.percentile(ttft, 99):.3f} s",
            "end to end, mean": f"{e2e.mean():.3f} s",
            "end to end, 99th percentile": f"{np.percentile(e2e, 99):.3f} s",
            "preemptions": f"{outcome.stats[0].num_preemptions}",
        }
        assert {name: rows[name][index] for name in expected} == expected
    means = [float((each[1].timings.first_token - each[1].timings.arrival).mean()) for each in (static, continuous)]
    assert rows["TTFT, mean"][2] == f"\N{MINUS SIGN}{100 * (1 - means[1] / means[0]):.0f} %"
    assert page.inner_text("#settings") == 'Settings that differ: batching "static" and "mixed".'
    assert page.inner_text("#gained").startswith("Of 40 requests that finished in both, ")


def test_requests_are_ranked_by_the_chosen_time(visit: Callable[..., Any], static: Any, continuous: Any) -> None:
    page = visit()
    timings = [outcome.timings for _, outcome in (static, continuous)]
    names = [f"request-{index}" for index in range(40)]
    times = {
        "e2e": [each.last_token - each.arrival for each in timings],
        "ttft": [each.first_token - each.arrival for each in timings],
        "perToken": [(each.last_token - each.first_token) / (each.num_output_tokens - 1) for each in timings],
    }
    for by, (before, after) in times.items():
        page.select_option("#rank", by)
        first = page.locator("#gains tr").nth(1).locator("th, td").all_inner_texts()
        best = int((after - before).argmin())
        assert first[0] == names[best]
        column = {"ttft": 1, "perToken": 2, "e2e": 3}[by]
        assert first[column] == f"{before[best]:.3f} → {after[best]:.3f}"
    assert page.inner_text("#alone") == ""


def aborted(names: list[str], gone: str) -> bytes:
    """A film of requests that arrive one after the other; ids may repeat, and one request is aborted."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=60, max_model_len=256))
    recorder = FilmRecorder(file := io.BytesIO())
    scheduler.start_film(recorder)
    now = 0.0
    for name in names:
        scheduler.add(Request(name, range(8), arrival_time=now, max_tokens=4), now)
        for _ in range(4):
            output = scheduler.schedule(now)
            now += 1
            scheduler.update(output, StepResult([7] * int(output.samples.sum())), now)
            if name == gone and scheduler.has_unfinished_requests():
                scheduler.abort(name, now)
                break
    scheduler.remove_listener(recorder)
    recorder.close()
    return file.getvalue()


def test_the_page_lists_requests_that_finished_in_only_one_run(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Two requests with the same id are counted as two; an aborted request is not counted as finished."""
    one, two = aborted(["a", "b", "a", "c"], "c"), aborted(["a", "b", "d"], "b")
    path = tmp_path / "page.html"
    path.write_text(page_of(one, "one", (two, "two")), encoding="utf-8")
    page = open_page(path.as_uri())
    playwright.expect(page.locator("#alone")).to_have_text("Finished only in “one”: b, a. Finished only in “two”: d. ")
    rows = {
        cells[0]: cells[1:]
        for cells in (row.locator("th, td").all_inner_texts() for row in page.locator("#figures tr").all()[1:])
    }
    assert rows["requests finished"][:2] == ["3", "2"]
    assert rows["requests aborted, refused, failed or late"][:2] == ["1", "1"]
    assert rows["time per output token, mean of requests"][:2] == ["1.000 s", "1.000 s"]
    assert page.inner_text("#gained").startswith("Of 1 request that finished in both, 0 finished sooner")


def test_both_views_move_together_by_step_or_by_time(visit: Callable[..., Any], static: Any, continuous: Any) -> None:
    films = {name: Film(io.BytesIO(data)) for name, (data, _) in (("first", static), ("second", continuous))}
    page = visit("#step=9&by=step")
    playwright.expect(page.locator("#second [data-part=number]")).to_have_value("9")
    for leader, follower, to in (("first", "second", 30), ("second", "first", 12)):
        move(page, leader, to)
        playwright.expect(page.locator(f"#{follower} [data-part=number]")).to_have_value(str(to))
    page.locator("#second [data-part=line]").press("ArrowRight")  # keys go to the focused view
    playwright.expect(page.locator("#first [data-part=number]")).to_have_value("13")
    playwright.expect(page).to_have_url(re.compile("step=13&by=step$"))
    page.select_option("#by", "time")
    move(page, "first", films["first"].num_steps - 1)
    last = films["second"].frames[-1]  # the second film ends before the first one
    playwright.expect(page.locator("#second [data-part=number]")).to_have_value(str(last.step_id + last.num_steps - 1))
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_timeout(150)
    playwright.expect(page.locator("#first [data-part=number]")).to_have_value(str(films["first"].num_steps - 1))
    page.locator("#first [data-part=line]").press("Home")
    playwright.expect(page.locator("#second [data-part=number]")).to_have_value("0")
    page.select_option("#first [data-part=speed]", "50")
    page.click("#first [data-part=play]")
    playwright.expect(page.locator("#second [data-part=number]")).to_have_value(re.compile(r"\d\d"))
    page.click("#first [data-part=play]")


def test_selecting_a_request_selects_it_in_both_views(visit: Callable[..., Any]) -> None:
    page = visit()
    button = page.locator("#gains button").first
    button.focus()
    page.keyboard.press("Enter")
    name = button.inner_text()
    for which in ("first", "second"):
        playwright.expect(page.locator(f"#{which} [data-part=lifeTitle]")).to_have_text(f"The life of {name}")
    playwright.expect(page).to_have_url(re.compile(f"request={name}&"))
    page.keyboard.press("Escape")
    for which in ("first", "second"):
        playwright.expect(page.locator(f"#{which} [data-part=life]")).to_be_hidden()


def test_the_page_opens_a_second_film_beside_the_first(
    open_page: Callable[..., Any], tmp_path: Path, continuous: Any, static: Any
) -> None:
    """The second file is also a film with other requests, a truncated film, and a file that is not a film."""
    path = tmp_path / "page.html"
    path.write_text(page_of(continuous[0], "continuous"), encoding="utf-8")
    other, _ = run(3)
    for name, data in (("fewer", other), ("cut", static[0][:-9]), ("none", b"no film at all")):
        (tmp_path / name).write_bytes(data)
    page = open_page(path.as_uri())
    playwright.expect(page.locator("#comparison")).to_be_hidden()
    page.set_input_files("#other", tmp_path / "fewer")
    playwright.expect(page.locator("#title")).to_have_text("continuous and fewer")
    playwright.expect(page.locator("#gained")).to_contain_text("Of 3 requests that finished in both")
    page.locator("#first [data-part=line]").press("End")
    last = Film(io.BytesIO(other)).frames[-1]
    playwright.expect(page.locator("#second [data-part=number]")).to_have_value(str(last.step_id + last.num_steps - 1))
    page.set_input_files("#other", tmp_path / "cut")
    playwright.expect(page.locator("#settings")).to_contain_text("cut was cut off.")
    page.set_input_files("#other", tmp_path / "none")
    playwright.expect(page.locator("#problem")).to_contain_text("none: it is not a film")
    playwright.expect(page.locator("#title")).to_have_text("continuous and cut")


def test_the_page_refuses_a_too_large_file_before_it_reads_it(open_page: Callable[..., Any], tmp_path: Path) -> None:
    path, large = tmp_path / "page.html", tmp_path / "large"
    path.write_text(page_of(None, "no film"), encoding="utf-8")
    with large.open("wb") as file:
        file.truncate(5 << 30)
    page = open_page(path.as_uri())
    page.set_input_files("#file", large)
    playwright.expect(page.locator("#problem")).to_contain_text("large has 5,368,709,120 bytes, and a page shows")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1600, "light")])
def test_the_comparison_fits_each_width_and_is_accessible(visit: Callable[..., Any], width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tops = [page.locator(f"#{which}").bounding_box()["y"] for which in ("first", "second")]
    assert (tops[0] == tops[1]) == (width > 1000)  # side by side, or above one another
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
