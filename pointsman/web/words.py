"""The words of stories: what events, reasons to wait and the moves of a request are called.

Sentences are templates, which `fill` fills in; `page/story.js` does the same with those of `page_words`.

    {name}          the value
    {name:,}        the number, with commas between thousands
    {name:token}    the number of things: "1 token", "2,500 tokens"
    [...]           left out where a value in it is empty: 0, None or ""
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pointsman.core.observe.explain import CAUSES, LACKING, one_of
from pointsman.core.observe.film_format import Op


class Choice(NamedTuple):
    """Templates, one of which is chosen by the value of a field: False and 0 are the first."""

    by: str
    templates: tuple[str, ...]
    """The last is also for larger values."""


SENTENCES: dict[Op, str | Choice] = {
    Op.ADDED: "{who} is added[ of tenant {tenant}]: {num_prompt_tokens:prompt token}",
    Op.REFUSED: "{who} is refused: {why}",
    Op.PARKED: "{who} is parked: {why}",
    Op.DEFERRED: "{who} waits[ for {lacks}]: {why}[; {holder} holds most]",
    Op.ADMITTED: Choice(
        "resumed", ("{who} starts[, {cached:token} of it cached]", "{who} resumes[, {cached:token} of it cached]")
    ),
    Op.PREEMPTED: (
        "{who} is preempted: {why}; it gives up the KV of {lost:token}[, {share} of it still cached then]{recovery}"
    ),
    Op.ROLLED_BACK: "{who} waits again, since its step failed",
    Op.FINISHED: "{who} finishes: {why}[ ({detail})], {generated:token} generated",
    Op.FAILED: "{steps:step} failed and will be decided again",
    Op.LOAD_STARTED: "{who} loads {tokens:token}",
    Op.LOAD_FINISHED: Choice(
        "failed", ("{who} has loaded: {tokens:token}", "{who} lacks some of what it loads: {tokens:token}")
    ),
    Op.PRIORITY: "{who} gets priority {priority}",
    Op.EXTENDED: "{who} has {prompt:prompt token} now",
    Op.PAUSED: Choice("mode", ("resumed", "paused: nobody is admitted", "paused")),
    Op.LIMITED: Choice("limit", ("no limit of active requests", "at most {num_active} requests run")),
}
"""What happened, by the event. The values are the event's fields, and those that the tellers add."""

SHARES = {"none": "none", "all": "all"}
"""How much of the KV that a preempted request gives up is still cached, where it is not a number of tokens."""
RECOVERIES = ("", ", and what is evicted of it is computed again", ", and what is evicted of it is swapped")
PREEMPTIONS = {
    "parked": "the host parked it",
    "reset": "the prefix cache was reset, and what runs is computed again",
    "unsampled": "no token came for it from a step that samples",
}
"""Why a request was preempted, by the cause, where it was not for a request."""
MORE_URGENT = "{by} is more urgent and takes its place"
NEEDS = {
    "own": Choice(
        "several",
        (
            "it needs a block itself, and none is free; {who} {rule}",
            "{missing:,} blocks are missing, the first of them for itself; {who} {rule}",
        ),
    ),
    "other": Choice(
        "several",
        (
            "{by} needs a block, and none is free; {who} {rule}",
            "{missing:,} blocks are missing, the first of them for {by}; {who} {rule}",
        ),
    ),
}
"""Whose need of blocks a preemption was: the request's own, or another's."""
RULES = {
    "latest": "was admitted last of those that run",
    "lowest-priority": "is the least urgent of those that run",
    "least-cost": "costs least to compute again, of those that free enough",
}
"""Why the victim is this one, by the policy that chose it."""
OTHER_RULE = "is the choice of the policy {chooser}"
AGAIN = ", {num_again:token} to compute again"
"""Behind the sentence of a request that resumes."""
COSTS = {
    "open": "it did not resume",
    "resumed": "it resumed after {seconds} s, with {num_again:token} to compute again",
}
"""What a preemption cost."""

BEHIND = "behind others"
"""Waiting before it was asked for: the queue was blocked before it, or no step came."""
NOT_ITS_TURN = "it was not its turn[; of the first in the queue: {first}]"
WAITS = {
    "asked": "{why}[, most of it held by {holder}]",
    "behind": "behind {blocker}",
    "first": "not asked yet",
}
"""Why a request waits at a moment."""

_ELSEWHERE = "it has to wait for something other than capacity"
_OVER = "it is aborted, or its deadline passes"
MOVES = {
    ("new", "waiting"): "a request is added",
    ("new", "parked"): (
        "it is added, and waits for something other than capacity: a grammar, KV from elsewhere, the next part of its "
        "prompt"
    ),
    ("new", "refused"): "it can never run, or the queue is full",
    ("waiting", "refused"): "it turns out that it can never run",
    ("waiting", "parked"): _ELSEWHERE,
    ("parked", "waiting"): "what it waited for is there",
    ("waiting", "running"): "it is admitted: a sequence slot, tokens of the budget and blocks are there",
    ("running", "waiting"): "the step that admitted it failed",
    ("running", "parked"): f"{_ELSEWHERE}, and gives back its blocks",
    ("running", "preempted"): "its blocks are needed for another request, or the host takes them",
    ("preempted", "running"): "it is admitted again, with what is still cached of it",
    ("preempted", "parked"): _ELSEWHERE,
    ("parked", "preempted"): "what it waited for is there; it has run before",
    ("running", "finished"): "it stops, reaches its maximum length, or is aborted",
    ("waiting", "finished"): _OVER,
    ("preempted", "finished"): _OVER,
    ("parked", "finished"): _OVER,
}
"""What moves a request from one state of the diagram to another."""

_VALUE = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_OPTION = re.compile(r"\[([^\]]*)\]")


def fill(template: str | Choice, values: Mapping[str, Any]) -> str:
    """The sentence of a template.

    Args:
        template: what is chosen by a value is chosen here.
        values: by their names in the template.
    """
    if isinstance(template, Choice):
        template = template.templates[min(int(values[template.by]), len(template.templates) - 1)]

    def shown(found: re.Match[str]) -> str:
        value, kind = values[found[1]], found[2]
        if kind is None:
            return str(value)
        return f"{value:,}" if kind == "," else counted(value, kind)

    def option(found: re.Match[str]) -> str:
        return found[1] if all(values[name] for name, _ in _VALUE.findall(found[1])) else ""

    return _VALUE.sub(shown, _OPTION.sub(option, template))  # values come last, and may hold braces


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def page_words() -> dict[str, Any]:
    """All of it, as JSON, for `page/story.js`."""
    return {
        "sentences": {op.name.lower(): template for op, template in SENTENCES.items()},
        "shares": SHARES,
        "recoveries": RECOVERIES,
        "preemptions": PREEMPTIONS,
        "moreUrgent": MORE_URGENT,
        "needs": NEEDS,
        "rules": RULES,
        "otherRule": OTHER_RULE,
        "again": AGAIN,
        "costs": COSTS,
        "behind": BEHIND,
        "notItsTurn": NOT_ITS_TURN,
        "waits": WAITS,
        "moves": {f"{start} {end}": text for (start, end), text in MOVES.items()},
        "lacking": LACKING,
        "reasons": {
            reason.value: {
                "text": cause.text,
                "resource": None if cause.resource is None else [one_of(cause.resource), cause.resource],
            }
            for reason, cause in CAUSES.items()
        },
    }
