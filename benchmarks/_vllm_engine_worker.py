"""Worker of `vllm_engine.py`: a vLLM with one scheduler that executes commands from its standard input.

The engine core is in a process of its own, as behind vLLM's server. This process is the front end, which is not
counted;
it makes no text.

    {"command": "open", "scheduler": "...", "model": "...", "running": 64, "max_model_len": 1024}  -> {"version": "..."}
    {"command": "run", "name": "...", "prompts": [[...]], "max_tokens": 256, "timed": false}  -> {"core": ..., ...}
    {"command": "idle", "seconds": 1.0}  -> {"core": ...}
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import json
import sys
from hashlib import blake2b
from time import perf_counter, sleep
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, __version__
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind


def open_engine(command: dict[str, Any]) -> LLMEngine:
    """vLLM's defaults, with statistics, without compilation, and with the model runner in the engine core's process.

    On a GPU it is there, too. vLLM's CPU platform moves it to a process of its own, and each of the two spins while it
    waits for the other, so their CPU time would mean nothing.
    """
    config = EngineArgs(
        model=command["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=command["max_model_len"],
        max_num_seqs=command["running"],
        enable_prefix_caching=True,
        scheduler_cls=f"_vllm_timed_schedulers.{command['scheduler']}",
        worker_extension_cls="_vllm_timed_schedulers.CoreClock",
    ).create_engine_config()
    config.parallel_config.distributed_executor_backend = "uni"
    return LLMEngine.from_vllm_config(config, disable_log_stats=False)


def serve_all(engine: LLMEngine, name: str, prompts: list[list[int]], max_tokens: int, timed: bool) -> dict[str, Any]:
    """All prompts at once, greedily; `timed`: with a clock on the scheduler.

    Returns:
        From the time when the engine core has all requests to the last output: CPU seconds of its process and of the
        scheduler in it, steps and output tokens. From the first output to the last: seconds by the clock. And a digest
        of all tokens.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{number}", TokensPrompt(prompt_token_ids=prompt), params)
    finished = engine.step()
    first, before = perf_counter(), _clock(engine, timed)  # asked in line, behind the requests
    while engine.has_unfinished_requests():
        finished += engine.step()
    wall, after = perf_counter() - first, _clock(engine)
    tokens = {output.request_id: list(output.outputs[0].token_ids) for output in finished}
    lengths = sorted({len(some) for some in tokens.values()})
    if len(tokens) != len(prompts) or lengths != [max_tokens]:
        raise RuntimeError(f"{len(tokens)} of {len(prompts)} requests were answered, with {lengths} tokens")
    measured = {key: after[key] - before[key] for key in before}
    total = len(prompts) * max_tokens
    if measured["tokens"] < total / 2:
        raise RuntimeError(
            f"the front end came so late that {measured['tokens']:.0f} of {total} tokens were measured; run this while "
            "the machine does less"
        )
    digest = blake2b(json.dumps(sorted(tokens.items())).encode(), digest_size=8).hexdigest()
    return {"seconds": wall, "digest": digest} | measured


def run_without_requests(engine: LLMEngine, seconds: float) -> dict[str, Any]:
    """CPU seconds of the engine core's process while it is idle."""
    before = _clock(engine)
    sleep(seconds)
    return {"core": _clock(engine)["core"] - before["core"]}


def _clock(engine: LLMEngine, timed: bool = False) -> dict[str, float]:
    (answer,) = engine.collective_rpc("core_clock", args=(timed,))
    return dict(answer)


def answer(engine: LLMEngine, command: dict[str, Any]) -> dict[str, Any]:
    """The result of a command for an open engine."""
    if command["command"] == "idle":
        return run_without_requests(engine, command["seconds"])
    return serve_all(engine, command["name"], command["prompts"], command["max_tokens"], command["timed"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries
    engine: LLMEngine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if engine is None:
            engine, told = open_engine(command), {"version": __version__}
        else:
            told = answer(engine, command)
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":  # vLLM starts its engine core with "spawn", which imports this file again
    main()
