"""EngineFleet: the engines behind one API process. It routes requests, sends questions to all engines, and restarts
dead ones.

    fleet = EngineFleet([client, ...], restart=start_again, max_restarts=5)
    stream = fleet.generate(request)          # as `EngineClient`: the engine is chosen when the request is sent
    await fleet.ask(Pause("keep", False))     # all engines, also those that are started later

Requests survive the death of their engine: they are resumed in another engine, or wait for the restarted one. Received
tokens are kept. Sampling depends only on the engines' seed, the request's id and the position, so the output is the
same as without the death. A request that was in more than `max_resumes` engines when they died may be the cause, and
fails.

An engine that gives no sign of life (`heartbeat.py`) gets no requests while other engines take them, and counts as dead
when it has been silent for too long.

A dead engine is restarted immediately. If it dies again or does not start, the delay doubles each time. After
`max_restarts` consecutive failures it stays dead. The new engine gets the pause state and the limits of the other
engines before its first request. While no engine lives, requests wait for the next engine that is started. When all
engines stay dead, the fleet is dead, and the server ends.

A fleet may begin with its first engine alone (`start_fleet`); the other engines join later, as restarted engines do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from pointsman.engine.errors import EngineDeadError, EngineStalledError
from pointsman.routing import Router
from pointsman.server.service.engine_client import EngineClient, EngineStartError, queue_in_turns
from pointsman.server.service.receiver import ClientStream
from pointsman.server.wire.messages import Delta, EngineInfo, EngineRequest
from pointsman.server.wire.questions import (
    AnswerT,
    OneEngineQuestion,
    Pause,
    Question,
    RequestQuestion,
    ResetPrefixCache,
    Resume,
    SetMaxNumActiveSeqs,
    SetPriority,
)

if TYPE_CHECKING:
    from pointsman.server.metrics.observations import EngineObservations

logger = logging.getLogger(__name__)

LONGEST_DELAY = 30.0
"""Maximum delay before a restart, in seconds."""
FORGIVEN_AFTER = 60.0
"""Seconds of running after which an engine's earlier failures no longer count."""
DEFAULT_RESUMES = 3
"""Maximum number of times that a request is resumed after its engine died."""
NONE_LIVES = "no engine runs at the moment, one is being started; try again in a few seconds"

Restart = Callable[[int, int], Awaitable[EngineClient]]


class StartEngine(Protocol):
    """Starts engine `index`, and returns when its model is loaded. `num_restarts` is the number of its restarts so
    far."""

    def __call__(self, index: int, num_restarts: int, tokenizer: Any = None, /) -> Awaitable[EngineClient]: ...


