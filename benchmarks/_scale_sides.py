"""Sides of `scale.py`: the compared servers, and what is measured of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import monotonic

from _scale_load import server_options
from _server_client import HOST, Address
from _server_process import ServerProcess, start_server

SECONDS_TO_START = 300.0


@dataclass
class Side:
    """A server and its measurements."""

    name: str
    server: ServerProcess
    seconds_to_start: float
    rates: list[float] = field(default_factory=list)
    """Rate of finished requests per second, for each round."""
    api_cpu: float = 0.0
    engine_cpu: float = 0.0
    requests: int = 0
    hits: float = 0.0
    queries: float = 0.0

    @property
    def address(self) -> Address:
        return (HOST, self.server.port)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        return self.hits / self.queries

    @property
    def api_milliseconds(self) -> float:
        """Processor time of the API process for a request."""
        return self.api_cpu / self.requests * 1e3

    @property
    def engine_milliseconds(self) -> float:
        """Processor time of the engine processes for a request."""
        return self.engine_cpu / self.requests * 1e3


def serve(name: str, num_blocks: int, *options: str, crowded: bool = False) -> Side:
    """Start a server.

    Args:
        name: of the side.
        num_blocks: of all its engines together.
        options: of `pointsman serve`.
        crowded: whether several engines may share a core, which `pointsman serve` refuses; times mean nothing then.
    """
    began = monotonic()
    program = (__file__,) if crowded else ("-m", "pointsman", "serve")
    server = start_server(*server_options(num_blocks), *options, program=program, timeout=SECONDS_TO_START)
    return Side(name, server, monotonic() - began)


def serve_crowded(arguments: list[str]) -> None:
    """Run `pointsman serve` in this process as if the machine had more cores: engines share the existing ones."""
    from pointsman.cli import main
    from pointsman.engine.machine import usable_cores
    from pointsman.server import shares

    cores = usable_cores()
    shares.usable_cores = lambda: [core for core in cores for _ in range(4)]
    shares.num_cores = lambda: 4 * len(cores)
    main(["serve", *arguments])


if __name__ == "__main__":
    serve_crowded(sys.argv[1:])
