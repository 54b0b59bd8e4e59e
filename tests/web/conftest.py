"""A real browser for pages that are files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module: Playwright holds an event loop in this thread, and no other may run beside it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are tried with Playwright")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"pages are tried in {CHROMIUM}, which is not there")
    with playwright.sync_playwright() as tool:
        running = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page by its address, with options of a browser's context. The test fails if the page logs an error, or
    sends a request to any server but its own."""
    complaints: list[str] = []
    contexts = []

    def go(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url) if not _may_ask(url, asked.url) else None)
        page.goto(url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def _may_ask(page: str, url: str) -> bool:
    if page.startswith("http:"):
        return url.startswith(page.partition("#")[0])
    return url.startswith(("file:", "blob:", "data:"))
