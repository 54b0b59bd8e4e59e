"""The documentation site: it builds without a warning, names every public name, and is searched from its folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pointsman
import pointsman.engine
import pointsman.traces

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "scripts" / "build_docs.py"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.e2e
def test_the_site_has_the_course_and_a_film(site: Path) -> None:
    for name in ("index.html", "course.html", "film.html", "guides/take_the_course.html"):
        assert (site / name).is_file(), name


@pytest.mark.e2e
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference" / "api").glob("*.html"))
    anchors = set(re.findall(r'id="(pointsman\.[\w.]+)"', text))
    names = {f"pointsman.{name}" for name in pointsman.__all__ if name != "__version__"}
    names |= {f"pointsman.engine.{name}" for name in pointsman.engine.__all__ if name != "RepetitionDetectionParams"}
    constants = {"FIGURES", "MAX_HASH_ID", "MAX_TOKENS", "MOONCAKE_BLOCK_SIZE", "QWEN_BLOCK_SIZE"}
    names |= {f"pointsman.traces.{name}" for name in set(pointsman.traces.__all__) - constants}
    assert names - anchors == set()


@pytest.mark.e2e
def test_the_site_needs_no_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', path.read_text(encoding="utf-8")
        )
        assert loaded == [], path


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("preempted", "Reduce preemptions"),
        ("watermark", "Nine claims about schedulers, tested > Watermark"),
        ("why does my request wait", "Find out why a request waits"),
    ],
)
def test_a_search_finds_the_page_from_a_folder(site: Path, browser: Any, question: str, title: str) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on(
        "pageerror", lambda error: errors.append(str(error))
    )  # a page in a folder cannot fetch texts of the results
    page.goto(f"{(site / 'search.html').as_uri()}?q={question.replace(' ', '+')}")
    found = page.locator("#search-results ul.search li a").first
    assert found.inner_text() == title
    assert set(errors) <= {"Failed to fetch"}


@pytest.mark.e2e
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    for name in ("index", "guides/find_out_why_a_request_waits", "reference/configuration", "benchmarks"):
        page.goto((site / f"{name}.html").as_uri())
        sizes = json.loads(page.evaluate("JSON.stringify([document.body.scrollWidth, window.innerWidth])"))
        assert sizes[0] <= sizes[1], name


def test_tables_fit_a_desktop_and_no_page_shows_an_error(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    for path in sorted(site.rglob("*.html")):
        if path.name in {"course.html", "film.html"} or path.parent.name == "decisions":
            continue
        page.goto(path.as_uri())
        wide = "[...document.querySelectorAll('.table-wrapper')].filter(t => t.scrollWidth > t.clientWidth + 1).length"
        assert page.evaluate(wide) == 0, f"{path.name} has a table that scrolls sideways"
        assert "ERROR:" not in page.inner_text("body"), path.name
