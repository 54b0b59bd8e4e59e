"""Workers: run the simulations of a search in this process, in a pool of processes, or on a Ray cluster.

    with workers(judge, num_processes=2) as runner:
        for sample in runner.run(jobs): ...        # in the order of the jobs

Samples do not depend on the worker. Each worker gets the judge, with the requests, once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.synchronize import Event
from typing import Any, Protocol

from pointsman.sim.errors import SimulationError
from pointsman.sim.trial import Job, Judge, Sample

MAX_PROCESSES = 61  # maximum size of a process pool on Windows
CONNECT_SECONDS = 10.0  # seconds until a Ray cluster counts as unreachable


class Runner(Protocol):
    """Runs simulations."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Sample]:
        """The sample of each job, in the order of the jobs."""


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # does not exist on macOS and Windows
        return os.cpu_count() or 1


def workers(judge: Judge, num_processes: int = 1, ray_address: str | None = None) -> AbstractContextManager[Runner]:
    """The runner of simulations, ready for use.

    Args:
        judge: the data that all simulations share.
        num_processes: number of processes; 1: this process alone. On a Ray cluster, 0: one for each of its CPUs.
        ray_address: address of a Ray cluster, or "local" for one on this machine; None: no Ray.

    Raises:
        SimulationError: `num_processes` is out of range, Ray is not installed, or the cluster cannot be reached.
    """
    minimum = 1 if ray_address is None else 0
    if not minimum <= num_processes <= (MAX_PROCESSES if ray_address is None else 100_000):
        raise SimulationError(f"the number of workers is {num_processes}; it must be from {minimum} to {MAX_PROCESSES}")
    if ray_address is not None:
        return _on_ray(judge, num_processes, ray_address)
    return _in_this_process(judge) if num_processes == 1 else _in_processes(judge, num_processes)


# ---------------------------------------------------------------------- this process


class _InThisProcess:
    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def run(self, jobs: Sequence[Job]) -> Iterator[Sample]:
        return map(self._judge.measure, jobs)


@contextmanager
def _in_this_process(judge: Judge) -> Iterator[Runner]:
    yield _InThisProcess(judge)


# ---------------------------------------------------------------------- a pool of processes


class _InProcesses:
    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, jobs: Sequence[Job]) -> Iterator[Sample]:
        try:
            yield from self._pool.map(_measure, jobs)
        except BrokenProcessPool:
            raise SimulationError(
                "a worker process died, perhaps for lack of memory; try fewer workers or fewer requests"
            ) from None


@contextmanager
def _in_processes(judge: Judge, num_processes: int) -> Iterator[Runner]:
    context = multiprocessing.get_context("spawn")  # works on every system, and is safe beside threads
    stop = context.Event()
    pool = ProcessPoolExecutor(num_processes, context, _init_worker, (judge, stop))
    try:
        with _ignoring_interrupts():
            for _ in range(num_processes):
                pool.submit(_do_nothing)  # starts a process
        yield _InProcesses(pool)
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Context in which started processes ignore Ctrl-C from their beginning; a terminal sends it to all processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _do_nothing() -> None:
    pass


_judge: Judge  # set in worker processes
_stop: Event


def _init_worker(judge: Judge, stop: Event) -> None:
    """Initialise a worker process."""
    global _judge, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _judge, _stop = judge, stop


def _measure(job: Job) -> Sample:
    return _judge.measure(job, _raise_if_stopped)


def _raise_if_stopped(num_finished: int, now: float) -> None:
    if _stop.is_set():
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- a Ray cluster


class _OnRay:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def run(self, jobs: Sequence[Job]) -> Iterator[Sample]:
        from ray.exceptions import RayError

        try:
            yield from self._pool.map(lambda actor, job: actor.measure.remote(job), jobs)
        except RayError as error:
            cause = getattr(error, "cause", None)
            lines = str(cause if isinstance(cause, Exception) else error).strip().splitlines()
            reason = lines[-1] if lines else type(error).__name__
            raise SimulationError(
                f"a worker on the Ray cluster failed: {reason}; keep each node running, with this "
                "version of Python and with pointsman[ray] installed"
            ) from error


@contextmanager
def _on_ray(judge: Judge, num_actors: int, address: str) -> Iterator[Runner]:
    try:
        import ray
        from ray.util import ActorPool
    except ModuleNotFoundError as error:
        raise SimulationError(
            f"a Ray cluster needs {error.name}; install it with: pip install 'pointsman[ray]'"
        ) from None
    was_there = ray.is_initialized()
    if not was_there:
        _check_cluster_answers(address)
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise SimulationError(
                f"cannot reach a Ray cluster at {address!r}: {reason}; give the host:port of its head node"
            ) from None
    actors: list[Any] = []
    try:
        num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(num_actors or num_cpus, num_cpus)  # an actor without a CPU would never start
        shared = ray.put(judge)  # each node gets the judge once
        actor_class = ray.remote(num_cpus=1)(_Actor)
        actors += [actor_class.remote(shared) for _ in range(count)]
        yield _OnRay(ActorPool(actors))
    finally:
        for actor in actors:
            ray.kill(actor)
        if not was_there:
            ray.shutdown()


def _check_cluster_answers(address: str) -> None:
    """Check that a cluster answers at the address. Ray itself would try for minutes, and print a line every few
    seconds."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):  # a word, such as auto or local
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SimulationError(
            f"cannot reach a Ray cluster at {address!r}: {error}; give the host:port that ray start --head printed"
        ) from None


class _Actor:
    """A worker on a cluster."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def measure(self, job: Job) -> Sample:
        return self._judge.measure(job)
