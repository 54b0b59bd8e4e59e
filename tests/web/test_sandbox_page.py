"""The sandbox in a real browser, over its own server."""

from __future__ import annotations

import json
import re
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.sandbox import commands
from pointsman.core.observe.film_format import Op
from pointsman.web.film import Film
from pointsman.web.sandbox import Sandbox
from pointsman.web.sandbox_page import sandbox_server

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
pytestmark = pytest.mark.e2e


@pytest.fixture
def server() -> Iterator[Any]:
    found = sandbox_server(Sandbox(commands=commands), title="Sandbox")
    thread = threading.Thread(target=found.serve, daemon=True)
    thread.start()
    yield found
    found.close()
    thread.join()


@pytest.fixture
def visit(open_page: Callable[..., Any], server: Any) -> Callable[..., Any]:
    def go(**options: Any) -> Any:
        page = open_page(server.url, **options)
        playwright.expect(page.locator("#status")).to_contain_text("After 0 steps", timeout=20000)
        return page

    return go


def says(page: Any, text: str) -> None:
    playwright.expect(page.locator("#status")).to_contain_text(text)


def add(page: Any, prompt: int, output: int) -> None:
    page.fill("#add [name=prompt]", str(prompt))
    page.fill("#add [name=output]", str(output))
    page.press("#add [name=output]", "Enter")


def names(page: Any, part: str = "running") -> list[str]:
    return page.locator(f"[data-part={part}] .name").all_inner_texts()


def test_the_sandbox_page_adds_requests_steps_and_undoes(visit: Callable[..., Any]) -> None:
    page = visit()
    add(page, 40, 3)
    says(page, ": 1 waiting")
    add(page, 200, 5)
    says(page, ": 2 waiting")
    page.click("#do-step")
    says(page, "After 1 step, ")
    assert names(page) == ["A", "B"]
    assert page.locator("[data-part=batch] p").inner_text().startswith("128 tokens of 128, in 2 rows")
    page.click("#do-run")
    says(page, "2 finished")
    whole = page.inner_text("#status")
    page.click("#do-undo")
    says(page, "After 1 step, ")
    page.click("#do-redo")
    playwright.expect(page.locator("#status")).to_have_text(whole)
    page.click("#do-reset")
    says(page, "After 0 steps")
    page.click("#do-step")
    page.click("button[aria-label='Abort B']")
    says(page, "1 finished")
    playwright.expect(page.locator("#requests")).to_contain_text("finished: abort")
    page.click("#do-clear")
    says(page, "no request")


def test_other_settings_play_the_same_requests(visit: Callable[..., Any]) -> None:
    """The settings are proposed by a situation, or set by hand. The first figures are shown beside the current ones."""
    page = visit()
    page.select_option("#situation", "preemption")
    page.click("#do-situation")
    says(page, "After 0 steps")
    page.click("#do-run")
    says(page, "6 finished")
    preempted = page.locator("#outcome div", has_text="preemptions").locator("dd")
    assert int(preempted.first.inner_text()) > 0
    page.click("#do-what-if")
    playwright.expect(preempted.first).to_have_text("0")
    assert int(preempted.nth(1).inner_text().removeprefix("before: ")) > 0
    playwright.expect(page.locator("#changes")).to_contain_text("KV blocks in the pool 24 → ")
    page.click("#settings summary")
    page.fill("[name=num_blocks]", "12")
    page.select_option("[data-setting=order] select", "shortest-prefill")
    playwright.expect(page.locator("#changed")).to_have_text("changed, not applied yet")
    page.press("[name=num_blocks]", "Enter")
    playwright.expect(page.locator("#changed")).to_have_text("")
    playwright.expect(page.locator("[data-part=about]")).to_contain_text("12 blocks of 16 tokens")
    playwright.expect(page.locator("[data-part=about]")).to_contain_text("order shortest-prefill")
    assert int(preempted.nth(1).inner_text().removeprefix("before: ")) > 0  # under the first settings
    page.press("[name=num_blocks]", "Enter")  # nothing to apply
    playwright.expect(page.locator("#changed")).to_have_text("")
    playwright.expect(page.locator("#problem")).to_be_hidden()
    page.click("#do-compare")
    playwright.expect(page.locator("#comparing")).to_be_hidden()


