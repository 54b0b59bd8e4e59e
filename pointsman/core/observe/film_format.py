"""The format of films: a header, then chunks of columns, each compressed separately. `film.py` writes them.

    file      MAGIC, uint32 length and JSON of the header, then chunks
    chunk     one letter, uint32 length, uint32 length before compression, zlib data
    data      the columns of the chunk's kind, in the order of `COLUMNS`, each as the count of its numbers and the
              numbers; an `E` chunk has strings after the columns, as a count of bytes and a JSON list

All numbers are integers in LEB128 (seven bits a byte, the lowest first) after a zigzag mapping of signed numbers (0,
-1, 1, -2 become 0, 1, 2, 3). A column marked as differences holds each number minus the preceding number.

    R    requests, in the order in which they were added; the number of a request is its index in this order
    E    events: `op` has the kinds of the events in order; the columns of each kind have the arguments
    B    blocks of the preceding chunk of events; this chunk may be missing, and a reader may skip it
    Z    the end; a film without this chunk was cut off

Every `E` chunk begins with the state of all unfinished requests (a key frame), and every `B` chunk with the state of
all blocks. So a reader can begin at any of these chunks.
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
"""Maximum number of bytes of the header. The sizes of chunks after unpacking have maxima, too, as zeros compress by a
factor of a thousand."""
MAX_CHUNK: Final = 1 << 25
"""Maximum number of bytes of a chunk before compression."""
MAX_NUMBERS: Final = 1 << 24
"""Maximum count of numbers in a chunk; each number takes 40 bytes of memory while a step of the chunk is shown."""
MAX_STRINGS: Final = 1 << 24
"""Maximum number of bytes of the strings of a chunk."""
MAX_FILM: Final = 1 << 30
"""Maximum number of bytes of all chunks of a film together, before compression."""
MAX_MEMORY: Final = 1 << 30
"""Maximum number of bytes of a film in memory."""
NUMBERS_AT_ONCE: Final = 1 << 18
"""Count of numbers that are unpacked in one pass, during which each number takes a hundred bytes of memory."""


class FilmError(PointsmanError, ValueError):
    """Error: a file is no film, is broken, or has a version that this library does not read."""


class Op(enum.IntEnum):
    """The kinds of events in a film. Times of events are in microseconds."""

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
    """The kinds of changes of blocks in a step."""

    APPENDED = 0
    """Blocks that are appended to the block table of a request."""
    TABLE = 1
    """All blocks in the block table of a request."""
    BLANK = 2
    """Free blocks without cached content."""
    CACHED = 3
    """Free blocks with cached content."""
    HELD = 4
    """Blocks referenced by transfers; `value` is the number of references of each that are not from block tables."""
    STEPPED = 5
    """Blocks that are appended in a fast-forward; `value` is the index, from 0, of the step that appends each block."""


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
"""The names of the enumerated numbers in a film, which its header contains."""

COLUMNS: Final[Mapping[str, Mapping[str, bool]]] = {
    # Name of the column -> whether the column has differences.
    "R": {
        "id": False,  # index of the string in the following chunk of events
        "tenant": False,  # like `id`, + 1; 0: none
        "arrival": True,
        "prompt_tokens": False,
        "max_tokens": False,
        "priority": False,
    },
    "E": {
        # The key frame: running requests in admission order, then queued and parked ones.
        "key_time": False,
        "key_running": True,
        "key_waiting": True,
        "key_parked": True,
        "key_status": False,  # of waiting and parked requests
        "key_reason": False,  # of waiting requests, + 1; 0: none
        "key_computed": False,  # of running requests
        "key_cached": False,
        "key_generated": False,  # of running, waiting and parked requests
        "key_prompt": False,
        "key_preemptions": False,
        "key_admissions": False,  # 0: the request has not started
        "key_flight": False,  # number of rows of each step in flight
        "key_flight_request": False,  # number of the request, + 1; 0: it has finished
        "key_flight_tokens": False,
        "key_flight_flags": False,
        "op": False,
        "time": True,
        # The request of the event; steps have none.
        "request": True,
        "refused_why": False,  # index of a string
        "parked_status": False,
        "deferred_reason": False,
        "deferred_missing": False,
        "deferred_holder": False,  # number of the request, + 1; 0: none
        "admitted_resumed": False,
        "admitted_cached": False,
        "admitted_external": False,
        "preempted_cause": False,
        "preempted_lost": False,
        "preempted_cached": False,
        "preempted_recovery": False,  # 0: no decision, 1: recompute, 2: swap
        "preempted_by": False,  # the request that needs its blocks or its row, + 1; 0: none
        "preempted_missing": False,  # blocks that all running requests lack together
        "preempted_chooser": False,  # index of a string, the victim policy's name, + 1; 0: no policy chose
        "finished_reason": False,
        "finished_generated": False,
        "finished_detail": False,  # index of a string, + 1; 0: none
        "step_id": True,
        "step_blocked": False,  # reason, + 1; 0: none
        "step_free": True,  # number of free blocks
        "step_evicted": False,  # cached blocks evicted since the previous step, or in a fast-forward
        "step_blocker": True,  # number of the request that blocked the queue, + 1; 0: none
        "step_skipped": False,  # number of skipped requests, + 1; 0: the same requests as in the previous step
        "skipped_request": True,
        "step_exceptions": False,  # number of rows that do not compute one token and sample
        "exception_row": False,  # index among the running requests, minus the index after the preceding exception
        "exception_tokens": False,
        "exception_flags": False,  # bit 0: it samples; above: drafts
        "update_exceptions": False,
        "update_row": False,
        "update_count": False,
        "steps_count": False,
        "steps_ends": False,  # number of following events of requests, or prompt parts, that ended in these steps
        "steps_micros": True,  # duration of each step
        "failed_steps": False,
        "failed_rows": False,
        "failed_computed": False,  # computed tokens of each running request, in admission order
        "load_tokens": False,
        "load_failed": False,
        "priority": False,
        "extended_prompt": False,
        "extended_generated": False,
        "pause_mode": False,  # 0: resumed, 1: admissions, 2: all
        "limit": False,  # limit on active requests, + 1; 0: none
    },
    "B": {
        "key_count": False,  # number of blocks in the table of each running request
        "key_block": True,
        "key_held": True,
        "key_held_count": False,
        "key_cached": False,  # for each block whether it is free and cached, eight bits in a number
        "frame": True,  # index of the STEP or STEPS event among those of the chunk
        "op": False,
        "request": True,
        "count": False,
        "block": True,
        "value": False,
    },
}


class Columns:
    """The columns of a chunk that is being written, as lists of integers by column name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.data: dict[str, list[int]] = {name: [] for name in COLUMNS[kind]}

    def pack(self, strings: Iterable[str] | None = None) -> bytes:
        """The columns, and the strings if given, as the bytes of the chunk before compression."""
        parts = []
        for name, differences in COLUMNS[self.kind].items():
            numbers = self.data[name]
            parts.append(_varint(len(numbers)))
            if numbers:  # most columns of a short chunk have no numbers
                parts.append(pack_numbers(np.array(numbers, dtype=np.int64), differences))
        if strings is not None:
            text = json.dumps(list(strings), separators=(",", ":")).encode()
            parts += [_varint(len(text)), text]
        return b"".join(parts)


