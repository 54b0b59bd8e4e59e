"""The sandbox: a scheduler to experiment with, by adding requests, changing settings, stepping and undoing.

    sandbox = Sandbox()
    sandbox.do({"do": "add", "prompt": 64, "output": 20})
    sandbox.do({"do": "step", "count": 3})
    sandbox.do({"do": "settings", "settings": {"num_blocks": 4}})    # plays the same requests again
    sandbox.do({"do": "undo"})

The state is a `Scene`, which never changes: an action makes a new scene, which is played from its beginning. Undo plays
the previous scene. An impossible action raises `SandboxError`, and changes nothing.
"""

from __future__ import annotations

import base64
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pointsman.core import ConfigError, RequestStatus, SchedulerConfig
from pointsman.core.policy.registry import KINDS, check_policies, known
from pointsman.core.state.numbers import MAX_INT
from pointsman.web.as_test import as_test
from pointsman.web.scene import MAX_STEPS, Abortion, Arrival, Cast, Input, Played, Scene, Urgency, play
from pointsman.web.situations import SITUATIONS, Situation

MAX_REQUESTS = 500
"""Maximum number of requests of a scene."""
MAX_INPUTS = 1000
"""Maximum total number of requests, aborts and priority changes."""
MAX_TOKENS = 100_000
"""Maximum number of tokens of a prompt, or of an output."""
MAX_PROMPTS = 2_000_000
"""Maximum number of tokens of all prompts together."""
MAX_ID = 60
"""Maximum number of characters of an id, or of a tenant."""
MAX_SECONDS = 3600.0
"""Maximum arrival time, in seconds."""
MAX_UNDO = 200
"""Maximum number of actions that can be undone."""


class SandboxError(ValueError):
    """An action that is impossible; the message has the reason."""


class Setting(NamedTuple):
    """A setting that can be changed, with its valid values."""

    name: str
    """Name of the setting: a field of `SchedulerConfig`, or of `Scene`."""
    label: str
    kind: str
    """Kind of the values: "integer", "number", "flag", "choice", "policy" (one policy, or none if `optional`) or
    "policies" (any number of policies)."""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    policy: str = ""
    """Kind of the policies to choose from, if `kind` is "policy" or "policies"."""
    optional: bool = False
    """Whether the value may be None."""


