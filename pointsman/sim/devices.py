"""Devices: memory, bandwidth and FLOP/s of known accelerators, and a measurement of this CPU.

`device("h100")` looks a device up; `device("cpu")` measures this machine. FLOP/s are the vendor's figures for dense
arithmetic (datasheets often print the figures with 2:4 sparsity, which are twice as high). Memory is the size that a
process sees, a few percent below the datasheet: an engine divides this memory into weights and KV blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Literal

import numpy as np

from pointsman.sim.errors import SimulationError, UnknownName

Dtype = Literal["fp32", "bf16", "fp8", "int8"]
Kind = Literal["data-centre", "workstation", "geforce", "cpu"]

GIB = 2**30
_WIDER: Mapping[Dtype, Dtype] = {"int8": "bf16", "fp8": "bf16", "bf16": "fp32"}
_HEADROOM: Mapping[Kind, float] = {"data-centre": 1.1, "workstation": 1.3, "geforce": 2.6, "cpu": 1}
"""By kind: the highest clock that drivers report relative to the datasheet's boost clock, rounded up (H100: 1,980 to
1,830 MHz; RTX PRO 6000: 3,090 to 2,617). GeForce: twice that, because their FLOP/s are with 32-bit accumulation, and
16-bit accumulation is twice as fast."""
_SEEN = "memory: total capacity as PyTorch reports it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator, or a CPU machine."""

    name: str
    memory: int
    """Bytes that a process can allocate, memory of libraries included."""
    bandwidth: float
    """Peak memory bandwidth, bytes/s."""
    peak_flops: Mapping[Dtype, float] = field(hash=False)
    """Peak FLOP/s of dense matrix products by dtype, without sparsity; bf16 also stands for fp16. A dtype without
    arithmetic on the device is absent."""
    link_bandwidth: float
    """Bytes/s that the device can send to its peers; 0: it has no link."""
    host_bandwidth: float
    """Bytes/s between the device and the host's memory, in one direction."""
    source: str
    """Source of these values, such as a datasheet."""
    kind: Kind = "data-centre"

    @property
    def headroom(self) -> float:
        """Factor above `peak_flops` that no product exceeds: datasheets state FLOP/s at a typical clock, and devices
        run at higher clocks while power and temperature allow it."""
        return _HEADROOM[self.kind]

    def flops(self, dtype: Dtype) -> float:
        """Peak FLOP/s for operands of `dtype`. If the device has no arithmetic for `dtype`: peak FLOP/s of the next
        wider dtype, to which kernels convert the operands."""
        while dtype not in self.peak_flops:
            dtype = _WIDER[dtype]
        return self.peak_flops[dtype]


def device(name: str) -> Device:
    """The device called `name`: a name or alias of the table, in upper or lower case, or "cpu" (measured now, about a
    second).

    Raises:
        UnknownName: no device has that name.
    """
    key = _normalised_name(name)
    if key == "cpu":
        return measure_cpu()
    if key not in _BY_KEY:
        raise UnknownName.nearest_to(name, "device", [*DEVICES, *_ALIASES, "cpu"])
    return _BY_KEY[key]


def measure_cpu(seconds: float = 0.8, memory: int | None = None) -> Device:
    """This machine as a device: bandwidth from copying arrays, FLOP/s from float32 matrix products, both by NumPy.

    Each value is the best of several repetitions, so that other load on the machine matters little. NumPy uses the
    threads of its BLAS for products, and one thread for copies: a program that reads memory with several threads may be
    faster.

    Args:
        seconds: approximate duration of the measurement.
        memory: bytes of memory; None: what the operating system or the container's limit reports.

    Raises:
        SimulationError: the operating system does not report its memory.
    """
    memory = _machine_memory() if memory is None else memory
    size = 1024
    left = np.random.default_rng(0).random((size, size), dtype=np.float32)
    product = np.empty_like(left)
    source = np.ones(16 * 2**20, dtype=np.float32)  # 64 MiB: beyond the caches of common CPUs
    target = np.zeros_like(source)
    copy = _best_seconds(lambda: np.copyto(target, source), seconds / 2)
    multiply = _best_seconds(lambda: np.matmul(left, left, out=product), seconds / 2)
    return Device(
        name="cpu",
        memory=memory,
        bandwidth=2 * source.nbytes / copy,  # a copy reads and writes
        peak_flops={"fp32": 2 * size**3 / multiply},
        link_bandwidth=0.0,
        host_bandwidth=source.nbytes / copy,  # the KV pool is in host memory, too
        kind="cpu",
        source="measured on this machine: NumPy copies of 64 MiB, float32 products of 1024 x 1024",
    )


def _best_seconds(work: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), perf_counter() + seconds
    work()  # the first call touches the pages and starts the threads
    while perf_counter() < end or best == float("inf"):
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
    return best