def unpack(kind: str, data: bytes) -> tuple[dict[str, IntArray], list[str]]:
    """Unpack the columns of a chunk, each as an array of the smallest type that fits, and the strings of the chunk.

    Raises:
        FilmError: the data is broken.
    """
    stream = np.frombuffer(data, dtype=np.uint8)
    is_end = stream < 128  # the last byte of each number
    if (num_numbers := np.count_nonzero(is_end)) > MAX_NUMBERS + MAX_STRINGS:
        raise FilmError(f"a chunk has {num_numbers:,} numbers, more than {MAX_NUMBERS:,}; the film is broken")
    ends = is_end.nonzero()[0]
    position, total, columns = 0, 0, {}
    for name, differences in COLUMNS[kind].items():
        count, position = _read_number(stream, ends, position)
        total += count
        if total > MAX_NUMBERS:
            raise FilmError(
                f"column {name!r} has {count:,} numbers, and all columns of a chunk together at most {MAX_NUMBERS:,}; "
                "the film is broken"
            )
        first = int(ends.searchsorted(position))
        if count > len(ends) - first:
            raise FilmError(
                f"column {name!r} should have {count} numbers and has {len(ends) - first}; the film is broken"
            )
        after = int(ends[first + count - 1]) + 1 if count else position
        columns[name] = unpack_numbers(stream[position:after], ends[first : first + count] - position, differences)
        position = after
    strings: list[str] = []
    if position < len(data):
        count, position = _read_number(stream, ends, position)
        if count > MAX_STRINGS:
            raise FilmError(f"a chunk has {count:,} bytes of strings, more than {MAX_STRINGS:,}; the film is broken")
        try:
            strings = json.loads(data[position : position + count])
        except (ValueError, RecursionError):
            raise FilmError("the strings of a chunk are not JSON; the film is broken") from None
        if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
            raise FilmError("the strings of a chunk are not a list of strings; the film is broken")
    return columns, strings


def _read_number(stream: npt.NDArray[np.uint8], ends: Int64Array, position: int) -> tuple[int, int]:
    index = int(ends.searchsorted(position))
    if index == len(ends):
        raise FilmError("a chunk ends within a column; the film is broken")
    after = int(ends[index]) + 1
    number = 0
    for byte in reversed(stream[position:after].tolist()):
        number = number << 7 | byte & 127
    return number, after


def pack_numbers(values: Int64Array, differences: bool) -> bytes:
    """Pack the numbers of a column, without their count."""
    if differences and len(values):
        values = np.diff(values, prepend=0)
    return _varints((values << 1) ^ (values >> 63))


