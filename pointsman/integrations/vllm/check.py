"""Checks whether vLLM can run a model with this scheduler, from vLLM's configuration and layers of the model, without
loading its weights.

report = check("MODEL", ["--max-num-seqs", "64"])
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.errors import did_you_mean
from pointsman.files import represented
from pointsman.integrations.vllm.layers import Groups, LayersUnknown, groups_of, longest_request
from pointsman.integrations.vllm.layouts import core_groups
from pointsman.integrations.vllm.operation import problems_of_paths
from pointsman.integrations.vllm.settings import FLAGS, read_settings, scheduler_config
from pointsman.integrations.vllm.simulated import lacking_in_simulator
from pointsman.integrations.vllm.support import (
    GO_BACK,
    TESTED,
    UNTESTED,
    Refusal,
    check_recording,
    is_one_full_group,
    minor_version,
    problem_of_version,
    problems_of,
    untested_parts,
)
from pointsman.version import __version__

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

SCHEDULER_CLS = "pointsman.integrations.vllm.Scheduler"
OBSERVER_CLS = "pointsman.integrations.vllm.Observer"
_STAND_IN_BLOCKS = 1 << 20  # a stand-in: the real number of blocks is known once the weights are loaded


class CannotCheck(Exception):
    """vLLM is not installed, or rejects the options."""


@dataclass
class Report:
    """The findings of `check`."""

    version: str
    model: str
    problems: list[str] = field(default_factory=list)
    """Reasons why vLLM will not work with this scheduler, each with its remedy."""
    problems_of_vllm: list[str] = field(default_factory=list)
    """Reasons why vLLM will not work with any scheduler, each with its remedy."""
    unknown: str = ""
    """Reason why it is unknown whether vLLM will work with this scheduler; "": it is known."""
    not_run: list[str] = field(default_factory=list)
    """Parts of the configuration that this project's tests do not run."""
    command: str = ""
    """The command that starts vLLM with this configuration."""
    not_simulated: list[str] | None = None
    """Features that a recording by `Observer` would have and the simulator lacks; None: unknown."""
    kv_cache: str = ""
    """The properties of the KV cache that are known before the weights are loaded."""
    groups: list[str] = field(default_factory=list)
    """How the layers share the KV cache, and how many requests it holds."""
    knobs: dict[str, str] = field(default_factory=dict)
    """The scheduler's knobs with their values, each with the flag that sets it."""
    overruled: list[str] = field(default_factory=list)
    """Options that vLLM replaces by other values, each with this value."""
    is_on_cpu: bool = False
    """Whether vLLM runs on the CPU here, so that some values may differ on the machine that serves."""
    socket: str = ""

    @property
    def will_not_work(self) -> bool:
        return bool(self.problems or self.problems_of_vllm)

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"vLLM {self.version}: {self._version_status()}", f"model {self.model}"]
        if self.will_not_work:
            found.append("it will not work:")
            found += [f"  - {problem}" for problem in (*self.problems_of_vllm, *self.problems)]
            if not self.problems_of_vllm:
                found.append(f"  - or {GO_BACK}")
        elif self.unknown:
            found.append(
                f"it is not known whether the model will work, as its layers were not built here: {self.unknown}"
            )
            found.append(f"unsupported features are refused when vLLM starts: {self.command}")
        else:
            found.append(f"it will work: {self.command}")
        if self.not_run:
            found.append(f"not tested so far: {', '.join(self.not_run)}")
        if self.kv_cache:
            found.append(f"KV cache: {self.kv_cache}")
            found += [f"  {line}" for line in self.groups]
        if self.knobs:
            found.append("the scheduler's knobs:")
            width = max(map(len, self.knobs))
            found += [f"  {name:{width}}  {value}" for name, value in self.knobs.items()]
        found += self.overruled
        if self.knobs and self.is_on_cpu:
            found.append("these are the values on a CPU, as this machine has; they may differ on a machine with a GPU")
        if self.socket:
            found.append(f"pointsman explain: {self.socket}")
        if self.not_simulated is not None:
            lacks = ", ".join(self.not_simulated)
            found.append(
                "a recording by Observer: the simulator "
                + (f"cannot take it, as it lacks {lacks}" if lacks else "takes it (pointsman calibrate, vllm compare)")
            )
        return found

    def _version_status(self) -> str:
        tested = TESTED.get(minor_version(self.version))
        if tested:
            return f"Pointsman {__version__} supports it ({tested})"
        is_refused = any(isinstance(each, Refusal) and each.key == "version" for each in self.problems)
        return "not supported" if is_refused else f"not tested: {UNTESTED}"


