"""Reads observed recordings: `pointsman.integrations.vllm.Observer` writes such recordings of vLLM's own scheduler.

The format is described in `core/recording.py`. The engine passes requests to the scheduler only between two steps.
So the reader estimates the time at which a request was queued: its arrival at the server, plus the minimum delay from
server to scheduler over all requests in the file. If the scheduler got the request after a step that began later than
that, the estimate is the beginning of that step. Requests that had not finished when the recording ended have no
result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BufferedReader
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.recording import FORMAT, FORMAT_VERSION, NUM_ADAPTERS, OBSERVED_STEPS, kind_of_other_file
from pointsman.core.state.status import FinishReason
from pointsman.files import MAX_MESSAGE, open_input, shown
from pointsman.traces.lines import numbered_lines
from pointsman.traces.requests import MAX_HASH_ID, MeasuredRequest, TraceError, TraceRequest
from pointsman.traces.values import Broken, check_integer, check_number, check_tokens, make_measured, parse_json_object

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class ObservedRequest:
    """A request and its result. All times are seconds on the recording's clock."""

    request_id: str
    arrival: float
    """Time at which the request arrived at the server."""
    queued: float
    num_prompt_tokens: int
    max_tokens: int | None
    priority: int
    block_hash_ids: tuple[int, ...] | None
    """Hash ids of the full blocks of the prompt; None: blocks had no hashes."""
    reason: FinishReason | None = None
    """Reason why the request finished; None: it had not finished when the recording ended."""
    scheduled: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Runs of consecutive steps in which the request got a token: the first and the last step of each run."""
    drafts: list[tuple[int, int, int]] = field(default_factory=list)
    """(number of verified drafts, number of accepted drafts, number of steps) of runs of equal decode steps, in order.
    First steps after an admission are left out."""
    adapter: int | None = None
    """Number of the request's adapter (LoRA), from 0 in the order of first use; None: it has none."""

    @property
    def num_runs_tokens(self) -> int:
        """Number of tokens that the request got in the steps of `runs`: one and the accepted drafts."""
        num_steps = sum(last - first + 1 for first, last in self.runs)
        return num_steps + sum(accepted * steps for _, accepted, steps in self.drafts)


@dataclass(slots=True)
class Observed:
    """An observed recording."""

    config: dict[str, Any]
    """Configuration with which Pointsman's scheduler decides like vLLM's, in the form of `SchedulerConfig.to_dict`."""
    scheduler: str
    """Name and version of the scheduler that decided."""
    model: str
    """Name of the model, as given to `vllm serve`."""
    lacking: list[str]
    """Features of the observed engine that the simulator lacks."""
    hash_block_size: int
    requests: list[ObservedRequest]
    """Observed requests, in the order in which they were added."""
    steps: dict[str, Int64Array]
    """One array [steps] for each name in `OBSERVED_STEPS`, and for `NUM_ADAPTERS` if the server had adapters."""
    drafter: str = ""
    """Method of the drafter, as `vllm serve` names it; empty: no speculation."""

    @property
    def ended(self) -> FloatArray:
        """[steps] time at which each step ended, in seconds on the recording's clock."""
        return self.steps["ended_us"] / 1e6

    @property
    def seconds(self) -> FloatArray:
        """[steps] duration of each step, in seconds."""
        return (self.steps["ended_us"] - self.steps["began_us"]) / 1e6

    def trace_request(self, request: ObservedRequest) -> TraceRequest:
        """The trace request of an observed request: the request without its result."""
        return TraceRequest(
            arrival_time=request.queued,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            block_hash_ids=request.block_hash_ids or (),
            hash_block_size=self.hash_block_size,
            max_tokens=request.max_tokens,
            priority=request.priority,
            adapter=request.adapter,
        )

    def measured(self) -> list[TraceRequest | MeasuredRequest]:
        """The requests of the recording; requests with output have measured times."""
        ended = self.ended
        return [self._measured(request, ended) for request in self.requests]

    def _measured(self, request: ObservedRequest, ended: FloatArray) -> TraceRequest | MeasuredRequest:
        traced = self.trace_request(request)
        if not request.num_output_tokens or not request.runs:
            return traced
        first, last = float(ended[request.runs[0][0]]), float(ended[request.runs[-1][1]])
        try:
            return make_measured(traced, request.request_id, first, last)
        except Broken as error:
            raise Broken(f"request {request.request_id!r}: {error}") from None


def is_observed(line: str) -> bool:
    """Whether the first line of a recording is the header of an observed recording."""
    try:
        return "observed" in parse_json_object(line)
    except Broken:
        return False