SETTINGS = (
    Setting("num_blocks", "KV blocks in the pool", "integer", 1, 65_536),
    Setting("block_size", "tokens in a block", "integer", 1, 1024),
    Setting("max_num_batched_tokens", "token budget of a step", "integer", 1, 100_000),
    Setting("max_num_seqs", "maximum number of running requests", "integer", 1, 1024),
    Setting("max_model_len", "maximum length of a sequence, in tokens", "integer", 1, 200_000),
    Setting("batching", "batching", "choice", choices=("mixed", "static")),
    Setting("enable_chunked_prefill", "chunked prefill", "flag"),
    Setting("enable_prefix_caching", "prefix caching", "flag"),
    Setting(
        "long_prefill_token_threshold",
        "maximum prompt tokens of a request in a step; 0: no limit",
        "integer",
        0,
        100_000,
    ),
    Setting("watermark", "watermark, a share of the pool", "number", 0, 0.99),
    Setting("full_sequence_must_fit", "the whole known sequence must fit", "flag"),
    Setting("reserves", "further reserves", "policies", policy="reserve"),
    Setting("order", "order of the queue", "policy", policy="order"),
    Setting("victim", "victim when blocks run out", "policy", policy="victim", optional=True),
    Setting("eviction", "eviction of cached blocks", "policy", policy="eviction"),
    Setting("token_limits", "token limits", "policies", policy="limit"),
    Setting("seconds_per_step", "seconds of a step", "number", 0.0001, 10),
    Setting("seconds_per_token", "seconds of a token in it", "number", 0, 1),
)
"""The settings that can be changed in the sandbox. Other settings of an opened recording stay as recorded."""
_OF_THE_SCENE = frozenset({"seconds_per_step", "seconds_per_token"})
START = SchedulerConfig(num_blocks=32, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=128)
"""Configuration of a new sandbox: small, so that shortages are visible."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """A scene, and the action that made it."""

    scene: Scene
    what: str
    base: Scene
    """The scene whose settings the current settings are compared with: the first scene, or the scene at the last action
    "compare_from_here"."""
    situation: str | None = None


class Sandbox:
    """Holds a scene, and applies actions to it.

    Args:
        scene: scene to begin with; None: no requests, and `START`.
        commands: takes the current configuration and the one to compare with, and returns command lines by name:
            "change" sets the settings in which they differ, "all" sets every setting.
        about: text for the user about the source of the scene; "": no text.

    Raises:
        SandboxError: the scene exceeds the limits of a sandbox.
    """

    def __init__(
        self,
        scene: Scene | None = None,
        *,
        commands: Callable[[SchedulerConfig, SchedulerConfig], Mapping[str, str]] = lambda now, base: {},
        about: str = "",
    ) -> None:
        self._commands = commands
        self._about = about
        self._past: list[_Moment] = []
        self._future: list[_Moment] = []
        first = scene or Scene(START)
        self._now = _Moment(first, "begin", first)
        _check_size(first)
        self.played = self._play_scene(first)
        """The result of playing the current scene."""
        self._base_played: Played | None = None  # cache of the newest result of `before`

    @property
    def scene(self) -> Scene:
        """The current scene."""
        return self._now.scene

    # ------------------------------------------------------------------ actions

    def do(self, action: Mapping[str, Any]) -> None:
        """Perform the action in "do": add, abort, priority, step, run, settings, compare_from_here, situation, what_if,
        reset, clear, undo, redo.

        Raises:
            SandboxError: the action is impossible. Nothing has changed.
        """
        name = action.get("do")
        if name == "undo":
            return self._restore(self._past, self._future, "undo")
        if name == "redo":
            return self._restore(self._future, self._past, "do again")
        handlers: dict[str, tuple[Callable[..., _Moment], tuple[str, ...], tuple[str, ...]]] = {
            # The method that makes the next moment, its required arguments, and its optional arguments.
            "add": (
                self._add_request,
                ("prompt", "output"),
                ("id", "at", "like", "shared", "priority", "tenant", "max_tokens"),
            ),
            "abort": (self._abort_request, ("id",), ()),
            "priority": (self._set_priority, ("id", "priority"), ()),
            "step": (self._play_steps, (), ("count",)),
            "run": (self._play_to_the_end, (), ()),
            "settings": (self._change_settings, ("settings",), ()),
            "situation": (self._choose_situation, ("name",), ()),
            "what_if": (self._apply_what_if, (), ()),
            "compare_from_here": (self._compare_from_here, (), ()),
            "reset": (self._reset_scene, (), ()),
            "clear": (self._remove_requests, (), ()),
        }
        if not isinstance(name, str) or name not in handlers:
            raise SandboxError(f"do is {name!r}; choose one of {', '.join(handlers)}, undo, redo")
        handler, needed, others = handlers[name]
        arguments = {key: value for key, value in action.items() if key != "do" and value is not None}
        for key in needed:
            if key not in arguments:
                raise SandboxError(f"the action {name} needs the field {key}; give it")
        for key in arguments:
            if key not in needed + others:
                raise SandboxError(
                    f"the action {name} has no field {key}; its fields: {', '.join(needed + others) or 'none'}"
                )
        moment = handler(**arguments)
        played = self._play_scene(moment.scene)
        self._past = [*self._past, self._now][-MAX_UNDO:]
        self._future = []
        self._now, self.played = moment, played

    def _restore(self, source: list[_Moment], other: list[_Moment], what: str) -> None:
        if not source:
            raise SandboxError(f"there is nothing to {what}")
        moment = source[-1]
        played = self._play_scene(moment.scene)
        other.append(self._now)
        source.pop()
        self._now, self.played = moment, played

    def _play_scene(self, scene: Scene) -> Played:
        try:
            check_policies(scene.config)
            return play(scene)
        except ConfigError as error:
            raise SandboxError(str(error)) from None

    def _next_moment(self, what: str, **changes: Any) -> _Moment:
        """The next moment: the current scene with `changes` of its fields, to be played up to the current step."""
        kept = {"num_steps": self.played.num_steps, "to_the_end": False, "not_before": self.played.now}
        return replace(self._now, scene=replace(self.scene, **{**kept, **changes}), what=what)

    def _next_moment_with_input(self, what: str, given: Input) -> _Moment:
        moment = self._next_moment(what, inputs=(*self.scene.inputs, given))
        _check_size(moment.scene)
        return moment

    # ------------------------------------------------------------------ requests

    def _add_request(
        self,
        prompt: object,
        output: object,
        id: object = None,
        at: object = None,
        like: object = None,
        shared: object = None,
        priority: object = 0,
        tenant: object = None,
        max_tokens: object = None,
    ) -> _Moment:
        known = {each.request_id: each for each in self.scene.arrivals}
        name = _check_text("id", id) if id is not None else next(each for each in _new_names() if each not in known)
        if name in known:
            raise SandboxError(f"id is {name!r}, but another request has this id; choose another, or leave it out")
        now = self.played.now
        time = now if at is None else _check_number("at", at, 0, MAX_SECONDS)
        if time < now:
            raise SandboxError(
                f"at is {time:g} s, but the time is {now:g} s already; give at least {now:g}, or reset first"
            )
        num_prompt = _check_integer("prompt", prompt, 1, MAX_TOKENS)
        num_output = _check_integer("output", output, 1, MAX_TOKENS)
        num_shared = 0
        if like is not None:
            other = known.get(_check_text("like", like))
            if other is None:
                raise SandboxError(
                    f"like is {like!r}, but no request has this id; choose one of {_joined_names(known)}"
                )
            most = min(num_prompt, other.num_prompt_tokens + other.num_output_tokens - 1)
            num_shared = _check_integer("shared", most if shared is None else shared, 1, most)
        elif shared is not None:
            raise SandboxError(
                f"shared is {shared!r}, but has no effect without like; give the id of a request in like"
            )
        arrival = Arrival(
            name,
            num_prompt,
            num_output,
            time,
            None if like is None else str(like),
            num_shared,
            _check_integer("priority", priority, -MAX_INT, MAX_INT),
            "" if tenant is None else _check_text("tenant", tenant),
            None if max_tokens is None else _check_integer("max_tokens", max_tokens, 1, MAX_TOKENS),
        )
        return self._next_moment_with_input(f"add {name}", arrival)

    def _abort_request(self, id: object) -> _Moment:
        cast = self._unfinished_request("abort", id)
        name = cast.arrival.request_id
        if cast.request is not None:
            return self._next_moment_with_input(f"abort {name}", Abortion(name, self.played.now))
        if any(each.starts_like == name for each in self.scene.arrivals):
            raise SandboxError(f"another request shares the first tokens of {name}; remove this other request first")
        kept = tuple(each for each in self.scene.inputs if each.request_id != name)
        return self._next_moment(f"remove {name}", inputs=kept)

    def _set_priority(self, id: object, priority: object) -> _Moment:
        cast = self._unfinished_request("priority", id)
        name, value = cast.arrival.request_id, _check_integer("priority", priority, -MAX_INT, MAX_INT)
        if cast.request is None:
            raise SandboxError(
                f"{name} has not arrived; step to {cast.arrival.at:g} s first, or add it with this priority"
            )
        return self._next_moment_with_input(f"priority of {name}", Urgency(name, value, self.played.now))

    def _unfinished_request(self, what: str, id: object) -> Cast:
        cast = self.played.cast.get(_check_text("id", id))
        if cast is None:
            raise SandboxError(f"{what}: no request is called {id!r}; choose one of {_joined_names(self.played.cast)}")
        if cast.refusal is not None or (cast.request is not None and cast.request.status.is_finished):
            raise SandboxError(f"{what}: {cast.arrival.request_id} has finished; undo steps to restore it")
        return cast

    # ------------------------------------------------------------------ steps

    def _play_steps(self, count: object = 1) -> _Moment:
        number = _check_integer("count", count, 1, MAX_STEPS)
        self._check_step_is_possible()
        done = self.played.num_steps
        if done + number > MAX_STEPS:
            raise SandboxError(
                f"count is {number}, {done} steps are done, and the maximum is {MAX_STEPS:,}; give at most "
                f"{MAX_STEPS - done}, or reset"
            )
        return self._next_moment("step" if number == 1 else f"{number} steps", num_steps=done + number)

    def _play_to_the_end(self) -> _Moment:
        self._check_step_is_possible()
        return self._next_moment("run", to_the_end=True)

    def _check_step_is_possible(self) -> None:
        if self.played.problem is not None:
            raise SandboxError(f"a policy failed, so no step can follow: {self.played.problem}; change the settings")
        if self.played.is_over:
            raise SandboxError("there is no unfinished request; add a request, or reset")
        if self.played.num_steps >= MAX_STEPS:
            raise SandboxError(f"{MAX_STEPS:,} steps are done, which is the maximum; reset, or use fewer requests")

    def _reset_scene(self) -> _Moment:
        """Go back to step 0 of the scene: keep all its requests with their arrival times, and remove aborts and
        priority changes."""
        return self._next_moment("reset", inputs=tuple(self.scene.arrivals), num_steps=0, not_before=0.0)

    def _remove_requests(self) -> _Moment:
        """Remove all requests."""
        scene = replace(self.scene, inputs=(), num_steps=0, to_the_end=False, not_before=0.0)
        return _Moment(scene, "remove all requests", scene)

    # ------------------------------------------------------------------ settings

    def _change_settings(self, settings: object) -> _Moment:
        if not isinstance(settings, Mapping):
            raise SandboxError(f"settings is {settings!r}; give an object of settings and their values")
        scene = _with_settings(self.scene, settings)
        if _same_settings(scene, self.scene):
            raise SandboxError("the current settings already have these values; change one")
        return replace(self._now, scene=self._with_current_steps(scene), what="settings")

    def _with_current_steps(self, scene: Scene) -> Scene:
        """`scene`, to be played for as many steps as the current scene."""
        to_the_end = self.scene.to_the_end or (self.played.is_over and self.played.num_steps > 0)
        return replace(scene, num_steps=self.played.num_steps, to_the_end=to_the_end, not_before=0.0)

    def _compare_from_here(self) -> _Moment:
        """Make the current settings the settings to compare with."""
        if _same_settings(self._now.base, self.scene):
            raise SandboxError("the comparison already uses these settings; change one first")
        return replace(self._now, base=self.scene, what="compare from here")

    def _choose_situation(self, name: object) -> _Moment:
        situation = _find_situation(name)
        return _Moment(situation.scene, f"situation {situation.title}", situation.scene, situation.name)

    def _apply_what_if(self) -> _Moment:
        """Apply the change of settings that the situation proposes."""
        if self._now.situation is None:
            raise SandboxError("what_if needs a situation, whose change it applies; choose a situation first")
        return self._change_settings(_find_situation(self._now.situation).what_if)

    # ------------------------------------------------------------------ results

    def as_test(self) -> str:
        """Python code that makes the same calls as the played scene, and asserts its final state."""
        return as_test(self.played)

    def before(self) -> Played | None:
        """The current scene, played for the same number of steps under the settings to compare with; None: these are
        the current settings."""
        base = self._now.base
        if _same_settings(base, self.scene):
            return None
        scene = self._with_current_steps(_with_settings_of(self.scene, base))
        if self._base_played is None or self._base_played.scene != scene:
            self._base_played = self._play_scene(scene)
        return self._base_played

    def answer(self) -> dict[str, Any]:
        """The state of the sandbox for the page, JSON-ready; the film is in base 64."""
        played, now, before = self.played, self._now, self.before()
        ttft = {} if before is None else {name: cast.ttft for name, cast in before.cast.items()}
        return {
            "about": self._about,
            "settings": settings_of(self.scene),
            "requests": [_request_as_json(played, cast, ttft.get(name)) for name, cast in played.cast.items()],
            "figures": played.figures(),
            "before": None if before is None else before.figures(),
            "before_is_over": before is not None and before.is_over,
            "changed": _changed_settings(now.base, self.scene),
            "situation": now.situation,
            "is_over": played.is_over,
            "problem": played.problem or self._bound(),
            "undo": now.what if self._past else None,
            "redo": self._future[-1].what if self._future else None,
            "test": self.as_test(),
            "commands": dict(self._commands(self.scene.config, now.base.config)),
            "film": base64.b64encode(played.film).decode() if played.num_steps else None,
        }

    def _bound(self) -> str | None:
        if self.played.num_steps >= MAX_STEPS and not self.played.is_over:
            return f"{MAX_STEPS:,} steps are done, which is the maximum; reset, or use fewer requests"
        return None


def choices() -> dict[str, Any]:
    """The values that the page offers, JSON-ready: settings with their ranges, policies with their parameters,
    situations.

    Raises:
        ConfigError: an installed package's policy cannot be loaded.
    """
    return {
        "settings": [each._asdict() for each in SETTINGS],
        "policies": {
            kind: [
                {
                    "name": name,
                    "about": _first_paragraph(policy),
                    "parameters": [each._asdict() for each in policy.parameters],
                }
                for name, policy in known(kind).items()
            ]
            for kind in KINDS
        },
        "situations": [
            {"name": each.name, "title": each.title, "about": each.about, "what_if": each.what_if_text}
            for each in SITUATIONS
        ],
    }


def settings_of(scene: Scene) -> dict[str, Any]:
    """The values of a scene's `SETTINGS`; policies as text."""
    values = scene.config.to_dict()
    return {
        each.name: getattr(scene, each.name) if each.name in _OF_THE_SCENE else values[each.name] for each in SETTINGS
    }


