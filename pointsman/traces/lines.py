"""Reads formats with one request per line: Azure and BurstGPT CSV, Mooncake, Qwen-Bailian and measured JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

from pointsman.core.recording import WholeLines
from pointsman.files import read_text_lines, shown
from pointsman.traces.requests import (
    MAX_HASH_ID,
    MOONCAKE_BLOCK_SIZE,
    QWEN_BLOCK_SIZE,
    MeasuredRequest,
    TraceRequest,
)
from pointsman.traces.values import (
    Broken,
    check_number,
    check_tokens,
    get_field,
    make_measured,
    parse_date_time,
    parse_integer,
    parse_json_object,
    parse_seconds,
)

LineReader: TypeAlias = Callable[[str], TraceRequest | MeasuredRequest]


def numbered_lines(file: BinaryIO, *, of_recording: bool = False) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, as (line number, text) pairs.

    Args:
        of_recording: whether to leave out an incomplete last line.

    Raises:
        Broken: a line is not UTF-8 text, or is too long.
    """
    try:
        lines = read_text_lines(file)
        for line_number, line in enumerate(WholeLines(lines) if of_recording else lines, start=1):
            if stripped := line.strip():
                yield line_number, stripped
    except ValueError as error:
        raise Broken(str(error)) from None


def read_lines(file: BinaryIO, read_line: LineReader) -> Iterator[TraceRequest | MeasuredRequest]:
    """The requests of JSON lines, in the file's order. `read_line`: function that reads one line."""
    return _read_requests(numbered_lines(file), read_line)


def read_csv(file: BinaryIO) -> Iterator[TraceRequest | MeasuredRequest]:
    """The requests of a CSV, in the file's order. The header determines the format."""
    lines = numbered_lines(file)
    for line_number, header in lines:
        columns = [column.strip(' "').lower() for column in header.split(",")]
        if {"timestamp", "contexttokens", "generatedtokens"} <= set(columns):
            read_line = _csv_reader(columns, "timestamp", "contexttokens", "generatedtokens", parse_date_time)
        elif {"timestamp", "request tokens", "response tokens"} <= set(columns):
            read_line = _csv_reader(columns, "timestamp", "request tokens", "response tokens", parse_seconds)
        else:
            raise Broken(
                f"line {line_number}: no known trace format begins with {shown(header)!r}; a CSV has the columns "
                "TIMESTAMP, ContextTokens and GeneratedTokens, or Timestamp, Request tokens and Response tokens"
            )
        yield from _read_requests(lines, read_line)


def _read_requests(lines: Iterator[tuple[int, str]], read_line: LineReader) -> Iterator[TraceRequest | MeasuredRequest]:
    for line_number, line in lines:
        try:
            yield read_line(line)
        except Broken as error:
            raise Broken(f"line {line_number}: {error}") from None


def _csv_reader(
    columns: list[str], arrival: str, prompt: str, output: str, read_time: Callable[[str], float]
) -> LineReader:
    at_arrival, at_prompt, at_output = columns.index(arrival), columns.index(prompt), columns.index(output)

    def read(line: str) -> TraceRequest:
        values = [value.strip(' "') for value in line.split(",")]
        if len(values) != len(columns):
            raise Broken(f"the line has {len(values)} values, but the header {len(columns)} columns: {shown(line)!r}")
        return TraceRequest(
            arrival_time=read_time(values[at_arrival]),
            num_prompt_tokens=check_tokens("prompt tokens", parse_integer(values[at_prompt]), 0),
            num_output_tokens=check_tokens("output tokens", parse_integer(values[at_output]), 0),
        )

    return read


def read_hashed(file: BinaryIO) -> Iterator[TraceRequest]:
    """The requests of JSON lines with hash ids, in the file's order: a trace of Mooncake or of Qwen-Bailian.

    A line of Qwen-Bailian has a "chat_id", and a timestamp in seconds; a line of Mooncake has no "chat_id", and a
    timestamp in milliseconds. The block size follows from the number of hash ids: see `_BlockSize`.

    Raises:
        Broken: a value is wrong, lines have a "chat_id" and others have none, or no block size fits all lines.
    """
    block_size = _BlockSize()
    is_qwen: bool | None = None
    for line_number, line in numbered_lines(file):
        try:
            fields = parse_json_object(line)
            if is_qwen is None:
                is_qwen = "chat_id" in fields
            elif is_qwen != ("chat_id" in fields):
                had, has = ("a", "none") if is_qwen else ("no", "one")
                raise Broken(
                    f'the lines before have {had} "chat_id" and this one has {has}: with "chat_id", timestamps are '
                    "seconds (Qwen-Bailian), without it milliseconds (Mooncake); put the two kinds into separate files"
                )
            yield _hashed_request(fields, line_number, 1.0 if is_qwen else 1e3, block_size)
        except Broken as error:
            raise Broken(f"line {line_number}: {error}") from None


