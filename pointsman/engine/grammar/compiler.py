"""GrammarCompiler: compiles the grammars of one engine's requests while steps run.

    compiler.add(request)            compile a request's grammar; equal grammars are compiled once
    compiler.take_finished()         -> requests whose grammar is compiled, or has failed
    compiler.find(params)            a grammar that was compiled before, without waiting

The engine's thread calls these methods, which never wait. Background threads wait for a process that compiles
(`process.py`), each thread for one grammar at a time. When a grammar is done, its thread calls `notify`, which wakes an
idle engine.

Most grammars take little time, a few reach the time limit, and only compiling shows which ones are slow. So there are
two stages, each with its own threads:

    new     a slice of processor time each     done, failed, or out of time: then to `slow`
    slow    the whole limit, from the start

A slow grammar is compiled again from its start, so its first slice is lost. A quick grammar waits only until the new
grammars before it have used their slices, however many slow grammars there are.

Tenants share both stages (`fair_queue.py`). Each stage takes the next grammar from the tenant that has been served
least. No tenant gets all threads of a stage, and the number of waiting grammars is bounded per tenant and in total. A
grammar whose queue is full fails, and the client may send the request again later. A grammar that several tenants wait
for is in the queue of each tenant, and is compiled once for all of them.

Compiled grammars are cached, up to `CACHE_BYTES`; the least recently used grammar is evicted first. Failures are cached
for `FAILURE_MEMORY` seconds, so that the same failing grammar does not occupy the process again.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pointsman.engine.errors import (
    NO_COMPILER,
    TOO_MANY_GRAMMARS,
    GrammarError,
    GrammarQueueFullError,
    GrammarUnavailableError,
    first_line,
)
from pointsman.engine.fair_queue import SHARE, CapacityError, FairQueue, QueuedItem, SharedCapacity
from pointsman.engine.grammar.process import (
    NICENESS,
    SLOW_NICENESS,
    Cancelled,
    CompiledGrammar,
    GrammarLimits,
    GrammarProcess,
    GrammarServer,
    Job,
    OutOfTime,
)
from pointsman.engine.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pointsman.core import Request
    from pointsman.engine.grammar.vocabulary import GrammarVocabulary
    from pointsman.engine.params.sampling import SamplingParams
    from pointsman.engine.params.structured_outputs import GrammarSpec

logger = logging.getLogger(__name__)

NUM_THREADS, NUM_SLOW_THREADS = 3, 2
"""Number of threads of the new stage, and of the slow stage. Each thread compiles one grammar at a time; together their
compilations take at most five times `GrammarLimits.memory`."""
MAX_OUT, MAX_SLOW_OUT = 2, 1
"""Maximum number of threads of the new and the slow stage that compile for one tenant."""
FIRST_SLICE, SLICE_PER_TOKEN = 0.15, 1.5e-5
"""Slice of processor time of a new grammar, in seconds: `FIRST_SLICE`, plus `SLICE_PER_TOKEN` for each token of the
vocabulary. Schemas of 2 to 80 properties took 0.01 to 0.08 s with 2,000 tokens, and up to 2 s with 150,000, independent
of the size of the schema."""
MAX_WAITING, MAX_SLOW_WAITING = 256, 32
"""Maximum number of waiting grammars in the new and the slow stage if there is one tenant; all tenants together may
have a third more waiting grammars. Slow grammars take seconds each, so a longer queue would take minutes."""
CACHE_BYTES = 256 * 1024**2
MAX_FAILURES = 256
FAILURE_MEMORY = 60.0
"""Seconds for which the failure of a grammar is cached."""

Outcome: TypeAlias = CompiledGrammar | GrammarError


class _Done(NamedTuple):
    job: _SharedJob
    outcome: Outcome
    tenant: str | None = None
    """The tenant whose requests get the outcome; None: all requests that wait for the job get it."""


class _SharedJob(Job):
    """The compilation of one grammar, and the requests that wait for it. The lock of the `_Worker` guards the
    attributes."""

    def __init__(self, spec: GrammarSpec, stage: _Stage) -> None:
        super().__init__(spec)
        self.stage: _Stage = stage
        """The stage in which the job waits or is compiled."""
        self.requests: dict[Request, None] = {}
        self.num_requests = Counter[str]()
        """Tenant -> number of the tenant's requests that wait for the job."""
        self.queued: dict[str, QueuedItem[_SharedJob]] = {}
        """Tenant -> the job's entry in the queue of this tenant."""
        self.is_out = False
        """Whether the job is being compiled, or has its outcome."""


