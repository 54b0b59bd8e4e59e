"""A stand-in for vLLM's first model runner: it samples as scheduled, and checks everything.

It reads `SchedulerOutput`s as a worker does, and checks that they are consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


@dataclass
class _Known:
    """A request as the worker knows it."""

    num_prompt_tokens: int
    block_ids: list[int]


@dataclass
class StandInRunner:
    """Takes `SchedulerOutput`s in order."""

    block_size: int = 0
    """0: the number of blocks is not checked."""
    num_preemptions: Counter[str] = field(default_factory=Counter)
    known: dict[str, _Known] = field(default_factory=dict)
    _drafts: bool = False
    """Whether drafts were verified: a row may have blocks for drafts that were rejected."""

    def execute(self, output: SchedulerOutput, sample: Callable[[str, int], int]) -> ModelRunnerOutput:
        """The result of a step; `sample(request id, position)` is the token for that position of its sequence."""
        ends = self._take_in(output)
        request_ids = list(output.num_scheduled_tokens)
        sampled = [[sample(name, ends[name][0])] if ends[name][1] else [] for name in request_ids]
        drafts = output.scheduled_spec_decode_tokens
        if drafts:
            for name, run in zip(request_ids, sampled, strict=True):
                for place, draft in enumerate(drafts.get(name, ()), start=ends[name][0] + 1):
                    if run[-1] != draft:
                        break
                    run.append(sample(name, place))
        return runner_output(request_ids, sampled)

    def _take_in(self, output: SchedulerOutput) -> dict[str, tuple[int, bool]]:
        """For each scheduled request, the end of its step without drafts, and whether it samples there."""
        for name in output.finished_req_ids:
            self.known.pop(name, None)
        self.num_preemptions.update(output.preempted_req_ids or ())
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        self._drafts |= bool(drafts)
        ends = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known, f"{new.req_id} is new twice"
            self.known[new.req_id] = _Known(new.prompt_len, list(new.block_ids[0]))
            end = new.num_computed_tokens + scheduled[new.req_id] - len(drafts.get(new.req_id, ()))
            ends[new.req_id] = (end, end >= new.prompt_len)
        cached = output.scheduled_cached_reqs
        told = zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids, strict=True
        )
        for name, computed, num_output_tokens, block_ids in told:
            request = self.known[name]
            blocks = [] if block_ids is None else block_ids[0]
            if name in cached.resumed_req_ids:
                request.block_ids = list(blocks)
            else:
                request.block_ids += blocks
            end = computed + scheduled[name]
            if drafts:
                end -= len(drafts.get(name, ()))
            ends[name] = (end, end >= request.num_prompt_tokens + num_output_tokens)
        self._check(output, ends)
        return ends

    def _check(self, output: SchedulerOutput, ends: dict[str, tuple[int, bool]]) -> None:
        scheduled = output.num_scheduled_tokens
        assert ends.keys() == scheduled.keys(), f"{ends.keys() ^ scheduled.keys()} are scheduled but not reported"
        assert sum(scheduled.values()) == output.total_num_scheduled_tokens
        if self.block_size:
            for name, (end, _) in ends.items():
                blocks = self.known[name].block_ids
                end += len(output.scheduled_spec_decode_tokens.get(name, ()))
                num_needed = -(-end // self.block_size)
                fits = len(blocks) >= num_needed if self._drafts else len(blocks) == num_needed
                assert fits, f"{name} has {len(blocks)} blocks for {end} tokens"
                assert 0 not in blocks, f"{name} has the null block"


def runner_output(request_ids: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
    """A model runner's result for these requests."""
    places = {name: place for place, name in enumerate(request_ids)}
    return ModelRunnerOutput(req_ids=request_ids, req_id_to_index=places, sampled_token_ids=sampled)
