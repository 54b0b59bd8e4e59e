"""ResponseSender: the samples of a client's request on a real engine process, and the objects that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pointsman.engine import SamplingParams
from pointsman.server.metrics.observations import Observations
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.gate import Gate
from pointsman.server.service.response_sender import ResponseSender
from pointsman.server.service.sampling import for_sample
from pointsman.server.wire.answers import Prompt
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.logprobs import Logprobs
from pointsman.server.wire.messages import Delta, EngineRequest
from pointsman.server.wire.questions import ExplainAll
from tests.server.engine_pool import engine_pool
from tests.server.limits import backlog

pytestmark = pytest.mark.e2e

PROMPT = Prompt([5 + index % 300 for index in range(800)])
BIASES = dict.fromkeys(range(5, 505), -0.5)


def with_client(test: Callable[[EngineClient], Awaitable[None]]) -> None:
    engine_pool().run(test, model="demo", num_blocks=512, num_threads=1)


def sender_of(client: EngineClient, name: str, prompt: Prompt, params: Sequence[SamplingParams]) -> ResponseSender:
    """A sample for each of the params, with a backlog that is never full."""
    observations = Observations(client.info.max_model_len)
    sender = ResponseSender(Gate(client, drain_timeout=1), observations, backlog(1000).enter("", len(params)))
    for number, own in enumerate(params):
        request = EngineRequest(f"{name}-{number}", prompt.token_ids, own, stream=False)
        sender.add(0, prompt, client.generate(request))
    return sender


def test_samples_sent_in_one_message_equal_single_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, logit_bias=BIASES)
    params = [for_sample(first, max_tokens=8, sample=number) for number in range(8)]

    async def test(client: EngineClient) -> None:
        num_bytes, transport = 0, client._transport
        assert transport is not None
        write = transport.write

        def counted(data: bytes) -> None:
            nonlocal num_bytes
            num_bytes += len(data)
            write(data)

        monkeypatch.setattr(transport, "write", counted)
        tokens = []
        for number, own in enumerate(params):
            async with sender_of(client, f"single-{number}", PROMPT, [own]) as sender:
                await client.queue(sender.streams)
                tokens += [result.token_ids for result in await sender.collect()]
        of_one, num_bytes = num_bytes / len(params), 0
        async with sender_of(client, "together", PROMPT, params) as sender:
            await client.queue(sender.streams)
            assert of_one > 5000 and num_bytes < of_one + len(params) * 300
            assert [result.token_ids for result in await sender.collect()] == tokens
        assert len(set(map(tuple, tokens))) > 4  # seeds of their own

    with_client(test)


def test_more_samples_than_fit_in_a_message_are_queued_in_order() -> None:
    endless = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)

    async def test(client: EngineClient) -> None:
        async with sender_of(client, "many", Prompt([5, 6]), [endless] * 150) as sender:
            await client.queue(sender.streams)
            found = [one.explanation.request_id for one in await client.ask(ExplainAll())]
            assert found == [f"many-{number}" for number in range(150)]
        while await client.ask(ExplainAll()):  # left, so aborted
            await asyncio.sleep(0.01)

    with_client(test)


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_samples_share_the_log_probabilities_of_their_prompt(num_samples: int) -> None:
    first = SamplingParams(max_tokens=3, seed=3, ignore_eos=True, prompt_logprobs=1)
    params = [for_sample(first, max_tokens=3, sample=number) for number in range(num_samples)]

    async def test(client: EngineClient) -> None:
        async with sender_of(client, "alone", PROMPT, [first]) as sender:
            await client.queue(sender.streams)
            (alone,) = await sender.collect()
        async with sender_of(client, "together", PROMPT, params) as sender:
            await client.queue(sender.streams)
            outputs = await sender.collect()
            num_computed = sum(len(PROMPT.token_ids) - choice.num_cached_tokens for choice in sender.choices)
        assert alone.prompt_logprobs is not None and len(alone.prompt_logprobs) == len(PROMPT.token_ids)
        assert [output.prompt_logprobs for output in outputs] == [alone.prompt_logprobs] * num_samples
        assert len({tuple(output.token_ids) for output in outputs}) == num_samples
        # One prompt, and its last tokens, which fill no block, for each of the others.
        assert num_computed < len(PROMPT.token_ids) + num_samples * client.info.block_size

    with_client(test)


class Deltas:
    """A stream of the given deltas; each is returned once the test allows it."""

    def __init__(self, params: SamplingParams, *deltas: Delta) -> None:
        self.request = EngineRequest("a", [5, 6], params, stream=False)
        self.engine = 0
        self.may_give = asyncio.Event()
        self._deltas = iter(deltas)

    async def __anext__(self) -> Delta:
        await self.may_give.wait()
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("reason", [None, "abort", "deadline"])
def test_first_sample_ending_early_does_not_block_others(reason: str | None) -> None:
    found = None if reason else Logprobs(counts=[0])

    async def run() -> None:
        gate = Gate(cast(Any, SimpleNamespace(is_alive=True, death=None)), drain_timeout=1)
        first = SamplingParams(prompt_logprobs=0)
        ended = Delta(finish_reason=reason, prompt_logprobs=found)
        streams = [Deltas(first, ended), *(Deltas(SamplingParams(), SOME_TEXT, LAST) for _ in range(2))]
        async with ResponseSender(gate, Observations(100), backlog(10).enter("", 3)) as sender:
            for stream in streams:
                sender.add(0, Prompt([5, 6]), cast(Any, stream))
            collecting = asyncio.ensure_future(sender.collect())
            for stream in reversed(streams):
                stream.may_give.set()
                await asyncio.sleep(0.01)
                assert not collecting.done() or stream is streams[0]
            outputs = await asyncio.wait_for(collecting, 5)
        assert [output.prompt_logprobs for output in outputs] == [found] * 3
        assert [output.text for output in outputs] == ["", "x", "x"]

    asyncio.run(run())


SOME_TEXT, LAST = Delta(text="x"), Delta(finish_reason="stop")
SOME = Delta(token_ids=[5], finish_reason="abort")
VECTOR = Delta(embedding=np.zeros(2, np.float32), finish_reason="stop")
ABORTED, LATE = Delta(finish_reason="abort"), Delta(finish_reason="deadline")


@pytest.mark.parametrize(
    ("outputs", "status"),
    [
        ([SOME, ABORTED, LATE], None),  # the existing output is sent
        ([ABORTED, LATE], 503),
        ([LATE, LATE], 408),
        ([VECTOR, VECTOR], None),
        ([VECTOR, ABORTED], 503),  # an answer with a vector for each input, or an error
        ([VECTOR, LATE], 408),
        ([SOME, Delta(finish_reason="error", finish_detail="a step failed")], 500),
    ],
)
def test_response_without_content_is_an_error(outputs: list[Delta], status: int | None) -> None:
    gate = Gate(cast(Any, SimpleNamespace(is_alive=True, death=None)), drain_timeout=1)
    sender = ResponseSender(gate, Observations(100), backlog(10).enter("", 1))
    if status is None:
        sender._check(outputs)
    else:
        with pytest.raises(ApiError) as caught:
            sender._check(outputs)
        assert caught.value.status_code == status
