"""A thread that calls functions in the order in which they were submitted: steps, loads and stores of KV.

A thread of its own for the steps is worth it because PyTorch's operators and the compiled kernels release Python's lock
while they compute; meanwhile the thread that owns the scheduler takes in the last step's tokens, makes their text, and
decides the next step. So do reading and writing files.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet, finalize

from pointsman.engine.openings import Openings
from pointsman.engine.threads import release_helper_threads

Answer = TypeVar("Answer")
Task: TypeAlias = tuple["Future[Any]", Callable[[], Any]]
Inbox: TypeAlias = "SimpleQueue[Task | None]"

EXIT_PATIENCE = 10.0
"""Seconds that the interpreter's exit waits for what is in progress."""


class Worker:
    """One thread that calls functions in order. It is started by the first one, and ends with the worker.

    Args:
        name: of the thread.
        openings: of a thread that takes over computing from the one that starts it; the functions announce them. Then
            an answer waits for the first of the next function, if there is one.
    """

    def __init__(self, name: str, openings: Openings | None = None) -> None:
        self._name = name
        self._openings = openings
        self._inbox: Inbox = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Answer]) -> Future[Answer]:
        """Have it called once those before it are done. The future may be cancelled until then."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        future: Future[Answer] = Future()
        self._inbox.put((future, function))
        return future

    def close(self) -> None:
        """End the thread once what was submitted is done. A later `submit` starts another."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._inbox.put(None)
            thread.join(EXIT_PATIENCE)

    def _start(self) -> None:
        if self._openings is not None:
            release_helper_threads()  # of the thread that loaded the model: it computes no further
        self._inbox = SimpleQueue()  # not that of a thread which a fork has left behind
        # The thread must not keep the worker: one that is dropped takes its thread along.
        self._thread = threading.Thread(target=_work, args=(self._inbox, self._openings), name=self._name, daemon=True)
        finalize(self, self._inbox.put, None).atexit = False
        self._thread.start()
        _live.add(self)


def _work(inbox: Inbox, openings: Openings | None) -> None:
    while (task := inbox.get()) is not None:
        future, function = task
        if future.set_running_or_notify_cancel():
            try:
                answer = function()
            except BaseException as error:  # whatever it is, it is for whoever waits for the answer
                if openings is not None:
                    openings.end()  # the answer before it comes first
                future.set_exception(error)
            else:
                _answer(future, answer, inbox, openings)
                del answer
        del task, future, function  # nothing is kept while it waits
        if openings is not None and inbox.empty():
            openings.end()
    if openings is not None:
        openings.end()


def _answer(future: Future[Any], answer: Any, inbox: Inbox, openings: Openings | None) -> None:
    if openings is None:
        future.set_result(answer)
    else:
        openings.end()
        openings.keep(future, answer)


_live: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread inside a PyTorch kernel must not outlive the interpreter."""
    for worker in list(_live):
        worker.close()
