"""Runs a log of real vLLM through the commands that make a capacity figure from it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli import main
from pointsman.traces import Observed, read_observed


def pointsman(*words: object) -> str:
    """The output of a command, run in this process, without vLLM."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert not ended.value.code, (words, printed.getvalue())
    return printed.getvalue()


def last_json(printed: str) -> dict[str, Any]:
    return dict(json.loads(printed.splitlines()[-1]))


def check_commands(log: Path, folder: Path, *options: object) -> dict[str, Any]:
    """Run a log through calibrate, simulate and capacity; returns the report of the simulation."""
    profile = folder / "profile.json"
    fitted = last_json(pointsman("calibrate", log, *options, "--output", profile, "--json"))
    assert fitted["num_train"] > 0 and fitted["step_time"]["per_step"] >= 0
    given = ("--trace", log, "--profile", profile, "--json")
    report = last_json(pointsman("simulate", *given))
    assert report["counts"]["finished"] == report["counts"]["arrived"] > 0
    capacity = last_json(pointsman("capacity", *given, "--ttft-target", "60s", "--itl-target", "20s", "--samples", "2"))
    assert capacity["loads"], capacity
    return report


def check_observed(log: Path, requests: list[dict[str, Any]], ran: dict[str, Any]) -> Observed:
    """Check that a recording has these requests, with their outcomes in a run of `vllm_run.py`."""
    observed = read_observed(log)
    sent = sorted(requests, key=lambda request: request["step"])
    assert len(observed.requests) == len(sent)
    for request, expected in zip(observed.requests, sent, strict=True):
        answer = ran["answers"][expected["id"]]
        assert request.num_prompt_tokens == len(expected["prompt"])
        if answer["reason"] != "aborted":
            assert request.num_output_tokens == len(answer["tokens"])
            assert observed.lacking or request.num_runs_tokens == len(answer["tokens"])
    recorded = sum(request.num_preemptions for request in observed.requests)
    assert recorded == ran["metrics"]["vllm:num_preemptions"]
    return observed


def check_recording(log: Path, observed: Observed, folder: Path) -> None:
    """It gives a capacity figure and a comparison, or is refused with the features that the simulator lacks."""
    if observed.lacking:
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(io.StringIO()) as said:
            main(["vllm", "compare", str(log)])
        assert ended.value.code == 2 and observed.lacking[0] in said.getvalue()
        return
    report = check_commands(log, folder)
    assert report["counts"]["arrived"] == sum(request.num_output_tokens > 0 for request in observed.requests)
    compared = last_json(pointsman("vllm", "compare", log, "--json", "--limit", 40))
    assert compared["rows"]["vLLM, measured"]["itl_p50"] > 0
    assert compared["check"]["num_requests"] == compared["num_requests"] == 40
