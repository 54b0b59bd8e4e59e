"""Distributions of lengths and times, arrival processes, and their short names.

constant:512               always 512; a plain number means the same
uniform:100,200            uniform between 100 and 200
exponential:5              mean 5
lognormal:150,0.8          median 150; the logarithm's standard deviation is 0.8
values:10,20,500           10, 20 or 500, with equal probability
mix:0.7*lognormal:150,0.6+0.3*constant:3000

constant:4                 4 arrivals a second, evenly spaced
poisson:4                  4 a second on average, independent of each other
gamma:4,2                  4 a second, with gaps whose coefficient of variation is 2 (1 is poisson:4)
bursts:4,10                4 a second, in bursts of ten

uniform:20                 20 adapters, equally popular
zipf:20,1                  20 adapters, of which the second is half as popular as the first, the third a third, ...; a
                           plain number means the same
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import PointsmanError, did_you_mean

Floats: TypeAlias = npt.NDArray[np.float64]
T = TypeVar("T")


class WorkloadError(PointsmanError, ValueError):
    """A workload that cannot be made. The message names the value and what it must be."""


class Distribution(Protocol):
    """A distribution of numbers that are at least 0."""

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        """An array [n] of independent draws."""

    def mean(self) -> float: ...


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def rate(self) -> float:
        """Mean arrivals a second."""

    def gaps(self, rng: np.random.Generator, n: int) -> Floats:
        """An array [n]: seconds between each arrival and the arrival before it; n is a multiple of the burst size."""


# ---------------------------------------------------------------------- distributions


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def __post_init__(self) -> None:
        _check_field(self, "value", minimum=0)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.full(n, float(self.value))

    def mean(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_field(self, "low", minimum=0)
        _check_field(self, "high", minimum=self.low)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.uniform(self.low, self.high, n)

    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Exponential:
    average: float

    def __post_init__(self) -> None:
        _check_field(self, "average", minimum=0)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.exponential(self.average, n)

    def mean(self) -> float:
        return float(self.average)


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        _check_field(self, "median", above=0)
        _check_field(self, "sigma", minimum=0)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.lognormal(math.log(self.median), self.sigma, n)

    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Empirical:
    values: tuple[float, ...]
    """Values to draw from, all with the same probability."""

    def __post_init__(self) -> None:
        if not self.values or not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise WorkloadError(f"values are {self.values}; there must be one or more, each finite and at least 0")

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.array(self.values, dtype=np.float64)[rng.integers(0, len(self.values), n)]

    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Mixture:
    parts: tuple[tuple[float, Distribution], ...]
    """Pairs (probability, distribution); the probabilities add up to 1."""

    def __post_init__(self) -> None:
        weights = [weight for weight, _ in self.parts]
        if not all(weight >= 0 for weight in weights) or not math.isclose(math.fsum(weights), 1, abs_tol=1e-6):
            raise WorkloadError(f"the probabilities of a mixture are {weights}; they must be positive and add up to 1")

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        edges = np.cumsum([weight for weight, _ in self.parts])[:-1]
        which = np.searchsorted(edges, rng.random(n), side="right")
        drawn = np.empty(n)
        for index, (_, part) in enumerate(self.parts):
            chosen = which == index
            drawn[chosen] = part.sample(rng, int(chosen.sum()))
        return drawn

    def mean(self) -> float:
        return math.fsum(weight * part.mean() for weight, part in self.parts)


def sample_lengths(distribution: Distribution, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
    """An array [n] of draws as numbers of tokens: rounded, at least 1."""
    drawn = np.rint(np.clip(distribution.sample(rng, n), 1, 2**31 - 1))
    return drawn.astype(np.int64)


# ---------------------------------------------------------------------- arrivals


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    rate: float

    def __post_init__(self) -> None:
        _check_field(self, "rate", above=0)

    def gaps(self, rng: np.random.Generator, n: int) -> Floats:
        return np.full(n, 1 / self.rate)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    rate: float

    def __post_init__(self) -> None:
        _check_field(self, "rate", above=0)

    def gaps(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.exponential(1 / self.rate, n)


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    rate: float
    cv: float
    """Coefficient of variation of the gaps: 1 is Poisson; above 1, arrivals are less regular."""

    def __post_init__(self) -> None:
        _check_field(self, "rate", above=0)
        _check_field(self, "cv", above=0)

    def gaps(self, rng: np.random.Generator, n: int) -> Floats:
        shape = self.cv**-2
        return rng.gamma(shape, 1 / (self.rate * shape), n)


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    rate: float
    size: int
    """Number of requests that arrive at one time; bursts are independent of each other."""

    def __post_init__(self) -> None:
        _check_field(self, "rate", above=0)
        _check_field(self, "size", minimum=1)
        if self.size != int(self.size):
            raise WorkloadError(f"size is {self.size}; it must be a whole number of requests")

    def gaps(self, rng: np.random.Generator, n: int) -> Floats:
        gaps = np.zeros(n)
        gaps[:: int(self.size)] = rng.exponential(self.size / self.rate, -(-n // int(self.size)))
        return gaps


# ---------------------------------------------------------------------- short names


_DISTRIBUTIONS: dict[str, Callable[..., Distribution]] = {
    "constant": Constant,
    "uniform": Uniform,
    "exponential": Exponential,
    "lognormal": LogNormal,
}
_ARRIVALS: dict[str, Callable[..., Arrivals]] = {
    "constant": ConstantArrivals,
    "poisson": PoissonArrivals,
    "gamma": GammaArrivals,
    "bursts": BurstArrivals,
}
_VALUES = {
    "median": "a median",
    "sigma": "a standard deviation of the logarithm",
    "low": "a minimum",
    "high": "a maximum",
    "average": "a mean",
    "value": "a value",
    "rate": "a rate",
    "cv": "a coefficient of variation",
    "size": "a number of requests",
}
"""The values of the forms in words, by the name of their field."""
_PARTS = {"values": "one or more numbers", "mix": "distributions with probabilities"}
"""What forms without fixed values need."""
_LENGTH_EXAMPLES = {
    "constant": "constant:512",
    "uniform": "uniform:100,200",
    "exponential": "exponential:5",
    "lognormal": "lognormal:150,0.8",
    "values": "values:10,20,500",
    "mix": "mix:0.7*lognormal:150,0.6+0.3*constant:3000",
}
_ARRIVAL_EXAMPLES = {"constant": "constant:4", "poisson": "poisson:4", "gamma": "gamma:4,2", "bursts": "bursts:4,10"}
_MIX_EXAMPLE = _LENGTH_EXAMPLES["mix"]


def parse_distribution(text: str) -> Distribution:
    """The distribution that a short name stands for; the names are in the module docstring.

    Raises:
        WorkloadError: `text` is not the name of a distribution.
    """
    name, colon, rest = text.strip().partition(":")
    name = name.strip().lower()
    if not colon and name not in _LENGTH_EXAMPLES:
        return Constant(_parse_number(name, text, _LENGTH_EXAMPLES["lognormal"]))
    if name == "mix" and rest.strip():
        return Mixture(tuple(_parse_mixture_part(part, text) for part in re.split(r"\+(?=[^+*:]+\*)", rest)))
    if name == "values" and rest.strip():
        return Empirical(tuple(_parse_number(value, text, _LENGTH_EXAMPLES[name]) for value in rest.split(",")))
    return _parse_named(_DISTRIBUTIONS, name, rest, text, _LENGTH_EXAMPLES)


def parse_arrivals(text: str) -> Arrivals:
    """The arrival process that a short name stands for; the names are in the module docstring.

    Raises:
        WorkloadError: `text` is not the name of an arrival process.
    """
    name, colon, rest = text.strip().partition(":")
    if not colon and re.fullmatch(r"[0-9]*\.?[0-9]+", name):
        raise WorkloadError(f"{text!r} names no arrival process; write poisson:{name} or constant:{name}")
    return _parse_named(_ARRIVALS, name.strip().lower(), rest, text, _ARRIVAL_EXAMPLES)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Popularity of adapters (LoRA): adapter k, from 1 on, has the weight 1 / k ** `exponent` (Zipf's law)."""

    num_adapters: int
    exponent: float = 1.0
    """0: all adapters are equally popular."""

    def __post_init__(self) -> None:
        if self.num_adapters < 1:
            raise WorkloadError(f"the number of adapters is {self.num_adapters}; it must be at least 1")
        if not 0 <= self.exponent < math.inf:
            raise WorkloadError(f"the exponent of adapters is {self.exponent}; it must be finite and at least 0")

    def sample(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """An array [n] of independent draws, from 0 to `num_adapters` - 1."""
        weights = np.arange(1, self.num_adapters + 1) ** -self.exponent
        return rng.choice(self.num_adapters, n, p=weights / weights.sum())


def parse_adapters(text: str) -> Adapters:
    """The popularity of adapters that a text stands for; the forms are in the module docstring.

    Raises:
        WorkloadError: `text` has another form.
    """
    found = re.fullmatch(r"\s*(?:(uniform|zipf):)?\s*([0-9]{1,9})\s*(?:,\s*([0-9]*\.?[0-9]+)\s*)?", text.lower())
    if found is None or (found[3] is not None) != (found[1] == "zipf"):
        raise WorkloadError(f"{text!r} is no number of adapters; write 20, zipf:20,1.2 or uniform:20")
    exponent = 0.0 if found[1] == "uniform" else float(found[3] or 1)
    return Adapters(int(found[2]), exponent)


def _parse_mixture_part(part: str, text: str) -> tuple[float, Distribution]:
    weight, star, distribution = part.partition("*")
    if not star or distribution.lstrip().lower().startswith("mix:"):
        raise WorkloadError(
            f"{text!r}: {part!r} is not PROBABILITY*DISTRIBUTION; write the mixture like {_MIX_EXAMPLE}"
        )
    return _parse_number(weight, text, _MIX_EXAMPLE), parse_distribution(distribution)


def _parse_named(
    known_forms: dict[str, Callable[..., T]], name: str, values_text: str, text: str, examples: Mapping[str, str]
) -> T:
    if name not in examples:
        raise WorkloadError(
            f"{text!r}: unknown form {name!r}; {did_you_mean(name, examples)}known forms are {', '.join(examples)}"
        )
    names = [each.name for each in fields(known_forms[name])] if name in known_forms else []  # type: ignore[arg-type]
    if not values_text.strip():
        needed = " and ".join(_VALUES[each] for each in names) or _PARTS[name]
        raise WorkloadError(f"{text!r}: {name} needs {needed}, like {examples[name]}")
    make = known_forms[name]
    values = [_parse_number(value, text, examples[name]) for value in values_text.split(",")]
    if len(values) != len(names):
        raise WorkloadError(
            f"{text!r} has {len(values)} values, but needs {len(names)}; write {name}:{','.join(names)}"
        )
    try:
        return make(*values)
    except WorkloadError as error:
        raise WorkloadError(f"{text!r}: {error}") from None


def _parse_number(value: str, text: str, example: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise WorkloadError(
            f"{text!r}: {value.strip()!r} is not a number; write a number or a form like {example}"
        ) from None
    if not math.isfinite(number):
        raise WorkloadError(f"{text!r}: {value.strip()} is not finite; write a finite number")
    return number


def _check_field(owner: object, name: str, *, minimum: float | None = None, above: float | None = None) -> None:
    value = getattr(owner, name)
    if not math.isfinite(value) or (minimum is not None and value < minimum) or (above is not None and value <= above):
        limit = f"at least {minimum:g}" if minimum is not None else f"above {above:g}"
        raise WorkloadError(f"{name} is {value:g}; it must be finite and {limit}")
