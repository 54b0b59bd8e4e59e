"""Prediction of a real model's server by its profile: runs of `calibration.py` through HTTP, with pieces of real text.

Two things differ from the runs of the bundled engine there. An API process, which the simulator does not have, lies
between the client and the scheduler. And prompts are pieces of Python's documentation, completed by the model.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from _common import Targets, note
from _open_loop import TokenTimes
from _real_texts import documentation
from _server_client import BrokenAnswer, Exchange, post, start
from _server_probe import run_async
from _server_process import ServerProcess, start_server
from calibration import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, judge, measure

from pointsman.engine.text.tokenizer import encode
from pointsman.sim.step_log import StepLog, read_steps
from pointsman.traces import TraceRequest

ROUNDS, NUM_REQUESTS = 3, 60
SECONDS_TO_START, SECONDS_TO_ANSWER = 240.0, 600.0
TEXT_CHARACTERS = 200_000
BLOCK_SIZE = 32


class ServerHost:
    """A server with a real model, as a `Host` of `calibration.py`.

    Args:
        server: a server that records.
        recording: the file of its recording.
        model: name of its model.
        text: tokens from which prompts are cut.
    """

    def __init__(self, server: ServerProcess, recording: Path, model: str, text: Sequence[int]) -> None:
        self.title = f"the server of {model}"
        self._server = server
        self._recording = recording
        self._model = model
        self._text = text
        self._num_requests: list[int] = []

    def serve(self, sent: Sequence[TraceRequest], seed: int) -> TokenTimes:
        """Stream the requests at their times; each prompt is a piece of text from a random place."""
        self._num_requests.append(len(sent))
        rng = np.random.default_rng(seed)
        requests = []
        for each in sent:
            begin = int(rng.integers(len(self._text) - each.num_prompt_tokens))
            prompt = self._text[begin : begin + each.num_prompt_tokens]
            requests.append(post("/v1/completions", self._body(prompt, each.num_output_tokens)))
        times: TokenTimes = run_async(self._stream(requests, [each.arrival_time for each in sent]))
        return times

    def _body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }

    async def _stream(self, requests: Sequence[bytes], arrivals: Sequence[float]) -> TokenTimes:
        begin = monotonic()

        async def one(request: bytes, arrival: float) -> list[float]:
            await asyncio.sleep(max(0.0, begin + arrival - monotonic()))
            exchange = await start(("127.0.0.1", self._server.port), request)
            await exchange.end(SECONDS_TO_ANSWER)
            return [moment - begin for moment in token_times(exchange)]

        return list(await asyncio.gather(*map(one, requests, arrivals)))

    def close(self) -> list[StepLog]:
        self._server.stop()
        return [read_steps(part) for part in parts_of(self._recording, self._num_requests)]


def token_times(exchange: Exchange) -> list[float]:
    """The time of each token of a stream with `return_token_ids`, in seconds of `monotonic`.

    Raises:
        BrokenAnswer: an event is not one of a completion.
    """
    found: list[float] = []
    rest = b""
    for moment, piece in zip(exchange.times, exchange.pieces, strict=True):
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            _, is_event, data = event.partition(b"data: ")
            if not is_event or data.startswith(b"[DONE]"):
                continue
            try:
                choices = json.loads(data)["choices"]
            except (ValueError, KeyError) as error:
                raise BrokenAnswer(f"no completion chunk ({error!r}): {data[:200]!r}") from None
            found += [moment] * sum(len(choice["token_ids"] or ()) for choice in choices)
    return found


def parts_of(recording: Path, num_requests: Sequence[int]) -> list[Path]:
    """A recording in parts with these numbers of requests, one file a part; the server was idle between two parts."""
    header, *lines = recording.read_text(encoding="utf-8").splitlines(keepends=True)
    ends = np.cumsum(num_requests).tolist()
    parts: list[list[str]] = [[] for _ in num_requests]
    number = num_added = 0
    for line in lines:
        if json.loads(line).get("call") == "add":
            num_added += 1
            number += num_added > ends[number]
        parts[number].append(line)
    files = []
    for number, part in enumerate(parts):
        files.append(recording.with_name(f"{recording.stem}-{number}.jsonl"))
        files[-1].write_text(header + "".join(part), encoding="utf-8")
    return files


def measure_prediction(
    model: str, tokenizer: Any, rounds: int | None, num_requests: int | None, targets: Targets
) -> dict[str, Any]:
    """Measure how well the profile predicts the server; returns the figures, as in `calibration.py`."""
    text = encode(tokenizer, documentation(TEXT_CHARACTERS), add_special_tokens=False)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "server.jsonl"
        options = {
            "--model": model,
            "--threads": 1,
            "--max-model-len": MAX_MODEL_LEN,
            "--num-blocks": MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
            "--block-size": BLOCK_SIZE,
            "--max-num-seqs": MAX_NUM_SEQS,
            "--max-num-batched-tokens": MAX_NUM_BATCHED_TOKENS,
            "--record": recording,
        }
        note("prediction: the server starts")
        with start_server(
            *(str(part) for pair in options.items() for part in pair), timeout=SECONDS_TO_START
        ) as server:
            host = ServerHost(server, recording, model, text)
            pairs = measure(host, rounds or ROUNDS, num_requests or NUM_REQUESTS)
    return judge(host.title, pairs, targets)