def _same_settings(one: Scene, other: Scene) -> bool:
    return one.config == other.config and all(getattr(one, name) == getattr(other, name) for name in _OF_THE_SCENE)


def _with_settings_of(scene: Scene, base: Scene) -> Scene:
    return replace(scene, config=base.config, **{name: getattr(base, name) for name in _OF_THE_SCENE})


def _changed_settings(base: Scene, now: Scene) -> list[str]:
    """The settings that differ between two scenes, as text with both values."""
    before, after = settings_of(base), settings_of(now)
    return [
        f"{each.label} {_value_text(before[each.name])} → {_value_text(after[each.name])}"
        for each in SETTINGS
        if before[each.name] != after[each.name]
    ]


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "the default" if value is None else str(value)


def _with_settings(scene: Scene, given: Mapping[str, Any]) -> Scene:
    known_settings = {each.name: each for each in SETTINGS}
    for name in given:
        if name not in known_settings:
            raise SandboxError(f"no setting is called {name!r}; choose from {_joined_names(known_settings)}")
    values = {name: _check_value(known_settings[name], value) for name, value in given.items()}
    of_the_scene = {name: values.pop(name) for name in _OF_THE_SCENE & values.keys()}
    now = settings_of(scene)
    values = {name: value for name, value in values.items() if value != now[name]}  # a policy may be an object
    if values.get("full_sequence_must_fit") is False:
        values["count_owed_blocks"] = True  # undoes a preset's value, which has no effect then
    if values.get("enable_prefix_caching") is False:
        values["share_within_step"] = True
    try:
        return replace(scene, config=scene.config.replace(**values), **of_the_scene)
    except ConfigError as error:
        raise SandboxError(str(error)) from None


