"""The log lines of a server that is ready: five lines that show which server this is, and a sixth if other machines
need no key.

serving      the model, its size and type, the device
engines      if there are several: their number, and the process of each
KV cache     its capacity: blocks, tokens, requests of full length
scheduler    sequence slots, token budget, order policy, and every setting that differs from its default
limits       limits of one request, the number of waiting requests, which keys are needed
open         requests that every machine that reaches the address may make without a key
listening    the URL, and a curl command that works
"""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pointsman.core import KVGroup, SchedulerConfig
from pointsman.core.state.layout import describe_groups

if TYPE_CHECKING:
    from pointsman.server.config import ServerConfig
    from pointsman.server.wire.messages import EngineInfo

LEFT_OUT = frozenset(
    {
        "num_blocks",
        "max_model_len",
        "block_size",
        "num_reserved_blocks",
        "kv_groups",
        "max_steps_in_flight",
        "share_within_step",
    }
)
"""Fields of the scheduler's configuration that are in other lines, or that only the engine sets."""
ALWAYS_SHOWN = ("max_num_seqs", "max_num_batched_tokens", "order")
EXAMPLE_QUESTION = "What is the capital of France?"


def startup_lines(infos: Sequence[EngineInfo], config: ServerConfig, url: str) -> list[str]:
    """Returns the five or six log lines of a server that is ready; one line more if there are several engines.

    Args:
        infos: the engines' descriptions of themselves, in the order of their numbers; they have equal settings.
        config: the server's own settings.
        url: URL at which the server listens, such as http://127.0.0.1:8000.
    """
    info, num_engines = infos[0], len(infos)
    is_open = not config.api_keys and not is_loopback(config.host)
    return [
        f"serving      {_model(info, config)}",
        *([f"engines      {_engines(infos)}"] if num_engines > 1 else []),
        f"KV cache     {_capacity(info)}",
        f"scheduler    {_knobs(info.scheduler)}",
        f"limits       {_limits(info, config, num_engines)}",
        *([f"open         {_open_access(config)}"] if is_open else []),
        f"listening    {_address(config, url)} - try it: {example_curl(served_name(info, config), config, url)}",
    ]


def served_name(info: EngineInfo, config: ServerConfig) -> str:
    """The name of the model for clients."""
    return config.served_model_name[0] if config.served_model_name else info.model


def example_curl(model: str, config: ServerConfig, url: str) -> str:
    """A POSIX shell command that asks a question. It contains the name of the key's variable, never the key."""
    messages = [{"role": "user", "content": EXAMPLE_QUESTION}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 32, "temperature": 0})
    key = ' -H "Authorization: Bearer $POINTSMAN_API_KEY"' if config.api_keys else ""
    return f"curl {reachable(url)}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def reachable(url: str) -> str:
    """The URL that a client on this machine can call: the loopback address replaces the wildcard address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _model(info: EngineInfo, config: ServerConfig) -> str:
    path = _shown(info.model)
    names = ", ".join(map(_shown, config.served_model_name)) or path
    return (
        f"{names}{'' if names == path else f' ({path})'}: {_count(info.num_parameters)} parameters in {info.dtype} on "
        f"{info.device}, attention {info.attention}, sequences up to {info.max_model_len:,} tokens"
    )


def _engines(infos: Sequence[EngineInfo]) -> str:
    on_gpus = len({info.device for info in infos}) > 1
    named = ", ".join(
        f"engine {index} is process {info.pid}{f' on {info.device}' if on_gpus else ''}"
        for index, info in enumerate(infos)
    )
    return f"{len(infos)}, each as in the next two lines: {named}"


def _capacity(info: EngineInfo) -> str:
    groups = tuple(KVGroup(*group) for group in info.scheduler["kv_groups"])
    in_groups = f" in {describe_groups(groups)}" if groups else ""
    return (
        f"{info.num_blocks:,} blocks of {info.block_size} tokens{in_groups}, {info.kv_cache_bytes / 2**20:,.0f} MiB in "
        f"{info.kv_cache_dtype}: room for {info.kv_cache_tokens:,} tokens, or {info.full_length_requests:,.1f} "
        "requests of full length"
    )


def _knobs(scheduler: dict[str, Any]) -> str:
    defaults = {field.name: field.default for field in fields(SchedulerConfig)}
    shown = [name for name in scheduler if name not in LEFT_OUT and not _is_default(scheduler[name], defaults[name])]
    return ", ".join(f"{name} {_knob_text(scheduler[name])}" for name in dict.fromkeys([*ALWAYS_SHOWN, *shown]))


def _is_default(value: Any, default: Any) -> bool:
    return bool((tuple(value) if isinstance(value, list) else value) == default)


def _limits(info: EngineInfo, config: ServerConfig, num_engines: int) -> str:
    prompt_tokens = config.max_waiting_prompt_tokens
    deadline = config.max_deadline
    if config.api_keys:
        key = "an API key is asked for"
    elif is_loopback(config.host):
        key = "no API key: every user of this machine may call"
    else:
        key = "NO API KEY: every machine may call"
    parts = [
        f"{num_engines * info.max_num_running:,} requests run and {config.max_waiting_requests:,} more wait, then 429",
        f"waiting prompt tokens {'without limit' if prompt_tokens is None else f'{prompt_tokens:,}'}",
        f"deadline {'none' if deadline is None else f'{deadline:g} s'}",
        *([] if config.min_request_priority is None else [f"priority at least {config.min_request_priority}"]),
        *([] if config.min_ttft_target is None else [f"TTFT target at least {config.min_ttft_target:g} s"]),
        f"max_tokens {info.max_model_len if config.max_tokens_limit is None else config.max_tokens_limit:,}",
        f"n {config.max_n}",
        f"bodies {config.max_request_bytes / 2**20:,.1f} MiB, {config.body_budget / 2**20:,.1f} together",
        key,
        *([] if config.tenant_from == "key" else [f"tenants by {config.tenant_from}"]),
        f"operators: {_operators(config)}",
    ]
    return "; ".join(parts)


def _operators(config: ServerConfig) -> str:
    if config.operator_keys:
        return "an operator key is asked for"
    if config.api_keys:
        return "none, as there is no operator key (--operator-key-file)"
    return "every user of this machine, without a key"


def _open_access(config: ServerConfig) -> str:
    operators = "an operator key" if config.operator_keys else "a program on this machine"
    return (
        f"{_shown(config.host)} can be reached from other machines, and without a key each of them may use "
        "/v1/completions and every other endpoint of clients, and read /metrics; what operators call (/pause, "
        f"/v1/requests, ...) needs {operators}; --api-key-file closes all but health and metrics"
    )


def _address(config: ServerConfig, url: str) -> str:
    return url if config.host in url else f"{url} (on {_shown(config.host)})"


def _knob_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return " + ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: int) -> str:
    """A model's number of parameters as text, rounded to millions or billions."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"


def _shown(text: str) -> str:
    """A name or path that the operator or the model's files give, on one line and without control characters."""
    return text if text.isprintable() else ascii(text)