def check(model: str, options: list[str], log: Path | None = None) -> Report:
    """Check a model and options of vLLM's command line.

    Args:
        model: name or path of the model, as on vLLM's command line.
        options: further options of vLLM's command line.
        log: path of the log of a vLLM that has started with these options; the log has the number of requests that fit
            into the KV cache.

    Raises:
        CannotCheck: vLLM is not installed here, rejects the options, or cannot read the model; or the log lacks the
            number.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CannotCheck(
            "vLLM is not installed in this Python environment; run this in the environment of vLLM, after: "
            "pip install pointsman"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    report = Report(
        vllm.__version__, model, command=shlex.join(["vllm", "serve", model, *_with_scheduler_cls(options)])
    )
    problem = problem_of_version(vllm.__version__, allows_untested=True)
    if problem is not None:
        report.problems.append(problem)
        return report
    from_log = None if log is None else _read_log(log)
    vllm_config, given = _make_vllm_config(model, options)
    problem = problem_of_version(vllm.__version__, allows_untested=_allows_untested(vllm_config))
    if problem is not None:
        report.problems.append(problem)
        return report
    groups: Groups | None = None
    try:
        groups = groups_of(vllm_config)
        report.groups += groups.lines()
    except LayersUnknown as unknown:
        report.unknown = str(unknown)
    report.problems += problems_of(vllm_config, None if groups is None else _as_kv_cache_config(groups))
    if groups is not None:
        report.not_simulated = lacking_in_simulator(
            vllm_config, _as_kv_cache_config(groups), vllm_config.cache_config.block_size
        )
    report.not_run = untested_parts(vllm_config)
    _read_knobs(report, vllm_config, groups)
    report.overruled = _overruled_options(given, vllm_config)
    report.is_on_cpu = vllm_config.device_config.device_type == "cpu"
    report.groups += _capacity_lines(vllm_config, groups, from_log)
    if groups is not None:
        _check_capacity(report, vllm_config, groups)
    return report


def _allows_untested(vllm_config: VllmConfig) -> bool:
    try:
        return read_settings(vllm_config.additional_config).untested_version
    except ConfigError:  # `_read_knobs` reports the error
        return False


def _read_log(path: Path) -> str:
    """The number of requests of maximum length that fit into the KV cache, from the log of a vLLM.

    Raises:
        CannotCheck: the log cannot be read, or lacks this number.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise CannotCheck(f"--log {path} cannot be read: {error.strerror}") from None
    found = re.findall(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", text)
    if not found:
        raise CannotCheck(
            f'--log {path} has no line with "Maximum concurrency": give the log of a vLLM that has started, at the '
            "level INFO"
        )
    length, requests = found[-1]
    return f"{float(requests):g} requests of {length} tokens fit, by the log"


def _capacity_lines(vllm_config: VllmConfig, groups: Groups | None, from_log: str | None) -> list[str]:
    """Lines of the report: the blocks of a request of the model's maximum length, and the number of such requests that
    fit."""
    lines = []
    length = vllm_config.model_config.max_model_len
    if groups is not None and groups.request_blocks:
        size = groups.request_blocks * groups.block_bytes / 2**20
        blocks = f"{groups.request_blocks} block{'s' * (groups.request_blocks > 1)}"
        lines.append(f"a request of {length:,} tokens takes at most {blocks}, {size:,.4g} MiB")
        num_blocks = _num_blocks(vllm_config, groups)
        if num_blocks is not None:
            fit = max(0, num_blocks - 1) / groups.request_blocks  # one block is vLLM's null block
            shown = f"{fit:.3g}" if fit < 100 else f"{fit:,.0f}"
            lines.append(f"{shown} such requests fit {num_blocks:,} blocks")
    if from_log is not None:
        lines.append(from_log)
    elif not (vllm_config.cache_config.kv_cache_memory_bytes or vllm_config.cache_config.num_gpu_blocks_override):
        lines.append(
            "how many requests fit is known from --kv-cache-memory-bytes, --num-gpu-blocks-override, or --log with the "
            "log of a vLLM that has started"
        )
    return lines


def _num_blocks(vllm_config: VllmConfig, groups: Groups) -> int | None:
    """Number of blocks of the pool, with vLLM's null block; None: it is known once vLLM has loaded the model."""
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks_override:
        return int(cache.num_gpu_blocks_override)
    return cache.kv_cache_memory_bytes // groups.block_bytes if cache.kv_cache_memory_bytes else None


def _check_capacity(report: Report, vllm_config: VllmConfig, groups: Groups) -> None:
    """Add to the report: that the pool is too small for a request of the model's maximum length."""
    model, needed = vllm_config.model_config, groups.request_blocks + 1  # one block is vLLM's null block
    num_blocks = _num_blocks(vllm_config, groups) if groups.request_blocks else None
    if num_blocks is None or num_blocks >= needed:
        return
    longest = longest_request(vllm_config, groups, num_blocks - 1)
    if getattr(model, "original_max_model_len", None) == -1:
        report.groups.append(f"vLLM lowers --max-model-len to {longest:,} tokens, the longest request that fits")
        return
    if vllm_config.cache_config.num_gpu_blocks_override:
        more = f"--num-gpu-blocks-override {needed}"
    else:
        more = f"--kv-cache-memory-bytes {needed * groups.block_bytes} (on a CPU: a larger VLLM_CPU_KVCACHE_SPACE)"
    shorter = f"give --max-model-len {longest}, or {more}" if longest else f"give {more}"
    report.problems_of_vllm.append(
        f"the KV cache of {num_blocks:,} blocks holds no request of more than {longest:,} tokens, and --max-model-len "
        f"is {model.max_model_len:,}, so vLLM does not start: {shorter}"
    )


def _make_vllm_config(model: str, options: list[str]) -> tuple[VllmConfig, dict[str, Any]]:
    """vLLM's configuration, constructed as in its server; and the options whose values are not their defaults."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _add_vllm_options(FlexibleArgumentParser(prog="pointsman vllm check"))

    plain: ArgumentParser = parser  # its members are Python's, not assumptions about vLLM

    def refuse(message: str) -> NoReturn:
        raise CannotCheck(_rejection(message, plain._option_string_actions)) from None

    plain.error = refuse  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            given = parser.parse_args(options)
    except SystemExit:
        raise CannotCheck("vLLM rejects these options: leave --help out") from None
    chosen = given.scheduler_cls
    if chosen not in (None, SCHEDULER_CLS, parser.get_default("scheduler_cls")):
        raise CannotCheck(
            f"--scheduler-cls is {chosen}, but this command checks only {SCHEDULER_CLS}: leave --scheduler-cls out"
            + (" (Observer is vLLM's own scheduler and needs no check)" if chosen == OBSERVER_CLS else "")
        )
    given.model = model
    changed = {name: value for name, value in vars(given).items() if value != plain.get_default(name)}
    try:
        return AsyncEngineArgs.from_cli_args(given).create_engine_config(), changed
    except Exception as error:  # the type of the error depends on the problem
        raise CannotCheck(f"vLLM cannot run {model} with these options: {_first_line(error)}") from error


_MAY_BE_OVERRULED = {
    "async_scheduling": "scheduler_config",
    "enable_chunked_prefill": "scheduler_config",
    "max_num_batched_tokens": "scheduler_config",
    "max_num_seqs": "scheduler_config",
    "enable_prefix_caching": "cache_config",
    "block_size": "cache_config",
    "kv_cache_memory_bytes": "cache_config",
}
"""Options that vLLM replaces by other values on some devices or for some models, each with the part of `VllmConfig`
that has the value."""


def _overruled_options(given: Mapping[str, Any], vllm_config: VllmConfig) -> list[str]:
    """A line of the report for each given option for which vLLM runs with another value."""
    lines = []
    for name, part in _MAY_BE_OVERRULED.items():
        value, used = given.get(name), getattr(getattr(vllm_config, part), name, None)
        if value is not None and used != value:
            lines.append(f"vLLM overrules {_as_option(name, value)} here, and runs with {_as_option(name, used)}")
    return lines


def _as_option(name: str, value: Any) -> str:
    """An option as on the command line: "--no-async-scheduling", "--block-size 16"."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed} {value}"


def _rejection(message: str, known: Iterable[str]) -> str:
    """The error about options that vLLM's parser rejects.

    Args:
        message: error of the parser.
        known: all options of the parser.
    """
    if found := re.match(r"unrecognized arguments: (-[^\s=]+)", message):
        return f"vLLM has no option {found[1]}; {did_you_mean(found[1], known)}vllm serve --help=all lists the options"
    found = re.fullmatch(
        r"argument ([^\s/]+)\S*: Value (.*) cannot be converted to <function loads .*", message, re.DOTALL
    )
    if found:
        option, value = found.groups()
        return (
            f"{option} is {represented(value)}, which is not JSON{_json_error(value)}; correct it, or check its quotes"
        )
    return f"vLLM rejects these options: {message}"


def _json_error(text: str) -> str:
    """What is wrong with a JSON text, in parentheses; "" if nothing is."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f" ({error.msg} at character {error.pos + 1})"
    return ""


def _with_scheduler_cls(options: list[str]) -> list[str]:
    """The options, with the option that selects this scheduler added."""
    is_given = any(option.partition("=")[0].replace("_", "-") == "--scheduler-cls" for option in options)
    return options if is_given else ["--scheduler-cls", SCHEDULER_CLS, *options]


def _add_vllm_options(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """`parser`, with all options of vLLM's server added."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(parser)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__


def _has_states(vllm_config: VllmConfig) -> bool:
    model = vllm_config.model_config
    return bool(getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False))


