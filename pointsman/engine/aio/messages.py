"""Messages to the thread that owns an engine (`engine_thread.py`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pointsman.engine.aio.mailbox import Mailbox

if TYPE_CHECKING:
    from pointsman.core import Request
    from pointsman.engine.engine import Engine


@dataclass(slots=True, eq=False)
class Expect:
    """Message: an `Add` with this mailbox will follow, or an `Abandon`; its prompt is being tokenized."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Add:
    """Message: queue a request."""

    request_id: str
    mailbox: Mailbox
    add: Callable[[Engine], Request]
    """Adds it to the engine, or raises why not."""


@dataclass(slots=True, eq=False)
class Call:
    """Message: call a function with the engine."""

    function: Callable[[Engine], Any]
    future: Future[Any]

    def run(self, engine: Engine) -> None:
        """Call it; what it returns or raises goes to the caller."""
        if self.future.set_running_or_notify_cancel():  # False: the caller has given up
            try:
                self.future.set_result(self.function(engine))
            except BaseException as error:  # whatever it is, it is the caller's
                self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Abandon:
    """Message: this mailbox has no reader any more."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Stop:
    """Message: end the thread."""

    drain: bool


@dataclass(slots=True, eq=False)
class GrammarDone:
    """Message: a grammar has been compiled, or has failed."""


@dataclass(slots=True, eq=False)
class TransferDone:
    """Message: KV has been loaded or stored, or could not be."""


Message: TypeAlias = Expect | Add | Call | Abandon | Stop | GrammarDone | TransferDone