def unpack_numbers(stream: npt.NDArray[np.uint8], ends: Int64Array, differences: bool) -> IntArray:
    """Unpack a column that `pack_numbers` packed, as an array of the smallest type that fits.

    Args:
        stream: the bytes of the column, [bytes].
        ends: the index in `stream` of the last byte of each number, [numbers].
        differences: whether each number is the difference from the preceding number.
    """
    parts, before, begin = [], 0, 0
    for first in range(0, len(ends), NUMBERS_AT_ONCE):
        some = ends[first : first + NUMBERS_AT_ONCE]
        after = int(some[-1]) + 1
        values = _decode_numbers(stream[begin:after], some - begin)
        if differences:
            values = values.cumsum() + before
            before = int(values[-1])
        parts.append(_to_smallest_type(values))
        begin = after
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int8)


def _to_smallest_type(values: Int64Array) -> IntArray:
    low, high = int(values.min()), int(values.max())
    for narrow in (np.int8, np.int16, np.int32):
        if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
            return values.astype(narrow)
    return values


def _decode_numbers(stream: npt.NDArray[np.uint8], ends: Int64Array) -> Int64Array:
    if len(stream) == len(ends):  # the most frequent case: numbers of one byte
        folded = stream.astype(np.uint64)
        return (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if int(lengths.max()) > 10:
        raise FilmError("a number has more than ten bytes; the film is broken")
    places = np.arange(len(stream)) - starts.repeat(lengths)
    parts = (stream & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    folded = np.add.reduceat(parts, starts)
    return (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)


def _varint(value: int) -> bytes:
    """Encode a non-negative number in LEB128."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _varints(values: Int64Array) -> bytes:
    """Encode numbers in LEB128, one after the other; negative numbers are reinterpreted as unsigned."""
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
    """Write `MAGIC` and the header to a film. Returns the number of bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return file.write(MAGIC + struct.pack("<I", len(text)) + text)


def write_chunk(file: BinaryIO | SideFile, kind: str, data: bytes) -> int:
    """Compress `data` and write it to a film as a chunk of the kind `kind`, a letter. Returns the number of bytes
    written."""
    packed = zlib.compress(data)
    return file.write(_CHUNK.pack(kind.encode(), len(packed), len(data)) + packed)


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read and check the header of a film.

    Raises:
        FilmError: the file is no film, or has another version.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise FilmError("the file is not a film; `pointsman film` makes a film from a recording")
    size = file.read(4)
    length = struct.unpack("<I", size)[0] if len(size) == 4 else 0
    text = file.read(length) if length <= MAX_HEADER else b""
    try:
        header: dict[str, Any] = json.loads(text)
        version = header["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FilmError("the film's header is broken; make the film again from its recording") from None
    if version != FORMAT_VERSION:
        raise FilmError(
            f"the film has format version {version}, and this library reads version {FORMAT_VERSION}; make the film "
            "again from its recording, or use the library that made it"
        )
    _check_header(header)
    return header


def _check_header(header: dict[str, Any]) -> None:
    """Check the configuration and the names in a film's header, on which readers rely."""
    config, names = header.get("config"), header.get("names")
    if not isinstance(config, dict) or not isinstance(names, dict):
        raise FilmError("the film's header lacks `config` or `names`; the film is broken")
    for name, least, most in _NUMBERS_OF_CONFIG:
        value = config.get(name)
        if type(value) is not int or not least <= value <= most:
            raise FilmError(
                f"{name} in the film's header is {value!r}, not an integer from {least} to {most}; the film is broken"
            )
    if config["num_reserved_blocks"] >= config["num_blocks"]:
        raise FilmError("num_reserved_blocks in the film's header is not below num_blocks; the film is broken")
    for name, values in NAMES.items():
        given = names.get(name)
        if not isinstance(given, list) or len(given) < len(values) or not all(isinstance(one, str) for one in given):
            raise FilmError(f"the film's header lacks the list {name!r} in `names`; the film is broken")


_NUMBERS_OF_CONFIG = (
    ("num_blocks", 1, 1 << 26),
    ("block_size", 1, 1 << 20),
    ("num_reserved_blocks", 0, 1 << 26),
    ("max_num_seqs", 1, 1 << 31),
    ("max_num_batched_tokens", 1, 1 << 31),
)


def read_chunks(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield (letter, uncompressed data) of each chunk, the end (`Z`) included. If the file is cut off, the end is
    missing.

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
            raise FilmError(
                f"a chunk has kind {letter!r} and {size:,} bytes; the kinds are R, E, B and Z, of at most "
                f"{MAX_CHUNK:,} bytes; the film is broken"
            )
        total += size
        if total > MAX_FILM:
            raise FilmError(
                f"the film has more than {MAX_FILM:,} bytes after decompression, the maximum that can be shown; record "
                "a shorter run, or a film without blocks"
            )
        packed = file.read(length)
        if len(packed) < length:
            return
        try:
            data = zlib.decompressobj().decompress(packed, size)
        except zlib.error as error:
            raise FilmError(f"a chunk cannot be unpacked ({error}); the film is broken") from None
        if len(data) != size:
            raise FilmError(f"a chunk unpacks to {len(data)} bytes instead of {size}; the film is broken")
        yield letter.decode(), data
