"""Profiles: JSON files with step times that were fitted to a log, a description of the log, and prediction errors.

The hull of a profile has the minimum and maximum, in the log, of each field of a step's load (`StepLoad`). Step times
of loads outside the hull are extrapolated; `warn_outside` reports where a simulation leaves the hull.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core import ConfigError, KVGroup, SchedulerConfig
from pointsman.core.recording import check_num_blocks
from pointsman.files import MAX_MESSAGE, read_input, represented, shown
from pointsman.sim.errors import CalibrationError, SimulationError
from pointsman.sim.features import Features
from pointsman.sim.speculation import Speculation
from pointsman.sim.step_time import LinearStepTime, StepLoad, StepTime
from pointsman.traces import MAX_TOKENS
from pointsman.version import __version__

FORMAT = "pointsman-profile"
FORMAT_VERSION = 1

PARTS = {
    "num_tokens": "tokens in a step",
    "num_rows": "requests in a step",
    "num_context_tokens": "positions read in a step",
    "num_attended": "positions attended to in a step",
    "num_samples": "sampled tokens in a step",
}
"""Names, in messages, of the fields of a step's load (`StepLoad`)."""
MIN_DISTANCE = 0.01
"""A load causes a warning if it is below the log's smallest load by more than this share of the log's largest load."""


_OF_SPECULATION = ("acceptance", "proposal")
"""Fields of `Speculation` that a log shows."""

