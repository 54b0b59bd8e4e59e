"""Operation of a scheduler inside vLLM: a control socket that answers questions, recordings, and log lines at the
start.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from pointsman.core import ConfigError, Explanation, Request, Scheduler
from pointsman.files import check_writable
from pointsman.integrations.vllm.control import Client, ControlError, ControlSocket, check_socket_path
from pointsman.integrations.vllm.recordings import RecordingFile, Recordings
from pointsman.integrations.vllm.settings import Settings
from pointsman.integrations.vllm.support import untested_parts
from pointsman.version import __version__
from pointsman.web.live import SECONDS_BETWEEN_PARTS, LiveFilm, TooManyWatchers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pointsman.integrations.vllm.kv_groups import KVGroups

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

MAX_REQUESTS = 1000
"""Maximum number of requests in an answer."""
SECONDS_HELD = 0.0005
"""Maximum time for which the lock is held without a break while requests are explained; in the breaks, the engine's
thread can acquire the lock."""
POLL_SECONDS = 0.2
"""Seconds between two checks whether a recording has begun or ended."""
PAUSE = 9.0
"""Pause after an answer, as a multiple of the answer's CPU time. So computing answers takes at most a tenth of the
time, for any number of clients."""
MIN_PAUSE = 0.001
"""Minimum pause after an answer, in seconds; covers the parsing of a question and the sending of a short answer."""


class Adapter(Protocol):
    """The attributes of the drop-in's `Scheduler` that `Operation` uses."""

    core: Scheduler
    groups: KVGroups | None
    lock: threading.Lock
    of_id: dict[str, Request]
    step_seconds: float

    def forget_steps(self) -> None:
        """Drop the state of earlier steps."""


class Operation:
    """The control socket and the recordings of one scheduler inside vLLM, and the log lines at the scheduler's start.

    Raises:
        ConfigError: the requested socket cannot be used.
    """

    def __init__(
        self, adapter: Adapter, vllm_config: VllmConfig, settings: Settings, recording: RecordingFile | None
    ) -> None:
        self._adapter = adapter
        self.recordings = Recordings(adapter.core, adapter.forget_steps)
        if recording is not None:
            self.recordings.set_current(recording)
        questions = Questions(
            adapter.core,
            adapter.of_id,
            self.recordings,
            adapter.lock,
            facts={
                "version": __version__,
                "model": served_name(vllm_config),
                "engine": engine_rank(vllm_config),
            },
            seconds=lambda: adapter.step_seconds,
        )
        self._control = _listen(settings.socket, vllm_config, questions)
        for line in self._start_lines(vllm_config, settings.knobs):
            logger.info("%s", line)

    def close(self) -> None:
        """Close the socket, and end all recordings."""
        if self._control is not None:
            self._control.close()
        with self._adapter.lock:
            self.recordings.close()

    def _start_lines(self, vllm_config: VllmConfig, knobs: Mapping[str, Any]) -> list[str]:
        import vllm

        config, groups = self._adapter.core.config, self._adapter.groups
        keeps_nothing = groups is not None and not groups.pool.num_usable
        blocks = "no KV" if keeps_nothing else f"{config.num_usable_blocks} KV blocks of {config.block_size}"
        changed = ", ".join(f"{name} {value}" for name, value in knobs.items())
        lines = [
            f"Pointsman {__version__} schedules for vLLM {vllm.__version__}, in place of its own scheduler",
            f"order {config.order}, {config.max_num_batched_tokens} tokens and {config.max_num_seqs} requests a step, "
            f"{blocks}, {config.max_steps_in_flight} step(s) in flight{f'; {changed}' if changed else ''}",
        ]
        if groups is not None and (found := groups.prefix_cache_limit()):
            lines.append(found)
        if self._control is not None:
            lines.append(f"ask it why requests wait: pointsman explain --socket {self._control.path}")
        if self.recordings.current is not None:
            lines.append(f"every call and decision, prompts included, goes to {self.recordings.current.name}")
        not_run = untested_parts(vllm_config)
        if not_run:
            lines.append(f"not tested so far: {', '.join(not_run)}")
        return lines


def engine_rank(vllm_config: VllmConfig) -> int:
    """Index of the engine among the engines behind one server; 0 if there is only one engine."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


def path_of_rank(path: str, vllm_config: VllmConfig) -> str:
    """`path` with the engine's rank appended; unchanged for the first engine."""
    rank = engine_rank(vllm_config)
    return f"{path}.{rank}" if rank else path


def served_name(vllm_config: VllmConfig) -> str:
    """The name of the model for clients."""
    name = getattr(vllm_config.model_config, "served_model_name", None) or vllm_config.model_config.model
    return str(name[0] if isinstance(name, list) else name)