def _hashed_request(
    fields: dict[str, Any], line_number: int, units_per_second: float, block_size: _BlockSize
) -> TraceRequest:
    """Create the trace request from the fields of a JSON line. `units_per_second`: 1 if the line's
    timestamp counts seconds, 1000 if it counts milliseconds."""
    length = check_tokens("input_length", get_field(fields, "input_length"), 0)
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i < MAX_HASH_ID for i in hash_ids):
        raise Broken(f"hash_ids must be a list of integers from 0 to 2**62 - 1, not {shown(str(hash_ids))}")
    retention = fields.get("retention")
    if retention is not None and check_number("retention", retention) < 0:
        raise Broken(f"retention is {retention}; it must be a number of seconds, at least 0")
    return TraceRequest(
        arrival_time=check_number("timestamp", get_field(fields, "timestamp")) / units_per_second,
        num_prompt_tokens=length,
        num_output_tokens=check_tokens("output_length", get_field(fields, "output_length"), 0),
        block_hash_ids=tuple(hash_ids),
        hash_block_size=block_size.infer_size(len(hash_ids), length, line_number),
        retention=retention,
    )


class _BlockSize:
    """Infers the number of tokens that a hash id covers from the length and the number of ids of each prompt.

    Blocks of 512 tokens (Mooncake): no prompt has more ids than blocks; tokens after the last id are not shared. Blocks
    of 16 tokens (Qwen-Bailian): a prompt with ids has one id for each block, the last, partial block included. A prompt
    of up to 16 tokens with one id fits both sizes. Its id covers the whole prompt with either size, so the size can be
    left to later lines.
    """

    def __init__(self) -> None:
        self._against: dict[int, str] = {}  # for each excluded size, the first line that excludes it, in words

    def infer_size(self, num_ids: int, length: int, line_number: int) -> int:
        """The block size that fits all lines so far, this line included. `num_ids`, `length`: number of hash ids and of
        prompt tokens of this line.

        Raises:
            Broken: this line excludes the last remaining size.
        """
        most, exact = -(-length // MOONCAKE_BLOCK_SIZE), -(-length // QWEN_BLOCK_SIZE)
        fits = {MOONCAKE_BLOCK_SIZE: num_ids <= most, QWEN_BLOCK_SIZE: num_ids in (0, exact)}
        what = f"{num_ids} hash_ids for {length} tokens"
        before = next(iter(self._against.values()), "")
        for size, fit in fits.items():
            if not fit:
                self._against.setdefault(size, f"line {line_number} has {what}")
        left = [size for size in fits if size not in self._against]
        if left:
            return left[0]
        raise Broken(
            f"{what}; blocks of {MOONCAKE_BLOCK_SIZE} tokens (Mooncake) have at most {most} ids, blocks of "
            f"{QWEN_BLOCK_SIZE} (Qwen-Bailian) exactly {exact}"
            + (f"; {before}, which excludes the other size" if before else "")
            + "; correct or remove the line"
        )


def read_measured(line: str) -> TraceRequest:
    fields = parse_json_object(line)
    return TraceRequest(
        arrival_time=check_number("arrival_time", get_field(fields, "arrival_time")),
        num_prompt_tokens=check_tokens("input_toks", get_field(fields, "input_toks"), 0),
        num_output_tokens=check_tokens("output_toks", get_field(fields, "output_toks"), 0),
    )


def read_measured_times(line: str) -> TraceRequest | MeasuredRequest:
    """As `read_measured`, with measured times on the server's monotonic clock. A request without output has no
    times."""
    fields = parse_json_object(line)
    request = TraceRequest(
        arrival_time=check_number("queued_ts", get_field(fields, "queued_ts")),
        num_prompt_tokens=check_tokens("input_toks", get_field(fields, "input_toks"), 0),
        num_output_tokens=check_tokens("output_toks", get_field(fields, "output_toks"), 0),
    )
    if not request.num_output_tokens:
        return request
    first, last = (check_number(name, get_field(fields, name)) for name in ("first_token_ts", "last_token_ts"))
    return make_measured(request, str(fields.get("request_id", "")), first, last)
