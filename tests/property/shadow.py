"""A shadow host: its KV cache records the content of every slot, so that wrong reads are detected.

A transformer's KV at position p depends on all tokens up to and including p, and on nothing else. The shadow records
exactly these tokens: every slot (block, offset) holds a *content id*, a name for one sequence of tokens under one root.
Equal ids mean equal KV. A step is executed as a device would do it:

    for every row: write the content ids of positions [computed, computed + scheduled) through the block table
    for every row: read positions [0, computed + scheduled) and compare each with what must be there

so a wrong block, a stale prefix, an overwritten neighbour and a missing rewind all show as a read of the wrong id.
Roots separate contents that must never be shared: cache salts, adapters, requests without prefix cache.

The "model" on top is a function of the token prefix alone (promise 6), which makes the right output of every
request computable by one plain loop, `reference_run`, however often the request was preempted meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, takewhile
from typing import TYPE_CHECKING

import numpy as np

from pointsman.core import EncoderEntry, Request, RequestStatus, Scheduler, SchedulerConfig, SchedulerOutput

from .embeddings import ShadowEncoder, placeholder_marks
from .faults import ShadowFault, require

if TYPE_CHECKING:
    from .transfers import Device

VOCABULARY = 6
EOS = 5
# What the model draws from: EOS one time in ten, token 4 (the usual stop token) as often.
_DRAWS = (0, 1, 2, 3, 0, 1, 2, 3, 4, EOS)
_START = 7

UNWRITTEN = -1
GARBAGE = -2


# ---------------------------------------------------------------------------------------- the model


def advance_state(state: int, token: int) -> int:
    """The model's hidden state after one more token."""
    return (state * 1103515245 + token * 7919 + 12345) & 0x7FFFFFFF


def choose_token(state: int) -> int:
    """The token that the model samples in `state`."""
    return _DRAWS[(state >> 9) % len(_DRAWS)]


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows `tokens`: a function of the prefix and of nothing else."""
    state = _START
    for token in tokens:
        state = advance_state(state, token)
    return choose_token(state)


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected output of a request that is not aborted."""

    tokens: tuple[int, ...]
    limit: int  # tokens, prompt and output together, at which it must end
    status: RequestStatus
    stop_reason: int | str | None
    details: frozenset[str]  # the valid limits by which it may end


def reference_run(request: Request, config: SchedulerConfig) -> Reference:
    """Generate for one request alone, with no scheduler, no blocks and no batch."""
    tokens = request.prompt_token_ids.tolist()
    if request.max_tokens == 0:
        return Reference((), len(tokens) + 1, RequestStatus.FINISHED_STOPPED, None, frozenset([""]))
    bounds = {
        "max_tokens": len(tokens) + request.max_tokens,
        "max_model_len": config.max_model_len,
        "max_total_tokens": request.max_total_tokens or config.max_model_len + 1,
        "kv_capacity": config.num_usable_tokens + 1,  # the last token is sampled and never computed
    }
    limit = min(bounds.values())
    eos = set() if request.ignore_eos else set(request.eos_token_ids)
    output: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in eos.union(request.stop_token_ids) and len(output) >= request.min_tokens:
            reason = None if token in eos else token
            return Reference(tuple(output), limit, RequestStatus.FINISHED_STOPPED, reason, frozenset([""]))
        if _ends_in_a_repetition(output, request) and len(output) >= request.min_tokens and len(tokens) < limit:
            details = frozenset(f"a pattern of {size} token(s) is repeated" for size in range(len(output)))
            return Reference(tuple(output), limit, RequestStatus.FINISHED_REPETITION, "repetition_detected", details)
        if len(tokens) >= limit:
            details = frozenset(name for name, bound in bounds.items() if bound == limit)
            return Reference(tuple(output), limit, RequestStatus.FINISHED_LENGTH, None, details)


