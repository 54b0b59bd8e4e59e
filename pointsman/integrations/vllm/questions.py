"""What an operator may ask of a scheduler inside vLLM: where requests stand, its metrics, a recording.

Everything is read under the one lock that every call of vLLM into the adapter takes as well. A queue that the engine's
thread empties would be no cheaper (one or the other waits for the answer) and would need the lock all the same: while
vLLM is idle nobody calls the scheduler, and it must answer then, too. Taking a free lock costs a call 0.1 us. It is
held for half a millisecond at a time, or one explanation, and not while anything is sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from pointsman.core import Explanation, Request, Scheduler
from pointsman.integrations.vllm.control import Client, ControlError
from pointsman.integrations.vllm.recordings import RecordingFile, Recordings

MOST_REQUESTS = 1000
"""In one answer."""
SECONDS_HELD = 0.0005
"""For so long the lock is held to explain requests, before whoever waits for it gets it."""
POLL_SECONDS = 0.2
"""From one look at a recording to the next."""


class Questions:
    """Answers the questions of clients, each in its thread.

    Args:
        scheduler: who is asked.
        requests: those that have not ended, in order of adding, by the names that clients know.
        recordings: of the scheduler.
        lock: whoever holds it has the scheduler to itself.
        facts: what each answer says of where it comes from.
        seconds: how long the steps of the scheduler took so far.
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

    def answer(self, question: dict[str, Any], client: Client) -> Generator[dict[str, Any], None, None]:
        """The lines of an answer.

        Raises:
            ControlError: it is no question, or has no answer.
        """
        kind = question.get("ask")
        if kind == "explain":
            yield self._explain(question.get("id"), question.get("limit", 100))
        elif kind == "metrics":
            yield self._metrics()
        elif kind == "record":
            yield from self._record(client)
        else:
            raise ControlError(f"nobody can be asked {kind!r}; ask explain, metrics or record")

    # ------------------------------------------------------------------ where requests stand

    def _explain(self, name: Any, limit: Any) -> dict[str, Any]:
        if not isinstance(limit, int) or not 1 <= limit <= MOST_REQUESTS:
            raise ControlError(f"limit is {limit!r}; give 1 to {MOST_REQUESTS}")
        with self._lock:
            scheduler = self._scheduler
            counts = {
                "running": scheduler.num_running,
                "waiting": scheduler.num_queued,
                "parked": scheduler.num_parked,
            }
            names = self._named(name, limit)
        if name is not None and not names:
            raise ControlError(f"no request {name!r} is waiting, parked or running; it may have ended")
        found: list[dict[str, Any]] = []
        while names:
            self._explain_some(names, found)
            time.sleep(SECONDS_HELD)  # whoever waits for the lock comes before the next of them
        return {**self._facts, "counts": counts, "requests": found}

    def _named(self, name: Any, limit: int) -> list[str]:
        """The requests that are called so, or as vLLM calls those of the answer with this id; None: the oldest."""
        if name is None:
            return list(islice(self._requests, limit))
        if name in self._requests:
            return [name]
        return list(islice((other for other in self._requests if other.startswith(f"{name}-")), limit))

    def _explain_some(self, names: list[str], found: list[dict[str, Any]]) -> None:
        """Move some from `names` to `found`."""
        with self._lock:
            now = time.monotonic()
            while names and time.monotonic() - now < SECONDS_HELD:
                name = names.pop(0)
                request = self._requests.get(name)
                if request is not None:  # it may have ended since
                    found.append(self._described(name, request, now))

    def _described(self, name: str, request: Request, now: float) -> dict[str, Any]:
        """A request, in the words of `GET /v1/requests` of `pointsman serve`."""
        told: Explanation = self._scheduler.explain(request.request_id)
        holders = [
            {"id": self._shown(holder.request_id), "amount": holder.amount, "what": holder.what}
            for holder in told.holders
        ]
        return {
            "id": name,
            "state": told.status.value,
            "phase": told.phase,
            "reason": None if told.reason is None else told.reason.value,
            "explanation": told.sentence,
            "position": told.position,
            "missing": told.missing,
            "resource": told.resource,
            "holders": holders,
            "num_holders": told.num_holders,
            "waiting_for": None if told.since is None else max(0.0, now - told.since),
            "age": max(0.0, now - request.arrival_time),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": request.num_output_tokens,
            "max_tokens": request.max_tokens,
            "num_computed_tokens": told.num_computed_tokens,
            "num_cached_tokens": told.num_cached_tokens,
            "num_blocks": told.num_blocks,
            "num_preemptions": told.num_preemptions,
            "priority": request.priority,
        }

    def _shown(self, request_id: str) -> str:
        """What vLLM calls one of our requests."""
        request = self._scheduler.get_request(request_id)
        return request_id if request is None or request.metadata is None else str(request.metadata.request_id)

    # ------------------------------------------------------------------ metrics

    def _metrics(self) -> dict[str, Any]:
        with self._lock:
            stats = self._scheduler.stats()
            seconds = self._seconds()
        return {**self._facts, "stats": asdict(stats), "scheduler_seconds": seconds}

    # ------------------------------------------------------------------ recordings

    def _record(self, client: Client) -> Generator[dict[str, Any], None, None]:
        """A line when it begins, if it does not at once one before, and one when it ends: when the client says
        anything, or goes."""
        descriptor = client.take_file()
        if descriptor is None:
            raise ControlError("no file came with the question; pointsman record hands one over")
        try:
            with self._lock:
                file = self._recordings.request(descriptor)
        finally:
            os.close(descriptor)
        try:
            if not self._has_begun(file):
                yield {"state": "waiting", **self._counts()}
            while not self._has_begun(file):
                if client.has_spoken(POLL_SECONDS):
                    yield {"state": "cancelled"}
                    return
            yield {"state": "recording"}
            while not file.ended_by and not client.has_spoken(POLL_SECONDS):
                pass
        finally:
            with self._lock:
                self._recordings.end(file)
        yield {"state": "done", "num_bytes": file.num_bytes, "num_steps": file.num_steps, "ended_by": file.ended_by}

    def _has_begun(self, file: RecordingFile) -> bool:
        with self._lock:
            self._recordings.try_to_begin()
            return self._recordings.waiting is not file

    def _counts(self) -> dict[str, int]:
        with self._lock:
            return {"num_running": self._scheduler.num_running, "num_waiting": self._scheduler.num_queued}
