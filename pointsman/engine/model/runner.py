"""ModelRunner: executes one `SchedulerOutput` on the model, in one forward pass for all rows.

    prepared  = runner.prepare(output)     reads the scheduler and the requests: block tables, input tokens, sampling
    launched  = runner.launch(prepared)    reads only `prepared`: forward pass, sampling, log probabilities
    execution = runner.collect(launched)   waits for a GPU; on a CPU the step has been executed already

So the scheduler can decide the next step while a step executes. `run` calls `launch` and `collect`; `execute` calls all
three methods. On a GPU a step may be launched while the previous step computes (`device_steps.py`). If an earlier step
has yet to sample an input token, the prepared step holds the place where the token will be (`SampledTokens`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pointsman.core.state.output import SchedulerOutput, StepResult
from pointsman.core.step.emit import UNSAMPLED
from pointsman.engine.arrays import Float32Array, Int64Array
from pointsman.engine.attention.paged import AttentionBackend, PagedBatch
from pointsman.engine.drafts.verification import Verification
from pointsman.engine.errors import NOTHING_LEFT, first_line
from pointsman.engine.kv.pool import KVPool
from pointsman.engine.model.forward import can_select_logits, repeat_last, run_paged
from pointsman.engine.model.linear import rounded_up_rows
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.pooling import Pooler, capture_hidden_states
from pointsman.engine.model.prepared import PreparedStep, PromptChunk, StepLinks
from pointsman.engine.sampling.logprobs import PromptLogprobs, TokenLogprobs, token_logprobs
from pointsman.engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from pointsman.core import Scheduler
    from pointsman.engine.device import FromDevice
    from pointsman.engine.kv.connector import EngineConnector
    from pointsman.engine.model.decode_graphs import Recorder
    from pointsman.engine.model.device_steps import DeviceSteps

logger = logging.getLogger(__name__)

NOT_FINITE = "the model's logits are not finite (NaN or infinity); check the weights, or use dtype float32"


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, and its results or the copy that will contain them."""

    prepared: PreparedStep
    started: float
    """Time of the launch, by `time.perf_counter`."""
    execution: StepExecution | None = None
    """The step's results; None: the device is computing them."""
    pending: FromDevice | None = None
    """The copy of the step's results from the device; None: `execution` has the results."""