def _ends_in_a_repetition(output: list[int], request: Request) -> bool:
    """Whether the output ends in copies of a pattern, as many and as long as the request's parameters say."""
    params = request.repetition_detection
    if params is None:
        return False
    sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(
        size * params.min_count <= len(output)
        and output[-size * params.min_count :] == output[-size:] * params.min_count
        for size in sizes
    )


class ContentIds:
    """Names for KV contents: one integer per (root, token sequence), equal exactly when the contents are equal."""

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        self._states: list[int] = []

    def root(self, key: Hashable) -> int:
        """The content before the first token, for contents that only requests with the same `key` share."""
        return self._intern(("root", key), _START)

    def extend(self, parent: int, token: int, mark: Hashable = None) -> int:
        """The content of `parent` followed by `token`; a placeholder by `mark`, which the samples do not depend on."""
        known = self._ids.get((parent, token, mark))
        if known is not None:
            return known
        return self._intern((parent, token, mark), advance_state(self._states[parent], token))

    def sample(self, content: int) -> int:
        """The model's next token after `content`."""
        return choose_token(self._states[content])

    def _intern(self, key: Hashable, state: int) -> int:
        if key not in self._ids:
            self._ids[key] = len(self._states)
            self._states.append(state)
        return self._ids[key]


# ----------------------------------------------------------------------------------------- the host


@dataclass(slots=True)
class HostSequence:
    """The host's state of one request."""

    request: Request
    tokens: list[int]  # prompt and all samples, including those not yet reported to the scheduler
    contents: list[int]  # [len(tokens)] content id of the prefix that ends at each position
    table: list[int] | None = None  # the blocks of its row; None: it has no row
    row: int = -1
    serial: int = -1
    admitted_step: int = -1
    epoch: int = -1  # epoch of the prefix cache at its admission: after a reset older KV is invalid
    stale_until: int = -1  # steps up to this one are of a part that is complete
    is_stale: bool = False  # the workers missed its blocks, and no later output has sent them


@dataclass(slots=True)
class ExecutedStep:
    """One output after execution, until its result is handed to the scheduler or it is declared void."""

    output: SchedulerOutput
    sampled: list[list[int]] = field(default_factory=list)  # [n] the tokens of each row; none where it does not sample
    completed: list[int] = field(default_factory=list)  # rows that computed the last of a prompt and sample nothing
    written: dict[Request, list[int]] = field(default_factory=dict)  # slots
    told: tuple[object, ...] = ()  # the output's values when it was returned
    lengths: dict[Request, int] = field(default_factory=dict)  # tokens known to the host before this step
    tables: dict[Request, list[int]] = field(default_factory=dict)  # block tables before this step
    embeddings: dict[EncoderEntry, bool] = field(default_factory=dict)  # cached before this step, and whether valid


