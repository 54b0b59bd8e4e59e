"""Worker of `engine_throughput.py`: a process with one engine that executes commands from its standard input.

The driver starts each contender in the environment of its engine and runs them alternately. A worker reads JSON
commands from its standard input and replies to each with one JSON line; other output of libraries goes to standard
error. A contender only defines how its engine is made and called (`Session`); the timing is here.

    {"command": "open", "settings": {...}}                      -> {"about": {...}}
    {"command": "run", "prompts": [[...]], "outputs": [...]}
        -> {"seconds": ..., "first_token": ..., "tokens": [[...]]}
"""

from __future__ import annotations

import gc
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

FIRST_TOKENS = 8
"""Tokens of each request that a worker reports, for the comparison between contenders."""


@dataclass(frozen=True)
class Settings:
    """Settings that all contenders share."""

    model: str
    dtype: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    options: dict[str, Any]
    """Options that only this contender reads."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request."""

    tokens: list[int]
    first_token: float | None = None
    """Seconds from the arrival of the request to its first token; None: the engine does not report this time."""


class Session(ABC):
    """A loaded engine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Version, threads and knobs, for the record."""

    @abstractmethod
    def generate(self, prompts: Sequence[list[int]], outputs: Sequence[int]) -> list[Answer]:
        """Serve all prompts greedily, request i for exactly `outputs[i]` tokens; their outputs, in the same order."""


def serve(session_type: type[Session]) -> None:
    """Execute commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session: Session | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["command"] == "open":
            session = session_type(Settings(**command["settings"]))
            answer: dict[str, Any] = {"about": session.about()}
            gc.collect()
        elif command["command"] == "run":
            assert session is not None
            answer = _run(session, command["prompts"], command["outputs"])
        else:
            raise ValueError(f"no command is called {command['command']!r}")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(session: Session, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
    start = perf_counter()
    answers = session.generate(prompts, outputs)
    seconds = perf_counter() - start
    lengths = [len(answer.tokens) for answer in answers]
    if lengths != outputs:
        i = next((i for i, pair in enumerate(zip(lengths, outputs, strict=False)) if pair[0] != pair[1]), len(lengths))
        raise RuntimeError(f"{len(lengths)} of {len(outputs)} requests answered, or request {i} has a wrong length")
    waits = [answer.first_token for answer in answers if answer.first_token is not None]
    return {
        "seconds": seconds,
        "first_token": median(waits) if waits else None,
        "tokens": [[int(token) for token in answer.tokens[:FIRST_TOKENS]] for answer in answers],
    }