@dataclass(slots=True)
class StepExecution:
    """The results of a step: `result` for the scheduler, the other fields for the callers of the step's requests."""

    result: StepResult
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row index of the output -> log probabilities of each sampled token (with drafts, of rejected tokens as well), for
    requests with `logprobs`."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Row index of the output -> log probabilities of this step's prompt tokens, for requests with
    `prompt_logprobs`."""
    embeddings: dict[int, Float32Array] = field(default_factory=dict)
    """Row index of the output -> embedding vector [hidden_size] of a prompt whose last chunk this step computed."""


class ModelRunner:
    """Runs scheduler outputs on one model over one KV pool.

    Args:
        loaded: the model.
        pool: the model's KV pool, with the block count, the block size and the groups of the scheduler's configuration.
        scheduler: the scheduler, read for block tables and input tokens, never changed.
        connector: connector to KV outside the pool; None: all KV is in the pool.
        seed: seed of the engine; the seed of a request without a seed is derived from this seed and the request's id.
        backend: attention backend; None: the backend with which the model was checked.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        scheduler: Scheduler,
        connector: EngineConnector | None = None,
        *,
        seed: int = 0,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.connector = connector
        self.loaded = loaded
        self.pool = pool
        self.scheduler = scheduler
        self.sampler = Sampler(loaded.vocab_size, seed, loaded.tokenizer, loaded.model.device)
        self.pooler = Pooler()
        self.backend = backend or loaded.attention
        self._fills_rows = self.backend.leaves_out_rows
        layout = pool.layout
        self._parts = np.array(layout.num_parts_of_groups, dtype=np.int32)[:, None] if layout.groups else None
        """[groups, 1] number of a layer's blocks in one block of the scheduler; None: there is only one group of
        layers."""
        num_steps = scheduler.config.max_steps_in_flight
        self._sampled_tokens = SampledTokens(num_steps) if num_steps > 1 else None
        self._device_steps = self._make_device_steps()
        self._last_ended = 0.0
        """Time when the last step was collected, by `time.perf_counter`."""

    def _make_device_steps(self) -> DeviceSteps | None:
        """Make the `DeviceSteps` for a GPU, or for interpreted Triton kernels; None: the host runs every step."""
        if self.pool.device.type != "cuda" and self.backend.name != "triton":
            return None
        try:
            from pointsman.engine.model.device_steps import DeviceSteps
        except ImportError as error:
            logger.warning("each step waits for the previous one: Triton cannot be imported: %s", first_line(error))
            return None
        return DeviceSteps(self.loaded, self.pool, self.backend, self.scheduler.config)

    def record_graphs(
        self, max_bytes: int, allocated_bytes: Callable[[], int], recorder: Recorder | None = None
    ) -> None:
        """Record CUDA graphs of decode steps (`decode_graphs.py`), if the attention supports them.

        Args:
            max_bytes: maximum memory of all graphs together.
            allocated_bytes: function that returns the bytes that this process has allocated on the device.
            recorder: recorder of the graphs; None: a `CudaRecorder`.
        """
        if self._device_steps is not None:
            self._device_steps.record_graphs(max_bytes, allocated_bytes, recorder)

    def num_computed_rows(self, num_tokens: int) -> int:
        """Number of rows of the model's matrix products in a step of `num_tokens` tokens, padding included."""
        return rounded_up_rows(num_tokens) if self._fills_rows else num_tokens

    def execute(self, output: SchedulerOutput) -> StepExecution:
        """Compute the step: KV of every scheduled token, and one sampled token for each row that `output.samples`
        marks.

        If the logits of a row are not finite, or all its tokens are excluded, the result has an error for that row's
        request alone. An output without rows needs no forward pass.

        Raises:
            Exception: any exception of the model. The content of the pool's slots that this step writes is then
                undefined.
        """
        return self.run(self.prepare(output))

    # ------------------------------------------------------------------------------------------------------ before

    def prepare(self, output: SchedulerOutput) -> PreparedStep:
        """Read the inputs of the step from the scheduler. Call `prepare` before any further method of the scheduler.

        Raises:
            StepOrderError: an earlier step has yet to sample a token of this step, but only one step may be in flight.
        """
        scheduled, computed, block_size = output.num_scheduled_tokens, output.num_computed_tokens, self.pool.block_size
        width = -(-int((scheduled + computed).max(initial=0)) // block_size)  # the scheduler's tables may be wider
        if self._parts is None:
            tables = self.scheduler.block_table[:, :width][output.rows]
            batch = PagedBatch.build(scheduled, computed, tables, block_size)
            batches = [batch]
        else:
            tables = self.scheduler.group_block_tables[:, :, :width][output.rows] * self._parts
            batch = PagedBatch.build(scheduled, computed, tables[:, 0], block_size)
            batches = batch.batches_of_groups(tables)
        sampling = output.samples.nonzero()[0]
        behind: Int64Array | int = 0  # distance from each sampled position to its row's last position
        verification = None
        if len(output.draft_token_ids):
            verification = Verification.of(output, sampling)
            sampling, behind = verification.sampling, verification.behind
        ends, kv_lens = batch.query_starts[1:], batch.kv_lens
        if len(sampling) != output.num_rows or verification is not None:
            ends, kv_lens = ends[sampling], kv_lens[sampling]
        sampling_batch = self.sampler.prepare(output, sampling, kv_lens - behind)
        sampled = self._sampled_tokens
        token_ids = self.scheduler.input_token_ids(output, allow_unsampled=sampled is not None).astype(np.int64)
        prepared = PreparedStep(
            num_rows=output.num_rows,
            batches=batches,
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(batch.positions),
            sampling=sampling,
            sampling_batch=sampling_batch,
            logits_at=ends - 1 - behind,
            num_logits=len(sampling),
            verification=verification,
        )
        if sampling_batch.prompt_logprobs:
            self._prepare_prompt_logprobs(output, prepared)
        if len(self.pooler):
            prepared.pooled_chunks, hidden_at = self.pooler.prepare(output, batch.query_starts)
            prepared.logits_at = np.concatenate([prepared.logits_at, hidden_at])
        if sampled is not None:
            prepared.links = _make_links(output, prepared, sampled)
        if self.connector is not None:
            prepared.transfers = self.connector.prepare(output)
        return prepared

    @staticmethod
    def _prepare_prompt_logprobs(output: SchedulerOutput, prepared: PreparedStep) -> None:
        """Add to a prepared step the prompt chunks whose log probabilities are needed. Logits at position p are for
        token p + 1, so a chunk covers the tokens one position after the scheduled tokens."""
        chunks: list[PromptChunk] = []
        logits_at = [prepared.logits_at]
        for index, num_logprobs in prepared.sampling_batch.prompt_logprobs:
            prompt = output.requests[index].prompt_token_ids
            start = int(output.num_computed_tokens[index]) + 1
            end = min(start + int(output.num_scheduled_tokens[index]), len(prompt))
            if start < end:
                token_ids = prompt[start:end].astype(np.int64)
                chunks.append(PromptChunk(index, start, token_ids, num_logprobs))
                logits_at.append(prepared.batch.query_starts[index] + np.arange(end - start))
        prepared.prompt_chunks = chunks
        prepared.logits_at = np.concatenate(logits_at)
        prepared.num_logits = len(prepared.logits_at)

    # ----------------------------------------------------------------------------------------------------- execute

    def run(self, prepared: PreparedStep) -> StepExecution:
        """Execute a prepared step and return its results; steps must run in the order in which they were prepared.

        Raises:
            Exception: see `execute`.
        """
        return self.collect(self.launch(prepared))

    def can_launch_ahead(self, prepared: PreparedStep) -> bool:
        """Whether `launch` returns without waiting for this step, so that `launch` may be called before the previous
        step is collected."""
        return self._device_steps is not None and self._device_steps.is_plain(prepared)

    def launch(self, prepared: PreparedStep) -> LaunchedStep:
        """Begin to execute a step; steps are launched in the order of preparation. On a CPU the whole step is executed
        here.

        Raises:
            Exception: see `execute`.
        """
        launched = LaunchedStep(prepared, time.perf_counter())
        if self._device_steps is not None and self._device_steps.is_plain(prepared):
            launched.pending = self._device_steps.launch(prepared)
        else:
            launched.execution = self._run(prepared)
        return launched

    def collect(self, launched: LaunchedStep) -> StepExecution:
        """Wait for a step and return its results; steps are collected in the order of launches.

        Raises:
            Exception: see `execute`.
        """
        prepared, execution = launched.prepared, launched.execution
        if execution is None:
            assert launched.pending is not None
            prepared.batch.do_meanwhile(lambda: True)
            found = launched.pending.wait()
            token_ids, ok = found["tokens"], found["ok"] != 0
            self._store_sampled(prepared, token_ids)
            errors = {int(index): NOT_FINITE for index in prepared.sampling[~ok]}
            execution = StepExecution(StepResult(token_ids=token_ids[ok], errors=errors))
        if prepared.num_rows:
            ended = time.perf_counter()
            execution.result.step_time = ended - max(launched.started, self._last_ended)
            self._last_ended = ended
        if prepared.transfers is not None:
            execution.result.copies = prepared.transfers.report()
        return execution

    def _run(self, prepared: PreparedStep) -> StepExecution:
        if prepared.transfers is not None:
            prepared.transfers.run()
        if prepared.num_rows == 0:
            return StepExecution(StepResult(token_ids=np.empty(0, dtype=np.int64)))
        if prepared.links is not None:
            self._fill_sampled(prepared, prepared.links)
        vectors: dict[int, Float32Array] = {}
        if prepared.pooled_chunks:
            logits, vectors = self._forward_and_pool(prepared)
        else:
            logits = self._forward(prepared)
        if logits.device.type != "cpu":  # sampling waits until the device has computed the logits
            prepared.batch.do_meanwhile(lambda: True)
        execution = self._sample(prepared, logits[: len(prepared.sampling)])
        if prepared.prompt_chunks:
            execution.prompt_logprobs = _prompt_logprobs(prepared, logits[len(prepared.sampling) : prepared.num_logits])
        if vectors:
            _add_vectors(execution, vectors)
        return execution

    def _store_sampled(self, prepared: PreparedStep, token_ids: Int64Array) -> None:
        """Store a step's sampled tokens for later steps that have been prepared already."""
        if prepared.links is not None and self._sampled_tokens is not None:
            self._sampled_tokens.put(prepared.links.sampled, token_ids)

    def _fill_sampled(self, prepared: PreparedStep, links: StepLinks) -> None:
        """Fill in the input tokens that were not yet sampled when the step was prepared."""
        assert self._sampled_tokens is not None
        if len(links.unsampled):
            prepared.token_ids.numpy()[links.unsampled] = self._sampled_tokens.get(links.sources)
        if prepared.sampling_batch.edits is not None:
            prepared.sampling_batch.errors.update(prepared.sampling_batch.edits.finish(self._sampled_tokens.get))

    def _forward_and_pool(self, prepared: PreparedStep) -> tuple[Tensor, dict[int, Float32Array]]:
        """Logits [num_logits or more, vocab_size], and row index -> embedding vector for each prompt that this step
        completed."""
        model, num_logits = self.loaded.model, prepared.num_logits
        trims = can_select_logits(type(model).forward)
        wanted = rounded_up_rows(num_logits) if self._fills_rows else num_logits
        with capture_hidden_states(model, wanted, trims) as captured:
            logits = self._forward(prepared)
        hidden = captured[0] if trims else captured[0][torch.from_numpy(prepared.logits_at).to(captured[0].device)]
        return logits, self.pooler.add_states(prepared.pooled_chunks, hidden[num_logits : len(prepared.logits_at)])

    def _forward(self, prepared: PreparedStep) -> Tensor:
        """Logits [len(logits_at), vocab_size]; logits of pooled rows, which are last, may be missing."""
        if self._device_steps is not None:
            return self._device_steps.forward(prepared)
        num_logits, keep, num_rows = len(prepared.logits_at), None, None
        if not prepared.needs_all_logits:
            keep = torch.from_numpy(prepared.logits_at)
        if self._fills_rows:
            num_rows = self.num_computed_rows(prepared.batch.num_tokens)
            keep = None if keep is None else repeat_last(keep, rounded_up_rows(num_logits))
        plans = [self.backend.plan(batch) for batch in prepared.batches]
        token_ids, positions = prepared.token_ids, prepared.positions
        logits = run_paged(self.loaded, self.pool, self.backend, plans, token_ids, positions, keep, num_rows)
        return logits[:num_logits]

    def _sample(self, prepared: PreparedStep, logits: Tensor) -> StepExecution:
        sampling = prepared.sampling
        if not len(sampling):
            return StepExecution(StepResult(token_ids=np.empty(0, dtype=np.int64)))
        sampled = self.sampler.run(logits, prepared.sampling_batch)
        if prepared.verification is not None:
            result, ok = prepared.verification.verify(sampled.token_ids, sampled.ok, prepared.num_rows)
            result.errors = {} if ok.all() else _row_errors(prepared, logits, ok)
            return StepExecution(result, sampled.logprobs)
        self._store_sampled(prepared, sampled.token_ids)
        if self._device_steps is not None and prepared.links is not None:
            self._device_steps.put(prepared.links.sampled, sampled.token_ids)
        if sampled.ok.all():
            return StepExecution(StepResult(token_ids=sampled.token_ids), sampled.logprobs)
        result = StepResult(token_ids=sampled.token_ids[sampled.ok], errors=_row_errors(prepared, logits, sampled.ok))
        return StepExecution(result, sampled.logprobs)


class SampledTokens:
    """Stores the last `num_steps` sampled tokens of each row of the scheduler.

    A token's place depends on its row and its position in the sequence. A place (an index in the array of stored
    tokens) never returns a stale token, for two reasons. A row is reused only after every step that uses it has ended.
    A repeated step writes its tokens to the same places.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._tokens: Int64Array = np.zeros(0, dtype=np.int64)

    def places(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Places of the tokens at `positions` of the sequences in `rows`. May be called before the tokens are
        sampled."""
        return rows * self._num_steps + positions % self._num_steps

    def put(self, places: Int64Array, token_ids: Int64Array) -> None:
        """Store the tokens `token_ids` that a step sampled at `places`."""
        most = int(places.max(initial=-1))
        if most >= len(self._tokens):
            grown = np.zeros(max(most + 1, 2 * len(self._tokens)), dtype=np.int64)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        self._tokens[places] = token_ids

    def get(self, places: Int64Array) -> Int64Array:
        """The tokens that earlier steps stored at `places`."""
        return self._tokens[places]


def _make_links(output: SchedulerOutput, prepared: PreparedStep, tokens: SampledTokens) -> StepLinks:
    """The places from which a step reads tokens and to which it stores tokens, if several steps may be in flight."""
    batch, sampling = prepared.batch, prepared.sampling
    rows = output.rows.astype(np.int64)
    unsampled = (prepared.token_ids.numpy() == UNSAMPLED).nonzero()[0]
    edits = prepared.sampling_batch.edits
    if edits is not None:
        for edit in edits.unfinished:
            index, end = sampling[edit.row], int(batch.kv_lens[sampling[edit.row]])
            edit.sources = tokens.places(rows[index], np.arange(end - edit.num_missing, end))
    if len(unsampled) == len(sampling) == len(rows) == batch.num_tokens:  # only decodes, with input in flight
        return StepLinks(tokens.places(rows, batch.kv_lens), unsampled, tokens.places(rows, batch.positions))
    row_indices = np.searchsorted(batch.query_starts, unsampled, side="right") - 1
    return StepLinks(
        sampled=tokens.places(rows[sampling], batch.kv_lens[sampling]),
        unsampled=unsampled,
        sources=tokens.places(rows[row_indices], batch.positions[unsampled]),
    )


def _add_vectors(execution: StepExecution, vectors: dict[int, Float32Array]) -> None:
    """Add embedding vectors, by row index, to a step's results. A vector that is not finite becomes an error of its
    row."""
    execution.embeddings = {index: vector for index, vector in vectors.items() if np.isfinite(vector).all()}
    bad = {index: NOT_FINITE for index in vectors if index not in execution.embeddings}
    if bad:
        execution.result.errors = {**execution.result.errors, **bad}


def _row_errors(prepared: PreparedStep, logits: Tensor, ok: npt.NDArray[np.bool_]) -> dict[int, str]:
    """Row index -> why the row could not be sampled: an error of the model, or of the request's parameters."""
    bad = (~ok).nonzero()[0]
    had_choice = torch.isfinite(logits[torch.from_numpy(bad).to(logits.device)].amax(dim=-1)).tolist()
    errors = prepared.sampling_batch.errors
    return {
        int(prepared.sampling[at]): errors.get(int(at), NOTHING_LEFT if finite else NOT_FINITE)
        for at, finite in zip(bad, had_choice, strict=True)
    }


def _prompt_logprobs(prepared: PreparedStep, logits: Tensor) -> dict[int, PromptLogprobs]:
    """Row index -> log probabilities of the row's prompt chunk. `logits`: [tokens of all chunks, vocab_size], chunk
    after chunk."""
    found: dict[int, PromptLogprobs] = {}
    parts = torch.split(logits, [len(chunk.token_ids) for chunk in prepared.prompt_chunks])
    with torch.inference_mode():
        for chunk, part in zip(prepared.prompt_chunks, parts, strict=True):
            entries = token_logprobs(part, chunk.token_ids, chunk.num_logprobs)
            found[chunk.row_index] = PromptLogprobs(chunk.start, entries)
    return found
