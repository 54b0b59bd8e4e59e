"""Work in pieces: long work in the event loop yields between its pieces, so that other tasks run in between.

Such work is a generator of type `Pieces`: `yield` ends a piece, `return` gives the result, and `in_pieces` runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeAlias, TypeVar

ResultT = TypeVar("ResultT")
Pieces: TypeAlias = Generator[None, None, ResultT]


async def in_pieces(work: Pieces[ResultT]) -> ResultT:
    """The result of `work`. After each piece of work every other ready task runs."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: ResultT = done.value
            return result
        await asyncio.sleep(0)
