"""Time to the first token of a chat, before and after its system prompt is in the prefix cache.

Several chats in turn, each with its own system prompt of 512 tokens. The first user of a chat pays for the whole
prompt.
The second, with other words after the same system prompt, finds its 512 tokens in the cache and pays for the rest.
Measured is the wall time from `add_request` until the first token, on an idle engine. The control does the same with
caching off, alternating with the other engine chat by chat; there the second user costs as much as the first. Reported
are medians over the chats, and the ratio first / second within each.

    python benchmarks/time_to_first_token.py --check
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, finish, print_table, run
from _engine_model import FULL, model_directory
from _pointsman_engine import exactly, open_engine, vocabulary_size

SYSTEM_TOKENS = 512
USER_TOKENS = (24, 56)  # a question of a line or two
ANSWER_TOKENS = 4
CHATS, CHATS_QUICK = 15, 5
MIN_RATIO = 5.0
CACHING = {"cache on": True, "cache off": False}


@dataclass(frozen=True)
class Answer:
    """The result of one request."""

    seconds: float
    """Seconds until the first token."""
    num_cached_tokens: int


class Chats:
    """An engine with or without a prefix cache, and the results of its chats."""

    def __init__(self, model: str, dtype: str, enable_prefix_caching: bool) -> None:
        self.engine = open_engine(
            model,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=1024,  # the whole prompt in one step, so that steps are not what is compared
            enable_prefix_caching=enable_prefix_caching,
        )
        self.first: list[Answer] = []
        self.second: list[Answer] = []
        self._num_requests = 0

    def chat(self, system: list[int], users: tuple[list[int], list[int]]) -> tuple[Answer, Answer]:
        """Send the prompts of two users of one system prompt, one after the other."""
        first, second = (self._ask(system + user) for user in users)
        return first, second

    def _ask(self, prompt: list[int]) -> Answer:
        self._num_requests += 1
        name = f"r{self._num_requests}"
        found: Answer | None = None
        start = perf_counter()
        self.engine.add_request(name, prompt, exactly(ANSWER_TOKENS))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if found is None and output.token_ids:
                    found = Answer(perf_counter() - start, output.num_cached_tokens)
        if found is None:
            raise RuntimeError(f"request {name} ended without a token")
        return found


def measure(model: str, dtype: str, num_chats: int) -> dict[str, Chats]:
    """Run the same chats on both engines; the first chat is not counted.

    Raises:
        RuntimeError: the number of tokens that the second user found in the cache is not that of the system prompt.
    """
    sides = {label: Chats(model, dtype, enabled) for label, enabled in CACHING.items()}
    vocabulary = vocabulary_size(sides["cache on"].engine)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return list(rng.integers(10, vocabulary, size=count).tolist())

    for number in range(num_chats + 1):
        system = tokens(SYSTEM_TOKENS)
        users = tokens(int(rng.integers(*USER_TOKENS))), tokens(int(rng.integers(*USER_TOKENS)))
        for label, side in sides.items():
            first, second = side.chat(system, users)
            hits = (first.num_cached_tokens, second.num_cached_tokens)
            if hits != (0, SYSTEM_TOKENS if CACHING[label] else 0):
                raise RuntimeError(f"{label}: the users found {hits} tokens in the cache; {SYSTEM_TOKENS} are shared")
            if number:
                side.first.append(first)
                side.second.append(second)
    return sides


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", help="a model directory, or demo; default: 121 M random parameters, quick: demo")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--chats", type=int, help=f"how many ({CHATS}; quick: {CHATS_QUICK})")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = arguments.model or ("demo" if arguments.quick else str(model_directory(FULL)))
    num_chats = arguments.chats or (CHATS_QUICK if arguments.quick else CHATS)

    sides = measure(model, arguments.dtype, num_chats)
    rows: list[list[object]] = []
    figures: dict[str, Any] = {}
    for label, side in sides.items():
        first, second = ([answer.seconds * 1e3 for answer in answers] for answers in (side.first, side.second))
        ratio = median(a / b for a, b in zip(first, second, strict=True))
        rows.append([label, median(first), median(second), ratio, min(first), min(second)])
        figures[label.replace(" ", "_")] = {
            "first_ms": round(median(first), 3),
            "second_ms": round(median(second), 3),
            "ratio": round(ratio, 3),
        }
    header = ["", "first user, ms", "second user, ms", "first / second", "fastest first", "fastest second"]
    title = f"time to first token, {SYSTEM_TOKENS} shared tokens, median of {num_chats} chats"
    print_table(f"{title}, {arguments.dtype}, {arguments.threads} thread(s)", header, rows)
    targets = Targets()
    targets.at_least("time to first token, first user / second user", figures["cache_on"]["ratio"], MIN_RATIO)
    setting = {"quick": arguments.quick, "chats": num_chats, "threads": arguments.threads, "dtype": arguments.dtype}
    return finish("time_to_first_token", {**setting, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
