"""GrammarCompiler: the grammars of one engine's requests, compiled beside its steps.

    compiler.add(request)            compile a request's grammar; equal ones are compiled once
    compiler.take()                  -> requests whose grammar is compiled, or has failed
    compiler.find(params)            a grammar that was compiled before: no wait

All of these belong to the engine's thread and return at once. Behind them threads wait for a process that compiles
(`process.py`), each for one grammar at a time. When one is done, `notify` is called, in such a thread: that wakes
an engine without anything else to do.

Most grammars take little time, a few reach the time limit, and only compiling shows which. So
there are two queues, each with threads of its own:

    new     a slice of the limit each          done, failed, or out of time: then to `slow`
    slow    the whole limit, from the start

A grammar that takes long is compiled again from its start, which costs one slice more in all; and however many such
grammars there are, a quick one waits only until those before it have had their slice. Both queues are bounded; what
finds its queue full fails, and may be sent again later.

What was compiled is kept, up to `CACHE_BYTES`, least recently used first to go. A failure is kept too, for a while: the
same hopeless grammar does not occupy the process again.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pointsman.engine.errors import GrammarError, GrammarQueueFullError, first_line
from pointsman.engine.grammar.process import (
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

NUM_THREADS, NUM_SLOW_THREADS = 2, 1
"""Grammars compiled at a time, of the new ones and of the slow ones."""
FIRST_SLICE, SLICE_PER_TOKEN = 0.5, 1e-5
"""Seconds that a new grammar is compiled before others have their turn, and how many more for each token of the
vocabulary: with 150,000 tokens, schemas of 4 to 80 properties took 1.5 to 2 s on an idle core, whatever their size."""
MAX_WAITING, MAX_SLOW_WAITING = 256, 32
"""Grammars in each queue. Slow ones take seconds each, so that a longer queue would mean minutes."""
CACHE_BYTES = 256 * 1024**2
MAX_FAILURES = 256
FAILURE_MEMORY = 60.0
"""Seconds for which a failure is kept."""

Outcome: TypeAlias = CompiledGrammar | GrammarError


class _Done(NamedTuple):
    job: Job
    outcome: Outcome


class _Worker:
    """What the threads share with the compiler. They do not refer to the compiler itself, so that it can be
    collected."""

    def __init__(self, process: GrammarProcess, timeout: float, first_slice: float) -> None:
        self.process = process
        self.timeout = timeout
        self.first_slice = min(first_slice, timeout)
        self.new: SimpleQueue[Job | None] = SimpleQueue()
        self.slow: SimpleQueue[Job | None] = SimpleQueue()
        self.done: SimpleQueue[_Done] = SimpleQueue()
        self.notify: Callable[[], None] | None = None

    def run(self, jobs: SimpleQueue[Job | None]) -> None:
        """A thread: one job of that queue after the other, until there is a None in place of one."""
        while (job := jobs.get()) is not None:
            try:
                done = self._compile(job, is_new=jobs is self.new)
            except Cancelled:
                continue
            if done is not None:
                self.put_done(done)

    def put_done(self, done: _Done) -> None:
        self.done.put(done)
        if self.notify is not None:
            self.notify()

    def _compile(self, job: Job, is_new: bool) -> _Done | None:
        """The outcome; None if the job was moved to the slow queue."""
        timeout = self.first_slice if is_new else self.timeout
        try:
            return _Done(job, self.process.compile(job, timeout))
        except Cancelled:
            raise
        except OutOfTime as error:
            if timeout == self.timeout:
                return _Done(job, error)
        except GrammarError as error:
            return _Done(job, error)
        except Exception as error:  # whatever it is, it ends the job's requests and nothing else
            logger.exception("a grammar could not be compiled")
            why = f"the grammar could not be compiled: {type(error).__name__}: {first_line(error)}"
            return _Done(job, GrammarError(why))
        if self.slow.qsize() >= MAX_SLOW_WAITING:
            which = f" that take longer than {timeout:.1f} s"
            return _Done(job, _queue_full(MAX_SLOW_WAITING, which))
        self.slow.put(job)
        return None


def _queue_full(limit: int, which: str = "") -> GrammarQueueFullError:
    return GrammarQueueFullError(
        f"too many grammars{which} wait to be compiled, and the limit is {limit}; try again later"
    )


class GrammarCompiler:
    """Compiles the grammars of one engine's requests. Nothing is started before the first of them, or `warm_up`.

    Args:
        tokenizer: of the model; None: `check` refuses all.
        vocab_size: the number of the model's logits.
        eos_token_ids: of the model.
        limits: for each grammar.
        cache_bytes: the maximum that compiled grammars may take.

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
        self._worker = _Worker(GrammarProcess(read, limits), limits.timeout, first_slice)
        self._cache = GrammarCache(cache_bytes)
        self._failures: OrderedDict[GrammarSpec, tuple[float, GrammarError]] = OrderedDict()
        self._jobs: dict[GrammarSpec, Job] = {}
        self._waiting: dict[Job, list[Request]] = {}
        self._job_of: dict[Request, Job] = {}
        self._taken: list[_Done] = []
        self._has_threads = False
        self._stop = weakref.finalize(self, _stop, self._worker)

    @property
    def notify(self) -> Callable[[], None] | None:
        """Called in another thread when there is something to `take`."""
        return self._worker.notify

    @notify.setter
    def notify(self, notify: Callable[[], None] | None) -> None:
        self._worker.notify = notify

    @property
    def num_waiting(self) -> int:
        """Requests that were added and neither taken nor forgotten."""
        return len(self._job_of)

    @property
    def pid(self) -> int | None:
        """The process that compiles; None before it is needed."""
        return self._worker.process.pid

    def check(self, params: SamplingParams) -> None:
        """What an engine calls before it adds a request.

        Raises:
            GrammarError: no request of this model can have structured output.
        """
        if params.structured_outputs is None:
            return
        if not self._has_tokenizer:
            raise GrammarError("structured output needs a tokenizer, and the model has none")
        if not self._stop_token_ids:
            raise GrammarError("structured output needs an EOS token to end a text with, and the model names none")
        if find_spec("xgrammar") is None:
            raise GrammarError("structured output needs the package xgrammar; pip install 'pointsman[engine]'")

    def find(self, params: SamplingParams) -> CompiledGrammar | None:
        """The request's grammar, if it was compiled before."""
        return None if params.structured_outputs is None else self._cache.get(params.structured_outputs.spec)

    def add(self, request: Request) -> None:
        """Compile the grammar of a request; `take` will return the two together."""
        spec: GrammarSpec = request.metadata.structured_outputs.spec
        job = self._jobs.get(spec)
        if job is None:
            job = self._jobs[spec] = Job(spec)
            self._waiting[job] = []
            failure = self._failure(spec)
            if failure is not None:
                self._worker.put_done(_Done(job, failure))
            elif self._worker.new.qsize() >= MAX_WAITING:
                self._worker.put_done(_Done(job, _queue_full(MAX_WAITING)))
            else:
                self._start_threads()
                self._worker.new.put(job)
        self._waiting[job].append(request)
        self._job_of[request] = job

    def forget(self, request: Request) -> None:
        """A request has finished. A grammar that no other request waits for is not compiled any further."""
        job = self._job_of.pop(request, None)
        if job is None:
            return
        waiting = self._waiting[job]
        waiting.remove(request)
        if not waiting:
            del self._waiting[job]
            del self._jobs[job.spec]
            job.cancel()

    def take(self) -> list[tuple[Request, Outcome]]:
        """Requests that need not wait any longer, each with its grammar or with the reason why there is none."""
        found: list[tuple[Request, Outcome]] = []
        for job, outcome in (*self._taken, *self._drain()):
            if isinstance(outcome, CompiledGrammar):
                self._cache.put(job.spec, outcome)
            elif not isinstance(outcome, GrammarQueueFullError):  # which says nothing about the grammar
                self._note_failure(job.spec, outcome)
            if self._jobs.get(job.spec) is job:
                del self._jobs[job.spec]
                for request in self._waiting.pop(job):
                    del self._job_of[request]
                    found.append((request, outcome))
        self._taken = []
        return found

    def wait(self, timeout: float) -> None:
        """Until there is something to `take`, at most `timeout` seconds."""
        if not self._taken:
            try:
                self._taken.append(self._worker.done.get(timeout=timeout))
            except Empty:
                return

    def warm_up(self, server: GrammarServer | None = None) -> Future[CompiledGrammar | None]:
        """Start the process now, in the background, and have it compile a grammar, so that the first request waits for
        neither.

        Args:
            server: a process that was started before the model was loaded, for this compiler alone; None: a new one.

        Returns:
            The grammar of a JSON object, which is not kept here; None if there is none: no request of this model can
            have one, or the log says why.
        """
        grammar: Future[CompiledGrammar | None] = Future()
        if self._has_tokenizer and self._stop_token_ids and find_spec("xgrammar") is not None:
            threading.Thread(
                target=_compile_first,
                args=(self._worker.process, server, self._worker.timeout, grammar),
                name="pointsman-grammar-start",
                daemon=True,
            ).start()
        else:
            if server is not None:
                server.close()
            grammar.set_result(None)
        return grammar

    def close(self) -> None:
        """End the process and the threads; nothing more will be compiled. Dropping the compiler does so too."""
        for job in self._jobs.values():
            job.cancel()
        self._stop()

    # ------------------------------------------------------------------ inside

    def _drain(self) -> list[_Done]:
        done = []
        while not self._worker.done.empty():
            done.append(self._worker.done.get())
        return done

    def _start_threads(self) -> None:
        if self._has_threads:
            return
        self._has_threads = True
        worker = self._worker
        for number, jobs in enumerate((worker.new,) * NUM_THREADS + (worker.slow,) * NUM_SLOW_THREADS, start=1):
            threading.Thread(target=worker.run, args=(jobs,), name=f"pointsman-grammar-{number}", daemon=True).start()

    def _failure(self, spec: GrammarSpec) -> GrammarError | None:
        until, error = self._failures.get(spec, (0.0, None))
        return error if time.monotonic() < until else None

    def _note_failure(self, spec: GrammarSpec, error: GrammarError) -> None:
        if self._failure(spec) is None:  # a known failure does not become newer by being reported again
            self._failures.pop(spec, None)
            self._failures[spec] = (time.monotonic() + FAILURE_MEMORY, error)
            if len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)


class GrammarCache:
    """Compiled grammars, up to a number of bytes; the least recently used ones are dropped first.

    Args:
        max_bytes: one that is larger by itself is not kept.
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


def _compile_first(
    process: GrammarProcess, server: GrammarServer | None, timeout: float, grammar: Future[CompiledGrammar | None]
) -> None:
    compiled = None
    try:
        process.start(server)
        compiled = process.compile(Job(StructuredOutputsParams(json_object=True).spec), timeout)
    except Cancelled:
        return
    except Exception as error:  # whatever it is, it is reported again to the requests that meet it
        logger.warning("no grammar could be compiled at the start: %s", first_line(error))
    finally:
        grammar.set_result(compiled)


def _stop(worker: _Worker) -> None:
    worker.process.close()
    for _ in range(NUM_THREADS):
        worker.new.put(None)
    for _ in range(NUM_SLOW_THREADS):
        worker.slow.put(None)
