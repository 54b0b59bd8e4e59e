"""A progress bar for work that takes more than two seconds, with the remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 2.0
"""Seconds after which a progress bar is shown."""
_REFRESH_SECONDS = 0.2


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A progress bar with the remaining time, on stderr if that is a terminal, for work that takes over two seconds.

    Args:
        verb: participle of the work, such as "simulated", shown after the number and the `noun`.
        expected: expected number of requests (or of `noun`); None: not known.
        console: where the bar is shown; None: on stderr.
        quiet: seconds before the bar is shown.
        figure: format string of the text that shows the time `now` of `update`.
    """

    def __init__(
        self,
        verb: str,
        expected: int | None,
        console: Console | None = None,
        quiet: float = QUIET_SECONDS,
        *,
        noun: str = "requests",
        figure: str = "{task.fields[now]:,.0f} s of virtual time",
    ) -> None:
        self._text, self._expected = f"{{task.completed:,.0f}} {noun} {verb}, {figure}", expected
        self._shown = Console(stderr=True) if console is None else console
        self._next = time.monotonic() + quiet if self._shown.is_terminal else math.inf
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def expect(self, expected: int) -> None:
        """Set the expected number of requests (or of `noun`)."""
        self._expected = expected

    def update(self, num_finished: int, now: float) -> None:
        """Show the progress. May be called often: redraws at limited frequency."""
        if time.monotonic() < self._next:
            return
        if self._bar is None:
            columns = (TextColumn(self._text), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._shown, auto_refresh=False, transient=True)
            self._task = self._bar.add_task("", total=self._expected, now=now)
            self._bar.start()
        self._bar.update(self._task, completed=num_finished, total=self._expected, now=now, refresh=True)
        self._next = time.monotonic() + _REFRESH_SECONDS

    def update_after(self, num_before: int) -> Callable[[int, float], None]:
        """A function like `update` for a later simulation of a series: it adds `num_before`, the number of requests
        that finished in the earlier simulations."""
        return lambda num_finished, now: self.update(num_before + num_finished, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            with suppress(OSError):  # the terminal is closed
                self._bar.stop()
