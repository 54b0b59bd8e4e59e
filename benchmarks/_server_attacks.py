"""Attacks: requests made to block the server. Bodies of up to 4 MB that are wrong late or expensively, and valid ones
that need much work.

Any status is right for a wrong body, as long as other clients do not wait for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _server_client import post

MAX_BYTES = 4 * 1024 * 1024
"""Maximum size of a body, the server's default."""
MANY = 1_000_000
LONG_PROMPT = 10_000
"""Number of tokens of a long prompt."""
NUM_WORDS = 20_000

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_COMPLETION: dict[str, Any] = {"prompt": [1, 2, 3, 4], "max_tokens": 4}


@dataclass(frozen=True, slots=True)
class Attack:
    """One request."""

    name: str
    path: str
    make_body: Callable[[], bytes]
    """Makes the body, on demand because that takes time and memory."""
    is_quick: bool = False
    """Whether the short form of the benchmark includes it."""

    def request(self) -> bytes:
        """The request's bytes.

        Raises:
            ValueError: the body is larger than the server's limit.
        """
        body = self.make_body()
        if len(body) > MAX_BYTES:
            raise ValueError(f"the body of {self.name} has {len(body)} bytes, more than {MAX_BYTES}; make it smaller")
        return post(self.path, body)


def plain(num_prompt_tokens: int, num_output_tokens: int, n: int = 1) -> bytes:
    """A plain request.

    Args:
        num_prompt_tokens: of its prompt.
        num_output_tokens: of each sample.
        n: samples.
    """
    body = {"prompt": _token_ids(num_prompt_tokens), "max_tokens": num_output_tokens, "n": n, "ignore_eos": True}
    return post(COMPLETIONS, body)


def _token_ids(count: int) -> list[int]:
    """Ids of the demo model's vocabulary, without the one that ends a text."""
    return [1 + (7 * i) % 2000 for i in range(count)]


def _json(base: dict[str, Any], **fields: Any) -> bytes:
    """A body of `base` and `fields`."""
    return json.dumps(base | fields, separators=(",", ":")).encode()


def _raw(base: dict[str, Any], name: str, value: str) -> bytes:
    """A body whose field `name` is JSON that Python would not write."""
    head = _json(base, **{name: 0}).decode()
    return f"{head[:-2]}{value}}}".encode()


