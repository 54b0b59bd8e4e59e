"""Converts the core's decisions to vLLM's `SchedulerOutput`.

The lists of an output are made from whole arrays of the core's output. Values that depend only on the set of running
requests are reused from the previous step. Python loops visit only rows that got blocks, were admitted, or have a
grammar.

vLLM has two model runners, which get a resumed request in different ways: the first as a cached request with all its
blocks and tokens, the second as a new request with its tokens. Both runners keep the lists of an output, so every
output gets new lists.

The fields that the second runner reads, in any supported version (`tests/integrations/test_vllm_v2_runner.py` compares
this list with vLLM's sources):

    SchedulerOutput: finished_req_ids, preempted_req_ids
        Slots to free, in the order of ids. A preempted request is in the second set in the step that preempts it,
        because it comes back as a new request.
    SchedulerOutput: scheduled_new_reqs, scheduled_cached_reqs
        Admitted requests, resumed ones included, each of which gets a slot; and requests that continue.
    SchedulerOutput: num_scheduled_tokens, total_num_scheduled_tokens
        Tokens of each row, at least one; the runner sorts the batch itself.
    SchedulerOutput: scheduled_spec_decode_tokens, num_spec_tokens_to_schedule
        Number of drafts that each row verifies, placeholders included, and that the next step may have.
    SchedulerOutput: encoder_input_updates, skip_drafts, block_table_updates
        Since 0.33: payloads of images that workers may drop, and whether new drafts have no use. In 0.31: rows that
        replace block tables. Pointsman gives none of them.
    SchedulerOutput: has_structured_output_requests
        Whether the step samples under a grammar.
    SchedulerOutput: new_block_ids_to_zero, kv_cache_block_copies
        Blocks to zero or to copy before the step, if vLLM's manager owns the blocks.
    SchedulerOutput: scheduled_encoder_inputs, free_encoder_mm_hashes
        Multimodal inputs.
    SchedulerOutput: kv_connector_metadata, has_sync_kv_loads, ec_connector_metadata, aux_output_connector_metadata
        Nothing, because connectors are refused.
    NewRequestData: req_id, prompt_token_ids, prompt_len, prefill_token_ids
        The last has all known tokens, those of a resumed request's output included. It is required.
    NewRequestData: block_ids, num_computed_tokens
        The whole block table, one list for each group; tokens whose KV is cached.
    NewRequestData: sampling_params, pooling_params, lora_request
        As the request has them.
    NewRequestData: mm_features, prompt_embeds, prompt_is_token_ids
        Multimodal inputs, and prompts as embeddings.
    CachedRequestData: req_ids, num_computed_tokens, new_block_ids
        Of rows that continue, in one order: where each begins, and its blocks since its last step, or none.

The first runner alone reads `resumed_req_ids`, `num_output_tokens`, `new_token_ids` and `all_token_ids`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from pointsman.core import Request
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.kv_groups import KVGroups
from pointsman.integrations.vllm.support import maker

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

Int64Array = npt.NDArray[np.int64]

new_output = maker(
    SchedulerOutput,
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "finished_req_ids",
    "free_encoder_mm_hashes",
    left=(  # fields for connectors, for statistics of vLLM's own scheduler, or that are always empty
        "aux_output_connector_metadata",
        "block_table_updates",
        "ec_connector_metadata",
        "ec_manager_metadata",
        "has_sync_kv_loads",
        "kv_connector_block_state",
        "kv_connector_metadata",
        "num_common_prefix_blocks",
        "num_invalid_spec_tokens",
        "scheduled_encoder_input_stats",
        # Drafters with KV of their own are refused. Workers keep the payloads of images as long as their request.
        "skip_drafts",
        "encoder_input_updates",
    ),
)
_NAMES_COMMON_PREFIX = any(
    each.name == "num_common_prefix_blocks" and each.default_factory is MISSING for each in fields(SchedulerOutput)
)
"""Whether an output must have `num_common_prefix_blocks`, as in vLLM 0.31."""
new_cached = maker(
    CachedRequestData,
    "req_ids",
    "resumed_req_ids",
    "new_token_ids",
    "all_token_ids",
    "new_block_ids",
    "num_computed_tokens",
    "num_output_tokens",
)
new_request_data = maker(
    NewRequestData,
    "req_id",
    "prompt_token_ids",
    "mm_features",
    "sampling_params",
    "pooling_params",
    "block_ids",
    "num_computed_tokens",
    "lora_request",
    left=("replay_start",),  # fields for models that are refused
)


class OutputMaker:
    """Makes vLLM's `SchedulerOutput` of each step, in the order of the steps.

    Args:
        v2_runner: whether vLLM's second model runner reads the outputs.
        sends_tokens: whether workers need the sampled tokens (pipeline parallelism without asynchronous scheduling).
        runs_ahead: whether steps are scheduled while other steps are in flight, so that a row may be missing in the
            next step.
        uses_mrope: whether token positions depend on the grids (patch layouts) of images, so that workers need the
            grids even if they need no embeddings.
        groups: the KV groups, if vLLM's manager holds the blocks; None: the core's outputs have the blocks.
        num_groups: number of KV groups in the core; 0: one group of full attention.
        num_kv_groups: number of KV groups in vLLM's workers.
        may_fail: whether a policy may fail in the middle of a step.
    """

    def __init__(
        self,
        *,
        v2_runner: bool,
        sends_tokens: bool,
        runs_ahead: bool,
        uses_mrope: bool = False,
        groups: KVGroups | None = None,
        num_groups: int = 0,
        num_kv_groups: int = 1,
        may_fail: bool = False,
    ) -> None:
        self._groups = groups
        self._num_groups = num_groups
        self._reported = _ReportedBlocks() if may_fail and groups is None else None
        self._is_one_group = groups is None and not num_groups and self._reported is None
        """Whether the core's outputs have each block of each row exactly once, in one table."""
        self._new_output = new_output
        if _NAMES_COMMON_PREFIX:  # the number 0 for each group: no attention over a common prefix
            self._new_output = partial(new_output, num_common_prefix_blocks=[0] * num_kv_groups)
        self._v2_runner = v2_runner
        self._uses_mrope = uses_mrope
        self._sends_tokens = sends_tokens
        self._sends_all_tokens = runs_ahead and not v2_runner
        # Two arrays with values of each row's request, by row of the core's batch. They grow with the number of rows.
        self._id_of: npt.NDArray[np.object_] = np.empty(64, dtype=object)
        self._prompt_end_of: Int64Array = np.zeros(64, dtype=np.int64)
        # Values of the newest output, in the order of its rows:
        self._requests: Sequence[Request] = ()
        self._ids: list[str] = []
        self._prompt_ends: Int64Array = np.zeros(0, dtype=np.int64)
        """[rows] position of the last prompt token of each row."""
        self._one_each: dict[str, int] = {}
        """A dictionary with the value 1 for each id in `_ones_of`."""
        self._ones_of: list[str] = []
        self._all_sample: npt.NDArray[np.bool_] | None = None
        """The newest array `samples` whose values were all true."""
        self._ids_before: Sequence[str] = ()

    def ids(self, output: Output) -> list[str]:
        """vLLM's ids of the requests of the newest output. Read-only."""
        if output.requests is self._requests:
            return self._ids
        rows = output.rows
        if output.num_continued < len(output.requests):
            for row, request in zip(rows[output.num_continued :].tolist(), output.admitted, strict=True):
                self._store_admitted_row(row, request)
        self._requests = output.requests
        self._ids = self._id_of[rows].tolist()
        self._prompt_ends = self._prompt_end_of[rows]
        return self._ids

    def _store_admitted_row(self, row: int, request: Request) -> None:
        """Store, for this row, the id and the end of the prompt of the request admitted to it."""
        if row >= len(self._id_of):
            self._id_of.resize(2 * row, refcheck=False)
            self._prompt_end_of.resize(2 * row, refcheck=False)
        self._id_of[row] = request.metadata.request_id
        self._prompt_end_of[row] = request.num_prompt_tokens - 1

    def make(self, output: Output, ids: list[str], num_drafts: int) -> SchedulerOutput:
        """vLLM's `SchedulerOutput` of a step.

        Args:
            output: the core's newest output.
            ids: vLLM's ids of the output's requests.
            num_drafts: maximum number of drafts of a request in its next step.
        """
        count, total = output.num_continued, output.total_num_scheduled_tokens
        blocks, block_rows = output.block_ids.tolist(), output.block_rows.tolist()
        if self._is_one_group:
            new_blocks = _new_block_ids(count, blocks, block_rows)
        else:
            new_blocks = self._new_block_ids(output, ids, blocks, block_rows)
        computed = output.num_computed_tokens.tolist()
        if total == count == len(ids) and ids is self._ones_of and output.samples is self._all_sample:
            # Each row computes its newest token only, as in the previous step.
            numbers = (output.num_computed_tokens - self._prompt_ends).tolist()
            scheduled = self._one_each.copy()
        else:
            if count < len(ids):
                del computed[count:]
            numbers = self._num_output_tokens(output)
            scheduled = self._num_scheduled_tokens(output, ids)
        cached = new_cached(
            ids[:count],
            set(),
            self._known_tokens_of_rows(output) if self._sends_tokens else [],
            self._tokens_of_skipped(output, ids) if self._sends_all_tokens else {},
            new_blocks,
            computed,
            numbers,
        )
        made = self._new_output(
            self._add_admitted_rows(output, ids, blocks, block_rows, cached) if count < len(ids) else [],
            cached,
            scheduled,
            total,
            _drafts(output, ids) if len(output.draft_token_ids) else {},
            {},
            _names(output.finished) if output.finished else set(),
            [],
            preempted_req_ids=_names(output.preempted) if output.preempted else set(),
        )
        if num_drafts:
            made.num_spec_tokens_to_schedule = num_drafts
        if self._groups is not None:
            made.new_block_ids_to_zero = self._groups.take_blocks_to_zero()
            made.kv_cache_block_copies = self._groups.take_block_copies()
        self._ids_before = ids
        return made

    def _new_block_ids(
        self, output: Output, ids: list[str], blocks: list[int], block_rows: list[int]
    ) -> list[tuple[list[int], ...] | None]:
        """The new blocks of each continued row, by group; None: the row has no new blocks."""
        count = output.num_continued
        if self._groups is not None:
            return self._groups.take_new_blocks(ids[:count])
        of_groups = output.block_groups.tolist()
        if self._reported is not None and (unreported := self._reported.unreported_blocks(output)) is not None:
            blocks, block_rows = [blocks[at] for at in unreported], [block_rows[at] for at in unreported]
            of_groups = [of_groups[at] for at in unreported] if of_groups else of_groups
        if not self._num_groups:
            return _new_block_ids(count, blocks, block_rows)
        found: list[tuple[list[int], ...] | None] = [None] * count
        for index, block, group in zip(block_rows, blocks, of_groups, strict=True):
            if index >= count:
                break
            own = found[index]
            if own is None:
                own = found[index] = tuple([[] for _ in range(self._num_groups)])
            own[group].append(block)
        return found

    def _whole_tables(
        self, output: Output, request: Request, blocks: list[int], start: int, end: int
    ) -> tuple[list[int], ...]:
        """The block ids of an admitted row, by group, from the core's output. A block that has left an attention window
        has the id 0, vLLM's null block."""
        if self._groups is not None:
            return self._groups.blocks_of(request)
        if not self._num_groups:
            return (blocks,)
        places = output.block_places[start:end]
        tables = np.zeros((self._num_groups, int(places.max()) + 1), dtype=np.int64)
        tables[output.block_groups[start:end], places] = blocks
        return tuple(tables.tolist())

    def without_rows(self) -> SchedulerOutput:
        """vLLM's `SchedulerOutput` of a step that runs no request and reports nothing. Continued rows are skipped in
        this step."""
        self._ids_before = ()
        return SchedulerOutput.make_empty()

    def _num_scheduled_tokens(self, output: Output, ids: list[str]) -> dict[str, int]:
        count = output.num_continued
        if output.total_num_scheduled_tokens == len(ids):
            return self._one_for_each_id(output, ids).copy()
        if not self._is_plain_decode(output):
            return dict(zip(ids, output.num_scheduled_tokens.tolist(), strict=True))
        found = self._one_for_each_id(output, ids).copy()
        found.update(zip(ids[count:], output.num_scheduled_tokens[count:].tolist(), strict=True))
        return found

    def _is_plain_decode(self, output: Output) -> bool:
        """Whether every continued row computes one token."""
        count, total = output.num_continued, output.total_num_scheduled_tokens
        return total == output.num_rows or total - sum(output.num_scheduled_tokens[count:].tolist()) == count

    def _one_for_each_id(self, output: Output, ids: list[str]) -> dict[str, int]:
        """A dictionary with 1 for each id, in order. It is made by updating the dictionary of an earlier output,
        because a new one takes ten times as long."""
        ones = self._one_each
        if ids is not self._ones_of:
            for request in chain(output.preempted, output.finished):
                ones.pop(request.metadata.request_id, None)
            for name in ids[output.num_continued :]:
                ones[name] = 1
            if list(ones) != ids:  # some rows were skipped, or run again after they were skipped
                ones = dict.fromkeys(ids, 1)
            self._one_each = ones = ones.copy()  # a dictionary without removed entries, which slow down copies
            self._ones_of = ids
        return ones

    def _num_output_tokens(self, output: Output) -> list[int]:
        """Number of output tokens of each continued row at the end of this step, including tokens in flight."""
        count = output.num_continued
        numbers: list[int]
        if self._is_plain_decode(output):
            numbers = (output.num_computed_tokens[:count] - self._prompt_ends[:count]).tolist()
        else:
            ends = output.num_computed_tokens[:count] + output.num_scheduled_tokens[:count]
            if len(output.draft_token_ids):
                ends -= output.num_draft_tokens[:count]
            numbers = (ends - 1 - self._prompt_ends[:count]).tolist()
        samples = output.samples
        if samples is not self._all_sample:
            if np.count_nonzero(samples) == len(samples):
                self._all_sample = samples
                return numbers
            for index in (~samples[:count]).nonzero()[0].tolist():  # the row's chunk ends before its newest known token
                numbers[index] = output.requests[index].num_output_tokens
        return numbers

    def _tokens_of_skipped(self, output: Output, ids: list[str]) -> dict[str, list[int]]:
        """All tokens of continued requests that were not in the previous output."""
        if ids is self._ids_before:
            return {}
        before = set(self._ids_before)
        continued = zip(ids[: output.num_continued], output.continued, strict=True)
        return {name: request.all_token_ids.tolist() for name, request in continued if name not in before}

    def _known_tokens_of_rows(self, output: Output) -> list[list[int]]:
        """For each continued row: the known tokens that the row computes in this step."""
        starts = output.num_computed_tokens.tolist()
        counts = (output.num_scheduled_tokens - output.num_draft_tokens).tolist()
        rows = zip(output.continued, starts, counts, strict=False)
        return [request.tokens(start, start + count).tolist() for request, start, count in rows]

    def _add_admitted_rows(
        self, output: Output, ids: list[str], blocks: list[int], block_rows: list[int], cached: CachedRequestData
    ) -> list[NewRequestData]:
        """The admitted rows as new requests; rows that the first runner reads as resumed are added to `cached`."""
        new = []
        count = output.num_continued
        end = bisect_left(block_rows, count)
        hits, resumed = output.num_cached_tokens.tolist(), output.is_resumed.tolist()
        rows = zip(range(count, len(ids)), output.admitted, hits, resumed, strict=True)
        for index, request, num_hits, is_resumed in rows:
            start, end = end, bisect_left(block_rows, index + 1, end)
            own = self._whole_tables(output, request, blocks[start:end], start, end)
            if is_resumed and not self._v2_runner:
                self._add_resumed(cached, output, index, own)
                continue
            of_vllm = request.metadata
            data = new_request_data(
                ids[index],
                of_vllm.prompt_token_ids,
                self._inputs_for_workers(of_vllm.mm_features, num_hits) if of_vllm.mm_features else [],
                of_vllm.sampling_params,
                of_vllm.pooling_params,
                own,
                num_hits,
                of_vllm.lora_request,
            )
            if of_vllm.prompt_embeds is not None:
                data.prompt_embeds = of_vllm.prompt_embeds
            if of_vllm.prompt_is_token_ids is not None:
                data.prompt_is_token_ids = of_vllm.prompt_is_token_ids
            if self._v2_runner:
                data.prefill_token_ids = request.all_token_ids.tolist()
            new.append(data)
        return new

    def _inputs_for_workers(self, features: list[MultiModalFeatureSpec], num_hits: int) -> list[MultiModalFeatureSpec]:
        """The encoder inputs of an admitted request. For vLLM's second model runner, the inputs within the cached
        prefix have no payload. The first runner keeps the inputs until the request has finished, and needs their
        payload if the request is preempted and the prefix evicted."""
        if self._v2_runner:
            return list(strip_covered_mm_data(features, num_hits, uses_mrope=self._uses_mrope))
        return list(features)

    def _add_resumed(
        self, cached: CachedRequestData, output: Output, index: int, blocks: tuple[list[int], ...]
    ) -> None:
        """Add a resumed row to the cached requests."""
        request = output.requests[index]
        name, start = request.metadata.request_id, int(output.num_computed_tokens[index])
        cached.req_ids.append(name)
        cached.resumed_req_ids.add(name)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(start)
        cached.num_output_tokens.append(request.num_output_tokens)
        if self._sends_all_tokens:
            cached.all_token_ids[name] = request.all_token_ids.tolist()
        if self._sends_tokens:
            end = start + int(output.num_scheduled_tokens[index])
            cached.new_token_ids.append(request.tokens(start, end).tolist())


