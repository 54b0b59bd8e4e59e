"""Checks the values of trace files. A wrong value raises `Broken`; `read.py` adds the file's name to the error."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from pointsman.files import represented, shown
from pointsman.traces.requests import MAX_HASH_ID, MAX_TOKENS, MeasuredRequest, TraceRequest

MAX_NUMBER = 1e20
"""Largest absolute value of a number in a trace; large enough for a timestamp in nanoseconds since 1970."""


class Broken(Exception):
    """A wrong value or line. The readers add the line or field to the message, and `read.py` adds the file."""


def make_measured(request: TraceRequest, request_id: str, first_token: float, last_token: float) -> MeasuredRequest:
    """Create a measured request, queued at its arrival time, after a check that its times are in order.

    Raises:
        Broken: a token came before the request or before an earlier token.
    """
    queued = request.arrival_time
    if first_token < queued:
        raise Broken(
            f"the first token came at {first_token!r}, before its request arrived at {queued!r}; use times of one clock"
        )
    if last_token < first_token:
        raise Broken(f"the last token came at {last_token!r}, before the first at {first_token!r}; correct the times")
    return MeasuredRequest(request, request_id, queued, first_token, last_token)


def parse_json_object(line: str) -> dict[str, Any]:
    """Parse a line that must be one JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise Broken(f"not JSON ({error}): {shown(line)!r}") from None
    if not isinstance(value, dict):
        raise Broken(f"not a JSON object: {shown(line)!r}")
    return value


def get_field(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise Broken(f'the field "{name}" is missing')
    return fields[name]


def check_tokens(name: str, value: object, minimum: int) -> int:
    """Return `value` after a check that it is a number of tokens: an integer from `minimum` to `MAX_TOKENS`. `name`:
    name of the field, for the error message."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Broken(f"{name} is {represented(value)}; it must be a whole number")
    if not minimum <= value <= MAX_TOKENS:
        raise Broken(f"{name} is {value}; it must be between {minimum} and {MAX_TOKENS}")
    return value


def check_integer(name: str, value: object) -> int:
    """Return `value` after a check that it is an integer from -2**62 to 2**62. `name`: name of the field, for the error
    message."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_HASH_ID:
        raise Broken(f"{name} is {represented(value)}; it must be a whole number of at most 2**62")
    return value


def parse_integer(text: str) -> int | str:
    """The integer that `text` represents, or `text` itself, which the error message of `check_tokens` then shows."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def check_number(name: str, value: object) -> float:
    """Return `value` as a float after a check that its absolute value is at most `MAX_NUMBER`, so that squares and
    quotients are finite too. `name`: name of the field, for the error message."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER:
        return float(value)
    raise Broken(f"{name} is {represented(value)}; it must be a finite number of at most {MAX_NUMBER:g}")


def parse_seconds(text: str) -> float:
    try:
        return check_number("timestamp", float(text))
    except ValueError:
        raise Broken(f"timestamp is {represented(text)}; it must be a number of seconds") from None


def parse_date_time(text: str) -> float:
    """Seconds since 1970, to the microsecond, of a date and time. A time without a UTC offset is read as UTC, as only
    differences matter."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Broken(f"timestamp is {represented(text)}; expected a form like 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
