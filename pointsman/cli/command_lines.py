"""Command lines that serve with a scheduler configuration: `pointsman serve`, and vLLM with this scheduler."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pointsman.cli.knobs import NO_LIMITS
from pointsman.cli.options import KNOBS
from pointsman.cli.scheduler_options import flag
from pointsman.core import SchedulerConfig
from pointsman.core.presets import SYSTEMS
from pointsman.engine.params.engine_args import with_prefill_gap
from pointsman.integrations.vllm.settings import FLAGS
from pointsman.integrations.vllm.settings import KNOBS as ADDITIONAL


def serve_command(model: str, config: SchedulerConfig, names: Iterable[str], others: Mapping[str, Any]) -> str:
    """The command line of `pointsman serve` with the number of KV blocks and the settings of `config`.

    Args:
        model: the model to serve.
        config: configuration of the scheduler.
        names: fields to give if they differ from the default; the two fields that depend on the device are always
            given.
        others: further options, by name.
    """
    plain = SchedulerConfig(num_blocks=1, max_model_len=1)
    knobs: dict[str, Any] = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
    }
    for name in names:
        value = getattr(config, name)
        if name in KNOBS and name not in knobs and value is not None and value != getattr(plain, name):
            knobs[name] = value
    if not config.token_limits and "token_limits" in with_prefill_gap(knobs):
        knobs["token_limits"] = (NO_LIMITS,)
    size = ["--num-blocks", str(config.num_blocks), "--block-size", str(config.block_size)]
    return shlex.join(["pointsman", "serve", "--model", model, *size, *_as_flags(others), *_as_flags(knobs)])


def vllm_command(
    model: str, config: SchedulerConfig, names: Iterable[str], others: Mapping[str, Any], preset: str
) -> str:
    """The command line of `vllm serve` with the settings of `config`. It selects this scheduler if vLLM itself lacks
    one of the settings.

    Args:
        model, config, names, others: see `serve_command`.
        preset: the preset on which the settings are based.
    """
    native, additional = _settings_for_vllm(config, names, preset)
    command = ["vllm", "serve", model, *_as_flags(others), *native]
    if additional is not None:
        command += ["--scheduler-cls", "pointsman.integrations.vllm.Scheduler"]
        command += ["--additional-config", json.dumps({"pointsman": additional})]
    return shlex.join(command)


def change_commands(model: str, config: SchedulerConfig, base: SchedulerConfig) -> tuple[str, str] | None:
    """The command lines of `vllm serve` with this scheduler, and of `pointsman serve`. They have only the settings that
    differ from `base`, to be added to a complete command line. None: no setting of either command differs."""
    names = [field.name for field in fields(config) if getattr(config, field.name) != getattr(base, field.name)]
    changed = {name: getattr(config, name) for name in names}
    ours = {name: value for name, value in changed.items() if value is not None and name in KNOBS}
    if changed.get("token_limits") == ():
        ours["token_limits"] = (NO_LIMITS,)
    native = {FLAGS[name]: value for name, value in changed.items() if FLAGS.get(name)}
    if "num_blocks" in changed:
        native[FLAGS["num_blocks"]] = config.num_usable_blocks + 1  # vLLM keeps one block for itself
    flags = _as_flags({flag.removeprefix("--").replace("-", "_"): value for flag, value in native.items()})
    additional = {name: value for name, value in changed.items() if name in ADDITIONAL}
    if not ours and not flags and not additional:
        return None
    vllm = ["vllm", "serve", model, *flags, "--scheduler-cls", "pointsman.integrations.vllm.Scheduler"]
    if additional:
        vllm += ["--additional-config", json.dumps({"pointsman": additional})]
    return shlex.join(vllm), shlex.join(["pointsman", "serve", "--model", model, *_as_flags(ours)])


def _settings_for_vllm(
    config: SchedulerConfig, names: Iterable[str], preset: str
) -> tuple[list[str], dict[str, Any] | None]:
    """Flags of vLLM, and the object in --additional-config for settings that vLLM itself lacks; None: no object is
    needed."""
    base = preset if preset in SYSTEMS else "default"
    of_preset = SchedulerConfig.preset(base, num_blocks=1, max_model_len=1)
    flags = {"max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
    additional: dict[str, Any] = {}
    for name in names:
        value = getattr(config, name)
        if name in flags or value == getattr(of_preset, name):
            continue
        if name in FLAGS:
            flags[FLAGS[name].removeprefix("--").replace("-", "_")] = value
        elif name in ADDITIONAL:
            additional[name] = value
    found = _as_flags(flags)
    if additional.get("order") == "priority-by-arrival" and base == "vllm":
        del additional["order"]  # as vLLM's own scheduler does
        found += ["--scheduling-policy", "priority"]
    if base == "vllm" and not additional:
        return found, None
    return found, {"preset": base, **additional}


def _as_flags(values: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        option = flag(name)
        if isinstance(value, tuple):
            found += [part for each in value for part in (option, str(each))]
        elif isinstance(value, bool):
            found.append(option if value else f"--no-{option.removeprefix('--')}")
        else:
            found += [option, f"{value}"]
    return found
