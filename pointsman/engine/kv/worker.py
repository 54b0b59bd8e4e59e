"""Worker: a thread that calls functions one after the other, for loads and stores of KV.

A separate thread helps because reading and writing files, and copying large tensors, release Python's lock.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet, finalize

Answer = TypeVar("Answer")
Task: TypeAlias = tuple["Future[Any]", Callable[[], Any]]
Inbox: TypeAlias = "SimpleQueue[Task | None]"

EXIT_PATIENCE = 10.0
"""Maximum seconds for which the exit of Python waits for submitted functions."""


class Worker:
    """One thread that calls functions in the order of `submit`. The first `submit` starts the thread, which ends when
    the worker is closed or garbage-collected.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: Inbox = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Answer]) -> Future[Answer]:
        """Call the function after all functions submitted earlier; return a future of the result. The future may be
        cancelled until the call begins."""
        if self._thread is None or not self._thread.is_alive():
            self._start()
        future: Future[Answer] = Future()
        self._inbox.put((future, function))
        return future

    def close(self) -> None:
        """End the thread after the submitted functions. A later `submit` starts a new thread."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._inbox.put(None)
            thread.join(EXIT_PATIENCE)

    def _start(self) -> None:
        self._inbox = SimpleQueue()  # after a fork, a thread of the parent process may use the old inbox
        # The thread holds no reference to the worker, so a dropped worker ends its thread.
        self._thread = threading.Thread(target=_work, args=(self._inbox,), name=self._name, daemon=True)
        finalize(self, self._inbox.put, None).atexit = False
        self._thread.start()
        _live.add(self)


def _work(inbox: Inbox) -> None:
    while (task := inbox.get()) is not None:
        future, function = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:  # belongs to the caller
                future.set_exception(error)
        del task, future, function  # an idle thread keeps no references


_live: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """End all workers when Python exits: a thread in a PyTorch kernel must not outlive the interpreter."""
    for worker in list(_live):
        worker.close()
