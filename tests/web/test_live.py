"""The live page in a real browser, against a real server, and against a control socket."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from _server_sides import SERVED_MODEL_NAME, Knobs, VllmSide

from pointsman.cli.live import live_server
from pointsman.engine.machine import num_cores
from tests.forked_engines import forked_processes, start_server
from tests.integrations.vllm_operated import operated, stepping
from tests.integrations.vllm_process import DEMO, VLLM_INSTALLED

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
pytestmark = pytest.mark.e2e
KEY = "sesame-of-an-operator"
POOL = ("--model", "demo", "--num-blocks", "64", "--max-num-seqs", "2", "--operator-key", KEY)


@pytest.fixture(scope="module")
def visit(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Opens pages. Fails if one logs an error other than a refused or lost connection, or contacts another server."""
    complaints: list[str] = []
    pages = []
    with forked_processes():

        def go(url: str, **options: Any) -> Any:
            page = browser.new_page(**options)
            pages.append(page)
            own = url.split("/")[2]
            page.on("console", lambda message: complaints.append(message.text) if is_complaint(message) else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda asked: complaints.append(asked.url) if asked.url.split("/")[2] != own else None)
            page.on("request", lambda asked: complaints.append("a key in a URL") if KEY in asked.url else None)
            page.goto(url)
            return page

        yield go
        for page in pages:
            page.close()
    assert complaints == []


def is_complaint(message: Any) -> bool:
    return message.type == "error" and "Failed to load resource" not in message.text


@contextmanager
def busy(url: str, model: str, number: int = 3) -> Iterator[None]:
    """Keeps `number` requests open; an engine runs two of them."""
    ended = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not ended.is_set():
                body = {
                    "model": model,
                    "prompt": ["The import statement"] * number,
                    "max_tokens": 60,
                    "ignore_eos": True,
                }
                http.post("/v1/completions", json=body).raise_for_status()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def text(page: Any, place: str) -> str:
    found: str = page.locator(place).inner_text()
    return found


def step_of(page: Any) -> int:
    return int(page.locator("[data-part=number]").input_value())


def is_live(page: Any) -> None:
    playwright.expect(page.locator("#link")).to_have_text("Live", timeout=15000)


def look_back(page: Any) -> None:
    """Waits until the page has at least ten steps, and goes two steps back."""
    playwright.expect(page.locator("[data-part=line]")).to_have_attribute("aria-valuenow", re.compile(r"\d\d"))
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator("#link")).to_have_text("You look back; the scheduler continues")


def test_the_live_page_shows_current_and_past_steps_of_a_server(visit: Callable[..., Any]) -> None:
    """Key, current steps, looking back while it continues, back to now, and a server that ends."""
    with start_server(*POOL) as server:
        port = server.port
        page = visit(f"{server.url}/live")
        playwright.expect(page.locator("#ask")).to_be_visible()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        playwright.expect(page.locator("#problem")).to_contain_text("a valid operator key")
        page.fill("#key", KEY)
        page.click("#ask button")
        is_live(page)
        playwright.expect(page.locator("#counts")).to_contain_text("no step was decided since you began to watch")
        with busy(server.url, "demo"):
            playwright.expect(page.locator("[data-part=waitingTitle]")).to_have_text("Waiting: 1")
            playwright.expect(page.locator("[data-part=runningTitle]")).to_have_text("Running: 2 of 2")
            playwright.expect(page.locator("[data-part=waiting]")).to_contain_text("sequence limit")
            look_back(page)
            there = step_of(page)
            before = page.locator("[data-part=line]").get_attribute("aria-valuemax")
            playwright.expect(page.locator("[data-part=line]")).not_to_have_attribute("aria-valuemax", before)
            assert step_of(page) == there
            page.keyboard.press("Home")
            playwright.expect(page.locator("[data-part=line]")).to_have_attribute("aria-valuenow", "0")
            page.click("#now")
            is_live(page)
            assert step_of(page) > there
        playwright.expect(page.locator("[data-part=runningTitle]")).to_have_text("Running: 0 of 2")
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert KEY not in page.content() and page.input_value("#key") == ""
    playwright.expect(page.locator("#link")).to_contain_text("the next attempt is in", timeout=15000)
    with start_server(*POOL, "--port", str(port)) as server:  # again: the page has the key, and reconnects
        playwright.expect(page.locator("#link")).to_have_text(re.compile("^Live"), timeout=40000)
        with busy(server.url, "demo"):
            playwright.expect(page.locator("[data-part=runningTitle]")).to_have_text("Running: 2 of 2")
            assert page.locator("[data-part=finishedTitle]").inner_text() != ""
    page.close()


