"""When the thread that decides may have Python, while another computes.

One thread at a time runs Python. The one that computes needs it between two operators, for microseconds; the one that
takes in tokens and schedules needs it for hundreds. If they meet anywhere, whoever comes second sleeps, is woken when
the lock is given up for a short operator, finds it taken again, and sleeps once more; each time costs what several
operators cost. So the computing thread says when it enters a long operation, an *opening*, and the other begins then:

    opening 1 of a step    the answer of the step before is given: the other thread takes in its tokens
    opening 2              the other thread schedules the next step

Without openings everything still happens, only later: what the end of a step has to let in, it lets in.
"""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class Openings:
    """Those of one computing thread, for one other."""

    def __init__(self) -> None:
        self._count = 0
        """In the step that is being computed; 0 between two."""
        self._kept: tuple[Future[Any], Any] | None = None
        self._is_awaited = False
        self._opened: SimpleQueue[None] = SimpleQueue()

    # The computing thread calls these.

    def keep(self, future: Future[Any], answer: Any) -> None:
        """Give the answer of the step that has ended at the first opening of the next one, which begins at once."""
        self._kept = future, answer

    def announce(self) -> None:
        """A long operation follows at once."""
        self._count += 1
        if self._count == 1:
            self._give()
        else:
            self._let_in()

    def end(self) -> None:
        """A step has ended, or nothing follows."""
        self._count = 0
        self._give()
        self._let_in()

    def _give(self) -> None:
        if self._kept is not None:
            future, answer = self._kept
            self._kept = None
            future.set_result(answer)

    def _let_in(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._opened.put(None)

    # The other thread calls this.

    def wait(self) -> None:
        """Until the second opening of the step that is being computed; not if it has not come to its first, or has come
        to its second.
        """
        # Whichever of the two threads looks last sees what the other has written, so that none waits for ever. A word
        # that nobody waits for any more ends the next wait at once, which does no harm.
        self._is_awaited = True
        if self._count == 1:
            self._opened.get()
        self._is_awaited = False
