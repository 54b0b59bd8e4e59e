"""Load on the server: checks that every request is answered exactly once and completely, whatever its neighbours do.

2,000 requests, up to 500 of them open at once, prompts of 16 to 256 tokens, outputs of 8 to 64, on the demo model in a
pool so small that requests are preempted. 10 % hang up at a random moment, 5 % are malformed, 5 % come with
an impossible deadline. Three rounds on one server, each with other requests of the same kinds. Checked:

- every valid request is answered once: all tokens it asked for, one finish reason, [DONE] last, the usage right; a
  sample of them is sent again, alone and unstreamed, and gets the same text;
- malformed requests get 4xx, late ones 408 or the finish reason "deadline";
- afterwards no request is open and no block in use, and the engine has ended the right number of requests;
- the memory of both processes does not grow from the first round to the last;
- the longest wait for a first token is no longer than the work ahead of it takes, at the rate at which the engine
  worked during that wait (its metrics are read twice a second). This bound counts the whole of every request that had
  come earlier and was not over, ignoring its finished part.

    python benchmarks/server_load.py --check
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic, process_time
from typing import Any

import numpy as np
from _common import Targets, argument_parser, finish, note, print_table, run
from _server_client import SECONDS_TO_ANSWER, Address, Answer, BrokenAnswer, Exchange, percentile, send, start
from _server_probe import MIB, read_metrics, run_async, wait_until_idle
from _server_process import ServerProcess, processor_seconds, resident_bytes, start_server
from _server_requests import MAX_MODEL_LEN, Planned, plan

MODEL = "demo"
BLOCK_SIZE, NUM_BLOCKS = 16, 320
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512
SAMPLE = 24
"""Number of valid requests of a round that are sent again, alone."""
SHOWN_FAULTS = 10
SECONDS_BETWEEN_READINGS = 0.5
MAX_GROWTH, GROWTH_BYTES = 0.05, 8 * MIB
"""Maximum growth of a process's memory after the first round: share, or bytes."""


@dataclass(slots=True)
class Outcome:
    """A request and its result."""

    planned: Planned
    exchange: Exchange | None
    """None: no connection."""
    fault: str | None = None
    """The defect of the response."""


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one round."""

    seconds: float
    counts: dict[str, int]
    """Number of requests by result."""
    faults: list[str]
    output_tokens_per_second: float
    first_token_seconds: list[float]
    """TTFT of the valid streams, in order of sending."""
    bounds: list[float]
    """For each of those streams, the seconds that the work ahead of it takes."""
    num_preemptions: int
    is_idle: bool
    """Whether no request was left open afterwards."""
    server_bytes: int
    engine_bytes: int
    client_share: float
    """Processor time as shares of one core."""
    server_share: float
    engine_share: float


# ------------------------------------------------------------------------------------------------------------- load


async def send_planned(address: Address, planned: Planned) -> Outcome:
    """Send one request, and read or hang up as planned."""
    try:
        exchange = await start(address, planned.request, hang_up_after=planned.hang_up_after)
    except OSError as error:
        return Outcome(planned, None, f"no connection: {error}")
    if planned.hang_up_seconds is not None:
        await exchange.end(planned.hang_up_seconds)
        exchange.hang_up()
    if not await exchange.end(SECONDS_TO_ANSWER):
        exchange.hang_up()
        return Outcome(planned, exchange, f"no end within {SECONDS_TO_ANSWER:.0f} s")
    return Outcome(planned, exchange)


async def serve_all(address: Address, planned: Sequence[Planned], num_streams: int) -> list[Outcome]:
    """All requests, in their order, `num_streams` of them open at once."""
    gate = asyncio.Semaphore(num_streams)

    async def one(each: Planned) -> Outcome:
        async with gate:
            return await send_planned(address, each)

    return list(await asyncio.gather(*(one(each) for each in planned)))


async def run_round(server: ServerProcess, address: Address, planned: list[Planned], num_streams: int) -> Round:
    """One round: load, judgement, figures."""
    before = await read_metrics(address)
    cpu_before = cpu_of(server)
    start_time = monotonic()
    work_done: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch_work(address, work_done))
    outcomes = await serve_all(address, planned, num_streams)
    seconds = monotonic() - start_time
    watching.cancel()
    shares = [(b - a) / seconds for a, b in zip(cpu_before, cpu_of(server), strict=True)]

    after = await wait_until_idle(address)
    is_idle = after is not None
    after = after or await read_metrics(address)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for each in outcomes:
        each.fault = each.fault or fault_of(each)
    faults = [f"{describe(each.planned)}: {each.fault}" for each in outcomes if each.fault]
    faults += book_keeping_faults(outcomes, gained)
    faults += [fault for each in sample_of(outcomes) if (fault := await repeat_fault(address, each))]
    waits, bounds = waits_and_bounds(outcomes, [*work_done, (monotonic(), tokens_in(after))])
    return Round(
        seconds=seconds,
        counts=dict(Counter(describe_outcome(each) for each in outcomes)),
        faults=faults,
        output_tokens_per_second=gained["vllm:generation_tokens_total"] / seconds,
        first_token_seconds=waits,
        bounds=bounds,
        num_preemptions=round(gained["vllm:num_preemptions_total"]),
        is_idle=is_idle,
        server_bytes=resident_bytes(server.pid),
        engine_bytes=resident_bytes(server.engine_pid),
        client_share=shares[0],
        server_share=shares[1],
        engine_share=shares[2],
    )


def cpu_of(server: ServerProcess) -> tuple[float, float, float]:
    """Processor seconds so far: this client, the API process, the engine process."""
    return process_time(), processor_seconds(server.pid), processor_seconds(server.engine_pid)


# -------------------------------------------------------------------------------------------------------- judgement


def fault_of(outcome: Outcome) -> str | None:
    """The defect of the response; None if there is none, and for requests that hung up."""
    planned, exchange = outcome.planned, outcome.exchange
    if exchange is None or exchange.hung_up:
        return None
    try:
        answer = exchange.answer()
        if answer.status not in planned.statuses:
            return f"status {answer.status}, not {' or '.join(map(str, planned.statuses))}: {answer.body[:200]!r}"
        if answer.status != 200:
            return error_fault(answer)
        if planned.is_streamed:
            return stream_fault(planned, answer)
        return body_fault(planned, answer)
    except (BrokenAnswer, KeyError, TypeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def error_fault(answer: Answer) -> str | None:
    """The defect of an error's body."""
    error = answer.json()["error"]
    if not error["message"] or error["code"] != answer.status:
        return f"an error without a message or with another code: {error}"
    return None


