"""Explanations of waiting requests: chats at the same time on a server whose KV cache is too small for them.

While the users chat, `GET /v1/requests` is called repeatedly. Each explanation is compared with the other requests of
the same listing. The recording of the server is then replayed, which compares every decision, and its film has the time
that each request waited and ran. Both times together must be the time that its user saw, except for the transport
between the user and the scheduler.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _common import Targets, note, print_table
from _real_texts import CHATS
from _server_client import Address, post, send
from _server_probe import open_requests, run_async
from _server_process import start_server

from pointsman.cli.film import film_recording
from pointsman.web.film import Film
from pointsman.web.story import lives_of

USERS, USERS_QUICK = 6, 3
TURNS, TURNS_QUICK = 3, 1
ANSWER_TOKENS, ANSWER_TOKENS_QUICK = 80, 24
BLOCKS, BLOCKS_QUICK = 26, 4
"""KV blocks: fewer than the concurrent requests need at the end."""
MAX_NUM_SEQS, MAX_NUM_SEQS_QUICK = 4, 2
BLOCK_SIZE = 32
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_START, SECONDS_TO_ANSWER = 240.0, 300.0
MIN_ACCOUNTED = 0.9
"""Minimum share of a user's waiting time that the film accounts for, in the median."""


@dataclass
class Talk:
    """What the users saw, and the listings of the server meanwhile."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each request, by the id that its user knows."""
    listings: list[list[dict[str, Any]]] = field(default_factory=list)


def measure_explanations(model: str, quick: bool, targets: Targets) -> dict[str, Any]:
    """Check the explanations of waiting requests during chats; returns the figures and prints an example."""
    blocks, slots = (BLOCKS_QUICK, MAX_NUM_SEQS_QUICK) if quick else (BLOCKS, MAX_NUM_SEQS)
    with tempfile.TemporaryDirectory() as folder:
        recording, film = Path(folder) / "run.jsonl", Path(folder) / "run.film"
        note("explanations: the server starts")
        options = {
            "--model": model,
            "--block-size": BLOCK_SIZE,
            "--num-blocks": blocks,
            "--max-model-len": blocks * BLOCK_SIZE,
            "--max-num-seqs": slots,
            "--max-num-batched-tokens": 128,
            "--threads": 1,
            "--record": recording,
        }
        given = [str(part) for pair in options.items() for part in pair]
        with start_server(*given, *(["--no-warm-up"] if quick else []), timeout=SECONDS_TO_START) as server:
            note("explanations: the users chat")
            talk: Talk = run_async(_talk(("127.0.0.1", server.port), model, quick))
        with film.open("wb") as file:
            film_recording(recording, file)  # replays it; a decision that differs is an error
        found, longest = _judge(talk, Film.read(film), targets)
        _print_example(talk, film, longest)
    return found


async def _talk(address: Address, model: str, quick: bool) -> Talk:
    talk = Talk()
    num_users, num_turns = (USERS_QUICK, TURNS_QUICK) if quick else (USERS, TURNS)
    num_tokens = ANSWER_TOKENS_QUICK if quick else ANSWER_TOKENS
    users = [
        asyncio.create_task(_chat(address, model, name, questions[:num_turns], num_tokens, talk.seconds))
        for name, questions in list(CHATS.items())[:num_users]
    ]
    while not all(user.done() for user in users):
        talk.listings.append(await open_requests(address))
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    await asyncio.gather(*users)
    return talk


async def _chat(
    address: Address, model: str, name: str, questions: Sequence[str], num_tokens: int, seconds: dict[str, float]
) -> None:
    """A user's turns, each with the whole conversation."""
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(questions, start=1):
        messages.append({"role": "user", "content": question})
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": num_tokens}
        request = post("/v1/chat/completions", body, {"X-Request-Id": f"{name}-{turn}"})
        exchange = await send(address, request, SECONDS_TO_ANSWER)
        answer = exchange.answer()
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {answer.body[:200]!r}")
        content = answer.json()
        seconds[content["id"]] = exchange.seconds
        messages.append({"role": "assistant", "content": content["choices"][0]["message"]["content"]})


def _judge(talk: Talk, film: Film, targets: Targets) -> tuple[dict[str, Any], str]:
    """The figures, and the engine's id of the request that waited longest."""
    waiting = [(one, listing) for listing in talk.listings for one in listing if one["reason"] is not None]
    wrong = [one["explanation"] for one, listing in waiting if not _is_consistent(one, listing)]
    for sentence in wrong[:3]:
        note(f"contradicts the other requests of its listing: {sentence}")
    reasons = Counter(one["reason"] for one, _ in waiting)
    lives = {film.requests[life.number].request_id: life for life in lives_of(film)}
    accounted = []
    for name, seconds in talk.seconds.items():
        (life,) = (life for request_id, life in lives.items() if request_id.startswith(f"{name}-"))
        accounted.append((life.total_waited + life.ran) / seconds)
    longest = max(lives, key=lambda request_id: lives[request_id].total_waited)
    num_preempted = sum("preemption" in life.waited for life in lives.values())
    found = {
        "requests": len(talk.seconds),
        "preempted": num_preempted,
        "explanations": len(waiting),
        "contradictions": len(wrong),
        "reasons": dict(reasons.most_common()),
        "accounted": round(median(accounted), 4),
        "longest_wait": round(lives[longest].total_waited, 3),
    }
    print_table(
        f"{found['requests']} requests of {len({name.rpartition('-')[0] for name in talk.seconds})} users",
        ["reason to wait", "explanations"],
        list(reasons.most_common()),
    )
    targets.holds(f"{len(wrong)} of {len(waiting)} explanations contradict their listing", bool(waiting) and not wrong)
    targets.holds(f"{num_preempted} requests are preempted; target: at least 1", num_preempted > 0)
    targets.at_least("share of the users' time that the film accounts for", found["accounted"], MIN_ACCOUNTED)
    return found, longest


def _is_consistent(one: dict[str, Any], listing: list[dict[str, Any]]) -> bool:
    """Whether an explanation agrees with the listing: requests ahead of it are before it, and holders run."""
    others = {other["id"]: other for other in listing if other["id"] != one["id"]}
    named = [others.get(holder["id"]) for holder in one["holders"]]
    if one["reason"] == "behind":
        return len(named) == 1 and named[0] is not None and (named[0]["position"] is None or _is_before(named[0], one))
    return all(other is not None and other["position"] is None for other in named)


def _is_before(other: dict[str, Any], one: dict[str, Any]) -> bool:
    return one["position"] is not None and bool(other["position"] < one["position"])


def _print_example(talk: Talk, film: Path, engine_id: str) -> None:
    """Print the server's explanations of a request while it waited, and the film's afterwards."""
    said = [one["explanation"] for listing in talk.listings for one in listing if one["engine_id"] == engine_id]
    note("\nwhile it waited:")
    for sentence in dict.fromkeys(said):
        note(f"  {sentence}")
    note("\nits life, by pointsman film:")
    command = [sys.executable, "-m", "pointsman", "film", str(film), "--request", engine_id]
    note(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
