"""What the requests of the engine are called: by clients, who may use a name twice, and by the engine, which may not.

    an answer   cmpl-7f3a                                       two choices, n = 2
    its samples cmpl-7f3a-0            cmpl-7f3a-1              what /v1/requests shows
    the engine  cmpl-7f3a-0-5c81e09d   cmpl-7f3a-1-b20d6f4e     its log and recordings

Whoever tries again with the same X-Request-Id, while the first try still runs, has two requests of one name.
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
    """The names of all requests that are open."""

    def __init__(self) -> None:
        self._names: dict[str, Name] = {}  # by the engine's id, in the order of arrival

    def add(self, answer: str, sample: str) -> str:
        """Name one more request; its id in the engine, which no other has."""
        engine_id = f"{sample}-{secrets.token_hex(4)}"
        while engine_id in self._names:
            engine_id = f"{sample}-{secrets.token_hex(4)}"
        self._names[engine_id] = Name(answer, sample)
        return engine_id

    def remove(self, engine_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for engine_id in engine_ids:
            self._names.pop(engine_id, None)

    def shown(self, engine_id: str) -> str:
        """What clients call a request; the engine's own word for one that ended just now."""
        name = self._names.get(engine_id)
        return engine_id if name is None else name.sample

    def find(self, asked: str) -> list[str]:
        """The engine's ids of the requests that are called so: by an answer's id, a sample's, or the engine's own."""
        if asked in self._names:
            return [asked]
        return [engine_id for engine_id, name in self._names.items() if asked in name]
