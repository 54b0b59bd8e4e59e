"""Our decisions as vLLM's `SchedulerOutput`.

In a step where everybody goes on, the lists of it are made of our arrays at once, and what depends only on who runs is
kept from the step before. Python loops run over rows that got blocks, were admitted, or have a grammar.

vLLM has two model runners, which are told of a resumed request in different ways: the first, among the cached requests,
with all its blocks and its tokens; the second, as a new one, with its tokens. Both keep the lists that they get, so
every list here is made for its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from pointsman.core import Request
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.versions import make

Int64Array = npt.NDArray[np.int64]


class Schedules:
    """Makes vLLM's outputs, in order.

    Args:
        v2_runner: which of vLLM's model runners will read them.
        sends_tokens: whether a worker needs to be told what was sampled (pipeline parallelism without asynchronous
            scheduling).
        runs_ahead: whether steps are scheduled while others are in flight, and every row in each need not be in the
            next.
    """

    def __init__(self, *, v2_runner: bool, sends_tokens: bool, runs_ahead: bool) -> None:
        self._v2_runner = v2_runner
        self._sends_tokens = sends_tokens
        self._tells_tokens = runs_ahead and not v2_runner
        self._requests: Sequence[Request] = []
        self._ids: list[str] = []
        self._prompt_lens: Int64Array = np.zeros(0, dtype=np.int64)
        self._ids_before: Sequence[str] = ()

    def ids(self, requests: Sequence[Request]) -> list[str]:
        """What vLLM calls the requests of an output; the list is ours."""
        if requests is self._requests:
            return self._ids
        num_known = len(self._requests)
        if requests[:num_known] != self._requests:
            num_known, self._ids, self._prompt_lens = 0, [], self._prompt_lens[:0]
        if num_known < len(requests):
            new = requests[num_known:]
            self._ids = self._ids + [request.metadata.request_id for request in new]
            lens = np.array([len(request.prompt_token_ids) for request in new], dtype=np.int64)
            self._prompt_lens = np.concatenate([self._prompt_lens, lens])
        self._requests = requests
        return self._ids

    def make(self, output: Output, num_drafts: int) -> Any:
        """The output for vLLM's workers. `num_drafts` is how many drafts a request may have in its next step."""
        ids = self.ids(output.requests)
        new, resumed = self._admitted(output, ids) if output.num_continued < len(ids) else ([], [])
        cached = self._continued(output, ids)
        for index in resumed:
            self._add_resumed(cached, output, index)
        values = {
            "scheduled_new_reqs": new,
            "scheduled_cached_reqs": CachedRequestData(**cached),
            "num_scheduled_tokens": dict(zip(ids, output.num_scheduled_tokens.tolist(), strict=True)),
            "total_num_scheduled_tokens": output.total_num_scheduled_tokens,
            "scheduled_spec_decode_tokens": _drafts(output, ids) if len(output.draft_token_ids) else {},
            "scheduled_encoder_inputs": {},
            "finished_req_ids": {request.metadata.request_id for request in output.finished},
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": {request.metadata.request_id for request in output.preempted},
            "num_spec_tokens_to_schedule": num_drafts,
        }
        self._ids_before = ids
        return make(SchedulerOutput, values)

    def _continued(self, output: Output, ids: list[str]) -> dict[str, Any]:
        """Fields of `CachedRequestData` for the rows that ran before."""
        count = output.num_continued
        computed = output.num_computed_tokens[:count]
        ends = computed + output.num_scheduled_tokens[:count]
        if len(output.draft_token_ids):
            ends -= output.num_draft_tokens[:count]
        num_output_tokens = (ends - self._prompt_lens[:count]).tolist()
        if np.count_nonzero(output.samples[:count]) < count:  # the others end before what is known of them
            for index in (~output.samples[:count]).nonzero()[0].tolist():
                num_output_tokens[index] = output.requests[index].num_output_tokens
        return {
            "req_ids": ids[:count],
            "resumed_req_ids": set(),
            "new_token_ids": self._sampled_before(output) if self._sends_tokens else [],
            "all_token_ids": self._tokens_of_skipped(output, ids) if self._tells_tokens else {},
            "new_block_ids": _new_block_ids(output),
            "num_computed_tokens": computed.tolist(),
            "num_output_tokens": num_output_tokens,
        }

    def _tokens_of_skipped(self, output: Output, ids: list[str]) -> dict[str, list[int]]:
        """The tokens of those that were not in the output before this one, and go on."""
        if ids is self._ids_before:
            return {}
        before = set(self._ids_before)
        continued = zip(ids[: output.num_continued], output.continued, strict=True)
        return {name: request.all_token_ids.tolist() for name, request in continued if name not in before}

    def _sampled_before(self, output: Output) -> list[list[int]]:
        """The known tokens that the continued rows compute."""
        starts = output.num_computed_tokens.tolist()
        counts = (output.num_scheduled_tokens - output.num_draft_tokens).tolist()
        rows = zip(output.continued, starts, counts, strict=False)
        return [request.tokens(start, start + count).tolist() for request, start, count in rows]

    def _admitted(self, output: Output, ids: list[str]) -> tuple[list[Any], list[int]]:
        """What the workers are told of the admitted rows: new requests, and the indices of those that are resumed
        without being told of as new."""
        new, resumed = [], []
        is_resumed = output.is_resumed.tolist()
        for at, request in enumerate(output.admitted):
            index = output.num_continued + at
            if is_resumed[at] and not self._v2_runner:
                resumed.append(index)
                continue
            new.append(self._new(output, index, request))
        return new, resumed

    def _new(self, output: Output, index: int, request: Request) -> Any:
        of_vllm = request.metadata
        values = {
            "req_id": of_vllm.request_id,
            "prompt_token_ids": of_vllm.prompt_token_ids,
            "mm_features": [],
            "sampling_params": of_vllm.sampling_params,
            "pooling_params": of_vllm.pooling_params,
            "block_ids": (output.blocks(index).tolist(),),
            "num_computed_tokens": int(output.num_computed_tokens[index]),
            "lora_request": of_vllm.lora_request,
            "prefill_token_ids": request.all_token_ids.tolist() if self._v2_runner else None,
        }
        return make(NewRequestData, values)

    def _add_resumed(self, cached: dict[str, Any], output: Output, index: int) -> None:
        """A resumed row, among the cached requests."""
        request = output.requests[index]
        name, start = request.metadata.request_id, int(output.num_computed_tokens[index])
        cached["req_ids"].append(name)
        cached["resumed_req_ids"].add(name)
        cached["new_block_ids"].append((output.blocks(index).tolist(),))
        cached["num_computed_tokens"].append(start)
        cached["num_output_tokens"].append(request.num_output_tokens)
        if self._tells_tokens:
            cached["all_token_ids"][name] = request.all_token_ids.tolist()
        if self._sends_tokens:
            end = start + int(output.num_scheduled_tokens[index])
            cached["new_token_ids"].append(request.tokens(start, end).tolist())


def _new_block_ids(output: Output) -> list[tuple[list[int]] | None]:
    """The new blocks of each continued row, None where there are none."""
    count = output.num_continued
    found: list[tuple[list[int]] | None] = [None] * count
    for index, block in zip(output.block_rows.tolist(), output.block_ids.tolist(), strict=True):
        if index >= count:
            break
        blocks = found[index]
        if blocks is None:
            found[index] = ([block],)
        else:
            blocks[0].append(block)
    return found


def _drafts(output: Output, ids: list[str]) -> dict[str, list[int]]:
    """The drafts of the rows that have some."""
    drafts = output.draft_token_ids.tolist()
    counts = output.num_draft_tokens.tolist()
    found, start = {}, 0
    for name, count in zip(ids, counts, strict=True):
        if count:
            found[name] = drafts[start : start + count]
            start += count
    return found