def stream_fault(planned: Planned, answer: Answer) -> str | None:
    """The defect of a stream of events."""
    stream = answer.stream()
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return f"the content type is {answer.headers.get('content-type')}"
    if stream.error is not None:
        return f"the stream ended with {stream.error}"
    if not stream.is_done or stream.num_late:
        return f"[DONE] {'came' if stream.is_done else 'did not come'}, then {stream.num_late} events"
    if set(stream.finish_reasons) != {0} or stream.finish_reason is None or len(stream.ids) != 1:
        return f"finish reasons {stream.finish_reasons}, ids {stream.ids}"
    num_told = stream.num_logprobs if planned.wants_logprobs else None
    return end_fault(planned, stream.finish_reason, stream.usage, num_told)


def body_fault(planned: Planned, answer: Answer) -> str | None:
    """The defect of a response in one piece."""
    body = answer.json()
    if len(body["choices"]) != 1:
        return f"{len(body['choices'])} choices"
    choice = body["choices"][0]
    num_told = len(choice["logprobs"]["tokens"]) if planned.wants_logprobs else None
    return end_fault(planned, choice["finish_reason"], body["usage"], num_told)


def end_fault(planned: Planned, reason: str, usage: dict[str, Any] | None, num_told: int | None) -> str | None:
    """The defect of its end, its usage, or its number of tokens with log probabilities."""
    if usage is None:
        return "no usage"
    num_tokens = usage["completion_tokens"]
    if planned.kind == "late" and reason != "deadline":
        return f"the finish reason is {reason}, not deadline"
    if planned.kind != "late" and (reason != "length" or num_tokens != planned.num_output_tokens):
        return f"ended by {reason} after {num_tokens} of {planned.num_output_tokens} tokens"
    if not planned.is_chat and usage["prompt_tokens"] != planned.num_prompt_tokens:
        return f"the usage counts {usage['prompt_tokens']} of {planned.num_prompt_tokens} prompt tokens"
    if usage["total_tokens"] != usage["prompt_tokens"] + num_tokens:
        return f"the usage does not add up: {usage}"
    if num_told is not None and num_told != num_tokens:
        return f"log probabilities of {num_told} tokens, and {num_tokens} tokens"
    return None


