"""Names of requests: clients' names, which may occur twice, and the engine's ids, which are unique.

    a response  cmpl-7f3a                                       two choices, n = 2
    its samples cmpl-7f3a-0            cmpl-7f3a-1              shown by /v1/requests
    the engine  cmpl-7f3a-0-5c81e09d   cmpl-7f3a-1-b20d6f4e     in its log and recordings

If clients have keys, a request belongs to the key that was sent with it: a client sees its own requests, an operator
all.

A client that retries with the same X-Request-Id while the first attempt still runs has two requests with one name.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

OWNER = "pointsman.owner"
"""Key in a request's ASGI scope. Its value is the index of the client's API key, if clients have keys; the API key
itself is not kept."""
HIDDEN = "another client's request"
"""The text that a client sees in place of the name of another client's request."""


class Name(NamedTuple):
    """The names of one sample."""

    answer: str
    """The id of the response."""
    sample: str
    """The id of the response, followed by the choice's index if there are several choices."""
    owner: int | None = None
    """The client, as the index of its key; None: no client's key was sent."""

    def is_for(self, viewer: int | None) -> bool:
        """Whether the viewer may see the sample: the viewer is its owner, or an operator (None)."""
        return viewer is None or viewer == self.owner


class RequestNames:
    """The names of all open requests."""

    def __init__(self) -> None:
        self._names: dict[str, Name] = {}  # by the engine's id, in the order of arrival

    def add(self, answer: str, sample: str, owner: int | None = None) -> str:
        """Add a request; returns the request's unique id in the engine."""
        engine_id = f"{sample}-{secrets.token_hex(4)}"
        while engine_id in self._names:
            engine_id = f"{sample}-{secrets.token_hex(4)}"
        self._names[engine_id] = Name(answer, sample, owner)
        return engine_id

    def remove(self, engine_ids: Iterable[str]) -> None:
        """Forget finished requests."""
        for engine_id in engine_ids:
            self._names.pop(engine_id, None)

    def is_visible(self, engine_id: str, viewer: int | None) -> bool:
        """Whether the viewer may see a request. An operator (None) sees all requests, a client its own unfinished
        ones."""
        name = self._names.get(engine_id)
        return viewer is None if name is None else name.is_for(viewer)

    def visible_name(self, engine_id: str, viewer: int | None = None) -> str:
        """The name that clients know for a request with an engine's id, or this id if the request has just finished.
        `HIDDEN` if the request is another client's.
        """
        if not self.is_visible(engine_id, viewer):
            return HIDDEN
        name = self._names.get(engine_id)
        return engine_id if name is None else name.sample

    def find(self, searched_name: str, viewer: int | None = None) -> list[str]:
        """The engine's ids of the viewer's requests with this name: the id of a response or of a
        sample, or the engine's id."""
        if searched_name in self._names:
            return [searched_name] if self.is_visible(searched_name, viewer) else []
        return [
            engine_id
            for engine_id, name in self._names.items()
            if searched_name in (name.answer, name.sample) and name.is_for(viewer)
        ]
