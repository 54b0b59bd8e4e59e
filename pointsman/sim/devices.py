"""Devices: memory, bandwidth and FLOP/s of known accelerators, and a measurement of this CPU.

`device("h100")` looks a device up, `device("cpu")` measures this machine, and `device("memory=32GiB,...")` is a device
that the text describes. FLOP/s are the vendor's figures for dense
arithmetic (datasheets often print the figures with 2:4 sparsity, which are twice as high). Memory is the size that a
process sees, a few percent below the datasheet: an engine divides this memory into weights and KV blocks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Literal

import numpy as np

from pointsman.files import MAX_MESSAGE, read_input, represented, shown
from pointsman.sim.errors import SimulationError, UnknownName

Dtype = Literal["fp32", "bf16", "fp8", "int8"]
Kind = Literal["data-centre", "workstation", "geforce", "cpu"]
Link = Literal["nvlink", "pcie"]

GIB = 2**30
MAX_FIGURE = 1e21
"""Maximum of a described figure, in base units: a thousand exaFLOP/s."""
_WIDER: Mapping[Dtype, Dtype] = {"int8": "bf16", "fp8": "bf16", "bf16": "fp32"}
_HEADROOM: Mapping[Kind, float] = {"data-centre": 1.1, "workstation": 1.3, "geforce": 2.6, "cpu": 1}
"""By kind: the highest clock that drivers report relative to the datasheet's boost clock, rounded up (H100: 1,980 to
1,830 MHz; RTX PRO 6000: 3,090 to 2,617). GeForce: twice that, because their FLOP/s are with 32-bit accumulation, and
16-bit accumulation is twice as fast."""
IDLE_SHARE = 0.2
"""Assumed power of a device with a model in memory and no request, as a share of its board power. A device without a
process draws about a tenth, and the context of a process 26 to 66 W more, on an H100, an A100 and an L40S
(arXiv:2605.23918)."""
_PCIE_3, _PCIE_4, _PCIE_5 = 16, 32, 64
"""Bandwidth of 16 PCIe lanes in one direction, in GB/s."""
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
    link: Link = "nvlink"
    """Link to peers. "nvlink": a direct one, such as NVLink or Infinity Fabric. "pcie": through the host."""
    board_watts: float = 0.0
    """Maximum power of the device, in watts: the datasheet's board power; 0: unknown."""
    idle_watts: float | None = None
    """Power of the device with a model in memory and no request, in watts; None: `IDLE_SHARE` of the board power."""

    def watts(self, busy: float) -> float:
        """An estimate of the mean power, in watts, of the device alone: that of the idle device, and more in proportion
        to the share of time in which it runs steps, up to the board power.

        Steps that read memory draw less than the board power, so this errs towards too much.

        Args:
            busy: share of time in which the device runs steps, 0 to 1.

        Raises:
            SimulationError: the board power is unknown, or `busy` is out of range.
        """
        if not 0 <= busy <= 1:
            raise SimulationError(f"busy is {busy}; it must be a share of time from 0 to 1")
        if not self.board_watts:
            raise SimulationError(
                f"the power of {self.name} is not known; describe the device with watts=, its board power"
            )
        idle = IDLE_SHARE * self.board_watts if self.idle_watts is None else self.idle_watts
        return idle + (self.board_watts - idle) * busy

    @property
    def headroom(self) -> float:
        """Factor above `peak_flops` that no product exceeds: datasheets state FLOP/s at a typical clock, and devices
        run at higher clocks while power and temperature allow it."""
        return _HEADROOM[self.kind]

    def flops(self, dtype: Dtype) -> float:
        """Peak FLOP/s for operands of `dtype`. If the device has no arithmetic for `dtype`: peak FLOP/s of the next
        wider dtype, to which kernels convert the operands.

        Raises:
            SimulationError: the device has no arithmetic for `dtype`, and for no wider one.
        """
        found = dtype
        while found not in self.peak_flops:
            if found not in _WIDER:
                raise SimulationError(f"{self.name} has no FLOP/s for {dtype}; describe the device with {dtype}=")
            found = _WIDER[found]
        return self.peak_flops[found]


