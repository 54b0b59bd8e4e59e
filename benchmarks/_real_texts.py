"""Texts for the benchmark of a real model: files of code, documentation, and a conversation.

Code and documentation come from the running Python, so nothing is downloaded. Another version of Python has slightly
different texts.
"""

from __future__ import annotations

import bisect
import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

Message = Mapping[str, str]

CODE_LINES = 60
TEXT_CHARACTERS = 2_500
FENCE = "```python\n"


@dataclass(frozen=True)
class Edit:
    """A file of code, its first lines, and one change of it."""

    module: ModuleType
    old: str
    """The text to change; only its first occurrence is changed."""
    new: str

    @property
    def code(self) -> str:
        """The file before the change."""
        assert self.module.__file__ is not None
        lines = Path(self.module.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join(lines[:CODE_LINES])

    @property
    def request(self) -> Message:
        """A message that asks for the whole file."""
        text = f"{FENCE}{self.code}```\n\nChange the first `{self.old}` to `{self.new}`. Write the whole file."
        return {"role": "user", "content": text}

    @property
    def begun(self) -> Message:
        """The beginning of an output: the file up to the change, with it."""
        before, found, _ = self.code.partition(self.old)
        if not found:
            raise ValueError(f"{self.module.__file__} has no {self.old!r} in its first {CODE_LINES} lines")
        return {"role": "assistant", "content": f"{FENCE}{before}{self.new}"}


EDITS = (
    Edit(bisect, "key=None", "key=lambda value: value"),
    Edit(shlex, "posix=False", "posix=True"),
    Edit(fnmatch, "def fnmatch(name, pat)", "def fnmatch(name, pattern)"),
)
"""Files without compiled parts of the same text. Each change is near the top, so that most of the file is copied."""

SUMMARISED = ("try", "assert", "with")
"""Topics of `help()`."""

QUESTIONS = (
    "What should I see in Rome in two days?",
    "Explain how a bicycle stays upright.",
    "Write a short letter to a friend who has moved to another town.",
)

CHAT = (
    "I have three days in Lisbon in May. What should I see?",
    "Which of these are good for children?",
    "How do I get from the airport to the centre?",
    "What is a typical breakfast there?",
    "I do not eat fish. What else can I order for dinner?",
    "How much money should I plan for a day?",
    "Is it worth going to Sintra for half a day?",
    "What should I pack for the weather in May?",
    "Teach me five useful words of Portuguese.",
    "Now write all of this as a short plan for the three days.",
)
"""Ten turns of one user."""


def summary(topic: str) -> Message:
    """A message that asks for a summary of a part of Python's documentation."""
    return {"role": "user", "content": f"Summarise this text:\n\n{topics[topic][:TEXT_CHARACTERS]}"}


def work(quick: bool) -> dict[str, Sequence[Sequence[Message]]]:
    """Conversations by kind of work; the last message of some is the beginning of an output. The quick form has one
    conversation of each of two kinds."""
    found: dict[str, Sequence[Sequence[Message]]] = {
        "code edit, begun": [[edit.request, edit.begun] for edit in EDITS],
        "code edit, asked": [[edit.request] for edit in EDITS],
        "summary": [[summary(topic)] for topic in SUMMARISED],
        "chat": [[{"role": "user", "content": question}] for question in QUESTIONS],
    }
    return {kind: found[kind][:1] for kind in ("code edit, begun", "chat")} if quick else found


def documentation(num_characters: int) -> str:
    """The beginning of Python's reference, topic after topic."""
    return "\n\n".join(topics[name] for name in sorted(topics))[:num_characters]


CHATS: Mapping[str, Sequence[str]] = {
    "ada": CHAT[:3],
    "ben": CHAT[3:6],
    "cleo": (QUESTIONS[1], "And why does it fall when it stands?", "What helps a child to learn to ride it?"),
    "dan": (QUESTIONS[2], "Make it funnier.", "Now as a poem."),
    "eva": ("What is a good recipe for lentil soup?", "I have no onions. What else?", "How long can I keep it?"),
    "finn": ("What is a tuple in Python?", "When should I use one instead of a list?", "Show an example."),
}
"""Questions of users who chat at the same time, three turns each."""
