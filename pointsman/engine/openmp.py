"""How a thread of PyTorch waits for the others. Nothing of PyTorch here: it reads the environment when it is loaded."""

from __future__ import annotations

import os

SPINS = "5000"
"""Turns of the loop in which GNU's OpenMP waits before it sleeps, about a tenth of a millisecond."""


def wait_briefly() -> None:
    """Let threads without work wait for as long as it is from one operator to the next, and then sleep.

    By default they spin for milliseconds, which on a machine with other work costs a factor of twenty. Threads that
    sleep at once have to be woken for every operator, which costs a quarter of the speed of a small model. What the
    user has set is left alone. To be called before PyTorch is imported; processes that are started inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
