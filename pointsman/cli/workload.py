"""The workload: the built-in prompts, prompts from the command line or a file, or the requests of a trace.

All prompts become one list of `Job`s. A prompt that cannot be read becomes a `Problem` with its place; all other
prompts run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BufferedReader
from typing import TYPE_CHECKING, Any, TypeAlias

from pointsman.cli.demo_prompts import DEMO_PROMPTS
from pointsman.cli.errors import CommandError
from pointsman.files import MAX_MESSAGE, open_input, read_text_lines, shown
from pointsman.traces import TraceError, TraceRequest, about_left_out, prompt_token_ids, read_trace, served

if TYPE_CHECKING:
    from pointsman.engine import SamplingParams

Prompt: TypeAlias = str | Sequence[int]

SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "seed",
    "ignore_eos",
    "stop_token_ids",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
BOOLEAN_FIELDS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
LIST_FIELDS = ("stop_token_ids", "bad_words", "allowed_token_ids")
PROMPT_FIELDS = (
    "prompt",
    "prompt_token_ids",
    "request_id",
    "priority",
    "tenant",
    "ttft_target",
    "retention",
    *SAMPLING_FIELDS,
)


@dataclass(slots=True)
class Job:
    """A request of the workload, before its arrival."""

    request_id: str
    prompt: Callable[[int], Prompt]
    """Function from the vocabulary's size to the prompt, called at the arrival: a trace's prompts are generated one at
    a time."""
    params: SamplingParams
    place: str
    """Source of the prompt, for messages."""
    arrival_time: float = 0.0
    """Arrival in seconds after the start of the run."""
    priority: int = 0
    tenant: str = ""
    ttft_target: float | None = None
    """Target for the TTFT, in seconds; None: no target."""
    retention: float | None = None
    """Seconds after the request's end for which its prefix should stay cached."""


@dataclass(slots=True)
class Problem:
    """A prompt that cannot run."""

    request_id: str
    message: str


@dataclass(slots=True)
class Workload:
    """The jobs by arrival, and the prompts that could not become jobs."""

    jobs: list[Job]
    problems: list[Problem] = field(default_factory=list)
    is_trace: bool = False
    """Whether the workload is a trace. Prompts of a trace are generated, so texts are not shown. A refused request of a
    trace is only counted, and is not an error."""
    about_left_out: str = ""
    """Text about the number of rows of the trace that were left out, and the reasons; empty: no row was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling options of the command, as defaults for every prompt that does not set its own."""

    max_tokens: int | None
    """Maximum number of output tokens. None: built-in prompts and traced requests have their own output lengths; the
    maximum of other prompts is 64."""
    temperature: float
    top_p: float
    top_k: int
    ignore_eos: bool
    stop: Sequence[str] = ()

    def params(self, length: int | None = None, **own: Any) -> SamplingParams:
        """Sampling parameters of one request.

        Args:
            length: the output length of a built-in prompt or a trace; `max_tokens` can only shorten it.
            own: fields of `SamplingParams` that the request itself sets; they override the options.

        Raises:
            ValueError: a value is out of range.
        """
        from pointsman.engine import SamplingParams

        lengths = [each for each in (self.max_tokens, length) if each is not None]
        values: dict[str, Any] = {
            "max_tokens": min(lengths, default=64),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop,
        }
        return SamplingParams(**(values | own))


def demo_workload(sampling: Sampling) -> Workload:
    """The built-in prompts, which all arrive at the start."""
    return _workload_of_texts([(text, length, "the built-in prompts") for text, length in DEMO_PROMPTS], sampling)


def text_workload(prompts: Sequence[str], sampling: Sampling) -> Workload:
    """The prompts from the command line."""
    return _workload_of_texts([(text, None, "--prompt") for text in prompts], sampling)


def prompts_workload(path: str, sampling: Sampling) -> Workload:
    """The prompts of a file; "-" is standard input.

    A file whose first line is a JSON object is read as JSON lines. In any other file each line is a prompt, except
    blank lines.

    Raises:
        CommandError: the file cannot be read, or has no prompt in it.
    """
    lines = list(_read_lines(path))
    if not lines:
        raise CommandError(f'{path} has no prompts; write one prompt per line, or JSON lines with a field "prompt"')
    if not lines[0][1].lstrip().startswith("{"):
        return _workload_of_texts([(text, None, f"{path}, line {number}") for number, text in lines], sampling)
    workload = Workload(jobs=[])
    taken: set[str] = set()
    for number, text in lines:
        place = f"{path}, line {number}"
        request_id = f"line-{number}"
        try:
            fields = _parse_prompt_line(text)
            request_id = fields.get("request_id", request_id)
            if request_id in taken:
                raise ValueError(f"request_id {request_id!r} is already used by an earlier line; choose another id")
            job = _make_job(request_id, fields, place, sampling)
        except ValueError as error:
            workload.problems.append(Problem(request_id, f"{place}: {shown(str(error), MAX_MESSAGE)}"))
        else:
            taken.add(request_id)
            workload.jobs.append(job)
    return workload


