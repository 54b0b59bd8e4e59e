"""A small host for tests: a scheduler, a clock that ticks at every call, and a deterministic model. `check_invariants`
follows every call, so a test also fails when the bookkeeping is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core import (
    Explanation,
    FinishReason,
    KVConnector,
    ParkReason,
    PauseMode,
    Recorder,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
    StepUpdate,
)

EOS = 999  # the model below never samples it: tests pass it


def small_config(**overrides: Any) -> SchedulerConfig:
    """A pool of 16 blocks of 4 tokens, 4 sequence slots and a budget of 16 tokens, with `overrides` on top."""
    values: dict[str, Any] = {
        "num_blocks": 16,
        "max_model_len": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return SchedulerConfig(**{**values, **overrides})


def next_token(tokens: npt.NDArray[np.integer]) -> int:
    """The model's sample after `tokens`: 0 to 996, a function of all tokens and their order."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.int64)
    return int((tokens.astype(np.int64) * weights).sum() % 997)


class Host:
    """Drives one scheduler. `now` is the time of the last call; each call is one second later."""

    def __init__(
        self, *, recorder: Recorder | None = None, connector: KVConnector | None = None, **overrides: Any
    ) -> None:
        self.config = small_config(**overrides)
        self.scheduler = Scheduler(self.config, recorder=recorder, connector=connector)
        self.now = 0.0
        self._next_prompt_token = 1000

    def prompt(self, length: int) -> list[int]:
        """`length` tokens that no other prompt of this host has."""
        start = self._next_prompt_token
        self._next_prompt_token += length
        return list(range(start, start + length))

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int] | npt.NDArray[np.int32] = 4,
        *,
        max_tokens: int = 16,
        park: ParkReason | None = None,
        **fields: Any,
    ) -> Request:
        """Add a request, which arrives now by default. A `prompt` that is a length gets unique tokens."""
        now = self._tick()
        tokens = self.prompt(prompt) if isinstance(prompt, int) else prompt
        request = Request(request_id, tokens, **{"arrival_time": now, "max_tokens": max_tokens, **fields})
        self.scheduler.add(request, now, park=park)
        self.scheduler.check_invariants()
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self._tick())
        self.scheduler.check_invariants()
        return output

    def result(self, output: SchedulerOutput, tokens: Mapping[str, int] | None = None) -> StepResult:
        """The model's samples for an output; `tokens` overrides them for the named requests. The model accepts the
        drafts that it would have sampled itself.
        """
        told = tokens or {}
        runs: list[list[int]] = []
        for index, request in enumerate(output.requests):
            drafts = drafts_of(output, index)
            if not output.samples[index]:
                runs.append([])
            elif request.request_id in told:
                runs.append([told[request.request_id]])
            else:
                right = reference_output(request.all_token_ids, 1 + len(drafts))
                agree = [draft == token for draft, token in zip(drafts, right, strict=False)]
                runs.append(right[: 1 + [*agree, False].index(False)])
        counts = [len(run) for run in runs] if len(output.draft_token_ids) else None
        return StepResult([token for run in runs for token in run], counts)

    def update(self, output: SchedulerOutput, tokens: Mapping[str, int] | None = None) -> StepUpdate:
        update = self.scheduler.update(output, self.result(output, tokens), self._tick())
        self.scheduler.check_invariants()
        return update

    def propose(self, output: SchedulerOutput, drafts: Mapping[str, Sequence[int]]) -> int:
        """Propose drafts for the named requests; returns the number of kept drafts."""
        each = [list(drafts.get(name, ())) for name in names(output.requests)]
        flat = [token for tokens in each for token in tokens]
        kept = self.scheduler.propose(output, flat, [len(tokens) for tokens in each], self._tick())
        self.scheduler.check_invariants()
        return kept

    def step(self, tokens: Mapping[str, int] | None = None) -> SchedulerOutput:
        """`schedule` and `update`; returns the output."""
        output = self.schedule()
        self.update(output, tokens)
        return output

    def fail(self, output: SchedulerOutput) -> None:
        self.scheduler.fail(output, self._tick())
        self.scheduler.check_invariants()

    def abort(self, request_id: str) -> Request | None:
        ended = self.scheduler.abort(request_id, self._tick())
        self.scheduler.check_invariants()
        return ended

    def finish(self, request_id: str, reason: FinishReason, **options: Any) -> Request | None:
        ended = self.scheduler.finish(request_id, reason, self._tick(), **options)
        self.scheduler.check_invariants()
        return ended

    def park(self, request_id: str, reason: ParkReason = ParkReason.GRAMMAR) -> None:
        self.scheduler.park(request_id, reason, self._tick())
        self.scheduler.check_invariants()

    def ready(self, request_id: str) -> None:
        self.scheduler.ready(request_id, self._tick())
        self.scheduler.check_invariants()

    def set_priority(self, request_id: str, priority: int) -> None:
        self.scheduler.set_priority(request_id, priority, self._tick())
        self.scheduler.check_invariants()

    def set_max_num_active_seqs(self, limit: int | None) -> None:
        self.scheduler.set_max_num_active_seqs(limit, self._tick())
        self.scheduler.check_invariants()

    def extend(self, request_id: str, tokens: int | Sequence[int] = 4, **options: Any) -> Request:
        """Extend a request by a part, by default the last part, with `max_tokens` 16. A part that is a length gets
        unique tokens."""
        part = self.prompt(tokens) if isinstance(tokens, int) else tokens
        request = self.scheduler.extend(request_id, part, self._tick(), **{"max_tokens": 16, **options})
        self.scheduler.check_invariants()
        return request

    def pause(self, mode: PauseMode = PauseMode.ALL) -> None:
        self.scheduler.pause(self._tick(), mode)
        self.scheduler.check_invariants()

    def resume(self) -> None:
        self.scheduler.resume(self._tick())
        self.scheduler.check_invariants()

    def reset_prefix_cache(self, **options: bool) -> None:
        self.scheduler.reset_prefix_cache(self._tick(), **options)
        self.scheduler.check_invariants()

    def transfer_done(self, transfer_id: int, **options: Any) -> Request | None:
        ended = self.scheduler.transfer_done(transfer_id, self._tick(), **options)
        self.scheduler.check_invariants()
        return ended

    def explain(self, request_id: str) -> Explanation:
        return self.scheduler.explain(request_id)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def run_to_end(self, max_steps: int = 500) -> list[SchedulerOutput]:
        """Step until all requests have finished; returns the outputs. More than `max_steps` steps are a failure."""
        outputs: list[SchedulerOutput] = []
        while self.scheduler.has_unfinished_requests():
            assert len(outputs) < max_steps, f"{max_steps} steps and still {self.stats()}"
            outputs.append(self.step())
        return outputs

    def _tick(self) -> float:
        self.now += 1.0
        return self.now


