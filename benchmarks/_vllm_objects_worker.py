"""The bound in `vllm_scheduler.py`: the cost of vLLM's own objects, made by a scheduler that decides nothing.

vLLM's scheduler first serves the backlog, outside the measured time. Then the same requests come again, and each step
is read from a list. Only the objects that vLLM's runner and front ends need are made. So no scheduler in vLLM's place
can cost less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from _scheduler_worker import Backlog, serve
from _vllm_runner import StandInRunner
from _vllm_worker import VllmSession
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

Lengths = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Step:
    """A step of vLLM's scheduler, and its results."""

    output: SchedulerOutput
    answered: list[int]
    """The rows with an output for the client."""
    finished: list[tuple[int, Any]]
    """Indices of those that finish, and why."""
    first: list[int]
    """Outputs that report how the prompt of their request was computed."""
    counts: tuple[int, int]
    """(running, waiting) after the step."""


class Objects:
    """Makes the objects of these steps.

    Args:
        steps: in order.
        num_requests: number of requests added before the first step.
    """

    def __init__(self, steps: Sequence[Step], num_requests: int) -> None:
        self._steps = steps
        self._requests: dict[str, Request] = {}
        self._at = 0
        self._counts = (0, num_requests)
        self._prefix = PrefixCacheStats()

    def counts(self) -> tuple[int, int]:
        return self._counts

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)

    def schedule(self) -> SchedulerOutput:
        made, now = self._steps[self._at].output, time.monotonic()
        cached = made.scheduled_cached_reqs
        return SchedulerOutput(
            scheduled_new_reqs=[self._admitted(new, now) for new in made.scheduled_new_reqs],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached.req_ids.copy(),
                resumed_req_ids=cached.resumed_req_ids.copy(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[blocks and (blocks[0].copy(),) for blocks in cached.new_block_ids],
                num_computed_tokens=cached.num_computed_tokens.copy(),
                num_output_tokens=cached.num_output_tokens.copy(),
            ),
            num_scheduled_tokens=made.num_scheduled_tokens.copy(),
            total_num_scheduled_tokens=made.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs=made.scheduled_encoder_inputs.copy(),
            finished_req_ids=made.finished_req_ids.copy(),
            free_encoder_mm_hashes=made.free_encoder_mm_hashes.copy(),
            preempted_req_ids=made.preempted_req_ids and made.preempted_req_ids.copy(),
        )

    def _admitted(self, new: NewRequestData, now: float) -> NewRequestData:
        request = self._requests[new.req_id]
        request.record_event(EngineCoreEventType.SCHEDULED, now)
        hits = new.num_computed_tokens
        if request.prefill_stats is not None:
            request.prefill_stats.set(request.num_prompt_tokens, hits, 0)
        self._prefix.record(num_tokens=request.num_prompt_tokens, num_hits=hits, preempted=False)
        return NewRequestData(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=list(request.mm_features),
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            block_ids=(new.block_ids[0].copy(),),
            num_computed_tokens=hits,
            lora_request=request.lora_request,
        )

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        step = self._steps[self._at]
        self._at += 1
        names, tokens = result.req_ids, result.sampled_token_ids
        if len(step.answered) == len(names):
            outputs = list(map(EngineCoreOutput, names, tokens))
        else:
            outputs = [EngineCoreOutput(names[index], tokens[index]) for index in step.answered]
        for index in step.first:
            request = self._requests[outputs[index].request_id]
            outputs[index].events = request.take_events()
            outputs[index].prefill_stats = request.take_prefill_stats()
        for index, reason in step.finished:
            outputs[index].finish_reason = reason
            del self._requests[outputs[index].request_id]
        self._counts = running, waiting = step.counts
        stats = SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=0.5, prefix_cache_stats=self._prefix
        )
        self._prefix = PrefixCacheStats()
        return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}


class ObjectsSession(VllmSession):
    """A session that only serves backlogs."""

    decided: ClassVar[dict[tuple[str, tuple[tuple[int, int], ...]], list[Step]]] = {}
    """Steps by settings and lengths."""

    def serve_backlog(self, lengths: Lengths) -> Backlog:
        lengths = [(prompt, most) for prompt, most in lengths]
        key = (str(self.settings), tuple(lengths))
        if key not in self.decided:
            self.decided[key] = self._decide(lengths)
        objects = Objects(self.decided[key], len(lengths))
        self.runner = StandInRunner()
        self.add, self.schedule, self.update = objects.add, objects.schedule, objects.update
        self.counts = objects.counts
        return super().serve_backlog(lengths)

    def _decide(self, lengths: Lengths) -> list[Step]:
        """The decisions of vLLM's scheduler."""
        steps: list[Step] = []
        update: Callable[..., Any] = self.update

        def note(output: SchedulerOutput, result: ModelRunnerOutput) -> None:
            made = update(output, result)
            outputs = made[0].outputs if 0 in made else []
            place = {name: index for index, name in enumerate(result.req_ids)}
            answered = [place[each.request_id] for each in outputs]
            order = sorted(range(len(outputs)), key=answered.__getitem__)
            found = [outputs[index] for index in order]
            steps.append(
                Step(
                    output,
                    [answered[index] for index in order],
                    [(at, each.finish_reason) for at, each in enumerate(found) if each.finish_reason is not None],
                    [at for at, each in enumerate(found) if each.events or each.prefill_stats is not None],
                    self.counts(),
                )
            )

        self.update = note
        for _ in super().serve_backlog(lengths):
            pass
        return steps


if __name__ == "__main__":
    serve(ObjectsSession)
