"""Features of a simulated engine from options: drafts, and the cost of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pointsman.cli.durations import time_or_share
from pointsman.cli.errors import CommandError
from pointsman.core import SchedulerConfig
from pointsman.sim.features import Features
from pointsman.sim.speculation import Speculation, parse_acceptance

_OF_DRAFTS = ("acceptance", "drafter_time", "draft_table")


def features_of_options(
    options: Mapping[str, Any],
    config: SchedulerConfig,
    measured: Speculation | None = None,
    measured_adapter_share: float = 0.0,
) -> Features:
    """The features that the options describe.

    Args:
        options: the given options, by name.
        config: the configuration of the scheduler.
        measured: the drafts of the engine whose log was profiled; None: there is no profile, or its engine had none.
        measured_adapter_share: the `adapter_share` of the profile.

    Raises:
        CommandError: an option has no effect, or a value is wrong.
        SimulationError: the acceptance is missing, or impossible.
    """
    if not config.num_draft_tokens:
        for name in _OF_DRAFTS:
            if name in options:
                raise CommandError(
                    f"--{name.replace('_', '-')} has no effect without drafts; give --num-draft-tokens too"
                )
    if "adapter_time" in options and not config.max_loras:
        raise CommandError("--adapter-time has no effect without adapters; give --adapters too")
    adapter_share = measured_adapter_share
    if "adapter_time" in options:
        seconds, adapter_share = time_or_share("adapter_time", options["adapter_time"])
        if seconds:
            raise CommandError(f"--adapter-time is {options['adapter_time']!r}; give a share of a step, like 15%")
    found = Features(speculation=_speculation(options, config.num_draft_tokens, measured), adapter_share=adapter_share)
    found.check(config)
    return found


def _speculation(options: Mapping[str, Any], num_drafts: int, measured: Speculation | None) -> Speculation | None:
    if not num_drafts:
        return None
    seconds, share = time_or_share("drafter_time", options.get("drafter_time", "0%"))
    if "acceptance" in options:
        found = Speculation(acceptance=parse_acceptance(options["acceptance"], num_drafts))
    elif measured is not None:
        found = measured
    else:
        raise CommandError(
            f"--num-draft-tokens is {num_drafts}, and it is not known how many drafts are accepted; give --acceptance, "
            "like 0.7,0.5,0.3 or length:2.4, or a profile of a recording with drafts"
        )
    return replace(found, drafter_seconds=seconds, drafter_share=share, seed=options.get("seed", 0))


def features_text(features: Features, config: SchedulerConfig) -> str:
    """The features in words; empty if there are none."""
    parts = []
    if features.speculation is not None:
        drafts = features.speculation
        position = ", ".join(f"{each:.2g}" for each in drafts.acceptance[: config.num_draft_tokens])
        parts.append(
            f"at most {config.num_draft_tokens} drafts for each request and step, accepted with probability {position} "
            f"after the drafts before ({drafts.mean_length:.3g} tokens a step)"
        )
        if drafts.proposal:
            parts.append(f"proposed in {drafts.proposal[0]:.0%} of the steps of a request")
    if config.max_loras:
        parts.append(f"at most {config.max_loras} adapters in a step")
    return "; ".join(parts)