class Connector:
    """A connector that offers the tokens that a test sets, and records the calls of the scheduler."""

    saves_evicted = True

    def __init__(self) -> None:
        self.offers: dict[str, tuple[int | None, bool]] = {}  # by request id: (number of tokens, is_async)
        self.sends: set[str] = set()
        self.asked: list[str] = []
        self.ended: list[tuple[str, int, int]] = []
        self.num_resets = 0

    def num_external_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        count, is_async = self.offers.get(request.request_id, (0, False))
        return (None if count is None else max(0, count - num_local_tokens)), is_async

    def request_ended(
        self, request: Request, block_ids: npt.NDArray[np.int64], num_tokens: int, transfer_id: int
    ) -> bool:
        self.ended.append((request.request_id, num_tokens, transfer_id))
        return request.request_id in self.sends

    def reset(self) -> None:
        self.num_resets += 1


def connected(**overrides: Any) -> tuple[Host, Connector]:
    """A host with a connector, and a pool of 16 blocks of 4 tokens; a request of full length takes 8 blocks."""
    connector = Connector()
    return Host(connector=connector, **{"max_model_len": 32, **overrides}), connector


def names(requests: Iterable[Request]) -> list[str]:
    """The requests' ids, in order."""
    return [request.request_id for request in requests]


def tokens_of(output: SchedulerOutput) -> dict[str, int]:
    """Number of tokens that each request computes in the step, in row order."""
    return dict(zip(names(output.requests), output.num_scheduled_tokens.tolist(), strict=True))


def drafts_of(output: SchedulerOutput, index: int) -> list[int]:
    """The drafts that a row of the output has verified."""
    end = int(output.num_draft_tokens[: index + 1].sum())
    return [int(token) for token in output.draft_token_ids[end - int(output.num_draft_tokens[index]) : end]]


def cached_of(output: SchedulerOutput) -> dict[str, int]:
    """Number of tokens of each admitted request that came from the prefix cache."""
    return dict(zip(names(output.admitted), output.num_cached_tokens.tolist(), strict=True))


def blocks_of(output: SchedulerOutput, request_id: str) -> list[int]:
    """The block ids of a request in the output."""
    return [int(block) for block in output.blocks(names(output.requests).index(request_id))]


def reference_output(prompt: Sequence[int] | npt.NDArray[np.int32], num_tokens: int) -> list[int]:
    """The model's output for `prompt` when no other request runs."""
    tokens = np.array(prompt, dtype=np.int64)
    for _ in range(num_tokens):
        tokens = np.append(tokens, next_token(tokens))
    return [int(token) for token in tokens[len(prompt) :]]
