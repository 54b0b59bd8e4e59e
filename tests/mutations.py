"""Makes broken copies of files: the same index gives the same copy, so that a failure can be repeated.

`mutated(data, structure, index)` breaks a valid file in one to three places. Half of the mutations ignore the format
(bytes, numbers, lines); the others use the structure: values of JSON, or the headers of safetensors and GGUF.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any, Literal

Structure = Literal["lines", "json", "json-lines", "safetensors", "gguf", "binary"]
Mutation = Callable[[bytes, random.Random], bytes]

DEEP = 3_000
"""Nesting beyond the recursion limit of Python."""
LONG = 3_000_000
"""Bytes of a very long line."""
NUMBERS = (
    "0", "-1", "-0.0", "0.5", "1e-320", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "2147483647", "2147483648",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809", "1000000000000",
    "1" + "0" * 40, "9" * 5000, "0x10", "1_000", "٣", "true",
)  # fmt: skip
VALUES = (
    *NUMBERS, "null", "false", '""', '"x"', '"-1"', "[]", "{}", "[null]", "[[[]]]", '{"": null}', '"\\ud800"',
    '"\\u0000"',
    '"../../../../etc/passwd"', '"/dev/zero"', '"' + "y" * 100_000 + '"', "[" + "0," * 50_000 + "0]",
    "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP,
)  # fmt: skip
PIECES = (
    b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xfe\xff", b"\r", b"\n", b"\n\n\n", b"\x1a", b'"',
    b"{", b"}", b"[", b"]", b",", b":", b"\\", b"'", b"%", b"\xe2\x80\xa8", b"\x00" * 4096,
    b"&a [*a]", b"!!python/object:os.x",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def mutated(data: bytes, structure: Structure, index: int) -> bytes:
    """The file, broken by the mutation `index`."""
    rng = random.Random(index)
    kinds = [*BYTES, *(OF_STRUCTURE[structure] * len(BYTES))[: len(BYTES)]] if structure in OF_STRUCTURE else BYTES
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(kinds)(data, rng)
    return data


# ---------------------------------------------------------------------- bytes and lines


def flip(data: bytes, rng: random.Random) -> bytes:
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 8, 64)) if data else 0):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def delete(data: bytes, rng: random.Random) -> bytes:
    start, end = _piece(data, rng)
    return data[:start] + data[end:]


def duplicate(data: bytes, rng: random.Random) -> bytes:
    start, end = _piece(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 5)) + data[end:]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice((0, len(data), rng.randint(0, len(data))))
    piece = rng.choice((*PIECES, rng.randbytes(rng.choice((1, 16, 500)))))
    return data[:at] + piece + data[at:]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, rng.randint(0, len(data)), rng.randint(0, min(len(data), 200)), len(data) - 1))]


def other_number(data: bytes, rng: random.Random) -> bytes:
    numbers = list(_NUMBER.finditer(data, *_window(data, rng)))
    if not numbers:
        return insert(data, rng)
    found = rng.choice(numbers)
    return data[: found.start()] + rng.choice(NUMBERS).encode() + data[found.end() :]


def other_lines(data: bytes, rng: random.Random) -> bytes:
    """Swap, double, drop or join lines, or make one very long or deeply nested."""
    lines = data.split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(40)
    if kind == 0:
        lines[one] += rng.choice((b"x", b" ", b"\xff", b"\x00", b"[", b'{"a":', b"1,", b"9")) * (LONG // 5)
    elif kind == 1:
        lines[one] = rng.choice((b"[" * DEEP, b'{"a":' * DEEP))
    elif kind < 10:
        lines[one] = lines[other]
    elif kind < 18:
        del lines[one]
    elif kind < 22:
        lines.insert(one, rng.choice((b"", b"null", b"[]", b"{}", b"0", b'""', b"#", b"---", b"\xff\xfe")))
    elif kind < 26:
        return (data[-1:] or b"\n").join(lines)
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def encoded(data: bytes, rng: random.Random) -> bytes:
    """The text in another encoding, or after a byte-order mark."""
    kind = rng.randrange(4)
    if kind == 0:
        return b"\xef\xbb\xbf" + data
    return data.decode("latin-1").encode(("utf-16", "utf-32", "utf-16-be")[kind - 1])


def _piece(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 2, 10, 100, 5000)))


def _window(data: bytes, rng: random.Random) -> tuple[int, int]:
    """A part of a long file, so that its numbers are found quickly; half of the time it is the beginning."""
    start = rng.choice((0, rng.randint(0, len(data))))
    return start, start + 4000


BYTES: list[Mutation] = [flip, delete, duplicate, insert, truncate, other_number, other_lines, encoded]

# ---------------------------------------------------------------------- JSON


class _Raw(str):
    """JSON text in place of a value."""


def other_json(data: bytes, rng: random.Random) -> bytes:
    """Rename, drop, double or move a member or an item of the document, or change its value."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return other_number(data, rng)
    return _written(_changed(document, rng)).encode("utf-8", "surrogatepass")


def other_json_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.choice((0, rng.randrange(len(lines))))
    lines[at] = other_json(lines[at], rng)
    return b"\n".join(lines)


