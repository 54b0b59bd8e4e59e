"""AsyncEngine on the demo model, with real event loops: streams, refusals, all ways to end a stream, failures,
shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import torch

from pointsman.core import DuplicateRequest, Request, RequestRefused
from pointsman.core.errors import UnknownRequest
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.engine import LLM, AsyncEngine, Engine, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from pointsman.engine.aio.async_engine import RequestStream
from pointsman.engine.aio.mailbox import LoopMailbox
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model
from tests.forms import short_of

Answer = TypeVar("Answer")

WORDS = ["import", "class", "return", "lambda", "yield", "module", "object", "list", "dict", "exception", "iterator"]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("demo", "float32")


@pytest.fixture
def make(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Callable[..., AsyncEngine]]:
    """Makes engines over one loaded model, and ends those that a test leaves running."""
    made: list[AsyncEngine] = []
    steps = getattr(request, "param", 1)

    def one(**knobs: Any) -> AsyncEngine:
        knobs = {"num_blocks": 128, "max_model_len": 512, "log_stats_interval": None, **knobs}
        knobs.setdefault("max_steps_in_flight", steps)
        made.append(AsyncEngine(loaded, **knobs))
        return made[-1]

    yield one
    for engine in made:
        run(engine.shutdown())


also_with_two_steps_in_flight = pytest.mark.parametrize(
    "make", [1, 2], indirect=True, ids=["synchronous", "two in flight"]
)


def run(work: Coroutine[Any, Any, Answer], timeout: float = 60.0) -> Answer:
    """Run in a new event loop; a hang is a failure."""

    async def limited() -> Answer:
        async with asyncio.timeout(timeout):
            return await work

    return asyncio.run(limited())


async def last_of(stream: RequestStream) -> RequestOutput:
    outputs = [output async for output in stream]
    assert outputs[-1].finished
    return outputs[-1]


async def settled(engine: AsyncEngine) -> None:
    """Wait until the engine has handled all messages and is idle; then no block may be in use."""
    while await engine.call(Engine.has_unfinished_requests):
        await asyncio.sleep(0)
    await engine.call(lambda inner: inner.scheduler.check_invariants())
    scheduler = (await engine.stats()).scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert scheduler.num_free_blocks == scheduler.num_blocks


def prompt_of(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=1 + number % 20))


# -------------------------------------------------------------------------------------------------------- streams


def test_a_stream_yields_an_output_per_stream_interval(make: Callable[..., AsyncEngine]) -> None:
    async def work() -> None:
        engine = make(stream_interval=8)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        seen = [len(output.token_ids) async for output in engine.generate("class", params, "a")]
        assert seen[-1] == 30 and set(seen) <= {1, 9, 17, 25, 30}, "a slow consumer may miss some"

    run(work())


@also_with_two_steps_in_flight
def test_concurrent_streams_equal_llm_token_for_token(make: Callable[..., AsyncEngine], loaded: LoadedModel) -> None:
    """With a pool so small that requests are preempted."""
    prompts = [prompt_of(i) for i in range(20)]
    params = [
        SamplingParams(temperature=(i % 2) * 0.8, seed=i, max_tokens=4 + 3 * (i % 7), ignore_eos=True)
        for i in range(20)
    ]
    knobs = {
        "num_blocks": 10,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_model_len": 160,
        "full_sequence_must_fit": False,
    }
    expected = LLM(loaded, **knobs).generate(prompts, params, use_tqdm=False)
    engine = make(**knobs)

    async def all_at_once() -> list[RequestOutput]:
        pairs = zip(prompts, params, strict=True)
        outputs = await asyncio.gather(*(last_of(engine.generate(prompt, one)) for prompt, one in pairs))
        await settled(engine)
        assert (await engine.stats()).scheduler.num_preemptions > 0
        return outputs

    outputs = run(all_at_once())
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [(o.text, o.prompt) for o in outputs] == [(o.text, o.prompt) for o in expected]
    assert [(o.finish_reason, o.prompt_token_ids) for o in outputs] == [
        (o.finish_reason, o.prompt_token_ids) for o in expected
    ]


def test_output_kinds_have_the_same_content(make: Callable[..., AsyncEngine]) -> None:
    engine = make()

    async def outputs_of(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=kind)
        return [output async for output in engine.generate("The import statement", params)]

    async def all_kinds() -> list[list[RequestOutput]]:
        return [await outputs_of(kind) for kind in RequestOutputKind]

    by_kind = dict(zip(RequestOutputKind, run(all_kinds()), strict=True))
    so_far, new = by_kind[RequestOutputKind.CUMULATIVE], by_kind[RequestOutputKind.DELTA]
    (end,) = by_kind[RequestOutputKind.FINAL_ONLY]
    assert end.finished and len(end.token_ids) == 12
    assert len(so_far) > 1 and len(new) > 1, "the tokens did not come one by one"
    assert all(output.token_ids == end.token_ids[: len(output.token_ids)] for output in so_far)
    assert (so_far[-1].token_ids, so_far[-1].text) == (end.token_ids, end.text)
    assert [token for output in new for token in output.token_ids] == end.token_ids
    assert "".join(output.text for output in new) == end.text
    assert [output.finished for output in new] == [False] * (len(new) - 1) + [True]
    assert {output.prompt for outputs in by_kind.values() for output in outputs} == {"The import statement"}


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_slow_consumer_gets_one_merged_snapshot(make: Callable[..., AsyncEngine], kind: RequestOutputKind) -> None:
    engine = make()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=kind)

    async def blocked_loop() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate([5, 6, 7], params):
            outputs.append(output)
            if len(outputs) == 1:  # block this loop until the engine is done, as seen from another loop
                other = threading.Thread(target=lambda: run(settled(engine)))
                other.start()
                other.join()
        return outputs

    outputs = run(blocked_loop())
    assert len(outputs) == 2, "snapshots queued up"
    seen = [len(output.token_ids) for output in outputs]
    assert outputs[1].finished
    assert (seen[1] == 40) if kind is RequestOutputKind.CUMULATIVE else (sum(seen) == 40)


def test_two_event_loops_share_an_engine(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    results: dict[str, list[list[int]]] = {}

    async def several(name: str) -> None:
        streams = [
            engine.generate(prompt_of(i), SamplingParams(temperature=0, max_tokens=10), f"{name}-{i}") for i in range(8)
        ]
        results[name] = [output.token_ids for output in await asyncio.gather(*map(last_of, streams))]

    threads = [threading.Thread(target=lambda name=name: run(several(name))) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["left"] == results["right"] and len(results["left"]) == 8
    run(settled(engine))


@also_with_two_steps_in_flight
def test_two_engines_share_a_loaded_model(make: Callable[..., AsyncEngine]) -> None:
    """Each has its own thread and KV pool; their steps alternate on the model."""
    left, right = make(max_num_seqs=3), make(max_num_seqs=5, block_size=8)

    async def answers(*engines: AsyncEngine) -> list[list[RequestOutput]]:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        streams = [[engine.generate(prompt_of(i), params) for i in range(8)] for engine in engines]
        return await asyncio.gather(*(asyncio.gather(*map(last_of, some)) for some in streams))

    (alone,) = run(answers(left))
    for outputs in run(answers(left, right)):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ([5] * 600, RequestRefused, "max_model_len is 512"),
        ("\ud800", ValueError, "not valid Unicode"),
        (None, ValueError, "the prompt is of type NoneType; give text or token ids"),
    ],
)
def test_invalid_requests_raise_only_in_their_caller(
    make: Callable[..., AsyncEngine], prompt: Any, kind: type[Exception], message: str
) -> None:
    engine = make()

    async def beside_a_good_one() -> None:
        good = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        await good.start()
        stream = engine.generate(prompt)
        with pytest.raises(kind, match=message):
            await anext(stream)
        assert [output async for output in stream] == []
        with pytest.raises(kind, match=message):
            await engine.generate(prompt).start()
        assert len((await last_of(good)).token_ids) == 8
        await settled(engine)

    run(beside_a_good_one())


@pytest.mark.parametrize("prompt", [[5, 6], "A class is"])
def test_an_invalid_id_raises_only_in_the_caller(make: Callable[..., AsyncEngine], prompt: Any) -> None:
    engine, request_id = make(), "\ud800"

    async def beside_a_good_one() -> None:
        good = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        await good.start()
        with pytest.raises(ValueError, match="request id"):
            await anext(engine.generate(prompt, LONG, request_id))
        assert len((await last_of(good)).token_ids) == 8
        await settled(engine)

    run(beside_a_good_one())


@also_with_two_steps_in_flight
def test_request_ids_are_refused_while_in_use_and_reusable_afterwards(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    async def reuse() -> None:
        first = engine.generate([5], LONG, "a")
        await first.start()
        with pytest.raises(DuplicateRequest):
            await anext(engine.generate([6], short, "a"))
        assert not (await anext(first)).finished, "the refusal affected the stream with this id"
        assert await engine.abort("a")
        for _ in range(5):
            assert len((await last_of(engine.generate([6], short, "a"))).token_ids) == 2
        await settled(engine)

    run(reuse())


@pytest.mark.parametrize("prompt", [[5, 6, 7], "The import statement"])
def test_one_task_may_read_a_stream_that_several_tasks_start(make: Callable[..., AsyncEngine], prompt: Any) -> None:
    engine = make()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    async def together() -> None:
        for order in ([0, 0, 1], [1, 0, 0]):
            stream = engine.generate(prompt, params)
            tasks = [asyncio.create_task((last_of if reads else RequestStream.start)(stream)) for reads in order]
            results = await asyncio.gather(*tasks)
            (output,) = [result for result in results if result is not None]
            assert len(output.token_ids) == 6
        refused = engine.generate([5] * 600)
        results = await asyncio.gather(refused.start(), refused.start(), return_exceptions=True)
        assert [type(result) for result in results] == [RequestRefused] * 2
        await settled(engine)

    run(together())


def test_cancelling_a_read_ends_a_stream_that_another_task_starts(make: Callable[..., AsyncEngine]) -> None:
    engine = make()

    async def cancelled() -> None:
        stream = engine.generate("The import statement", LONG)
        starting = asyncio.create_task(stream.start())
        reading = asyncio.create_task(last_of(stream))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(starting, reading, return_exceptions=True)
        assert [output async for output in stream] == []
        await settled(engine)

    run(cancelled())


# -------------------------------------------------------------------------------------------------- letting go of it


@also_with_two_steps_in_flight
def test_abort_ends_the_stream(make: Callable[..., AsyncEngine]) -> None:
    engine = make(max_num_seqs=1)

    async def abort() -> None:
        running, waiting = engine.generate([5], LONG, "running"), engine.generate([6], LONG, "waiting")
        await running.start()
        await waiting.start()
        await anext(running)
        assert (await engine.explain("waiting")).reason is not None
        assert await engine.abort("waiting") and await engine.abort("running")
        for stream in (running, waiting):
            output = await last_of(stream)
            assert output.finish_reason == "abort"
        assert not await engine.abort("running") and not await engine.abort("nobody")
        with pytest.raises(UnknownRequest):
            await engine.explain("nobody")
        await settled(engine)

    run(abort())


def _abort_in_the_scheduler(engine: Engine) -> None:
    engine.scheduler.abort("a", engine.clock())


def _step_to_the_end(engine: Engine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


@also_with_two_steps_in_flight
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda engine: engine.abort("a"), "abort"),
        (_abort_in_the_scheduler, "abort"),
        (_step_to_the_end, "length"),
    ],
)
def test_a_request_ended_by_a_call_ends_its_stream(
    make: Callable[..., AsyncEngine], end: Callable[[Engine], object], reason: str
) -> None:
    engine = make()

    async def ended() -> None:
        first = engine.generate("The import statement", LONG, "a")
        await first.start()
        await engine.call(end)
        second = engine.generate([6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), "a")
        new, old = await asyncio.gather(last_of(second), last_of(first))
        assert (old.prompt, old.finish_reason) == ("The import statement", reason)
        assert (new.prompt_token_ids, len(new.token_ids), new.finish_reason) == ([6], 4, "length")
        await settled(engine)

    run(ended())


def test_a_request_can_be_aborted_while_its_prompt_is_tokenized(make: Callable[..., AsyncEngine]) -> None:
    engine = make()

    async def abort() -> None:
        stream = engine.generate(prompt_of(19), LONG, "a")
        starting = asyncio.create_task(stream.start())
        await asyncio.sleep(0)
        assert await engine.abort("a")
        await starting
        output = await last_of(stream)
        assert (output.finish_reason, output.prompt) == ("abort", prompt_of(19))
        refused = asyncio.create_task(engine.generate("\ud800", LONG, "b").start())
        await asyncio.sleep(0)
        await asyncio.gather(refused, return_exceptions=True)
        assert not await engine.abort("b"), "it is still expected"
        await settled(engine)

    run(abort())


async def _cancel(engine: AsyncEngine) -> None:
    task = asyncio.create_task(last_of(engine.generate([5, 6], LONG)))
    while (await engine.stats()).scheduler.num_running == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _break(engine: AsyncEngine) -> None:
    async for _ in engine.generate([5, 6], LONG):
        break


async def _aclose(engine: AsyncEngine) -> None:
    stream = engine.generate([5, 6], LONG)
    await anext(stream)
    await stream.aclose()
    assert [output async for output in stream] == []


async def _async_with(engine: AsyncEngine) -> None:
    async with engine.generate([5, 6], LONG) as stream:
        await anext(stream)
    assert [output async for output in stream] == []


async def _forget(engine: AsyncEngine) -> None:
    stream = engine.generate([5, 6], LONG)
    await stream.start()
    del stream
    gc.collect()


async def _timeout(engine: AsyncEngine) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(last_of(engine.generate([5, 6], LONG)), 0.02)


async def _generator_around_it(engine: AsyncEngine) -> None:
    async def chunks() -> Any:
        async for output in engine.generate([5, 6], LONG):
            yield output.text

    generator = chunks()
    await anext(generator)
    del generator
    gc.collect()


async def _aclose_from_another_task(engine: AsyncEngine) -> None:
    stream = engine.generate([5, 6], LONG)
    await anext(stream)
    reading = asyncio.gather(*[asyncio.create_task(_read(stream)) for _ in range(2)], return_exceptions=True)
    await asyncio.sleep(0)
    await stream.aclose()
    first, second = await reading
    assert isinstance(first, list) and "two tasks read its stream" in str(second)


async def _aclose_before_it_is_queued(engine: AsyncEngine) -> None:
    stream = engine.generate(prompt_of(19), LONG)
    reading = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)  # the prompt is being tokenized
    await stream.aclose()
    assert await reading == []


async def _read(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


WAYS = [_cancel, _break, _aclose, _async_with, _forget, _timeout, _generator_around_it, _aclose_from_another_task]


@also_with_two_steps_in_flight
@pytest.mark.parametrize("let_go", [*WAYS, _aclose_before_it_is_queued])
def test_a_dropped_or_closed_stream_aborts_its_request(
    make: Callable[..., AsyncEngine], let_go: Callable[[AsyncEngine], Coroutine[Any, Any, None]]
) -> None:
    engine = make()

    async def watch() -> None:
        await let_go(engine)
        await settled(engine)
        stats = (await engine.stats()).scheduler
        assert stats.finished["length"] == 0, "it ran to its end"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(watch())


def test_closing_a_loop_aborts_its_requests(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    loop = asyncio.new_event_loop()
    stream = engine.generate([5, 6], LONG)
    loop.run_until_complete(stream.start())
    loop.close()
    run(settled(engine))  # the stream object still exists, but its loop is closed
    assert run(engine.stats()).scheduler.finished["abort"] == 1
    del stream


def test_a_closed_loop_is_noticed_without_new_outputs(make: Callable[..., AsyncEngine]) -> None:
    engine = make(num_blocks=512, max_model_len=8192)
    params = SamplingParams(max_tokens=8000, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    loop = asyncio.new_event_loop()
    stream = engine.generate([5, 6], params)
    loop.run_until_complete(stream.start())
    loop.close()
    run(settled(engine))
    stats = run(engine.stats())
    assert stats.scheduler.finished["abort"] == 1 and stats.counters.num_generated_tokens < 8000
    del stream


async def _one_of_many(engine: AsyncEngine, number: int, rng: random.Random) -> None:
    """A request that ends in one of many ways, at a random time."""
    params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 16), ignore_eos=rng.random() < 0.5)
    stream = engine.generate(prompt_of(number), params)
    way = rng.choice(["read", "read", "cancel", "break", "abort", "forget"])
    if way == "read":
        await last_of(stream)
    elif way == "cancel":
        task = asyncio.create_task(last_of(stream))
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif way == "break":
        num_wanted = rng.randint(1, 8)
        async for output in stream:
            if len(output.token_ids) >= num_wanted:
                break
    elif way == "abort":
        await stream.start()
        await asyncio.sleep(rng.random() * 0.05)
        await engine.abort(stream.request_id)
        await last_of(stream)
    else:
        await stream.start()


async def _round(engine: AsyncEngine, num_requests: int, seed: int) -> None:
    """Many requests, at most 100 at a time, in a pool that is too small for them; they may leak nothing."""
    before = _tracked()  # the report of a failed test keeps references to its objects
    rng = random.Random(seed)
    seats = asyncio.Semaphore(100)

    async def seated(number: int) -> None:
        async with seats:
            await _one_of_many(engine, number, rng)

    await asyncio.gather(*(seated(number) for number in range(num_requests)))
    await settled(engine)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await engine.call(_forget_last_output)
    assert _tracked() == before


def _forget_last_output(engine: Engine) -> None:
    """Drop the last output, which is kept for displays and refers to the last finished requests."""
    engine.steps.last_output = None


def _tracked() -> int:
    """Streams, mailboxes and requests that exist in this process."""
    gc.collect()
    return sum(type(thing) in (RequestStream, LoopMailbox, Request) for thing in gc.get_objects())


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@also_with_two_steps_in_flight
def test_random_cancellations_leak_nothing(make: Callable[..., AsyncEngine]) -> None:
    engine = make(num_blocks=48, max_num_seqs=24, max_model_len=256, full_sequence_must_fit=False)
    run(_round(engine, 200, seed=1))


@pytest.mark.long
def test_three_thousand_random_cancellations_leak_nothing(make: Callable[..., AsyncEngine]) -> None:
    engine = make(num_blocks=48, max_num_seqs=24, max_model_len=256, full_sequence_must_fit=False)

    async def rounds() -> list[float]:
        resident = []
        for number in range(9):  # the allocator's pools fill in the first six
            started = time.perf_counter()
            await _round(engine, 1000, seed=number)
            resident.append(_resident_mib())
            stats = (await engine.stats()).scheduler
            print(
                f"round {number + 1}: {stats.num_free_blocks} of {stats.num_blocks} blocks free, "
                f"{len(asyncio.all_tasks())} task(s), {_tracked()} streams, mailboxes and requests, "
                f"{resident[-1]:.1f} MiB resident, ended {stats.finished}, {time.perf_counter() - started:.1f} s"
            )
        return resident

    resident = run(rounds(), timeout=600)
    assert resident[-1] - resident[-3] < 4.0, f"memory grows with each round: {resident} MiB"


# ------------------------------------------------------------------------------------------------------- failures


class FailingForward:
    """Makes a model's forward raise, always or a number of times."""

    def __init__(self, model: Any, error: BaseException, times: int | None = None) -> None:
        self.times = times
        self._error = error
        self._handle = model.register_forward_pre_hook(self._hook)

    def _hook(self, module: Any, args: Any) -> None:
        if self.times is None or self.times > 0:
            self.times = None if self.times is None else self.times - 1
            raise self._error

    def __enter__(self) -> FailingForward:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


