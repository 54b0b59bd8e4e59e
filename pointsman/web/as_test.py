"""Converts a scene to a test: Python that makes the same calls to a scheduler, and asserts its final state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby
from textwrap import indent

from pointsman.core import Request, SchedulerConfig
from pointsman.web.scene import EOS_TOKEN, Arrival, Done, Played, Urgency

_WIDTH = 60
_HEAD = '''"""Made by the sandbox of Pointsman: the same requests, settings and steps, and the resulting state."""

from itertools import chain

{imports}from pointsman.core import {names}

EOS = {eos}  # ends a request; the scheduler cannot predict it


def test_sandbox() -> None:
    scheduler = Scheduler({config})
    requests, outputs = {{}}, {{}}  # outputs: number of tokens that a request generates, and the first token
    now, newest = 0.0, None

    def add(name, prompt, output, text, arrival, max_tokens, **hints):
        outputs[name] = (output, text)
        request = Request(
            name,
            list(prompt),
            arrival_time=arrival,
            max_tokens=max_tokens,
            eos_token_ids=(EOS,),
            **hints,
        )
        requests[name] = request
        scheduler.add(request, now)

    def step(count):
        nonlocal now, newest
        for _ in range(count):
            newest = scheduler.schedule(now)
            now += {per_step!r} + {per_token!r} * newest.total_num_scheduled_tokens
            tokens = []
            for request, samples in zip(newest.requests, newest.samples, strict=True):
                if samples:
                    output, text = outputs[request.request_id]
                    tokens.append(EOS if request.num_output_tokens + 1 >= output else text + request.num_output_tokens)
            scheduler.update(newest, StepResult(tokens), now)
'''


def as_test(played: Played) -> str:
    """The test of a played scene, as the text of a Python module with one pytest function."""
    scene = played.scene
    is_refused = any(done.what == "refuse" for done in played.log)
    names = ["Request", *(["RequestRefused"] if is_refused else []), "Scheduler", "SchedulerConfig", "StepResult"]
    text = _HEAD.format(
        imports="import pytest\n\n" if is_refused else "",
        names=", ".join(names),
        eos=EOS_TOKEN,
        config=_config_code(scene.config),
        per_step=scene.seconds_per_step,
        per_token=scene.seconds_per_token,
    )
    lines: list[str] = []
    for is_step, group in groupby(played.log, key=lambda done: done.what == "step"):
        several = list(group)
        if is_step:
            lines.append(f"step({len(several)})")
        else:
            for done in several:
                lines += _call_lines(played, done)
    lines += ["", "# The state that the sandbox showed.", *_assertion_lines(played)]
    body = indent("\n".join(lines), "    ", lambda line: bool(line.strip()))
    found = f"{text}\n{body}\n"
    return found if "chain(" in body else found.replace("from itertools import chain\n\n", "", 1)


def _config_code(config: SchedulerConfig) -> str:
    plain = SchedulerConfig(num_blocks=1, max_model_len=1)
    needed = ("num_blocks", "max_model_len")
    given = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name in needed or getattr(config, field.name) != getattr(plain, field.name)
    }
    inner = "".join(f"            {name}={value!r},\n" for name, value in given.items())
    return f"\n        SchedulerConfig(\n{inner}        )\n    "


def _call_lines(played: Played, done: Done) -> list[str]:
    given = done.given
    if given is None:
        return [f"now = {done.now!r}  # nothing to do until then"]
    if isinstance(given, Urgency):
        return [f"scheduler.set_priority({given.request_id!r}, {given.priority}, now)"]
    if not isinstance(given, Arrival):
        return [f"scheduler.abort({given.request_id!r}, now)"]
    runs = [f"range({first}, {end})" for first, end in played.scene.segments(given.request_id, given.num_prompt_tokens)]
    prompt = runs[0] if len(runs) == 1 else f"[*chain({', '.join(runs)})]"
    hints = f", priority={given.priority}" if given.priority else ""
    hints += f", tenant={given.tenant!r}" if given.tenant else ""
    text = played.scene.texts()[given.request_id] + given.num_prompt_tokens
    call = (
        f"add({given.request_id!r}, {prompt}, output={given.num_output_tokens}, text={text}, "
        f"arrival={given.at!r}, max_tokens={played.scene.max_tokens(given)}{hints})"
    )
    return [call] if done.what == "add" else ["with pytest.raises(RequestRefused):", f"    {call}"]


def _assertion_lines(played: Played) -> list[str]:
    scheduler, stats = played.scheduler, played.scheduler.stats()
    found = [
        f"assert [request.request_id for request in scheduler.running] == "
        f"{_value_code([request.request_id for request in scheduler.running])}",
        "stats = scheduler.stats()",
        f"assert (stats.num_waiting, stats.num_free_blocks) == {(stats.num_waiting, stats.num_free_blocks)}",
        f"assert (stats.num_preemptions, stats.num_displaced) == {(stats.num_preemptions, stats.num_displaced)}",
    ]
    if played.newest is not None:
        ran = {
            request.request_id: count
            for request, count in zip(played.newest.requests, played.newest.num_scheduled_tokens.tolist(), strict=True)
        }
        found += [
            "ran = zip(newest.requests, newest.num_scheduled_tokens.tolist(), strict=True)",
            f"assert {{request.request_id: tokens for request, tokens in ran}} == {_value_code(ran)}",
        ]
    tables = played.tables()
    if tables:
        found += [
            "tables = {",
            "    request.request_id: scheduler.block_table[row, : scheduler.explain(request.request_id).num_blocks]",
            "    for request, row in zip(scheduler.running, scheduler.running_rows, strict=True)",
            "}",
            f"assert {{name: table.tolist() for name, table in tables.items()}} == {_value_code(tables)}",
        ]
    states = {name: _state_lines(each.request) for name, each in played.cast.items() if each.request is not None}
    if states:
        found += [
            "states = {  # status, computed tokens, generated tokens, preemptions",
            "    name: (each.status.value, each.num_computed_tokens, each.num_output_tokens, each.num_preemptions)",
            "    for name, each in requests.items()",
            "}",
            f"assert states == {_value_code(states)}",
        ]
    return found


def _state_lines(request: Request) -> tuple[str, int, int, int]:
    status = request.status.value
    return status, request.num_computed_tokens, request.num_output_tokens, request.num_preemptions


def _value_code(value: Mapping[str, object] | list[str]) -> str:
    """The value as Python code. If the code does not fit one line, each entry of the value gets a line of its own."""
    if len(short := repr(value)) <= _WIDTH:
        return short
    entries = [f"{key!r}: {each!r}" for key, each in value.items()] if isinstance(value, Mapping) else map(repr, value)
    first, last = short[0], short[-1]
    return "\n".join([first, *(f"    {entry}," for entry in entries), last])
