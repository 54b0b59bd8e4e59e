"""Formats of one request a line: Azure and BurstGPT CSV, Mooncake and measured JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias

from pointsman.traces.requests import MAX_HASH_ID, MOONCAKE_BLOCK_SIZE, MeasuredRequest, TraceRequest
from pointsman.traces.values import (
    Broken,
    date_time,
    field,
    integer,
    json_object,
    measured,
    number,
    seconds,
    shorten,
    tokens,
)

MAX_LINE = 2**26
"""Bytes. What is longer is no line of a trace, and would fill the memory."""

LineReader: TypeAlias = Callable[[str], TraceRequest | MeasuredRequest]


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """(line number, text) of the lines that are not blank.

    Raises:
        Broken: a line is no UTF-8 text, or too long.
    """
    for line_number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
        if len(raw) > MAX_LINE:
            raise Broken(f"line {line_number}: longer than {MAX_LINE} bytes; write one request a line")
        try:
            line = raw.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise Broken(f"line {line_number}: {error}") from None
        if line:
            yield line_number, line


def read_lines(file: BinaryIO, read_line: LineReader) -> Iterator[TraceRequest | MeasuredRequest]:
    """The requests of JSON lines, in the file's order."""
    return _read(numbered_lines(file), read_line)


def read_csv(file: BinaryIO) -> Iterator[TraceRequest | MeasuredRequest]:
    """The requests of a CSV, in the file's order; its header says which trace it is."""
    lines = numbered_lines(file)
    for line_number, header in lines:
        columns = [column.strip(' "').lower() for column in header.split(",")]
        if {"timestamp", "contexttokens", "generatedtokens"} <= set(columns):
            read_line = _csv_reader(columns, "timestamp", "contexttokens", "generatedtokens", date_time)
        elif {"timestamp", "request tokens", "response tokens"} <= set(columns):
            read_line = _csv_reader(columns, "timestamp", "request tokens", "response tokens", seconds)
        else:
            raise Broken(
                f"line {line_number}: no trace format begins like this: {shorten(header)!r}; a CSV has the columns "
                "TIMESTAMP, ContextTokens and GeneratedTokens, or Timestamp, Request tokens and Response tokens"
            )
        yield from _read(lines, read_line)


def _read(lines: Iterator[tuple[int, str]], read_line: LineReader) -> Iterator[TraceRequest | MeasuredRequest]:
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
            raise Broken(f"{len(values)} values where the header names {len(columns)} columns: {shorten(line)!r}")
        return TraceRequest(
            arrival_time=read_time(values[at_arrival]),
            num_prompt_tokens=tokens("prompt tokens", integer(values[at_prompt]), 1),
            num_output_tokens=tokens("output tokens", integer(values[at_output]), 0),
        )

    return read


def read_mooncake(line: str) -> TraceRequest:
    fields = json_object(line)
    length = tokens("input_length", field(fields, "input_length"), 1)
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i < MAX_HASH_ID for i in hash_ids):
        raise Broken(f"hash_ids must be a list of integers from 0 to 2**62 - 1, not {shorten(str(hash_ids))}")
    most = -(-length // MOONCAKE_BLOCK_SIZE)
    if len(hash_ids) > most:  # ids of blocks of another size would share prefixes that are none
        raise Broken(
            f"{len(hash_ids)} hash_ids for {length} tokens; with {MOONCAKE_BLOCK_SIZE} tokens a block there are {most}"
        )
    retention = fields.get("retention")
    if retention is not None and number("retention", retention) < 0:
        raise Broken(f"retention is {retention}; it must be a number of seconds, at least 0")
    return TraceRequest(
        arrival_time=number("timestamp", field(fields, "timestamp")) / 1000,
        num_prompt_tokens=length,
        num_output_tokens=tokens("output_length", field(fields, "output_length"), 0),
        block_hash_ids=tuple(hash_ids),
        retention=retention,
    )


def read_measured(line: str) -> TraceRequest:
    fields = json_object(line)
    return TraceRequest(
        arrival_time=number("arrival_time", field(fields, "arrival_time")),
        num_prompt_tokens=tokens("input_toks", field(fields, "input_toks"), 1),
        num_output_tokens=tokens("output_toks", field(fields, "output_toks"), 0),
    )


def read_measured_times(line: str) -> TraceRequest | MeasuredRequest:
    """As `read_measured`, with the times of the server's monotonic clock; a request without output has none."""
    fields = json_object(line)
    request = TraceRequest(
        arrival_time=number("queued_ts", field(fields, "queued_ts")),
        num_prompt_tokens=tokens("input_toks", field(fields, "input_toks"), 1),
        num_output_tokens=tokens("output_toks", field(fields, "output_toks"), 0),
    )
    if not request.num_output_tokens:
        return request
    first, last = (number(name, field(fields, name)) for name in ("first_token_ts", "last_token_ts"))
    return measured(request, str(fields.get("request_id", "")), first, last)
