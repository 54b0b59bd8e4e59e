"""Converts a film to a scene: the same requests at the same times under the same settings, for what-if questions.

A film has no prompt tokens, so the scene has no shared prefixes. A request that was unfinished at the film's end gets
the output length that it had reached there. The duration of a step is fitted to the film, as a constant plus a time for
each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.observe.film_format import FilmError, Op
from pointsman.web.film import Film
from pointsman.web.scene import Abortion, Arrival, Input, Scene
from pointsman.web.timeline import timeline_of

_ALONE: Mapping[str, Any] = {
    "max_steps_in_flight": 1,
    "num_draft_tokens": 0,
    "draft_table": (),
    "pad_first_decodes": False,
    "preemption_mode": "recompute",
    "kv_load_timeout": None,
    "kv_load_failure_policy": "recompute",
    "enable_kv_cache_events": False,
    "count_common_prefix": False,
    "log_request_events": False,
}
"""Settings of a scheduler without drafts, without a connector and without steps in flight: a scene can have none of
these."""


class Remade(NamedTuple):
    """A scene made from a film."""

    scene: Scene
    num_left_out: int
    """Number of requests of the film that `scene` lacks, because they arrived after the last request of the scene."""


def remake(film: Film, max_requests: int, max_prompt_tokens: int) -> Remade:
    """The scene of a film, with its first requests.

    Args:
        max_requests: maximum number of requests.
        max_prompt_tokens: maximum number of tokens of all prompts together.

    Raises:
        FilmError: this version lacks the film's settings, or a policy of the film was an object without a name.
    """
    known = {field.name for field in fields(SchedulerConfig)}
    given = {name: value for name, value in film.header["config"].items() if name in known}
    try:
        config = SchedulerConfig(**{**given, **_ALONE})
    except (ConfigError, TypeError) as error:
        raise FilmError(f"the film's settings cannot be used in a sandbox: {error}") from None
    per_step, per_token = _fit_step_seconds(film)
    inputs = _scene_inputs(film)
    arrivals = [each for each in inputs if isinstance(each, Arrival)]
    kept: set[str] = set()
    num_tokens = 0
    for each in sorted(arrivals, key=lambda each: each.at)[:max_requests]:
        num_tokens += each.num_prompt_tokens
        if num_tokens > max_prompt_tokens:
            break
        kept.add(each.request_id)
    chosen = tuple(each for each in inputs if each.request_id in kept)
    scene = Scene(config, chosen, seconds_per_step=per_step, seconds_per_token=per_token)
    return Remade(scene, len(arrivals) - len(kept))


def _scene_inputs(film: Film) -> list[Input]:
    generated, aborted = _request_ends(film)
    found: list[Input] = []
    names: set[str] = set()
    for number, each in enumerate(film.requests):
        name, again = each.request_id, 2
        while name in names:  # an id may be reused once its request has finished
            name, again = f"{each.request_id}#{again}", again + 1
        names.add(name)
        arrival = Arrival(
            name,
            max(1, each.num_prompt_tokens),
            max(1, generated.get(number, 1)) + (number in aborted),
            max(0.0, each.arrival),
            priority=each.priority,
            tenant=each.tenant or "",
            max_tokens=max(1, each.max_tokens),
        )
        found.append(arrival)
        if number in aborted:
            found.append(Abortion(name, max(arrival.at, aborted[number])))
    return found


def _request_ends(film: Film) -> tuple[dict[int, int], dict[int, float]]:
    """Two mappings by request number: the number of tokens that the request generated, and the time at which it was
    aborted."""
    reasons = film.header["names"]["finish_reasons"]
    generated: dict[int, int] = {}
    aborted: dict[int, float] = {}
    if film.frames:
        last = film.state_at(len(film.frames) - 1)
        generated = {number: one.num_generated_tokens for number, one in last.requests.items()}
    for event in film.events(0, None):
        if event.op is Op.FINISHED and event.request is not None:
            generated[event.request] = event.fields["generated"]
            if reasons[event.fields["reason"]] == "abort":
                aborted[event.request] = event.time
    return generated, aborted


def _fit_step_seconds(film: Film) -> tuple[float, float]:
    """The constant seconds of a step, and the seconds added by each token of the step. They are fitted by least squares
    to the steps that were followed immediately by another step."""
    plain = Scene(SchedulerConfig(num_blocks=1, max_model_len=1))
    curves, _ = timeline_of(film)
    count = curves.num_steps[:-1]
    tokens = (curves.num_prefill_tokens + curves.num_decode_tokens)[:-1] / np.maximum(count, 1)
    seconds = np.diff(curves.time) / np.maximum(count, 1)
    is_busy = (tokens > 0) & (seconds > 0)
    for _ in range(3):  # each round drops the steps that were followed by a pause
        if np.count_nonzero(is_busy) < 2:
            return plain.seconds_per_step, plain.seconds_per_token
        columns = np.stack([np.ones_like(tokens), tokens], axis=1)
        fit = np.linalg.lstsq(columns[is_busy], seconds[is_busy], rcond=None)[0]
        per_step, per_token = max(float(fit[0]), 1e-4), max(float(fit[1]), 0.0)
        is_busy &= seconds <= 3 * (per_step + per_token * tokens)
    return per_step, per_token
