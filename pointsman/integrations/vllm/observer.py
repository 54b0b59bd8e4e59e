"""vLLM's own scheduler, recorded: `--scheduler-cls pointsman.integrations.vllm.Observer`.

Every decision is vLLM's: each method first calls the method of vLLM's class with the same arguments, and returns the
result of that method. `observation.py` keeps the notes of the recording. An error in `observation.py` ends the
recording with one warning, and vLLM continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pointsman.core import ConfigError
from pointsman.integrations.vllm.observation import Observation
from pointsman.integrations.vllm.operation import path_of_rank
from pointsman.integrations.vllm.recordings import RecordingFile
from pointsman.integrations.vllm.results import REASONS
from pointsman.integrations.vllm.settings import read_observer_settings, read_settings, scheduler_config
from pointsman.integrations.vllm.simulated import lacking_in_simulator, simulated_groups
from pointsman.integrations.vllm.support import TESTED, minor_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as VLLMRequest
    from vllm.v1.request import RequestStatus

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

BLOCKS_KNOWN = 4
"""Minimum number of prompt blocks whose numbers are remembered, as a multiple of the pool's number of blocks; older
blocks count as new."""
_VLLM_DECISIONS = {"pointsman": {"preset": "vllm"}}


class Observer:
    """vLLM's own scheduler (synchronous or asynchronous, as vLLM's configuration selects), with a recording of its
    actions.

    Raises:
        ConfigError: `--additional-config` has a key for Pointsman other than `record`.
    """

    def __new__(cls, *, vllm_config: VllmConfig, **arguments: Any) -> Any:
        """An observed scheduler of the class that vLLM itself would use."""
        kind = _ObservedAsync if vllm_config.scheduler_config.async_scheduling else _Observed
        return kind(vllm_config=vllm_config, **arguments)


def _observed(base: type[Scheduler]) -> Any:
    """An observed subclass of one of vLLM's schedulers."""

    class Observed(base):  # type: ignore[misc]
        _observation: Observation | None = None

        def __init__(
            self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int, **arguments: Any
        ) -> None:
            super().__init__(
                vllm_config=vllm_config, kv_cache_config=kv_cache_config, block_size=block_size, **arguments
            )
            path = read_observer_settings(vllm_config.additional_config)
            try:
                self._observation = _begin(self, path, vllm_config, kv_cache_config, block_size)
            except Exception:
                self._end_observation()

        def add_request(self, request: VLLMRequest) -> None:
            super().add_request(request)
            if self._observation is not None:
                try:
                    self._observation.record_added(request, time.monotonic_ns())
                except Exception:
                    self._end_observation()

        def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
            if self._observation is None:
                return super().schedule(*arguments, **options)
            now = time.monotonic_ns()
            output = super().schedule(*arguments, **options)
            if self._observation is not None:
                try:
                    self._observation.record_scheduled(output, now)
                except Exception:
                    self._end_observation()
            return output

        def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
            observation = self._observation
            if observation is None:
                return super().update_from_output(scheduler_output, model_runner_output)
            now, num_before = time.monotonic_ns(), len(self.requests)
            try:
                observation.record_result(scheduler_output, model_runner_output)
            except Exception:
                self._end_observation()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if self._observation is None:
                return outputs
            try:
                observation.record_updated(scheduler_output, outputs, now, num_before)
                if observation.ended_by:
                    self._end_observation()
            except Exception:
                self._end_observation()
            return outputs

        def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
            ended = super().finish_requests(request_ids, finished_status)
            if self._observation is not None:
                try:
                    now = time.monotonic_ns()
                    for request in ended:
                        self._observation.record_finished(request.request_id, now)
                except Exception:
                    self._end_observation()
            return ended

        def set_pause_state(self, pause_state: PauseState) -> None:
            super().set_pause_state(pause_state)
            if self._observation is not None:
                self._observation.record_idle()

        def shutdown(self) -> None:
            super().shutdown()
            observation, self._observation = self._observation, None
            if observation is not None:
                observation.close()

        def _end_observation(self) -> None:
            """Stop recording, and log one warning. Called in the handler of an error in the recording, or after the
            recording thread has ended and has logged the reason."""
            observation, self._observation = self._observation, None
            if observation is None or not observation.ended_by:
                logger.warning("Pointsman stopped recording because of an error; vLLM continues", exc_info=True)
            if observation is not None:
                observation.abandon()

    return Observed


_Observed = _observed(Scheduler)
_ObservedAsync = _observed(AsyncScheduler)


def _begin(
    scheduler: Scheduler, path: str | None, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int
) -> Observation | None:
    """Begin the recording; None, after a warning: the file of the recording cannot be written."""
    path = path_of_rank(path or time.strftime("pointsman-recording-%Y%m%d-%H%M%S.jsonl"), vllm_config)
    try:
        file = RecordingFile.create(path)
    except OSError as error:
        logger.warning("Pointsman records nothing: cannot write %s: %s; vLLM continues", path, error.strerror)
        return None
    caches = bool(vllm_config.cache_config.enable_prefix_caching)
    hash_block_size = getattr(scheduler, "hash_block_size", block_size) if caches else None
    lacks = lacking_in_simulator(vllm_config, kv_cache_config, block_size)
    asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
    observed = {
        "scheduler": f"vLLM {vllm.__version__}",
        "model": str(vllm_config.model_config.model),  # as on a command line, not the name for clients
        "asynchronous": asynchronous,
        "lacking": lacks,
        "drafter": None if vllm_config.speculative_config is None else str(vllm_config.speculative_config.method),
        "hash_block_size": hash_block_size,
    }
    logger.info("Pointsman observes vLLM's own scheduler; times, lengths and renamed prompts go to %s", path)
    if lacks:
        logger.warning("Pointsman's simulator lacks %s: it cannot simulate this recording", ", ".join(lacks))
    if minor_version(vllm.__version__) not in TESTED:
        logger.info("Observer was tested with vLLM %s, and this is %s", ", ".join(TESTED), vllm.__version__)
    return Observation(
        scheduler,
        file,
        {"config": _config(vllm_config, kv_cache_config, block_size, lacks), "observed": observed},
        block_size=hash_block_size,
        num_known=BLOCKS_KNOWN * kv_cache_config.num_blocks,
        has_drafts=vllm_config.speculative_config is not None,
        has_adapters=vllm_config.lora_config is not None,
        reason_of=lambda request: REASONS[request.status].value,
    )


def _config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int, lacks: list[str]
) -> dict[str, Any]:
    """vLLM's resolved settings as fields of `SchedulerConfig`, with the policies that make vLLM's decisions. If
    settings cannot be expressed, the reason is added to `lacks`."""
    try:
        config = scheduler_config(
            vllm_config,
            kv_cache_config,
            block_size,
            read_settings(_VLLM_DECISIONS, vllm.__version__).knobs,
            vllm.__version__,
        )
        if config.prefill_interval == "host":  # a simulated engine has no other engines to be aligned with
            config = config.replace(prefill_interval=vllm_config.scheduler_config.prefill_schedule_interval)
        return config.replace(kv_groups=simulated_groups(kv_cache_config, block_size) or ()).to_dict()
    except ConfigError as error:
        lacks.append(f"these settings ({error})")
        return {"block_size": block_size, "num_blocks": kv_cache_config.num_blocks}
