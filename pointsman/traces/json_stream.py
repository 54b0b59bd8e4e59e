"""Reads a JSON document piece by piece, so that a document of gigabytes needs little memory.

The caller iterates over the `members()` of an object or the `items()` of a list, and reads each value with `value()`,
or skips the value with `skip()`. Skipped values, such as the texts of a benchmark result, are not stored.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from pointsman.files import MAX_LINE, shown
from pointsman.traces.values import Broken

CHUNK = 2**18
MAX_VALUE = MAX_LINE
"""Maximum number of characters of a value that `value()` reads."""

_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_MAY_CONTINUE = ("", ".", "e", "E")  # text after a number that may be incomplete
_DECODER = json.JSONDecoder()


class JsonStream:
    """A reading position in a JSON document. Errors are `Broken`, and name the line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._num_lines = 0  # number of lines before `_text`
        self._ended = False

    @property
    def line(self) -> int:
        """The number of the line at the position, from 1."""
        return self._num_lines + self._text.count("\n", 0, self._at) + 1

    def make_error(self, fault: str) -> Broken:
        return Broken(f"line {self.line}: {fault}")

    def peek(self) -> str:
        """The next character that is not white space, without reading past it; "" at the end of the file."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # also matches an empty text
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more(CHUNK):
                return ""

    def members(self) -> Iterator[str]:
        """The keys of an object. After each key the caller reads or skips the value of the key."""
        for _ in self._elements("{", "}"):
            if self.peek() != '"':
                raise self._syntax_error("a key expected")
            key = self.value()
            self._read_mark(":")
            yield key

    def items(self) -> Iterator[int]:
        """The indices of a list. After each index the caller reads or skips the element."""
        yield from self._elements("[", "]")

    def value(self) -> Any:
        """Read the value at the position.

        Raises:
            Broken: the value is not JSON, or longer than `MAX_VALUE`.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
                if self._ended:
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                    raise self._syntax_error(reason) from None
            else:
                if self._ended or self._text[end : end + 1] not in _MAY_CONTINUE:
                    self._at = end
                    return value
            if len(self._text) - self._at > MAX_VALUE:
                raise self._syntax_error(f"a value of at most {MAX_VALUE} characters expected")
            self._read_more(max(CHUNK, len(self._text) - self._at))

    def skip(self) -> None:
        """Skip the value at the position."""
        depth = 0
        first = self.peek()
        if first not in ("{", "[", '"'):
            self.value()
            return
        while True:
            found = _STRUCTURE.search(self._text, self._at)
            if found is None:
                self._at = len(self._text)
                self._read_more_or_fail()
                continue
            self._at = found.end()
            mark = found[0]
            if mark == '"':
                self._skip_string()
            else:
                depth += 1 if mark in "{[" else -1
            if depth == 0:
                return

    # ------------------------------------------------------------------ parts of the document

    def _elements(self, opening: str, closing: str) -> Iterator[int]:
        self._read_mark(opening)
        index = 0
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            yield index
            index += 1
            if self.peek() == closing:
                self._at += 1
                return
            self._read_mark(",")

    def _read_mark(self, mark: str) -> None:
        if self.peek() != mark:
            raise self._syntax_error(f"{mark!r} expected")
        self._at += 1

    def _skip_string(self) -> None:
        """Skip the remainder of a string, whose opening quote was already read."""
        while True:
            found = _STRING_END.search(self._text, self._at)
            if found is None:
                self._at = len(self._text)
                self._read_more_or_fail()
                continue
            self._at = found.end()
            if found[0] == '"':
                return
            if self._at == len(self._text):
                self._read_more_or_fail()
            self._at += 1  # the escaped character

    def _read_more_or_fail(self) -> None:
        if not self._read_more(CHUNK):
            raise self._syntax_error("the end of the value expected")

    def _read_more(self, size: int) -> bool:
        """Read about `size` more characters, and drop the text before the position. Returns False at the end of the
        file."""
        while not self._ended:
            data = self._file.read(size)
            self._ended = not data
            try:
                new = self._decoder.decode(data, final=self._ended)
            except UnicodeDecodeError as error:
                raise self.make_error(str(error)) from None
            self._num_lines += self._text.count("\n", 0, self._at)
            self._text = self._text[self._at :] + new
            self._at = 0
            if new:
                return True
        return False

    def _syntax_error(self, fault: str) -> Broken:
        found = self._text[self._at : self._at + 80]
        if not found:
            return self.make_error(f"not JSON ({fault}): the file ends here; is it cut short?")
        return self.make_error(f"not JSON ({fault}): {shown(found)!r}")
