"""The texts with which films are described: sentences for events, reasons for waiting, and changes of a request's
state.

Sentences are templates that `fill` fills in; `page/story.js` does the same with the templates of `page_words`.

    {name}          the value with this name
    {name:,}        the value, a number, with commas between thousands
    {name:token}    the value, a number, with a noun: "1 token", "2,500 tokens"
    [...]           omitted if a value in it is empty: 0, None or ""
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pointsman.core.observe.explain import CAUSES, LACKING, one_of
from pointsman.core.observe.film_format import Op


class Choice(NamedTuple):
    """Templates, one of which is chosen by the value of a field: its value is the index of the template (False: 0)."""

    by: str
    templates: tuple[str, ...]
    """The templates; a value beyond the last index chooses the last template."""


SENTENCES: dict[Op, str | Choice] = {
    Op.ADDED: "{request} is added[ of tenant {tenant}]: {num_prompt_tokens:prompt token}",
    Op.REFUSED: "{request} is refused: {why}",
    Op.PARKED: "{request} is parked: {why}",
    Op.DEFERRED: "{request} waits[ for {lacks}]: {why}[; largest holder: {holder}]",
    Op.ADMITTED: Choice(
        "resumed",
        ("{request} starts[, {cached:token} of it cached]", "{request} resumes[, {cached:token} of it cached]"),
    ),
    Op.PREEMPTED: (
        "{request} is preempted: {why}; it gives up the KV of {lost:token}[, {share} of it still cached]{recovery}"
    ),
    Op.ROLLED_BACK: "{request} waits again, since its step failed",
    Op.FINISHED: "{request} finishes: {why}[ ({detail})], {generated:token} generated",
    Op.FAILED: "{steps:step} failed and will be repeated",
    Op.LOAD_STARTED: "{request} loads {tokens:token}",
    Op.LOAD_FINISHED: Choice(
        "failed", ("{request} has loaded: {tokens:token}", "{request} could not load everything: {tokens:token}")
    ),
    Op.PRIORITY: "{request} gets priority {priority}",
    Op.EXTENDED: "{request} has {prompt:prompt token} now",
    Op.PAUSED: Choice("mode", ("resumed", "paused: no request is admitted", "paused")),
    Op.LIMITED: Choice("limit", ("no limit of active requests", "at most {num_active} requests run")),
}
"""The sentence of each event. The values in a sentence are the event's fields, and values that `Teller` adds."""

SHARES = {"none": "none", "all": "all"}
"""Words for how much of a preempted request's KV is still cached, if none or all of it is. Otherwise a sentence has the
number of cached tokens."""
RECOVERIES = ("", ", and evicted blocks are recomputed", ", and evicted blocks are swapped")
PREEMPTIONS = {
    "parked": "the host parked it",
    "reset": "the prefix cache was reset, and running requests are recomputed",
    "unsampled": "a step that samples returned no token for it",
}
"""Why a request was preempted although no request needed its resources, by the cause."""
MORE_URGENT = "{by} is more urgent and takes its place"
NEEDS = {
    "own": Choice(
        "several",
        (
            "it needs a block itself, and none is free; {request} {rule}",
            "{missing:,} blocks are missing, the first of them for itself; {request} {rule}",
        ),
    ),
    "other": Choice(
        "several",
        (
            "{by} needs a block, and none is free; {request} {rule}",
            "{missing:,} blocks are missing, the first of them for {by}; {request} {rule}",
        ),
    ),
}
"""The request whose need of blocks caused a preemption: the victim itself, or another request."""
RULES = {
    "latest": "was the last one admitted",
    "lowest-priority": "is the least urgent running request",
    "least-cost": "is the cheapest to recompute of those that free enough",
}
"""Why a request was chosen as the victim of a preemption, by the victim policy."""
OTHER_RULE = "was chosen by the policy {chooser}"
AGAIN = ", {num_again:token} to recompute"
"""Appended to the sentence of a request that resumes."""
COSTS = {
    "open": "it did not resume",
    "resumed": "it resumed after {seconds} s, with {num_again:token} to recompute",
}
"""The cost of a preemption, by whether the request has resumed."""

BEHIND = "behind others"
"""Reason of a request that waits and has not been checked: a request ahead of it blocked the queue, or no step was
scheduled since it was queued."""
NOT_ITS_TURN = "other requests were ahead of it[; head of the queue: {first}]"
WAITS = {
    "asked": "{why}[, most of it held by {holder}]",
    "behind": "behind {blocker}",
    "first": "not checked yet",
}
"""Why a request is waiting."""

_ELSEWHERE = "it has to wait for something other than capacity"
_OVER = "it is aborted, or its deadline passes"
MOVES = {
    ("new", "waiting"): "a request is added",
    ("new", "parked"): (
        "it is added, and waits for something other than capacity: a grammar, KV from elsewhere, the next part of its "
        "prompt"
    ),
    ("new", "refused"): "it can never run, or the queue is full",
    ("waiting", "refused"): "it can never run, as is found later",
    ("waiting", "parked"): _ELSEWHERE,
    ("parked", "waiting"): "the resource it waited for is available",
    ("waiting", "running"): "it is admitted: a sequence slot, tokens of the budget and blocks are available",
    ("running", "waiting"): "the step that admitted it failed",
    ("running", "parked"): f"{_ELSEWHERE}, and gives back its blocks",
    ("running", "preempted"): "its blocks are needed for another request, or the host takes them",
    ("preempted", "running"): "it is admitted again, and reuses its cached blocks",
    ("preempted", "parked"): _ELSEWHERE,
    ("parked", "preempted"): "the resource it waited for is available; it has run before",
    ("running", "finished"): "it stops, reaches its maximum length, or is aborted",
    ("waiting", "finished"): _OVER,
    ("preempted", "finished"): _OVER,
    ("parked", "finished"): _OVER,
}
"""The cause of each change of a request's state in the diagram of states, by (old state, new state)."""

_VALUE = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_OPTION = re.compile(r"\[([^\]]*)\]")


def fill(template: str | Choice, values: Mapping[str, Any]) -> str:
    """The sentence of a template.

    Args:
        template: the template, or a `Choice` among templates by the value of a field.
        values: values for the template, by the names in it.
    """
    if isinstance(template, Choice):
        template = template.templates[min(int(values[template.by]), len(template.templates) - 1)]

    def format_value(found: re.Match[str]) -> str:
        value, kind = values[found[1]], found[2]
        if kind is None:
            return str(value)
        return f"{value:,}" if kind == "," else counted(value, kind)

    def fill_option(found: re.Match[str]) -> str:
        return found[1] if all(values[name] for name, _ in _VALUE.findall(found[1])) else ""

    return _VALUE.sub(format_value, _OPTION.sub(fill_option, template))  # values come last, as they may contain braces


def counted(count: int, what: str) -> str:
    """A count with its noun, in the singular or plural."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def page_words() -> dict[str, Any]:
    """All words of this module as data for JSON, for `page/story.js`."""
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