def read_observed(path: str | PathLike[str]) -> Observed:
    """Read the observed recording in a file.

    Raises:
        TraceError: the file is not an observed recording; the message names the file and the line.
        OSError: the file cannot be read.
    """
    with BufferedReader(open_input(path)) as file:
        if (kind := kind_of_other_file(file.peek())) in ("a film", "a page"):
            raise TraceError(f"{path} is {kind}; give the recording of vLLM's scheduler")
        try:
            return parse_observed(numbered_lines(file, of_recording=True))
        except Broken as error:
            raise TraceError(f"{path}, {shown(str(error), MAX_MESSAGE)}") from None


def parse_observed(lines: Iterable[tuple[int, str]]) -> Observed:
    """Parse an observed recording from (line number, text) pairs.

    Raises:
        Broken: a line is not part of an observed recording, or the format has another version.
    """
    reader: _Reader | None = None
    for line_number, line in lines:
        try:
            call = parse_json_object(line)
            if reader is None:
                reader = _Reader(call)
            else:
                reader.read_call(call)
        except Broken as error:
            raise Broken(f"line {line_number}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise Broken(f"line {line_number}: not a recorded call ({what}): {shown(line)!r}") from None
    if reader is None:
        raise Broken("line 1: the file is empty; a recording begins with a header")
    return reader.close()


class _Reader:
    def __init__(self, header: dict[str, Any]) -> None:
        version = header.get("format_version")
        if header.get("format") != FORMAT or "observed" not in header:
            raise Broken("not the header of a recording that pointsman.integrations.vllm.Observer wrote")
        if version != FORMAT_VERSION:
            raise Broken(f"format_version is {version!r}; this library reads version {FORMAT_VERSION} of {FORMAT}")
        config, observed = dict(header["config"]), header["observed"]
        block_size = check_tokens("block_size", config["block_size"], 1)
        size = observed["hash_block_size"]
        self._found = Observed(
            config=config,
            scheduler=str(observed["scheduler"]),
            model=str(observed["model"]),
            lacking=[str(each) for each in observed["lacking"]],
            hash_block_size=block_size if size is None else check_tokens("hash_block_size", size, 1),
            requests=[],
            steps={},
            drafter=str(observed.get("drafter") or ""),
        )
        self._by_id: dict[str, ObservedRequest] = {}
        self._columns: dict[str, list[int]] = {name: [] for name in OBSERVED_STEPS}
        self._num_steps = 0
        self._chains = _Chains()

    def read_call(self, call: dict[str, Any]) -> None:
        name, now = call["call"], check_number("now", call["now"])
        if name == "add":
            self._read_add(call["request"], now)
        elif name == "result":
            self._read_result(call)
        elif name == "steps":
            self._read_steps(call)
        else:
            raise Broken(f"call is {name!r}; it must be add, result or steps")

    def _read_add(self, fields: dict[str, Any], now: float) -> None:
        blocks = fields["blocks"]
        length = check_tokens("num_prompt_tokens", fields["num_prompt_tokens"], 1)
        ids = (
            None
            if blocks is None
            else self._chains.add_prompt(*blocks, max_blocks=length // self._found.hash_block_size)
        )
        request = ObservedRequest(
            request_id=str(fields["request_id"]),
            arrival=check_number("arrival_time", fields["arrival_time"]),
            queued=now,
            num_prompt_tokens=length,
            max_tokens=check_tokens("max_tokens", fields["max_tokens"], 1),
            priority=check_integer("priority", fields["priority"]),
            block_hash_ids=ids,
            adapter=None if fields.get("adapter") is None else check_tokens("adapter", fields["adapter"], 0),
        )
        self._by_id[request.request_id] = request
        self._found.requests.append(request)

    def _read_result(self, call: dict[str, Any]) -> None:
        request = self._by_id.pop(call["id"])
        request.reason = FinishReason(call["reason"])
        request.scheduled = None if call["scheduled"] is None else check_number("scheduled", call["scheduled"])
        request.num_cached_tokens = check_tokens("num_cached_tokens", call["num_cached_tokens"], 0)
        request.num_output_tokens = check_tokens("num_output_tokens", call["num_output_tokens"], 0)
        request.num_preemptions = check_tokens("num_preemptions", call["num_preemptions"], 0)
        request.runs = [
            (check_tokens("a step", first, 0), check_tokens("a step", last, first)) for first, last in call["steps"]
        ]
        request.drafts = [_drafts(*each) for each in call.get("drafts", ())]

    def _read_steps(self, call: dict[str, Any]) -> None:
        if call["step"] != self._num_steps:
            raise Broken(
                f"the line begins with step {call['step']!r}, but the next step is {self._num_steps}: lines are "
                "missing; make a new recording"
            )
        names = (*OBSERVED_STEPS, NUM_ADAPTERS) if NUM_ADAPTERS in call else OBSERVED_STEPS
        columns = [call[name] for name in names]
        sizes = {len(column) for column in columns}
        if len(sizes) != 1:
            raise Broken(f"the columns have different lengths: {sorted(sizes)}; make a new recording")
        for name, column in zip(names, columns, strict=True):
            if not all(type(value) is int and abs(value) <= MAX_HASH_ID for value in column):
                raise Broken(f"{name} must be a list of integers from -2**62 to 2**62")
            self._columns.setdefault(name, []).extend(column)
        self._num_steps += len(columns[0])

    def close(self) -> Observed:
        found = self._found
        if len({len(column) for column in self._columns.values()}) > 1:
            raise Broken(f"only some steps have {NUM_ADAPTERS}: lines are missing; make a new recording")
        found.steps = {name: np.array(column, dtype=np.int64) for name, column in self._columns.items()}
        self._set_queue_times()
        for request in found.requests:
            if request.runs and request.runs[-1][1] >= self._num_steps:  # the file is cut
                request.runs, request.num_output_tokens, request.reason = [], 0, None
        return found

    def _set_queue_times(self) -> None:
        """Set the time at which each request was queued. The engine receives all arrived requests before each step, so
        a request that it received after a step had not arrived when that step began."""
        requests, steps = self._found.requests, self._found.steps
        if not requests:
            return
        way = min(request.queued - request.arrival for request in requests)
        got = np.array([request.queued for request in requests])
        before = np.searchsorted(steps["ended_us"], got * 1e6, side="right") - 1
        for request, step in zip(requests, before.tolist(), strict=True):
            earliest = -np.inf if step < 0 else float(steps["began_us"][step]) / 1e6
            request.queued = min(request.queued, max(request.arrival + way, earliest))


def _drafts(verified: object, accepted: object, steps: object) -> tuple[int, int, int]:
    num_verified = check_tokens("a number of drafts", verified, 0)
    num_accepted = check_tokens("a number of accepted drafts", accepted, 0)
    if num_accepted > num_verified:
        raise Broken(f"{num_accepted} of {num_verified} drafts were accepted; it must be at most all of them")
    return num_verified, num_accepted, check_tokens("a number of steps", steps, 1)


class _Chains:
    """Rebuilds the block ids of prompts: each block follows another block, or is the first block of its prompt."""

    def __init__(self) -> None:
        self._firsts: list[int] = []  # first ids of runs of blocks that were new in one prompt, ascending
        self._parents: list[int | None] = []  # the block before each run; None: the run begins a prompt
        self._next = 0

    def add_prompt(self, parent: int | None, first: int, num_new: int, *, max_blocks: int) -> tuple[int, ...]:
        """Return the ids of all full blocks of a prompt: the block `parent` with all blocks before it (None: no
        blocks), then `num_new` new ids, which begin with `first`.

        Raises:
            Broken: lines are missing, or the prompt has more than `max_blocks` ids.
        """
        pieces = [range(first, first + num_new), *self._ids_up_to(parent)]
        if num_new < 0:
            raise Broken(f"the prompt has {num_new} new blocks; the number must be 0 or more")
        count = sum(map(len, pieces))
        if count > max_blocks:
            raise Broken(f"with {num_new} new blocks the prompt has {count} blocks, but it fills only {max_blocks}")
        if num_new:
            next_id = self._next
            if first != next_id or first + num_new > MAX_HASH_ID:
                raise Broken(f"new blocks begin with id {first}, but the next id is {next_id}: lines are missing")
            self._firsts.append(first)
            self._parents.append(parent)
            self._next = first + num_new
        return tuple(each for piece in reversed(pieces) for each in piece)

    def _ids_up_to(self, last: int | None) -> list[range]:
        """The ids of a prompt's blocks up to and including the block `last`, as ranges, the last range first."""
        pieces = []
        while last is not None:
            if not (isinstance(last, int) and 0 <= last < self._next):
                raise Broken(f"no earlier line has block {last!r}: lines are missing")
            at = bisect_right(self._firsts, last) - 1
            pieces.append(range(self._firsts[at], last + 1))
            last = self._parents[at]
        return pieces
