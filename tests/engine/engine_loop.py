"""Driving an engine to the end of its requests."""

from __future__ import annotations

from pointsman.engine import Engine, RequestOutput


def drain(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_invariants()
    return done


def free_blocks(engine: Engine) -> int:
    return engine.scheduler.stats().num_free_blocks