class EngineFleet:
    """Engines of one model, with equal options. One event loop owns it.

    Args:
        engines: the engines, which have loaded the model; at least one.
        restart: restarts an engine, given its number and the number of its restarts so far; None: a dead engine stays
            dead.
        max_restarts: number of consecutive failures (deaths or failed starts) after which an engine stays dead.
        max_resumes: maximum number of times that a request is resumed after its engine died.

    Attributes:
        engines: the engines by their numbers; dead engines, and placeholders of engines to start, stay here until they
            are replaced.
        dead: event, set when all engines are dead and none will be restarted.
        num_wanted: the number of engines that should live now; fewer than all if an autoscaler starts and ends engines.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        restart: Restart | None = None,
        max_restarts: int = 0,
        max_resumes: int = DEFAULT_RESUMES,
    ) -> None:
        self.engines = list(engines)
        self.dead = asyncio.Event()
        self.num_wanted = len(self.engines)
        self._restart = restart
        self._max_restarts = max_restarts if restart is not None else 0
        self._max_resumes = max_resumes
        count = len(self.engines)
        info = self.info
        num_blocks = max(1, info.kv_cache_tokens // info.block_size)
        self._router = Router(count, info.block_size, num_blocks) if count > 1 else None
        self._observations: Sequence[EngineObservations] = ()
        self._paused: Pause | None = None
        self._active_limit: SetMaxNumActiveSeqs | None = None
        self._waiting: dict[ClientStream, None] = {}  # requests that wait for an engine, while no engine lives
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._num_failures = [0] * count  # consecutive failures of each engine
        self._num_restarts = [0] * count
        self._num_resumed = [0] * count
        self._num_hangs = [0] * count
        now = asyncio.get_running_loop().time()
        self._born = [now] * count
        self._is_stopping = False
        self._death: str | None = None
        for index, engine in enumerate(self.engines):
            engine.on_death = partial(self._on_death, index)

    @property
    def info(self) -> EngineInfo:
        """The description of the first engine; those of other engines differ only in the process ids."""
        return self.engines[0].info

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer of the model; None if the model has none."""
        return self.engines[0].tokenizer

    @property
    def max_num_running(self) -> int:
        """Maximum number of running requests in all engines together, as configured at the start."""
        return len(self.engines) * self.info.max_num_running

    @property
    def num_unsent(self) -> int:
        """The number of requests that wait for an engine, as no engine lives."""
        return len(self._waiting)

    @property
    def num_restarts(self) -> list[int]:
        """Number of restarts of each engine."""
        return self._num_restarts

    @property
    def num_resumed(self) -> list[int]:
        """Number of requests of each engine that were resumed after it died."""
        return self._num_resumed

    @property
    def num_hangs(self) -> list[int]:
        """Number of times that each engine counted as dead because it gave no sign of life."""
        return self._num_hangs

    def observe(self, observations: Sequence[EngineObservations]) -> None:
        """Report steps and finished requests from now on, to the observations of their engine; restarted engines
        too."""
        self._observations = observations
        for index in range(len(self.engines)):
            self._connect(index)

    def _connect(self, index: int) -> None:
        if self._observations:
            receiver = self.engines[index].receiver
            receiver.on_steps, receiver.on_end = self._observations[index].steps, self._observations[index].end

    # ------------------------------------------------------------------ requests

    def generate(self, request: EngineRequest) -> ClientStream:
        """The stream of a request's deltas, as `EngineClient.generate`."""
        return ClientStream(request, self.submit, self._abandon)

    async def queue(self, streams: Sequence[ClientStream]) -> None:
        """Queue the requests of streams, as `EngineClient.queue`. While no engine lives, this waits for one.

        Raises:
            ValueError: one request can never run; the other requests remain queued until their streams are closed.
            EngineDeadError: all engines are dead, and none will be restarted.
            EngineStalledError: no living engine reads its socket.
        """
        await queue_in_turns(streams, self.submit)

    def submit(self, streams: Sequence[ClientStream]) -> None:
        """Send the requests of unsent streams, each to the engine that the router chooses.

        Raises:
            EngineDeadError, EngineStalledError: as for `queue`.
        """
        self.check_health()
        living = [engine for engine in self.engines if engine.is_alive]
        if living and not any(engine.takes_requests for engine in living):
            living[0].check_takes_requests()
        self._send(streams)

    def _send(self, streams: Sequence[ClientStream]) -> None:
        """Send each request to an engine that `_loads` allows; while no engine lives, keep it for the next that is
        started."""
        if not any(engine.is_alive for engine in self.engines):
            for stream in streams:
                stream.note_sent()
                self._waiting[stream] = None
            return
        for index, group in self._route(streams).items():
            self.engines[index].send(group)

    def _route(self, streams: Sequence[ClientStream]) -> dict[int, Sequence[ClientStream]]:
        """The streams that the router sends to each engine, by the engine's number, in the given order."""
        if self._router is None:
            return {0: streams}
        loads = self._loads()
        groups: dict[int, list[ClientStream]] = {}
        for stream in streams:
            request = stream.request
            index = self._router.choose(request.prompt_token_ids, request.cache_salt or "", loads)
            loads[index] = (loads[index] or 0) + 1
            stream.engine = index
            groups.setdefault(index, []).append(stream)
        return dict(groups)

    def _loads(self) -> list[int | None]:
        """The number of open requests of each engine; None: the engine should get no request. Engines that read their
        socket and answer questions have a number. If there are none, engines that read have one; if none reads, all
        living engines."""
        takes = [engine.takes_requests for engine in self.engines]
        answers = [taken and not engine.is_slow for taken, engine in zip(takes, self.engines, strict=True)]
        lives = [engine.is_alive for engine in self.engines]
        chosen = next(some for some in (answers, takes, lives) if any(some))
        return [len(engine.receiver.streams) if one else None for one, engine in zip(chosen, self.engines, strict=True)]

    def _abandon(self, stream: ClientStream) -> None:
        if stream in self._waiting:
            del self._waiting[stream]
        else:
            self.engines[stream.engine].abandon(stream)

    # ------------------------------------------------------------------ questions

    async def ask(self, question: Question[AnswerT], engine: int = 0) -> AnswerT:
        """The answer to a question, from one or all engines; the question's class decides (`wire/questions.py`).

        Args:
            question: a question or command; commands also apply to engines that are started later, and to requests that
                wait for an engine.
            engine: the number of the engine that gets a `OneEngineQuestion`.

        Raises:
            EngineDeadError: all engines are dead, and none will be restarted.
            EngineStalledError: none of the engines that should get the question lives now, or one of them gives no sign
                of life. Then no engine gets it.
            Exception: as the question's class documents.
        """
        self.check_health()
        index = self._engine_to_ask(question, engine)
        if index is not None:
            return question.merge({index: await self.engines[index].ask(question)})
        before = self._paused
        self._note_asked(question)
        try:
            answers = await self._ask_all(question)
        except EngineStalledError:
            if isinstance(question, Pause):
                self._paused = before
            raise
        merged = question.merge(answers)
        self._note_answered(question)
        if isinstance(question, SetPriority):
            merged = cast(AnswerT, self._set_priority(question, cast(list[str], merged)))
        return merged

    async def ask_each(self, question: Question[AnswerT]) -> list[AnswerT]:
        """The answer of each living engine; engines that cannot answer are left out."""
        living = [engine for engine in self.engines if engine.is_alive]
        answers = await asyncio.gather(*[engine.ask(question) for engine in living], return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def tell(self, question: OneEngineQuestion[None], engine: int) -> None:
        """Send a command to the engine with the number `engine`, as `EngineClient.tell`."""
        self.engines[engine].tell(question)

    def _engine_to_ask(self, question: Question[Any], engine: int) -> int | None:
        """The number of the engine that gets a question; None: all engines get it. If no engine has the request of a
        `RequestQuestion`, any living engine gets it, and answers that it does not know the request.

        Raises:
            EngineStalledError: the chosen engine does not live now, or no engine lives.
        """
        living = [index for index, engine in enumerate(self.engines) if engine.is_alive]
        match question:
            case OneEngineQuestion():
                if engine not in living:
                    raise EngineStalledError(
                        f"engine {engine} does not run at the moment; try again later, or choose another engine"
                    )
                return engine
            case RequestQuestion(request_id):
                if not living:
                    raise EngineStalledError(NONE_LIVES)
                for index in living:
                    streams = self.engines[index].receiver.streams.values()
                    if any(one.request.request_id == request_id for one in streams):
                        return index
                return living[0]
        return None

    async def _ask_all(self, question: Question[AnswerT]) -> dict[int, AnswerT]:
        """The answers of the living engines, by their numbers; an engine that dies meanwhile is left out.

        Raises:
            EngineDeadError, EngineStalledError, Exception: as for `ask`.
        """
        for engine in self.engines:
            engine.check_answers()
        asked = {index: engine.ask(question) for index, engine in enumerate(self.engines) if engine.is_alive}
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        found: dict[int, AnswerT] = {}
        for index, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[index] = answer
            elif not isinstance(answer, EngineDeadError):
                raise answer
        if not found:
            self.check_health()
            raise EngineStalledError(NONE_LIVES)
        return found

    def _note_asked(self, question: Question[Any]) -> None:
        """Apply a command to engines that are started from now on, and to requests that wait for an engine."""
        match question:
            case Pause():
                self._paused = question
                if question.mode == "abort":
                    self._abort_waiting()
            case Resume():
                self._paused = None

    def _note_answered(self, question: Question[Any]) -> None:
        """Apply the effects of a command, which all living engines have executed, to the fleet's limit of running
        requests and to the router."""
        match question:
            case SetMaxNumActiveSeqs():
                self._active_limit = question
            case ResetPrefixCache() | Pause(clear_cache=True):
                if self._router is not None:
                    self._router.clear_index()

    def _set_priority(self, question: SetPriority, changed: Sequence[str]) -> list[str]:
        """Change the priority of requests that wait for an engine. For the requests `changed`, whose engine has changed
        the priority, store it too, as they may be resumed in another engine. Returns the ids in `question` of requests
        that exist.
        """
        waiting = [stream.request for stream in self._waiting if stream.request.request_id in question.request_ids]
        running = [stream.request for engine in self.engines for stream in engine.receiver.streams.values()]
        known = set(changed)
        for request in (*waiting, *(one for one in running if one.request_id in known)):
            request.priority = question.priority
            known.add(request.request_id)
        return [request_id for request_id in question.request_ids if request_id in known]

    # ------------------------------------------------------------------ deaths and restarts

    def _on_death(self, index: int, orphans: list[ClientStream], why: str) -> None:
        """Restart engine `index`, which has ended by itself or counts as dead, and resume its requests."""
        self._num_hangs[index] += self.engines[index].is_hung
        if self._router is not None:
            self._router.clear_index(index)
        if self._is_stopping:
            for stream in orphans:
                stream.fail(EngineDeadError(why))
            return
        if asyncio.get_running_loop().time() - self._born[index] > FORGIVEN_AFTER:
            self._num_failures[index] = 0
        self._num_failures[index] += 1
        if self._num_failures[index] <= self._max_restarts:
            task = asyncio.get_running_loop().create_task(self._start_until_ready(index))
            self._starting[index] = task
        else:
            self._give_up(index, why)
        self._resume(index, orphans, why)

    def note_death(self, index: int, why: str) -> None:
        """Restart engine `index`, which died before it was added to the fleet."""
        self._on_death(index, [], why)

    def _resume(self, index: int, orphans: list[ClientStream], why: str) -> None:
        """Resume the requests of engine `index`, which is dead."""
        resumed = []
        for stream in orphans:
            stream.num_deaths += 1
            if self.dead.is_set():
                stream.fail(EngineDeadError(why))
            elif stream.num_deaths > self._max_resumes:
                times = f"{stream.num_deaths} engines have" if stream.num_deaths > 1 else "an engine has"
                stream.fail(
                    EngineDeadError(
                        f"{why}; {times} died with this request, which is resumed {self._max_resumes} times"
                    )
                )
            else:
                stream.prepare_to_resume()
                resumed.append(stream)
        if resumed:
            self._num_resumed[index] += len(resumed)
            self._send(resumed)
            waiting = sum(stream in self._waiting for stream in resumed)
            taken = Counter(stream.engine for stream in resumed if stream not in self._waiting)
            where = [f"{count} in engine {other}" for other, count in sorted(taken.items())]
            where += [f"{waiting} wait for an engine"] if waiting else []
            logger.warning("%d requests of engine %d are resumed: %s", len(resumed), index, ", ".join(where))

    def expect(self, index: int, starting: Awaitable[EngineClient]) -> None:
        """Add engine `index`, which is being started for the first time, when it is ready. A failed start counts as a
        failure of the engine."""
        self._starting[index] = asyncio.get_running_loop().create_task(self._start_until_ready(index, starting))

    async def _start_until_ready(self, index: int, starting: Awaitable[EngineClient] | None = None) -> None:
        """Add engine `index` when it is ready. Without `starting`, or after a failed start, restart the engine until a
        start succeeds."""
        why = ""
        while self._num_failures[index] <= self._max_restarts:
            if starting is None:
                starting = self._start_again(index)
            try:
                engine = await starting
                await self._apply_commands(engine)
            except (EngineStartError, EngineDeadError, ValueError, OSError) as error:
                why = str(error)
                logger.error("engine %d does not start: %s", index, why)
                self._num_failures[index] += 1
                starting = None
                continue
            self._replace_engine(index, engine)
            return
        self._give_up(index, why)

    async def _start_again(self, index: int) -> EngineClient:
        assert self._restart is not None
        delay = min(LONGEST_DELAY, 2.0 ** min(self._num_failures[index] - 1, 10) - 1.0)
        logger.warning("starting engine %d again%s", index, f" in {delay:g} s" if delay else "")
        await self.engines[index].wait_gone()
        await asyncio.sleep(delay)
        self._num_restarts[index] += 1
        return await self._restart(index, self._num_restarts[index])

    async def _apply_commands(self, engine: EngineClient) -> None:
        """Give a new engine the pause state and the limit of running requests; repeat if these change meanwhile."""
        try:
            applied: object = None
            while applied != (wanted := (self._paused or Resume(), self._active_limit)):
                applied = pausing, limit = wanted
                await engine.ask(pausing)
                if limit is not None:
                    await engine.ask(limit)
        except BaseException:
            await engine.shutdown()
            raise

    def _replace_engine(self, index: int, engine: EngineClient) -> None:
        """Replace engine `index` by a new one, and send the waiting requests."""
        self.engines[index] = engine
        engine.on_death = partial(self._on_death, index)
        self._born[index] = asyncio.get_running_loop().time()
        self._starting.pop(index, None)
        self._connect(index)
        again = "again, " if self._num_restarts[index] else ""
        logger.info("engine %d runs %sas process %d", index, again, engine.info.pid)
        waiting, self._waiting = list(self._waiting), {}
        if waiting:
            self._send(waiting)

    def _give_up(self, index: int, why: str) -> None:
        self._starting.pop(index, None)
        if self._max_restarts:
            logger.error("engine %d is not restarted after %d failures", index, self._num_failures[index])
        if self._starting or any(engine.is_alive for engine in self.engines):
            return
        self._death = why
        self._end(EngineDeadError(why))

    def _end(self, error: EngineDeadError) -> None:
        waiting, self._waiting = list(self._waiting), {}
        for stream in waiting:
            stream.fail(error)
        self.dead.set()

    # ------------------------------------------------------------------ health and end

    @property
    def is_alive(self) -> bool:
        """Whether an engine lives, or is being started."""
        return not self.dead.is_set()

    @property
    def num_alive(self) -> int:
        """Number of engines that live."""
        return sum(engine.is_alive for engine in self.engines)

    @property
    def expected(self) -> list[int]:
        """The numbers of the engines that should live: those of all living engines, and, if fewer than `num_wanted`
        live, the lowest other numbers."""
        living = {index for index, engine in enumerate(self.engines) if engine.is_alive}
        others = [index for index in range(len(self.engines)) if index not in living]
        return sorted([*living, *others[: max(0, self.num_wanted - len(living))]])

    @property
    def death(self) -> str | None:
        """The reason why the last engine ended by itself; None while an engine lives or starts, or after `shutdown`."""
        return self._death

    def check_health(self) -> None:
        """Raises EngineDeadError: all engines are dead, and none will be restarted."""
        if self.dead.is_set():
            raise EngineDeadError(self._death or "the engine has been shut down")

    async def shutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """End every engine process, as `EngineClient.shutdown`."""
        self._is_stopping = True
        starting = list(self._starting.values())
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        self._starting.clear()
        self._abort_waiting()
        await asyncio.gather(*[engine.shutdown(drain, timeout) for engine in self.engines])
        self._end(EngineDeadError("the engine has been shut down"))

    def _abort_waiting(self) -> None:
        """Abort the requests that wait for an engine."""
        for stream in list(self._waiting):
            stream.put(Delta(finish_reason="abort"))
        self._waiting.clear()

    def kill(self) -> None:
        """End all engine processes immediately; a running `shutdown` then returns."""
        self._is_stopping = True
        for task in self._starting.values():
            task.cancel()
        for engine in self.engines:
            engine.kill()


async def start_fleet(
    start: StartEngine,
    num_engines: int,
    max_restarts: int,
    max_resumes: int = DEFAULT_RESUMES,
    *,
    wait_for_all: bool = True,
) -> EngineFleet:
    """Start all engines concurrently. If one cannot be started, all are ended.

    Args:
        start: starts one engine.
        num_engines: number of engines, at least 1.
        max_restarts, max_resumes: see `EngineFleet`.
        wait_for_all: whether to return when all engines are ready; False: return when the first engine is ready, the
            others join later.

    Raises:
        ValueError, EngineStartError: raised by the first engine that did not start.
    """
    tasks = [asyncio.ensure_future(start(index, 0)) for index in range(num_engines)]
    try:
        if wait_for_all:
            await asyncio.gather(*tasks)
        else:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        there = [task.result() if task.done() else None for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        for started in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(started, EngineClient):
                await started.shutdown()
        raise
    first = next(engine for engine in there if engine is not None)
    engines = [EngineClient.absent(first) if engine is None else engine for engine in there]

    def restart(index: int, num_restarts: int) -> Awaitable[EngineClient]:
        return start(index, num_restarts, first.tokenizer)

    fleet = EngineFleet(engines, restart, max_restarts, max_resumes)
    for index, task in enumerate(tasks):
        if there[index] is None:
            fleet.expect(index, task)
        elif (why := engines[index].death) is not None:  # this engine died while others were being started
            fleet.note_death(index, why)
    return fleet
