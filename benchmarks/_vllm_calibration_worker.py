"""vLLM's side of `calibration.py` and `policies_live.py`, in the environment that `vllm_env.py` makes.

vLLM's engine core, its scheduler under `Observer` and the model runner are in this process, which is also their client.
As with the bundled engine, no other process takes the processor from them, and nothing lies between a client and the
scheduler. No text is made.

    {"command": "open", "model": "...", "record": "...", "settings": {"max_num_seqs": 16, ...}}  -> {"version": "..."}
        or instead of "record": "scheduler": "...", "additional": {content of --additional-config}
    {"command": "run", "arrivals": [0.0, ...], "prompts": [[...], ...], "num_output_tokens": [...]}
        and, if they matter, "tenants": ["...", ...]
        -> {"tokens": [[seconds from the start, one for each token], ...]}
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import json
import sys
from collections.abc import Sequence
from time import time
from typing import Any

from _open_loop import TokenTimes, send
from vllm import EngineArgs, LLMEngine, SamplingParams, __version__
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

OBSERVER = "pointsman.integrations.vllm.Observer"


def open_engine(command: dict[str, Any]) -> LLMEngine:
    """vLLM's defaults for a CPU, without compilation, observed."""
    config = EngineArgs(
        model=command["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        scheduler_cls=command.get("scheduler", OBSERVER),
        additional_config={"pointsman": command.get("additional") or {"record": command["record"]}},
        **command["settings"],
    ).create_engine_config()
    config.parallel_config.distributed_executor_backend = "uni"
    return LLMEngine.from_vllm_config(config)


def serve(
    engine: LLMEngine,
    arrivals: Sequence[float],
    prompts: Sequence[list[int]],
    num_output_tokens: Sequence[int],
    tenants: Sequence[str],
) -> TokenTimes:
    """Send all requests at their times; returns the times of each request's tokens."""

    def add(number: int, late: float) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_output_tokens[number],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"pointsman_tenant": tenants[number]} if tenants else None,
        )
        prompt = TokensPrompt(prompt_token_ids=prompts[number])
        engine.add_request(str(number), prompt, params, arrival_time=time() - late)

    def step() -> list[tuple[int, int]]:
        return [(int(each.request_id), len(each.outputs[0].token_ids)) for each in engine.step()]

    return send(arrivals, add, step, engine.has_unfinished_requests)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries
    engine: LLMEngine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        told: dict[str, Any]
        if engine is None:
            engine, told = open_engine(command), {"version": __version__}
        else:
            asked = [command[name] for name in ("arrivals", "prompts", "num_output_tokens")]
            told = {"tokens": serve(engine, *asked, command.get("tenants", []))}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
