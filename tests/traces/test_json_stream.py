"""Reading documents piece by piece: every value is whole or skipped, wherever the pieces end."""

from __future__ import annotations

import io
import json

import pytest

from pointsman.traces import json_stream
from pointsman.traces.json_stream import JsonStream
from pointsman.traces.values import Broken

DOCUMENT = {
    "texts": ['brackets ]}[{ and a quote " and \\', "", "Ω" * 20],
    "numbers": [0, -12.5, 1e300, 123456789012],
    "nested": {"a": [[1, 2], {"b": None}], "c": {}},
    "empty": [],
    "last": True,
}


@pytest.fixture(params=[1, 2, 3, 7, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_stream, "CHUNK", request.param)
    return int(request.param)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("skipped", [(), ("texts", "nested"), ("numbers", "empty", "last")])
def test_a_document_read_in_chunks_of_any_size_has_the_same_values(
    chunk: int, indent: int | None, skipped: tuple[str, ...]
) -> None:
    data = json.dumps(DOCUMENT, indent=indent, ensure_ascii=False).encode("utf-8-sig")
    stream = JsonStream(io.BytesIO(data))
    read = {}
    for key in stream.members():
        if key in skipped:
            stream.skip()
        elif key in ("texts", "numbers", "empty"):
            read[key] = [stream.value() for _ in stream.items()]
        else:
            read[key] = stream.value()
    assert read == {key: value for key, value in DOCUMENT.items() if key not in skipped}
    assert stream.peek() == ""
    assert stream.line == data.count(b"\n") + 1


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"a" 1}', "line 1: not JSON (':' expected)"),
        ('{\n"a": 1\n"b"}', "line 3: not JSON (',' expected)"),
        ('{"a": 1, 2}', "a key expected"),
        ('{"a": tru', "'tru'"),
        ('{"a": "open', "cut short"),
        ('{"a": [1, [2', "cut short"),
        ('{"a": "\udcff"}', "codec can't decode"),
    ],
)
def test_broken_documents_are_reported_with_the_line(chunk: int, text: str, wrong: str) -> None:
    for take in (JsonStream.skip, JsonStream.value):
        stream = JsonStream(io.BytesIO(text.encode(errors="surrogateescape")))
        with pytest.raises(Broken) as caught:
            for _ in stream.members():
                take(stream)
        assert take is JsonStream.value or wrong in str(caught.value)
        assert str(caught.value).startswith("line ")


def test_an_endless_value_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MAX_VALUE", 1000)
    monkeypatch.setattr(json_stream, "CHUNK", 100)
    file = io.BytesIO(b'["' + b"x" * 10_000_000)
    with pytest.raises(Broken, match="a value of at most 1000 characters expected"):
        JsonStream(file).value()
    assert file.tell() < 10_000


def test_skipped_values_are_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 100)
    stream = JsonStream(io.BytesIO(b'[["' + b"x" * 20_000 + b'"], "' + b"y" * 20_000 + b'", 3]'))
    longest = 0
    for index in stream.items():
        if index < 2:
            stream.skip()
        else:
            assert stream.value() == 3
        longest = max(longest, len(stream._text))
    assert longest < 300