def test_a_run_can_be_saved_as_a_film_and_as_a_comparison(
    visit: Callable[..., Any], tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    """As a film, and as a page that compares it with the earlier run and needs no server."""
    page = visit()
    page.select_option("#situation", "preemption")
    page.click("#do-situation")
    says(page, "After 0 steps")
    playwright.expect(page.locator("#save-film")).to_be_disabled()
    page.click("#do-run")
    says(page, "6 finished")
    page.click("#do-what-if")
    preempted = page.locator("#outcome div", has_text="preemptions").locator("dd")
    playwright.expect(preempted.first).to_have_text("0")  # the earlier run also has "6 finished"
    with page.expect_download() as saved:
        page.click("#save-film")
    film = Film.read(saved.value.path())
    assert len(film.requests) == 6 and not [event for event in film.events(0, None) if event.op is Op.PREEMPTED]
    with page.expect_download() as saved:
        page.click("#save-compared")
    path = tmp_path / "compared.html"
    saved.value.save_as(path)
    compared = open_page(path.as_uri())
    playwright.expect(compared.locator("#settings")).to_contain_text("num_blocks 24 and ")
    row = compared.locator("#figures tr", has_text="preemptions").locator("td").all_inner_texts()
    assert int(row[0]) > 0 and row[1] == "0"


def test_changed_settings_must_be_played_before_copying_or_saving(visit: Callable[..., Any]) -> None:
    page = visit()
    page.select_option("#situation", "preemption")
    page.click("#do-situation")
    page.click("#do-run")
    says(page, "6 finished")
    page.fill("[name=watermark]", "0.1")
    for button in ("#copy-settings", "#copy-all", "#copy-test", "#save-film"):
        page.click(button)
        playwright.expect(page.locator("#problem")).to_contain_text("changed and not played yet")
        assert page.locator("#copy-label").is_hidden()
    page.click("#apply")
    playwright.expect(page.locator("#changes")).to_contain_text("0.0 → 0.1")
    page.click("#copy-settings")
    playwright.expect(page.locator("#copy")).to_have_value(re.compile("--watermark 0.1"))


def test_attempts_with_other_settings_are_listed_in_a_table(visit: Callable[..., Any]) -> None:
    """All attempts of a table have the same requests; after a request is added, the table is empty."""
    page = visit()
    page.select_option("#situation", "preemption")
    page.click("#do-situation")
    page.click("#do-run")
    says(page, "6 finished")
    assert page.locator("#attempts").is_hidden()
    for blocks in ("30", "48", "30"):
        page.fill("[name=num_blocks]", blocks)
        page.click("#apply")
        playwright.expect(page.locator("#changes")).to_contain_text(f"24 → {blocks}")
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#tried tr").all()]
    assert [row[0] for row in rows[1:]] == ["nothing", "KV blocks in the pool 24 → 48", "KV blocks in the pool 24 → 30"]
    column = rows[0].index("preemptions")
    assert int(rows[1][column]) > int(rows[3][column]) > int(rows[2][column]) == 0
    add(page, 64, 2)
    playwright.expect(page.locator("#attempts")).to_be_hidden()


def test_impossible_actions_show_an_error(visit: Callable[..., Any]) -> None:
    page = visit()
    add(page, 0, 3)
    playwright.expect(page.locator("#problem")).to_contain_text("prompt is 0; it must be between 1 and 100000")
    says(page, "no request")
    add(page, 5, 3)
    playwright.expect(page.locator("#problem")).to_be_hidden()
    says(page, ": 1 waiting")


def test_the_test_and_the_settings_can_be_copied(visit: Callable[..., Any], server: Any) -> None:
    origin = server.url.partition("/#")[0]
    page = visit()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=origin)
    add(page, 40, 3)
    says(page, ": 1 waiting")
    page.click("#do-run")
    says(page, "1 finished")
    page.click("#copy-test")
    playwright.expect(page.locator("#copied")).to_have_text("The test copied.")
    text = page.evaluate("navigator.clipboard.readText()")
    module: dict[str, Any] = {}
    exec(compile(text, "copied", "exec"), module)
    module["test_sandbox"]()
    page.click("#copy-settings")
    playwright.expect(page.locator("#copy")).to_have_value(re.compile("no setting of a server differs"))
    page.click("#copy-all")
    lines = page.input_value("#copy")
    vllm = next(shlex.split(line) for line in lines.replace("\\\n", " ").splitlines() if line.startswith("vllm"))
    assert vllm[:2] == ["vllm", "serve"] and "pointsman.integrations.vllm.Scheduler" in vllm
    assert vllm[vllm.index("--max-num-batched-tokens") + 1] == "128"


def test_the_sandbox_works_with_keys_only(visit: Callable[..., Any]) -> None:
    page = visit()
    page.focus("#add [name=prompt]")
    page.keyboard.press("Control+a")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    says(page, ": 1 waiting")
    page.focus("#do-step")
    page.keyboard.press("Enter")
    says(page, "After 1 step, ")
    page.keyboard.press("s")
    says(page, "After 2 steps")
    page.keyboard.press("Control+z")
    says(page, "After 1 step, ")
    page.keyboard.press("r")
    says(page, "1 finished")
    page.keyboard.press("ArrowLeft")  # in the film
    playwright.expect(page.locator("[data-part=number]")).not_to_have_value(re.compile("^0$"))


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_sandbox_page_fits_each_width_and_is_accessible(visit: Callable[..., Any], width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.select_option("#situation", "priority")
    page.click("#do-situation")
    says(page, "8 waiting, 1 yet to arrive")
    page.click("#do-run")
    says(page, "9 finished")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_actions_need_the_token(server: Any) -> None:
    """The page is sent without a token and does not contain it; an action without the token is refused."""
    origin = server.url.partition("/#")[0]
    with urllib.request.urlopen(origin + "/", timeout=10) as answer:
        assert server.token not in answer.read().decode()
    body = json.dumps({"do": "add", "prompt": 1, "output": 1}).encode()
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(origin + "/do", body, headers), timeout=10)
        assert refused.value.code == 401
