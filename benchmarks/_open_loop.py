"""Open loop: sends requests at their times to an engine stepped in the same process; used in several environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic, sleep

TokenTimes = list[list[float]]
"""For each request: seconds from the start of the run at which its client had each token."""


def send(
    arrivals: Sequence[float],
    add: Callable[[int, float], None],
    step: Callable[[], Iterable[tuple[int, int]]],
    has_unfinished: Callable[[], bool],
) -> TokenTimes:
    """Let requests arrive while the engine steps, until all are finished.

    Args:
        arrivals: seconds from the start, in order.
        add: give the engine the request of this number; the second argument is its delay in seconds.
        step: one step of the engine; (number of the request, new tokens) of each output.
        has_unfinished: whether the engine has requests.
    """
    tokens: TokenTimes = [[] for _ in arrivals]
    start, next_one = monotonic(), 0
    while next_one < len(arrivals) or has_unfinished():
        while next_one < len(arrivals) and (late := monotonic() - start - arrivals[next_one]) >= 0:
            add(next_one, late)
            next_one += 1
        if has_unfinished():
            outputs = step()
            now = monotonic() - start
            for number, count in outputs:
                tokens[number] += [now] * count
        else:
            sleep(max(0.0, start + arrivals[next_one] - monotonic()))
    return tokens
