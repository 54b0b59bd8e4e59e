"""Readers of request traces: arrival times, prompt lengths and output lengths.

A published trace has no text, but enough to load a scheduler as the traced service was loaded: arrival times, prompt
and output lengths, and in some formats which prompts share a prefix. `read_trace` recognises the format by the file's
first line:

    format              first line                                   arrival        prompts that share a prefix
    Azure CSV           TIMESTAMP,ContextTokens,GeneratedTokens      date and time  unknown
    BurstGPT CSV        Timestamp,Model,Request tokens,...           seconds        unknown
    Mooncake JSON       {"timestamp": ..., "input_length": ...,      milliseconds   one hash id per 512 tokens
                         "output_length": ..., "hash_ids": [...]}
    measured JSON       {"request_id": ..., "input_toks": ...,       seconds        unknown
                         "output_toks": ..., "arrival_time": ...}

A hash id stands for the content of its block and of everything before it. `prompt_token_ids` turns ids into tokens:
equal ids at the same place become equal tokens, so a prefix cache has the same hits.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import PointsmanError

MOONCAKE_BLOCK_SIZE = 512
MAX_TOKENS = 2**31 - 1
MAX_HASH_ID = 2**62


class TraceError(PointsmanError, ValueError):
    """A trace that cannot be read. The message names the file, the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_time: float
    """Seconds since the first arrival of the trace."""
    num_prompt_tokens: int
    """At least 1."""
    num_output_tokens: int
    """What the traced service generated; 0 for a request that failed there."""
    block_hash_ids: tuple[int, ...] = ()
    """One id per `hash_block_size` prompt tokens: equal ids, equal content from the start of the prompt. Prompt
    tokens beyond the last id are not shared."""
    hash_block_size: int = MOONCAKE_BLOCK_SIZE
    """Tokens that one hash id covers."""


_LineReader = Callable[[str], TraceRequest]


