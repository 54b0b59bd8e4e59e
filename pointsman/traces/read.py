"""Recognises the format of a trace file and reads its requests."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import BinaryIO, TypeAlias

from pointsman.core.recording import FORMAT, kind_of_other_file
from pointsman.files import MAX_MESSAGE, open_input, shown
from pointsman.traces.guidellm import read_guidellm
from pointsman.traces.json_stream import JsonStream
from pointsman.traces.lines import read_csv, read_hashed, read_lines, read_measured, read_measured_times
from pointsman.traces.recordings import read_recording
from pointsman.traces.requests import LeftOut, MeasuredRequest, Trace, TraceError, TraceRequest, about_left_out
from pointsman.traces.values import Broken
from pointsman.traces.vllm_bench import read_vllm_bench

HEAD = 2**20
"""Maximum number of bytes at the start of a file that are used to recognise its format."""

Row: TypeAlias = TraceRequest | MeasuredRequest | LeftOut
Reader: TypeAlias = Callable[[BinaryIO], Iterator[Row]]


def read_trace(path: str | PathLike[str], *, limit: int | None = None) -> Trace[TraceRequest]:
    """The requests of a trace file, by arrival, the first one at 0 seconds.

    Rows without prompt tokens, and requests that a load generator never sent, are left out and counted. Requests
    without output (they failed) are part of the result; `served` leaves such requests out.

    Args:
        path: path of an Azure or BurstGPT CSV, Mooncake, Qwen-Bailian or measured JSON lines, a result of `vllm bench
            serve`, a guidellm report or a Pointsman recording.
        limit: maximum number of requests to read from the start of the file; None: all requests.

    Raises:
        TraceError: a line is broken, the format is unknown or there is no request in the file.
        OSError: the file cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for the whole trace")
    requests: list[TraceRequest] = []
    left_out: Counter[LeftOut] = Counter()
    with _open(path) as file:
        for each in _read_rows(file, str(path), timed=False):
            if isinstance(each, LeftOut):
                left_out[each] += 1
                continue
            requests.append(each.request if isinstance(each, MeasuredRequest) else each)
            if len(requests) == limit:
                break
    if not requests:
        found = about_left_out(left_out.total(), left_out) or "Give a CSV or JSON lines, one request per line."
        raise TraceError(f"{path}: the file has no request that can be read. {found}")
    requests.sort(key=lambda request: request.arrival_time)  # stable: simultaneous requests keep the file's order
    start = requests[0].arrival_time
    return Trace((replace(request, arrival_time=request.arrival_time - start) for request in requests), left_out)


def read_measurements(path: str | PathLike[str]) -> Trace[MeasuredRequest]:
    """The requests of a file with their measured times, by arrival, the first one queued at 0 seconds.

    Requests without output (failed) or without times (not streamed) are left out and counted, as are rows that
    `read_trace` leaves out.

    Args:
        path: path of measured JSON lines, a result of `vllm bench serve`, a guidellm report or a Pointsman recording.

    Raises:
        TraceError: a line is broken, the times of a request are out of order, or the file has no measured times.
        OSError: the file cannot be read.
    """
    found: list[MeasuredRequest] = []
    left_out: Counter[LeftOut] = Counter()
    with _open(path) as file:
        for each in _read_rows(file, str(path), timed=True):
            if isinstance(each, MeasuredRequest):
                found.append(each)
            elif isinstance(each, LeftOut):
                left_out[each] += 1
            else:
                left_out[LeftOut.NO_TIMES if each.num_output_tokens else LeftOut.NO_OUTPUT] += 1
    if not found:
        raise TraceError(
            f"{path}: no measured times in the file; give JSON lines with queued_ts, first_token_ts and last_token_ts, "
            "or a result of vllm bench serve --save-result --save-detailed"
        )
    found.sort(key=lambda each: each.queued)
    return Trace((_shift_times(each, found[0].queued) for each in found), left_out)


def _open(path: str | PathLike[str]) -> io.BufferedReader:
    """Open a file or a pipe so that its first bytes can be inspected (`peek`) before it is read."""
    return io.BufferedReader(open_input(path), HEAD)


def _shift_times(measured: MeasuredRequest, start: float) -> MeasuredRequest:
    """The measured request with `start` subtracted from all of its times."""
    queued = measured.queued - start
    request = replace(measured.request, arrival_time=queued)
    first_token, last_token = measured.first_token - start, measured.last_token - start
    return MeasuredRequest(request, measured.request_id, queued, first_token, last_token)


def _read_rows(file: io.BufferedReader, name: str, timed: bool) -> Iterator[Row]:
    """Read the rows of a trace file, in the file's order: requests, and rows that are left out. Times are seconds on
    the file's own clock.

    Args:
        timed: whether measured JSON lines must have measured times.
    """
    try:
        for each in _recognise_format(file.peek(), timed)(file):
            yield LeftOut.NO_PROMPT if _has_no_prompt(each) else each
    except Broken as error:
        raise TraceError(f"{name}, {shown(str(error), MAX_MESSAGE)}") from None


def _has_no_prompt(row: Row) -> bool:
    if isinstance(row, MeasuredRequest):
        row = row.request
    return isinstance(row, TraceRequest) and not row.num_prompt_tokens


def _is_other_guidellm(begin: str) -> bool:
    """Whether the text begins a report of guidellm in YAML, whose first lines are keys of the report, or in CSV, whose
    header begins with the ids of the run and the benchmark."""
    first_line = begin.partition("\n")[0].strip().lower()
    if first_line in ("args:", "benchmarks:", "metadata:") or first_line.startswith("type_: generative_benchmark"):
        return True
    names = [name.strip(' "') for name in first_line.split(",")]
    return len(names) > 2 and (
        names[0] == "run info" or {"run id", "benchmark id"} <= set(names) or ({"type", "run id"} <= set(names))
    )


def _recognise_format(head: bytes, timed: bool) -> Reader:
    """Recognise a trace format by `head`, the first bytes of a file; returns the function that reads files of this
    format. `timed`: as in `_read`."""
    begin = head.decode("utf-8-sig", errors="replace").lstrip()
    if (kind := kind_of_other_file(head)) in ("a film", "a page"):
        source = "the recording that it was made from" if kind == "a film" else "a trace or a recording"
        raise Broken(f"line 1: the file is {kind}; give {source}")
    if _is_other_guidellm(begin):
        raise Broken(
            "line 1: a report of guidellm as YAML or CSV; only its JSON report is read: run guidellm with "
            "--output-path x.json"
        )
    if not begin.startswith("{"):
        return read_csv
    stream = JsonStream(io.BytesIO(head))
    for key in stream.members():
        if key == "input_length":
            return read_hashed
        if key == "input_toks":
            return partial(read_lines, read_line=read_measured_times if timed else read_measured)
        if key in ("endpoint_type", "ttfts"):
            return read_vllm_bench
        if key in ("metadata", "benchmarks"):
            return read_guidellm
        if key == "arrivals":
            raise Broken(
                "line 1: a summary of a whole run, which pointsman calibrate reads; it is no trace of requests"
            )
        if key == "hash_id_scope":
            raise Broken(
                "line 1: a session of a coding agent, with its requests in one line; write each request as a line with "
                '"timestamp" (ms), "input_length", "output_length" and "hash_ids"'
            )
        if key != "format":
            stream.skip()
        elif stream.value() == FORMAT:
            return read_recording
    raise stream.make_error(
        'unknown trace format: the line has no "input_length" and no "input_toks", and does not begin a recording, a '
        f"result of vllm bench serve or a guidellm report: {shown(begin.splitlines()[0])!r}"
    )
