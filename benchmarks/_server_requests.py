"""Requests of `server_load.py`: most are valid, some hang up, some are malformed, some have too little time.

Everything is drawn from a seed: lengths, kinds, which client hangs up when. A valid request asks for an exact number of
tokens (`ignore_eos`), so that a single lost or duplicated token shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from _server_client import post

Kind = Literal["sound", "hangs up", "malformed", "late"]
SHARES: dict[Kind, float] = {"hangs up": 0.10, "malformed": 0.05, "late": 0.05}
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (8, 64)
MAX_MODEL_LEN = 512
VOCABULARY = 2048  # of the demo model; 0 is its end of text
NUM_PREFIXES, PREFIX_TOKENS = 4, 64
WORDS = ("the", "statement", "returns", "an", "iterator", "over", "its", "argument", "which", "may", "be", "a", "list")
LATE_SECONDS = (0.001, 0.05)
"""Deadlines that no output of `LATE_OUTPUT_TOKENS` can meet: a step takes some milliseconds."""
LATE_OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """A request, and its expected response."""

    kind: Kind
    path: str
    body: dict[str, Any] | bytes
    num_prompt_tokens: int
    """Approximate for a chat."""
    num_output_tokens: int
    statuses: tuple[int, ...] = (200,)
    what: str = ""
    """The defect of a malformed request."""
    hang_up_after: int | None = None
    """Number of pieces after which the client hangs up."""
    hang_up_seconds: float | None = None

    @property
    def request(self) -> bytes:
        return post(self.path, self.body)

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("chat/completions")

    @property
    def wants_logprobs(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("logprobs") is not None

    def unstreamed(self) -> bytes:
        """This request without streaming, with a response in one piece."""
        assert isinstance(self.body, dict)
        return post(self.path, {name: value for name, value in self.body.items() if not name.startswith("stream")})


def plan(count: int, model: str, seed: int) -> list[Planned]:
    """`count` requests in the order in which they are sent."""
    rng = np.random.default_rng([seed, count])
    counts = {kind: round(share * count) for kind, share in SHARES.items()}
    kinds: list[Kind] = [kind for kind, number in counts.items() for _ in range(number)]
    kinds += ["sound"] * (count - len(kinds))
    rng.shuffle(kinds)
    prefixes = rng.integers(1, VOCABULARY, size=(NUM_PREFIXES, PREFIX_TOKENS)).tolist()
    mistakes = malformed(model)
    planned = []
    for i, kind in enumerate(kinds):
        if kind == "malformed":
            what, path, body, statuses = mistakes[i % len(mistakes)]
            planned.append(Planned(kind, path, body, 0, 0, statuses, what))
        else:
            planned.append(_answerable(kind, model, i, prefixes, rng))
    return planned


def _answerable(kind: Kind, model: str, number: int, prefixes: list[list[int]], rng: np.random.Generator) -> Planned:
    """A well-formed request: half of them greedy, most streamed, some chats, some with a shared beginning."""
    num_output = int(rng.integers(*OUTPUT_TOKENS, endpoint=True))
    num_prompt = int(rng.integers(*PROMPT_TOKENS, endpoint=True))
    body: dict[str, Any] = {"model": model, "ignore_eos": True, "temperature": 0.0}
    if rng.random() < 0.5:
        body |= {"temperature": 0.8, "seed": number}
    is_chat = rng.random() < 0.15
    if is_chat:
        num_prompt = min(num_prompt, 64)
        text = " ".join(rng.choice(WORDS, size=num_prompt))
        body |= {"messages": [{"role": "user", "content": text}], "max_completion_tokens": num_output}
    else:
        prompt = rng.integers(1, VOCABULARY, size=num_prompt).tolist()
        if num_prompt > PREFIX_TOKENS and rng.random() < 0.4:
            prompt[:PREFIX_TOKENS] = prefixes[int(rng.integers(len(prefixes)))]
        body |= {"prompt": prompt, "max_tokens": num_output}
        if rng.random() < 0.1:
            body["logprobs"] = 1
    if rng.random() < 0.8:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "late":
        body["deadline"] = float(rng.uniform(*LATE_SECONDS))
        body["max_completion_tokens" if is_chat else "max_tokens"] = num_output = LATE_OUTPUT_TOKENS
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    pieces, seconds = None, None
    if kind == "hangs up":
        if body.get("stream") and rng.random() < 0.5:
            pieces = int(rng.integers(1, 8))
        else:
            seconds = float(rng.uniform(0.0, 2.0))
    statuses = (200, 408) if kind == "late" else (200,)
    return Planned(kind, path, body, num_prompt, num_output, statuses, hang_up_after=pieces, hang_up_seconds=seconds)


def malformed(model: str) -> list[tuple[str, str, dict[str, Any] | bytes, tuple[int, ...]]]:
    """(defect, path, body, accepted statuses)."""
    completions, chat = "/v1/completions", "/v1/chat/completions"

    def with_(**fields: Any) -> dict[str, Any]:
        return {"model": model, "prompt": [5, 6, 7], "max_tokens": 4} | fields

    def structured(fields: Mapping[str, Any]) -> dict[str, Any]:
        return with_(structured_outputs=dict(fields))

    valid = json.dumps(with_())
    return [
        ("JSON cut short", completions, valid[:-5].encode(), (400,)),
        ("an empty body", completions, b"", (400,)),
        ("no UTF-8", completions, valid.replace("max", "\xff").encode("latin-1"), (400,)),
        ("a list 50,000 deep", completions, b"[" * 50_000, (400,)),
        ("NaN", completions, valid.replace("4}", '4, "temperature": NaN}').encode(), (400,)),
        ("half a surrogate pair", completions, valid.replace("[5, 6, 7]", '"\\ud800"').encode(), (400,)),
        ("no prompt", completions, {"model": model, "max_tokens": 4}, (400,)),
        ("a prompt that is an object", completions, with_(prompt={"text": "a"}), (400,)),
        ("a token outside the vocabulary", completions, with_(prompt=[10**9]), (400,)),
        ("a prompt longer than the model takes", completions, with_(prompt=[5] * (MAX_MODEL_LEN + 1)), (400,)),
        ("max_tokens below 0", completions, with_(max_tokens=-1), (400,)),
        ("max_tokens that is text", completions, with_(max_tokens="many"), (400,)),
        ("a temperature below 0", completions, with_(temperature=-2), (400,)),
        ("n above the limit", completions, with_(n=100_000), (400,)),
        ("a stop list of numbers", completions, with_(stop=[1, 2]), (400,)),
        ("a regular expression that is none", completions, structured({"regex": "("}), (400,)),
        ("two structures at once", completions, structured({"regex": "a", "choice": ["a"]}), (400,)),
        ("an unknown model", completions, with_(model="nobody"), (404,)),
        ("an unknown path", "/v1/nothing", with_(), (404,)),
        ("messages that are text", chat, {"model": model, "messages": "hello"}, (400,)),
        ("no messages", chat, {"model": model, "messages": []}, (400,)),
        ("a path that takes no POST", "/v1/models", with_(), (405,)),
    ]
