"""The bytes of a film: a header, then chunks of columns, each compressed on its own. `film.py` writes them.

    file      MAGIC, uint32 length and JSON of the header, then chunks
    chunk     one letter, uint32 length, uint32 length before compression, zlib data
    data      the columns of the chunk's kind, in the order of `COLUMNS`: each a count and its numbers; in an `E` chunk
              then a count and the bytes of a JSON list, the strings

All numbers are integers in LEB128 (seven bits a byte, the lowest first), negative ones folded in between (zigzag: 0,
-1, 1, -2 are 0, 1, 2, 3). A column marked as differences holds each number minus the one before it.

    R    requests, by number: the order in which they were added
    E    events: `op` says in which order they happened, and for each kind its columns hold the arguments
    B    blocks of the chunk of events before it; may be left out, or skipped
    Z    the end: a film without it was cut off

Every `E` chunk begins with the state of all unfinished requests (a key frame), and every `B` chunk with that of all
blocks, so that a reader can begin at any of them.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import PointsmanError
from pointsman.core.observe.side_file import SideFile
from pointsman.core.state.reason import Reason
from pointsman.core.state.status import FinishReason, PreemptionCause, RequestStatus

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.signedinteger]
MAGIC: Final = b"pointsman film\n"
FORMAT_VERSION: Final = 3
_CHUNK = struct.Struct("<cII")
MAX_HEADER: Final = 1 << 20
"""Bytes of the header. Zeros take a thousandth of their room in the file, so every size has a bound of its own."""
MAX_CHUNK: Final = 1 << 25
"""Bytes that a chunk may have before compression."""
MAX_NUMBERS: Final = 1 << 24
"""Numbers in a chunk; 40 bytes each while a step of it is shown."""
MAX_STRINGS: Final = 1 << 24
"""Bytes of the strings of a chunk."""
MAX_FILM: Final = 1 << 30
"""Bytes of all chunks together, before compression."""
MAX_MEMORY: Final = 1 << 30
"""Bytes that a film takes in memory."""
NUMBERS_AT_ONCE: Final = 1 << 18
"""Numbers that are unpacked at once: it takes a hundred bytes for each."""


class FilmError(PointsmanError, ValueError):
    """It is no film, is broken, or of a version that this library does not read."""


class Op(enum.IntEnum):
    """What happened. A time is in microseconds."""

    ADDED = 0
    REFUSED = 1
    QUEUED = 2
    PARKED = 3
    DEFERRED = 4
    ADMITTED = 5
    PREEMPTED = 6
    ROLLED_BACK = 7
    FINISHED = 8
    STEP = 9
    UPDATE = 10
    STEPS = 11
    FAILED = 12
    LOAD_STARTED = 13
    LOAD_FINISHED = 14
    PRIORITY = 15
    EXTENDED = 16
    PAUSED = 17
    LIMITED = 18


class BlockOp(enum.IntEnum):
    """What became of blocks in a step."""

    APPENDED = 0
    """To the table of a request."""
    TABLE = 1
    """The whole table of a request."""
    BLANK = 2
    """Free, and without content that could be found."""
    CACHED = 3
    """Free, and with content that can be found."""
    HELD = 4
    """Referenced so often beside the tables, by transfers; `value` says how often."""
    STEPPED = 5
    """APPENDED in steps that were done at once; `value` is the step of each block, from 0."""


REASONS: Final = list(Reason)
STATUSES: Final = list(RequestStatus)
CAUSES: Final = list(PreemptionCause)
FINISH_REASONS: Final = list(FinishReason)
NAMES: Final = {
    "reasons": [reason.value for reason in REASONS],
    "statuses": [status.value for status in STATUSES],
    "causes": [cause.value for cause in CAUSES],
    "finish_reasons": [reason.value for reason in FINISH_REASONS],
    "ops": [op.name.lower() for op in Op],
    "block_ops": [op.name.lower() for op in BlockOp],
}
"""What the numbers of a film mean; its header has them."""

COLUMNS: Final[Mapping[str, Mapping[str, bool]]] = {
    # Column -> whether it holds differences.
    "R": {
        "id": False,  # number of the string in the chunk of events after it
        "tenant": False,  # likewise, + 1
        "arrival": True,
        "prompt_tokens": False,
        "max_tokens": False,
        "priority": False,
    },
    "E": {
        # The key frame: requests that run, in order of admission, then those queued and parked.
        "key_time": False,
        "key_running": True,
        "key_waiting": True,
        "key_parked": True,
        "key_status": False,  # of the waiting and the parked ones
        "key_reason": False,  # of the waiting ones, + 1
        "key_computed": False,  # of the running ones
        "key_cached": False,
        "key_generated": False,  # of all, in this order
        "key_prompt": False,
        "key_preemptions": False,
        "key_admissions": False,  # 0: it has not started
        "key_flight": False,  # of each step in flight how many rows
        "key_flight_request": False,  # + 1; 0: it has finished
        "key_flight_tokens": False,
        "key_flight_flags": False,
        "op": False,
        "time": True,
        # The request that it happened to; of steps there is none.
        "request": True,
        "refused_why": False,  # a string
        "parked_status": False,
        "deferred_reason": False,
        "deferred_missing": False,
        "deferred_holder": False,  # + 1
        "admitted_resumed": False,
        "admitted_cached": False,
        "admitted_external": False,
        "preempted_cause": False,
        "preempted_lost": False,
        "preempted_cached": False,
        "preempted_recovery": False,  # 0: none was decided, 1: recompute, 2: swap
        "preempted_by": False,  # the request that needs what it had, + 1; 0: none
        "preempted_missing": False,  # blocks that all running requests lack together
        "preempted_chooser": False,  # the victim policy's name, a string + 1; 0: none was asked
        "finished_reason": False,
        "finished_generated": False,
        "finished_detail": False,  # a string + 1
        "step_id": True,
        "step_blocked": False,  # reason + 1
        "step_free": True,  # free blocks
        "step_evicted": False,  # cached blocks whose content was evicted since the step before, or in these steps
        "step_blocker": True,  # the request that blocked the queue, + 1
        "step_skipped": False,  # how many were asked and passed over, + 1; 0: those of the step before
        "skipped_request": True,
        "step_exceptions": False,  # how many rows are not one token that is sampled from
        "exception_row": False,  # place among the running requests, minus the place after the one before
        "exception_tokens": False,
        "exception_flags": False,  # bit 0: it samples; above: drafts
        "update_exceptions": False,
        "update_row": False,
        "update_count": False,
        "steps_count": False,
        "steps_ends": False,  # how many of the next events are of their end: requests that finished, or a part of them
        "steps_micros": True,  # how long each step takes
        "failed_steps": False,
        "failed_rows": False,
        "failed_computed": False,  # of each running request, in order
        "load_tokens": False,
        "load_failed": False,
        "priority": False,
        "extended_prompt": False,
        "extended_generated": False,
        "pause_mode": False,  # 0: resumed, 1: admissions, 2: all
        "limit": False,  # + 1
    },
    "B": {
        "key_count": False,  # blocks of each running request's table
        "key_block": True,
        "key_held": True,
        "key_held_count": False,
        "key_cached": False,  # of all blocks whether they are free and cached, eight in a number
        "frame": True,  # which STEP or STEPS of the chunk
        "op": False,
        "request": True,
        "count": False,
        "block": True,
        "value": False,
    },
}


class Columns:
    """Columns of one chunk under construction: lists of integers by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.data: dict[str, list[int]] = {name: [] for name in COLUMNS[kind]}

    def pack(self, strings: Iterable[str] | None = None) -> bytes:
        """The chunk's data."""
        parts = []
        for name, differences in COLUMNS[self.kind].items():
            numbers = self.data[name]
            parts.append(_varint(len(numbers)))
            if numbers:  # most columns of a short chunk have none
                parts.append(pack_numbers(np.array(numbers, dtype=np.int64), differences))
        if strings is not None:
            text = json.dumps(list(strings), separators=(",", ":")).encode()
            parts += [_varint(len(text)), text]
        return b"".join(parts)


