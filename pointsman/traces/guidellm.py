"""Reads reports of guidellm in JSON (`benchmarks.json`): benchmarks, each with its requests.

This module reads the schema versions 1 (guidellm 0.5 and 0.6) and 2 (0.7 and 0.8); the report names its version in
`metadata.version`. Fields of a request: `prompt_tokens`, `output_tokens`, and in `info.timings` the Unix times
`request_start`, `first_token_iteration` and `last_token_iteration`. Several benchmarks of a sweep, which run one after
the other, are one trace. Requests that failed, or that were unfinished at the end of a benchmark, are part of the load
and have no times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from pointsman.files import represented
from pointsman.traces.json_stream import JsonStream
from pointsman.traces.requests import LeftOut, MeasuredRequest, TraceRequest
from pointsman.traces.values import Broken, check_number, check_tokens, get_field, make_measured

VERSIONS = (1, 2)


def read_guidellm(file: BinaryIO) -> Iterator[TraceRequest | MeasuredRequest | LeftOut]:
    """The requests of a report, ordered by benchmark and status.

    Raises:
        Broken: the schema has another version, the report holds a sample of its requests, or a value is missing.
    """
    stream = JsonStream(file)
    known = False
    for key in stream.members():
        if key == "metadata":
            _check_version(stream, stream.value())
            known = True
        elif key == "benchmarks":
            if not known:
                raise stream.make_error(
                    'no "metadata" before "benchmarks"; write the report with guidellm 0.5 or later'
                )
            for index in stream.items():
                yield from _read_benchmark(stream, f"benchmarks[{index}]")
        else:
            stream.skip()


def _check_version(stream: JsonStream, metadata: Any) -> None:
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version not in VERSIONS:
        raise stream.make_error(
            f"metadata.version is {represented(version)}; only versions 1 and 2 can be read: "
            "write the report with guidellm 0.5 to 0.8"
        )


def _read_benchmark(stream: JsonStream, place: str) -> Iterator[TraceRequest | MeasuredRequest | LeftOut]:
    counted = found = 0
    for key in stream.members():
        if key == "metrics":
            counted = _read_num_successful(stream)
        elif key == "requests":
            for status in stream.members():
                if stream.peek() != "[":
                    stream.skip()  # "total": null
                    continue
                for index in stream.items():
                    found += status == "successful"
                    yield _read_request(stream, f"{place}.requests.{status}[{index}]", status == "successful")
        else:
            stream.skip()
    if found < counted:
        raise stream.make_error(
            f"{place} has only {found} of {counted} successful requests; run guidellm without a sample size"
        )


def _read_num_successful(stream: JsonStream) -> int:
    """Number of successful requests in the measured period, as the benchmark's metrics report it; 0 if this number is
    missing."""
    totals: Any = None
    for key in stream.members():
        if key == "request_totals":
            totals = stream.value()
        else:
            stream.skip()
    count = totals.get("successful") if isinstance(totals, dict) else None
    return count if isinstance(count, int) else 0


def _read_request(stream: JsonStream, place: str, is_successful: bool) -> TraceRequest | MeasuredRequest | LeftOut:
    """Read the request at the current position of the stream. A request is left out if it was never sent, or if it
    failed and has no length."""
    fields = stream.value()
    try:
        if not isinstance(fields, dict):
            raise Broken("not a JSON object")
        info = fields.get("info")
        timings = info.get("timings") if isinstance(info, dict) else None
        if not isinstance(timings, dict):
            raise Broken('the object "info.timings" is missing')
        if not is_successful:
            if timings.get("request_start") is None:
                return LeftOut.NOT_SENT
            if fields.get("prompt_tokens") is None:
                return LeftOut.NO_PROMPT
            fields = {**fields, "output_tokens": fields.get("output_tokens") or 0}
        request = TraceRequest(
            arrival_time=check_number("request_start", get_field(timings, "request_start")),
            num_prompt_tokens=check_tokens("prompt_tokens", get_field(fields, "prompt_tokens"), 0),
            num_output_tokens=check_tokens("output_tokens", get_field(fields, "output_tokens"), 0),
        )
        if not (is_successful and request.num_output_tokens):
            return request
        names = ("first_token_iteration", "last_token_iteration")
        if any(timings.get(name) is None for name in names):
            return request  # the response was not streamed, so tokens have no times
        first, last = (check_number(name, timings[name]) for name in names)
        return make_measured(request, str(fields.get("request_id", "")), first, last)
    except Broken as error:
        raise stream.make_error(f"{place}: {error}") from None
