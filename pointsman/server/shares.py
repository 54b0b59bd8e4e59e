"""Divides the machine among several engines: cores, threads, GPUs, KV blocks, and a name for each engine's log and
files.

The operator's settings are for the server as a whole. The exception are sizes of KV pools on GPUs: each engine has its
own GPU, so these sizes are per engine, as in vLLM. All of this is decided before an engine is started.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman.engine.kv.events import KVEventsConfig
from pointsman.engine.machine import num_cores, usable_cores, visible_gpus
from pointsman.engine.text.tokenizer import model_directory, weights_size

SHARED_SIZES = ("num_blocks", "kv_cache_bytes", "kv_offload_bytes")
"""Arguments of `Engine` that are divided among engines on the CPU."""
HOST_SIZES = ("kv_offload_bytes",)
"""Arguments of `Engine` that are divided among engines on GPUs."""
MEMORY_INFO = Path("/proc/meminfo")
MAX_PORT = 65535
_PORT = re.compile(r"^(tcp://.*:)([0-9]+)$")


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The part of the machine and of the operator's settings that one engine gets."""

    options: dict[str, Any]
    """Keyword arguments of `Engine`."""
    cores: list[int] | None = None
    """Numbers of the processors that the engine runs on; None: all processors."""
    record: str | None = None
    """File of the engine's recording; None: no recording."""
    name: str = ""
    """Prefix of the engine's log lines."""

    def recording_path(self, num_restarts: int) -> str | None:
        """The file of the engine's recording after `num_restarts` restarts; each start has a file of its own."""
        return self.record if self.record is None or not num_restarts else f"{self.record}.restart-{num_restarts}"


