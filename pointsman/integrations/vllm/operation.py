"""What operators have of a scheduler inside vLLM: its socket, its recordings, and what it says at the start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from pointsman.core import ConfigError, Request, Scheduler
from pointsman.integrations.vllm.control import ControlSocket
from pointsman.integrations.vllm.questions import Questions
from pointsman.integrations.vllm.recordings import RecordingFile, Recordings, open_recording
from pointsman.integrations.vllm.settings import Settings
from pointsman.integrations.vllm.support import what_was_not_run
from pointsman.version import __version__

logger = logging.getLogger("vllm.pointsman")  # where vLLM's own log goes


class Adapter(Protocol):
    """Whose operation it is."""

    core: Scheduler
    lock: threading.Lock
    of_id: dict[str, Request]
    step_seconds: float

    def forget_steps(self) -> None:
        """The scheduler knows nothing of earlier steps."""


class Operation:
    """Made with the adapter, and closed with it.

    Raises:
        ConfigError: nothing can listen on the socket that was asked for.
    """

    def __init__(self, adapter: Adapter, vllm_config: Any, settings: Settings, recording: RecordingFile | None) -> None:
        self._adapter = adapter
        self.recordings = Recordings(adapter.core, adapter.forget_steps)
        if recording is not None:
            self.recordings.note(recording)
        questions = Questions(
            adapter.core,
            adapter.of_id,
            self.recordings,
            adapter.lock,
            facts={
                "version": __version__,
                "model": served_name(vllm_config),
                "engine": rank_of(vllm_config),
            },
            seconds=lambda: adapter.step_seconds,
        )
        self._control = _listen(settings.socket, vllm_config, questions)
        for line in self._start_lines(vllm_config, settings.knobs):
            logger.info("%s", line)

    def close(self) -> None:
        """Answer no more, and end the recording."""
        if self._control is not None:
            self._control.close()
        with self._adapter.lock:
            self.recordings.close()

    def _start_lines(self, vllm_config: Any, knobs: Mapping[str, Any]) -> list[str]:
        import vllm

        config = self._adapter.core.config
        told = ", ".join(f"{name} {value}" for name, value in knobs.items())
        lines = [
            f"Pointsman {__version__} schedules for vLLM {vllm.__version__}, in place of its own scheduler",
            f"order {config.order}, {config.max_num_batched_tokens} tokens and {config.max_num_seqs} requests a step, "
            f"{config.num_usable_blocks} KV blocks of {config.block_size}, {config.max_steps_in_flight} step(s) in "
            f"flight{f'; {told}' if told else ''}",
        ]
        if self._control is not None:
            lines.append(f"ask it why requests wait: pointsman explain --socket {self._control.path}")
        if self.recordings.current is not None:
            lines.append(f"every call and decision, prompts included, goes to {self.recordings.current.name}")
        not_run = what_was_not_run(vllm_config, vllm.__version__)
        if not_run:
            lines.append(f"not run by its authors so far: {', '.join(not_run)}")
        return lines


def rank_of(vllm_config: Any) -> int:
    """Which of the engines behind one server it is; 0 where there is one."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


def of_rank(path: str, vllm_config: Any) -> str:
    """A name of its own for each engine: that of the first is as it was given."""
    rank = rank_of(vllm_config)
    return f"{path}.{rank}" if rank else path


def served_name(vllm_config: Any) -> str:
    """What clients call the model."""
    name = getattr(vllm_config.model_config, "served_model_name", None) or vllm_config.model_config.model
    return str(name[0] if isinstance(name, list) else name)


def open_record(path: str | None, vllm_config: Any) -> RecordingFile | None:
    """The file for a recording from the start, if one is wanted.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return None
    path = of_rank(path, vllm_config)
    try:
        return open_recording(path)
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}; choose another file") from None


def _listen(path: str | None, vllm_config: Any, questions: Questions) -> ControlSocket | None:
    """A socket where nobody asked for one is a convenience; where somebody did, it has to be there."""
    if path == "":
        return None
    if path is not None:
        return ControlSocket(of_rank(path, vllm_config), questions.answer)
    try:
        return ControlSocket(None, questions.answer)
    except (ConfigError, OSError) as error:
        logger.warning("nobody can ask Pointsman anything: %s", error)
        return None