def trace_workload(path: str, speed: float, limit: int | None, seed: int, sampling: Sampling) -> Workload:
    """The requests of a trace, with their lengths and shared prefixes.

    Args:
        path: a trace of any format that `read_trace` reads.
        speed: factor by which requests arrive faster than recorded; 0: all requests arrive at the start.
        limit: maximum number of requests, from the first on; None: all requests.
        seed: seed of the generated tokens.
        sampling: sampling options; `max_tokens` shortens the traced outputs, which EOS and stop strings never end.

    Raises:
        CommandError: the trace cannot be read, or none of its requests has output.
    """
    try:
        requests = read_trace(path, limit=limit)
        found = served(requests, path)
    except OSError as error:
        raise CommandError(f"cannot read the trace {path}: {error.strerror}") from None
    except TraceError as error:
        raise CommandError(str(error)) from None
    workload = Workload([], is_trace=True, about_left_out=about_left_out(found.num_rows, found.left_out))
    for index, request in enumerate(requests):
        if not request.num_output_tokens:
            continue
        workload.jobs.append(
            Job(
                request_id=f"trace-{index}",
                prompt=_generate_prompt(request, seed, index),
                params=sampling.params(request.num_output_tokens, ignore_eos=True, stop=()),
                place=f"{path}, request {index}",
                arrival_time=request.arrival_time / speed if speed else 0.0,
            )
        )
    return workload


def _generate_prompt(request: TraceRequest, seed: int, index: int) -> Callable[[int], Prompt]:
    return lambda vocab_size: prompt_token_ids(request, vocab_size, seed, index).tolist()


def _workload_of_texts(prompts: Sequence[tuple[str, int | None, str]], sampling: Sampling) -> Workload:
    """The workload of prompts given as (text, max_tokens or None, place)."""
    workload = Workload(jobs=[])
    for index, (text, length, place) in enumerate(prompts):
        request_id = f"prompt-{index}"
        try:
            _check_text(text)
        except ValueError as error:
            workload.problems.append(Problem(request_id, f"{place}: {error}"))
        else:
            workload.jobs.append(Job(request_id, _constant_prompt(text), sampling.params(length), place))
    return workload


def _check_text(text: str) -> None:
    if not text:
        raise ValueError("the prompt is empty; write at least one character")
    _check_unicode("the prompt", text)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair in JSON, or bytes of another encoding as an argument
        raise ValueError(f"{name} is not Unicode text at character {error.start}; write it in UTF-8") from None


def _constant_prompt(prompt: Prompt) -> Callable[[int], Prompt]:
    return lambda vocab_size: prompt


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line that is not blank."""
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else BufferedReader(open_input(path)) as file:
            for number, line in enumerate(read_text_lines(file), start=1):
                if (stripped := line.rstrip("\r\n")) and not stripped.isspace():
                    yield number, stripped
    except OSError as error:
        raise CommandError(f"cannot read the prompts {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path}, {error}") from None


def _parse_prompt_line(text: str) -> dict[str, Any]:
    """The fields of one JSON line; unknown fields and the id are checked."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f'the line is a JSON {type(fields).__name__}; write an object with a field "prompt"')
    if unknown := [name for name in fields if name not in PROMPT_FIELDS]:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(PROMPT_FIELDS)}")
    request_id = fields.get("request_id", "")
    if not isinstance(request_id, str) or ("request_id" in fields and not request_id):
        raise ValueError(f"request_id is {request_id!r}; it must be a non-empty string")
    _check_unicode("the request_id", request_id)
    return fields


def _make_job(request_id: str, fields: dict[str, Any], place: str, sampling: Sampling) -> Job:
    if ("prompt" in fields) == ("prompt_token_ids" in fields):
        raise ValueError('the line must have exactly one of the fields "prompt" and "prompt_token_ids"')
    prompt = fields.get("prompt", fields.get("prompt_token_ids"))
    if "prompt" in fields and not isinstance(prompt, str):
        raise ValueError(f'"prompt" is {prompt!r}; it must be a string')
    if "prompt_token_ids" in fields and not (
        isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    ):
        raise ValueError('"prompt_token_ids" must be a list of integers')
    if isinstance(prompt, str):
        _check_text(prompt)
    elif not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    priority = fields.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f'"priority" is {priority!r}; it must be an integer (smaller: more urgent)')
    tenant, target = fields.get("tenant", ""), fields.get("ttft_target")
    if not isinstance(tenant, str):
        raise ValueError(f'"tenant" is {tenant!r}; it must be a string')
    if target is not None and not (_is_finite(target) and target > 0):
        raise ValueError(f'"ttft_target" is {target!r}; it must be a number of seconds above 0')
    retention = fields.get("retention")
    if retention is not None and not (_is_finite(retention) and retention >= 0):
        raise ValueError(f'"retention" is {retention!r}; it must be a number of seconds, at least 0')
    own = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    for name in BOOLEAN_FIELDS:
        if not isinstance(own.get(name, False), bool):
            raise ValueError(f'"{name}" is {own[name]!r}; it must be true or false')
    for name in LIST_FIELDS:
        if not isinstance(own.get(name, []), list):
            raise ValueError(f'"{name}" is {own[name]!r}; it must be a list')
    if "logit_bias" in own:
        own["logit_bias"] = _token_ids_as_keys(own["logit_bias"])
    stop = own.get("stop", [])
    if not isinstance(stop, (str, list)):
        raise ValueError(f'"stop" is {stop!r}; it must be a string or a list of strings')
    return Job(
        request_id,
        _constant_prompt(prompt),
        sampling.params(**own),
        place,
        priority=priority,
        tenant=tenant,
        ttft_target=target,
        retention=retention,
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _token_ids_as_keys(bias: Any) -> dict[int, Any]:
    """`bias` with its keys converted to integers, because JSON keys are strings."""
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except (AttributeError, ValueError):
        raise ValueError(f'"logit_bias" is {bias!r}; it must be an object from token ids to numbers') from None