def _check_value(setting: Setting, value: Any) -> Any:
    name = setting.name
    if value is None and setting.optional:
        return None
    if setting.kind in ("integer", "number"):
        assert setting.low is not None and setting.high is not None
        if setting.kind == "integer":
            return _check_integer(name, value, int(setting.low), int(setting.high))
        return _check_number(name, value, setting.low, setting.high)
    if setting.kind == "flag" and not isinstance(value, bool):
        raise SandboxError(f"{name} is {value!r}; it must be true or false")
    if setting.kind == "choice" and value not in setting.choices:
        raise SandboxError(f"{name} is {value!r}; choose one of {', '.join(setting.choices)}")
    if setting.kind == "policy" and not isinstance(value, str):
        raise SandboxError(f"{name} is {value!r}; give a policy, as name or name:key=value,key=value")
    if setting.kind == "policies" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise SandboxError(f"{name} is {value!r}; give a list of policies, as name or name:key=value,key=value")
    return value


def _request_as_json(played: Played, cast: Cast, before: float | None) -> dict[str, Any]:
    arrival, request, scheduler = cast.arrival, cast.request, played.scheduler
    found: dict[str, Any] = {
        "id": arrival.request_id,
        "prompt": arrival.num_prompt_tokens,
        "output": arrival.num_output_tokens,
        "at": arrival.at,
        "like": arrival.starts_like,
        "shared": arrival.num_shared_tokens,
        "priority": arrival.priority,
        "tenant": arrival.tenant,
        "ttft": cast.ttft,
        "ttft_before": before,
        "longest_gap": cast.longest_gap,
        "computed": 0,
        "generated": 0,
        "preemptions": 0,
        "can_abort": True,
    }
    if request is None:
        return {**found, "state": "arrives", "why": f"arrives at {arrival.at:g} s"}
    is_finished = request.status.is_finished
    found |= {
        "computed": request.num_computed_tokens,
        "generated": request.num_output_tokens,
        "preemptions": request.num_preemptions,
        "priority": request.priority,
        "can_abort": not is_finished,
        "state": "refused" if cast.refusal is not None else request.status.value.partition("_")[0],
    }
    if cast.refusal is not None:
        return {**found, "why": cast.refusal}
    if is_finished:
        reason = request.finish_reason
        return {**found, "why": f"finished: {reason.value if reason is not None else ''}"}
    why = scheduler.explain(arrival.request_id)
    is_running_normally = why.reason is None and request.status is RequestStatus.RUNNING
    return {**found, "why": "" if is_running_normally else why.sentence}


