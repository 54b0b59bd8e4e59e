"""Whether vLLM can run a model with this scheduler, from vLLM's own configuration of it, without loading its weights.

report = check("MODEL", ["--max-num-seqs", "64"])
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.integrations.vllm.settings import FLAGS, read_settings, scheduler_config
from pointsman.integrations.vllm.support import (
    GO_BACK,
    TESTED,
    UnsupportedVLLM,
    check_recording,
    check_version,
    minor_version,
    problems_of,
    untested_parts,
)
from pointsman.version import __version__

SCHEDULER_CLS = "pointsman.integrations.vllm.Scheduler"
_STAND_IN_BLOCKS = 1 << 20  # the real number is known when the weights are loaded


class CannotCheck(Exception):
    """vLLM is not installed, or rejects the options."""


@dataclass
class Report:
    """The findings of `check`."""

    version: str
    model: str
    problems: list[str] = field(default_factory=list)
    """Why it will not work, each with its remedy."""
    not_run: list[str] = field(default_factory=list)
    """Parts of the configuration that this project's tests do not run."""
    kv_cache: str = ""
    """What is known about the KV cache before the weights are loaded."""
    knobs: dict[str, str] = field(default_factory=dict)
    """The scheduler's knobs with their values, each with the flag that sets it."""
    socket: str = ""

    def lines(self) -> list[str]:
        """The report as text."""
        found = [f"vLLM {self.version}: {self._of_version()}", f"model {self.model}"]
        if self.problems:
            found.append("it will not work:")
            found += [f"  - {problem}" for problem in self.problems]
            found.append(f"  - or {GO_BACK}")
        else:
            found.append(f"it will work: vllm serve {self.model} --scheduler-cls {SCHEDULER_CLS}")
        if self.not_run:
            found.append(f"not tested so far: {', '.join(self.not_run)}")
        if self.kv_cache:
            found.append(f"KV cache: {self.kv_cache}")
        if self.knobs:
            found.append("the scheduler's knobs:")
            width = max(map(len, self.knobs))
            found += [f"  {name:{width}}  {value}" for name, value in self.knobs.items()]
        if self.socket:
            found.append(f"questions: {self.socket}")
        return found

    def _of_version(self) -> str:
        tested = TESTED.get(minor_version(self.version))
        return f"Pointsman {__version__} supports it ({tested})" if tested else "not supported"


def check(model: str, options: list[str]) -> Report:
    """Check a model and options of vLLM's command line.

    Raises:
        CannotCheck: vLLM is not installed here, rejects the options, or cannot read the model.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CannotCheck(
            "vLLM is not installed in this Python environment; run this in the environment of vLLM, after: "
            "pip install pointsman"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    report = Report(vllm.__version__, model)
    try:
        check_version(vllm.__version__)
    except UnsupportedVLLM as error:
        report.problems.append(str(error))
        return report
    vllm_config = _vllm_config(model, options)
    report.problems += problems_of(vllm_config, None)
    report.not_run = untested_parts(vllm_config, vllm.__version__)
    _read_knobs(report, vllm_config)
    return report


def _vllm_config(model: str, options: list[str]) -> Any:
    """vLLM's configuration, constructed as in its server."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _parser(FlexibleArgumentParser(prog="pointsman vllm check"))
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words), contextlib.redirect_stdout(words):
            given = parser.parse_args(options)
    except SystemExit:
        said = words.getvalue().strip().splitlines() or ["--help"]
        raise CannotCheck(f"vLLM does not take these options: {said[-1]}") from None
    given.model = model
    try:
        return AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except Exception as error:  # its type depends on the problem
        raise CannotCheck(f"vLLM cannot run {model} with these options: {_first_line(error)}") from error


def _parser(parser: Any) -> Any:
    """All options of vLLM's server where they are available, otherwise those of its engine."""
    from vllm import AsyncEngineArgs

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # another version
        return AsyncEngineArgs.add_cli_args(parser)
    return make_arg_parser(parser)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__


def _has_states(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return bool(getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False))


def _groups(vllm_config: Any) -> str:
    """What the model's configuration shows of its groups of KV; "": one of full attention."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if _has_states(vllm_config):
        return f"states of some layers{_where_cached(vllm_config.cache_config)}"
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


def _where_cached(cache: Any) -> str:
    """Where the states of layers are cached for prefixes; "": nowhere."""
    if getattr(cache, "mamba_cache_mode", "none") != "align":
        return ""
    unit = getattr(cache, "prefix_match_unit", None)
    if unit is not None:
        return f", cached where blocks end and every {unit} tokens where a prompt ends"
    return (
        ", cached where blocks end: shorter prompts find nothing in the prefix cache (vLLM makes the block at least as "
        "large as a state, often 500 to 900 tokens, when it loads the model; see --prefix-match-unit)"
    )


def _read_knobs(report: Report, vllm_config: Any) -> None:
    """Read the knobs into the report, and problems of those in `--additional-config`."""
    cache = vllm_config.cache_config
    blocks = cache.num_gpu_blocks_override
    size = getattr(cache, "block_size", None) or 16
    try:
        settings = read_settings(vllm_config.additional_config)
        stand_in = SimpleNamespace(num_blocks=blocks or _STAND_IN_BLOCKS)
        config = scheduler_config(vllm_config, stand_in, size, settings.knobs)
    except ConfigError as error:
        report.problems.append(str(error))
        return
    blocks_of = f"{blocks} blocks of {size} tokens" if blocks else f"blocks of {size} tokens, as many as memory holds"
    groups = _groups(vllm_config)
    kept = f", {groups}, kept by vLLM's own KV manager" if groups else ""
    report.kv_cache = f"{blocks_of}{kept}; how the layers share it is known for certain when the weights are loaded"
    if groups:
        try:
            check_recording(settings.record)
        except ConfigError as error:
            report.problems.append(str(error))
    report.knobs = _knobs(config, settings.knobs, has_blocks=bool(blocks))
    socket = settings.socket
    report.socket = "no socket" if socket == "" else f"a socket, {socket or 'whose path is in the log at the start'}"


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
