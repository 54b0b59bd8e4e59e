"""AISimulate's side of `simulator.py`, to be run in the environment that `aisimulate_env.py` makes.

Replies to a JSON line of its standard input, which describes a replay, with one JSON line. Imports and the compilation
of the replay are not timed. The replay is the first of its process, as when a user runs it: AISimulate computes its
step times while it replays.
"""

from __future__ import annotations

import json
import os
import sys
from time import process_time
from typing import Any

from aisimulate.compiler import prediction_to_replay_spec
from aisimulate.config.cli import CorePredictionConfig
from aisimulate.runner import EngineReplayRunnerFactory


class Session:
    """One replay."""

    def __init__(self, trace: str, block_size: int, settings: dict[str, Any], engine: dict[str, Any]) -> None:
        """`trace`: a file in Mooncake's format, with a hash for each block of `block_size` tokens."""
        worker = {
            "scheduler": {
                "max_batched_tokens": settings["max_num_batched_tokens"],
                "max_sequences": settings["max_num_seqs"],
            },
            "kv_cache": {
                "block_size": block_size,
                "prefix_caching": settings["enable_prefix_caching"],
                "capacity": {"type": "fixed", "blocks": settings["num_blocks"]},
            },
            "timing": {"type": engine["timing"]},
        }
        config = {
            "traffic": {
                "source": {"type": "trace", "paths": [trace], "format": "mooncake", "block_size": block_size},
                "load": {"type": "trace_timestamps"},
            },
            "engine": {
                "mode": "aggregated",
                "model": engine["model"],
                "hardware": engine["hardware"],
                "backend": "vllm",
                "context_length": settings["max_model_len"],
                "workers": {"aggregated": worker},
            },
        }
        self._spec = prediction_to_replay_spec(CorePredictionConfig.model_validate(config))
        self._runner = EngineReplayRunnerFactory().create(worker_id=0)

    def replay(self) -> dict[str, Any]:
        """CPU seconds of one replay, the requests that it completed, and the mean time between their tokens."""
        start = process_time()
        report = self._runner.run(self._spec)
        seconds = process_time() - start
        metrics = report.metrics
        return {
            "seconds": seconds,
            "completed": int(metrics["completed_requests"]),
            "mean_itl": metrics["mean_itl_ms"] / 1e3,
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output goes to standard error
    for line in sys.stdin:
        described = json.loads(line)
        del described["command"]  # there is only one command
        answers.write(json.dumps(Session(**described).replay()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
