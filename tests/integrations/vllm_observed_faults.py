"""Faults of a recording, which must not reach vLLM: a script for the environment with vLLM.

python vllm_observed_faults.py   prints one JSON line
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _scheduler_worker import Settings
from _vllm_worker import VllmSession
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from pointsman.core import ConfigError
from pointsman.integrations.vllm import Observer
from pointsman.integrations.vllm.simulated import lacking_in_simulator
from tests.integrations.vllm_configs import vllm_config

SETTINGS = Settings(num_blocks=200, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)


class Observed(VllmSession):
    """vLLM's scheduler with Observer."""

    scheduler_class = Observer


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def serve(kind: type[VllmSession], record: str | None, *, breaks: bool = False) -> dict[str, Any]:
    """Requests, with time between them for the thread that writes."""
    heard = Warnings()
    logger = logging.getLogger("vllm.pointsman")
    logger.addHandler(heard)
    kind.additional_config = {} if record is None else {"pointsman": {"record": record}}
    session = kind(SETTINGS)
    finished = 0
    for number in range(20):
        session.add(session.make_request(f"r{number}", session.tokens(20), 5))
        while sum(session.counts()):
            output = session.schedule()
            result = session.result(output)
            if breaks and number == 10 and session.scheduler._observation is not None:
                session.scheduler._observation._in_flight.clear()
            for client in session.update(output, result).values():
                finished += sum(each.finish_reason is not None for each in client.outputs)
        time.sleep(0.01)
    goes_on = getattr(session.scheduler, "_observation", None) is not None
    session.scheduler.shutdown()
    logger.removeHandler(heard)
    return {"finished": finished, "warnings": heard.texts, "recording": goes_on}


def lacking(*groups: Any) -> list[str]:
    kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups])
    return lacking_in_simulator(vllm_config(), kv_cache_config, block_size=4)


def main() -> None:
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=16)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {
            "own": serve(VllmSession, None),
            "full disk": serve(Observed, "/dev/full"),
            "no folder": serve(Observed, f"{folder}/absent/recording.jsonl"),
            "mistake": serve(Observed, str(Path(folder) / "recording.jsonl"), breaks=True),
        }
    Observed.additional_config = {"pointsman": {"victim": "latest"}}
    try:
        Observed(SETTINGS)
    except ConfigError as error:
        found["drop-in knob"] = str(error)
    found["groups that are simulated"] = [*lacking(window), *lacking(full, window)]
    found["blocks of two sizes"] = lacking(full, replace(window, block_size=8))
    found["states"] = lacking(full, MambaSpec(block_size=4, shapes=((2, 2),), dtypes=(torch.float32,)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
