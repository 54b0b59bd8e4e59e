"""Options for the knobs of the scheduler, made from their declarations in `core/config.py`.

A default that differs from `SchedulerConfig` is a rule of the engine or of the server. `engine/params/engine_args.py`
has these rules, and `SERVED_DEFAULTS` describes the defaults that are not numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from pointsman.core.config import scheduler_knobs
from pointsman.engine.params.engine_args import GPU_DEFAULTS, SCHEDULER_DEFAULTS

OPTIONS = {name: knob.option for name, knob in scheduler_knobs().items() if knob.option is not None}
"""The declaration of the command-line option of each knob that has one, by the name of the knob."""
NUMBERS_OR_WORDS = frozenset(name for name in OPTIONS if (knob := scheduler_knobs()[name]).words and int in knob.kinds)
"""Options whose value is an integer or a word."""
SERVED_DEFAULTS: Mapping[str, str] = {
    "num_blocks": "at most 1 GiB on a CPU; on a GPU what --gpu-memory-utilization leaves",
    "max_model_len": "the model's",
    "max_steps_in_flight": "1; 2 on a GPU without drafts",
    "token_limits": "none; for pointsman serve: prefill-gap, which the value none turns off",
}
"""Defaults of `pointsman generate` and `serve` in words, for knobs whose default is not one number for each device."""


def flag(name: str) -> str:
    """The command-line option of a knob or another setting, such as "--max-num-seqs"."""
    declared = OPTIONS[name].flag if name in OPTIONS else None
    return declared or f"--{name.replace('_', '-')}"


def knobs_of_panel(title: str) -> tuple[str, ...]:
    """The knobs in the panel `title` of a help page."""
    return tuple(name for name, option in OPTIONS.items() if option.panel == title)


def served_default(name: str) -> str:
    """The default of `pointsman serve` in words, on the CPU and on a GPU; "": none to mention."""
    if name in SERVED_DEFAULTS:
        return SERVED_DEFAULTS[name]
    default = default_in_words(name)
    cpu, gpu = (str(defaults.get(name, default)) for defaults in (SCHEDULER_DEFAULTS, GPU_DEFAULTS))
    return cpu if cpu == gpu else f"{cpu} on a CPU, {gpu} on a GPU"


def default_in_words(name: str) -> str:
    """The default of `SchedulerConfig` in words; "": none to mention."""
    words, value = OPTIONS[name].default, scheduler_knobs()[name].default
    if words is not None:
        return words
    if value in (MISSING, None, ()):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def served_options() -> dict[str, Any]:
    """The command-line options of all knobs for `pointsman generate` and `serve`, by the name of the knob."""
    return {name: _annotation(name, served_default(name)) for name in OPTIONS}


def simulated_options(defaults: Mapping[str, str]) -> dict[str, Any]:
    """The command-line options of the knobs that the simulator supports, by the name of the knob.

    Args:
        defaults: knob -> text of its default, for knobs whose default in the simulator differs from `SchedulerConfig`.
    """
    return {
        name: _annotation(name, defaults[name] if name in defaults else default_in_words(name))
        for name, option in OPTIONS.items()
        if option.is_simulated
    }


def _annotation(name: str, default: str) -> Any:
    """The annotation of the option for Typer. A value that is neither a number nor a flag is text, which `cli/knobs.py`
    parses."""
    knob, option = scheduler_knobs()[name], OPTIONS[name]
    kind: Any = str if knob.words else next((each for each in (bool, int, float) if each in knob.kinds), str)
    names, metavar = flag(name), option.metavar
    if kind is bool:
        names = f"{names}/--no-{names.removeprefix('--')}"
    elif kind is str and metavar is None:
        metavar = "NAME" if knob.policy is None else "POLICY"
    if knob.is_list_of_policies:
        kind = list[str]
    text = f"{option.help} [default: {default}]." if default else f"{option.help}."
    return Annotated[kind | None, typer.Option(names, metavar=metavar, help=text)]
