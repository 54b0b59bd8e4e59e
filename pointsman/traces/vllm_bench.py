"""Reads results of `vllm bench serve --save-result --save-detailed`: one JSON object whose lists have one item per
request.

The reader uses `input_lens`, `output_lens` (tokens; 0 for a request that failed), `start_times` (seconds on the
client's monotonic clock), `ttfts` (seconds) and `itls` (a list of seconds per request; its sum is the time from the
first token to the last), in the formats of vLLM 0.32 and 0.33. Generated texts are skipped. The client measured all
times: they include the overhead of the client and of the network.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from pointsman.traces.json_stream import JsonStream
from pointsman.traces.requests import LeftOut, MeasuredRequest, TraceRequest
from pointsman.traces.values import Broken, check_number, check_tokens, make_measured

COLUMNS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
_DETAIL = "run vllm bench serve with --save-result --save-detailed"


def read_vllm_bench(file: BinaryIO) -> Iterator[TraceRequest | MeasuredRequest | LeftOut]:
    """The requests of a benchmark result, in the order of the file. Failed requests have no output and no times.

    Raises:
        Broken: a list is missing or has another length than the other lists, or a value is out of range.
    """
    columns = _read_lists(JsonStream(file))
    input_lens, output_lens, start_times, ttfts, decode_times = (columns[name] for name in COLUMNS)
    for index, start in enumerate(start_times):
        output_len = int(output_lens[index])
        if not output_len and not start:
            yield LeftOut.NOT_SENT
            continue
        request = TraceRequest(start, int(input_lens[index]), output_len)
        if not output_len:
            yield request
            continue
        first = start + ttfts[index]
        try:
            yield make_measured(request, f"request-{index}", first, first + decode_times[index])
        except Broken as error:
            raise Broken(f"request {index} (ttfts[{index}], itls[{index}]): {error}") from None


def _read_lists(stream: JsonStream) -> dict[str, array[float]]:
    """Read and check the lists of a benchmark result; returns the lists keyed by name. `itls` has the sum for each
    request."""
    columns: dict[str, array[float]] = {}
    for key in stream.members():
        if key in COLUMNS:
            columns[key] = _read_list(stream, key)
        else:
            stream.skip()
    if stream.peek():
        raise stream.make_error(
            "a second result begins here; --append-result wrote several: write each line to its own file"
        )
    if missing := [name for name in COLUMNS if name not in columns]:
        raise Broken(f'line {stream.line}: no list "{missing[0]}" in the result of vLLM\'s benchmark; {_DETAIL}')
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise Broken(
            f"line {stream.line}: the lists have different lengths ({lengths}); each needs one item per request"
        )
    return columns


def _read_list(stream: JsonStream, name: str) -> array[float]:
    column = array("d")
    if stream.peek() != "[":
        raise stream.make_error(f"{name} must be a list with one item per request; {_DETAIL}")
    for index in stream.items():
        place, value = f"{name}[{index}]", stream.value()
        try:
            if name.endswith("_lens"):
                column.append(check_tokens(place, value, 0))
            elif name == "itls":
                if not isinstance(value, list):
                    raise Broken(f"{place} is {value!r}; it must be a list of seconds")
                column.append(math.fsum(check_number(place, gap) for gap in value))
            else:
                column.append(check_number(place, value))
        except Broken as error:
            raise stream.make_error(str(error)) from None
    return column