def open_record(path: str | None, vllm_config: VllmConfig) -> RecordingFile | None:
    """Open the file of a recording from vLLM's start; None: `path` is None.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return None
    path = path_of_rank(path, vllm_config)
    with _recording_errors(path):
        return RecordingFile.create(path)


def problems_of_paths(settings: Settings, vllm_config: VllmConfig) -> list[str]:
    """The errors with which a start would fail at the paths of the control socket and of the recording. Nothing is left
    at these paths."""
    problems = []
    try:
        if settings.socket:
            check_socket_path(path_of_rank(settings.socket, vllm_config))
    except ConfigError as error:
        problems.append(str(error))
    try:
        if settings.record is not None:
            _check_record(path_of_rank(settings.record, vllm_config))
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _check_record(path: str) -> None:
    with _recording_errors(path):
        check_writable(path)


@contextmanager
def _recording_errors(path: str) -> Iterator[None]:
    """Context that reports an error of the file of a recording as ConfigError, with the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write the recording {path}: {error.strerror}; choose another file") from None


def _listen(path: str | None, vllm_config: VllmConfig, questions: Questions) -> ControlSocket | None:
    """The control socket; None: there is no socket. If a requested path cannot be used, an error is raised; if the
    default path cannot be used, a warning is logged."""
    if path == "":
        return None
    if path is not None:
        return ControlSocket(path_of_rank(path, vllm_config), questions.answer)
    try:
        return ControlSocket(None, questions.answer)
    except (ConfigError, OSError) as error:
        logger.warning("Pointsman has no control socket: %s", error)
        return None


# ---------------------------------------------------------------------- questions