class _Stage:
    """One stage of compilation: the jobs that wait, in a queue per tenant, for the stage's threads. The lock of the
    `_Worker` guards each stage.

    Args:
        lock: the lock of the `_Worker`.
        max_out: maximum number of jobs of one tenant that are compiled at the same time.
        max_waiting: maximum number of waiting jobs if there is one tenant.
        cpu_slice: seconds of processor time for each job; 0: up to `GrammarLimits.timeout`.
        niceness: niceness of the processes that compile this stage's jobs.
        which: description of the stage's grammars for errors.
    """

    def __init__(
        self, lock: threading.RLock, max_out: int, max_waiting: int, cpu_slice: float, niceness: int, which: str
    ) -> None:
        self.cpu_slice = cpu_slice
        self.niceness = niceness
        self._which = which
        self._queue = FairQueue[_SharedJob](max_out)
        self._capacity = SharedCapacity(-(-max_waiting * (SHARE + 1) // SHARE))
        self._has_news = threading.Condition(lock)
        self._is_closed = False

    def put(self, tenant: str, job: _SharedJob) -> None:
        """Add a job to the queue of a tenant.

        Raises:
            GrammarQueueFullError: the queue is full.
        """
        try:
            self._capacity.take(tenant, 1)
        except CapacityError as error:
            max_held = SHARE * (error.size - error.total + error.held) // (SHARE + 1)
            raise GrammarQueueFullError(
                f"{TOO_MANY_GRAMMARS}{self._which} wait to be compiled: {error.held} of this tenant (at most "
                f"{max_held} now) and {error.total} of all tenants (at most {error.size}); try again later"
            ) from None
        job.queued[tenant] = self._queue.put(tenant, job)
        job.stage = self
        job.is_out = False
        self._has_news.notify()

    def remove(self, tenant: str, job: _SharedJob) -> None:
        """Remove a job from the queue of a tenant."""
        self._queue.remove(job.queued.pop(tenant))
        self._capacity.give_back(tenant, 1)

    def take_job(self) -> QueuedItem[_SharedJob] | None:
        """Wait for the next job and remove it from all queues; None: the stage is closed."""
        while not self._is_closed:
            entry = self._queue.take()
            if entry is not None:
                job = entry.item
                self._capacity.give_back(entry.tenant, 1)
                del job.queued[entry.tenant]
                for tenant in tuple(job.queued):
                    self.remove(tenant, job)
                job.is_out = True
                return entry
            self._has_news.wait()
        return None

    def end_job(self, entry: QueuedItem[_SharedJob]) -> None:
        """Record that the compilation of a taken job has ended, so that another job of its tenant may be taken."""
        self._queue.end(entry)
        self._has_news.notify()  # the next job of the same tenant may run now

    def close(self) -> None:
        """Make every `take_job` return None from now on."""
        self._is_closed = True
        self._has_news.notify_all()


class _Worker:
    """The state that the background threads share with the `GrammarCompiler`. The threads hold no reference to the
    compiler itself, so that it can be garbage-collected."""

    def __init__(self, process: GrammarProcess, first_slice: float) -> None:
        self.process = process
        self.lock = threading.RLock()  # the garbage collector may call `close` in any thread at any time
        self.new = _Stage(self.lock, MAX_OUT, MAX_WAITING, first_slice, NICENESS, "")
        which = f" that take longer than {first_slice:.1f} s"
        self.slow = _Stage(self.lock, MAX_SLOW_OUT, MAX_SLOW_WAITING, 0.0, SLOW_NICENESS, which)
        self.done: SimpleQueue[_Done] = SimpleQueue()
        self.notify: Callable[[], None] | None = None

    def compile_jobs(self, stage: _Stage) -> None:
        """Compile the jobs of a stage one after the other, until the stage is closed. Each thread runs this method."""
        while True:
            with self.lock:
                entry = stage.take_job()
            if entry is None:
                return
            done = self._compile(entry.item)
            with self.lock:
                stage.end_job(entry)
            for one in done:
                self.put_done(one)

    def put_done(self, done: _Done) -> None:
        self.done.put(done)
        if self.notify is not None:
            self.notify()

    def add_request(self, job: _SharedJob, request: Request) -> None:
        """Let a request wait for a job.

        Raises:
            GrammarQueueFullError: the tenant's queue is full; the request is recorded nevertheless.
        """
        tenant = request.tenant
        with self.lock:
            job.requests[request] = None
            job.num_requests[tenant] += 1
            if not job.is_out and tenant not in job.queued:
                job.stage.put(tenant, job)

    def remove_request(self, job: _SharedJob, request: Request) -> None:
        """End a request's wait for a job."""
        tenant = request.tenant
        with self.lock:
            del job.requests[request]
            job.num_requests[tenant] -= 1
            if not job.num_requests[tenant]:
                del job.num_requests[tenant]
                if tenant in job.queued:
                    job.stage.remove(tenant, job)

    def close(self) -> None:
        """End the process and the threads."""
        self.process.close()
        with self.lock:
            self.new.close()
            self.slow.close()

    def _compile(self, job: _SharedJob) -> list[_Done]:
        """Compile a job; return its outcomes: none if the job was cancelled or has moved to the slow stage."""
        stage = job.stage
        try:
            return [_Done(job, self.process.compile(job, stage.cpu_slice, stage.niceness))]
        except Cancelled:
            return []
        except OutOfTime as error:
            return [_Done(job, error)] if stage is self.slow else self._move_to_slow(job)
        except GrammarError as error:
            return [_Done(job, error)]
        except Exception as error:  # ends only the job's requests
            logger.exception("a grammar could not be compiled")
            why = f"the grammar could not be compiled: {type(error).__name__}: {first_line(error)}"
            return [_Done(job, GrammarError(why))]

    def _move_to_slow(self, job: _SharedJob) -> list[_Done]:
        """Move a job to the slow stage; return a failure for each tenant whose queue in that stage is full."""
        refused = []
        with self.lock:
            for tenant in job.num_requests:
                try:
                    self.slow.put(tenant, job)
                except GrammarQueueFullError as error:
                    refused.append(_Done(job, error, tenant))
            if not job.queued:  # a later request for this job waits in the slow stage
                job.stage, job.is_out = self.slow, False
        return refused


class GrammarCompiler:
    """Compiles the grammars of one engine's requests. Threads and process start with the first grammar, or `warm_up`.

    Args:
        tokenizer: the model's tokenizer; None: `check` refuses structured output.
        vocab_size: number of the model's logits per position.
        eos_token_ids: the model's EOS tokens.
        limits: limits for each grammar; None: the defaults.
        cache_bytes: maximum total size of cached grammars, in bytes.

    Raises:
        ValueError: a limit is out of range.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        limits: GrammarLimits | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        limits = limits or GrammarLimits()
        timeout: object = limits.timeout
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout <= 3600:
            raise ValueError(f"grammar_timeout is {timeout!r}; it must be above 0 and at most 3600 seconds")
        self._has_tokenizer = tokenizer is not None
        self._stop_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        read = partial(_read_vocabulary, tokenizer, vocab_size, tuple(eos_token_ids))
        first_slice = FIRST_SLICE + SLICE_PER_TOKEN * vocab_size
        self._worker = _Worker(GrammarProcess(read, limits), first_slice)
        self._cache = GrammarCache(cache_bytes)
        self._failures: OrderedDict[GrammarSpec, tuple[float, GrammarError]] = OrderedDict()
        self._jobs: dict[GrammarSpec, _SharedJob] = {}
        self._job_of: dict[Request, _SharedJob] = {}
        self._taken: list[_Done] = []
        self._threads_to_start = [self._worker.new] * NUM_THREADS + [self._worker.slow] * NUM_SLOW_THREADS
        self._stop = weakref.finalize(self, self._worker.close)

    @property
    def notify(self) -> Callable[[], None] | None:
        """Listener that is called, in a background thread, when `take_finished` has something to return."""
        return self._worker.notify

    @notify.setter
    def notify(self, listener: Callable[[], None] | None) -> None:
        self._worker.notify = listener

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their grammars: added, and neither taken nor forgotten."""
        return len(self._job_of)

    @property
    def pid(self) -> int | None:
        """The id of the process that compiles; None while no process can compile."""
        return self._worker.process.pid

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the process that compiles, because it had ended or did not answer."""
        return self._worker.process.num_restarts

    def check(self, params: SamplingParams) -> None:
        """Refuse a request with structured output if the model cannot have it. An engine calls this before it adds a
        request.

        Raises:
            GrammarError: no request of this model can have structured output.
        """
        if params.structured_outputs is None:
            return
        if not self._has_tokenizer:
            raise GrammarError("structured output needs a tokenizer, and the model has none")
        if not self._stop_token_ids:
            raise GrammarError("structured output needs an EOS token, and the model's configuration names none")
        if find_spec("xgrammar") is None:
            raise GrammarError("structured output needs the package xgrammar; pip install 'pointsman[engine]'")

    def find(self, params: SamplingParams) -> CompiledGrammar | None:
        """The compiled grammar for these parameters, if it is cached; None: it is not cached, or no grammar is
        needed."""
        return None if params.structured_outputs is None else self._cache.get(params.structured_outputs.spec)

    def add(self, request: Request) -> None:
        """Let a request wait for the compilation of its grammar; `take_finished` will return the request with the
        grammar or the failure.

        Raises:
            GrammarUnavailableError: the system cannot start threads; the request is not added.
        """
        self._start_threads()
        spec: GrammarSpec = request.metadata.structured_outputs.spec
        job = self._jobs.get(spec)
        if job is None:
            job = self._jobs[spec] = _SharedJob(spec, self._worker.new)
            failure = self._cached_failure(spec)
            if failure is not None:
                job.is_out = True
                self._worker.put_done(_Done(job, failure))
        self._job_of[request] = job
        try:
            self._worker.add_request(job, request)
        except GrammarQueueFullError as error:
            self._worker.put_done(_Done(job, error, request.tenant))

    def forget(self, request: Request) -> None:
        """Forget a finished request. Cancel the compilation of its grammar if no other request waits for that
        grammar."""
        job = self._job_of.pop(request, None)
        if job is None:
            return
        self._worker.remove_request(job, request)
        if not job.requests:
            del self._jobs[job.spec]
            job.cancel()

    def take_finished(self) -> list[tuple[Request, Outcome]]:
        """Return the requests whose grammar has been compiled or has failed, each with the compiled grammar or the
        error. They no longer wait."""
        found: list[tuple[Request, Outcome]] = []
        for job, outcome, tenant in (*self._taken, *self._take_done()):
            if isinstance(outcome, CompiledGrammar):
                self._cache.put(job.spec, outcome)
            elif not isinstance(outcome, (GrammarQueueFullError, GrammarUnavailableError)):  # not the grammar's fault
                self._cache_failure(job.spec, outcome)
            if self._jobs.get(job.spec) is job:
                for request in tuple(job.requests):
                    if tenant is None or request.tenant == tenant:
                        found.append((request, outcome))
                        self.forget(request)
        self._taken = []
        return found

    def wait(self, timeout: float) -> None:
        """Wait until `take_finished` has something to return, at most `timeout` seconds."""
        if not self._taken:
            try:
                self._taken.append(self._worker.done.get(timeout=timeout))
            except Empty:
                return

    def warm_up(self, server: GrammarServer | None = None) -> Future[CompiledGrammar | None]:
        """Start the process in the background and let it compile a grammar, so that the first request need not wait for
        the start.

        Args:
            server: a process that was started earlier, for this compiler alone; None: a new process is started.

        Returns:
            A future of the grammar of any JSON object, which is not cached. Its result is None if this model cannot
            have structured output, or if the compilation failed, which is logged.
        """
        grammar: Future[CompiledGrammar | None] = Future()
        if self._has_tokenizer and self._stop_token_ids and find_spec("xgrammar") is not None:
            threading.Thread(
                target=_start_and_compile,
                args=(self._worker.process, server, grammar),
                name="pointsman-grammar-start",
                daemon=True,
            ).start()
        else:
            if server is not None:
                server.close()
            grammar.set_result(None)
        return grammar

    def close(self) -> None:
        """Cancel all compilations, and end the process and the threads. Garbage collection of the compiler ends them
        too."""
        for job in self._jobs.values():
            job.cancel()
        self._stop()

    # ------------------------------------------------------------------ inside

    def _take_done(self) -> list[_Done]:
        done = []
        while not self._worker.done.empty():
            done.append(self._worker.done.get())
        return done

    def _start_threads(self) -> None:
        worker = self._worker
        while self._threads_to_start:
            name = f"pointsman-grammar-{len(self._threads_to_start)}"
            thread = threading.Thread(
                target=worker.compile_jobs, args=self._threads_to_start[-1:], name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                raise GrammarUnavailableError(f"{NO_COMPILER}{first_line(error)}; try again later") from error
            self._threads_to_start.pop()

    def _cached_failure(self, spec: GrammarSpec) -> GrammarError | None:
        until, error = self._failures.get(spec, (0.0, None))
        return error if time.monotonic() < until else None

    def _cache_failure(self, spec: GrammarSpec, error: GrammarError) -> None:
        if self._cached_failure(spec) is None:  # a repeated failure does not extend the time of a cached one
            self._failures.pop(spec, None)
            self._failures[spec] = (time.monotonic() + FAILURE_MEMORY, error)
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)


class GrammarCache:
    """A cache of compiled grammars with a maximum size; the least recently used grammars are evicted first.

    Args:
        max_bytes: maximum total size of the grammars, in bytes; a larger grammar is not cached.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, spec: GrammarSpec) -> CompiledGrammar | None:
        grammar = self._grammars.get(spec)
        if grammar is not None:
            self._grammars.move_to_end(spec)
        return grammar

    def put(self, spec: GrammarSpec, grammar: CompiledGrammar) -> None:
        previous = self._grammars.pop(spec, None)
        if previous is not None:
            self.num_bytes -= previous.num_bytes
        if grammar.num_bytes > self._max_bytes:
            return
        self._grammars[spec] = grammar
        self.num_bytes += grammar.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._grammars.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


def _read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    from pointsman.engine.grammar.vocabulary import read_vocabulary  # imports xgrammar

    return read_vocabulary(tokenizer, vocab_size, eos_token_ids)


def _start_and_compile(
    process: GrammarProcess, server: GrammarServer | None, grammar: Future[CompiledGrammar | None]
) -> None:
    compiled = None
    try:
        process.start(server)
        compiled = process.compile(Job(StructuredOutputsParams(json_object=True).spec))
    except Cancelled:
        return
    except Exception as error:  # a request that meets the same error reports it again
        logger.warning("the trial grammar could not be compiled, so structured output may fail: %s", first_line(error))
    finally:
        grammar.set_result(compiled)
