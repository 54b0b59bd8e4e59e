"""Support: finds unsupported versions and configurations of vLLM before anything runs, each with its remedy. Importable
without vLLM.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from pointsman.core import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it


class Refusal(str):
    """The reason for which a version or configuration is refused, and the remedy. docs/reference/vllm.md has a line for
    each `key`.

    Args:
        key: stable name of the reason.
        text: the reason and the remedy, for the user.
    """

    __slots__ = ("key",)

    key: str

    def __new__(cls, key: str, text: str) -> Self:
        made = super().__new__(cls, text)
        made.key = key
        return made


GO_BACK = "leave --scheduler-cls out to run vLLM's own scheduler"
ONE_GROUP = (
    "--disable-hybrid-kv-cache-manager, with which layers that attend within a window keep the KV of the whole context "
    "too, so that fewer requests fit"
)
"""Text of the remedy for models that have layers with attention windows or chunks besides layers with full
attention."""
TESTED = {
    "0.31": "run on a CPU",
    "0.32": "run on a CPU",
    "0.33": "its Python code run on a CPU, with the compiled parts of 0.32",
}
"""The supported minor versions of vLLM, oldest first, and how each was tested."""
NEWEST = [*TESTED][-1]


UNTESTED = (
    "no assumption about its interface is known to be broken, but its behaviour may have changed in ways that a "
    "comparison of interfaces does not show"
)
"""Text of the warning about an untested version of vLLM that runs because `--additional-config` allows it."""
MAX_SHOWN = 3
"""Maximum number of broken assumptions in an error; `pointsman vllm interface` lists all."""


class UnsupportedVLLM(RuntimeError):
    """This version of vLLM, or its configuration, is not supported. The message has the remedy."""


def minor_version(version: str) -> str:
    """The minor version: "0.32" for "0.32.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_tested(version: str) -> bool:
    return minor_version(version) in TESTED