class _ReportedBlocks:
    """Counts, for each row, the blocks that have been reported to the workers. Used only if a policy may fail.

    After a step in which a policy failed, the core's output has the whole tables of its rows, because hosts do not know
    which blocks the rows got in that step. Workers append the blocks that they get, so no block may be reported twice.
    """

    def __init__(self) -> None:
        self._places: Int64Array = np.zeros(64, dtype=np.int64)
        """Number of reported blocks, by row."""

    def unreported_blocks(self, output: Output) -> list[int] | None:
        """Indices of the output's blocks that were not reported, if the output has whole tables; None: no block was
        reported. Call this exactly once for every output."""
        rows = output.rows
        if len(rows) and (most := int(rows.max())) >= len(self._places):
            self._places.resize(2 * most, refcheck=False)
        known = self._places
        known[rows[output.num_continued :]] = 0
        block_rows = output.block_rows
        if not len(block_rows):
            return None
        of_blocks = rows[block_rows]
        if len(output.block_places):
            places = output.block_places
        else:
            places = np.arange(len(block_rows)) - block_rows.searchsorted(block_rows)
            if not output.resync:
                places += known[of_blocks]
        unreported = (places >= known[of_blocks]).nonzero()[0].tolist() if output.resync else None
        np.maximum.at(known, of_blocks, places + 1)
        return unreported


def _names(requests: Sequence[Request]) -> set[str]:
    return {request.metadata.request_id for request in requests}


def _new_block_ids(count: int, blocks: list[int], block_rows: list[int]) -> list[tuple[list[int], ...] | None]:
    """The new blocks of each of the `count` continued rows; None: the row has no new blocks."""
    found: list[tuple[list[int], ...] | None] = [None] * count
    start, end = 0, bisect_left(block_rows, count)
    while start < end:
        index, stop = block_rows[start], start + 1
        if stop < end and block_rows[stop] == index:  # several blocks: the row computes a chunk of a prompt
            stop = bisect_right(block_rows, index, stop, end)
        found[index] = (blocks[start:stop],)
        start = stop
    return found


def _drafts(output: Output, ids: list[str]) -> dict[str, list[int]]:
    """The drafts of each row that has drafts, by vLLM's request id."""
    drafts = output.draft_token_ids.tolist()
    counts = output.num_draft_tokens.tolist()
    found, start = {}, 0
    for name, count in zip(ids, counts, strict=True):
        if count:
            found[name] = drafts[start : start + count]
            start += count
    return found
