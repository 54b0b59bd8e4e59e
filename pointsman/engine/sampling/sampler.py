"""Sampler: samples tokens from logits, for all rows of a step in one call.

A step has two halves, so that the scheduler can run while the model computes:

    batch   = sampler.prepare(output, sampling, positions)    reads requests and columns; no logits yet
    sampled = sampler.run(logits, batch)                      reads only its arguments

The operations have the same order as in vLLM's V1 sampler:

    1. log probabilities of the unchanged logits ("raw_logprobs", the default in vLLM)
    2. allowed tokens, bad words, `min_tokens`, biases, penalties, grammars            `logit_edits.py`
    3. greedy rows: the most likely token; other rows:
       temperature, min-p, top-k, top-p, and the race of exponential clocks            `race.py`; compiled for CPUs in
                                                                    `race_kernels.py`, for GPUs in `race_triton.py`

All randomness is a function of (seed, position, token) only, see `race.py`. Parameters are kept in columns, see
`batch.py`. For rows that use only temperature, top-k, top-p and min-p, a step runs no Python code per row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.core.state.request import Request
from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.errors import GrammarError, failure_detail, first_line
from pointsman.engine.grammar.matcher import RequestGrammar
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.pulse import SECONDS_TO_COMPILE, beat
from pointsman.engine.sampling.batch import SamplingBatch, SamplingColumns
from pointsman.engine.sampling.logit_edits import EditedRow, LogitEdits, bad_word_sequences
from pointsman.engine.sampling.logprobs import TokenLogprobs, token_logprobs
from pointsman.engine.sampling.race import draw, probabilities

if TYPE_CHECKING:
    from pointsman.core.state.output import SchedulerOutput
    from pointsman.engine.grammar.process import CompiledGrammar
    from pointsman.engine.sampling.race_triton import DeviceRace

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Sampled:
    """The sampled tokens of one step, one per row of the logits."""

    token_ids: Int64Array
    """[n] token of each row of the logits."""
    ok: npt.NDArray[np.bool_]
    """[n] whether the row's token is valid. False: the edited logits had no finite maximum, or the batch has an error
    for the row."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row index of the output -> log probabilities of the row's sampled tokens, for valid rows (`ok`) whose requests
    have `logprobs`."""


class Sampler:
    """Samples the tokens of one engine's requests.

    Args:
        vocab_size: number of logits of the model.
        seed: seed of the engine; the seed of a request without a seed is derived from this seed and the request's id.
        tokenizer: tokenizer for bad words; None: `check` refuses requests with bad words.
        device: device of the logits. "cuda": Triton kernels draw the tokens, if Triton is installed.
    """

    def __init__(
        self, vocab_size: int, seed: int = 0, tokenizer: Any | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        kind = torch.device(device).type
        self._draw_rows = import_draw_rows() if kind == "cpu" else None
        self._device_race = import_device_race() if kind == "cuda" else None
        self._race: DeviceRace | None = None  # made in the first step with random rows
        self._columns = SamplingColumns(seed)
        self._edited: dict[str, EditedRow] = {}  # by request id, while the request has a row
        self._grammars: dict[Request, RequestGrammar] = {}  # by request, until its end is reported

    def check(self, params: SamplingParams) -> None:
        """Check the parameters of a request. The engine calls this before it adds the request.

        Raises:
            ValueError: the parameters name tokens that the model lacks, or have bad words without a tokenizer.
        """
        params.check_token_ids(self.vocab_size)
        if params.bad_words:
            bad_word_sequences(self._tokenizer, params.bad_words)

    def use_grammar(self, request: Request, grammar: CompiledGrammar) -> None:
        """Set the grammar that the generated text of a request must match. The grammar must be set before the request
        is scheduled.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        try:
            self._grammars[request] = RequestGrammar(request, grammar)
        except Exception as error:
            raise GrammarError(f"the grammar cannot be used: {type(error).__name__}: {first_line(error)}") from error

    def sample(self, logits: Tensor, output: SchedulerOutput, sampling: Int64Array, positions: Int64Array) -> Sampled:
        """Sample the tokens of a step: `prepare`, then `run`."""
        return self.run(logits, self.prepare(output, sampling, positions))

    # ------------------------------------------------------------------------------------- before the model has run

    def prepare(self, output: SchedulerOutput, sampling: Int64Array, positions: Int64Array) -> SamplingBatch:
        """Read the sampling parameters and edits of a step from its requests.

        Args:
            output: the scheduled step; the metadata of its requests are SamplingParams.
            sampling: [n] index in the output of the row of each token to be drawn, in ascending order; a row with
                drafts occurs once for each of its positions.
            positions: [n] position of each token to be drawn within its sequence.
        """
        if self._edited or self._grammars or self._columns.failures:
            self._forget_finished(output)
        for index in self._columns.admit(output):
            self._edited.pop(output.requests[index].request_id, None)
        batch = self._columns.gather(output, sampling, positions)
        edited = self._columns.edited_rows(output, sampling)
        if edited:
            edits = LogitEdits(len(sampling))
            for at in edited:
                try:
                    self._edited_row(output, int(sampling[at])).edit(at, int(positions[at]), edits)
                except Exception as error:  # an error of this row alone: if the step failed, it would fail again
                    batch.errors[at] = failure_detail(error)
            batch.edits = edits if edits else None
        return batch

    def _edited_row(self, output: SchedulerOutput, index: int) -> EditedRow:
        """The `EditedRow` of the request with row index `index`, made on first use after each admission of the request.
        Raises the errors of `check`."""
        request, serial = output.requests[index], int(output.serials[index])
        if request in self._columns.failures:
            raise ValueError(self._columns.failures[request])
        row = self._edited.get(request.request_id)
        if row is None or row.serial != serial:
            bad_words = bad_word_sequences(self._tokenizer, request.metadata.bad_words)
            grammar = self._grammars.get(request)
            if grammar is None and request.metadata.structured_outputs is not None:
                raise GrammarError(
                    "the grammar of the request was not compiled; add the request with Engine.add_request"
                )
            row = self._edited[request.request_id] = EditedRow(request, serial, self.vocab_size, bad_words, grammar)
        return row

    def _forget_finished(self, output: SchedulerOutput) -> None:
        for request in (*output.preempted, *output.finished):
            self._edited.pop(request.request_id, None)
        for request in output.finished:
            self._grammars.pop(request, None)
            self._columns.failures.pop(request, None)

    # -------------------------------------------------------------------------------------- after the model has run

    def run(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Draw a token for each row. If the draw raises, each row is drawn alone, and `batch.errors` gets an error for
        each row that raises.

        Args:
            logits: [n, vocab_size] logits in any floating dtype; not changed.
            batch: sampling parameters of the n rows.

        Raises:
            Exception: the first exception, if there are several rows and the draw of each row raises. The error then
                does not concern a single row.
        """
        with torch.inference_mode():
            try:
                return self._draw(logits, batch)
            except Exception as error:
                return self._draw_one_by_one(logits, batch, error)

    def _draw(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        is_on_device = self._device_race is not None and len(batch.random) > 0
        if batch.edits is not None:
            edited = batch.edits.apply(logits)
        elif is_on_device and logits.dtype in (torch.bfloat16, torch.float16):
            edited = logits  # the kernels only read them
        else:
            edited = logits.float()
        if self._draw_rows is not None:
            sampled = Sampled(*choose_on_cpu(edited, batch, self._draw_rows))
        elif is_on_device:
            sampled = Sampled(*self._race_for(edited).draw(edited, batch))
        else:
            sampled = Sampled(*choose_with_pytorch(edited, batch))
        if batch.errors:
            sampled.ok[list(batch.errors)] = False
        if batch.logprobs:
            sampled.logprobs = self._logprobs(logits, batch, sampled)
        return sampled

    def _race_for(self, logits: Tensor) -> DeviceRace:
        """The `DeviceRace` with workspaces for the rows of these logits. If the workspaces are too small, they grow by
        at least a factor of two."""
        assert self._device_race is not None
        least = 0 if self._race is None else self._race.max_rows
        if self._race is None or len(logits) > least:
            self._race = self._device_race(max(len(logits), 2 * least), self.vocab_size, logits.device)
        return self._race

    def _draw_one_by_one(self, logits: Tensor, batch: SamplingBatch, error: Exception) -> Sampled:
        """Draw each row alone. A row's token does not depend on other rows, so a row without an error gets the same
        token as in a common draw."""
        sampled = Sampled(np.zeros(len(logits), dtype=np.int64), np.zeros(len(logits), dtype=np.bool_))
        rows = [at for at in range(len(logits)) if at not in batch.errors]
        errors: dict[int, str] = {}
        for at in rows:
            try:
                one = self._draw(logits[at : at + 1], batch.of_row(at))
            except Exception as alone:
                errors[at] = failure_detail(alone)
                continue
            sampled.token_ids[at], sampled.ok[at] = one.token_ids[0], one.ok[0]
            for index, entries in one.logprobs.items():
                sampled.logprobs.setdefault(index, []).extend(entries)
        if len(errors) == len(rows) > 1:
            raise error
        logger.error("sampling of %d of %d row(s) failed: %s", len(errors), len(rows), error, exc_info=error)
        batch.errors.update(errors)
        return sampled

    @staticmethod
    def _logprobs(logits: Tensor, batch: SamplingBatch, sampled: Sampled) -> dict[int, list[TokenLogprobs]]:
        """Row index of the output -> log probabilities, computed in one call for all rows that request the same number
        of most likely tokens. A row that verifies drafts has one entry for each position."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for at, index, k in batch.logprobs:
            if sampled.ok[at]:
                groups.setdefault(k, []).append((at, index))
        found: dict[int, list[TokenLogprobs]] = {}
        for k, members in groups.items():
            rows = np.array([at for at, _ in members])
            some = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
            entries = token_logprobs(some, sampled.token_ids[rows], k)
            for (_, index), entry in zip(members, entries, strict=True):
                found.setdefault(index, []).append(entry)
        return found


@cache
def import_draw_rows() -> Callable[..., None] | None:
    """The function `race_kernels.draw_rows`; None: Numba is not installed."""
    try:
        from pointsman.engine.sampling.race_kernels import draw_rows
    except ImportError as error:
        logger.info("tokens are drawn without compiled code, which is slower: %s", error)
        return None
    beat(SECONDS_TO_COMPILE)  # `draw_rows` is compiled by its first call
    compiled: Callable[..., None] = draw_rows
    return compiled


@cache
def import_device_race() -> type[DeviceRace] | None:
    """The class `race_triton.DeviceRace`; None: Triton is not installed."""
    try:
        from pointsman.engine.sampling.race_triton import DeviceRace
    except ImportError as error:
        logger.info("tokens are drawn on the GPU without Triton, which is slower: %s", error)
        return None
    return DeviceRace


def choose_on_cpu(
    logits: Tensor, batch: SamplingBatch, draw_rows: Callable[..., None]
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Tokens [n] and whether each row has a finite maximum [n], for logits [n, vocab_size] float32 on the CPU."""
    values: Float32Array = logits.numpy()
    tokens: Int64Array = np.argmax(values, axis=-1)  # ten times as fast as PyTorch's; a NaN is the maximum
    top = values[np.arange(len(values)), tokens]
    if len(batch.random):
        random = slice(None) if len(batch.random) == len(values) else batch.random
        some = values[random]
        scaled = torch.from_numpy(some) - torch.from_numpy(top[random])[:, None]
        probs = torch.softmax(scaled.div_(torch.from_numpy(batch.temperature)[:, None]), dim=-1).numpy()
        drawn = np.empty(len(some), dtype=np.int64)
        draw_rows(some, probs, batch.top_k, batch.top_p, batch.min_p, batch.keys, drawn)
        tokens[random] = drawn
    return tokens, np.isfinite(top)


def choose_with_pytorch(logits: Tensor, batch: SamplingBatch) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Tokens [n] and whether each row has a finite maximum [n], computed on any device in PyTorch.

    Args:
        logits: [n, vocab_size] float32.
        batch: sampling parameters of the n rows.
    """
    top, tokens = logits.max(dim=-1)
    if len(batch.random):
        index = torch.from_numpy(batch.random).to(logits.device)
        some = logits if len(index) == len(logits) else logits[index]
        probs = probabilities(some, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        tokens = tokens.index_copy(0, index, draw(probs, batch.keys))
    return tokens.cpu().numpy(), torch.isfinite(top).cpu().numpy()
