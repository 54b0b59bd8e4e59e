"""A question that the server does not have, with its answer. The engine process imports this module when it unpickles
the first such question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pointsman.server.answering import Host, answers
from pointsman.server.wire.questions import Question


@dataclass(frozen=True, slots=True)
class LongestPrompt(Question[int]):
    """The number of tokens of the longest prompt among unfinished requests, in units of `unit` tokens, rounded up."""

    unit: int = 1

    def merge(self, answers: Mapping[int, int]) -> int:
        """The maximum of the engines' answers."""
        return max(answers.values())


@answers(LongestPrompt)
def _longest_prompt(host: Host, unit: int = 1) -> int:
    if unit < 1:
        raise ValueError(f"unit is {unit}; it must be at least 1")
    lengths = [len(mailbox.request.prompt_token_ids) for mailbox in host.mailboxes.values()]
    return -(-max(lengths, default=0) // unit)