def book_keeping_faults(outcomes: Sequence[Outcome], gained: dict[str, float]) -> list[str]:
    """Contradictions between the clients' responses and the engine's counters."""
    faults = []
    sound = sum(each.planned.kind == "sound" for each in outcomes)
    hung_up = sum(each.planned.kind == "hangs up" for each in outcomes)
    by_length = round(gained.get("vllm:request_success_total/length", 0))
    if not sound <= by_length <= sound + hung_up:
        faults.append(f"the engine finished {by_length} requests by length, not {sound} to {sound + hung_up}")
    ids = [id_ for each in outcomes for id_ in ids_of(each)]
    if len(set(ids)) != len(ids):
        faults.append(f"{len(ids) - len(set(ids))} completions share their id with another request's")
    return faults


def ids_of(outcome: Outcome) -> set[str]:
    """The ids in a streamed answer that was sound."""
    if outcome.exchange is None or outcome.fault or not outcome.planned.is_streamed or outcome.exchange.hung_up:
        return set()
    answer = outcome.exchange.answer()
    return answer.stream().ids if answer.status == 200 else set()


def sample_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Some of the valid streams, spread over the round."""
    streams = [each for each in outcomes if each.planned.kind == "sound" and each.planned.is_streamed]
    return streams[:: max(1, len(streams) // SAMPLE)][:SAMPLE]


async def repeat_fault(address: Address, outcome: Outcome) -> str | None:
    """Send the request again, alone and unstreamed: the text must be the same."""
    if outcome.exchange is None or outcome.fault:
        return None  # reported already
    streamed = outcome.exchange.answer().stream()
    choice = (await send(address, outcome.planned.unstreamed())).answer().json()["choices"][0]
    alone = choice["text"] if "text" in choice else choice["message"]["content"]
    if streamed.text == alone:
        return None
    return f"{describe(outcome.planned)}: streamed {streamed.text!r}, alone {alone!r}"


def describe_outcome(outcome: Outcome) -> str:
    """The result of a request, for the counts."""
    if outcome.exchange is None:
        return "failed"
    if outcome.exchange.hung_up:
        return "hung up"
    return "answered before hanging up" if outcome.planned.kind == "hangs up" else outcome.planned.kind


def describe(planned: Planned) -> str:
    """A request in a message."""
    if planned.kind == "malformed":
        return planned.what
    form = "stream" if planned.is_streamed else "answer"
    name = "chat" if planned.is_chat else "completion"
    return f"a {planned.kind} {name} {form} of {planned.num_prompt_tokens} + {planned.num_output_tokens} tokens"


def waits_and_bounds(
    outcomes: Sequence[Outcome], work_done: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each valid stream, and the seconds that the work ahead of it takes.

    Args:
        outcomes: of the round.
        work_done: tokens that the engine had computed in all, at several times.
    """
    sent = [(each.planned, each.exchange) for each in outcomes if each.exchange is not None]
    work = [
        (exchange.sent_at, exchange.ended_at or float("inf"), planned.num_prompt_tokens + planned.num_output_tokens)
        for planned, exchange in sent
    ]
    times, totals = zip(*work_done, strict=True)
    waits, bounds = [], []
    for planned, exchange in sent:
        end = exchange.first_event_at
        if planned.kind == "sound" and planned.is_streamed and end is not None:
            begin = exchange.sent_at
            ahead = sum(tokens for come, gone, tokens in work if come <= begin < gone)
            done = float(np.interp(end, times, totals) - np.interp(begin, times, totals))
            waits.append(end - begin)
            bounds.append(ahead * (end - begin) / done if done else float("inf"))
    return waits, bounds


async def watch_work(address: Address, readings: list[tuple[float, float]]) -> None:
    """Record the number of tokens that the engine has computed, repeatedly, until cancelled."""
    while True:
        readings.append((monotonic(), tokens_in(await read_metrics(address))))
        await asyncio.sleep(SECONDS_BETWEEN_READINGS)


def tokens_in(metrics: dict[str, float]) -> float:
    """Tokens of prompts and outputs that the engine has computed, or found in its prefix cache."""
    return metrics["vllm:prompt_tokens_total"] + metrics["vllm:generation_tokens_total"]


# ----------------------------------------------------------------------------------------------------------- report