def _kv_groups_text(vllm_config: VllmConfig) -> str:
    """Text about the KV groups that the model's configuration shows; "": one group of full attention."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if _has_states(vllm_config):
        return f"states of some layers{_cached_states_text(vllm_config.cache_config)}"
    window = model.get_sliding_window() if hasattr(model, "get_sliding_window") else None
    chunk = getattr(model, "attention_chunk_size", None)
    if (window is None and chunk is None) or getattr(model, "disable_sliding_window", False):
        return ""
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    is_mixed = chunk is not None or len(kinds) > 1
    if kinds == {"full_attention"} or (is_mixed and getattr(scheduler, "disable_hybrid_kv_cache_manager", False)):
        return ""
    local = f"a sliding window of {window} tokens" if window is not None else f"chunks of {chunk} tokens"
    return f"{local} in {'some' if is_mixed else 'its'} layers"


def _cached_states_text(cache: CacheConfig) -> str:
    """Text about the positions at which the prefix cache keeps the states of layers (of Mamba, for example); "": it
    keeps none."""
    if getattr(cache, "mamba_cache_mode", "none") != "align":
        return ""
    unit = getattr(cache, "prefix_match_unit", None)
    if unit is not None:
        return f", cached where blocks end and every {unit} tokens where a prompt ends"
    return (
        ", cached where blocks end: shorter prompts find nothing in the prefix cache (vLLM makes the block at least as "
        "large as a state, often 500 to 900 tokens, when it loads the model; see --prefix-match-unit)"
    )


def _as_kv_cache_config(groups: Groups) -> Any:
    """A stand-in for vLLM's `KVCacheConfig` with these groups."""
    return SimpleNamespace(kv_cache_groups=groups.groups)