# ---------------------------------------------------------------------- settings of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of the engine that wrote the log. The defaults are vLLM's."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_blocks: int | None = None
    """Number of KV blocks; None: the pool is never short of blocks."""
    block_size: int = 16
    max_model_len: int | None = None
    """Maximum number of tokens of a request; None: the length of the log's longest request."""
    async_scheduling: bool = True
    kv_groups: tuple[KVGroup, ...] = ()
    """Groups of the engine's KV layers, as in `SchedulerConfig`; `num_blocks` counts blocks of these groups."""
    num_draft_tokens: int = 0
    """Maximum number of drafts of a request in a step; 0: no speculation."""
    max_loras: int = 0
    """Maximum number of different adapters in a step; 0: no adapters."""
    prefill_interval: int = 1
    """Steps from a step that computes prompts to the next one, while requests decode."""

    def config(self, longest: int, num_requests: int) -> SchedulerConfig:
        """The configuration of vLLM's scheduler with these settings.

        Args:
            longest: maximum number of tokens of a request of the workload, output included.
            num_requests: number of requests.

        Raises:
            ConfigError: a setting is out of range.
        """
        # Prompts of a log are distinct, so a prefix cache would find nothing. Twice the blocks of all requests that
        # can run at a time exceed any watermark or reserve.
        blocks = 2 * min(num_requests, max(self.max_num_seqs, 1)) * (-(-longest // max(self.block_size, 1)) + 1)
        blocks *= max(1, len(self.kv_groups))
        return SchedulerConfig.preset(
            "vllm",
            num_blocks=blocks if self.num_blocks is None else self.num_blocks,
            block_size=self.block_size,
            max_model_len=longest if self.max_model_len is None else self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_steps_in_flight=2 if self.async_scheduling and not self.num_draft_tokens else 1,
            kv_groups=self.kv_groups,
            num_draft_tokens=self.num_draft_tokens,
            max_loras=self.max_loras,
            prefill_interval=self.prefill_interval,
            enable_prefix_caching=False,
        )


# ---------------------------------------------------------------------- the hull


class Hull:
    """The minimum and maximum of each field of a step's load (`StepLoad`); empty at first."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.ranges: dict[str, tuple[int, int]] = dict(ranges or {})
        """(minimum, maximum) of each field of `StepLoad`, by its name."""

    def __eq__(self, other: object) -> bool:
        return self.ranges == other.ranges if isinstance(other, Hull) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def add_load(self, load: StepLoad) -> None:
        """Extend this hull to contain a load."""
        for part, value in zip(StepLoad._fields, load, strict=True):
            low, high = self.ranges.get(part, (value, value))
            self.ranges[part] = (min(low, value), max(high, value))

    def add_hull(self, other: Hull) -> None:
        """Extend this hull to contain another hull."""
        for part, (low, high) in other.ranges.items():
            known = self.ranges.get(part, (low, high))
            self.ranges[part] = (min(low, known[0]), max(high, known[1]))

    @classmethod
    def of_loads(cls, loads: npt.NDArray[np.float64]) -> Hull:
        """The hull of an array of loads, [steps, fields of `StepLoad`]."""
        hull = cls()
        hull.add_load(StepLoad(*map(int, loads.min(axis=0))))
        hull.add_load(StepLoad(*map(int, loads.max(axis=0))))
        return hull


class WatchedStepTime:
    """Step times that record the hull of the loads for which they are called."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self.hull = Hull()

    def of_step(self, load: StepLoad) -> float:
        self.hull.add_load(load)
        return self._step_time.of_step(load)

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> npt.NDArray[np.float64]:
        if num_steps:
            last = num_context_tokens + (num_steps - 1) * num_rows
            self.hull.add_load(StepLoad(num_rows, num_rows, num_context_tokens, num_context_tokens, num_rows))
            self.hull.add_load(StepLoad(num_rows, num_rows, last, last, num_rows))
        return self._step_time.of_decodes(num_rows, num_context_tokens, num_steps)


# ---------------------------------------------------------------------- the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Step times of a model on a device, fitted to a log."""

    step_time: LinearStepTime
    settings: EngineSettings
    hull: Hull
    source: str
    """Name of the log."""
    model: str = ""
    """Name of the model as given to the engine; empty: the log does not name it."""
    speculation: Speculation | None = None
    """Drafts of the engine, as the log shows them; the drafter's time is part of the step times. None: the engine had
    none, or the log does not show them."""
    adapter_share: float = 0.0
    """Additional time of steps with adapters, as a share of the step; 0 also if the log does not show it."""
    kind: str
    """Basis of the fit: "requests" or "steps"."""
    num_requests: int
    """Number of requests in the log."""
    num_train: int
    """Number of the log's requests or steps that the fit used."""
    training_errors: dict[str, float | int | None] = field(default_factory=dict)
    """Fields of `RequestErrors` or of `StepErrors`; fractions."""
    held_out_errors: dict[str, float | int | None] = field(default_factory=dict)
    request_overhead: float = 0.0
    """Seconds of each request outside the engine, which the log's client measured: in itself, the network and the API
    server; 0: unknown."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, as sentences."""

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; `from_dict` reads them."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "library_version": __version__,
            "source": self.source,
            "model": self.model,
            "kind": self.kind,
            "num_requests": self.num_requests,
            "num_train": self.num_train,
            "step_time": self.step_time.to_dict(),
            "settings": asdict(self.settings),
            "speculation": None
            if self.speculation is None
            else {name: getattr(self.speculation, name) for name in _OF_SPECULATION},
            "adapter_share": self.adapter_share,
            "hull": {part: list(ends) for part, ends in self.hull.ranges.items()},
            "training_errors": self.training_errors,
            "held_out_errors": self.held_out_errors,
            "request_overhead": self.request_overhead,
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The profile that `to_dict` described.

        Raises:
            CalibrationError: a field is missing, or a value is out of range.
        """
        if values.get("format") != FORMAT:
            raise CalibrationError(
                f"format is {values.get('format')!r}, not {FORMAT!r}; use a file of pointsman calibrate"
            )
        if values.get("format_version") != FORMAT_VERSION:
            raise CalibrationError(
                f"format_version is {values.get('format_version')!r}; this library reads version {FORMAT_VERSION}: "
                "calibrate again"
            )
        try:
            return cls(
                step_time=LinearStepTime.from_dict(values["step_time"]),
                settings=_read_settings(values["settings"]),
                hull=Hull({part: _read_range(part, values["hull"][part]) for part in StepLoad._fields}),
                source=str(values["source"]),
                model=str(values.get("model", "")),  # older profiles have none
                speculation=_read_speculation(values.get("speculation")),
                adapter_share=Features(adapter_share=float(values.get("adapter_share", 0.0))).adapter_share,
                kind=str(values["kind"]),
                num_requests=_read_count("num_requests", values["num_requests"]),
                num_train=_read_count("num_train", values["num_train"]),
                training_errors=dict(values["training_errors"]),
                held_out_errors=dict(values["held_out_errors"]),
                request_overhead=_read_seconds(
                    "request_overhead", values.get("request_overhead", 0.0)
                ),  # older profiles have none
                notes=[str(note) for note in values["notes"]],
            )
        except KeyError as error:
            raise CalibrationError(f"the field {error.args[0]!r} is missing; calibrate again") from None
        except CalibrationError:
            raise
        except (SimulationError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CalibrationError(f"{error}; calibrate again") from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def load_profile(path: str | PathLike[str]) -> Profile:
    """The profile in a file.

    Raises:
        CalibrationError: the file is not a profile; the message names the file and the field.
    """
    try:
        values = json.loads(read_input(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or no UTF-8
        raise CalibrationError(
            f"{path} is not a profile: it is not JSON ({error}); pointsman calibrate writes profiles"
        ) from None
    if not isinstance(values, dict):
        raise CalibrationError(f"{path} is not a profile: it is not a JSON object; pointsman calibrate writes profiles")
    try:
        return Profile.from_dict(values)
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {shown(str(error), MAX_MESSAGE)}") from None


def warn_outside(profile: Profile, hull: Hull) -> list[str]:
    """One sentence for each field of `StepLoad` in which a simulation leaves the hull of the profile's log.

    Args:
        profile: the profile whose step times were used.
        hull: the hull of the simulation, see `WatchedStepTime`.
    """
    warnings = []
    for part, (low, high) in hull.ranges.items():
        known_low, known_high = profile.hull.ranges[part]
        if high > known_high:
            warnings.append(_outside_warning(PARTS[part], "up to", high, "at most", known_high, profile.source))
        # The smallest steps of two runs differ by chance, so the distance is relative to the whole range.
        if known_low - low > MIN_DISTANCE * known_high:
            warnings.append(_outside_warning(PARTS[part], "down to", low, "at least", known_low, profile.source))
    return warnings


def _outside_warning(part: str, direction: str, value: int, bound: str, limit: int, source: str) -> str:
    return (
        f"{part} go {direction} {value:,}, and the part of {source} that was fitted has {bound} {limit:,}: step times "
        "there are extrapolated, calibrate with a log of such a load"
    )


def _read_settings(values: Mapping[str, Any]) -> EngineSettings:
    known = {entry.name for entry in fields(EngineSettings)}
    if unknown := sorted(set(values) - known):
        raise CalibrationError(f"no setting is called {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for name, value in values.items():
        if name == "async_scheduling":
            if not isinstance(value, bool):
                raise CalibrationError(f"setting {name} is {value!r}; it must be true or false")
        elif name == "kv_groups":
            values = {**values, name: _read_groups(value)}
        elif not (value is None and name in ("num_blocks", "max_model_len")):
            _read_count(name, value, 0 if name in ("num_draft_tokens", "max_loras") else 1)
    check_num_blocks(values.get("num_blocks"))
    return EngineSettings(**values)


def _read_speculation(values: Mapping[str, Any] | None) -> Speculation | None:
    if values is None:
        return None
    shares = {name: tuple(float(share) for share in values[name]) for name in _OF_SPECULATION}
    return Speculation(**shares)  # type: ignore[arg-type]


def _read_groups(value: object) -> tuple[KVGroup, ...]:
    try:
        groups = tuple(KVGroup(*group) for group in value)  # type: ignore[attr-defined]
        return SchedulerConfig(num_blocks=1, max_model_len=1, kv_groups=groups).kv_groups
    except (TypeError, ConfigError) as error:
        raise CalibrationError(f"setting kv_groups is {value!r}: {error}") from None


def _read_count(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise CalibrationError(
            f"{name} is {represented(value)}; it must be a whole number, at least {least} and at most {MAX_TOKENS}"
        )
    return value


def _read_seconds(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise CalibrationError(f"{name} is {represented(value)}; it must be a finite number of seconds, at least 0")
    return float(value)


def _read_range(part: str, value: Any) -> tuple[int, int]:
    low, high = value
    if not all(isinstance(end, int) and math.isfinite(end) for end in (low, high)) or not 0 <= low <= high:
        raise CalibrationError(f"field hull.{part} is {value!r}; it must be two whole numbers, the smaller one first")
    return low, high
