"""Requests through real vLLM, step by step, with its own scheduler or ours: a script for the environment with vLLM.

    python vllm_run.py SETTINGS.json   prints one JSON line

The engine core runs in this process, so that requests are added and aborted at the same steps with both schedulers.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

OURS = "pointsman.integrations.vllm.Scheduler"
OBSERVER = "pointsman.integrations.vllm.Observer"


def force_async_scheduling() -> None:
    """Undo a setting of vLLM's CPU platform: it turns asynchronous scheduling off."""
    from vllm.platforms.cpu import CpuPlatform

    hook = CpuPlatform.check_and_update_config.__func__

    def forced(cls: Any, vllm_config: Any) -> None:
        hook(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(forced)


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    given = dict(given)
    regex = given.pop("regex", None)
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    kind = RequestOutputKind.CUMULATIVE
    return SamplingParams(temperature=0.0, output_kind=kind, structured_outputs=structured, **given)


def run(engine: LLMEngine, requests: list[dict[str, Any]], aborts: dict[str, int], *, by_clock: bool) -> dict[str, Any]:
    """Run all requests, each added before its step; the outcome of each.

    Args:
        by_clock: they arrive when they are added; otherwise a second after each other.
    """
    found: dict[str, dict[str, Any]] = {}
    waiting = sorted(requests, key=lambda request: request["step"])
    abort_at: dict[int, list[str]] = {}
    for name, step in aborts.items():
        abort_at.setdefault(step, []).append(name)
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0]["step"] <= step:
            request = waiting.pop(0)
            engine.add_request(
                request["id"],
                TokensPrompt(prompt_token_ids=request["prompt"]),
                sampling_params(request["params"]),
                priority=request.get("priority", 0),
                arrival_time=None if by_clock else float(len(requests) - len(waiting)),
            )
        for name in abort_at.get(step, []):
            if not found.get(name, {}).get("reason"):
                engine.abort_request([name])
                found.setdefault(name, {"tokens": [], "stop": None})["reason"] = "aborted"
        for output in engine.step():
            completion = output.outputs[0]
            if found.get(output.request_id, {}).get("reason") == "aborted":
                continue
            found[output.request_id] = {
                "tokens": list(completion.token_ids),
                "reason": completion.finish_reason,
                "stop": completion.stop_reason,
            }
        step += 1
    for _ in range(3):  # the workers get the last ends
        engine.step()
    return {"answers": found, "steps": step}


def compile_at_once(grammars: Any, seconds: float) -> None:
    """Compile a grammar when its request is added, and take this many seconds longer. vLLM compiles it in another
    thread while steps continue, so admissions would depend on the speed of the machine: with priorities, on whether an
    arriving request is ahead of others or has yet to be compiled."""
    submit = grammars.executor.submit

    def compiled(create: Any, request: Any) -> Any:
        time.sleep(seconds)
        future = submit(create, request)
        wait([future])
        return future

    grammars.executor.submit = compiled


def lose_tokens(scheduler: Any, share: float) -> None:
    """Return an empty list for some rows that sample, as if the model runner had discarded their tokens."""
    update, rng = scheduler.update_from_output, random.Random(1)

    def lossy(output: Any, result: Any) -> Any:
        for run in result.sampled_token_ids:
            if rng.random() < share:
                run.clear()
        return update(output, result)

    scheduler.update_from_output = lossy


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    if settings["async"]:
        force_async_scheduling()
    options = {"socket": "", "record": settings["record"]}
    arguments = {"scheduler_cls": OURS, "additional_config": {"pointsman": options}} if settings["ours"] else {}
    if path := settings["observed"]:
        arguments = {"scheduler_cls": OBSERVER, "additional_config": {"pointsman": {"record": path}}}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=settings["model"],
            dtype="float32",
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            **arguments,
            **settings["engine"],
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    compile_at_once(engine.engine_core.engine_core.structured_output_manager, settings["compile_seconds"])
    if settings["lossy"]:
        lose_tokens(scheduler, settings["lossy"])
    found = run(engine, settings["requests"], settings["aborts"], by_clock=bool(settings["observed"]))
    found["usage"] = scheduler.get_kv_cache_usage()
    found["counts"] = scheduler.get_request_counts()
    found["scheduler"] = type(scheduler).__module__
    found["bases"] = [kind.__name__ for kind in type(scheduler).__mro__]
    scheduler.shutdown()
    if settings["ours"]:
        stats = scheduler.core.stats()
        found["displaced"], found["unsampled"] = stats.num_displaced, stats.num_preempted_unsampled
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    found["metrics"] = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