def _changed(document: Any, rng: random.Random) -> Any:
    places = _places(document)
    if not places:
        return _Raw(rng.choice(VALUES))
    # First a depth, then a place: deep lists hold most of the values.
    depth = rng.randint(1, max(len(place) for place in places))
    path = rng.choice([place for place in places if len(place) == depth])
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], rng.randrange(12)
    if kind < 6:
        parent[key] = _Raw(rng.choice(VALUES))
    elif kind == 6:
        del parent[key]
    elif kind == 7 and isinstance(parent, dict):
        parent[rng.choice(("", "x", key.upper(), key + "s", "__class__", "\ud800"))] = parent.pop(key)
    elif kind == 8 and isinstance(parent, dict):  # the key twice
        parent[key] = _Raw(f"{_written(parent[key])},{json.dumps(key)}:{rng.choice(VALUES)}")
    elif kind == 9:
        parent[key] = [parent[key]]
    elif kind == 10:
        other: Any = document
        for each in rng.choice(places):
            other = other[each]
        parent[key] = _Raw(_written(other))
    elif isinstance(parent, list):
        parent.insert(key, _Raw(rng.choice(VALUES)))
    else:
        parent["x"] = _Raw(rng.choice(VALUES))
    return document


def _places(document: Any) -> list[tuple[Any, ...]]:
    """The paths of all values within."""
    found: list[tuple[Any, ...]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), document)]
    while waiting and len(found) < 100_000:
        path, value = waiting.pop()
        if path:
            found.append(path)
        if isinstance(value, dict):
            waiting += [((*path, key), one) for key, one in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, at), one) for at, one in enumerate(value)]
    return found


def _written(value: Any) -> str:
    if isinstance(value, _Raw):
        return str.__str__(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    try:
        return json.dumps(value)
    except RecursionError:
        return "null"


# ---------------------------------------------------------------------- safetensors


def other_header(data: bytes, rng: random.Random) -> bytes:
    """Change the length of the header, the header (types, shapes, offsets, names), or the bytes after it."""
    size = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + size], data[8 + size :]
    kind = rng.randrange(10)
    if kind == 0:
        sizes = (0, 1, size - 1, size + 1, size + len(tensors), len(data), 2**31, 2**32, 2**63, 2**64 - 1, 100_000_000)
        return rng.choice(sizes).to_bytes(8, "little") + data[8:]
    if kind == 1:
        return data[: 8 + size] + rng.choice((tensors[:-1], tensors + b"\x00", b"", tensors * 2))
    if kind == 2:
        header = header + b" " * rng.choice((1, 8, 4096, LONG))
    elif kind < 7:
        header = _other_tensor(header, rng)
    else:
        header = other_json(header, rng)
    return len(header).to_bytes(8, "little") + header + tensors


def _other_tensor(header: bytes, rng: random.Random) -> bytes:
    try:
        tensors = json.loads(header)
        names = [name for name in tensors if name != "__metadata__"]
        one, other = tensors[rng.choice(names)], tensors[rng.choice(names)]
        begin, end = one["data_offsets"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return other_json(header, rng)
    kind = rng.randrange(6)
    if kind == 0:
        one["dtype"] = rng.choice(("F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "F4", "C64", "X", "f32", ""))
    elif kind == 1:
        one["shape"] = rng.choice(
            ([], [0], [-1], [2**63], [2**32, 2**32], [1] * 70, one["shape"][::-1], [10**6, 10**6])
        )
    elif kind == 2:
        one["data_offsets"] = rng.choice(
            ([end, begin], [begin, begin], [begin - 4, end - 4], [0, end], [begin, 2**63], [-4, end], [begin], [0.5, 1])
        )
    elif kind == 3:
        one["data_offsets"] = other["data_offsets"]  # they overlap
    elif kind == 4:
        one.update(other)
    else:
        one["dtype"], one["shape"] = other["dtype"], other["shape"]
    return json.dumps(tensors).encode()


# ---------------------------------------------------------------------- GGUF

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of number."""


def other_gguf(data: bytes, rng: random.Random) -> bytes:
    """Change one number of the header (a count, a length, a type, a value, a shape, an offset), or one text."""
    try:
        numbers, texts = _gguf_places(data)
    except (struct.error, KeyError, OverflowError, RecursionError):  # the file was broken before
        return flip(data, rng)
    if rng.randrange(4) == 0:
        start, end = rng.choice(texts)
        text = rng.choice((b"", b"x", b"llama", b"token_embd.weight", b"\xff", b"y" * 70_000, data[start:end] * 2))
        return data[: start - 8] + struct.pack("<Q", len(text)) + text + data[end:]
    start, width = rng.choice(numbers[:8]) if rng.randrange(8) == 0 else rng.choice(numbers)
    old = int.from_bytes(data[start : start + width], "little")
    values = (0, 1, 2, 3, 8, 9, old - 1, old + 1, old * 2, old // 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
    big = (2**63 - 1, 2**63, 2**64 - 1, 2**40, len(data), 0x7FC00000, 0xFF800000, 0x42280000)
    value = rng.choice((*values, *big)) % 2 ** (8 * width)
    return data[:start] + value.to_bytes(width, "little") + data[start + width :]


def _gguf_places(data: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The positions of the header's numbers, with their widths, and of its texts, with their ends. Of a long array of
    texts only the first ones are included."""
    numbers, texts, at = [(4, 4), (8, 8), (16, 8)], [], 24

    def number(width: int) -> int:
        nonlocal at
        if at + width > len(data):
            raise OverflowError
        numbers.append((at, width))
        at += width
        return int.from_bytes(data[at - width : at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        texts.append((at, at + length))
        at += length

    def value(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            kind, length = number(4), number(8)
            for index in range(min(length, len(data))):
                if index < 4:
                    value(kind)
                elif kind == 8:
                    at += 8 + struct.unpack_from("<Q", data, at)[0]
                else:
                    at += _WIDTHS[kind]
        else:
            number(_WIDTHS[kind])

    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    for _ in range(num_fields):
        text()
        value(number(4))
    for _ in range(num_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return numbers, texts


OF_STRUCTURE: dict[str, list[Mutation]] = {
    "json": [other_json],
    "json-lines": [other_json_line],
    "safetensors": [other_header],
    "gguf": [other_gguf],
}