def _words(num_characters: int = MAX_BYTES - 1000, seed: int = 0) -> str:
    """Words, joined with spaces; there are so many different ones that a tokenizer's cache of words helps little."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(3, 9))) for _ in range(NUM_WORDS)]
    return " ".join(rng.choices(vocabulary, k=num_characters // 4))[:num_characters]


def _schema() -> dict[str, Any]:
    """A sound JSON schema of just under 4 MB."""
    properties = {f"p{i:x}": {"type": "string"} for i in range(150_000)}
    return {"type": "object", "properties": properties}


def _nested(levels: int) -> str:
    """Nested lists, as many of the same depth as fit."""
    one = "[" * levels + "]" * levels
    return f"[{','.join([one] * ((MAX_BYTES - 1000) // (len(one) + 1)))}]"


ATTACKS = (
    # wrong values where few are expected
    Attack(
        "choices that are numbers", CHAT, lambda: _json(_CHAT, structured_outputs={"choice": [1] * MANY}), is_quick=True
    ),
    Attack("modalities that are numbers", CHAT, lambda: _json(_CHAT, modalities=[1] * MANY)),
    Attack("stop strings that are floats", CHAT, lambda: _json(_CHAT, stop=[1.5] * MANY)),
    Attack(
        "content parts of numbers",
        CHAT,
        lambda: _json({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 120_000}]}),
    ),
    Attack("biases that are no numbers", CHAT, lambda: _json(_CHAT, logit_bias={str(i): "x" for i in range(250_000)})),
    Attack(
        "template arguments",
        CHAT,
        lambda: _json(_CHAT, chat_template_kwargs={f"{i:x}": 1 for i in range(380_000)}),
        is_quick=True,
    ),
    Attack(
        "a schema of 4 MB",
        CHAT,
        lambda: _json(
            _CHAT,
            response_format={"type": "json_schema", "json_schema": {"name": "large", "schema": _schema()}},
        ),
    ),
    # prompts that are too many or too long
    Attack("prompts of one token", COMPLETIONS, lambda: _json({"prompt": [[1]] * 800_000}), is_quick=True),
    Attack("a prompt of 800,000 ids", COMPLETIONS, lambda: _json({"prompt": [1234] * 800_000})),
    Attack("a text of 4 MB", COMPLETIONS, lambda: _json({}, prompt=_words())),
    Attack(
        "16 texts of 250,000 characters",  # 16,383 tokens may have twice as many, so they are tokenized
        COMPLETIONS,
        lambda: _json({"prompt": [_words(250_000, i) for i in range(16)]}),
    ),
    Attack(
        "1,000 texts of 4,000, too many max_tokens",
        COMPLETIONS,
        lambda: _json({"prompt": [_words(4_000)] * 1000, "max_tokens": 16_000}),
    ),
    Attack("a word of 4 MB", COMPLETIONS, lambda: _json({"prompt": "a" * (MAX_BYTES - 1000)})),
    Attack("a string of escapes", COMPLETIONS, lambda: _raw({}, "prompt", '"' + r"\u00e9" * 660_000 + '"')),
    Attack("a list 2,000,000 deep", COMPLETIONS, lambda: _raw({}, "prompt", "[" * 2 * MANY + "]" * 2 * MANY)),
    Attack("lists 150 deep", COMPLETIONS, lambda: _raw(_COMPLETION, "extra", _nested(150))),
    # valid, and much work
    Attack(
        "15 samples of 500, logprobs 20",
        COMPLETIONS,
        lambda: _json(_COMPLETION, n=15, max_tokens=500, logprobs=20, ignore_eos=True),
    ),
    Attack(
        "prompt_logprobs 20 of 10,000",
        COMPLETIONS,
        lambda: _json({"prompt": _token_ids(LONG_PROMPT), "max_tokens": 1, "prompt_logprobs": 20}),
    ),
    Attack(
        "echo, logprobs 20 of 4,000",
        COMPLETIONS,
        lambda: _json({"prompt": _token_ids(4000), "max_tokens": 16, "echo": True, "logprobs": 20, "ignore_eos": True}),
        is_quick=True,
    ),
    Attack(
        "4,096 messages", CHAT, lambda: _json({"messages": [{"role": "user", "content": "Hi"}] * 4096, "max_tokens": 4})
    ),
    Attack("/tokenize of 4 MB", "/tokenize", lambda: _json({}, prompt=_words())),
    Attack(
        "/tokenize of 250,000 characters, strings",
        "/tokenize",
        lambda: _json({"return_token_strs": True}, prompt=_words(250_000)),
    ),
    Attack("/detokenize of 4 MB", "/detokenize", lambda: _json({"tokens": [1234] * 800_000})),
    Attack("/detokenize of 131,072", "/detokenize", lambda: _json({"tokens": _token_ids(131_072)})),
    Attack("embeddings of 1,000 inputs", "/v1/embeddings", lambda: _json({"input": [[1, 2, 3, 4]] * 1000})),
    # at the parser's limits on a body, and around them
    Attack(
        "99,000 template arguments",
        CHAT,
        lambda: _json(_CHAT, chat_template_kwargs={f"{i:x}": 1 for i in range(99_000)}),
    ),
    Attack("99,000 empty lists", COMPLETIONS, lambda: _json(_COMPLETION, extra=[[] for _ in range(99_000)])),
    Attack(
        "99,000 lists, 99,000 texts and a million numbers",
        COMPLETIONS,
        lambda: _json(_COMPLETION, extra=[["ab"] for _ in range(98_000)], more=[1] * MANY),
    ),
    Attack(
        "names that end with a backslash",
        CHAT,
        lambda: _json(_CHAT, chat_template_kwargs={f"{i:x}\\": 1 for i in range(350_000)}),
    ),
    Attack("one name 600,000 times", COMPLETIONS, lambda: _raw({}, "prompt", "1" + ',"a":1' * 600_000)),
    Attack("a text of quotation marks", COMPLETIONS, lambda: _json({"prompt": '"' * 2_000_000})),
    Attack(
        "a text of brackets beside 99,000 texts",
        COMPLETIONS,
        lambda: _json({"prompt": "[{" * MANY, "extra": ["ab"] * 99_000}),
    ),
    Attack(
        "a schema of 30,000 properties",
        COMPLETIONS,
        lambda: _json(
            _COMPLETION,
            structured_outputs={
                "json": {"type": "object", "properties": {f"p{i:x}": {"type": "string"} for i in range(30_000)}}
            },
        ),
    ),
    Attack(
        "128 tools of 700 names",
        CHAT,
        lambda: _json(
            _CHAT,
            tools=[{"type": "function", "function": {f"{i:x}": 1 for i in range(700)}} for _ in range(128)],
            tool_choice="none",
        ),
    ),
    Attack(
        "15 samples of 300, top_logprobs 20, chat",
        CHAT,
        lambda: _json(_CHAT, n=15, max_tokens=300, logprobs=True, top_logprobs=20, ignore_eos=True),
    ),
    Attack(
        "15 samples of 300, top_logprobs 20, streamed",
        CHAT,
        lambda: _json(_CHAT, n=15, max_tokens=300, logprobs=True, top_logprobs=20, ignore_eos=True, stream=True),
    ),
)
