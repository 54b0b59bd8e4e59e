"""Keeps the sampling parameters of all requests as columns, and gathers the arrays of one step from them.

A request's parameters are written once, when it is admitted, into the columns at the scheduler's row number
(`output.rows`). A step without new rows needs a few NumPy gathers, for any number of rows:

    flags[row]        features that the request uses (RANDOM, ...); one reduction finds the features a step can skip
    serial[row]       serial of the admission that the row's columns describe; compared with `output.serials`
    temperature, top_k, top_p, min_p, mixed_seed (of `race.py`), logprobs, prompt_logprobs

Requests with flag EDITED (penalties, biases, masks, grammars) also have an `EditedRow`, in `logit_edits.py`. Only these
requests run Python code per row in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pointsman.core.state.output import SchedulerOutput
from pointsman.core.state.request import Request
from pointsman.engine.arrays import Float32Array, Float64Array, Int64Array, UInt64Array
from pointsman.engine.errors import failure_detail
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling.race import derive_seed, mix_seed, row_keys

if TYPE_CHECKING:
    from pointsman.engine.sampling.logit_edits import LogitEdits


RANDOM, EDITED, LOGPROBS, PROMPT_LOGPROBS = 1, 2, 4, 8


@dataclass(slots=True)
class SamplingBatch:
    """The sampling parameters of the n rows of one step. Later steps do not change these arrays."""

    num_rows: int
    random: Int64Array
    """[r] indices of the rows that are not greedy. The five arrays after this field have one element for each of these
    rows."""
    temperature: Float32Array
    top_k: Int64Array
    top_p: Float64Array
    min_p: Float64Array
    keys: UInt64Array
    edits: LogitEdits | None = None
    logprobs: list[tuple[int, int, int]] = field(default_factory=list)
    """(row of the logits, row index of the output, number of most likely tokens) for each row whose request has
    `logprobs`."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row of the logits -> reason why no token can be sampled from the row; the error ends only that row's request."""
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    """(row index of the output, number of most likely tokens) for each row whose request has `prompt_logprobs`, also if
    the row does not sample."""

    def of_row(self, row: int) -> SamplingBatch:
        """The parameters of one row of the logits, as a batch of one row."""
        own = self.random == row
        return SamplingBatch(
            num_rows=1,
            random=np.zeros(np.count_nonzero(own), dtype=np.int64),
            temperature=self.temperature[own],
            top_k=self.top_k[own],
            top_p=self.top_p[own],
            min_p=self.min_p[own],
            keys=self.keys[own],
            edits=None if self.edits is None else self.edits.of_row(row),
            logprobs=[(0, index, k) for at, index, k in self.logprobs if at == row],
        )


_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
"""Maximum temperature. A higher temperature is infinite in float32, and makes masked logits NaN."""
_NO_INTS = np.zeros(0, dtype=np.int64)
_NO_FLOATS = np.zeros(0, dtype=np.float64)
_NO_KEYS = np.zeros(0, dtype=np.uint64)
_NO_TEMPERATURES = np.zeros(0, dtype=np.float32)


class SamplingColumns:
    """Sampling parameters of all admitted requests, as columns by the scheduler's rows.

    Args:
        engine_seed: seed of the engine; the seed of a request without a seed is derived from this seed and the
            request's id.
    """

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = engine_seed
        self.flags = np.zeros(0, dtype=np.uint8)
        self.serial = np.zeros(0, dtype=np.int64)
        self.temperature = np.zeros(0, dtype=np.float32)
        self.top_k = np.zeros(0, dtype=np.int64)
        self.top_p = np.zeros(0, dtype=np.float64)
        self.min_p = np.zeros(0, dtype=np.float64)
        self.mixed_seed = np.zeros(0, dtype=np.uint64)
        self.logprobs = np.zeros(0, dtype=np.int64)
        self.prompt_logprobs = np.zeros(0, dtype=np.int64)
        self.failures: dict[Request, str] = {}
        """Request -> reason why the request's parameters could not be written. Such requests have the flag EDITED."""

    def admit(self, output: SchedulerOutput) -> list[int]:
        """Write the parameters of requests that are new in their rows to the columns; returns the indices of these
        requests in the output."""
        rows = output.rows
        most = int(rows.max(initial=-1))
        if most >= len(self.serial):
            self._grow(most + 1)
        stale = self.serial[rows] != output.serials
        stale[output.num_continued :] = True
        admitted: list[int] = stale.nonzero()[0].tolist()
        for index in admitted:
            row, request = int(rows[index]), output.requests[index]
            try:
                self.flags[row] = self._write(row, request)
                self.failures.pop(request, None)
            except Exception as error:  # an error of this request's parameters alone
                self.flags[row] = EDITED
                self.failures[request] = failure_detail(error)
            self.serial[row] = output.serials[index]
        return admitted

    def _grow(self, min_rows: int) -> None:
        """Grow the columns to `min_rows` rows or to twice their size, so that growing is rare. New rows have the serial
        0, because serials of admissions start at 1."""
        more = max(min_rows, 2 * len(self.serial)) - len(self.serial)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))

    def _write(self, row: int, request: Request) -> int:
        """Write the parameters of a request to the columns, at index `row`; returns the request's flags."""
        params: SamplingParams = request.metadata
        flags = 0
        if not params.is_greedy:
            flags |= RANDOM
            seed = derive_seed(self._engine_seed, request.request_id) if params.seed is None else params.seed
            self.mixed_seed[row] = mix_seed(seed)
            self.temperature[row] = min(params.temperature, _MAX_TEMPERATURE)
            self.top_k[row] = min(params.top_k, np.iinfo(np.int64).max)
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
        if params.edits_logits:
            flags |= EDITED
        if params.logprobs is not None:
            flags |= LOGPROBS
            self.logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            flags |= PROMPT_LOGPROBS
            self.prompt_logprobs[row] = params.prompt_logprobs
        return flags

    def gather(self, output: SchedulerOutput, sampling: Int64Array, positions: Int64Array) -> SamplingBatch:
        """The sampling parameters of a step, without edits. The arguments are those of `Sampler.prepare`."""
        all_flags = self.flags[output.rows]
        used = int(np.bitwise_or.reduce(all_flags, initial=0))
        if not used & ~EDITED:
            return SamplingBatch(len(sampling), _NO_INTS, _NO_TEMPERATURES, _NO_INTS, _NO_FLOATS, _NO_FLOATS, _NO_KEYS)
        flags = all_flags[sampling]
        random = (flags & RANDOM).nonzero()[0]
        rows = output.rows[sampling[random]]
        batch = SamplingBatch(
            num_rows=len(sampling),
            random=random,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            keys=row_keys(self.mixed_seed[rows], positions[random]),
        )
        if used & LOGPROBS:
            at = (flags & LOGPROBS).nonzero()[0]
            index = sampling[at]
            batch.logprobs = list(
                zip(at.tolist(), index.tolist(), self.logprobs[output.rows[index]].tolist(), strict=True)
            )
        if used & PROMPT_LOGPROBS:
            index = (all_flags & PROMPT_LOGPROBS).nonzero()[0]
            wanted = self.prompt_logprobs[output.rows[index]]
            batch.prompt_logprobs = list(zip(index.tolist(), wanted.tolist(), strict=True))
        return batch

    def edited_rows(self, output: SchedulerOutput, sampling: Int64Array) -> list[int]:
        """Indices in `sampling` of the rows whose requests change logits, and so need an `EditedRow`."""
        found: list[int] = (self.flags[output.rows[sampling]] & EDITED).nonzero()[0].tolist()
        return found
