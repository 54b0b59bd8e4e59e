"""Reads recordings of a Pointsman scheduler (`core/recording.py`) as traces.

A request arrives when it is added. Its prompt includes all prompt parts; its output includes all tokens that were
generated before the recording ends. Each full block of the prompt gets a hash id, which depends on all blocks before
it, the salt and the adapter. The time of a token is the time of the update that appended the token. `observed.py` reads
observed recordings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, BinaryIO

from pointsman.core.recording import FORMAT, FORMAT_VERSION
from pointsman.files import represented, shown
from pointsman.traces.lines import numbered_lines
from pointsman.traces.observed import is_observed, parse_observed
from pointsman.traces.requests import MAX_HASH_ID, MeasuredRequest, TraceRequest
from pointsman.traces.values import Broken, check_integer, check_number, check_tokens, make_measured, parse_json_object


@dataclass(slots=True)
class _Recorded:
    """A request of a recording, updated with each line that is read. Full blocks of its prompt are kept as hash ids;
    only the tokens of the last, partial block are stored."""

    request_id: str
    queued: float
    max_tokens: int | None
    priority: int
    retention: float | None
    chain: bytes
    tail: array[int] = field(default_factory=lambda: array("i"))
    hash_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0

    def add_prompt_tokens(self, token_ids: Any, block_size: int) -> None:
        try:
            self.tail.extend(token_ids)
        except (TypeError, OverflowError):
            raise Broken(f"token ids must be a list of integers, not {represented(token_ids)}") from None
        self.num_prompt_tokens += len(token_ids)
        full = len(self.tail) // block_size * block_size
        for start in range(0, full, block_size):
            block = self.tail[start : start + block_size].tobytes()
            self.chain = hashlib.blake2b(self.chain + block, digest_size=8).digest()
            self.hash_ids.append(int.from_bytes(self.chain, "little") % MAX_HASH_ID)
        del self.tail[:full]

    def add_output_tokens(self, count: int, first_time: float, last_time: float) -> None:
        if count <= 0:
            return
        if not self.num_output_tokens:
            self.first_token = first_time
        self.num_output_tokens += count
        self.last_token = last_time

    def make_request(self, block_size: int) -> TraceRequest | MeasuredRequest:
        request = TraceRequest(
            arrival_time=self.queued,
            num_prompt_tokens=check_tokens("the prompt's length", self.num_prompt_tokens, 1),
            num_output_tokens=check_tokens("the output's length", self.num_output_tokens, 0),
            block_hash_ids=tuple(self.hash_ids),
            hash_block_size=block_size,
            max_tokens=self.max_tokens,
            priority=self.priority,
            retention=self.retention,
        )
        if not self.num_output_tokens:
            return request
        return make_measured(request, self.request_id, self.first_token, self.last_token)


def read_recording(file: BinaryIO) -> Iterator[TraceRequest | MeasuredRequest]:
    """The requests of a recording, in the order in which they were added.

    Raises:
        Broken: a line is not part of a recording, or the format has another version.
    """
    reader = _Reader()
    lines = numbered_lines(file, of_recording=True)
    first = list(islice(lines, 1))
    lines = chain(first, lines)
    if first and is_observed(first[0][1]):
        yield from parse_observed(lines).measured()
        return
    for line_number, line in lines:
        try:
            reader.read_call(parse_json_object(line))
        except Broken as error:
            raise Broken(f"line {line_number}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise Broken(f"line {line_number}: not a recorded call ({what}): {shown(line)!r}") from None
    for recorded in reader.recorded:
        try:
            yield recorded.make_request(reader.block_size)
        except Broken as error:
            raise Broken(f"request {recorded.request_id!r}: {error}") from None


class _Reader:
    """Reads the calls of a recording: collects the requests, and counts the tokens that each step appended to each
    request."""

    def __init__(self) -> None:
        self.block_size = 0
        self.recorded: list[_Recorded] = []
        self._by_id: dict[str, _Recorded] = {}
        self._steps: dict[int, list[str]] = {}  # steps in flight: the request ids of their rows

    def read_call(self, call: dict[str, Any]) -> None:
        if not self.block_size:
            self._read_header(call)
            return
        name = call["call"]
        now = check_number("now", call["now"])
        if name == "add":
            self._read_add(call["request"], now)
        elif name == "extend" and call["id"] in self._by_id:
            self._by_id[call["id"]].add_prompt_tokens(call["token_ids"], self.block_size)
        elif name == "schedule":
            self._steps[call["step"]] = call["decision"]["requests"]
        elif name == "fail":
            self._steps.pop(call["step"], None)
        elif name == "update":
            counts = call["decision"]["kept_counts"]
            for request_id, count in zip(self._steps.pop(call["step"]), counts, strict=True):
                if count:
                    self._by_id[request_id].add_output_tokens(count, now, now)
        elif name == "advance":
            self._read_advance(call)

    def _read_header(self, header: dict[str, Any]) -> None:
        version = header.get("format_version")
        if header.get("format") != FORMAT or version != FORMAT_VERSION:
            raise Broken(f"format_version is {version!r}; this library reads version {FORMAT_VERSION} of {FORMAT}")
        self.block_size = check_tokens("block_size", header["config"]["block_size"], 1)

    def _read_add(self, fields: dict[str, Any], now: float) -> None:
        origin = repr((fields["cache_salt"], fields["adapter"])).encode()
        max_tokens, retention = fields["max_tokens"], fields.get("retention")  # older recordings have no retention
        recorded = _Recorded(
            request_id=fields["request_id"],
            queued=now,
            max_tokens=None if max_tokens is None else check_tokens("max_tokens", max_tokens, 0),
            priority=check_integer("priority", fields["priority"]),
            retention=None if retention is None else check_number("retention", retention),
            chain=hashlib.blake2b(origin, digest_size=8).digest(),
        )
        recorded.add_prompt_tokens(fields["prompt_token_ids"], self.block_size)
        self._by_id[recorded.request_id] = recorded  # an id may be used again after its request finished
        self.recorded.append(recorded)

    def _read_advance(self, call: dict[str, Any]) -> None:
        """Count the tokens of several steps that were done in one call: each step appended one token to every row, but
        tokens that the update of the last step dropped are not counted."""
        decision, times = call["decision"], call["times"]
        steps = decision["num_steps"]
        if len(times) != steps + 1:
            raise Broken(f"times has {len(times)} values for {steps} steps; it must have one value more than steps")
        for request_id, kept in zip(decision["requests"], decision["kept_counts"], strict=True):
            last = check_number("times", times[steps if kept else steps - 1])
            self._by_id[request_id].add_output_tokens(steps - 1 + kept, check_number("times", times[1]), last)
