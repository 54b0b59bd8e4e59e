"""`pointsman learn`: the path of the course, and when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman.cli import learn
from pointsman.web.course import build
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused

Run = Callable[..., Finished]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that would be opened in a browser. The working directory is empty; the course has one lesson."""
    found: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn.webbrowser, "open", found.append)
    monkeypatch.setattr(build, "LESSONS", build.LESSONS[:1])
    return found


def test_learn_writes_the_course_and_opens_it(pointsman: Run, opened: list[str], tmp_path: Path) -> None:
    made = pointsman("learn")
    page = tmp_path / "pointsman-course.html"
    assert (made.code, made.out) == (0, "pointsman-course.html\n")
    assert opened == [page.as_uri()] and "Content-Security-Policy" in page.read_text()


def test_a_course_written_with_out_is_not_opened(pointsman: Run, opened: list[str], tmp_path: Path) -> None:
    """With a folder as --out, new or existing, the course is its index.html."""
    assert pointsman("learn", "--out", "sub/new/").out == "sub/new/index.html\n"
    assert pointsman("learn", "--out", tmp_path).out == f"{tmp_path / 'index.html'}\n"
    assert (tmp_path / "index.html").read_text() == (tmp_path / "sub/new/index.html").read_text()
    assert opened == []
    assert pointsman("learn", "-o", "course.html", "--open").code == 0
    assert opened == [(tmp_path / "course.html").as_uri()]


def test_an_unwritable_path_of_the_course_is_refused(pointsman: Run, opened: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_refused(pointsman("learn", "--out", "file/course.html"), "cannot write file/course.html: ")
    assert opened == []
