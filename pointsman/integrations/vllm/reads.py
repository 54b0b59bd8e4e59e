"""What vLLM asks its scheduler without changing where any request stands."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.utils import strip_speculative_padding

from pointsman.core import Scheduler as Core
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.kv_events import KVEvents
from pointsman.integrations.vllm.sessions import Sessions
from pointsman.integrations.vllm.statistics import Statistics
from pointsman.integrations.vllm.versions import maker

new_grammar_output = maker(GrammarOutput, "structured_output_request_ids", "grammar_bitmask", "num_acceptable_drafts")


@dataclass(slots=True)
class Step:
    """A step in flight, in both forms."""

    of_vllm: Any
    output: Output
    ids: list[str]


class Reads:
    """The part of the adapter that only reads."""

    core: Core
    requests: dict[str, Any]
    _sessions: Sessions
    _kv_events: KVEvents | None
    _unsent: list[Any]
    _finished_ids: dict[int, set[str]] | None
    _steps: deque[Step]
    _structured: set[str]
    _grammars: Any
    _statistics: Statistics | None
    _pause_state: PauseState

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Those that may still advance: none of those that a pause holds up."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        if self._pause_state == PauseState.PAUSED_NEW:
            return self.core.num_running
        return len(self.requests) - self._sessions.num_idle

    def has_finished_requests(self) -> bool:
        """Whether a further step must tell the workers, or a client, of an end."""
        return bool(self.core.has_unreported_ends or self._unsent or self._finished_ids)

    def has_requests(self) -> bool:
        return self.has_unfinished_requests() or self.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        running = self.core.num_running
        return running, len(self.requests) - running

    def get_kv_cache_usage(self) -> float:
        return self.core.kv_cache_usage

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def get_kv_connector(self) -> None:
        return None

    def get_ec_connector(self) -> None:
        return None

    def get_kv_event_publisher_config(self) -> Any:
        return None if self._kv_events is None else self._kv_events.config

    def make_stats(self) -> Any:
        return None if self._statistics is None else self._statistics.take()

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """The masks of the rows that sample under a grammar; None: there are none."""
        if not scheduler_output.has_structured_output_requests:
            return None
        step = next(step for step in self._steps if step.of_vllm is scheduler_output)
        rows = zip(step.ids, step.output.samples.tolist(), strict=True)
        names = [name for name, samples in rows if samples and name in self._structured]
        if not names:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        mask = self._grammars.grammar_bitmask(self.requests, names, drafts)
        acceptable = [len(strip_speculative_padding(drafts.get(name, []))) for name in names]
        return new_grammar_output(
            structured_output_request_ids=names, grammar_bitmask=mask, num_acceptable_drafts=acceptable
        )


def group_metadata(kv_cache_config: Any, block_size: int) -> Any:
    """The part of vLLM's `KVCacheManager` that its engine core reads: the block size of each group."""
    managers = [
        SimpleNamespace(block_size=block_size, kv_cache_spec=group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
    ]
    return SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