class Questions:
    """Answers the questions of clients, in the thread of each client: states of requests, metrics, recordings, the live
    film.

    The scheduler is read under one lock. Every call of vLLM that changes the scheduler also acquires this lock. Passing
    questions to the engine's thread in a queue would be no cheaper, because one side waits for the answer in either
    case. A queue would also need the lock: an idle vLLM does not call the scheduler, and questions must still be
    answered. Taking a free lock costs a call 0.1 us. The lock is held for half a millisecond at a time, for one
    explanation, or for one part of a film, and never while an answer is sent. Python runs one thread at a time, so
    answers are computed one by one, with pauses between them (`PAUSE`).

    Args:
        scheduler: the scheduler that the questions are about.
        requests: the unfinished requests, in order of adding, by the ids that clients know.
        recordings: the recordings of the scheduler.
        lock: the lock to hold while the scheduler is used.
        facts: fields of every answer that identify its source.
        seconds: returns the total time of the scheduler's steps, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Mapping[str, Request],
        recordings: Recordings,
        lock: threading.Lock,
        facts: Mapping[str, Any],
        seconds: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._recordings = recordings
        self._lock = lock
        self._facts = facts
        self._seconds = seconds
        self._live = LiveFilm(scheduler)
        self._turn = threading.Lock()
        """Lock that a thread holds while it computes an answer."""
        self._resumes = 0.0  # end of the pause after the newest answer, on the monotonic clock

    @contextmanager
    def _answer_turn(self) -> Iterator[None]:
        """Context in which an answer is computed: no other answer is computed meanwhile, and it begins after the pause
        that the previous answer requires."""
        with self._turn:
            time.sleep(max(0.0, self._resumes - time.monotonic()))
            began = time.thread_time()
            try:
                yield
            finally:
                self._resumes = time.monotonic() + max(MIN_PAUSE, PAUSE * (time.thread_time() - began))

    def answer(self, question: dict[str, Any], client: Client) -> Generator[dict[str, Any], None, None]:
        """Yield the lines of the answer to a question.

        Raises:
            ControlError: the question is unknown, or has no answer.
        """
        kind = question.get("ask")
        answer: dict[str, Any] = {}
        with self._answer_turn():
            if kind == "explain":
                answer = self._explain(question.get("id"), question.get("limit", 100))
            elif kind == "metrics":
                answer = self._metrics()
            elif kind not in ("record", "film"):
                raise ControlError(f"the question {kind!r} is unknown; ask explain, metrics, record or film")
        if kind == "record":
            yield from self._record(client)
        elif kind == "film":
            yield from self._film(client)
        else:
            yield answer

    # ------------------------------------------------------------------ where requests stand

    def _explain(self, name: Any, limit: Any) -> dict[str, Any]:
        if not isinstance(limit, int) or not 1 <= limit <= MAX_REQUESTS:
            raise ControlError(f"limit is {limit!r}; it must be an integer from 1 to {MAX_REQUESTS}")
        with self._lock:
            scheduler = self._scheduler
            counts = {
                "running": scheduler.num_running,
                "waiting": scheduler.num_queued,
                "parked": scheduler.num_parked,
            }
            names = list(self._requests)
        names = list(islice(names if name is None else _matching_ids(name, names), limit))
        if name is not None and not names:
            raise ControlError(
                f"no request {name!r} is waiting, parked or running; it may have finished; `explain` without an id "
                "lists all unfinished requests"
            )
        found: list[dict[str, Any]] = []
        while names:
            self._explain_first(names, found)
            time.sleep(SECONDS_HELD)  # let the engine's thread acquire the lock first
        return {**self._facts, "counts": counts, "requests": found}

    def _explain_first(self, names: list[str], found: list[dict[str, Any]]) -> None:
        """Explain the first requests of `names` for `SECONDS_HELD`, and move them to `found`."""
        with self._lock:
            now = time.monotonic()
            while names and time.monotonic() - now < SECONDS_HELD:
                name = names.pop(0)
                request = self._requests.get(name)
                if request is not None:  # the request may have finished since the ids were listed
                    found.append(self._describe_request(name, request, now))

    def _describe_request(self, name: str, request: Request, now: float) -> dict[str, Any]:
        """A request in the form of `GET /v1/requests` of `pointsman serve`."""
        explanation: Explanation = self._scheduler.explain(request.request_id)
        holders = [
            {"id": self._vllm_id(holder.request_id), "amount": holder.amount, "what": holder.what}
            for holder in explanation.holders
        ]
        return {
            "id": name,
            "state": explanation.status.value,
            "phase": explanation.phase,
            "reason": None if explanation.reason is None else explanation.reason.value,
            "explanation": explanation.sentence,
            "replaced_policies": [each._asdict() for each in explanation.replaced_policies],
            "position": explanation.position,
            "missing": explanation.missing,
            "resource": explanation.resource,
            "holders": holders,
            "num_holders": explanation.num_holders,
            "waiting_for": None if explanation.since is None else max(0.0, now - explanation.since),
            "age": max(0.0, now - request.arrival_time),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "max_tokens": request.max_tokens,
            "num_computed_tokens": explanation.num_computed_tokens,
            "num_cached_tokens": explanation.num_cached_tokens,
            "num_blocks": explanation.num_blocks,
            "num_preemptions": explanation.num_preemptions,
            "priority": request.priority,
        }

    def _vllm_id(self, request_id: str) -> str:
        """vLLM's id of one of the core's requests."""
        request = self._scheduler.get_request(request_id)
        return request_id if request is None or request.metadata is None else str(request.metadata.request_id)

    # ------------------------------------------------------------------ metrics

    def _metrics(self) -> dict[str, Any]:
        with self._lock:
            stats = self._scheduler.stats()
            seconds = self._seconds()
        return {**self._facts, "stats": asdict(stats), "scheduler_seconds": seconds}

    # ------------------------------------------------------------------ the live film

    def _film(self, client: Client) -> Generator[dict[str, Any], None, None]:
        """Records of a live film (`web/live.py`) in base 64, until the client sends anything or disconnects. While a
        client does not read, the records for it are dropped."""
        watcher = object()
        try:
            while True:
                try:
                    with self._answer_turn(), self._lock:
                        records = self._live.take_records(watcher)
                except TooManyWatchers as error:
                    raise ControlError(str(error)) from None
                if records:
                    yield {"records": base64.b64encode(records).decode()}
                if client.has_input(SECONDS_BETWEEN_PARTS):
                    return
        finally:
            with self._lock:
                self._live.remove_watcher(watcher)

    # ------------------------------------------------------------------ recordings

    def _record(self, client: Client) -> Generator[dict[str, Any], None, None]:
        """Yield a line when the recording has to wait, when it begins, when its first step is in the file, and when it
        ends. The recording ends when the client sends anything or disconnects, at its maximum size, or because of an
        error."""
        descriptor = client.take_file()
        if descriptor is None:
            raise ControlError(
                "the question 'record' came without a file descriptor; use pointsman record, which sends one"
            )
        try:
            with self._lock:
                file = self._recordings.request_recording(descriptor)
        finally:
            os.close(descriptor)
        try:
            if not self._has_begun(file):
                yield {"state": "waiting", **self._counts()}
            while not self._has_begun(file):
                if client.has_input(POLL_SECONDS):
                    yield {"state": "cancelled"}
                    return
            yield {"state": "recording"}
            has_steps = False
            while not file.ended_by and not client.has_input(POLL_SECONDS):
                if file.num_steps and not has_steps and not file.ended_by:
                    has_steps = True
                    yield {"state": "stepping"}
        finally:
            with self._lock:
                self._recordings.end(file)
            file.close()
        yield {"state": "done", "num_bytes": file.num_bytes, "num_steps": file.num_steps, "ended_by": file.ended_by}

    def _has_begun(self, file: RecordingFile) -> bool:
        with self._lock:
            self._recordings.try_to_begin()
            return self._recordings.waiting is not file

    def _counts(self) -> dict[str, int]:
        with self._lock:
            return {"num_running": self._scheduler.num_running, "num_waiting": self._scheduler.num_queued}


def _matching_ids(name: Any, requests: Sequence[str]) -> Iterator[str]:
    """Yield the request id that equals `name`. If there is none: the ids of the requests that belong to the completion
    `name`, or whose client sent `name` as X-Request-Id."""
    if name in requests:
        return iter([name])
    start = f"{name}-"
    return (
        other
        for other in requests
        if other.startswith(start) or other.partition("-")[2].startswith(start)  # the part after cmpl- or chatcmpl-
    )