def device(name: str) -> Device:
    """The device that `name` names or describes.

    Args:
        name: a name or alias of the table, in upper or lower case; "cpu" (measured now, about a second); or a
            description, see `described_device`: its text, or the path of a JSON file.

    Raises:
        UnknownName: no device has that name.
        SimulationError: the description is wrong.
        OSError: the JSON file cannot be read.
    """
    if name.lower().endswith(".json"):
        return _read_description(name)
    if "=" in name:
        return described_device(_parse_description(name))
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


# ---------------------------------------------------------------------- descriptions

_MEMORY_UNITS: Mapping[str, float] = {"B": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
_BANDWIDTH_UNITS: Mapping[str, float] = {f"{unit}/s": factor for unit, factor in _MEMORY_UNITS.items()}
_FLOPS_UNITS: Mapping[str, float] = {"FLOPS": 1, "GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_POWER_UNITS: Mapping[str, float] = {"W": 1, "kW": 1e3}
_QUANTITIES: Mapping[str, Mapping[str, float]] = {
    "memory": _MEMORY_UNITS,
    "bandwidth": _BANDWIDTH_UNITS,
    "fp32": _FLOPS_UNITS,
    "bf16": _FLOPS_UNITS,
    "fp8": _FLOPS_UNITS,
    "int8": _FLOPS_UNITS,
    "link": _BANDWIDTH_UNITS,
    "host": _BANDWIDTH_UNITS,
    "watts": _POWER_UNITS,
    "idle": _POWER_UNITS,
}
"""Quantities of a description, each with its units; a number without a unit is in the first."""
_EXAMPLE = "name=my-gpu,memory=32GiB,bandwidth=1792GB/s,bf16=209.5TFLOPS,watts=575"
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)")


def described_device(values: Mapping[str, object]) -> Device:
    """The device with these figures, for one that is not in the table.

    Args:
        values: figures of a datasheet: a number in bytes, bytes/s, FLOP/s or watts, or a text with a unit, as "32GiB".
            `memory`, `bandwidth` and `bf16` are needed. `fp32`, `fp8`, `int8`: FLOP/s of these dtypes, dense. `link`:
            bandwidth to peers in one direction, over PCIe unless `nvlink` is true; not given: no link. `host`:
            bandwidth to the host; not given: that of PCIe 4.0 x16. `watts`: board power; `idle`: power without
            requests. `kind`: "data-centre" (the default), "workstation" or "geforce". `name`: the name in reports.

    Raises:
        SimulationError: a figure is missing, unknown, or not a number above 0.
    """
    figures = {key: _figure(key, values[key]) for key in _QUANTITIES if key in values}
    if missing := [key for key in ("memory", "bandwidth", "bf16") if key not in figures]:
        raise SimulationError(f"the description of a device has no {missing[0]}; write for example {_EXAMPLE}")
    known = {"name", "kind", "nvlink", *_QUANTITIES}
    if unknown := sorted(set(values) - known):
        raise SimulationError(
            f"the description of a device has {unknown[0]!r}; known are {', '.join(sorted(known))}, as in {_EXAMPLE}"
        )
    kind, nvlink = values.get("kind", "data-centre"), values.get("nvlink", False)
    if kind not in ("data-centre", "workstation", "geforce"):
        raise SimulationError(f"the device's kind is {kind!r}; it must be data-centre, workstation or geforce")
    if str(nvlink).lower() not in ("true", "false"):
        raise SimulationError(f"the device's nvlink is {nvlink!r}; it must be true or false")
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16", "fp8", "int8")
    return Device(
        name=str(values.get("name", "described device")),
        memory=int(figures["memory"]),
        bandwidth=figures["bandwidth"],
        peak_flops={dtype: figures[dtype] for dtype in dtypes if dtype in figures},
        link_bandwidth=figures.get("link", 0.0),
        host_bandwidth=figures.get("host", _PCIE_4 * 1e9),
        board_watts=figures.get("watts", 0.0),
        idle_watts=figures.get("idle"),
        kind=kind,
        link="nvlink" if str(nvlink).lower() == "true" else "pcie",
        source="described by the user",
    )


def _parse_description(text: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for part in text.split(","):
        key, sign, value = (each.strip() for each in part.partition("="))
        if not sign or not key or not value:
            raise SimulationError(f"the description of a device has {part.strip()!r}; write for example {_EXAMPLE}")
        if key in values:
            raise SimulationError(f"the description of a device has {key} twice; leave one out")
        values[key] = value
    return values


def _read_description(path: str) -> Device:
    try:
        values = json.loads(read_input(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SimulationError(f"{path}: the file is not JSON ({error}); it must be an object of figures") from None
    if not isinstance(values, dict):
        raise SimulationError(f"{path}: the file is not a JSON object; it must be an object of figures")
    try:
        return described_device({"name": Path(path).stem, **values})
    except SimulationError as error:
        raise SimulationError(f"{path}: {shown(str(error), MAX_MESSAGE)}") from None


def _figure(key: str, value: object) -> float:
    """The number that `value` is or says, in base units."""
    units = _QUANTITIES[key]
    found = _NUMBER.fullmatch(str(value).strip())
    factors = {unit.lower(): factor for unit, factor in units.items()}
    unit = found[2].lower().replace("flop/s", "flops") if found else ""
    if found is None or isinstance(value, bool) or (unit and unit not in factors):
        raise SimulationError(
            f"the device's {key} is {represented(value)}; it must be a number with one of the units {', '.join(units)}"
        )
    number = float(found[1]) * (factors[unit] if unit else 1)
    if not 0 < number < MAX_FIGURE:
        raise SimulationError(
            f"the device's {key} is {represented(value)}; it must be above 0 and below {MAX_FIGURE:g}"
        )
    return number


# ---------------------------------------------------------------------- the table


def _gpu(
    name: str,
    gib: float,
    tb_per_s: float,
    gb_per_s: float,
    tflops: Mapping[Dtype, float],
    watts: float,
    source: str,
    *,
    host_gb_per_s: float = _PCIE_5,
    kind: Kind = "data-centre",
    link: Link = "nvlink",
) -> Device:
    return Device(
        name=name,
        memory=int(gib * GIB),
        bandwidth=tb_per_s * 1e12,
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        link_bandwidth=gb_per_s * 1e9,
        host_bandwidth=host_gb_per_s * 1e9,
        board_watts=watts,
        source=f"{source}; {_SEEN}",
        kind=kind,
        link=link,
    )


# Link bandwidth is one direction: half of what datasheets give for NVLink, PCIe and Infinity Fabric. The link to the
# host is PCIe x16 in each of them, as the same datasheets say: of generation 5, or of the generation that is noted.
_HOPPER: Mapping[Dtype, float] = {"fp32": 67, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_AMPERE: Mapping[Dtype, float] = {"fp32": 19.5, "bf16": 312, "int8": 624}
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_TABLE = (
    _gpu("A100-40GB-SXM", 39.49, 1.555, 300, _AMPERE, 400, _A100, host_gb_per_s=_PCIE_4),
    _gpu("A100-80GB-SXM", 79.15, 2.039, 300, _AMPERE, 400, _A100, host_gb_per_s=_PCIE_4),
    _gpu(
        "A100-80GB-PCIe", 79.15, 1.935, 32, _AMPERE, 300, f"{_A100} (PCIe 4.0 x16, without NVLink bridge)",
        host_gb_per_s=_PCIE_4, link="pcie",
    ),
    _gpu(
        "H100-SXM", 79.19, 3.35, 450, _HOPPER, 700,
        "NVIDIA H100 Tensor Core GPU datasheet and Hopper whitepaper (SXM5)",
    ),
    _gpu(
        "H100-PCIe", 79.11, 2.0, 64, {"fp32": 51, "bf16": 756, "fp8": 1513, "int8": 1513}, 350,
        "NVIDIA H100 Tensor Core GPU datasheet (PCIe 5.0 x16, without NVLink bridge)", link="pcie",
    ),
    _gpu(
        "H100-NVL", 93.11, 3.9, 300, {"fp32": 60, "bf16": 835, "fp8": 1671, "int8": 1671}, 400,
        "NVIDIA H100 Tensor Core GPU datasheet (NVL, with NVLink bridge)",
    ),
    _gpu("H200-SXM", 139.81, 4.8, 450, _HOPPER, 700, "NVIDIA H200 Tensor Core GPU datasheet (SXM)"),
    _gpu(
        "B200", 178.35, 8.0, 900, {"fp32": 75, "bf16": 2250, "fp8": 4500, "int8": 4500}, 1000,
        "NVIDIA HGX B200 and DGX B200 datasheets, an eighth of eight GPUs",
    ),
    _gpu(
        "L40S", 44.40, 0.864, 32, {"fp32": 91.6, "bf16": 362.05, "fp8": 733, "int8": 733}, 350,
        "NVIDIA L40S datasheet (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4, link="pcie",
    ),
    _gpu(
        "L4", 22.05, 0.3, 32, {"fp32": 30.3, "bf16": 121, "fp8": 242.5, "int8": 242.5}, 72,
        "NVIDIA L4 Tensor Core GPU datasheet (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4, link="pcie",
    ),
    _gpu(
        "A10G", 22.06, 0.6, 32, {"fp32": 35, "bf16": 70, "int8": 140}, 300,
        "NVIDIA A10G datasheet of Amazon Web Services (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4, link="pcie",
    ),
    _gpu(
        "A10", 22.06, 0.6, 32, {"fp32": 31.2, "bf16": 125, "int8": 250}, 150,
        "NVIDIA A10 Tensor Core GPU datasheet (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4, link="pcie",
    ),
    _gpu(
        "T4", 14.75, 0.32, 16, {"fp32": 8.1, "bf16": 65, "int8": 130}, 70,
        "NVIDIA T4 Tensor Core GPU datasheet, fp16 (PCIe 3.0 x16)", host_gb_per_s=_PCIE_3, link="pcie",
    ),
    _gpu(
        "RTX-3090", 23.69, 0.936, 32, {"fp32": 35.6, "bf16": 71, "int8": 284}, 350,
        "NVIDIA Ampere GA102 GPU architecture whitepaper, FP32 accumulation (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4,
        kind="geforce", link="pcie",
    ),
    _gpu(
        "RTX-4090", 23.52, 1.008, 32, {"fp32": 82.6, "bf16": 165.2, "fp8": 330.3, "int8": 660.6}, 450,
        "NVIDIA Ada GPU architecture whitepaper, FP32 accumulation (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4,
        kind="geforce", link="pcie",
    ),
    _gpu(
        "RTX-5090", 31.36, 1.792, 64, {"fp32": 104.8, "bf16": 209.5, "fp8": 419, "int8": 838}, 575,
        "NVIDIA RTX Blackwell GPU architecture whitepaper, FP32 accumulation (PCIe 5.0 x16)", kind="geforce",
        link="pcie",
    ),
    _gpu(
        "RTX-A6000", 47.54, 0.768, 32, {"fp32": 38.7, "bf16": 154.8, "int8": 309.7}, 300,
        "NVIDIA RTX A6000 datasheet and Ampere GA102 whitepaper (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4,
        kind="workstation", link="pcie",
    ),
    _gpu(
        "RTX-6000-Ada", 47.50, 0.96, 32, {"fp32": 91.1, "bf16": 364.2, "fp8": 728.5, "int8": 728.5}, 300,
        "NVIDIA RTX 6000 Ada Generation datasheet (PCIe 4.0 x16)", host_gb_per_s=_PCIE_4, kind="workstation",
        link="pcie",
    ),
    _gpu(
        "RTX-PRO-6000-Blackwell", 94.97, 1.792, 64, {"fp32": 126, "bf16": 503.8, "fp8": 1007.6, "int8": 1007.6}, 600,
        "NVIDIA RTX PRO Blackwell architecture whitepaper, workstation edition, FP32 accumulation (PCIe 5.0 x16)",
        kind="workstation", link="pcie",
    ),
    _gpu(
        "MI300X", 191.98, 5.3, 448, {"fp32": 163.4, "bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9}, 750,
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
    "a100-pcie": "A100-80GB-PCIe",
    "a100-sxm4-80gb": "A100-80GB-SXM",
    "a100-sxm4-40gb": "A100-40GB-SXM",
    "h100-80gb": "H100-SXM",
    "h100-80gb-hbm3": "H100-SXM",
    "h200": "H200-SXM",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "a6000": "RTX-A6000",
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
