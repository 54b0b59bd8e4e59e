"""The live page and film, over HTTP."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest

from pointsman.web.film import Film
from pointsman.web.live import read_records

pytestmark = pytest.mark.e2e
FIELDS = {"prompt": "The import statement", "max_tokens": 40, "ignore_eos": True}


def films_of(answer: Any) -> Iterator[Film]:
    """The parts of the film, each parsed as a film."""
    stream, header, num_read = b"", b"", 0
    for data in answer.iter_raw():
        stream += data
        records = list(read_records(stream))
        for kind, content in records[num_read:]:
            if kind == "H":
                header = content
            elif kind == "P":
                yield Film(io.BytesIO(header + content))
        num_read = len(records)


def test_live_page_has_no_data_and_only_its_own_script(http: httpx.Client) -> None:
    page = http.get("/live")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert "default-src 'none'; script-src 'sha256-" in page.text and "connect-src 'self'; base-uri 'none'" in page.text
    head = http.head("/live")
    assert (head.status_code, head.content) == (200, b"")


def test_two_watchers_get_the_same_film(http: httpx.Client) -> None:
    with http.stream("GET", "/live/film") as one, http.stream("GET", "/live/film") as other:
        assert one.headers["content-type"] == "application/octet-stream"
        name = http.post("/v1/completions", json=FIELDS).json()["id"]
        with closing(films_of(one)) as first, closing(films_of(other)) as second:
            found, same = next(first), next(second)
    assert [request.request_id.startswith(name) for request in found.requests] == [True]
    assert found.frames[0] == same.frames[0] and found.requests == same.requests


def test_new_film_is_started_after_the_last_watcher_leaves(http: httpx.Client) -> None:
    """The next film begins at 0 again; a continued film would be a second old."""
    for _ in range(2):
        with http.stream("GET", "/live/film") as answer, closing(films_of(answer)) as films:
            http.post("/v1/completions", json=FIELDS)
            assert next(films).frames[0].time < 1.0
        time.sleep(1.2)


def test_slow_watcher_does_not_block_others(http: httpx.Client) -> None:
    with http.stream("GET", "/live/film"):
        for _ in range(5):
            assert http.post("/v1/completions", json=FIELDS).json()["usage"]["completion_tokens"] == 40


def test_watcher_beyond_the_maximum_is_refused(http: httpx.Client) -> None:
    streams = [http.stream("GET", "/live/film") for _ in range(17)]
    answers = [stream.__enter__() for stream in streams]
    assert [answer.status_code for answer in answers] == [200] * 16 + [503]
    assert b"16 pages, the maximum, already show this engine live; close one of them" in answers[-1].read()
    for stream in streams:
        stream.__exit__(None, None, None)