def unpack(kind: str, data: bytes) -> tuple[dict[str, IntArray], list[str]]:
    """The columns of a chunk's data, each in the smallest type that holds it, and its strings.

    Raises:
        FilmError: the data is no such chunk.
    """
    stream = np.frombuffer(data, dtype=np.uint8)
    is_end = stream < 128  # the last byte of each number
    if (num_numbers := np.count_nonzero(is_end)) > MAX_NUMBERS + MAX_STRINGS:
        raise FilmError(f"a chunk has {num_numbers:,} numbers, of at most {MAX_NUMBERS:,}; the film is broken")
    ends = is_end.nonzero()[0]
    position, total, columns = 0, 0, {}
    for name, differences in COLUMNS[kind].items():
        count, position = _read_one(stream, ends, position)
        total += count
        if total > MAX_NUMBERS:
            raise FilmError(f"column {name!r} has {count:,} numbers, and a chunk at most {MAX_NUMBERS:,}; it is broken")
        first = int(ends.searchsorted(position))
        if count > len(ends) - first:
            raise FilmError(
                f"column {name!r} has {count} numbers, of which {len(ends) - first} are there; it is broken"
            )
        after = int(ends[first + count - 1]) + 1 if count else position
        columns[name] = unpack_numbers(stream[position:after], ends[first : first + count] - position, differences)
        position = after
    strings: list[str] = []
    if position < len(data):
        count, position = _read_one(stream, ends, position)
        if count > MAX_STRINGS:
            raise FilmError(f"a chunk has {count:,} bytes of strings, of at most {MAX_STRINGS:,}; the film is broken")
        try:
            strings = json.loads(data[position : position + count])
        except (ValueError, RecursionError):
            raise FilmError("the strings of a chunk are no JSON; it is broken") from None
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise FilmError("the strings of a chunk are no list of strings; it is broken")
    return columns, strings


