"""Live engines, stepped by a client in real time: the bundled one in this process, and vLLM's in a process of its own.

Both have the same method, so a scene or a workload can be sent to either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import numpy as np
from _common import REPOSITORY
from _open_loop import TokenTimes, send
from _worker_process import WorkerProcess
from vllm_env import python_of

from pointsman.engine import Engine, SamplingParams

DEMO = REPOSITORY / "pointsman" / "engine" / "demo"
VLLM_BLOCK_SIZE = 32
"""Block size of vLLM, whose attention on a CPU accepts only multiples of 32."""
_WORKER = Path(__file__).resolve().parent / "_vllm_calibration_worker.py"
_SECONDS_TO_OPEN, _SECONDS_TO_SERVE = 300, 600


class Prompted(Protocol):
    """Anything with a prompt length."""

    @property
    def num_prompt_tokens(self) -> int: ...


def prompts_of(sent: Sequence[Prompted], vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompt tokens for each request; prompts of different seeds share no prefix."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, vocab_size, size=each.num_prompt_tokens).tolist() for each in sent]


class BundledEngine:
    """The bundled engine.

    Args:
        model: a directory, or "demo".
        settings: of `Engine`.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self.engine = Engine(model, clock=monotonic, **settings)
        self.vocab_size = int(self.engine.model_config.vocab_size)
        self._num_sent = 0

    def serve(
        self,
        arrivals: Sequence[float],
        prompts: Sequence[list[int]],
        num_output_tokens: Sequence[int],
        tenants: Sequence[str] = (),
    ) -> TokenTimes:
        """Send all requests at their times; returns the times of each request's tokens."""
        engine, first = self.engine, self._num_sent
        self._num_sent += len(arrivals)

        def add(number: int, late: float) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens[number], ignore_eos=True)
            name, arrival = str(first + number), monotonic() - late
            tenant = tenants[number] if tenants else ""
            engine.add_request(name, prompts[number], params, arrival_time=arrival, tenant=tenant)

        def step() -> list[tuple[int, int]]:
            return [(int(output.request_id) - first, 1) for output in engine.step()]

        tokens = send(arrivals, add, step, engine.has_unfinished_requests)
        while not engine.scheduler.is_idle:
            engine.step()  # an empty step reports the last ends
        return tokens

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class Vllm:
    """vLLM, stepped by its client like the bundled engine.

    Args:
        model: a directory.
        settings: of vLLM's `EngineArgs`.
        threads: of the model runner.
        opening: further fields of the worker's "open" command, see `_vllm_calibration_worker.py`.

    Raises:
        WorkerFailed: it did not start.
    """

    def __init__(self, model: Path, settings: Mapping[str, Any], threads: int = 1, **opening: Any) -> None:
        environment = {
            "PYTHONPATH": f"{REPOSITORY}:{_WORKER.parent}",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._worker = WorkerProcess("vllm", [python_of(), _WORKER], environment)
        settings = {"block_size": VLLM_BLOCK_SIZE, **settings}
        self._worker.ask("open", _SECONDS_TO_OPEN, model=str(model), settings=settings, **opening)

    def serve(
        self,
        arrivals: Sequence[float],
        prompts: Sequence[list[int]],
        num_output_tokens: Sequence[int],
        tenants: Sequence[str] = (),
    ) -> TokenTimes:
        """Send all requests at their times, as `BundledEngine.serve` does; returns each request's token times."""
        told = self._worker.ask(
            "run",
            _SECONDS_TO_SERVE,
            arrivals=list(arrivals),
            prompts=list(prompts),
            num_output_tokens=list(num_output_tokens),
            tenants=list(tenants),
        )
        return list(told["tokens"])

    def close(self) -> None:
        """End the process of vLLM."""
        self._worker.close()