class ShadowHost:
    """Executes outputs over a shadow KV cache and keeps block tables from the deltas in the outputs alone."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.contents = ContentIds()
        self.slots = [UNWRITTEN] * (self.config.num_blocks * self.config.block_size)
        self.last_writes = [-1] * len(self.slots)  # the step that wrote each slot last
        self.sequences: dict[Request, HostSequence] = {}
        self.in_flight: list[ExecutedStep] = []
        self.encoder = ShadowEncoder(self.config)
        self.epoch = 0
        self.device: Device | None = None
        self.scheduler: Scheduler  # set by the creator, with the device as its connector

    # -------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> None:
        """Add a request."""
        self.sequences[request] = HostSequence(request, request.prompt_token_ids.tolist(), [])

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        del self.sequences[request]
        if self.device is not None:
            self.device.let_go(request)

    def complete_part(self, request: Request) -> None:
        """Drop the request's samples in flight."""
        sequence = self.sequences[request]
        sequence.stale_until = self.in_flight[-1].output.step_id if self.in_flight else -1

    def drop_samples(self, request: Request, step: ExecutedStep) -> bool:
        """Drop the request's samples from a delivered step on. Returns whether a later step in flight samples for
        it."""
        sequence = self.sequences[request]
        known = step.lengths[request]
        del sequence.tokens[known:]
        del sequence.contents[known:]
        for later in self.in_flight:  # they were executed after dropped tokens
            later.lengths[request] = min(later.lengths.get(request, known), known)
        is_in_flight = self.num_pending(request) > 0
        if is_in_flight:
            self.complete_part(request)
        return is_in_flight

    def extend(self, request: Request, tokens: list[int]) -> None:
        """Replace the prompt of a request that has no row."""
        self.complete_part(request)
        sequence = self.sequences[request]
        sequence.tokens, sequence.contents, sequence.epoch = list(tokens), [], -1

    def lose_row(self, request: Request) -> None:
        """Drop the row of a request that was preempted or parked."""
        self.sequences[request].table = None

    def table(self, request: Request) -> list[int]:
        """The blocks of a request, as far as the host knows; empty if it has no row."""
        return self.sequences[request].table or []

    def blocks_in_use(self) -> set[int] | None:
        """Every block in a row's table; None while a table is out of date."""
        if any(sequence.is_stale for sequence in self.sequences.values() if sequence.table is not None):
            return None
        without_row = self.device.blocks() if self.device is not None else set()
        return without_row | {block for sequence in self.sequences.values() for block in sequence.table or ()}

    def num_pending(self, request: Request) -> int:
        """Number of samples of `request` not yet delivered to the scheduler."""
        return sum(
            int(step.output.samples[index]) + (index in step.completed)
            for step in self.in_flight
            if step.output.step_id > self.sequences[request].stale_until
            for index, other in enumerate(step.output.requests)
            if other is request
        )

    def is_verifying(self, request: Request) -> bool:
        """Whether drafts of `request` are in flight."""
        return any(
            other is request and step.output.num_draft_tokens[index] > 0
            for step in self.in_flight
            for index, other in enumerate(step.output.requests)
        )

    def continuation(self, request: Request, length: int) -> list[int]:
        """The model's next samples for a request, ignoring stop conditions."""
        sequence = self.sequences[request]
        tokens: list[int] = []
        content = sequence.contents[-1] if sequence.contents else self.contents.root(None)
        for _ in range(length):
            tokens.append(self.contents.sample(content))
            content = self.contents.extend(content, tokens[-1])
        return tokens

    # -------------------------------------------------------------- one step

    def execute(self, output: SchedulerOutput) -> ExecutedStep:
        """Take over the output's block tables, run it on the shadow KV, and keep its samples until `deliver`."""
        step = ExecutedStep(output, told=_contents(output), embeddings=self.encoder.snapshot())
        for request, sequence in self.sequences.items():
            step.lengths[request] = len(sequence.tokens)
            if sequence.table is not None:
                step.tables[request] = list(sequence.table)
        self._check_shape(output)
        self._check_inputs(output)  # first: both it and the block table are readable only until the next call
        for request in output.preempted:
            if request in self.sequences:
                self.sequences[request].table = None
        if self.device is not None:
            step.written = self.device.begin(output)
        for index in range(output.num_rows):
            self._take_table(output, index)
        self._check_common_prefix(output)
        self._run(step)
        self.in_flight.append(step)
        return step

    def deliver(self) -> ExecutedStep:
        """Deliver the oldest step: it can no longer become void."""
        self._check_unchanged(self.in_flight[0])
        return self.in_flight.pop(0)

    def spoil(self, request: Request, step: ExecutedStep) -> None:
        """Spoil a failed row: slots that it wrote in `step` become garbage, unless others hold or have rewritten
        them."""
        held = {b for other, s in self.sequences.items() if other is not request for b in s.table or ()}
        held |= self.device.blocks() if self.device is not None else set()
        for slot in step.written.get(request, ()):
            rewritten = self.last_writes[slot] != step.output.step_id
            if slot // self.config.block_size not in held and not rewritten:
                self.slots[slot] = GARBAGE

    def void(self, index: int, *, seen: bool) -> list[ExecutedStep]:
        """Steps `index` and later are void: forget their samples and leave garbage in every slot they write.

        With `seen=False` the workers never got those outputs, so their block tables are as before, and only the full
        tables of the next output bring the blocks of the rewound rows.
        """
        voided = self.in_flight[index:]
        del self.in_flight[index:]
        first = voided[0]
        self.encoder.void([step.output for step in voided], None if seen else first.embeddings)
        for step in voided:
            self._check_unchanged(step)
            for slot in chain.from_iterable(step.written.values()):
                self.slots[slot] = GARBAGE
        for request, sequence in self.sequences.items():
            lengths = [
                step.lengths[request]
                for step in voided
                if request in step.lengths and step.output.step_id > sequence.stale_until
            ]
            known = lengths[0] if lengths else len(sequence.tokens)
            del sequence.tokens[known:]
            del sequence.contents[known:]
            if sequence.admitted_step >= first.output.step_id:
                sequence.table = None
            elif not seen and sequence.table is not None:
                sequence.is_stale |= sequence.table != first.tables[request]
                sequence.table = list(first.tables[request])
        return voided

    # -------------------------------------------------------------- how

    def _check_shape(self, output: SchedulerOutput) -> None:
        n, admitted = output.num_rows, output.num_rows - output.num_continued
        lengths = {
            "rows": (output.rows, n), "serials": (output.serials, n), "samples": (output.samples, n),
            "num_computed_tokens": (output.num_computed_tokens, n), "block_offsets": (output.block_offsets, n + 1),
            "num_scheduled_tokens": (output.num_scheduled_tokens, n), "is_resumed": (output.is_resumed, admitted),
            "num_draft_tokens": (output.num_draft_tokens, n),
            "draft_token_ids": (output.draft_token_ids, int(output.num_draft_tokens.sum())),
            "num_cached_tokens": (output.num_cached_tokens, admitted),
        }  # fmt: skip
        for name, (array, length) in lengths.items():
            require(len(array) == length, f"{name} has {len(array)} entries, expected {length}")
        total = int(np.sum(output.num_scheduled_tokens))
        require(output.total_num_scheduled_tokens == total, f"total {output.total_num_scheduled_tokens}, sum {total}")
        require(len(set(output.requests)) == n, "a request has two rows in one step")
        require(len(set(output.rows.tolist())) == n, "two requests share a row")
        if n:
            require(int(np.min(output.num_scheduled_tokens)) >= 1, "a row without tokens is in the output")
        require(int(output.block_offsets[0]) == 0, "block_offsets does not start at 0")
        require(
            output.adapters == [request.adapter for request in output.requests], "adapters are not those of the rows"
        )
        used = {adapter for adapter in output.adapters if adapter is not None}
        require(len(used) <= self.config.max_loras, f"{used} in one step, of {self.config.max_loras} slots")
        require(int(output.block_offsets[-1]) == len(output.block_ids), "block_offsets does not cover block_ids")

    def _check_unchanged(self, step: ExecutedStep) -> None:
        require(_contents(step.output) == step.told, f"the output of step {step.output.step_id} changed afterwards")

    def _check_inputs(self, output: SchedulerOutput) -> None:
        """Check that the scheduler's tokens equal the host's samples; with one step in flight it knows all of them."""
        if self.in_flight:
            return
        expected: list[int] = []
        for index, request in enumerate(output.requests):
            start, drafts = int(output.num_computed_tokens[index]), drafts_of(output, index)
            end = start + int(output.num_scheduled_tokens[index]) - len(drafts)
            expected += self.sequences[request].tokens[start:end] + drafts
        told = self.scheduler.input_token_ids(output).tolist()
        require(told == expected, f"step {output.step_id} is fed {told}, the host sampled {expected}")

    def _take_table(self, output: SchedulerOutput, index: int) -> None:
        """Apply the output's blocks of one row, and compare with the scheduler's own table."""
        sequence = self.sequences[output.requests[index]]
        name = sequence.request.request_id
        row, serial, told = int(output.rows[index]), int(output.serials[index]), output.blocks(index).tolist()
        if index >= output.num_continued:
            require(sequence.table is None, f"{name} is admitted although it has a row")
            if self.device is not None:
                held = self.device.holders.get(sequence.request, [])
                require(told[: len(held)] == held, f"{name} is admitted with {told}, it holds {held}")
                if held:
                    self.device.resumed.add(sequence.request)
                self.device.let_go(sequence.request)
            for step in self.in_flight:
                taken = row in step.output.rows.tolist()
                require(not taken, f"{name} is admitted to row {row}, which step {step.output.step_id} in flight names")
            sequence.table, sequence.row, sequence.serial = told, row, serial
            sequence.admitted_step = output.step_id
            self._renew_contents(sequence)
        else:
            require(sequence.table is not None, f"{name} continues without having been admitted")
            same = (sequence.row, sequence.serial) == (row, serial)
            require(same, f"{name} continues as row {row} serial {serial}, not {sequence.row}, {sequence.serial}")
            sequence.table = told if output.resync else (sequence.table or []) + told
        if self.device is not None:
            self.device.check_free(told, name)
        table = sequence.table
        if index >= output.num_continued or output.resync:
            sequence.is_stale = False
        actual = self.scheduler.block_table[row, : len(table)].tolist()
        require(table == actual, f"{name}: by the deltas its blocks are {table}, by the block table {actual}")
        require(len(set(table)) == len(table), f"{name} names a block twice: {table}")
        low, high = self.config.num_reserved_blocks, self.config.num_blocks
        require(all(low <= block < high for block in table), f"{name} got a block outside {low}..{high - 1}: {table}")
        end = int(output.num_computed_tokens[index] + output.num_scheduled_tokens[index])
        require(len(table) * self.config.block_size >= end, f"{name} has {table} for {end} tokens")

    def _check_common_prefix(self, output: SchedulerOutput) -> None:
        """The reported common prefix, if enabled, is that of the host's tables, compared block by block."""
        tables = [self.table(request) for request in output.requests]
        same = takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))
        common = len(list(same)) if self.config.count_common_prefix else 0
        told = output.num_common_prefix_blocks
        require(told == common, f"{told} blocks are reported as common to the rows, {common} are, of {tables}")

    def _renew_contents(self, sequence: HostSequence) -> None:
        """KV computed after an admission belongs to the prefix cache's epoch at that time."""
        if sequence.epoch == self.epoch:
            return
        sequence.epoch = self.epoch
        sequence.contents = self.contents_for(sequence.request, sequence.tokens)

    def contents_for(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """[len(tokens)] contents of a request's KV from now on."""
        shares = self.config.enable_prefix_caching or self.device is not None
        shares &= request.use_prefix_cache
        shared = ("salt", request.cache_salt, "adapter", request.adapter)
        content = self.contents.root((self.epoch, *shared) if shares else (self.epoch, id(request)))
        contents = []
        marks = placeholder_marks(request)
        for position, token in enumerate(tokens):
            content = self.contents.extend(content, token, marks.get(position))
            contents.append(content)
        return contents

    def contents_of(self, blocks: Sequence[int]) -> list[int]:
        """The contents of the slots of some blocks."""
        size = self.config.block_size
        return [content for block in blocks for content in self.slots[block * size : (block + 1) * size]]

    def write(self, blocks: Sequence[int], contents: Sequence[Sequence[int]]) -> None:
        """Write contents into the slots of blocks, as a device that loads them does."""
        size = self.config.block_size
        for block, content in zip(blocks, contents, strict=True):
            self.slots[block * size : (block + 1) * size] = content
            self.last_writes[block * size : (block + 1) * size] = [-1] * size

    def _run(self, step: ExecutedStep) -> None:
        output = step.output
        self.encoder.execute(output)
        spans = []
        for index, request in enumerate(output.requests):
            start = int(output.num_computed_tokens[index])
            drafts = drafts_of(output, index)
            end = start + int(output.num_scheduled_tokens[index]) - len(drafts)
            sequence = self.sequences[request]
            known = len(sequence.tokens)
            require(end <= known, f"{request.request_id}: positions {start} to {end - 1} of {known} known tokens")
            yields = (end == known and request.max_tokens > 0, end == known and request.max_tokens == 0)
            told = (bool(output.samples[index]), index in output.completes.tolist())
            require(told == yields, f"{request.request_id}: samples and completes are {told} at {end}, not {yields}")
            require(not drafts or end - start == 1 == known - start, f"{request.request_id} has drafts in a chunk")
            spans.append((sequence, start, end, drafts))
        if not self.config.share_within_step:
            # Every row may attend before another row writes, so its cached KV must be written already.
            for sequence, start, _, _ in spans:
                if start:
                    self._read(sequence, start, start)
        for sequence, start, end, drafts in spans:
            contents = sequence.contents[start:end]
            for draft in drafts:
                contents.append(self.contents.extend(contents[-1], draft))
            for slots in self._write_slots(sequence, range(start, end + len(drafts))):
                step.written.setdefault(sequence.request, []).extend(slots)
                for content, slot in zip(contents, slots, strict=True):
                    self.slots[slot] = content
                    self.last_writes[slot] = step.output.step_id
        for sequence, start, end, _ in spans:
            self._read(sequence, end, start)
        for index, (sequence, _, end, drafts) in enumerate(spans):
            is_last, is_silent = end == len(sequence.tokens), sequence.request.max_tokens == 0
            step.sampled.append(self._verify(sequence, drafts) if is_last and not is_silent else [])
            if is_last and is_silent:
                step.completed.append(index)

    def _slot(self, sequence: HostSequence, position: int) -> int:
        assert sequence.table is not None
        block, offset = divmod(position, self.config.block_size)
        return sequence.table[block] * self.config.block_size + offset

    def _write_slots(self, sequence: HostSequence, computed: range) -> list[list[int]]:
        """For each group of layers, the slots to which the KV of these positions is written."""
        return [[self._slot(sequence, position) for position in computed]]

    def _read(self, sequence: HostSequence, end: int, start: int = 0) -> None:
        """Read the positions to which `start` to `end` attend, here [0, end), and compare each with its expected
        content."""
        for position in range(end):
            slot = self._slot(sequence, position)
            found, expected = self.slots[slot], sequence.contents[position]
            if found != expected:
                what = {UNWRITTEN: "nothing", GARBAGE: "garbage of a failed step"}.get(found, f"content {found}")
                block = slot // self.config.block_size
                raise ShadowFault(
                    f"{sequence.request.request_id} reads position {position} of {end} in block {block} and finds "
                    f"{what}, expected content {expected}"
                )

    def _verify(self, sequence: HostSequence, drafts: list[int]) -> list[int]:
        """Sample a token, and one more for each draft that equals the sample before it."""
        run = [self._sample(sequence)]
        for draft in drafts:
            if draft != run[-1]:
                break
            run.append(self._sample(sequence))
        return run

    def _sample(self, sequence: HostSequence) -> int:
        token = self.contents.sample(sequence.contents[-1])
        sequence.tokens.append(token)
        sequence.contents.append(self.contents.extend(sequence.contents[-1], token))
        return token


def drafts_of(output: SchedulerOutput, index: int) -> list[int]:
    """The drafts that a row of the output verifies."""
    end = int(output.num_draft_tokens[: index + 1].sum())
    return [int(token) for token in output.draft_token_ids[end - int(output.num_draft_tokens[index]) : end]]


def _contents(output: SchedulerOutput) -> tuple[object, ...]:
    """All values of an output, copied."""
    values = (getattr(output, name.name) for name in fields(output))
    return tuple(
        value.tolist() if isinstance(value, np.ndarray) else tuple(value) if isinstance(value, Sequence) else value
        for value in values
    )