def report(rounds: Sequence[Round], targets: Targets) -> dict[str, Any]:
    """Tables, targets, figures."""
    rows: list[list[object]] = []
    for number, each in enumerate(rounds, 1):
        worst = max(range(len(each.bounds)), key=lambda i: each.first_token_seconds[i])
        waits = [percentile(each.first_token_seconds, share) for share in (0.5, 0.99, 1.0)]
        rows.append(
            [
                *(number, each.seconds, each.output_tokens_per_second, *waits, each.bounds[worst]),
                *(each.num_preemptions, each.server_bytes / MIB, each.engine_bytes / MIB),
                *(each.client_share, each.server_share, each.engine_share),
            ]
        )
        text = f"round {number}: the longest wait over its bound"
        targets.at_most(text, each.first_token_seconds[worst] / each.bounds[worst], 1.0)
        targets.holds(f"round {number}: {len(each.faults)} faults; target: none", not each.faults)
        idle = "nothing" if each.is_idle else "blocks or requests"
        targets.holds(f"round {number}: {idle} left over; target: nothing", each.is_idle)
        targets.holds(f"round {number}: {each.num_preemptions} preemptions; target: some", each.num_preemptions > 0)
    header = ["round", "seconds", "output tokens/s", "TTFT p50", "p99", "worst", "its bound"]
    header += ["preemptions", "API MiB", "engine MiB", "client cores", "API", "engine"]
    print_table("load", header, rows)
    for number, each in enumerate(rounds, 1):
        note(f"  round {number}: " + ", ".join(f"{count} {what}" for what, count in sorted(each.counts.items())))
        for fault in each.faults[:SHOWN_FAULTS]:
            note(f"    {fault}")
    for name, sizes in (
        ("API", [each.server_bytes for each in rounds]),
        ("engine", [each.engine_bytes for each in rounds]),
    ):
        growth = sizes[-1] - sizes[0]
        allowed = max(GROWTH_BYTES, MAX_GROWTH * sizes[0])
        text = f"the {name} process grew by {growth / MIB:.1f} MiB after round 1; target: at most {allowed / MIB:.1f}"
        targets.holds(text, growth <= allowed)
    return {"rounds": [figures_of(each) for each in rounds]}


def figures_of(each: Round) -> dict[str, Any]:
    worst = max(range(len(each.bounds)), key=lambda i: each.first_token_seconds[i])
    return {
        "seconds": round(each.seconds, 2),
        "counts": each.counts,
        "faults": len(each.faults),
        "output_tokens_per_second": round(each.output_tokens_per_second, 1),
        "ttft_p50": round(percentile(each.first_token_seconds, 0.5), 3),
        "ttft_p99": round(percentile(each.first_token_seconds, 0.99), 3),
        "ttft_worst": round(each.first_token_seconds[worst], 3),
        "ttft_worst_bound": round(each.bounds[worst], 3),
        "preemptions": each.num_preemptions,
        "blocks_returned": each.is_idle,
        "api_mib": round(each.server_bytes / MIB, 1),
        "engine_mib": round(each.engine_bytes / MIB, 1),
        "client_cores": round(each.client_share, 3),
        "api_cores": round(each.server_share, 3),
        "engine_cores": round(each.engine_share, 3),
    }


async def measure(server: ServerProcess, address: Address, plans: list[list[Planned]], num_streams: int) -> list[Round]:
    """Warm up, then all rounds."""
    await serve_all(address, plan(20, MODEL, seed=10_000), num_streams)
    rounds = []
    for planned in plans:
        rounds.append(await run_round(server, address, planned, num_streams))
        note(f"  round {len(rounds)}: {rounds[-1].seconds:.1f} s, {len(rounds[-1].faults)} faults")
    return rounds


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--requests", type=int, help="of a round (2,000; quick: 200)")
    parser.add_argument("--streams", type=int, help="open at once (500; quick: 50)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of lengths, kinds and moments")
    arguments = parser.parse_args()
    num_requests = arguments.requests or (200 if arguments.quick else 2000)
    num_streams = arguments.streams or (50 if arguments.quick else 500)
    plans = [plan(num_requests, MODEL, arguments.seed + number) for number in range(arguments.rounds)]

    pool = {"--num-blocks": NUM_BLOCKS, "--block-size": BLOCK_SIZE, "--max-model-len": MAX_MODEL_LEN}
    step = {"--max-num-seqs": MAX_NUM_SEQS, "--max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS}
    options = [str(word) for pair in (pool | step).items() for word in pair]
    server = start_server("--model", MODEL, *options)
    note(f"{num_requests} requests a round, {num_streams} at once, {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens")
    try:
        rounds = run_async(measure(server, ("127.0.0.1", server.port), plans, num_streams))
    finally:
        server.stop()
    targets = Targets()
    figures = report(rounds, targets)
    setting = {"quick": arguments.quick, "requests": num_requests, "streams": num_streams, "seed": arguments.seed}
    return finish("server_load", {**setting, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
