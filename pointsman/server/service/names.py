"""Names of requests: those of clients, which may occur twice, and those of the engine, which are unique.

    an answer   cmpl-7f3a                                       two choices, n = 2
    its samples cmpl-7f3a-0            cmpl-7f3a-1              what /v1/requests shows
    the engine  cmpl-7f3a-0-5c81e09d   cmpl-7f3a-1-b20d6f4e     its log and recordings

A client that retries with the same X-Request-Id, while the first attempt still runs, has two requests of one name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple


class Name(NamedTuple):
    """Of one sample."""

    answer: str
    """The answer's id."""
    sample: str
    """The same where the answer has one choice; otherwise with the choice's index behind it."""


class RequestNames:
    """The names of all open requests."""

    def __init__(self) -> None:
        self._names: dict[str, Name] = {}  # by the engine's id, in the order of arrival

    def add(self, answer: str, sample: str) -> str:
        """Name one more request; returns its unique id in the engine."""
        engine_id = f"{sample}-{secrets.token_hex(4)}"
        while engine_id in self._names:
            engine_id = f"{sample}-{secrets.token_hex(4)}"
        self._names[engine_id] = Name(answer, sample)
        return engine_id

    def remove(self, engine_ids: Iterable[str]) -> None:
        """Forget finished requests."""
        for engine_id in engine_ids:
            self._names.pop(engine_id, None)

    def shown(self, engine_id: str) -> str:
        """The name that clients know; the engine's own id for a request that has just finished."""
        name = self._names.get(engine_id)
        return engine_id if name is None else name.sample

    def find(self, asked: str) -> list[str]:
        """The engine's ids of the requests with this name: an answer's id, a sample's, or the engine's own."""
        if asked in self._names:
            return [asked]
        return [engine_id for engine_id, name in self._names.items() if asked in name]