def _read_one(stream: npt.NDArray[np.uint8], ends: Int64Array, position: int) -> tuple[int, int]:
    index = int(ends.searchsorted(position))
    if index == len(ends):
        raise FilmError("a chunk ends within a column; it is broken")
    after = int(ends[index]) + 1
    number = 0
    for byte in reversed(stream[position:after].tolist()):
        number = number << 7 | byte & 127
    return number, after


def pack_numbers(values: Int64Array, differences: bool) -> bytes:
    """A column, without its count."""
    if differences and len(values):
        values = np.diff(values, prepend=0)
    return _varints((values << 1) ^ (values >> 63))


def unpack_numbers(stream: npt.NDArray[np.uint8], ends: Int64Array, differences: bool) -> IntArray:
    """What `pack_numbers` packed, in the smallest type that holds it.

    Args:
        stream: the bytes.
        ends: the places of the last bytes of the numbers.
        differences: whether they are those of each number and the one before it.
    """
    parts, before, begin = [], 0, 0
    for first in range(0, len(ends), NUMBERS_AT_ONCE):
        some = ends[first : first + NUMBERS_AT_ONCE]
        after = int(some[-1]) + 1
        values = _unfold(stream[begin:after], some - begin)
        if differences:
            values = values.cumsum() + before
            before = int(values[-1])
        parts.append(_narrow(values))
        begin = after
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int8)


def _narrow(values: Int64Array) -> IntArray:
    low, high = int(values.min()), int(values.max())
    for narrow in (np.int8, np.int16, np.int32):
        if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
            return values.astype(narrow)
    return values