def is_before(version: str, minor: str) -> bool:
    """Whether a version such as "0.32.0+cpu" is older than a minor version such as "0.33"."""
    return _numbers(version) < _numbers(minor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", minor_version(version)))


def problem_of_version(version: str, *, allows_untested: bool = False) -> Refusal | None:
    """Why the installed version of vLLM is not supported; None: it is supported. For an untested version this reads the
    sources, which takes seconds.

    Args:
        allows_untested: whether to accept an untested version if no assumption about it is known to be broken.
    """
    if is_tested(version):
        return None
    from pointsman.integrations.vllm.interface import NoVLLM, examine

    try:
        broken = [f"{each.expected} ({each.place})" for each in examine().broken]
    except NoVLLM:  # no vLLM is installed here; `version` is of another environment
        found = remedy = ""
    else:
        if allows_untested and not broken:
            return None
        found, remedy = _comparison_with_sources(broken)
    return Refusal(
        "version",
        f"vLLM {version} is installed, and pointsman.integrations.vllm supports {', '.join(TESTED)}, as vLLM's "
        f'scheduler interface changes between versions{found}: pip install "vllm=={NEWEST}.*"{remedy}',
    )


def _comparison_with_sources(broken: Sequence[str]) -> tuple[str, str]:
    """Two parts of an error message: the result of comparing our assumptions with vLLM's sources, and a remedy."""
    if not broken:
        remedy = ', or try it all the same with {"pointsman": {"untested_version": true}} in --additional-config'
        return " (no assumption about it is known to be broken)", remedy
    more = f" and {len(broken) - MAX_SHOWN} more" if len(broken) > MAX_SHOWN else ""
    shown = f"{', '.join(broken[:MAX_SHOWN])}{more}"
    return f" ({len(broken)} assumptions about it do not hold: {shown}; pointsman vllm interface lists all)", ""


def check_version(version: str, *, allows_untested: bool = False) -> None:
    """Check the version of vLLM; arguments as for `problem_of_version`.

    Raises:
        UnsupportedVLLM: the version is not supported.
    """
    problem = problem_of_version(version, allows_untested=allows_untested)
    if problem is not None:
        raise UnsupportedVLLM(f"{problem}, or {GO_BACK}")
    if not is_tested(version):
        logger.warning("vLLM %s was not tested with Pointsman: %s", version, UNTESTED)


def maker(kind: Any, *names: str, optional: Collection[str] = (), left: Collection[str] = ()) -> Callable[..., Any]:
    """A constructor of one of vLLM's records from the values of the fields `names`, in this order. Positional arguments
    take half the time of keyword arguments. Further fields are given by name.

    Args:
        kind: class of the records: a dataclass, or a msgspec structure.
        names: the fields given by position.
        optional: fields among `names`, or given by name, that some supported versions of vLLM lack; in these versions
            the field is omitted.
        left: fields that keep their defaults on purpose. `pointsman vllm interface` reads these names, and reports as
            new any other field with a default that our code does not set.

    Returns:
        `kind` itself; if the installed version orders the fields differently, a function that passes all values by
            name.
    """
    known = [field.name for field in fields(kind) if field.init] if is_dataclass(kind) else [*kind.__struct_fields__]
    if known[: len(names)] == list(names) and set(optional) <= set(known):
        return cast("Callable[..., Any]", kind)

    def make(*values: Any, **others: Any) -> Any:
        given = dict(zip(names, values, strict=True)) | others
        return kind(**{name: value for name, value in given.items() if name in known or name not in optional})

    return make


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Check vLLM's configuration.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`; None: not known yet, so the KV groups are not checked.

    Raises:
        UnsupportedVLLM: a part of the configuration is not supported; the message has every reason with its remedy.
    """
    problems = problems_of(vllm_config, kv_cache_config)
    if problems:
        raise UnsupportedVLLM(f"Pointsman's scheduler cannot run this: {'; '.join(problems)}; or {GO_BACK}")


def problems_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> list[Refusal]:
    """The unsupported parts of the configuration, each with its remedy; arguments as for `check_supported`."""
    problems = [*_model_problems(vllm_config), *_engine_problems(vllm_config)]
    if kv_cache_config is None:
        return problems
    return problems + kv_cache_problems(kv_cache_config) + _replay_problems(vllm_config, kv_cache_config)


def untested_parts(vllm_config: VllmConfig) -> list[str]:
    """Parts of the configuration that follow vLLM's interface but are not run by this project's tests."""
    parallel = vllm_config.parallel_config
    found = []
    if vllm_config.device_config.device_type != "cpu":
        found.append(f"a device of type {vllm_config.device_config.device_type} (only the CPU)")
    if vllm_config.use_v2_model_runner:
        found.append("vLLM's second model runner")
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        found.append(f"speculation by the method {speculation.method!r} (only 'ngram')")
    sizes = ("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size")
    return found + [f"{name} {getattr(parallel, name)}" for name in sizes if getattr(parallel, name, 1) > 1]


def _is_full(group: KVCacheGroupSpec) -> bool:
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    return bool(is_full_attention_spec(group.kv_cache_spec))


def _model_problems(vllm_config: VllmConfig) -> list[Refusal]:
    model = vllm_config.model_config
    problems: list[Refusal] = []
    if getattr(vllm_config, "is_mm_encoder_only", False):
        problems.append(
            Refusal(
                "mm-encoder-only",
                "an instance that runs the encoder alone is not supported: leave --mm-encoder-only out",
            )
        )
    manager = getattr(vllm_config, "ec_manager_config", None)
    if manager is not None and manager.encoder_cache_manager_cls is not None:
        problems.append(
            Refusal(
                "ec-manager",
                f"the encoder cache manager {manager.encoder_cache_manager_cls} would not be used: leave "
                "--ec-manager-config out",
            )
        )
    if getattr(model, "is_diffusion", False):
        problems.append(
            Refusal(
                "diffusion",
                "diffusion models are not supported: serve a model that generates one token after the other",
            )
        )
    return problems


def _engine_problems(vllm_config: VllmConfig) -> list[Refusal]:
    problems: list[Refusal] = []
    if vllm_config.kv_transfer_config is not None:
        problems.append(Refusal("kv-connector", "KV connectors are not supported: leave --kv-transfer-config out"))
    if vllm_config.ec_transfer_config is not None:
        problems.append(
            Refusal("ec-connector", "encoder-cache connectors are not supported: leave --ec-transfer-config out")
        )
    aux_output = getattr(vllm_config, "aux_output_config", None)
    if aux_output is not None and aux_output.enabled:
        problems.append(
            Refusal("aux-outputs", "auxiliary outputs (routed experts) are not supported: do not enable them")
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            problems.append(
                Refusal(
                    "context-parallelism", f"{name} is {size}, and context parallelism is not supported: leave it at 1"
                )
            )
    scheduler = vllm_config.scheduler_config
    if scheduler.async_scheduling and parallel.pipeline_parallel_size > 1:
        problems.append(
            Refusal(
                "pipeline-async",
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size} with asynchronous scheduling, where "
                "vLLM's workers pass on a sampled token only after that many steps, which is not supported: give "
                "--no-async-scheduling",
            )
        )
    if getattr(vllm_config.observability_config, "kv_cache_metrics", False):
        problems.append(
            Refusal(
                "kv-cache-metrics",
                "the residency of KV blocks is not measured here: leave --kv-cache-metrics out (pointsman metrics "
                "counts evictions)",
            )
        )
    return problems + _speculation_problems(vllm_config)


def _speculation_problems(vllm_config: VllmConfig) -> list[Refusal]:
    speculation = vllm_config.speculative_config
    if speculation is None:
        return []
    problems: list[Refusal] = []
    if vllm_config.scheduler_config.async_scheduling:
        problems.append(
            Refusal(
                "async-speculation",
                "speculative decoding with asynchronous scheduling is not supported: give --no-async-scheduling",
            )
        )
    if vllm_config.num_lookahead_tokens or getattr(speculation, "max_num_new_slots_for_drafting", 0):
        if getattr(speculation, "parallel_drafting", False) and speculation.method == "ngram":
            problems.append(
                Refusal(
                    "parallel-drafting",
                    "parallel_drafting with the method 'ngram' takes unused slots in each step, and is not "
                    "supported: leave parallel_drafting out of --speculative-config",
                )
            )
        else:
            problems.append(
                Refusal(
                    "drafter-kv",
                    f"speculative decoding by the method {speculation.method!r}, whose drafter keeps KV of its own, is "
                    'not supported: use the method "ngram" in --speculative-config',
                )
            )
    if getattr(vllm_config.cache_config, "mamba_cache_mode", "none") == "align":
        problems.append(
            Refusal(
                "cached-states-drafts",
                "speculative decoding with states that are cached for prefixes is not supported: give "
                "--no-enable-prefix-caching",
            )
        )
    if getattr(speculation, "num_speculative_tokens_per_batch_size", None):
        problems.append(
            Refusal(
                "drafts-per-batch-size",
                "num_speculative_tokens_per_batch_size is not supported: give num_speculative_tokens, and draft_table "
                "in --additional-config",
            )
        )
    return problems


def kv_cache_problems(kv_cache_config: KVCacheConfig) -> list[Refusal]:
    """The unsupported parts of vLLM's `KVCacheConfig`."""
    groups = kv_cache_config.kv_cache_groups
    others = sorted({name for group in groups for name in managers_of(group) if name not in _KNOWN_MANAGERS})
    if others:
        remedy = f"give {ONE_GROUP}" if _may_be_one_group(groups) else "serve another model"
        return [
            Refusal(
                "kv-manager",
                f"vLLM manages the KV of this model by its {', '.join(others)}, whose blocks are given up or set aside "
                f"in ways that are not supported: {remedy}",
            )
        ]
    modes = {mode for group in groups if (mode := _mamba_mode(group)) not in (None, "none", "align")}
    if modes:
        return [
            Refusal(
                "mamba-cache-mode",
                f"mamba_cache_mode is {modes.pop()!r}, and states are cached here in the mode 'align' alone: "
                "leave --mamba-cache-mode out, or give --no-enable-prefix-caching",
            )
        ]
    return []


def _replay_problems(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Refusal]:
    windows = {getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in kv_cache_config.kv_cache_groups}
    if not any(windows) or not vllm_config.cache_config.enable_prefix_caching:
        return []
    return [
        Refusal(
            "window-replay",
            f"this model recomputes the last {max(windows)} tokens of a cached prefix, which is not supported: "
            "give --no-enable-prefix-caching",
        )
    ]


_KNOWN_MANAGERS = frozenset(
    {
        "FullAttentionManager",
        "SlidingWindowManager",
        "ChunkedLocalAttentionManager",
        "MambaManager",
        "RSWAManager",
        "CircularBufferManager",
        "CrossAttentionManager",
    }
)
"""Names of the supported classes of vLLM that manage the KV of a group."""


def is_one_full_group(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all KV is full attention in one group whose blocks the core owns."""
    groups = kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and managers_of(groups[0]) == {"FullAttentionManager"}
        and _is_full(groups[0])
        and not getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    )


def check_recording(record: str | None) -> None:
    """Raise ConfigError if a recording is requested (`record` is its path) and the KV is in groups."""
    if record is not None:
        raise ConfigError(
            Refusal(
                "record",
                f"record in --additional-config is {record!r}, but vLLM's manager owns the blocks of this model's "
                "several KV groups, so decisions cannot be replayed; leave record out, and watch the "
                "run with pointsman live --socket",
            )
        )


def _mamba_mode(group: KVCacheGroupSpec) -> str | None:
    """vLLM's cache mode for the states of a group; None: the group has no states."""
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    modes = {spec.mamba_cache_mode for spec in iter_layer_specs(group.kv_cache_spec) if isinstance(spec, MambaSpec)}
    return next(iter(modes), None)


def _may_be_one_group(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Whether vLLM can store this KV as one group: full attention, including windows and chunks."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    is_full = [isinstance(spec, FullAttentionSpec) for spec in specs]
    is_local = [isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs]
    return any(is_full) and sum(is_full) + sum(is_local) == len(specs)


def managers_of(group: KVCacheGroupSpec) -> set[str]:
    """The names of the classes of vLLM that manage the KV of a group."""
    from vllm.v1.kv_cache_interface import iter_layer_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    role = getattr(group, "role", None)
    found = {KVCacheSpecRegistry.get_manager_class(spec, role) for spec in iter_layer_specs(group.kv_cache_spec)}
    return {"none" if each is None else each.__name__ for each in found}