@also_with_two_steps_in_flight
@pytest.mark.parametrize("error", [RuntimeError("out of memory on device 0"), SystemExit("an exit in the thread")])
def test_an_engine_failure_raises_in_every_waiting_task(
    make: Callable[..., AsyncEngine], loaded: LoadedModel, error: BaseException
) -> None:
    engine = make(max_num_seqs=3)
    caught: list[BaseException] = []

    async def wait_for_the_end(number: int) -> None:
        stream = engine.generate([5 + number], LONG)
        await stream.start()
        try:
            await last_of(stream)
        except EngineDeadError as dead:
            caught.append(dead)

    async def die() -> None:
        waiters = [asyncio.create_task(wait_for_the_end(number)) for number in range(8)]
        other = threading.Thread(target=lambda: run(wait_for_the_end(8)))
        other.start()
        while (await engine.stats()).scheduler.num_added < 9:
            await asyncio.sleep(0.001)
        with FailingForward(loaded.model, error):
            await asyncio.gather(*waiters)
        while other.is_alive():
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError, match=str(error)):
            await engine.stats()
        with pytest.raises(EngineDeadError, match="make a new one"):
            await anext(engine.generate("The import statement"))
        with pytest.raises(EngineDeadError):
            engine.check_health()
        await engine.shutdown()

    run(die())
    assert len(caught) == 9 and len(set(map(id, caught))) == 9
    assert all(str(error) in str(dead) and "\n" not in str(dead) for dead in caught)
    assert engine.errored and not engine.is_running
    cause = engine.dead_error.__cause__ if engine.dead_error else None
    assert cause is error or (cause is not None and cause.__cause__ is error)