def _unfold(stream: npt.NDArray[np.uint8], ends: Int64Array) -> Int64Array:
    if len(stream) == len(ends):  # the most frequent case: numbers of one byte
        folded = stream.astype(np.uint64)
        return (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if int(lengths.max()) > 10:
        raise FilmError("a number has more than ten bytes; it is broken")
    places = np.arange(len(stream)) - starts.repeat(lengths)
    parts = (stream & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    folded = np.add.reduceat(parts, starts)
    return (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)


def _varint(value: int) -> bytes:
    """LEB128 of one number that is not negative."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varints(values: Int64Array) -> bytes:
    """LEB128 of numbers that are taken as unsigned."""
    left = values.astype(np.uint64)
    count = len(left)
    if count and left.max() < 128:  # the most frequent case
        return left.astype(np.uint8).tobytes()
    out = np.zeros((count, 10), dtype=np.uint8)
    lengths = np.ones(count, dtype=np.int64)
    for place in range(10):
        out[:, place] = left & np.uint64(127)
        left = left >> np.uint64(7)
        more = left > 0
        if not more.any():
            out = out[:, : place + 1]
            break
        out[more, place] |= 128
        lengths[more] += 1
    return out[np.arange(out.shape[1]) < lengths[:, None]].tobytes()


def write_header(file: BinaryIO | SideFile, header: Mapping[str, Any]) -> int:
    """Magic and header; returns how many bytes were written."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return file.write(MAGIC + struct.pack("<I", len(text)) + text)


def write_chunk(file: BinaryIO | SideFile, kind: str, data: bytes) -> int:
    """A chunk, compressed; returns how many bytes were written."""
    packed = zlib.compress(data)
    return file.write(_CHUNK.pack(kind.encode(), len(packed), len(data)) + packed)


def read_header(file: BinaryIO) -> dict[str, Any]:
    """The header.

    Raises:
        FilmError: it is no film, or of another version.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise FilmError("it is no film (pointsman film makes one from a recording)")
    size = file.read(4)
    length = struct.unpack("<I", size)[0] if len(size) == 4 else 0
    text = file.read(length) if length <= MAX_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
        version = header["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FilmError("the film's header is broken; make it again from its recording") from None
    if version != FORMAT_VERSION:
        raise FilmError(
            f"the film has format version {version}, and this library reads {FORMAT_VERSION}; make it again from its "
            "recording, or use the library that made it"
        )
    _check_header(header)
    return header


def _check_header(header: dict[str, Any]) -> None:
    """What readers take for granted."""
    config, names = header.get("config"), header.get("names")
    if not isinstance(config, dict) or not isinstance(names, dict):
        raise FilmError("the film's header lacks a configuration or names; it is broken")
    for name, least, most in _NUMBERS_OF_CONFIG:
        value = config.get(name)
        if type(value) is not int or not least <= value <= most:
            raise FilmError(f"the film's header has {name} {value!r}, not {least} to {most}; it is broken")
    if config["num_reserved_blocks"] >= config["num_blocks"]:
        raise FilmError("the film's header reserves every block; it is broken")
    for name, values in NAMES.items():
        given = names.get(name)
        if not isinstance(given, list) or len(given) < len(values) or not all(isinstance(one, str) for one in given):
            raise FilmError(f"the film's header lacks {name}; it is broken")


_NUMBERS_OF_CONFIG = (
    ("num_blocks", 1, 1 << 26),
    ("block_size", 1, 1 << 20),
    ("num_reserved_blocks", 0, 1 << 26),
    ("max_num_seqs", 1, 1 << 31),
    ("max_num_batched_tokens", 1, 1 << 31),
)


def read_chunks(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """(letter, data) of each chunk, the end included. It stops, without one, where the file is cut off.

    Raises:
        FilmError: a chunk is broken.
    """
    total = 0
    while True:
        head = file.read(_CHUNK.size)
        if len(head) < _CHUNK.size:
            return
        letter, length, size = _CHUNK.unpack(head)
        if size > MAX_CHUNK or length > 2 * MAX_CHUNK or letter.decode("latin-1") not in "REBZ":
            raise FilmError(f"a chunk {letter!r} of {size} bytes is none of a film; it is broken")
        total += size
        if total > MAX_FILM:
            raise FilmError(
                f"the film has more than {MAX_FILM:,} bytes when it is unpacked, and no more can be shown; record a "
                "shorter run, or leave out the blocks"
            )
        packed = file.read(length)
        if len(packed) < length:
            return
        try:
            data = zlib.decompressobj().decompress(packed, size)
        except zlib.error as error:
            raise FilmError(f"a chunk cannot be unpacked ({error}); the film is broken") from None
        if len(data) != size:
            raise FilmError(f"a chunk has {len(data)} bytes instead of {size}; the film is broken")
        yield letter.decode(), data