def read_trace(path: str | PathLike[str], *, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace file, by arrival, the first one at 0 seconds.

    Args:
        path: an Azure or BurstGPT CSV, or Mooncake or measured JSON lines.
        limit: read only that many requests from the start of the file; None: all of them.

    Raises:
        TraceError: a line is broken, the format is unknown or there is no request in the file.
        OSError: the file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for the whole trace")
    requests: list[TraceRequest] = []
    with Path(path).open("rb") as file:
        for request in _requests(file, str(path)):
            requests.append(request)
            if len(requests) == limit:
                break
    if not requests:
        raise TraceError(f"{path}: no request in it; expected an Azure or BurstGPT CSV, or Mooncake JSON lines")
    requests.sort(key=lambda request: request.arrival_time)  # stable: those of one moment keep the file's order
    start = requests[0].arrival_time
    return [replace(request, arrival_time=request.arrival_time - start) for request in requests]


def prompt_token_ids(request: TraceRequest, vocab_size: int, seed: int, index: int) -> npt.NDArray[np.int32]:
    """Tokens for a prompt of the traced length: where hash ids are equal, so are the tokens.

    A token is a hash of (seed, content, position) and depends on nothing else, where the content is the hash id of
    the token's block, or the request itself where it has none. Prompts with different content agree in a token only
    by chance, once in `vocab_size` positions.

    Args:
        request: the request of the trace.
        vocab_size: tokens are drawn from 0 to vocab_size - 1.
        seed: another seed gives other tokens to the whole trace.
        index: the request's index in the trace, which distinguishes requests without hash ids.

    Returns:
        [num_prompt_tokens] int32.

    Raises:
        ValueError: `vocab_size` is below 1 or beyond int32.
    """
    if not 1 <= vocab_size <= MAX_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 1 and {MAX_TOKENS}")
    length = request.num_prompt_tokens
    content = np.full(length, 2 * index + 1, dtype=np.uint64)  # odd: this request alone; even: a shared block
    ids = np.array(request.block_hash_ids, dtype=np.uint64) * np.uint64(2)
    shared = np.repeat(ids, request.hash_block_size)[:length]
    content[: len(shared)] = shared
    seed_key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    keys = _mix(seed_key + content)
    positions: npt.NDArray[np.uint64] = np.arange(length, dtype=np.uint64)
    tokens = _mix(keys + positions) % np.uint64(vocab_size)
    return tokens.astype(np.int32)


def _mix(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit words that scatters neighbours (the SplitMix64 generator's step)."""
    words = keys + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# ---------------------------------------------------------------------- lines and formats


class _BrokenLine(Exception):
    """What is wrong with a line; `_requests` adds the file and the line number."""


def _requests(file: BinaryIO, name: str) -> Iterator[TraceRequest]:
    """The requests in the file's order; arrival times are on the file's own clock, in seconds."""
    read_line: _LineReader | None = None
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if not line:
                continue
            if read_line is None:
                read_line, is_header = _recognise(line)
                if is_header:
                    continue
            yield read_line(line)
        except (_BrokenLine, UnicodeDecodeError) as error:
            raise TraceError(f"{name}, line {number}: {error}") from None


def _recognise(line: str) -> tuple[_LineReader, bool]:
    """The reader for the lines of a file that begins with `line`, and whether `line` is only a header."""
    if line.startswith("{"):
        fields = _json_object(line)
        if "input_length" in fields:
            return _read_mooncake, False
        if "input_toks" in fields:
            return _read_measured, False
        raise _BrokenLine(f'neither "input_length" nor "input_toks" among its fields: {_shorten(line)!r}')
    columns = [column.strip(' "').lower() for column in line.split(",")]
    if {"timestamp", "contexttokens", "generatedtokens"} <= set(columns):
        return _csv_reader(columns, "timestamp", "contexttokens", "generatedtokens", _date_time), True
    if {"timestamp", "request tokens", "response tokens"} <= set(columns):
        return _csv_reader(columns, "timestamp", "request tokens", "response tokens", _seconds), True
    raise _BrokenLine(f"no trace format begins like this: {_shorten(line)!r}")


def _csv_reader(
    columns: list[str], arrival: str, prompt: str, output: str, read_time: Callable[[str], float]
) -> _LineReader:
    at_arrival, at_prompt, at_output = columns.index(arrival), columns.index(prompt), columns.index(output)

    def read(line: str) -> TraceRequest:
        values = [value.strip(' "') for value in line.split(",")]
        if len(values) != len(columns):
            raise _BrokenLine(f"{len(values)} values where the header names {len(columns)} columns: {_shorten(line)!r}")
        return TraceRequest(
            arrival_time=read_time(values[at_arrival]),
            num_prompt_tokens=_tokens("prompt tokens", _integer(values[at_prompt]), 1),
            num_output_tokens=_tokens("output tokens", _integer(values[at_output]), 0),
        )

    return read


def _read_mooncake(line: str) -> TraceRequest:
    fields = _json_object(line)
    length = _tokens("input_length", _field(fields, "input_length"), 1)
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i < MAX_HASH_ID for i in hash_ids):
        raise _BrokenLine(f"hash_ids must be a list of integers from 0 to 2**62 - 1, not {_shorten(str(hash_ids))}")
    most = -(-length // MOONCAKE_BLOCK_SIZE)
    if len(hash_ids) > most:  # ids of blocks of another size would share prefixes that are none
        raise _BrokenLine(
            f"{len(hash_ids)} hash_ids for {length} tokens; with {MOONCAKE_BLOCK_SIZE} tokens a block there are {most}"
        )
    return TraceRequest(
        arrival_time=_number("timestamp", _field(fields, "timestamp")) / 1000,
        num_prompt_tokens=length,
        num_output_tokens=_tokens("output_length", _field(fields, "output_length"), 0),
        block_hash_ids=tuple(hash_ids),
    )


def _read_measured(line: str) -> TraceRequest:
    fields = _json_object(line)
    return TraceRequest(
        arrival_time=_number("arrival_time", _field(fields, "arrival_time")),
        num_prompt_tokens=_tokens("input_toks", _field(fields, "input_toks"), 1),
        num_output_tokens=_tokens("output_toks", _field(fields, "output_toks"), 0),
    )


# ---------------------------------------------------------------------- values


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise _BrokenLine(f"not JSON ({error}): {_shorten(line)!r}") from None
    if not isinstance(value, dict):
        raise _BrokenLine(f"not a JSON object: {_shorten(line)!r}")
    return value


def _field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise _BrokenLine(f'no field "{name}" in it')
    return fields[name]


def _tokens(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _BrokenLine(f"{name} is {value!r}; it must be a whole number")
    if not least <= value <= MAX_TOKENS:
        raise _BrokenLine(f"{name} is {value}; it must be between {least} and {MAX_TOKENS}")
    return value


def _integer(text: str) -> int | str:
    """The number that `text` spells, or `text` itself for the error message."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise _BrokenLine(f"{name} is {_shorten(repr(value))}; it must be a finite number")


def _seconds(text: str) -> float:
    try:
        return _number("timestamp", float(text))
    except ValueError:
        raise _BrokenLine(f"timestamp is {text!r}; it must be a number of seconds") from None


def _date_time(text: str) -> float:
    """Seconds since 1970, to the microsecond. Without an offset the time is taken as UTC: only differences count."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _BrokenLine(f"timestamp is {text!r}; expected a form like 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