def test_an_engine_failure_raises_for_a_request_that_is_being_added(
    make: Callable[..., AsyncEngine], loaded: LoadedModel
) -> None:
    """Its id is free only after one more step, and that is the step that fails."""
    engine = make()
    gate = threading.Event()

    async def reuse() -> None:
        other, first = engine.generate([5], LONG, "other"), engine.generate([6], LONG, "a")
        await other.start()
        await first.start()
        with FailingForward(loaded.model, RuntimeError("out of memory"), times=0) as failing:
            held = asyncio.create_task(engine.call(lambda _: gate.wait(30)))
            await asyncio.sleep(0.05)  # while the thread is blocked, three messages arrive, to be handled together
            failed = asyncio.create_task(engine.call(lambda _: setattr(failing, "times", None)))
            await asyncio.sleep(0)
            await first.aclose()
            second = asyncio.create_task(engine.generate([6], LONG, "a").start())
            await asyncio.sleep(0)
            gate.set()
            for waiter in (second, last_of(other)):
                with pytest.raises(EngineDeadError, match="out of memory"):
                    await waiter
            assert await held and await failed is None

    run(reuse())


def test_a_failed_step_is_retried_up_to_the_limit(make: Callable[..., AsyncEngine], loaded: LoadedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = run(last_of(make().generate("The import statement", params))).token_ids
    engine = make(max_step_retries=2)

    async def stumble() -> None:
        stream = engine.generate("The import statement", params)
        with FailingForward(loaded.model, RuntimeError("a hiccup"), times=2) as failing:
            await anext(stream)
            failing.times = 2  # consecutive failures count: a successful step resets the number
            assert (await last_of(stream)).token_ids == expected
        engine.check_health()
        assert (await engine.stats()).scheduler.num_failed_steps == 4
        with FailingForward(loaded.model, RuntimeError("a hiccup"), times=3), pytest.raises(EngineDeadError):
            await last_of(engine.generate("The import statement", params))

    run(stumble())


def test_a_policy_failing_once_costs_a_step_but_no_request(
    make: Callable[..., AsyncEngine], loaded: LoadedModel
) -> None:
    class Once(FirstComeFirstServed):
        name = "once"
        is_due = True

        def peek(self) -> Request:
            if self.is_due:
                self.is_due = False
                raise ZeroDivisionError("boom")
            return super().peek()

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = run(last_of(make().generate("The import statement", params))).token_ids
    engine = make(max_step_retries=2, order=Once())

    async def serve() -> None:
        assert (await last_of(engine.generate("The import statement", params))).token_ids == expected
        engine.check_health()

    run(serve())


def test_an_always_failing_policy_ends_no_engine_and_no_request(
    make: Callable[..., AsyncEngine], loaded: LoadedModel
) -> None:
    class Always(FirstComeFirstServed):
        name = "always"

        def peek(self) -> Request:
            raise ZeroDivisionError("boom")

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = run(last_of(make().generate("The import statement", params))).token_ids
    engine = make(order=Always())

    async def serve() -> None:
        assert (await last_of(engine.generate("The import statement", params))).token_ids == expected
        stats = (await engine.stats()).scheduler
        assert (stats.num_policy_failures, stats.num_replaced_policies) == (3, {"order": 1})
        engine.check_health()

    run(serve())


def test_an_exception_of_a_call_reaches_its_caller_only(make: Callable[..., AsyncEngine]) -> None:
    engine = make()

    async def calls() -> None:
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda _: 1 // 0)
        assert await engine.call(lambda _: threading.current_thread().name) == "pointsman-engine"
        engine.check_health()

    run(calls())


# ------------------------------------------------------------------------------------------------------- shutdown


@also_with_two_steps_in_flight
@pytest.mark.parametrize("drain", [False, True])
def test_shutdown_aborts_requests_or_lets_them_finish(make: Callable[..., AsyncEngine], drain: bool) -> None:
    engine = make(max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def stop() -> list[RequestOutput]:
        streams = [engine.generate([5 + i], params) for i in range(5)]
        for stream in streams:
            await stream.start()
        reading = asyncio.gather(*map(last_of, streams))
        await asyncio.sleep(0)
        ending = asyncio.gather(engine.shutdown(drain=drain), engine.shutdown(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.generate([5]).start()
        await ending
        await engine.shutdown()
        return await reading

    outputs = run(stop())
    assert {output.finish_reason for output in outputs} == {"length" if drain else "abort"}
    assert not engine.is_running and not engine.errored
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.check_health()
    assert not any(thread.name == "pointsman-engine" for thread in threading.enumerate())


@also_with_two_steps_in_flight
def test_a_drain_waits_for_prompts_being_tokenized(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    async def stop() -> None:
        reading = asyncio.gather(*(last_of(engine.generate(prompt_of(19), params)) for _ in range(3)))
        dropped = asyncio.create_task(engine.generate(prompt_of(19), params).start())
        refused = asyncio.create_task(engine.generate("\ud800", params).start())
        await asyncio.sleep(0)
        dropped.cancel()
        await engine.shutdown(drain=True)
        assert [len(output.token_ids) for output in await reading] == [4, 4, 4]
        await asyncio.gather(dropped, refused, return_exceptions=True)

    run(stop())


def test_a_drain_does_not_wait_for_a_closed_loop(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    loop = asyncio.new_event_loop()
    stream = engine.generate(" ".join(WORDS * 2000), LONG)
    starting = loop.create_task(stream.start())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    run(engine.shutdown(drain=True))
    with contextlib.suppress(RuntimeError, GeneratorExit):
        starting.get_coro().close()
    del stream


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_shutdown_in_a_fork_returns(make: Callable[..., AsyncEngine]) -> None:
    engine = make()
    run(last_of(engine.generate([5], SamplingParams(max_tokens=2))))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)  # if it hangs
            asyncio.run(engine.shutdown())
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    run(last_of(engine.generate([5], SamplingParams(max_tokens=2))))


def test_a_drain_aborts_remaining_requests_after_its_timeout(make: Callable[..., AsyncEngine]) -> None:
    engine = make()

    async def stop() -> str | None:
        stream = engine.generate([5], LONG)
        await stream.start()
        await engine.shutdown(drain=True, timeout=0.05)
        return (await last_of(stream)).finish_reason

    assert run(stop()) == "abort"


def test_shutdown_before_the_first_request_and_after_the_last(make: Callable[..., AsyncEngine]) -> None:
    async def all_three() -> None:
        await make().shutdown()
        await make().shutdown(drain=True, timeout=5)
        async with make() as engine:
            await last_of(engine.generate([5], SamplingParams(max_tokens=2)))
        with pytest.raises(EngineDeadError):
            await engine.tokenize("text")

    run(all_three())


def test_a_dropped_engine_ends_its_thread(loaded: LoadedModel) -> None:
    engine = AsyncEngine(loaded, num_blocks=32, max_model_len=256)
    run(last_of(engine.generate([5], SamplingParams(max_tokens=2))))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pointsman-engine"]
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.e2e
@pytest.mark.parametrize("steps", short_of([1, 2], [2]))
def test_the_interpreter_exits_with_requests_running(steps: int) -> None:
    script = f"""
import asyncio
from pointsman.engine import AsyncEngine, SamplingParams

async def main():
    stream = engine.generate([5], SamplingParams(max_tokens=5000, ignore_eos=True))
    await stream.start()
    await anext(stream)
    return stream

engine = AsyncEngine("demo", num_blocks=512, max_steps_in_flight={steps})
loop = asyncio.new_event_loop()
stream = loop.run_until_complete(main())
print("leaving")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "leaving\n"), run.stderr
    assert "Traceback" not in run.stderr


# ------------------------------------------------------------------------------------------------- idle, questions


@also_with_two_steps_in_flight
def test_an_idle_engine_neither_spins_nor_sleeps_through_a_call(make: Callable[..., AsyncEngine]) -> None:
    engine = make(log_stats_interval=3600.0)

    async def idle() -> tuple[float, float]:
        await last_of(engine.generate([5], SamplingParams(max_tokens=2)))
        before = time.process_time()
        await asyncio.sleep(0.3)
        busy = time.process_time() - before
        waits = []
        for _ in range(21):
            started = time.perf_counter()
            await engine.call(lambda _: None)
            waits.append(time.perf_counter() - started)
        return busy, sorted(waits)[10]

    busy, wait = run(idle())
    assert busy < 0.1, "the idle engine used CPU time"
    assert wait < 0.02, "a call had to wait"


@pytest.mark.parametrize("interval", [float("inf"), 1e10])
def test_a_very_long_statistics_interval_is_accepted(make: Callable[..., AsyncEngine], interval: float) -> None:
    engine = make(log_stats_interval=interval)

    async def idle() -> None:
        for _ in range(2):
            await last_of(engine.generate([5], SamplingParams(max_tokens=2)))
            await asyncio.sleep(0.05)
        engine.check_health()

    run(idle())


def test_an_engine_of_from_engine_resets_its_prefix_cache(loaded: LoadedModel) -> None:
    inner = Engine(loaded, num_blocks=64, max_model_len=512)

    async def cached() -> list[int]:
        async with AsyncEngine.from_engine(inner, log_stats_interval=None) as engine:
            assert (engine.tokenizer, engine.max_model_len) == (inner.tokenizer, 512)
            prompt, counts = await engine.tokenize(prompt_of(19)), []
            for reset in (False, False, True):
                if reset:
                    await engine.reset_prefix_cache()
                output = await last_of(engine.generate(prompt, SamplingParams(temperature=0, max_tokens=2)))
                counts.append(output.num_cached_tokens)
            return counts

    counts = run(cached())
    assert counts[0] == counts[2] == 0 and counts[1] > 0


def test_tenant_and_priority_reach_the_scheduler_and_can_change(make: Callable[..., AsyncEngine]) -> None:
    engine = make(max_num_seqs=1, order="priority", displace=False)

    async def work() -> None:
        held, asked = [], {}
        for name, urgency in {
            "runs": {},
            "a": {"tenant": "alice", "ttft_target": 2.5},
            "b": {"priority": 3, "retention": 9},
        }.items():
            held.append(engine.generate([5, 6], LONG, name, **urgency))
            await held[-1].start()
            asked[name] = await engine.call(lambda inner, name=name: inner.scheduler.get_request(name))
        assert [(one.tenant, one.ttft_target) for one in asked.values()] == [("", None), ("alice", 2.5), ("", None)]
        assert [one.retention for one in asked.values()] == [None, None, 9.0]
        assert [(await engine.explain(name)).position for name in "ab"] == [0, 1]
        await engine.set_priority("b", -1)
        assert [(await engine.explain(name)).position for name in "ab"] == [1, 0]
        for priority in (2**63, 1.5):
            with pytest.raises(ValueError, match="priority is"):
                await engine.set_priority("b", priority)  # type: ignore[arg-type]
        with pytest.raises(UnknownRequest, match="nobody"):
            await engine.set_priority("nobody", 1)
        for bad, words in (({"ttft_target": 0.0}, "ttft_target is 0.0"), ({"tenant": 5}, "tenant is 5")):
            with pytest.raises(RequestRefused, match=words):
                await engine.generate([5, 6], LONG, "bad", **bad).start()  # type: ignore[arg-type]
        for stream in held:
            await stream.aclose()
        assert (await engine.embed([5, 6], tenant="alice", ttft_target=1.0)).outputs.embedding is not None

    run(work())


@pytest.mark.parametrize("knobs", [{"max_step_retries": -1}, {"max_step_retries": None}, {"log_stats_interval": 0.0}])
def test_invalid_async_engine_knobs_are_refused(loaded: LoadedModel, knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it must be"):
        AsyncEngine(loaded, num_blocks=32, max_model_len=256, **knobs)


def test_tokenizing_and_detokenizing_may_run_in_parallel(make: Callable[..., AsyncEngine]) -> None:
    """Both threads use one tokenizer object without affecting each other."""
    engine = make()
    text = " ".join(WORDS * 20)

    async def both() -> None:
        expected = await engine.tokenize(text)
        stream = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        reading = asyncio.create_task(last_of(stream))
        while not reading.done():
            assert await engine.tokenize(text) == expected
        tokens = (await reading).token_ids
        assert reading.result().text == engine.tokenizer.decode(tokens, skip_special_tokens=True)

    assert torch.get_num_threads() == 1
    run(both())