def _read_knobs(report: Report, vllm_config: VllmConfig, made: Groups | None) -> None:
    """Add to the report: the knobs, and the problems of knobs in `--additional-config`."""
    cache = vllm_config.cache_config
    blocks = cache.num_gpu_blocks_override
    size = getattr(cache, "block_size", None) or 16
    if made is not None and made.groups:
        size = math.lcm(*(group.kv_cache_spec.block_size for group in made.groups))
    try:
        settings = read_settings(vllm_config.additional_config, report.version)
        stand_in = SimpleNamespace(num_blocks=blocks or _STAND_IN_BLOCKS)
        config = scheduler_config(vllm_config, stand_in, size, settings.knobs, report.version)
    except ConfigError as error:
        report.problems.append(str(error))
        return
    sizes = set() if made is None else {group.kv_cache_spec.block_size for group in made.groups}
    of_size = "blocks" if len(sizes) > 1 else f"blocks of {size} tokens"
    blocks_of = f"{blocks} {of_size}" if blocks else f"{of_size}, as many as memory holds"
    has_states = _has_states(vllm_config)
    if made is None:
        groups, is_theirs = _kv_groups_text(vllm_config), has_states
        keeper = "vLLM's own KV manager" + ("" if has_states else " if their blocks differ in size")
    else:
        count, layout = len(made.groups), _as_kv_cache_config(made)
        groups = "" if not count or is_one_full_group(layout) else f"{count} group{'s' * (count > 1)}"
        groups += _cached_states_text(cache) if has_states else ""
        is_theirs = bool(groups) and core_groups(vllm_config, layout, config, size) is None
        keeper = "vLLM's own KV manager" if is_theirs else "Pointsman"
    report.kv_cache = blocks_of + (f", {groups}, kept by {keeper}" if groups else "")
    if is_theirs:
        try:
            check_recording(settings.record)
        except ConfigError as error:
            report.problems.append(str(error))
    report.problems += problems_of_paths(settings, vllm_config)
    report.knobs = _knobs(config, settings.knobs, has_blocks=bool(blocks))
    socket = settings.socket
    report.socket = "no socket" if socket == "" else f"--socket {socket or 'PATH, which vLLM logs at the start'}"


def _knobs(config: SchedulerConfig, own: Mapping[str, Any], *, has_blocks: bool) -> dict[str, str]:
    knobs = {}
    for name, value in config.to_dict().items():
        if name == "num_blocks" and not has_blocks:
            continue
        if FLAGS.get(name):
            knobs[name] = f"{value}  ({FLAGS[name]})"
        elif name in own:
            knobs[name] = f"{value}  (--additional-config)"
    return knobs