def share_out(options: Mapping[str, Any], num_engines: int, record: str | None = None) -> list[EngineShare]:
    """The share of each engine. A single engine gets the operator's settings unchanged.

    Args:
        options: keyword arguments of `Engine`, for the server as a whole.
        num_engines: number of engines of the server.
        record: file of the first engine's recording; the files of further engines have the suffixes .1, .2, ...

    Raises:
        ValueError: there are too few cores, threads, GPUs or blocks, or too little memory, or a port for KV events is
            in use.
    """
    if num_engines < 1:
        raise ValueError(f"data_parallel_size is {num_engines}; it must be at least 1, as a server needs an engine")
    if num_engines == 1:
        check_ports([options])
        return [EngineShare(dict(options), record=record)]
    cores, at_once = usable_cores(), num_cores()
    if num_engines > at_once:
        raise ValueError(
            f"data_parallel_size is {num_engines} and this process may use {at_once} core(s); each engine needs one "
            f"core, so lower data_parallel_size to at most {at_once}"
        )
    devices = choose_devices(options, num_engines)
    own = dict(options)
    threads = own.get("num_threads")
    if threads is not None:
        if threads < num_engines:
            raise ValueError(
                f"num_threads (--threads) is {threads} and data_parallel_size is {num_engines}; each engine needs at "
                f"least one thread, so raise num_threads to {num_engines}, or lower data_parallel_size to {threads}"
            )
        own["num_threads"] = threads // num_engines
    elif at_once < len(cores):  # a quota on processor time, which the engines share
        own["num_threads"] = at_once // num_engines
    for name in HOST_SIZES if devices else SHARED_SIZES:
        if (size := own.get(name)) is not None:
            if size < num_engines:
                raise ValueError(
                    f"{name} is {size}, which is too small to be divided among {num_engines} engines; raise it to at "
                    f"least {num_engines}, or lower data_parallel_size"
                )
            own[name] = size // num_engines
    check_memory(options, num_engines, on_gpus=bool(devices))
    events = own.get("kv_events_config")
    shares = []
    for index in range(num_engines):
        mine = own if events is None else {**own, "kv_events_config": offset_ports(events, index)}
        if devices:
            mine = {**mine, "device": devices[index]}
        path = record if record is None or index == 0 else f"{record}.{index}"
        # Neighbouring cores share caches.
        bound = cores[index * len(cores) // num_engines : (index + 1) * len(cores) // num_engines]
        shares.append(EngineShare(mine, bound, path, f"engine {index}"))
    check_ports([share.options for share in shares])
    return shares


def choose_devices(options: Mapping[str, Any], num_engines: int) -> list[str]:
    """The GPU of each of several engines, in PyTorch's order; empty: the engines run on the CPU.

    Raises:
        ValueError: there are fewer GPUs than engines, or one GPU is given for all engines.
    """
    device = str(options.get("device") or "auto")
    if device.startswith("cuda:"):
        raise ValueError(
            f"device is {device} and data_parallel_size is {num_engines}; each engine needs a GPU of its own: set "
            "device to cuda, and select the GPUs with CUDA_VISIBLE_DEVICES, or lower data_parallel_size to 1"
        )
    if device not in ("auto", "cuda"):
        return []
    devices = visible_gpus()
    if not devices and device == "auto":
        return []
    if num_engines > len(devices):
        remedy = f"lower data_parallel_size to {len(devices)}" if devices else "set device to cpu"
        raise ValueError(
            f"data_parallel_size is {num_engines} and PyTorch sees {len(devices)} GPU(s) "
            f"({', '.join(devices) or 'none'}); each engine needs a GPU of its own, so {remedy}, or make more GPUs "
            "visible with CUDA_VISIBLE_DEVICES"
        )
    return list(devices[:num_engines])


def check_memory(options: Mapping[str, Any], num_engines: int, *, on_gpus: bool = False) -> None:
    """Refuse settings that cannot fit into the host's memory: the weights of each engine, at their size on disk, and
    the configured KV sizes.

    Args:
        options: keyword arguments of `Engine`, for all engines together.
        num_engines: number of engines of the server.
        on_gpus: whether weights and KV pools are in the memory of GPUs.

    Raises:
        ValueError: the settings need more memory than is free.
    """
    free = free_memory()
    if free is None:
        return
    model = options.get("model")
    weights = 0
    if not on_gpus and (model is None or isinstance(model, (str, Path))):
        weights = weights_size(model_directory(model))
    sizes = HOST_SIZES if on_gpus else ("kv_cache_bytes", "kv_offload_bytes")
    given = [name for name in sizes if options.get(name)]
    kv = sum(options[name] for name in given)
    needed = num_engines * weights + kv
    if needed > free:
        fitting = (free - kv) // weights if weights and free > kv else 0
        remedies = [f"lower data_parallel_size to {fitting}"] if fitting else [f"lower {name}" for name in given]
        remedy = ", or ".join(remedies) or "serve a smaller model, or add memory"
        raise ValueError(
            f"data_parallel_size is {num_engines}: the weights of each engine take {weights / 2**20:,.0f} MiB, the KV "
            f"of all engines together takes {kv / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB of memory are free; "
            f"{remedy}"
        )


def free_memory() -> int | None:
    """Bytes of memory that programs may still allocate, by Linux's estimate; None: not known."""
    try:
        found = re.search(r"^MemAvailable:\s+([0-9]+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def offset_ports(config: KVEventsConfig | Mapping[str, Any], index: int) -> dict[str, Any]:
    """The KV events configuration of engine `index`: TCP ports count up from the first engine's port, and other
    addresses get a suffix, as in vLLM.
    """
    values = (
        {name: getattr(config, name) for name in KVEventsConfig.__dataclass_fields__}
        if isinstance(config, KVEventsConfig)
        else dict(config)
    )
    values.setdefault("endpoint", KVEventsConfig().endpoint)
    values["data_parallel_rank"] = index
    for name in ("endpoint", "replay_endpoint"):
        address = values.get(name)
        if index and isinstance(address, str):
            found = _PORT.match(address)
            values[name] = f"{address}_dp{index}" if found is None else f"{found[1]}{int(found[2]) + index}"
    return values


def check_ports(options: Sequence[Mapping[str, Any]]) -> None:
    """Refuse TCP ports for KV events that are in use, or that two engines would bind.

    Args:
        options: keyword arguments of `Engine`, one mapping per engine.

    Raises:
        ValueError: a port cannot be bound; no engine has been started.
    """
    num_engines = len(options)
    used_by: dict[int, str] = {}
    for index, mine in enumerate(options):
        config = KVEventsConfig.of(mine.get("kv_events_config"))
        if config is None:
            continue
        bound = {"endpoint": config.endpoint if config.is_bound else None, "replay_endpoint": config.replay_endpoint}
        for name, address in bound.items():
            found = _PORT.match(address or "")
            if found is None or (port := int(found[2])) == 0:  # ZeroMQ finds a free one
                continue
            used = name if num_engines == 1 else f"{name} of engine {index}"
            if port > MAX_PORT:
                why: str | None = f"the highest port is {MAX_PORT}"
            elif port in used_by:
                why = f"it is also the port of {used_by[port]}"
            else:
                why = bind_error(found[1].removeprefix("tcp://").rstrip(":").strip("[]"), port)
            if why is not None:
                raise ValueError(
                    f"kv_events_config: port {port} of {used} cannot be used: {why}; choose addresses "
                    + (
                        "with free ports"
                        if num_engines == 1
                        else f"whose port and the next ports, {num_engines} in all, are free"
                    )
                )
            used_by[port] = used


def bind_error(host: str, port: int) -> str | None:
    """Why a socket cannot be bound to this address; None: it can be bound, or this was not checked because only ZeroMQ
    can resolve the host."""
    host = "" if host == "*" else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            sock.bind((host, port))
    except OSError as error:
        return None if isinstance(error, socket.gaierror) else error.strerror
    return None