def _machine_memory() -> int:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # AttributeError: Windows
        raise SimulationError(
            "this system does not report its memory size; give the size as measure_cpu(memory=BYTES)"
        ) from None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()  # limit of a container, if any
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


# ---------------------------------------------------------------------- the table


_PCIE_4, _PCIE_5 = 32, 64
"""Bandwidth of 16 PCIe lanes in one direction, in GB/s."""


def _gpu(
    name: str,
    gib: float,
    tb_per_s: float,
    gb_per_s: float,
    tflops: Mapping[Dtype, float],
    source: str,
    *,
    host_gb_per_s: float = _PCIE_5,
    kind: Kind = "data-centre",
) -> Device:
    return Device(
        name=name,
        memory=int(gib * GIB),
        bandwidth=tb_per_s * 1e12,
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        link_bandwidth=gb_per_s * 1e9,
        host_bandwidth=host_gb_per_s * 1e9,
        source=f"{source}; {_SEEN}",
        kind=kind,
    )


# Link bandwidth is one direction: half of what datasheets give for NVLink, PCIe and Infinity Fabric. The link to the
# host is PCIe x16 in each of them, as the same datasheets say: of generation 4 where that is noted, otherwise 5.
_HOPPER: Mapping[Dtype, float] = {"fp32": 67, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_AMPERE: Mapping[Dtype, float] = {"fp32": 19.5, "bf16": 312, "int8": 624}
_TABLE = (
    _gpu("A100-40GB-SXM", 39.49, 1.555, 300, _AMPERE, "NVIDIA A100 Tensor Core GPU datasheet", host_gb_per_s=_PCIE_4),
    _gpu("A100-80GB-SXM", 79.15, 2.039, 300, _AMPERE, "NVIDIA A100 Tensor Core GPU datasheet", host_gb_per_s=_PCIE_4),
    _gpu("H100-SXM", 79.19, 3.35, 450, _HOPPER, "NVIDIA H100 Tensor Core GPU datasheet and Hopper whitepaper (SXM5)"),
    _gpu("H200-SXM", 139.81, 4.8, 450, _HOPPER, "NVIDIA H200 Tensor Core GPU datasheet (SXM)"),
    _gpu(
        "B200", 178.35, 8.0, 900, {"fp32": 75, "bf16": 2250, "fp8": 4500, "int8": 4500},
        "NVIDIA HGX B200 and DGX B200 datasheets, an eighth of eight GPUs",
    ),
    _gpu(
        "L40S", 44.40, 0.864, 32, {"fp32": 91.6, "bf16": 362.05, "fp8": 733, "int8": 733},
        "NVIDIA L40S datasheet (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4,
    ),
    _gpu(
        "RTX-4090", 23.52, 1.008, 32, {"fp32": 82.6, "bf16": 165.2, "fp8": 330.3, "int8": 660.6},
        "NVIDIA Ada GPU architecture whitepaper, with FP32 accumulation (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4,
        kind="geforce",
    ),
    _gpu(
        "RTX-PRO-6000-Blackwell", 94.97, 1.792, 64, {"fp32": 126, "bf16": 503.8, "fp8": 1007.6, "int8": 1007.6},
        "NVIDIA RTX PRO Blackwell architecture whitepaper, workstation edition, FP32 accumulation (PCIe 5.0 x16)",
        kind="workstation",
    ),
    _gpu(
        "MI300X", 191.98, 5.3, 448, {"fp32": 163.4, "bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
        "AMD Instinct MI300X accelerator data sheet (seven Infinity Fabric links of 64 GB/s)",
    ),
)  # fmt: skip

DEVICES: Mapping[str, Device] = MappingProxyType({entry.name: entry for entry in _TABLE})
"""The known devices by name, without "cpu"."""

_ALIASES: Mapping[str, str] = {
    "a100-40gb": "A100-40GB-SXM",
    "a100-80gb": "A100-80GB-SXM",
    "a100": "A100-80GB-SXM",
    "h100": "H100-SXM",
    "h100-80gb": "H100-SXM",
    "h200": "H200-SXM",
    "4090": "RTX-4090",
    "rtx-pro-6000": "RTX-PRO-6000-Blackwell",
    "pro-6000": "RTX-PRO-6000-Blackwell",
    "mi300": "MI300X",
}


def _normalised_name(name: str) -> str:
    """`name` without differences of spelling: case, spaces, hyphens, the vendor."""
    key = "".join(char for char in name.lower() if char.isalnum())
    for vendor in ("nvidia", "amd", "geforce", "instinct"):
        key = key.removeprefix(vendor)
    return key


_BY_KEY: Mapping[str, Device] = {
    **{_normalised_name(entry.name): entry for entry in _TABLE},
    **{_normalised_name(alias): DEVICES[name] for alias, name in _ALIASES.items()},
}
