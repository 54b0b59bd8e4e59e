"""Policies that fail in real vLLM, each in an engine of its own: a script for the environment with vLLM.

    python vllm_failing_policies.py SETTINGS.json   prints one JSON line

What became of the requests, what the log says, and what the control socket answers while they run and at the end.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from vllm import EngineArgs, LLMEngine
from vllm.inputs import TokensPrompt

from pointsman.integrations.vllm.client import connect
from tests import faulty_policies
from tests.integrations.vllm_run import OURS, force_async_scheduling, sampling_params

ASKED_AT = 125
"""The step before which the requests are explained."""


class Log(logging.Handler):
    """Keeps log messages, with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def answers(engine: LLMEngine, requests: list[dict[str, Any]], socket: str) -> tuple[dict[str, Any], Any]:
    """The outputs of the requests, and their explanations while they ran."""
    for index, request in enumerate(requests):
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        engine.add_request(request["id"], prompt, sampling_params(request["params"]), arrival_time=float(index))
    found: dict[str, Any] = {}
    explained, step = None, 0
    while engine.has_unfinished_requests():
        if step == ASKED_AT and socket:
            with connect(socket) as connection:
                explained = connection.ask("explain", id=None, limit=100)["requests"]
        for output in engine.step():
            completion = output.outputs[0]
            found[output.request_id] = {"tokens": list(completion.token_ids), "reason": completion.finish_reason}
        step += 1
    return found, explained


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    with faulty_policies.installed(Path(sys.argv[1]).with_suffix(".packages")):
        print(json.dumps(run(settings)))


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run all requests in an engine with these policies."""
    if settings["async"]:
        force_async_scheduling()
    log = Log()
    logging.getLogger("pointsman").addHandler(log)
    options = {"socket": settings["socket"], "record": settings["record"], **settings["knobs"]}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=settings["model"],
            dtype="float32",
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            scheduler_cls=OURS,
            additional_config={"pointsman": options},
            **settings["engine"],
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    found, explained = answers(engine, settings["requests"], settings["socket"])
    metrics = None
    if settings["socket"]:
        with connect(settings["socket"]) as connection:
            metrics = connection.ask("metrics")
    scheduler.shutdown()
    said = {"log": log.lines, "explained": explained, "metrics": metrics, "usage": scheduler.get_kv_cache_usage()}
    preemptions = scheduler.core.stats().num_preemptions
    return {"answers": found, "preemptions": preemptions, **said}


if __name__ == "__main__":
    main()