@pytest.mark.long
@pytest.mark.skipif(num_cores() < 2, reason="two engines need two cores")
def test_the_live_page_shows_an_engine_again_after_its_restart(visit: Callable[..., Any]) -> None:
    """The dead engine's film ends, the other's can be watched meanwhile, and the new engine's film begins."""
    with start_server(*POOL, "--data-parallel-size", "2") as server:
        page = visit(f"{server.url}/live")
        page.fill("#key", KEY)
        page.click("#ask button")
        is_live(page)
        assert page.locator("#engine option").all_inner_texts() == ["0", "1"]
        page.select_option("#engine", "1")
        running = page.locator("[data-part=runningTitle]")
        with busy(server.url, "demo", number=6):
            playwright.expect(running).to_have_text("Running: 2 of 2", timeout=20000)
            pids = server.engine_pids
            os.kill(pids[1], signal.SIGKILL)
            playwright.expect(page.locator("#link")).to_contain_text("the next attempt is in", timeout=15000)
            page.select_option("#engine", "0")
            is_live(page)
            playwright.expect(running).to_have_text("Running: 2 of 2", timeout=20000)
            page.select_option("#engine", "1")
            playwright.expect(page.locator("#link")).to_have_text(re.compile("^Live"), timeout=40000)
            playwright.expect(running).to_have_text("Running: 2 of 2", timeout=20000)
            assert server.engine_pids[0] == pids[0] and server.engine_pids[1] != pids[1]
            # Until something of the new one has come, the film of the engine before is looked at.
            playwright.expect(page.locator("#counts")).not_to_contain_text("no step was decided")
            page.locator("#engine").blur()  # where the arrow keys choose an engine
            look_back(page)
            page.select_option("#engine", "0")  # the chosen engine is shown
            is_live(page)
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_live_page_fits_a_phone_and_is_accessible(visit: Callable[..., Any], tmp_path: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with operated(tmp_path / "s", max_model_len=512, num_blocks=300) as host:
        server = live_server(host.control.path)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            page = visit(server.url, color_scheme=scheme, viewport={"width": 360, "height": 800}, bypass_csp=True)
            is_live(page)
            for name in ("a", "b", "c"):
                host.add(name, max_tokens=500)
            with stepping(Slowly(host)):
                playwright.expect(page.locator("[data-part=runningTitle]")).to_have_text("Running: 2 of 2")
                page.evaluate("document.getElementById('ask').hidden = false")
                found = axe.Axe().run(page).response["violations"]
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            serious = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
            assert serious == []
            page.close()
        finally:
            server.close()
            thread.join()


def test_the_live_page_drops_old_steps_and_requests(visit: Callable[..., Any], tmp_path: Path) -> None:
    """The page keeps only one second of steps. When it drops a followed request, it hides the life of this request."""
    with operated(tmp_path / "s") as host:
        server = live_server(host.control.path)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            host.add("old", max_tokens=5)
            page = visit(server.url)
            is_live(page)
            with stepping(Slowly(host)):
                playwright.expect(page.locator("[data-part=finishedTitle]")).to_have_text("Finished: 1", timeout=10000)
                host.add("new", max_tokens=50)
                page.fill("[data-part=find]", "old")
                page.press("[data-part=find]", "Enter")
                playwright.expect(page.locator("[data-part=lifeTitle]")).to_have_text("The life of old")
                page.evaluate("limits.seconds = 1")
                playwright.expect(page.locator("#lost")).to_contain_text("dropped", timeout=10000)
                playwright.expect(page.locator("[data-part=life]")).to_be_hidden(timeout=10000)
                page.keyboard.press("n")
                is_live(page)
            page.keyboard.press("Home")
            playwright.expect(page.locator("#problem")).to_be_hidden()
            page.close()
        finally:
            server.close()
            thread.join()


@pytest.mark.long
@VLLM_INSTALLED
def test_the_live_page_shows_a_real_vllm(visit: Callable[..., Any], tmp_path: Path) -> None:
    """A real vLLM with this scheduler; the engine opens no port."""
    knobs = Knobs(DEMO, threads=1, max_num_seqs=2, max_num_batched_tokens=512, max_model_len=512)
    settings = json.dumps({"pointsman": {"socket": str(tmp_path / "s")}})
    scheduler = ("--scheduler-cls", "pointsman.integrations.vllm.Scheduler", "--additional-config", settings)
    side = VllmSide(knobs, eager=True, options=(*scheduler, "--num-gpu-blocks-override", "40"))
    try:
        server = live_server(str(tmp_path / "s"))
        thread = threading.Thread(target=server.serve)
        thread.start()
        page = visit(server.url)
        is_live(page)
        with busy(f"http://127.0.0.1:{side.port}", SERVED_MODEL_NAME):
            playwright.expect(page.locator("[data-part=waitingTitle]")).to_have_text("Waiting: 1", timeout=20000)
            assert text(page, "[data-part=runningTitle]") == "Running: 2 of 2"
            look_back(page)
            page.keyboard.press("n")
            is_live(page)
        page.close()
        server.close()
        thread.join()
    finally:
        side.stop()


class Slowly:
    """Steps of some milliseconds."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def step(self) -> None:
        self._host.step()
        time.sleep(0.005)