def _find_situation(name: object) -> Situation:
    for each in SITUATIONS:
        if each.name == name:
            return each
    raise SandboxError(f"no situation is called {name!r}; choose one of {', '.join(each.name for each in SITUATIONS)}")


def _check_size(scene: Scene) -> None:
    arrivals = scene.arrivals
    prompts = sum(each.num_prompt_tokens for each in arrivals)
    for what, number, most in (
        ("requests", len(arrivals), MAX_REQUESTS),
        ("requests, aborts and priorities", len(scene.inputs), MAX_INPUTS),
        ("tokens of prompts", prompts, MAX_PROMPTS),
    ):
        if number > most:
            raise SandboxError(f"the scene has {number:,} {what}, and the maximum is {most:,}; remove some")


def _first_paragraph(policy: type) -> str:
    return " ".join((inspect.getdoc(policy) or "").split("\n\n")[0].split()).replace("`", "")


def _new_names() -> Any:
    """Yield names for new requests: A to Z, then A2 to Z2, and so on."""
    number = 1
    while True:
        yield from (f"{letter}{number if number > 1 else ''}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        number += 1


def _joined_names(names: Mapping[str, object]) -> str:
    found = list(names)
    return ", ".join(found[:20]) + (f" and {len(found) - 20} others" if len(found) > 20 else "") or "there are none"


def _check_integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SandboxError(f"{name} is {value!r}; it must be an integer between {low} and {high}")
    if not low <= value <= high:
        raise SandboxError(f"{name} is {value}; it must be between {low} and {high}")
    return value


def _check_number(name: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > MAX_INT or math.isnan(value):
        raise SandboxError(f"{name} is {value!r}; it must be a number between {low:g} and {high:g}")
    if not low <= value <= high:
        raise SandboxError(f"{name} is {value:g}; it must be between {low:g} and {high:g}")
    return float(value)


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_ID or not value.isprintable():
        raise SandboxError(f"{name} is {value!r}; it must be 1 to {MAX_ID} printable characters")
    return value
